"""Losses of the GRPO family: a table of objectives, and the sum of token losses.

    J = (1/Z) Σ_q Σ_i c_qi Σ_t ℓ_qit

c is the coefficient of a completion, and Z the normaliser of the full, unpruned minibatch. A
divisor of the kept completions alone would make the weighted sum a ratio, which is biased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from megatron_dppo.rl.types import Bools, Floats, Ints

# Not at run time, because prune() also runs without pydantic and torch.
if TYPE_CHECKING:
    from torch import Tensor

    from megatron_dppo.config import EntropyConfig, LossConfig


Aggregation = Literal["seq_mean", "token_mean", "constant"]
Surrogate = Literal["clipped", "weighted", "gated", "geometric", "tv", "kl"]
TRUST_REGIONS = {"tv": 0.15, "kl": 0.05}
"""Bounds on the divergence, as in the runs of arXiv:2602.04879 (appendix C.1)."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Definition of one loss of the family."""

    name: str
    aggregation: Aggregation
    advantage: str = "grpo"
    """Estimator of advantages: a name in ``ESTIMATORS`` of ``advantages.py``, or of a user's
    function."""
    surrogate: Surrogate | Callable[..., tuple[Tensor, Tensor]] = "clipped"
    """Loss of a token: a name in ``SURROGATES`` of ``losses.py``, or a user's function."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of each token, or the geometric mean over the sequence."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 − clip_low. In a trust region: bound on the divergence if A <
    0."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high. In a trust region: bound on the divergence if A >
    0."""
    tis_level: Literal["token", "prefix", "sequence"] = "token"
    """Level of the weight, policy over engine: each token, the product over the sequence's tokens
    up to the token (CTPO, arXiv:2605.07331), or the product over the sequence."""
    mask_below: float = 0.0
    """Smaller weights count as 0."""
    mask_above: float = math.inf
    """Larger weights count as 0."""
    overlong_share: float = 0.0
    """DAPO's soft penalty grows from 0 to 1 over this last fraction of the response limit."""


OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (
        # DeepSeekMath, arXiv:2402.03300
        Objective("grpo", aggregation="seq_mean"),
        # "Understanding R1-Zero-like training", arXiv:2503.20783
        Objective("dr_grpo", aggregation="constant", advantage="dr_grpo"),
        # DAPO, arXiv:2503.14476
        Objective("dapo", aggregation="token_mean", clip_high=0.28, overlong_share=0.2),
        # GSPO, arXiv:2507.18071
        Objective("gspo", aggregation="seq_mean", ratio="sequence", clip_low=3e-4, clip_high=4e-4),
        # CISPO of MiniMax-M1, arXiv:2506.13585, which has no lower clip
        Objective(
            "cispo", aggregation="token_mean", surrogate="weighted", clip_low=1.0, clip_high=0.28
        ),
        # RLOO, arXiv:2402.14740, which has no clip
        Objective(
            "rloo", aggregation="constant", advantage="rloo", clip_low=1.0, clip_high=math.inf
        ),
        # REINFORCE++ and its variant with a baseline, arXiv:2501.03262
        Objective("reinforce_pp", aggregation="seq_mean", advantage="reinforce_pp"),
        Objective(
            "reinforce_pp_baseline", aggregation="seq_mean", advantage="reinforce_pp_baseline"
        ),
        # GMPO, arXiv:2507.20673: log-ratios are clipped to ±0.4
        Objective(
            "gmpo",
            aggregation="seq_mean",
            surrogate="geometric",
            clip_low=1.0 - math.exp(-0.4),
            clip_high=math.exp(0.4) - 1.0,
        ),
        # SAPO, arXiv:2511.20347
        Objective("sapo", aggregation="seq_mean", surrogate="gated"),
    )
}


def resolve_objective(loss: LossConfig) -> Objective:
    """Return the objective with the run's clips, trust region and masks."""
    usual = OBJECTIVES[loss.name]
    if loss.trust_region != "none":
        bound = TRUST_REGIONS[loss.trust_region]
        usual = replace(usual, surrogate=loss.trust_region, clip_low=bound, clip_high=bound)
    return replace(
        usual,
        advantage=loss.advantage or usual.advantage,
        tis_level=loss.tis_level,
        mask_below=usual.mask_below if loss.mask_below is None else loss.mask_below,
        mask_above=usual.mask_above if loss.mask_above is None else loss.mask_above,
        clip_low=usual.clip_low if loss.clip_low is None else loss.clip_low,
        clip_high=usual.clip_high if loss.clip_high is None else loss.clip_high,
    )


