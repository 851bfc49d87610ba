"""Losses of tokens, in torch. The plan defines weights, divisor and sum of token losses.

The pruning weight multiplies the finished loss of a token: inside the minimum it would move the
clip, and change the expectation of clipped completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dppo.rl.objectives import Objective, Surrogate

MISMATCH = ("train/rollout_logprob_abs_diff", "train/token_mult_prob_error")
FRESH_TOKENS = "fresh_tokens"
"""Metric: number of tokens in the sums of ``MISMATCH``."""
SAPO_TEMPERATURES = (1.0, 1.05)
"""Temperatures of SAPO's gate (arXiv:2511.20347): for positive, and for all other advantages."""
LARGEST_LOG_RATIO = 20.0
"""Ratios grow linearly above this log-ratio, see ``compute_ratio``; in a trust region they have no
gradient there."""


def compute_token_losses(
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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return −ℓ of R response tokens, and sums of metrics.

        ℓ = w · f(ρ, A) − β KL,    ρ = exp(log p − log p_old)

    f is a function of ``SURROGATES``, w corrects for the engine, and KL is the divergence from a
    reference. w and its masks do not apply to the KL.

    Two tokens of probability 0.5, 0.4 before the update, with advantage 1 under GRPO have the
    losses [−1.2, −1.2]: the ratios of 1.25 are clipped, and the sum ``train/pg_clipfrac`` is 2.

    Args:
        objective: the surrogate f with clips, and the level and the masks of w.
        logprobs: [R], under the policy, with gradient.
        old_logprobs: [R], before the rollout's first update; None: ``logprobs``, so that ρ is 1
            with the gradient of log p.
        engine_logprobs: [R], from the engine that sampled the tokens.
        reference_logprobs: [R], under the reference policy of the KL; None if ``kl_coef`` is 0.
        advantage: [R].
        kl_coef: β.
        tis_cap: cap of the importance weight w; None: no truncation, and w = 1 without masks.
        sample: [R], training sample of each token: index in the pack. Needed for ratios, means
            and weights of sequences.
        samples: number of samples; None: computed from ``sample``, with the CPU waiting for a
            GPU.
        fresh: [R], True for tokens sampled with the weights of ``old_logprobs``; None: all
            True.

    Returns:
        - [R], losses. A minibatch's loss is the sum of losses times the sample's ``scale``,
          without a divisor.
        - Sums by metric, without gradient. A metric is the sum divided by the number of tokens,
          or by ``FRESH_TOKENS`` for ``MISMATCH``.

    Raises:
        ValueError: ``kl_coef`` is positive without a reference, or ``sample`` is needed and None.
    """
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    sequences = Sequences(sample, samples)
    named = objective.surrogate
    surrogate, clipped = (named if callable(named) else SURROGATES[named])(
        Tokens(objective, logprobs, old, engine_logprobs, advantage, sequences)
    )
    policy_loss = -surrogate
    corrected = tis_cap is not None or objective.mask_below > 0.0 or objective.mask_above < math.inf
    limited = torch.zeros_like(clipped)
    if corrected:
        weight, limited = _compute_engine_weight(
            objective, old - engine_logprobs, tis_cap, sequences
        )
        policy_loss = policy_loss * weight

    if reference_logprobs is None and kl_coef > 0.0:
        raise ValueError(
            "kl_coef is positive, but no log-probabilities of the reference were given"
        )
    divergence = (
        torch.zeros_like(logprobs)
        if reference_logprobs is None
        else k3(logprobs, reference_logprobs)
    )
    loss = policy_loss + kl_coef * divergence if kl_coef > 0.0 else policy_loss
    with torch.no_grad():
        sums = {
            "train/pg_loss": policy_loss.sum(),
            "train/pg_clipfrac": clipped.sum(),
            "train/tis_clipfrac": limited.sum(),
            "train/ppo_kl": (old - logprobs).sum(),
            "train/kl_loss": divergence.sum(),
            **_sum_mismatch((old - engine_logprobs).abs(), fresh),
        }
    return loss, sums


def _sum_mismatch(mismatch: Tensor, fresh: Tensor | None) -> dict[str, Tensor]:
    # Tokens of older weights are excluded, because a difference is correct for these tokens.
    fresh = torch.ones_like(mismatch, dtype=torch.bool) if fresh is None else fresh
    # e^50 is past every limit, and more would overflow.
    factor = mismatch.clamp(max=50.0).exp()
    return {
        "train/rollout_logprob_abs_diff": torch.where(fresh, mismatch, 0.0).sum(),
        "train/token_mult_prob_error": torch.where(fresh, factor, 0.0).sum(),
        FRESH_TOKENS: fresh.sum(),
    }


def compute_ratio(log_ratio: Tensor) -> Tensor:
    """Return e^x [R] of log-ratios x [R], continued by the tangent above ``LARGEST_LOG_RATIO``."""
    # In single precision e^x is infinite from x = 89 on, and a clipped token would have the
    # gradient 0·∞ = NaN, not 0. The tangent keeps values and gradients finite, with the same sign,
    # and exceeds every clip and mask, as does e^x.
    capped = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return torch.exp(capped) * (1.0 + (log_ratio - capped))


@dataclass(frozen=True, slots=True)
class Sequences:
    """Training sample of each of R tokens, and the number of samples."""

    sample: Tensor | None
    samples: int | None

    def sums(self, values: Tensor, *, mean: bool = False) -> Tensor:
        """Return the sum, or the mean, of ``values`` [R] over each token's sequence, [R].

        Raises:
            ValueError: ``sample`` is None.
        """
        sample = self._get_sample()
        values = values.detach()
        samples = self.samples or 0
        # Only without a given number, because max() makes the CPU wait for the GPU.
        if self.samples is None and len(sample):
            samples = int(sample.max()) + 1
        none = values.new_zeros(samples)
        total = none.index_add(0, sample, values)
        if mean:
            total = total / none.index_add(0, sample, torch.ones_like(values)).clamp(min=1)
        return total[sample]

    def prefix_sums(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` [R] over each token's sequence up to the token, [R].

        Samples ascend, as in a pack.

        Raises:
            ValueError: ``sample`` is None.
        """
        sample = self._get_sample()
        # In double precision, because the sums of all earlier sequences are subtracted.
        exact = values.detach().double()
        before = exact.cumsum(0) - exact
        first = torch.searchsorted(sample, sample)
        return (before - before[first] + exact).to(values.dtype)

    def _get_sample(self) -> Tensor:
        if self.sample is None:
            raise ValueError("a ratio or a weight per sequence requires the tokens' sequences")
        return self.sample


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a surrogate, and of ``loss.objective``. Tensors are [R].

    Two tokens of one sequence with ``logprobs`` [−0.5, −1.0] and ``old`` [−0.7, −1.0] have the
    ``ratio`` [1.22, 1.0].
    """

    objective: Objective
    logprobs: Tensor
    """Under the policy, with gradient."""
    old: Tensor
    """Log-probabilities before the rollout's first update; for one update, ``logprobs`` without
    gradient."""
    engine: Tensor
    """Log-probabilities of the sampling engine."""
    advantage: Tensor
    sequences: Sequences
    """``sums(values)`` and ``sums(values, mean=True)``: sum and mean over each token's sequence."""

    @property
    def limits(self) -> tuple[float, float]:
        """Clip of the ratio: 1 − ``loss.clip_low`` and 1 + ``loss.clip_high``."""
        return 1.0 - self.objective.clip_low, 1.0 + self.objective.clip_high

    @property
    def ratio(self) -> Tensor:
        """exp(log p − log p_old), or GSPO's ratio for tokens (arXiv:2507.18071, equation 14).

        GSPO's ratio is exp(mean over the sequence of log p − log p_old), with the gradient of the
        token's own log p. These gradients add up to the gradient of the sequence's ratio.
        """
        log_ratio = self.logprobs - self.old
        if self.objective.ratio == "token":
            return compute_ratio(log_ratio)
        mean = self.sequences.sums(log_ratio, mean=True)
        # Adds 0 to the value, and the gradient of log p.
        return compute_ratio(mean + self.logprobs - self.logprobs.detach())


def _compute_ppo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Compute min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)."""
    ratio = tokens.ratio
    unclipped = ratio * tokens.advantage
    clipped = ratio.clamp(*tokens.limits) * tokens.advantage
    return torch.minimum(unclipped, clipped), clipped < unclipped


def _compute_cispo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Compute CISPO's clip(ρ, 1 − ε_low, 1 + ε_high) A log p (arXiv:2506.13585, equations 4 and
    5)."""
    # The clipped ratio is a constant weight, so that clipped tokens keep a gradient.
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(*tokens.limits)
    return weight * tokens.advantage * tokens.logprobs, weight != ratio


