"""A resume finds out that a file of the same name holds something else, and names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from safetensors.torch import load_file, save_file

from megatron_dppo.api import _with_functions
from megatron_dppo.config import Config, replace
from megatron_dppo.errors import UserError
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.fingerprints import (
    SAMPLE_BYTES,
    SAMPLES,
    compute_fingerprints,
    compute_weight_digests,
    list_functions_without_text,
)
from megatron_dppo.trainer.resume import PROMPTS, check_resume, is_unchanged, record_settings
from megatron_dppo.trainer.writer import FILES
from tests.trainer.test_preflight import write_marks

ROWS: list[dict[str, Any]] = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(4)]


@pytest.fixture
def config(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run that has saved step 3."""
    for name in ("policy", "teacher"):
        shutil.copytree(policy, tmp_path / name)
    write(tmp_path / "train.jsonl", ROWS)
    write(tmp_path / "more.parquet", ROWS)
    write(tmp_path / "eval.json", ROWS)
    (tmp_path / "reward.py").write_text(
        "def reward(completions): return [0.0 for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = [
        "run.dir=run",
        "model.path=policy",
        "data.train=[{path: train.jsonl}, {path: more.parquet}]",
        "data.eval={held out: eval.json}",
        "reward.function=reward.py:reward",
        "loss.distillation.teacher=teacher",
    ]
    config = load_config(None, settings)
    save(config, tmp_path / "run")
    check_resume(config)
    return config


def save(config: Config, folder: Path) -> None:
    write_marks(config, 3, {FILES: compute_fingerprints(config)})
    record_settings(folder, 0, config)


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        lines = [json.dumps(row) for row in rows]
        file.write_text(
            f"[{', '.join(lines)}]" if file.suffix == ".json" else "\n".join(lines) + "\n"
        )


def reorder(file: Path) -> None:
    write(file, [*ROWS[:2], ROWS[3], ROWS[2]])


def relabel(file: Path) -> None:
    write(file, [ROWS[0], {**ROWS[1], "label": "7"}, *ROWS[2:]])


def shorten(file: Path) -> None:
    write(file, ROWS[:3])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def train(file: Path) -> None:
    weights = load_file(file)
    weights["model.norm.weight"][3] += 0.01
    save_file(weights, file)


@pytest.mark.parametrize(
    ("change", "file", "said", "prompts"),
    [
        (reorder, "train.jsonl", "data.train[0]: train.jsonl has changed", True),
        (relabel, "more.parquet", "data.train[1]: more.parquet has changed", True),
        (shorten, "eval.json", "data.eval.held out: eval.json has changed", True),
        (lengthen, "reward.py", "reward.function: reward.py has changed", False),
        (train, "policy/model.safetensors", "model.path: model.safetensors has changed", False),
        (
            lengthen,
            "policy/chat_template.jinja",
            "model.path: chat_template.jinja has changed",
            True,
        ),
        (
            Path.unlink,
            "policy/chat_template.jinja",
            "model.path: chat_template.jinja is missing now",
            True,
        ),
        (
            Path.touch,
            "policy/added_tokens.json",
            "model.path: added_tokens.json was not there",
            True,
        ),
        (
            train,
            "teacher/model.safetensors",
            "loss.distillation.teacher: model.safetensors has changed",
            False,
        ),
    ],
)
def test_changed_file_is_refused_and_named(
    change: Callable[[Path], None],
    file: str,
    said: str,
    prompts: bool,
    config: Config,
    tmp_path: Path,
) -> None:
    change(tmp_path / file)
    with pytest.raises(UserError) as caught:
        check_resume(config)
    assert caught.value.setting == "run.dir" and "run.resume=force" in caught.value.remedy
    assert caught.value.problem.splitlines()[1:] == [said]
    forced = replace(config, run=replace(config.run, resume="force"))
    check_resume(forced)
    assert is_unchanged(tmp_path / "run", 3, forced, PROMPTS) is not prompts, (
        "other prompts begin a new order"
    )


def test_files_written_again_are_the_same(config: Config, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "policy", tmp_path / "copy")
    shutil.rmtree(tmp_path / "policy")
    (tmp_path / "copy").rename(tmp_path / "policy")
    write(tmp_path / "train.jsonl", ROWS)
    check_resume(config)
    check_resume(
        replace(config, eval=replace(config.eval, problems=0))
    )  # which then reads no held-out file


def test_large_weights_are_sampled(tmp_path: Path) -> None:
    """Eight times what is read in all: the header, both ends and stretches between are compared,
    the rest is not."""
    header = json.dumps(
        {"w": {"dtype": "F32", "shape": [2**21], "data_offsets": [0, 2**23]}}
    ).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2**23))
    seen = {compute_weight_digests(tmp_path, None)[file.name]}
    step = file.stat().st_size // SAMPLES
    for at in (8 + len(header), step + 1, 40 * step + SAMPLE_BYTES - 1, 63 * step):
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(b"x")
        seen.add(compute_weight_digests(tmp_path, None)[file.name])
    assert len(seen) == 5


def test_new_file_of_a_folder_of_prompts_is_named(config: Config, tmp_path: Path) -> None:
    (folder := tmp_path / "rows").mkdir()
    write(folder / "a.jsonl", ROWS)
    of_folder = load_config(None, [], {**config.model_dump(), "data": {"train": str(folder)}})
    save(of_folder, tmp_path / "run")
    check_resume(of_folder)
    write(folder / "b.parquet", ROWS)
    with pytest.raises(UserError, match=r"data\.train: b\.parquet was not there"):
        check_resume(of_folder)


def halves(completions: list[str]) -> list[float]:
    return [0.5 for _ in completions]


def test_function_from_python_is_known_by_its_text(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    forced = replace(config, run=replace(config.run, resume="force"))
    given = _with_functions(forced, folder, check=check_resume, reward=halves)
    save(given, folder)
    assert list_functions_without_text(given) == []
    check_resume(given)  # as the command line does, which is given none
    with pytest.raises(UserError) as caught:
        _with_functions(config, folder, check=check_resume, reward=partial(shorten))
    assert caught.value.problem.splitlines()[1:] == [
        "reward.function: reward, given from Python, has changed"
    ]
    of_the_same_name = FunctionType(shorten.__code__, globals(), "halves")
    with pytest.raises(UserError, match="halves, given from Python, has changed"):
        _with_functions(config, folder, check=check_resume, reward=of_the_same_name)
    # The refused functions have replaced nothing.
    _with_functions(config, folder, check=check_resume, reward=halves)
    changed = _with_functions(forced, folder, check=check_resume, reward=shorten)
    with pytest.raises(UserError, match="shorten, given from Python, has changed"):
        check_resume(replace(changed, run=config.run))
    # A function without source has not the text of an earlier one.
    assert list_functions_without_text(_with_functions(forced, folder, reward=max)) == [
        "reward.function: max"
    ]
