"""A layer is worth, by rewards, what the answers of the policy without it lose."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatron_dppo.cli import main
from megatron_dppo.compress import calibration
from megatron_dppo.compress.asking import Asking, prompts_to_ask
from megatron_dppo.compress.calibration import Accumulator
from megatron_dppo.compress.live import Live
from megatron_dppo.parallel.world import initialize
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import assemble_frozen
from tests.compress.rewards import TOKENS
from tests.compress.test_resume import KilledError, killed_after
from tests.compress.test_scores import shortened
from tests.ranks import RankPool, forks

PROMPTS = 10
SETTINGS = (
    "data.train=arithmetic",
    "data.arithmetic.problems=64",
    "data.max_prompt_tokens=64",
    "layout.tp=2",
    "layout.dp=1",
    f"rollout.max_response_tokens={TOKENS}",
    "eval.samples=2",
    "eval.batch=4",
    "reward.function=tests.compress.rewards:share_of_digits",
)


def rewards(
    rank: int, size: int, policy: Path, absent: list[tuple[int, ...]], sums: Path | None, *settings: str
) -> list[float]:
    """Of the policy without each set of layers; with a folder for ``sums``, after a kill within the first."""
    calibration.KEEP_EVERY_S = 0.0
    config = load_config(None, [*SETTINGS, f"model.path={policy}", *settings])
    world = initialize(config.layout, seed=1, timeout_s=60.0)
    with ExitStack() as to_close:
        parts = assemble_frozen(config, world, temperature=1.0)
        asking = Asking(config, parts, prompts_to_ask(parts, PROMPTS, seed=3), to_close)
        if sums is not None:
            with pytest.raises(KilledError):
                asking.reward(absent[0], killed_after(1, Accumulator(sums, {}, world)))
        passes = Accumulator(sums, {}, world)
        if sums is None:  # as to servers that were lost and came back, between two batches
            passes.advance = lambda *_: parts.sync(asking._engine, 99)
        assert (passes.read > 0) == (sums is not None), "prompts that were answered before the kill"
        live = Live(parts, [], 15, passes, asking)  # no sequences are read
        found = [-cost for cost in live.costs("reward", absent)]
        assert passes.read == PROMPTS * len(absent)
        return found


def command(words: list[str]) -> None:
    sys.exit(main(words))


def test_a_layers_absence_costs_what_the_shortened_policy_earns_less(
    ranks: RankPool, policy: Path, model: Any, tmp_path: Path
) -> None:
    absent: list[tuple[int, ...]] = [(1,), (), (0,), (2,), (3,), (0, 3)]
    compared, written = (1, 5), []
    for number in compared:
        written.append(tmp_path / f"without {absent[number]}")
        shortened(model, *absent[number]).float().save_pretrained(written[-1])
        AutoTokenizer.from_pretrained(policy).save_pretrained(written[-1])
    calls = [
        (rewards, policy, absent, None),
        (rewards, policy, absent, tmp_path / "sums"),
        (rewards, policy, absent[:2], None, "layout.tp=1", "layout.cp=2"),
    ]
    whole, resumed, context, *short = ranks.in_turn(2, *calls, *((rewards, path, [()], None) for path in written))
    found = whole[0]
    assert len(set(found)) > 4 and min(found) > 0, "each policy has answers of its own"
    assert [found[number] for number in compared] == [pytest.approx(of_ranks[0][0], rel=1e-12) for of_ranks in short]
    assert whole == resumed == [found] * 2, "every rank has the same, also after a kill"
    assert context == [pytest.approx(found[:2], rel=1e-12)] * 2

    config = tmp_path / "run.yaml"
    config.write_text("")
    words = ["compress", str(policy), str(tmp_path / "out"), "--method", "depth", "--keep", "0.75", "--seed", "3"]
    words += ["--score", "shapley-reward", "--sequences", str(PROMPTS), "--config", str(config), *SETTINGS]
    process = forks().Process(target=command, args=([*words, "layout.tp=1", f"run.dir={tmp_path}/run"],))
    process.start()
    process.join()
    assert process.exitcode == 0
    least = absent[max((0, 2, 3, 4), key=lambda number: found[number])]
    left = json.loads((tmp_path / "out" / "compress.json").read_text())["layers"]
    assert left == sorted({0, 1, 2, 3} - {*least}), "the layer without which the policy earns most goes"
