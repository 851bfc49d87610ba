"""Which settings a resumed run may change, and that it trains with each of them changed."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.settings import settings
from megatron_dppo.trainer.resume import OF_THE_START, Change
from tests.commands import Command
from tests.policies import write_policy
from tests.small_runs import MIXED, REWARD

START = (
    "run.steps=1", "run.checkpoint_every=1", "run.export=false", "layout.tp=1", "layout.dp=1", "data.train=arithmetic",
    "data.chat_template=false", "data.max_prompt_tokens=24", "data.arithmetic.problems=16", "pruning.prompts.rule=none",
    "data.arithmetic.eval_problems=4", "rollout.max_response_tokens=9", "rollout.samples_per_prompt=4",
    "rollout.prompts_per_step=4", "pack.max_tokens=256", "optimizer.lr=1e-3", "eval.every=1", "eval.problems=4",
)  # fmt: skip
SMALL: dict[str, str] = {
    "run.steps": "2", "run.checkpoint_every": "2", "run.keep_checkpoints": "3", "run.keep_best": "false",
    "run.late_s": "60", "run.max_idle_steps": "5", "run.length_gate": "3", "run.loggers": "[]", "run.profile": "[2]",
    "model.deterministic": "true", "model.recompute": "selective", "model.head_chunk_mib": "8", "model.spec": "torch",
    "layout.timeout_s": "300", "optimizer.lr": "5e-4", "optimizer.schedule": "cosine", "optimizer.min_lr": "1e-5",
    "optimizer.warmup_steps": "1", "optimizer.clip_grad": "0.5", "optimizer.weight_decay": "0.01",
    "optimizer.beta1": "0.8", "optimizer.beta2": "0.99", "optimizer.eps": "1e-7",
    "eval.every": "2", "eval.problems": "3", "eval.samples": "2", "eval.temperature": "0.5", "eval.show": "1",
    "eval.batch": "2", "eval.top_p": "0.9", "eval.top_k": "5", "eval.max_response_tokens": "7",
    "rollout.prompts_per_step": "3", "rollout.samples_per_prompt": "3",
    "rollout.max_response_tokens": "8", "rollout.stop_token_ids": "[2,3]", "rollout.max_batch": "32",
    "rollout.timeout_s": "900", "rollout.request_timeout_s": "900",
    "rollout.attempts": "2", "rollout.heartbeat_s": "30", "rollout.max_logprob_diff": "1",
    "rollout.max_prob_error": "9", "rollout.sync.check_every": "1", "rollout.sync.bucket_mib": "1",
    "reward.timeout_s": "20", "reward.workers": "2", "reward.memory_mib": "2048", "reward.max_failures": "0.2",
    "reward.concurrency": "4",
    "pack.max_tokens": "128", "pack.window": "8", "pack.min_per_rank": "1", "pack.share_prefixes": "off",
}  # fmt: skip
"""Small things, all at once."""
LARGE: dict[str, str] = {
    "run.export": "true", "run.checkpoint_in_background": "true", "run.checkpoint_durable": "false",
    "model.reference_on_host": "true", "layout.sequence_parallel": "true",
    "rollout.ahead": "1", "optimizer.offload": "true",
    "optimizer.checkpoint_format": "dp_reshardable",
}  # fmt: skip
"""Other ways to do the same; without what excludes them."""
OTHERS = (
    "sft.", "probe.", "cluster.", "eval.folder", "eval.out", "eval.against", "eval.benchmarks",  # other commands' own
    "rollout.launch.", "rollout.sync.", "rollout.servers", "rollout.max_in_flight", "rollout.health_timeout_s",
    "rollout.custom_generate", "rollout.colocated", "rollout.engine",  # servers' and engines': tests/servers
    # several ranks, another form of the optimizer, another precision: tests/trainer/test_checkpoint.py
    "layout.", "optimizer.overlap", "optimizer.distributed", "model.dtype",
    "rollout.conversation", "rollout.tree.",  # functions and trees: tests of their own
)  # fmt: skip
"""What the beginnings of all other settings that may change are."""


def as_from_0_19_on() -> None:
    """Megatron-Core then tells an optimizer's groups apart by their rates, too."""
    for name in ("optimizer", "distrib_optimizer"):
        module: Any = import_module(f"megatron.core.optimizer.{name}")
        known = module.param_group_identifier_keys
        module.param_group_identifier_keys = (*known, *(key for key in ("max_lr", "min_lr") if key not in known))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    write_policy(folder / "hf", layers=2)
    (folder / "mixed.py").write_text(REWARD.format(reward=MIXED))
    train(folder, "small", START)
    train(folder, "large", START)
    return folder


def train(folder: Path, run: str, words: tuple[str, ...]) -> list[dict[str, Any]]:
    own = [f"run.dir={folder / run}", f"model.path={folder / 'hf'}", f"reward.function={folder}/mixed.py:compute_score"]
    command = Command(["megatron-dppo", "train", *own, *words], folder / f"{run}.log", before=as_from_0_19_on)
    assert command.exit_code() == 0, (folder / f"{run}.log").read_text()
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


def test_every_setting_that_may_change_is_changed_by_a_test() -> None:
    free = {key for key in settings() if not Change(key, 0, 1).of_results} - {*OF_THE_START}
    assert {key for key in free - {*SMALL, *LARGE} if not key.startswith(OTHERS)} == set()


@pytest.mark.parametrize(("run", "changed"), [("small", SMALL), ("large", LARGE | {"run.steps": "2"})])
def test_a_run_resumes_with_many_settings_changed_at_once(folder: Path, run: str, changed: dict[str, str]) -> None:
    free = {key: value for key, value in changed.items() if not Change(key, 0, 1).of_results}
    *_, row = train(folder, run, (*START, *(f"{key}={value}" for key, value in free.items())))
    assert row["step"] == 2 and row["train/tokens"] > 0 and row["train/grad_norm"] > 0