class EntropyBonus:
    """Weight of the entropy in the loss of the next optimizer step; the same on every rank.

    An adaptive weight follows Skywork-OR1 (arXiv:2505.22312), with TRL's bounds. The weight depends
    on earlier steps only, and therefore biases no pruned gradient.
    """

    def __init__(self, settings: EntropyConfig) -> None:
        self._settings = settings
        self._coef = settings.coef
        self._entropy = math.inf

    @property
    def weight(self) -> float:
        """0 if the last step had more entropy than the target, and before the first step."""
        target = self._settings.target
        if target is None:
            return self._settings.coef
        return self._coef if self._entropy <= target else 0.0

    def update(self, entropy: float) -> None:
        """Adapt the weight to the mean entropy of an optimizer step."""
        settings = self._settings
        self._entropy = entropy
        if settings.target is not None:
            change = settings.delta if entropy <= settings.target else -settings.delta
            self._coef = min(max(self._coef + change, settings.min_coef), settings.max_coef)

    def state_dict(self) -> dict[str, Any]:
        # JSON has no infinity.
        entropy = self._entropy if math.isfinite(self._entropy) else None
        return {"entropy_coef": self._coef, "entropy": entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coef = state.get("entropy_coef", self._coef)
        entropy = state.get("entropy")
        self._entropy = math.inf if entropy is None else entropy


def compute_overlong_penalty(lengths: ArrayLike, *, limit: int, buffer: int) -> Floats:
    """Return DAPO's soft penalty on long responses, a term of the reward (arXiv:2503.14476,
    equation 13).

    Args:
        lengths: response lengths in tokens, any shape.
        limit: longest response allowed, in tokens.
        buffer: tokens below the limit with a penalty, which falls linearly from 0 to −1; 0: no
            penalty.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    if buffer == 0:
        return np.zeros_like(lengths)
    return np.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)


def compute_coefficients(aggregation: Aggregation, sampled_lengths: Ints) -> Floats:
    """Return c of each completion, [Q, G], from sampled tokens [Q, G]: 1/L for ``seq_mean``, else
    1."""
    lengths = sampled_lengths.astype(np.float64)
    return 1.0 / np.maximum(lengths, 1.0) if aggregation == "seq_mean" else np.ones_like(lengths)


def compute_kept_fraction(
    aggregation: Aggregation,
    *,
    sampled_lengths: Ints,
    prompt_inclusion: Floats,
    kept: Bools,
) -> float:
    """Return the fraction of Z of completions ``kept`` [Q, G]. CPPO divides by Z times this
    fraction."""
    size = sampled_lengths if aggregation == "token_mean" else np.ones_like(sampled_lengths)
    parts = size / prompt_inclusion[:, None]
    return float(parts[kept].sum() / parts.sum()) if kept.any() else 1.0


def compute_normaliser(
    aggregation: Aggregation,
    *,
    sampled_lengths: Ints,
    prompt_inclusion: Floats,
    prompts: float,
    max_response_tokens: int,
) -> float:
    """Return Z of a minibatch before completions are pruned.

    Args:
        aggregation: aggregation of the objective.
        sampled_lengths: [Q, G], tokens that the policy sampled in the rolled-out groups.
        prompt_inclusion: [Q], inclusion probabilities of these groups.
        prompts: candidate prompts of the minibatch, pruned prompts included.
        max_response_tokens: L_max, the longest response allowed.
    """
    group_size = sampled_lengths.shape[1]
    match aggregation:
        case "seq_mean":
            return float(prompts * group_size)
        case "token_mean":
            # Tokens are known for rolled-out prompts only. If prompts were pruned, Z is an
            # estimate, with each prompt's tokens times 1/π. The objective is then a ratio of two
            # unbiased estimates, and the bias of the ratio vanishes as 1/(number of prompts).
            return float((sampled_lengths.sum(axis=1) / prompt_inclusion).sum())
        case "constant":
            return float(prompts * group_size * max_response_tokens)