def _compute_sapo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Compute SAPO's A · 4/τ · sigmoid(τ (ρ − 1)), without a clip (arXiv:2511.20347)."""
    positive, others = SAPO_TEMPERATURES
    temperature = torch.full_like(tokens.advantage, others).masked_fill(
        tokens.advantage > 0.0, positive
    )
    # With the factor 4/τ the gradient at ρ = 1 is A ∇ρ.
    gate = torch.sigmoid(temperature * (tokens.ratio - 1.0)) * 4.0 / temperature
    return gate * tokens.advantage, torch.zeros_like(gate, dtype=torch.bool)


def _compute_gmpo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Compute GMPO's A times the geometric mean of a sequence's ratios (arXiv:2507.20673).

    Each ratio is clipped as in PPO; a clipped token has the gradient 0.
    """
    low, high = (math.log(limit) for limit in tokens.limits)
    log_ratio = tokens.logprobs - tokens.old
    positive = tokens.advantage > 0.0
    clipped = torch.where(positive, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    # As in GSPO: the value of the sequence, and the gradient of the token.
    mean = compute_ratio(tokens.sequences.sums(clipped, mean=True) + clipped - clipped.detach())
    return mean * tokens.advantage, clipped != log_ratio


def _compute_tv(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Apply the trust region with D = |q − p|, of policy p and engine q (equation 13)."""
    p = tokens.logprobs.detach().exp()
    q = tokens.engine.exp()
    return _apply_trust_region(tokens, (q - p).abs())


