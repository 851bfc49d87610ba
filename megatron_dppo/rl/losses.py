"""The loss of each token, in torch. The plan says how token losses are weighted, divided and
summed.

The pruning weight multiplies the finished loss of a token. Inside the minimum it would move the
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
"""How many tokens the sums of ``MISMATCH`` are over."""
SAPO_TEMPERATURES = (1.0, 1.05)
"""Temperatures of SAPO's gate (arXiv:2511.20347) for positive and for other advantages."""
LARGEST_LOG_RATIO = 20.0
"""Log-ratio from which a ratio grows linearly, see ``compute_ratio``. In a trust region larger
ratios have no gradient."""


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
    """−ℓ of R response tokens: the objective's surrogate, corrected for the engine, less the KL to
    a reference.

        ℓ = w · f(ρ, A) − β KL,    ρ = exp(log p − log p_old)

    f is a function of ``SURROGATES``. w and its masks do not apply to the KL.

    Two tokens of probability 0.5, which was 0.4 before, with an advantage of 1 under GRPO have the
    losses [−1.2, −1.2]: their ratios of 1.25 are clipped. The sum ``train/pg_clipfrac`` is 2.

    Args:
        objective: gives the surrogate f with its clips, and the level and the masks of w.
        logprobs: [R], of the policy, with gradient.
        old_logprobs: [R], of the policy before the rollout's first update; None: of this policy, so
            that ρ is 1 with the gradient of log p.
        engine_logprobs: [R], as reported by the engine that sampled the tokens.
        reference_logprobs: [R], of the policy that KL is measured to; may be None if ``kl_coef`` is
            0.
        advantage: [R], of the token's completion.
        kl_coef: β.
        tis_cap: cap of the importance weight w, see ``_compute_engine_weight``; None: it is not
            truncated, and 1 where the objective masks nothing either.
        sample: [R], which of the pack's samples a token belongs to, from 0. Whatever is of a
            sequence needs it.
        samples: their number; None: it is worked out, for which the CPU waits for a GPU.
        fresh: [R] of bool, the tokens that the engine made with the weights of ``old_logprobs``;
            None: all. The others differ rightly, and are left out of the sums of ``MISMATCH``.

    Returns:
        - [R], the losses. They are multiplied by ``scale`` of their samples and summed, and divided
          by nothing.
        - Sums over the R tokens, without gradient, by metric. A metric is the sum divided by the
          number of tokens. The sums of ``MISMATCH`` are divided by ``FRESH_TOKENS`` instead.

    Raises:
        ValueError: ``kl_coef`` is positive and there is no reference, or ``sample`` is needed and
            not given.
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
    """The sums of ``MISMATCH``, and the number of tokens that they are over. [R] both."""
    fresh = torch.ones_like(mismatch, dtype=torch.bool) if fresh is None else fresh
    return {
        "train/rollout_logprob_abs_diff": torch.where(fresh, mismatch, 0.0).sum(),
        # e^50 is past every limit, and more would overflow.
        "train/token_mult_prob_error": torch.where(
            fresh, mismatch.clamp(max=50.0).exp(), 0.0
        ).sum(),
        FRESH_TOKENS: fresh.sum(),
    }


def compute_ratio(log_ratio: Tensor) -> Tensor:
    """e^x, continued by its tangent above ``LARGEST_LOG_RATIO``. [R] in, [R] out.

    In single precision e^x is infinite from x = 89 on. A token that is clipped would have the
    gradient 0·∞ = NaN, not
    0. The tangent keeps values and gradients finite, with their sign, and exceeds every clip and
        mask as e^x does.
    """
    capped = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return torch.exp(capped) * (1.0 + (log_ratio - capped))


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which of a pack's samples each of its R tokens belongs to."""

    sample: Tensor | None
    samples: int | None

    def sums(self, values: Tensor, *, mean: bool = False) -> Tensor:
        """[R], for each token the sum, or the mean, of ``values`` [R] over its sequence, without a
        gradient."""
        if self.sample is None:
            raise ValueError(
                "a ratio or a weight per sequence needs to know which tokens make up a sequence"
            )
        values = values.detach()
        samples = (
            int(self.sample.max()) + 1
            if self.samples is None and len(self.sample)
            else self.samples or 0
        )
        none = values.new_zeros(samples)
        total = none.index_add(0, self.sample, values)
        if mean:
            total = total / none.index_add(0, self.sample, torch.ones_like(values)).clamp(min=1)
        return total[self.sample]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a surrogate, and of ``loss.objective``. Tensors are [R]; ``logprobs`` has a
    gradient.

    Two tokens of one sequence, which have become likelier, may have ``logprobs`` [−0.5, −1.0],
    ``old`` [−0.7, −1.0] and ``advantage`` [1.0, 1.0]; their ``ratio`` is then [1.22, 1.0].
    """

    objective: Objective
    logprobs: Tensor
    """Policy's log-probabilities."""
    old: Tensor
    """Policy's log-probabilities before the rollout's first update; for one update ``logprobs``
    without gradient."""
    engine: Tensor
    """Log-probabilities of the sampling engine."""
    advantage: Tensor
    """Advantage of the token's completion."""
    sequences: Sequences
    """``sequences.sums(values)`` and ``sums(values, mean=True)`` give each token its sequence's sum
    or mean."""

    @property
    def limits(self) -> tuple[float, float]:
        """The clip of the ratio, 1 − ``loss.clip_low`` and 1 + ``loss.clip_high``."""
        return 1.0 - self.objective.clip_low, 1.0 + self.objective.clip_high

    @property
    def ratio(self) -> Tensor:
        """exp(log p − log p_old), or GSPO's in its form for tokens (arXiv:2507.18071, equation 14).

        There each token has ρ = exp(mean over its sequence of log p − log p_old), with the gradient
        of the token's own log p. Summed over a sequence that is the gradient of its ratio.
        """
        log_ratio = self.logprobs - self.old
        if self.objective.ratio == "token":
            return compute_ratio(log_ratio)
        return compute_ratio(
            self.sequences.sums(log_ratio, mean=True) + self.logprobs - self.logprobs.detach()
        )


