"""A setting that changes nothing in a run is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.settings import load_config
from megatron_dppo.trainer.run_logger import idle_settings


@pytest.mark.parametrize(
    ("idle", "read"),
    [
        ("loss.tis_level=sequence", "loss.tis_cap=2"),
        ("loss.tis_level=sequence", "rollout.ahead=1"),
        ("loss.distillation.coef=2", "loss.distillation.teacher=dir"),
        ("loss.distillation.direction=forward", "loss.distillation.teachers={a: dir}"),
        ("pruning.completions.keep=0.3", None),
        ("pruning.completions.score=advantage", None),
        ("pruning.prompts.keep=0.9", None),
        ("pruning.prompts.schedule.ramp=0.4", "pruning.prompts.schedule.shape=cosine"),
        ("optimizer.min_lr=1e-8", "optimizer.schedule=cosine"),
        ("rollout.tree.baseline=roots", "rollout.tree.branches=[{at: 3}]"),
        ("model.lora.alpha=8", "model.lora.rank=4"),
        ("model.reference_on_host=true", "loss.kl_coef=0.1"),
        ("data.reasoning_gym.seed=3", "data.train=reasoning_gym"),
        ("data.arithmetic.seed=3", "eval.benchmarks=arithmetic"),
        ("run.keep_best=true", "eval.every=20"),
    ],
)
def test_a_setting_that_nothing_reads_is_named_until_something_does(idle: str, read: str | None) -> None:
    key = idle.partition("=")[0]
    rules = {
        "pruning.completions": "pruning.completions.rule=none",
        "pruning.prompts": "pruning.prompts.rule=greso",
        "data.arithmetic.seed": "data.train=file.jsonl",
        "run.keep_best": "eval.every=7",
    }
    without = [rule for name, rule in rules.items() if key.startswith(name) and "schedule" not in key]
    common = ["run.steps=50", "run.checkpoint_every=10", "eval.every=10", "data.eval=held_out.jsonl", idle]
    assert idle_settings(load_config(None, [*common, *without])) == [key]
    assert idle_settings(load_config(None, [*common, *([read] if read else [])])) == []


def test_settings_of_servers_and_of_the_local_engine_are_named_where_the_other_generates() -> None:
    of_servers = "rollout.launch.count=2"
    assert idle_settings(load_config(None, [of_servers])) == ["rollout.launch.count"]
    assert idle_settings(load_config(None, ["rollout.engine=vllm", of_servers])) == []
    assert idle_settings(load_config(None, ["rollout.engine=vllm", "rollout.max_batch=99"])) == ["rollout.max_batch"]
    assert idle_settings(load_config(None, [])) == []


@pytest.mark.parametrize(
    ("function", "idle"),
    [
        ("async def f(data_source, solution_str, ground_truth, extra_info=None): ...", []),
        ("async def f(args, sample): ...", []),
        ("async def f(completions, **columns): ...", []),
        ("class Judge:\n    async def __call__(self, args, sample): ...\nf = Judge()", []),
        ("def f(data_source, solution_str, ground_truth, extra_info=None): ...", ["reward.concurrency"]),
        ("async def f(args, samples): ...", ["reward.concurrency"]),
    ],
)
def test_concurrency_is_named_where_the_reward_function_awaits_nothing_or_takes_groups(
    tmp_path: Path, function: str, idle: list[str]
) -> None:
    (tmp_path / "reward.py").write_text(function)
    config = load_config(None, [f"reward.function={tmp_path}/reward.py:f", "reward.concurrency=8"])
    assert idle_settings(config) == idle
    assert idle_settings(load_config(None, ["reward.concurrency=8"])) == ["reward.concurrency"]