def _compute_binary_kl(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Apply the trust region with D = q log q/p + (1 − q) log (1 − q)/(1 − p) (equation 14)."""
    least = torch.finfo(tokens.logprobs.dtype).tiny

    def term(engine_prob: Tensor, policy_prob: Tensor) -> Tensor:
        # A probability may be 0 in single precision.
        return torch.xlogy(engine_prob, engine_prob / policy_prob.clamp(min=least))

    log_p = tokens.logprobs.detach()
    log_q = tokens.engine
    divergence = term(log_q.exp(), log_p.exp()) + term(-log_q.expm1(), -log_p.expm1())
    return _apply_trust_region(tokens, divergence)


def _apply_trust_region(tokens: Tokens, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the surrogate of Divergence PPO (arXiv:2602.04879, equation 12): M · p/q · A.

    q is the engine's probability. M is 0 if D exceeds its bound and the update would move p away
    from q, else 1.
    """
    away = tokens.logprobs.detach() - tokens.engine
    advantage = tokens.advantage
    rises = (advantage > 0.0) & (away > 0.0) & (divergence > tokens.objective.clip_high)
    falls = (advantage < 0.0) & (away < 0.0) & (divergence > tokens.objective.clip_low)
    ratio = (tokens.logprobs - tokens.engine).clamp(max=LARGEST_LOG_RATIO).exp()
    return torch.where(rises | falls, 0.0, ratio * advantage), rises | falls


SURROGATES: Mapping[Surrogate, Callable[[Tokens], tuple[Tensor, Tensor]]] = {
    "clipped": _compute_ppo,
    "weighted": _compute_cispo,
    "gated": _compute_sapo,
    "geometric": _compute_gmpo,
    "tv": _compute_tv,
    "kl": _compute_binary_kl,
}
"""Functions of R tokens: surrogate [R], and True for clipped or masked tokens [R]."""


def _compute_engine_weight(
    objective: Objective,
    log_ratio: Tensor,
    cap: float | None,
    sequences: Sequences,
) -> tuple[Tensor, Tensor]:
    """Return w = min(p_old / p_engine, cap), or 0 outside of the objective's masks.

    - w corrects for an engine that samples from a slightly different distribution, or with older
      weights.
    - With a cap, w is the weight of TIS; with masks and no cap, of IcePop (arXiv:2510.18855).
    - At the level of sequences, p is the probability of all tokens of a sequence; at the level of
      prefixes, of the sequence's tokens up to the token.

    Args:
        log_ratio: [R], log p_old − log p_engine.
        cap: largest w; None: no truncation.

    Returns:
        w [R], without gradient, and True for truncated or masked tokens [R].
    """
    match objective.tis_level:
        case "token":
            log_ratio = log_ratio.detach()
        case "prefix":
            log_ratio = sequences.prefix_sums(log_ratio)
        case "sequence":
            log_ratio = sequences.sums(log_ratio)
    ratio = compute_ratio(log_ratio)
    masked = (ratio < objective.mask_below) | (ratio > objective.mask_above)
    weight = torch.where(masked, 0.0, ratio if cap is None else ratio.clamp(max=cap))
    return weight, weight != ratio


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return Schulman's one-sample estimate [R] of KL(policy ‖ reference).

    e^d − d − 1 with d = log p_ref − log p: GRPO's KL term (arXiv:2402.03300, equation 4); never
    negative, 0 at equal probabilities, and differentiable through ``logprobs``.
    """
    difference = reference_logprobs - logprobs
    # The ratio grows linearly at the end, so that the estimate stays finite.
    return compute_ratio(difference) - difference - 1.0
