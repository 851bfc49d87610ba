"""The calls of a run to its engine: pause and resume around an update, events, and the close."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from unittest import mock

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Completions, Sampling
from megatron_dppo.rollout.local import LocalEngine
from tests.ranks import RankPool
from tests.small_runs import REWARD, live, recorded, rows, small_run, write_run

POLICY = write_run


def record_calls(rank: int, size: int, config: Config) -> tuple[str, str, str]:
    """Return the calls of a run to its engine, the run's output, and the setting of its failure."""
    calls: list[str] = []
    engine, note = LocalEngine, partial(recorded, calls)

    class Recorded(LocalEngine):
        begin, pause, resume = note(engine.begin), note(engine.pause), note(engine.resume)
        update_weights, close = note(engine.update_weights), note(engine.close)

        def sample_each(
            self, prompts: Sequence[Prompt], sampling: Sampling
        ) -> dict[str, Completions]:
            return {"local": super().begin(prompts, sampling)}

        def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
            return {"rollout/lost_servers": float(calls.count("begin"))}, ("a server was removed",)

    output, failure = io.StringIO(), ""
    with (
        mock.patch("megatron_dppo.trainer.assemble.LocalEngine", Recorded),
        mock.patch.object(Actor, "release_memory", note(Actor.release_memory)),
        contextlib.redirect_stdout(output),
    ):
        try:
            live(rank, size, config)
        except UserError as error:
            failure = error.setting
    order = " ".join(calls).replace("release_memory", "room").replace("update_weights", "update")
    return order, output.getvalue(), failure


CALLS = {
    ("mixed", "false"): "begin pause update 1 resume begin pause update 2 resume",
    (
        "mixed",
        "true",
    ): "begin pause pause room update 1 room resume begin pause pause room update 2 room resume",
    ("equal", "false"): "begin begin",
    (
        "equal",
        "true",
    ): "begin pause pause room update 0 room resume begin pause pause room update 0 room resume",
}
"""Calls of two steps, by the reward and by ``rollout.colocated``. The trainer makes room for
weights."""


def test_engine_is_paused_told_and_closed(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    """A colocated engine sleeps while the trainer trains; a failed run closes its engine, too."""
    (tmp_path / "failing.py").write_text(REWARD.format(reward="undefined"))

    def call(run: str, reward: Path, colocated: str) -> tuple[object, ...]:
        settings = (f"rollout.colocated={colocated}", f"reward.function={reward}.py:compute_score")
        return record_calls, small_run(
            policy, tmp_path / run, "run.steps=2", "eval.problems=0", *settings
        )

    calls = [
        call(f"{reward}-{colocated}", policy / reward, colocated) for reward, colocated in CALLS
    ]
    *of_runs, failed = ranks.in_turn(2, *calls, call("failed", tmp_path / "failing", "false"))
    for (kind, expected), found in zip(CALLS.items(), of_runs, strict=True):
        room = "room " if kind[1] == "true" else ""
        for rank, (called, output, _) in enumerate(found):
            assert called == f"pause {room}update 0 {room}resume {expected} close"
            assert output.count("a server was removed") == (rank == 0)
        assert [row["rollout/lost_servers"] for row in rows(tmp_path / "-".join(kind))] == [
            1.0,
            2.0,
        ]
    for called, _, failure in failed:
        assert failure == "reward.function"
        assert called.endswith(" close")
