"""Weights & Biases, MLflow and Trackio get every row of a run once, without a network; each is read
back by its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from unittest import mock

import pytest

from megatron_dppo.bridge.checkpoint_folder import TRACKER
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.observe import loggers
from megatron_dppo.observe.loggers import check_loggers
from megatron_dppo.observe.metrics import MetricsLog, read_metrics
from megatron_dppo.settings import as_yaml
from megatron_dppo.train import train
from tests.commands import Command
from tests.ranks import RankPool
from tests.small_runs import small_run, write_run

pytestmark = pytest.mark.xdist_group("observe/test_loggers")

ALONE = {"WANDB_MODE": "offline", "HOME": "/nowhere"}
"""No account is found."""
HERE = ("wandb", "mlflow", "trackio")


def _read_wandb(run: Path) -> dict[int, dict[str, float]]:
    """The rows of all offline files of a run, which have one id. A step that comes twice is an
    error."""
    from wandb.proto import wandb_internal_pb2

    rows: dict[int, dict[str, float]] = {}
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1
    for file in files:
        for record in _records(file.read_bytes()):
            parsed = wandb_internal_pb2.Record.FromString(record)
            if parsed.HasField("history"):
                row = {
                    "/".join(i.nested_key) or i.key: json.loads(i.value_json)
                    for i in parsed.history.item
                }
                step = int(row.pop("_step"))
                assert step not in rows
                rows[step] = {key: value for key, value in row.items() if not key.startswith("_")}
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    """Of a file in LevelDB's log format: blocks of 32 KiB with records of a checksum, a length and
    a type."""
    at, whole = 7, b""  # behind the file's own header
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole


def _read_mlflow(run: Path) -> dict[int, dict[str, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run}/mlflow.db")
    (experiment,) = [
        found for found in client.search_experiments() if found.name == "megatron_dppo"
    ]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    assert found.data.params["run.steps"]
    rows: dict[int, dict[str, float]] = {}
    for key in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, key):
            row = rows.setdefault(metric.step, {})
            assert key not in row
            row[key.replace("_at_", "@")] = metric.value
    return rows


def _read_trackio(run: Path) -> dict[int, dict[str, float]]:
    read = (
        "import json, trackio\n"
        "(run,) = trackio.Api().runs('megatron_dppo')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "print(json.dumps(SQLiteStorage.get_logs('megatron_dppo', run.name)))"
    )
    environ = os.environ | {"TRACKIO_DIR": str(run / "trackio")}
    said = subprocess.run(
        [sys.executable, "-c", read], env=environ, capture_output=True, text=True, check=True
    )
    rows = json.loads(said.stdout.splitlines()[-1])
    assert len({row["step"] for row in rows}) == len(rows)
    return {
        row.pop("step"): {key: value for key, value in row.items() if key != "timestamp"}
        for row in rows
    }


READ = {"wandb": _read_wandb, "mlflow": _read_mlflow, "trackio": _read_trackio}


installed = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in HERE),
    reason="wants the extras wandb, mlflow and trackio",
)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and of a third one by the same command, which has lost its last
    checkpoint and makes the second again; MLflow is named only then."""
    place = tmp_path_factory.mktemp("real")
    folder, run = write_run(place), place / "run"
    own = (
        "layout.dp=1",
        "rollout.launch.env=[SECRET_KEY=hunter2]",
        "eval.samples=2",
        "run.checkpoint_every=1",
    )
    for steps, names in ((2, "wandb,trackio"), (3, ",".join(HERE))):
        config = small_run(
            folder, run, *own, f"run.steps={steps}", f"run.loggers=[tensorboard,{names}]"
        )
        (place / "run.yaml").write_text(as_yaml(config))
        command = Command(
            ["megatron-dppo", "train", str(place / "run.yaml")], place / "log", environ=ALONE
        )
        assert command.exit_code() == 0, (place / "log").read_text()
        if steps == 2:
            shutil.rmtree(run / "checkpoints/iter_0000002")
            (run / "checkpoints" / TRACKER).write_text("1")
    return run


@installed
@pytest.mark.parametrize("name", HERE)
def test_resumed_run_is_read_back_as_its_metrics(name: str, real: Path) -> None:
    """Each step once. Of the one that was made twice they keep the times that it took at first."""
    written = {row.pop("step"): row for row in read_metrics(real)}
    read = READ[name](real)
    for rows in (written, read):
        rows[2] = {key: value for key, value in rows[2].items() if not key.startswith("perf/")}
    assert written.keys() == {0, 1, 2, 3} and any("pass@2" in key for key in written[2])
    assert read == written


@installed
def test_no_logger_receives_the_servers_environment(real: Path) -> None:
    assert "hunter2" in (real / "config.yaml").read_text()
    told = [
        file
        for folder in ("wandb", "trackio")
        for file in (real / folder).rglob("*")
        if file.is_file()
    ]
    told += [real / "mlflow.db", *(real / "tensorboard").iterdir()]
    assert len(told) > 4
    assert [file for file in told if b"hunter2" in file.read_bytes()] == []


