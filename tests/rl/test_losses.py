"""The losses against numbers written by hand, and against autograd."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.config import LossConfig
from megatron_dppo.rl.losses import TokenLosses, k3, token_losses
from megatron_dppo.rl.objectives import OBJECTIVES, objective_for

GRPO, DAPO, GSPO = OBJECTIVES["grpo"], OBJECTIVES["dapo"], OBJECTIVES["gspo"]


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def evaluate(
    probabilities: tuple[float, ...], advantage: float, objective=GRPO, **options: Any
) -> tuple[TokenLosses, list]:
    """Losses of tokens with the given probabilities, and the gradient of their sum."""
    logprobs = log(*probabilities).requires_grad_()
    given: dict[str, Any] = {
        "old_logprobs": None,
        "engine_logprobs": logprobs.detach(),
        "reference_logprobs": None,
        "kl_coef": 0.0,
        "tis_cap": None,
    }
    result = token_losses(
        objective, logprobs=logprobs, advantage=torch.full_like(logprobs, advantage).detach(), **(given | options)
    )
    result.loss.sum().backward()
    assert logprobs.grad is not None
    return result, logprobs.grad.tolist()


@pytest.mark.parametrize(
    ("objective", "advantage", "loss", "gradient"),
    [
        # ratios 1.25, 0.75, 1.0 against an old probability of 0.4
        (GRPO, 1.0, [-1.2, -0.75, -1.0], [0.0, -0.75, -1.0]),
        (GRPO, -1.0, [1.25, 0.8, 1.0], [1.25, 0.0, 1.0]),
        (DAPO, 1.0, [-1.25, -0.75, -1.0], [-1.25, -0.75, -1.0]),
    ],
)
def test_the_clipped_surrogate_has_the_loss_and_gradient_of_the_formula(objective, advantage, loss, gradient):
    result, actual = evaluate((0.5, 0.3, 0.4), advantage, objective, old_logprobs=log(0.4, 0.4, 0.4))
    assert result.loss.tolist() == pytest.approx(loss)
    assert actual == pytest.approx(gradient)


def test_the_kl_term_is_k3_and_has_its_gradient():
    result, gradient = evaluate((0.5,), 0.0, kl_coef=0.1, reference_logprobs=log(0.25))
    assert result.loss.tolist() == pytest.approx([0.1 * (0.5 - np.log(0.5) - 1)])
    assert gradient == pytest.approx([0.1 * (1 - 0.5)])
    assert result.sums["train/kl_loss"].item() == pytest.approx(0.5 - np.log(0.5) - 1)
    assert result.sums["train/pg_loss"] == 0.0


def test_a_reference_is_watched_but_not_trained_on_without_a_coefficient():
    result, gradient = evaluate((0.5,), 1.0, reference_logprobs=log(0.25))
    assert gradient == [-1.0]
    assert result.sums["train/kl_loss"] > 0.0


def test_kl_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        evaluate((0.5,), 1.0, kl_coef=0.1)


def test_the_engine_correction_is_truncated_and_constant_to_the_gradient():
    result, gradient = evaluate((0.6, 0.3), 1.0, engine_logprobs=log(0.2, 0.6), tis_cap=2.0)
    assert result.loss.tolist() == pytest.approx([-2.0, -0.5])
    assert gradient == pytest.approx([-2.0, -0.5])


def test_what_the_engine_would_say_much_less_or_more_often_is_left_out_and_counted():
    """IcePop: ratios of 3, 0.5 and 1.5; the last one has its weight as it is."""
    engine = log(0.2, 0.6, 0.2)
    for objective, weights in (
        (replace(GRPO, mask_above=2.0), [0.0, 0.5, 1.5]),
        (replace(GRPO, mask_below=0.6, mask_above=2.0), [0.0, 0.0, 1.5]),
    ):
        result, gradient = evaluate((0.6, 0.3, 0.3), 1.0, objective, engine_logprobs=engine)
        assert gradient == pytest.approx([-w for w in weights])
        assert result.sums["train/tis_clipfrac"] == weights.count(0.0)
    result, gradient = evaluate(
        (0.6, 0.3, 0.3), 1.0, replace(GRPO, mask_below=0.6), engine_logprobs=engine, tis_cap=2.0
    )
    assert gradient == pytest.approx([-2.0, 0.0, -1.5])
    assert result.sums["train/tis_clipfrac"] == 2


def test_the_weight_of_a_sequence_is_the_product_over_its_tokens():
    """Two sequences, of ratios 3 · 0.5 and 0.5 · 0.5."""
    engine, sample = log(0.2, 0.6, 0.6, 0.6), torch.tensor([0, 0, 1, 1])
    objective = replace(GRPO, tis_level="sequence")
    given = {"engine_logprobs": engine, "sample": sample}
    assert evaluate((0.6, 0.3, 0.3, 0.3), 1.0, objective, tis_cap=1.2, **given)[1] == pytest.approx(
        [-1.2, -1.2, -0.25, -0.25]
    )
    masked = replace(objective, mask_below=0.5, mask_above=2.0)
    assert evaluate((0.6, 0.3, 0.3, 0.3), 1.0, masked, **given)[1] == pytest.approx([-1.5, -1.5, 0.0, 0.0])
    with pytest.raises(ValueError, match="sequence"):
        evaluate((0.6,), 1.0, objective, engine_logprobs=log(0.5), tis_cap=2.0)


def test_a_trust_region_masks_what_moves_on_away_from_the_engine_and_lets_what_comes_back():
    """Probabilities .5, .1 and .9 of policy against .3, .3 and .88 of the engine: differences .2, −.2, .02."""
    probabilities, engine = (0.5, 0.1, 0.9), log(0.3, 0.3, 0.88)
    ratios = [0.5 / 0.3, 0.1 / 0.3, 0.9 / 0.88]
    tv = objective_for(LossConfig(trust_region="tv"))
    up, gradient = evaluate(probabilities, 1.0, tv, engine_logprobs=engine)
    assert gradient == pytest.approx([0.0, -ratios[1], -ratios[2]])
    down, gradient = evaluate(probabilities, -1.0, tv, engine_logprobs=engine)
    assert gradient == pytest.approx([ratios[0], 0.0, ratios[2]])
    assert up.sums["train/pg_clipfrac"] == down.sums["train/pg_clipfrac"] == 1
    wide = objective_for(LossConfig(trust_region="tv", clip_low=0.25, clip_high=0.1))
    assert evaluate(probabilities, -1.0, wide, engine_logprobs=engine)[1] == pytest.approx(ratios)
    assert evaluate(probabilities, 1.0, wide, engine_logprobs=engine)[1][0] == 0.0


def test_where_the_bounds_of_a_trust_region_lie():
    """By KL of taken or not, q log q/p + (1 − q) log (1 − q)/(1 − p): .0495 and .0505 here, on both sides of .05."""
    kl = objective_for(LossConfig(trust_region="kl"))
    for p, inside in ((0.6535, True), (0.655, False)):
        divergence = 0.5 * np.log(0.5 / p) + 0.5 * np.log(0.5 / (1 - p))
        assert (divergence < 0.05) == inside
        assert (evaluate((p,), 1.0, kl, engine_logprobs=log(0.5))[1] != [0.0]) == inside


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_trust_region_takes_probabilities_of_nothing_and_of_one(kind: str):
    """As they come from rounding: numbers, and no NaN in a gradient."""
    policy = torch.tensor([-1e-9, -200.0, 0.0, -1.0], dtype=torch.float32, requires_grad=True)
    engine = torch.tensor([0.0, -0.1, -1e-9, -np.inf], dtype=torch.float32)
    for advantage in (1.0, -1.0):
        result = token_losses(
            objective_for(LossConfig(trust_region=kind)),
            logprobs=policy,
            old_logprobs=None,
            engine_logprobs=engine,
            reference_logprobs=None,
            advantage=torch.full((4,), advantage),
            kl_coef=0.0,
            tis_cap=None,
        )
        (gradient,) = torch.autograd.grad(result.loss.sum(), policy)
        assert gradient.isfinite().all() and result.loss.isfinite().all()


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_on_policy_all_objectives_have_the_gradient_of_reinforce(name: str):
    for advantage in (2.0, -0.5):
        _, gradient = evaluate((0.5, 0.1), advantage, OBJECTIVES[name], sample=torch.tensor([0, 0]))
        assert gradient == pytest.approx([-advantage] * 2)


def test_the_engine_correction_leaves_the_kl_term_alone():
    _, gradient = evaluate(
        (0.5,), 0.0, engine_logprobs=log(0.25), tis_cap=2.0, kl_coef=0.1, reference_logprobs=log(0.25)
    )
    assert gradient == pytest.approx([0.05])


def test_metrics_are_sums_over_tokens_without_gradient():
    result, _ = evaluate((0.5, 0.3), 1.0, old_logprobs=log(0.4, 0.4), engine_logprobs=log(0.4, 0.2))
    sums = {name: value.item() for name, value in result.sums.items()}
    assert sums == {
        "train/pg_loss": pytest.approx(-1.2 - 0.75),
        "train/pg_clipfrac": 1,
        "train/tis_clipfrac": 0,
        "train/ppo_kl": pytest.approx(np.log(0.4 / 0.5) + np.log(0.4 / 0.3)),
        "train/kl_loss": 0.0,
        "train/rollout_logprob_abs_diff": pytest.approx(np.log(2.0)),
        "train/token_mult_prob_error": pytest.approx(1.0 + 2.0),
        "fresh_tokens": 2,
    }
    assert not any(value.requires_grad for value in result.sums.values())


def test_mismatch_is_summed_over_fresh_tokens_only_and_never_overflows():
    """Also where an engine gave a token no chance at all: that is past every limit, and a number all the same."""
    engine = torch.tensor([np.log(0.2), -np.inf, -700.0], dtype=torch.float32)
    stale = {"engine_logprobs": engine, "tis_cap": 2.0, "fresh": torch.tensor([True, False, False])}
    result, _ = evaluate((0.4, 0.5, 0.5), 1.0, **stale)
    assert result.sums["fresh_tokens"] == 1
    assert result.sums["train/rollout_logprob_abs_diff"].item() == pytest.approx(np.log(2.0))
    assert result.sums["train/token_mult_prob_error"].item() == pytest.approx(2.0)
    assert result.loss.tolist() == [-2.0, -2.0, -2.0], "the others are corrected, and not compared"
    result, _ = evaluate((0.5,), 1.0, engine_logprobs=engine[2:].double().expand(1))
    assert np.isfinite(result.sums["train/token_mult_prob_error"].float().item())


def test_no_tokens_give_no_loss():
    empty = torch.zeros(0)
    result = token_losses(
        GRPO,
        logprobs=empty.clone().requires_grad_(),
        old_logprobs=None,
        engine_logprobs=empty,
        reference_logprobs=None,
        advantage=empty,
        kl_coef=0.0,
        tis_cap=None,
    )
    assert result.loss.sum() == 0.0


def test_a_run_may_set_its_own_clips():
    assert objective_for(LossConfig(name="dapo")) == DAPO
    objective = objective_for(LossConfig(name="dapo", clip_low=0.0, clip_high=0.5))
    assert (objective.clip_low, objective.clip_high, objective.aggregation) == (0.0, 0.5, "token_mean")


FAR = torch.tensor([95.0, 400.0, 30.0, 0.1, -200.0])
"""Log-ratios, of which e^x overflows in single precision for two."""


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_an_overflow_of_a_ratio_is_no_nan(name: str, advantage: float):
    """Each token is a sequence by itself, so that ratios of sequences are as far apart."""
    policy = (-1.0 - torch.zeros(5)).requires_grad_()
    result = token_losses(
        OBJECTIVES[name],
        logprobs=policy,
        old_logprobs=policy.detach() - FAR,
        engine_logprobs=policy.detach() - 2 * FAR,
        reference_logprobs=None,
        advantage=torch.full((5,), advantage),
        kl_coef=0.0,
        tis_cap=2.0,
        sample=torch.arange(5),
    )
    (gradient,) = torch.autograd.grad(result.loss.sum(), policy)
    assert result.loss.isfinite().all() and gradient.isfinite().all()
    assert all(value.isfinite() for value in result.sums.values())
    clipped = name not in ("cispo", "rloo", "sapo")
    if advantage > 0.0 and clipped:
        assert (gradient[:3] == 0.0).all() and gradient[3] == (0.0 if name == "gspo" else pytest.approx(-2.4428, 1e-3))
    if advantage < 0.0 and clipped:
        assert (gradient[:3] >= 1e8).all(), "not clipped from above: the formula's sign, and finite"
    assert advantage or (gradient == 0.0).all()


def test_a_weight_of_an_overflowing_ratio_is_a_number_without_a_cap():
    masked = replace(GRPO, mask_below=0.5)
    for level in ("token", "sequence"):
        result, gradient = evaluate(
            (0.5,),
            1.0,
            replace(masked, tis_level=level),
            engine_logprobs=log(0.5) - 800,
            sample=torch.zeros(1, dtype=int),
        )
        assert result.loss.isfinite().all() and np.isfinite(gradient).all()


def test_k3_of_an_overflow_is_finite_and_pulls_toward_the_reference():
    policy = torch.full((4,), -100.0).requires_grad_()
    values = k3(policy, torch.tensor([-5.0, -0.1, -81.0, -300.0]))
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    assert values.isfinite().all() and (values > 0.0).all()
    assert values[2].item() == pytest.approx(np.exp(19.0) - 20.0, rel=1e-5)
    assert gradient[:2].tolist() == pytest.approx([1.0 - np.exp(20.0)] * 2, rel=1e-5)
    assert gradient[3] == pytest.approx(1.0)
    assert values[1] > values[0]
