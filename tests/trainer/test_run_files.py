"""What a run finds in its own folder is taken up as it was left, or refused with its name; never a traceback."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.evaluator import HeldOutScores, ShownAnswer
from megatron_dppo.launch.rank import rank_main
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.run_logger import RunLogger
from tests.damage import DAMAGE, replaced
from tests.rollout.scripted import world_of

STEPS = 4
LOST = ("flipped", "truncated", "four bytes", "empty", "zeros", "another pickle", "another's", "foreign")
"""What leaves no whole row behind: a kill, too, leaves the beginning of a line, which is passed over."""


def settings(folder: Path) -> Config:
    return load_config(None, [f"run.dir={folder}", f"run.steps={STEPS}"])


def run(config: Config, first: int) -> None:
    """What the leader writes from a step on to the end."""
    written = RunLogger(config, world_of(1, 0), step=first, dropped_prompts=0)
    for step in range(first + 1 if first else 0, STEPS + 1):
        written.add({"rollout/raw_reward": step / 7, "perf/step_time": 0.5})
        if step in (0, STEPS):
            shown = (ShownAnswer("1+1=", f"at {step}", "2", step == STEPS),)
            written.evaluated(step, HeldOutScores({"eval/accuracy": step / STEPS}, shown, ()), {})
        written.write(step)
    written.finish()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mock.patch("megatron_dppo.report.pictures.draw_pictures"):
        folder = tmp_path_factory.mktemp("run") / "run"
        run(settings(folder), 0)
        yield folder


def outcome(config: Config, first: int) -> tuple[int, str]:
    """As a rank tells it."""
    said: list[str] = []
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(random.random())}
    with (
        mock.patch("megatron_dppo.launch.rank.JOBS", {"job": "tests.trainer.test_run_files:resume"}),
        mock.patch("megatron_dppo.launch.rank.tell", said.append),
        mock.patch.dict("os.environ", environment | {"FIRST": str(first)}),
    ):
        return rank_main("job", config), "".join(said)


def resume(config: Config) -> None:
    run(config, int(os.environ["FIRST"]))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "other JSON": lambda path: replaced(path, b'{"a": 1}\n[1, 2]\n'),
    "a line of text": lambda path: replaced(path, path.read_bytes() + b"notes\n"),
    "no text": lambda path: replaced(path, b"\x80\x04\xff\xfe\n" * 9),
    "cut short": lambda path: replaced(path, path.read_bytes()[:-7]),
    "another's": lambda path: replaced(path, b'{"step": 1, "answers": [{"prompt": 3}]}\n'),
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "pruning.jsonl", "answers.jsonl", "summary.json", "config.yaml"])
def test_whatever_became_of_a_file_of_the_run_it_goes_on_or_names_the_file(
    name: str, whole: Path, tmp_path: Path
) -> None:
    rng = random.Random(name)
    damages = {kind: (lambda path, do=do: do(path, rng)) for kind, do in DAMAGE.items() if kind != "missing"} | FOREIGN
    for kind, damage in damages.items():
        if (whole / name).stat().st_size == 0 and kind in ("flipped", "truncated"):
            continue
        folder = tmp_path / kind
        shutil.copytree(whole, folder)
        damage(folder / name)
        code, said = outcome(settings(folder), 2)
        assert code in (0, 2) and "Traceback" not in said and "crashed" not in said, (name, kind, said)
        if code == 2:
            assert said.startswith("error: run.dir = ") and name in said, (name, kind, said)
        elif name == "metrics.jsonl" and kind not in LOST:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), kind


def test_rows_are_never_left_out_in_silence(whole: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "answers.jsonl"):
        shutil.copytree(whole, tmp_path / name)
        file = tmp_path / name / name
        file.write_bytes(file.read_bytes().replace(b'"step": 0', b'"step! 0'))
        with pytest.raises(UserError) as caught:
            run(settings(tmp_path / name), 2)
        assert (caught.value.setting, caught.value.value) == ("run.dir", file)
        assert "line 1" in caught.value.problem and "move the file away" in caught.value.remedy
        file.unlink()
        run(settings(tmp_path / name), 2)
