"""``probe-batch``: its formulas on known gradients and seconds, and the command on a policy of random weights."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_dppo import probe_batch as command
from megatron_dppo.cli import LEAST_STEPS, main
from megatron_dppo.config import Config, LayoutConfig
from megatron_dppo.models.actor import Actor
from megatron_dppo.probe_batch import (
    LEARNING_STEPS,
    Costs,
    gain,
    line,
    noise_scale,
    own_pair,
    probe_batch,
    pruned,
)
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts
from tests.ranks import RankPool
from tests.small_runs import configure, write_run

STEPS = 6


def squares(signal: float, noise: float, *, batch: int, steps: int) -> tuple[list[float], list[float]]:
    """Squared norms of the means of all prompts of a step and of each half; |G|² = ``signal``, S = ``noise``."""
    rng, size = np.random.default_rng(0), 40
    prompts = rng.normal(math.sqrt(signal / size), math.sqrt(noise / size), (steps, 2, batch // 2, size))
    halves = prompts.mean(axis=2)
    return (halves.mean(axis=1) ** 2).sum(axis=1).tolist(), (halves**2).sum(axis=2).mean(axis=1).tolist()


def test_the_noise_scale_is_that_of_known_gradients() -> None:
    found = noise_scale(*squares(0.1, 9.0, batch=64, steps=60), batch=64)
    assert found.low < 90.0 < found.high
    assert found.value == pytest.approx(90.0, rel=0.15)
    assert found.high < 120.0


def test_a_gradient_that_is_all_noise_has_no_upper_bound() -> None:
    found = noise_scale(*squares(0.0, 9.0, batch=64, steps=12), batch=64)
    assert found.high == math.inf and found.low > 64.0


def test_the_interval_holds_the_noise_scale_nineteen_times_in_twenty() -> None:
    whole, halves = (np.reshape(each, (200, 12)) for each in squares(0.1, 9.0, batch=64, steps=2400))
    found = [noise_scale(*each, batch=64) for each in zip(whole, halves, strict=True)]
    assert 0.9 <= np.mean([each.low < 90.0 < each.high for each in found]) <= 0.99


def test_seconds_are_told_apart_by_sizes_and_are_never_negative() -> None:
    assert line([100, 200, 110, 190], [12, 22, 13, 21]) == pytest.approx((2.0, 0.1))
    assert line([100, 105], [10, 12]) == pytest.approx((0.0, 12 / 105)), "sizes are too near to each other"
    assert line([100, 200], [5, 20]) == pytest.approx((0.0, 0.1)), "the line is negative at 0"
    assert line([100, 200], [9, 7]) == pytest.approx((7.0, 0.0)), "larger ones took less"
    assert line([0, 0], [1, 1]) == (1.0, 0.0)


def test_a_smaller_batch_gains_nothing() -> None:
    costs = Costs(0.0, 0.0, generated=0.3, trained=0.1)
    unpruned = np.array([[1.0, 1.0, 100.0, 80.0], [2.0, 2.0, 120.0, 70.0]])
    half = unpruned * [1.0, 2.0, 0.5, 0.5]
    assert gain(unpruned, unpruned, costs).value == 1.0
    assert gain(half, unpruned, costs).value == pytest.approx(1.0)
    fixed = Costs(0.0, 10.0, generated=0.3, trained=0.1)
    assert gain(half, unpruned, fixed).value < 0.9, "fixed seconds are spent whatever the batch"


def test_shares_are_those_of_the_configuration() -> None:
    assert own_pair(load_config("configs/quickstart.yaml", ())) == (0.85, "auto")
    assert own_pair(load_config(None, ["pruning.prompts.rule=none", "pruning.completions.keep=0.4"])) == (1.0, 0.4)
    assert own_pair(load_config(None, ["pruning.completions.rule=top_k"])) is None
    assert own_pair(pruned(load_config(None, ["pruning.completions.rule=top_k"]), (0.3, "auto"))) == (0.3, "auto")


def probed(rank: int, size: int, config: Config, as_json: bool = True) -> dict[str, Any]:
    """What is printed, and the weights before and after."""
    kept: list[PolicyParts[Actor]] = []
    weights: list[list[Any]] = []
    seen: list[Any] = []

    def weights_now() -> list[Any]:
        return [parameter.detach().clone() for parameter in kept[0].actor.parameters()]

    def assemble(*arguments: Any, **named: Any) -> PolicyParts[Actor]:
        kept.append(command_assemble(*arguments, **named))
        weights.append(weights_now())
        return kept[0]

    def measured(whole: Any, halves: Any, batch: int) -> Any:
        seen.append((whole, halves))
        return noise_scale(whole, halves, batch)

    command_assemble = command.assemble_policy
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(command, "assemble_policy", assemble),
        mock.patch.object(command, "noise_scale", measured),
    ):
        probe_batch(config, steps=STEPS, as_json=as_json)
    same = [bool((a == b).all()) for a, b in zip(weights[0], weights_now(), strict=True)]
    return {"printed": printed.getvalue(), "same": same, "squares": seen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("probe"))


@pytest.mark.parametrize("layout", [LayoutConfig(), LayoutConfig(dp=2)], ids=["one rank", "two ranks"])
def test_a_probe_prints_finite_figures_and_leaves_weights_and_folder_alone(
    folder: Path, ranks: RankPool, layout: LayoutConfig
) -> None:
    first, *others = ranks.run(layout.dp or 1, probed, configure(folder, folder / "run", layout))
    for each in (first, *others):
        assert each["same"] and all(each["same"]), "weights are the same to the last bit"
    assert all(each["printed"] == "" for each in others), "one rank prints"
    assert not (folder / "run").exists()
    ((whole, halves),) = first["squares"]
    assert len(whole) == STEPS and (np.array(halves) > np.array(whole)).all(), "a mean is shorter than its parts"
    found = json.loads(first["printed"])
    gains = {(each["prompts"], each["completions"]): each["value"] for each in found["gains"]}
    assert gains[1.0, 1.0] == 1.0
    assert len(gains) == 16 and all(math.isfinite(each) and each > 0.0 for each in gains.values())
    assert found["batch"] == 8 and found["seconds"] > 0.0 and 0.0 < found["rollout_share"] < 1.0
    assert gains[tuple(found["best"])] == max(gains.values())
    assert found["configured"] == [0.85, "auto"]


def test_the_table_marks_the_best_and_the_configured_shares(folder: Path, ranks: RankPool) -> None:
    (found,) = ranks.run(1, probed, configure(folder, folder / "run", LayoutConfig()), False)
    table = found["printed"]
    assert re.search(r"^ +1 +1\.00", table, re.MULTILINE)
    assert re.search(r"\d\.\d\d\*", table) and re.search(r"\d\.\d\d\*?\+", table)
    assert re.search(r"(pruning at .* is worth|no pruning that was tried).*\.\n$", table, re.DOTALL)


def test_rewards_that_are_all_equal_are_refused(folder: Path, ranks: RankPool) -> None:
    config = configure(folder, folder / "run", LayoutConfig(), reward="equal")
    with pytest.raises(AssertionError, match=r"equal rewards.*Raise --steps"):
        ranks.run(1, probed, config)


def test_mistakes_are_found_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert LEAST_STEPS == LEARNING_STEPS + 2 == STEPS
    words = ["probe-batch", "configs/quickstart.yaml"]
    assert main([*words, "rollout.prompts_per_step=32", "--print-config"]) == 0
    assert re.search(r"prompts_per_step: 32", capsys.readouterr().out)
    for wrong, named in (
        (["--steps", "5"], "--steps = 5"),
        (["rollout.prompts_per_step=1"], "rollout.prompts_per_step = 1"),
        (["pack.max_tokens=64"], "pack.max_tokens"),
        (["data.rollouts=a.jsonl"], "data.rollouts"),
        (["--check"], "--check"),
    ):
        assert main([*words, *wrong]) == 2
        assert named in capsys.readouterr().err