class _Memory:
    """A logger that keeps rows in a list, and fails when it is told to. It stands in for what a
    network does."""

    rows: ClassVar[list[tuple[str, int]]] = []
    fails_at: ClassVar[list[int]] = []
    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, folder: Path, settings: Mapping[str, Any], run: str | None) -> None:
        self.settings |= settings
        self.run = run or f"run {len(self.rows)}"

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if step in self.fails_at:
            raise ConnectionError("https://me:hunter2@host is away")
        self.rows.append((self.run, step))

    def close(self, *, finished: bool) -> None:
        self.rows.append(("finished" if finished else "ended early", len(self.rows)))
        raise ConnectionError("still away")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Memory]]:
    monkeypatch.setitem(loggers._OPEN, "wandb", _Memory)
    monkeypatch.setattr(loggers, "check_loggers", lambda names: None)
    yield _Memory
    _Memory.rows.clear()
    _Memory.fails_at.clear()
    _Memory.settings.clear()


def _write(
    folder: Path, resume_step: int, steps: Sequence[int], named: Sequence[str] = ("wandb",)
) -> list[str]:
    said: list[str] = []
    settings = {
        "rollout.launch.env": ["KEY=hunter2"],
        "rollout.engine": "sglang",
        "loss.distillation.teacher": "http://host",
        "data.chat_template_kwargs": {"key": "hunter2"},
        "data.train": "s3://a:hunter2@host/b",
    }
    log = MetricsLog(folder, resume_step, loggers=named, settings=settings, log=said.append)
    for step in steps:
        log.write(step, {"a": 1.0})
    log.close()
    return said


def _given(memory: type[_Memory]) -> list[tuple[str, int]]:
    return [(run, step) for run, step in memory.rows if run.startswith("run")]


def _collapse(rank: int, size: int, config: Config) -> list[str]:
    """What a logger was told by a run that ends early, since no step has anything to train on."""
    with (
        mock.patch.dict(loggers._OPEN, {"wandb": _Memory}),
        mock.patch.object(loggers, "check_loggers"),
    ):
        with pytest.raises(UserError, match="max_idle_steps"):
            train(config)
        return [said for said, _ in _Memory.rows]


def test_early_end_closes_loggers(ranks: RankPool, tmp_path: Path) -> None:
    """Some send their rows later, and a rank that fails ends at once."""
    equal = f"reward.function={tmp_path / 'equal'}.py:compute_score"
    own = ("layout.dp=1", equal, "run.loggers=[wandb]", "run.max_idle_steps=1")
    config = small_run(write_run(tmp_path), tmp_path / "run", *own)
    (told,) = ranks.run(1, _collapse, config)
    assert told[-2:] == ["run 0", "ended early"] and "finished" not in told


def test_refused_row_is_sent_again_and_noted(tmp_path: Path, memory: type[_Memory]) -> None:
    memory.fails_at.append(2)
    (first, second, closing) = _write(tmp_path, 0, [1, 2, 3])
    assert first == second and "did not accept a row" in first and "still away" in closing
    assert "https://***@host is away" in first, "nobody's password is said"
    memory.fails_at.clear()
    _write(tmp_path, 3, [4])
    assert _given(memory) == [("run 0", step) for step in (1, 2, 3, 4)]


def test_repeated_steps_are_logged_once(tmp_path: Path, memory: type[_Memory]) -> None:
    _write(tmp_path, 0, range(6))
    _write(tmp_path, 3, range(4, 8))
    assert _given(memory) == [("run 0", step) for step in range(8)]
    _write(tmp_path, 0, range(2))
    assert _given(memory)[8:] == [("run 10", 0), ("run 10", 1)]


def test_added_logger_receives_earlier_steps(tmp_path: Path, memory: type[_Memory]) -> None:
    _write(tmp_path, 0, range(4), named=())
    _write(tmp_path, 3, [4])
    assert _given(memory) == [("run 0", step) for step in range(5)]


def test_logger_receives_settings_without_secrets(tmp_path: Path, memory: type[_Memory]) -> None:
    _write(tmp_path, 0, [1])
    assert memory.settings == {"rollout.engine": "sglang", "data.train": "s3://***@host/b"}


def test_missing_package_is_refused_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_loggers(["tensorboard"])
    with pytest.raises(UserError, match=r"run\.loggers = trackio.*pip install .*\[trackio\]'"):
        check_loggers(["tensorboard", "trackio"])


def test_logger_without_connection_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise ConnectionError("http://me:hunter2@host does not answer")

    monkeypatch.setattr(loggers, "check_loggers", lambda names: None)
    monkeypatch.setitem(loggers._OPEN, "mlflow", fail)
    with pytest.raises(UserError, match=r"run\.loggers = mlflow: cannot be opened .*//\*\*\*@host"):
        _write(tmp_path, 0, [], named=("mlflow",))
