"""The losses against numbers written by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.config import LossConfig
from megatron_dppo.rl.losses import FRESH_TOKENS, MISMATCH, compute_token_losses, k3
from megatron_dppo.rl.objectives import OBJECTIVES, resolve_objective

GRPO, DAPO = OBJECTIVES["grpo"], OBJECTIVES["dapo"]
BY_SEQUENCE = replace(GRPO, tis_level="sequence")
NONE = {"old_logprobs": None, "reference_logprobs": None, "kl_coef": 0.0, "tis_cap": None}


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def evaluate(
    logprobs: torch.Tensor, advantage: float, objective=GRPO, **options: Any
) -> tuple[Any, Any, Any]:
    """Return the losses of tokens with these log-probabilities, their sums, and the gradient of
    their sum."""
    logprobs = logprobs.clone().requires_grad_()
    given = NONE | {
        "engine_logprobs": logprobs.detach(),
        "advantage": torch.full_like(logprobs, advantage).detach(),
    }
    losses, sums = compute_token_losses(objective, logprobs=logprobs, **(given | options))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    return losses, sums, gradient


def test_kl_term_is_k3_without_the_weight_of_the_engine():
    given = {"reference_logprobs": log(0.25), "engine_logprobs": log(0.25), "tis_cap": 2.0}
    losses, _, gradient = evaluate(log(0.5), 0.0, kl_coef=0.1, **given)
    assert losses.tolist() == pytest.approx([0.1 * (0.5 - np.log(0.5) - 1)])
    assert gradient.item() == pytest.approx(0.1 * (1 - 0.5))
    _, sums, gradient = evaluate(log(0.5), 1.0, reference_logprobs=log(0.25))
    assert gradient.item() == -1.0
    assert sums["train/kl_loss"].item() == pytest.approx(0.5 - np.log(0.5) - 1)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_trust_region_takes_probabilities_of_zero_and_one(kind: str, advantage: float):
    policy, engine = (
        torch.tensor([-1e-9, -200.0, 0.0, -1.0]),
        torch.tensor([0.0, -0.1, -1e-9, -np.inf]),
    )
    objective = resolve_objective(LossConfig(trust_region=kind))
    losses, _, gradient = evaluate(policy, advantage, objective, engine_logprobs=engine)
    assert gradient.isfinite().all() and losses.isfinite().all()


def test_metrics_are_sums_over_tokens_without_gradient():
    _, sums, _ = evaluate(
        log(0.5, 0.3), 1.0, old_logprobs=log(0.4, 0.4), engine_logprobs=log(0.4, 0.2), tis_cap=1.5
    )
    assert {name: value.item() for name, value in sums.items()} == {
        "train/pg_loss": pytest.approx(-1.2 - 1.5 * 0.75),
        "train/pg_clipfrac": 1,
        "train/tis_clipfrac": 1,
        "train/ppo_kl": pytest.approx(np.log(0.4 / 0.5) + np.log(0.4 / 0.3)),
        "train/kl_loss": 0.0,
        "train/rollout_logprob_abs_diff": pytest.approx(np.log(2.0)),
        "train/token_mult_prob_error": pytest.approx(1.0 + 2.0),
        "fresh_tokens": 2,
    }
    assert not any(value.requires_grad for value in sums.values())


def test_mismatch_is_summed_over_fresh_tokens_alone():
    """Stale tokens are corrected, and not compared; a token that the engine gave no chance at all
    does not overflow."""
    engine = torch.tensor([np.log(0.2), -np.inf, -700.0], dtype=torch.float32)
    stale = {"engine_logprobs": engine, "tis_cap": 2.0, "fresh": torch.tensor([True, False, False])}
    losses, sums, _ = evaluate(log(0.4, 0.5, 0.5), 1.0, **stale)
    assert losses.tolist() == [-2.0, -2.0, -2.0]
    assert [sums[name].item() for name in (*MISMATCH, FRESH_TOKENS)] == pytest.approx(
        [np.log(2.0), 2.0, 1.0]
    )


def test_no_tokens_give_no_loss():
    assert evaluate(torch.zeros(0), 1.0)[0].sum() == 0.0
    nothing = {"sample": torch.zeros(0).long()}
    assert evaluate(torch.zeros(0), 1.0, OBJECTIVES["gspo"], **nothing)[0].sum() == 0.0


FAR = torch.tensor([95.0, 400.0, 30.0, 0.1, -200.0])
"""Log-ratios, of which e^x overflows in single precision for two."""


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_overflow_of_a_ratio_is_no_nan(name: str, advantage: float):
    """Each token is a sequence by itself, so that ratios of sequences are as far apart."""
    given = {
        "old_logprobs": -1.0 - FAR,
        "engine_logprobs": -1.0 - 2 * FAR,
        "tis_cap": 2.0,
        "sample": torch.arange(5),
    }
    losses, sums, gradient = evaluate(torch.full((5,), -1.0), advantage, OBJECTIVES[name], **given)
    assert losses.isfinite().all() and gradient.isfinite().all()
    assert all(value.isfinite() for value in sums.values())
    assert sums["train/tis_clipfrac"] == 3
    clipped = name not in ("cispo", "rloo", "sapo")
    if advantage and clipped:
        count = 3 + (name == "gspo") if advantage > 0.0 else 1
        assert sums["train/pg_clipfrac"] == count
    if advantage > 0.0 and clipped:
        assert (gradient[:3] == 0.0).all() and gradient[3] == (
            0.0 if name == "gspo" else pytest.approx(-2.4428, 1e-3)
        )
    if advantage < 0.0 and clipped:
        assert (gradient[:3] >= 1e8).all(), "not clipped from above: the formula's sign, and finite"
    assert advantage or (gradient == 0.0).all()


@pytest.mark.parametrize("level", ["token", "prefix", "sequence"])
def test_weight_of_an_overflowing_ratio_is_finite_without_a_cap(level: str):
    objective = replace(GRPO, mask_below=0.5, tis_level=level)
    far = log(0.5) - 800
    losses, _, gradient = evaluate(
        log(0.5), 1.0, objective, engine_logprobs=far, sample=torch.zeros(1).long()
    )
    assert losses.isfinite().all() and gradient.isfinite().all()


def test_k3_of_an_overflow_is_finite_and_pulls_to_the_reference():
    policy = torch.full((4,), -100.0).requires_grad_()
    values = k3(policy, torch.tensor([-5.0, -0.1, -81.0, -300.0]))
    (gradient,) = torch.autograd.grad(values.sum(), policy)
    assert values.isfinite().all() and (values > 0.0).all()
    assert values[2].item() == pytest.approx(np.exp(19.0) - 20.0, rel=1e-5)
    assert gradient.tolist() == pytest.approx(
        [1 - np.exp(20.0), 1 - np.exp(20.0), 1 - np.exp(19.0), 1.0], rel=1e-5
    )
    assert values[1] > values[0]
