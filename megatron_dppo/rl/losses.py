"""The loss of each token, in torch. The plan says how token losses are weighted, divided and summed.

The pruning weight multiplies the finished loss of a token. Inside the minimum it would move the clip, and change the
expectation of clipped completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.rl.objectives import Objective

MISMATCH = ("train/rollout_logprob_abs_diff", "train/token_mult_prob_error")
FRESH_TOKENS = "fresh_tokens"
"""How many tokens the sums of ``MISMATCH`` are over."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """What ``token_losses`` returns.

    Two tokens of probability 0.5, which was 0.4 before, with an advantage of 1 under GRPO have ``loss`` [−1.2, −1.2]:
    their ratios of 1.25 are clipped. ``sums["train/pg_clipfrac"]`` is 2.
    """

    loss: Tensor
    """[R], to be multiplied by the samples' ``scale`` and summed, and divided by nothing."""
    sums: Mapping[str, Tensor]
    """Sums over the R tokens, without gradient, by metric. Divided by the number of tokens they are the metric. Those
    of ``MISMATCH`` are to be divided by the sum named ``FRESH_TOKENS``."""


def token_losses(
    objective: Objective,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    engine_logprobs: Tensor,
    reference_logprobs: Tensor | None,
    advantage: Tensor,
    kl_coef: float,
    tis_cap: float | None,
    sample: Tensor | None = None,
    samples: int | None = None,
    fresh: Tensor | None = None,
) -> TokenLosses:
    """−ℓ of R response tokens: the clipped surrogate of PPO, corrected for the engine, plus the KL to a reference.

        ℓ = w · min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A) − β KL,    ρ = exp(log p − log p_old)

    Args:
        objective: gives the clips and the kind of ratio.
        logprobs: [R], of the policy, with gradient.
        old_logprobs: [R], of the policy before the rollout's first update; None: of this policy, so that ρ is 1 with
            the gradient of log p.
        engine_logprobs: [R], as reported by the engine that sampled the tokens.
        reference_logprobs: [R], of the policy that KL is measured to; may be None if ``kl_coef`` is 0.
        advantage: [R], of the token's completion.
        kl_coef: β.
        tis_cap: cap of the truncated importance weight w = min(p_old / p_engine, cap), a constant to the gradient;
            None: w is 1. It corrects for an engine that samples from a slightly different distribution, or with older
            weights.
        sample: [R], which of the pack's samples a token belongs to, from 0. A ratio per sequence needs it.
        samples: their number; None: it is worked out, for which the CPU waits for a GPU.
        fresh: [R] of bool, the tokens that the engine made with the weights of ``old_logprobs``; None: all. The others
            differ rightly, and are left out of the sums of ``MISMATCH``.

    Raises:
        ValueError: ``kl_coef`` is positive and there is no reference, or ``sample`` is needed and not given.
    """
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = torch.exp(logprobs - old) if objective.ratio == "token" else _sequence_ratio(logprobs, old, sample, samples)
    unclipped = ratio * advantage
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high) * advantage
    policy_loss = -torch.minimum(unclipped, clipped)
    if tis_cap is not None:
        policy_loss = policy_loss * torch.exp(old - engine_logprobs).clamp(max=tis_cap).detach()

    if reference_logprobs is None and kl_coef > 0.0:
        raise ValueError("kl_coef is positive, but no log-probabilities of the reference were given")
    divergence = torch.zeros_like(logprobs) if reference_logprobs is None else k3(logprobs, reference_logprobs)
    loss = policy_loss + kl_coef * divergence if kl_coef > 0.0 else policy_loss
    with torch.no_grad():
        sums = {
            "train/pg_loss": policy_loss.sum(),
            "train/pg_clipfrac": (clipped < unclipped).sum(),
            "train/ppo_kl": (old - logprobs).sum(),
            "train/kl_loss": divergence.sum(),
            **_mismatch_sums((old - engine_logprobs).abs(), fresh),
        }
    return TokenLosses(loss, sums)


def _mismatch_sums(mismatch: Tensor, fresh: Tensor | None) -> dict[str, Tensor]:
    """The sums of ``MISMATCH``, and the number of tokens that they are over. [R] both."""
    fresh = torch.ones_like(mismatch, dtype=torch.bool) if fresh is None else fresh
    return {
        "train/rollout_logprob_abs_diff": torch.where(fresh, mismatch, 0.0).sum(),
        # e^50 is past every limit, and more would overflow.
        "train/token_mult_prob_error": torch.where(fresh, mismatch.clamp(max=50.0).exp(), 0.0).sum(),
        FRESH_TOKENS: fresh.sum(),
    }


def _sequence_ratio(logprobs: Tensor, old: Tensor, sample: Tensor | None, samples: int | None) -> Tensor:
    """GSPO's ratio in its form for tokens (arXiv:2507.18071, equation 14).

    Each token has ρ = exp(mean over its sequence of log p − log p_old), with the gradient of the token's own log p.
    Summed over a sequence that is the gradient of its ratio.
    """
    if sample is None:
        raise ValueError("a ratio per sequence needs to know which tokens make up a sequence")
    logprobs_now = logprobs.detach()
    samples = int(sample.max()) + 1 if samples is None and len(sample) else samples or 0
    none = logprobs_now.new_zeros(samples)
    total = none.index_add(0, sample, logprobs_now - old)
    mean = total / none.index_add(0, sample, torch.ones_like(logprobs_now)).clamp(min=1)
    return torch.exp(mean[sample] + logprobs - logprobs_now)


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Schulman's estimate of KL(policy ‖ reference) from one sample: d = log p_ref − log p, and e^d − d − 1.

    Never negative, zero where both agree, and differentiable through ``logprobs``: that is GRPO's KL term
    (arXiv:2402.03300, equation 4). [R] in, [R] out.
    """
    difference = reference_logprobs - logprobs
    return torch.exp(difference) - difference - 1.0