def _compute_ppo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """PPO: min(ρ A, clip(ρ, 1 − ε_low, 1 + ε_high) A)."""
    ratio = tokens.ratio
    unclipped = ratio * tokens.advantage
    clipped = ratio.clamp(*tokens.limits) * tokens.advantage
    return torch.minimum(unclipped, clipped), clipped < unclipped


def _compute_cispo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """CISPO (arXiv:2506.13585, equations 4 and 5): clip(ρ, 1 − ε_low, 1 + ε_high) A log p, the clip
    a constant."""
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(*tokens.limits)
    return weight * tokens.advantage * tokens.logprobs, weight != ratio


def _compute_sapo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """SAPO (arXiv:2511.20347): A · 4/τ · sigmoid(τ (ρ − 1)), whose gradient at ρ = 1 is A ∇ρ.
    Nothing is clipped."""
    positive, others = SAPO_TEMPERATURES
    temperature = torch.full_like(tokens.advantage, others).masked_fill(
        tokens.advantage > 0.0, positive
    )
    gate = torch.sigmoid(temperature * (tokens.ratio - 1.0)) * 4.0 / temperature
    return gate * tokens.advantage, torch.zeros_like(gate, dtype=torch.bool)


def _compute_gmpo(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """GMPO (arXiv:2507.20673): A times the geometric mean of a sequence's ratios, each clipped as
    PPO clips it.

    As with GSPO each token has the value of its sequence and a gradient of its own, which is 0
    where it is clipped.
    """
    low, high = (math.log(limit) for limit in tokens.limits)
    log_ratio = tokens.logprobs - tokens.old
    positive = tokens.advantage > 0.0
    clipped = torch.where(positive, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    mean = compute_ratio(tokens.sequences.sums(clipped, mean=True) + clipped - clipped.detach())
    return mean * tokens.advantage, clipped != log_ratio


def _compute_tv(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The trust region with D = |q − p|, p and q being policy's and engine's probability of the
    token (equation 13)."""
    p = tokens.logprobs.detach().exp()
    q = tokens.engine.exp()
    return _apply_trust_region(tokens, (q - p).abs())


def _compute_binary_kl(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The trust region with D = q log q/p + (1 − q) log (1 − q)/(1 − p) (equation 14)."""
    least = torch.finfo(tokens.logprobs.dtype).tiny

    def term(engine_prob: Tensor, policy_prob: Tensor) -> Tensor:
        return torch.xlogy(engine_prob, engine_prob / policy_prob.clamp(min=least))

    log_p = tokens.logprobs.detach()
    log_q = tokens.engine
    return _apply_trust_region(
        tokens, term(log_q.exp(), log_p.exp()) + term(-log_q.expm1(), -log_p.expm1())
    )


def _apply_trust_region(tokens: Tokens, divergence: Tensor) -> tuple[Tensor, Tensor]:
    """Divergence PPO (arXiv:2602.04879, equation 12): M · p/q · A, with the engine's q.

    M is 0 where D is above its bound and the update would move the token's probability further
    away: A > 0 and p > q, or A < 0 and p < q.
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
"""From R tokens to their surrogate [R], and which of them [R] were clipped or masked."""


def _compute_engine_weight(
    objective: Objective, log_ratio: Tensor, cap: float | None, sequences: Sequences
) -> tuple[Tensor, Tensor]:
    """w = min(p_old / p_engine, cap), or 0 outside of the objective's masks: a constant to the
    gradient.

    It corrects for an engine that samples from a slightly different distribution, or with older
    weights. Truncated it is TIS; with masks and no cap it is IcePop's (arXiv:2510.18855). At the
    level of a sequence p is the probability of all of its tokens.

    Args:
        objective: gives level and masks.
        log_ratio: [R], log p_old − log p_engine.
        cap: None: not truncated.
        sequences: of the tokens.

    Returns:
        w [R], and which tokens [R] were truncated or masked.
    """
    log_ratio = (
        sequences.sums(log_ratio) if objective.tis_level == "sequence" else log_ratio.detach()
    )
    ratio = compute_ratio(log_ratio)
    masked = (ratio < objective.mask_below) | (ratio > objective.mask_above)
    weight = torch.where(masked, 0.0, ratio if cap is None else ratio.clamp(max=cap))
    return weight, weight != ratio


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Schulman's estimate of KL(policy ‖ reference) from one sample: d = log p_ref − log p, and e^d
    − d − 1.

    Never negative, zero where both agree, and differentiable through ``logprobs``: that is GRPO's
    KL term (arXiv:2402.03300, equation 4). ``compute_ratio`` keeps it finite. [R] in, [R] out.
    """
    difference = reference_logprobs - logprobs
    return compute_ratio(difference) - difference - 1.0
