"""``probe-batch``: its formulas on known gradients and seconds, and the command on a policy of
random weights."""

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_dppo import probe_batch as command
from megatron_dppo.api import step_metadata
from megatron_dppo.cli import LEAST_STEPS
from megatron_dppo.config import Config
from megatron_dppo.models.actor import Actor
from megatron_dppo.probe_batch import (
    LEARNING_STEPS,
    Costs,
    Report,
    configure_pruning,
    estimate_cost_line,
    estimate_gain,
    estimate_half_group_gain,
    estimate_noise_scale,
    get_configured_pair,
    make_own_config,
    probe_batch,
    take_completions,
)
from megatron_dppo.rl.advantages import compute_advantages
from megatron_dppo.rl.intervals import Estimate
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy
from tests.ranks import RankPool
from tests.small_runs import small_run, write_run

STEPS = 6


def squares(
    signal: float, noise: float, *, batch: int, steps: int
) -> tuple[list[float], list[float]]:
    """Squared norms of the means of all prompts of a step and of each half; |G|² = ``signal``, S =
    ``noise``."""
    rng, size = np.random.default_rng(0), 40
    prompts = rng.normal(
        math.sqrt(signal / size), math.sqrt(noise / size), (steps, 2, batch // 2, size)
    )
    halves = prompts.mean(axis=2)
    return (halves.mean(axis=1) ** 2).sum(axis=1).tolist(), (halves**2).sum(axis=2).mean(
        axis=1
    ).tolist()


def test_the_interval_holds_the_noise_scale_in_95_of_100_runs() -> None:
    whole, halves = (
        np.reshape(each, (200, 12)) for each in squares(0.1, 9.0, batch=64, steps=2400)
    )
    found = [estimate_noise_scale(*each, batch=64) for each in zip(whole, halves, strict=True)]
    assert 0.9 <= np.mean([each.low < 90.0 < each.high for each in found]) <= 0.99


def test_a_gradient_of_noise_alone_has_no_upper_bound() -> None:
    found = estimate_noise_scale(*squares(0.0, 9.0, batch=64, steps=12), batch=64)
    assert found.high == math.inf and found.low > 64.0


def test_seconds_are_fitted_by_size_and_never_negative() -> None:
    assert estimate_cost_line([100, 200, 110, 190], [12, 22, 13, 21]) == pytest.approx((2.0, 0.1))
    assert estimate_cost_line([100, 105], [10, 12]) == pytest.approx((0.0, 12 / 105)), (
        "sizes are too near to each other"
    )
    assert estimate_cost_line([100, 200], [5, 20]) == pytest.approx((0.0, 0.1)), (
        "the line is negative at 0"
    )
    assert estimate_cost_line([0, 0], [1, 1]) == (1.0, 0.0)


def test_a_smaller_batch_gains_nothing() -> None:
    costs = Costs(0.0, 0.0, generated=0.3, trained=0.1)
    unpruned = np.array([[1.0, 1.0, 100.0, 80.0], [2.0, 2.0, 120.0, 70.0]])
    half = unpruned * [1.0, 2.0, 0.5, 0.5]
    assert estimate_gain(unpruned, unpruned, costs).value == 1.0
    assert estimate_gain(half, unpruned, costs).value == pytest.approx(1.0)
    fixed = Costs(0.0, 10.0, generated=0.3, trained=0.1)
    assert estimate_gain(half, unpruned, fixed).value < 0.9, (
        "fixed seconds are spent whatever the batch"
    )


def test_groups_of_half_the_size_gain_by_the_noise_that_they_lack() -> None:
    noise = np.array([4.0, 5.0, 6.0])
    same = estimate_half_group_gain(noise, 2 * noise, advantages=1.0, time=1.0)
    assert (same.value, same.low, same.high) == pytest.approx((1.0, 1.0, 1.0)), (
        "twice as many groups of twice the variance"
    )
    shorter = estimate_half_group_gain(noise, noise, advantages=0.5, time=1.5)
    assert shorter.value == pytest.approx(2 * 0.25 * 1.5)


@pytest.mark.parametrize(
    ("low", "high", "advice"),
    [
        (1.1, 1.6, "set rollout.samples_per_prompt=4 and rollout.prompts_per_step=128."),
        (0.5, 0.9, "keep groups of 8."),
        (0.9, 1.4, "no difference was found."),
    ],
)
def test_the_interval_decides_on_the_group_size(low: float, high: float, advice: str) -> None:
    costs = Costs(0.0, 0.0, generated=0.3, trained=0.1)
    known = Estimate(1.0, 1.0, 1.0)
    report = Report(
        batch=64,
        noise=known,
        costs=costs,
        generated=1.0,
        trained=1.0,
        mixed=0.5,
        gains={(1.0, 1.0): known},
        configured=None,
        prompts=64,
        size=8,
        half_groups=Estimate((low + high) / 2, low, high),
    )
    assert report.group_advice.endswith(f"of groups of 8: {advice}")
    assert str(report).endswith(report.group_advice)


def test_half_groups_have_their_own_baselines() -> None:
    rewards = np.array([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]])
    lengths = np.array([[3, 5, 4, 2], [1, 6, 2, 2]])
    whole = step_metadata(rewards, lengths, [2, 7], shared_lengths=np.array([[0, 2, 3, 2]] * 2))
    plans = []
    for columns in (slice(2), slice(2, 4)):
        half = take_completions(whole, columns)
        assert (half.shared_lengths[:, 0] == 0).all(), "the first completion repeats the prompt"
        expected = step_metadata(rewards[:, columns], lengths[:, columns], [2, 7])
        for name in ("rewards", "response_lengths", "prompt_lengths", "window"):
            assert np.array_equal(getattr(half, name), getattr(expected, name))
        plans.append(compute_advantages(half, Config(), "grpo")[..., 0].tolist())
    assert plans == [[[1.0, -1.0], [-1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]


def test_shares_are_those_of_the_configuration() -> None:
    assert get_configured_pair(load_config("configs/quickstart.yaml", ())) == (0.85, "auto")
    assert get_configured_pair(load_config(None, ["pruning.completions.rule=top_k"])) is None
    assert get_configured_pair(
        configure_pruning(load_config(None, ["pruning.completions.rule=top_k"]), (0.3, "auto"))
    ) == (0.3, "auto")


def run_probe(rank: int, size: int, config: Config, as_json: bool) -> dict[str, Any]:
    """Return the output, the measured squares, and whether every weight is unchanged."""
    assembled, squares = [], []

    def assemble(*arguments: Any, **named: Any) -> PolicyParts[Actor]:
        parts = assemble_policy(*arguments, **named)
        weights = [*parts.actor.parameters()]
        assembled.append((weights, [weight.detach().clone() for weight in weights]))
        return parts

    def measure(whole: Any, halves: Any, batch: int) -> Any:
        squares.append((whole, halves))
        return estimate_noise_scale(whole, halves, batch)

    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        mock.patch.object(command, "assemble_policy", assemble),
        mock.patch.object(command, "estimate_noise_scale", measure),
    ):
        probe_batch(config, steps=STEPS, as_json=as_json)
    ((after, before),) = assembled
    same = [bool((a == b).all()) for a, b in zip(after, before, strict=True)]
    return {"printed": printed.getvalue(), "same": same, "squares": squares}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("probe"))


