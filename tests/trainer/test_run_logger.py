"""Files of a run in its folder are resumed or refused by name, and settings without effect are
named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.evaluator import EvalScores, ExampleAnswer
from megatron_dppo.report.run import read_run
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.run_logger import RunLogger, find_idle_settings
from tests.damage import DAMAGE, Damage, replace_file
from tests.rollout.scripted import world_of

STEPS = 4
TORN = (
    "flipped",
    "truncated",
    "four bytes",
    "empty",
    "zeros",
    "another pickle",
    "another's",
    "foreign",
)
"""Damage of a row that a kill might have left, too: such a row is passed over."""


def config_of(folder: Path) -> Config:
    return load_config(None, [f"run.dir={folder}", f"run.steps={STEPS}"])


def write_files(folder: Path, first: int) -> None:
    """Write the files of rank 0 from a step on to the last."""
    logger = RunLogger(config_of(folder), world_of(1, 0), step=first, dropped_prompts=0)
    for step in range(first + 1 if first else 0, STEPS + 1):
        logger.add({"rollout/raw_reward": step / 7, "perf/step_time": 0.5})
        if step in (0, STEPS):
            shown = (ExampleAnswer("1+1=", f"at {step}", "2", step == STEPS),)
            logger.add_evaluation(step, EvalScores({"eval/accuracy": step / STEPS}, shown, ()), {})
        logger.write(step)
    logger.finish()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run") / "run"
    with mock.patch("megatron_dppo.report.render.draw_pictures"):
        write_files(folder, 0)
        yield folder


OTHER: dict[str, Damage] = {
    "other JSON": lambda path, rng: replace_file(path, b'{"a": 1}\n[1, 2]\n'),
    "no text": lambda path, rng: replace_file(path, b"\x80\x04\xff\xfe\n" * 9),
    "cut short": lambda path, rng: replace_file(path, path.read_bytes()[:-7]),
    "another's": lambda path, rng: replace_file(path, b'{"step": 1, "answers": [{"prompt": 3}]}\n'),
}


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "pruning.jsonl", "answers.jsonl", "summary.json", "config.yaml"]
)
def test_run_resumes_or_names_the_damaged_file(name: str, whole: Path, tmp_path: Path) -> None:
    rng = random.Random(name)
    for kind, damage in {**DAMAGE, **OTHER}.items():
        if kind == "missing" or (
            (whole / name).stat().st_size == 0 and kind in ("flipped", "truncated")
        ):
            continue
        folder = tmp_path / kind
        shutil.copytree(whole, folder)
        damage(folder / name, rng)
        try:
            write_files(folder, 2)
        except (UserError, OSError) as error:  # a rank reports an OSError with its file
            assert name in str(error), (kind, error)
            continue
        if name == "metrics.jsonl" and kind not in TORN:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), kind


def test_unreadable_settings_of_earlier_steps_are_named(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    write_files(folder, 2)
    assert "cannot be read" not in capsys.readouterr().out
    for name in ("config_history.jsonl", "config.yaml"):
        (folder / name).write_text("{")
    write_files(folder, 2)
    assert "config_history.jsonl cannot be read" in capsys.readouterr().out


def test_resume_tells_of_old_names_once(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    file = folder / "config_history.jsonl"
    file.write_text(file.read_text().replace("run.stall_warning_s", "run.late_s"))
    read_run(folder, "run")
    line = f"note  {folder}/config.yaml: run.late_s is now run.stall_warning_s\n"
    assert line in capsys.readouterr().err
    write_files(folder, 2)
    line = "note  config.yaml: run.late_s is now run.stall_warning_s\n"
    assert line in capsys.readouterr().out
    write_files(folder, 2)
    assert "is now" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["metrics.jsonl", "answers.jsonl"])
def test_malformed_row_is_refused_with_line(name: str, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")
    file = folder / name
    file.write_bytes(file.read_bytes().replace(b'"step": 0', b'"step! 0'))
    with pytest.raises(UserError, match="line 1") as caught:
        write_files(folder, 2)
    assert (caught.value.setting, caught.value.value) == ("run.dir", file)
    file.unlink()
    write_files(folder, 2)


IDLE = {
    "data.chat_template_kwargs={a: 1}": ("data.chat_template=false", "data.chat_template=true"),
    "data.date=2026-01-31": ("data.chat_template=false", "data.chat_template=true"),
    "loss.tis_level=sequence": ("", "loss.tis_cap=2"),
    "loss.advantage=rloo": ("rollout.tree.branches=[{at: 3}]", ""),
    "loss.distillation.coef=2": ("", "loss.distillation.teacher=dir"),
    "loss.distillation.direction=forward": ("", "loss.distillation.teachers={a: dir}"),
    "pruning.prompts.keep=0.9": ("pruning.prompts.rule=greso", "pruning.prompts.rule=threshold"),
    "pruning.prompts.floor=0.3": ("pruning.prompts.rule=threshold", ""),
    "pruning.prompts.schedule.ramp=0.4": ("", "pruning.prompts.schedule.shape=cosine"),
    "pruning.max_rounds=2": ("", "pruning.prompts.rule=dynamic_sampling"),
    "pruning.resample=prompts": ("", "pruning.prompts.rule=greso"),
    "pruning.completions.keep=0.3": ("pruning.completions.rule=none", ""),
    "pruning.completions.score=advantage": ("pruning.completions.rule=threshold", ""),
    "pruning.completions.schedule.ramp=0.4": ("", "pruning.completions.schedule.shape=linear"),
    "optimizer.min_lr=1e-8": ("", "optimizer.schedule=cosine"),
    "rollout.max_batch=99": ("rollout.engine=vllm", ""),
    "rollout.launch.count=2": ("", "rollout.engine=vllm"),
    "rollout.attempts=9": ("", "rollout.conversation=a:b"),
    "rollout.max_in_flight=9": ("", "rollout.engine=sglang"),
    "rollout.tree.baseline=depth": ("", "rollout.tree.branches=[{at: 3}]"),
    "model.lora.alpha=8": ("", "model.lora.rank=4"),
    "model.reference_on_host=true": ("", "loss.kl_coef=0.1"),
    "model.deterministic=true": ("model.dtype=fp32", "model.dtype=bf16"),
    "eval.samples=3": ("eval.problems=0", ""),
    "data.reasoning_gym.seed=3": ("", "data.train=reasoning_gym"),
    "data.arithmetic.seed=3": ("data.train=file.jsonl", "eval.benchmarks=arithmetic"),
    "run.keep_best=true": ("eval.every=7", "eval.every=20"),
}
"""Settings; for each, another setting without a reader and another with a reader of the first."""


@pytest.mark.parametrize("idle", IDLE)
def test_unread_setting_is_named(idle: str) -> None:
    common = (
        "run.steps=50",
        "run.checkpoint_every=10",
        "eval.every=10",
        "data.eval=held_out.jsonl",
    )
    unread, read = (
        load_config(None, [*common, idle, *([word] if word else [])]) for word in IDLE[idle]
    )
    assert {*find_idle_settings(unread)} - {"data.eval", "eval.every"} == {idle.partition("=")[0]}
    assert find_idle_settings(read) == []


@pytest.mark.parametrize(
    ("function", "idle"),
    [
        ("async def f(data_source, solution_str, ground_truth, extra_info=None): ...", False),
        ("def f(data_source, solution_str, ground_truth, extra_info=None): ...", True),
        ("async def f(args, samples): ...", True),
    ],
)
def test_concurrency_is_named_without_awaiting_rewards(
    tmp_path: Path, function: str, idle: bool
) -> None:
    (tmp_path / "reward.py").write_text(function)
    config = load_config(None, [f"reward.function={tmp_path}/reward.py:f", "reward.concurrency=8"])
    assert ("reward.concurrency" in find_idle_settings(config)) == idle
    assert find_idle_settings(load_config(None, ["reward.concurrency=8"])) == ["reward.concurrency"]
    assert find_idle_settings(load_config(None, [])) == []


def test_a_run_notes_once_that_answers_are_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = RunLogger(config_of(tmp_path / "run"), world_of(1, 0), step=0, dropped_prompts=0)
    for step in range(1, 9):
        logger.add({"rollout/raw_reward": 0.0, "rollout/truncated_ratio": 1.0})
        logger.write(step)
        assert ("cut off" in capsys.readouterr().out) == (step == 5)
    logger.close()
