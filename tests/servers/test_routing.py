"""A real server's choice of experts reaches the trainer, whose log-probabilities in bf16 are then nearer to its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.init import write_model
from megatron_dppo.models.routing import REPLACED
from tests.servers.real import launch_settings
from tests.servers.test_training import Start, finish, start
from tests.small_runs import Rows

pytestmark = pytest.mark.servers

__all__ = ["start"]
SETTINGS = (
    "layout.tp=1",
    "model.dtype=bf16",
    "run.steps=2",
    "run.export=false",
    "rollout.max_logprob_diff=10",
    "rollout.max_prob_error=1e9",
)
MISMATCH = "train/rollout_logprob_abs_diff"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "qwen3"
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 64, "layers": 4}
    write_model(folder, **sizes, experts=16, experts_per_token=2, tie=False, std=0.2, dtype="bf16")
    return folder


def test_replayed_rollouts_are_nearer_to_the_trainer(start: Start, policy: Path, tmp_path: Path) -> None:
    found: dict[str, Rows] = {}
    for mode in ("none", "rollout"):
        run = tmp_path / mode
        settings = [*launch_settings("sglang", (1,)), *SETTINGS, f"loss.replay_routing={mode}"]
        found[mode] = finish(start(run, policy, *settings), run)[1:]
    for without, replayed in zip(found["none"], found["rollout"], strict=True):
        assert 0.0 < replayed[REPLACED] < 0.1
        assert replayed[MISMATCH] < 0.6 * without[MISMATCH]
        assert replayed["train/token_mult_prob_error"] < without["train/token_mult_prob_error"]
        assert replayed["rollout/agreement_mean_diff"] < without["rollout/agreement_mean_diff"]
