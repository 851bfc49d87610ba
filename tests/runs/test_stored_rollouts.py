"""Runs on a file of rollouts: completions reach the update with their weights."""

from __future__ import annotations

import contextlib
import io
import json
import math
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_dppo.config import Config
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.train import Trainer
from tests.ranks import RankPool
from tests.small_runs import Rows, begin_run, live, rows, small_run, write_run

POLICY = write_run
CAP = 2.0
"""The default cap of importance weights."""


def write_rollouts(rank: int, size: int, config: Config, file: Path) -> None:
    """Run, and write the rollouts of each step in the order of the pool."""

    class Writing(Trainer):
        def collect_rollouts(self, rollouts: StepRollouts) -> CompleteRollouts:
            complete = super().collect_rollouts(rollouts)
            with file.open("a") as lines:
                for group in sorted(complete.held.values(), key=lambda g: g.prompt.id):
                    completions = [
                        {
                            "token_ids": c.token_ids.tolist(),
                            "logprobs": c.logprobs.tolist(),
                            "reward": float(reward),
                        }
                        for c, reward in zip(group.completions, group.rewards, strict=True)
                    ]
                    lines.write(
                        json.dumps({"prompt": group.prompt.text, "completions": completions}) + "\n"
                    )
            return complete

    with ExitStack() as to_close:
        begin_run(config, Writing, to_close).run()


def run_and_read(rank: int, size: int, config: Config) -> tuple[str, Rows]:
    """Return the run's output and its rows."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        live(rank, size, config)
    return output.getvalue(), rows(Path(config.run.dir))


def one_step(policy: Path, run: Path, *overrides: str) -> Config:
    """Return the settings of a step of every prompt, without pruning: in whatever order, the update
    is the same."""
    rules = ("pruning.prompts.rule=none", "pruning.completions.rule=none")
    return small_run(
        policy,
        run,
        "run.steps=1",
        "rollout.prompts_per_step=16",
        "eval.problems=0",
        *rules,
        *overrides,
    )


def test_stored_rollouts_have_weights_of_policy_over_behaviour(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Rollouts of the policy itself, shared by two ranks, give the update that they gave online.
    Rollouts with other log-probabilities have that gradient times the weight, up to the cap; random
    weights leave every token a probability of far less than a quarter."""
    file = tmp_path / "rollouts.jsonl"
    ranks.run(1, write_rollouts, one_step(policy, tmp_path / "online"), file)
    [online] = rows(tmp_path / "online")
    [(output, [row]), _] = ranks.run(
        2, run_and_read, one_step(policy, tmp_path / "two", f"data.rollouts={file}")
    )
    assert "tokens are another policy's" in " ".join(output.split())
    for name in (
        "rollout/raw_reward",
        "rollout/response_len/mean",
        "train/loss",
        "train/grad_norm",
        "train/tokens",
    ):
        assert row[name] == pytest.approx(online[name], rel=1e-4, abs=1e-6), name
    assert row["rollout/stale_tokens"] == 1.0
    assert row["staleness/mean"] == 0.0
    assert "train/rollout_logprob_abs_diff" not in row, "another policy's may differ"

    weights = {1.5: math.log(1.5), CAP: 5.0, 0.25: -math.log(4.0)}
    calls = []
    for weight, less in weights.items():
        read = [json.loads(line) for line in file.read_text().splitlines()]
        for completion in (c for group in read for c in group["completions"]):
            completion["logprobs"] = [value - less for value in completion["logprobs"]]
        (other := tmp_path / f"{weight}.jsonl").write_text("\n".join(map(json.dumps, read)))
        calls.append(
            (run_and_read, one_step(policy, tmp_path / f"{weight}", f"data.rollouts={other}"))
        )
    for weight, [(_, [row])] in zip(weights, ranks.in_turn(1, *calls), strict=True):
        assert row["train/grad_norm"] == pytest.approx(weight * online["train/grad_norm"], rel=1e-3)