def test_a_probe_reports_finite_gains_and_changes_nothing(folder: Path, ranks: RankPool) -> None:
    settings = ("layout.dp=2", "rollout.samples_per_prompt=4")
    first, *others = ranks.run(2, run_probe, small_run(folder, folder / "run", *settings), True)
    for each in (first, *others):
        assert each["same"] and all(each["same"]), "weights are the same to the last bit"
    assert all(each["printed"] == "" for each in others), "one rank prints"
    assert not (folder / "run").exists()
    ((whole, halves),) = first["squares"]
    assert len(whole) == STEPS and (np.array(halves) > np.array(whole)).all(), (
        "a mean is shorter than its parts"
    )
    found = json.loads(first["printed"])
    gains = {(each["prompts"], each["completions"]): each["value"] for each in found["gains"]}
    assert gains[1.0, 1.0] == 1.0
    assert len(gains) == 16 and all(math.isfinite(each) and each > 0.0 for each in gains.values())
    assert found["batch"] == 8 and found["seconds"] > 0.0 and 0.0 < found["rollout_share"] < 1.0
    assert gains[tuple(found["best"])] == max(gains.values())
    assert found["configured"] == [0.85, "auto"]
    assert found["half_groups"]["value"] > 0.0


RULES = """
import numpy as np

def uniform(candidates, keep):
    return np.full_like(candidates.advantage, keep)

def centred(rewards, columns):
    return rewards - rewards.mean(axis=1, keepdims=True)
"""


def test_rules_of_ones_own_have_a_row(folder: Path, ranks: RankPool) -> None:
    """Also with an advantage estimator of one's own."""
    (folder / "my_rules.py").write_text(RULES)
    settings = (
        f"pruning.completions.function={folder}/my_rules.py:uniform",
        "pruning.completions.keep=0.5",
        f"loss.advantage={folder}/my_rules.py:centred",
    )
    config = small_run(folder, folder / "run", *settings)
    (found,) = ranks.run(1, run_probe, config, True)
    printed = json.loads(found["printed"])
    assert printed["configured"] is None and printed["own"]["low"] <= printed["own"]["value"]
    # Half of the completions, drawn whatever their gradients, double the variance.
    neyman = {(each["prompts"], each["completions"]): each for each in printed["gains"]}
    assert 0.0 < printed["own"]["value"] < neyman[0.85, 0.5]["value"]
    (text,) = ranks.run(1, run_probe, config, False)
    assert "the configured rules are worth" in text["printed"]
    assert printed["half_groups"] is None, "3 completions have no halves"


def test_biased_and_neyman_rules_have_no_row_of_their_own() -> None:
    assert make_own_config(load_config("configs/quickstart.yaml", ())) is None
    assert make_own_config(load_config(None, ["pruning.completions.rule=top_k"])) is None
    own = make_own_config(load_config(None, ["pruning.completions.rule=threshold"]))
    assert own is not None and own.pruning.completions.keep == 0.5


def test_equal_rewards_are_refused(folder: Path, ranks: RankPool) -> None:
    config = small_run(folder, folder / "run", f"reward.function={folder}/equal.py:compute_score")
    with pytest.raises(AssertionError, match=r"equal rewards.*Raise --steps"):
        ranks.run(1, run_probe, config, True)


def test_the_fewest_steps_are_those_of_the_predictor() -> None:
    assert LEAST_STEPS == LEARNING_STEPS + 2 == STEPS
