"""Bias and variance of the importance weights' levels, by enumeration: every response of a small
policy, one update after it was sampled.

The exact gradient is Σ_y p(y) A(y) ∇log p(y), with p, the updated policy. The samples are from the
policy before the update, with probability q(y). A level is judged by the mean over q of a sampled
response's gradient, and by the sum of its variances.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_dppo.rl.losses import compute_token_losses
from megatron_dppo.rl.objectives import OBJECTIVES

VOCABULARY, LENGTH, CAP = 3, 5, 2.0
RESPONSES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
SAMPLE = torch.arange(len(RESPONSES)).repeat_interleave(LENGTH)
ROUNDING = 1e-9


def score(logits: Tensor) -> Tensor:
    """Return log-probabilities [responses, LENGTH] under logits by position and previous token."""
    before = torch.nn.functional.pad(RESPONSES[:, :-1], (1, 0), value=VOCABULARY)
    distributions = torch.log_softmax(logits[torch.arange(LENGTH), before], dim=-1)
    return distributions.gather(2, RESPONSES[..., None])[..., 0]


def draw_policy(seed: int, drift: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, the logits of an update that moves a token's log-probability by ``drift`` on
    average, and advantages [responses] of random rewards 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    shape = LENGTH, VOCABULARY + 1, VOCABULARY
    logits = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    rewards = (torch.rand(len(RESPONSES), generator=generator) < 0.3).double()
    logprobs = score(logits).sum(dim=1)
    probabilities = logprobs.exp().detach()
    advantages = rewards - probabilities @ rewards
    drawn = torch.multinomial(probabilities, 8, replacement=True, generator=generator)
    (update,) = torch.autograd.grad((advantages[drawn] * logprobs[drawn]).sum(), logits)
    logits = logits.detach()
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2.0
        moved = (score(logits + middle * update) - score(logits)).abs().mean(dim=1)
        low, high = (middle, high) if probabilities @ moved < drift else (low, middle)
    return logits, logits + low * update, advantages


def measure_level(
    level: str, cap: float | None, seed: int, drift: float = 0.05
) -> tuple[float, float]:
    """Return the bias over the exact gradient's norm, and the variance over its square."""
    before, after, advantages = draw_policy(seed, drift)
    engine = score(before)
    chances = engine.sum(dim=1).exp()
    objective = replace(OBJECTIVES["rloo"], tis_level=level)

    def compute_losses(logits: Tensor) -> Tensor:
        losses, _ = compute_token_losses(
            objective,
            logprobs=score(logits).flatten(),
            old_logprobs=None,
            engine_logprobs=engine.flatten(),
            reference_logprobs=None,
            advantage=advantages.repeat_interleave(LENGTH),
            kl_coef=0.0,
            tis_cap=1e9 if cap is None else cap,
            sample=SAMPLE,
        )
        return losses.view(-1, LENGTH).sum(dim=1)

    rows = -torch.autograd.functional.jacobian(compute_losses, after).flatten(1)
    exact = torch.autograd.functional.jacobian(
        lambda logits: advantages @ score(logits).sum(dim=1).exp(), after
    ).flatten()
    mean = chances @ rows
    variance = chances @ (rows**2).sum(dim=1) - mean @ mean
    return float((mean - exact).norm() / exact.norm()), float(variance / (exact @ exact))


def test_product_over_the_sequence_is_unbiased() -> None:
    for seed in range(3):
        bias, _ = measure_level("sequence", None, seed)
        assert bias < ROUNDING
        assert measure_level("prefix", None, seed)[0] > 1e-3


@pytest.mark.parametrize("cap", [CAP, None])
def test_prefix_is_less_biased_than_the_token_and_varies_less_than_the_sequence(
    cap: float | None,
) -> None:
    """The bias of every policy, and the mean relative variance of all."""
    excess = []
    for seed in range(6):
        token, prefix, sequence = (
            measure_level(level, cap, seed) for level in ("token", "prefix", "sequence")
        )
        assert prefix[0] < token[0]
        excess.append(sequence[1] / prefix[1] - 1.0)
    assert sum(excess) / len(excess) > 0.01
