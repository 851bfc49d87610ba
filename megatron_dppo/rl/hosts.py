"""The losses that pruning is a guest of, as a table: one row per member of the GRPO family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_dppo.config import LossConfig
from megatron_dppo.rl.aggregation import Aggregation


@dataclass(frozen=True, slots=True)
class Host:
    """What tells one policy-gradient loss of the family from another."""

    name: str
    aggregation: Aggregation
    normalise: bool = True
    """Whether advantages are divided by the group's standard deviation."""
    ratio: Literal["token", "sequence"] = "token"
    """Of each token's probabilities, or one for the sequence: the geometric mean of its tokens' ratios."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 − clip_low …"""
    clip_high: float = 0.2
    """… and at 1 + clip_high."""
    overlong_share: float = 0.0
    """Share of the response limit over which long responses are penalised, softly."""


HOSTS: dict[str, Host] = {
    host.name: host
    for host in (
        # DeepSeekMath, arXiv:2402.03300
        Host("grpo", aggregation="seq_mean"),
        # "Understanding R1-Zero-like training", arXiv:2503.20783
        Host("dr_grpo", aggregation="constant", normalise=False),
        # DAPO, arXiv:2503.14476
        Host("dapo", aggregation="token_mean", clip_high=0.28, overlong_share=0.2),
        # GSPO, arXiv:2507.18071
        Host("gspo", aggregation="seq_mean", ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    )
}


def host_for(loss: LossConfig) -> Host:
    """The host of a run, with the run's own clips where it sets them."""
    host = HOSTS[loss.name]
    return replace(
        host,
        clip_low=host.clip_low if loss.clip_low is None else loss.clip_low,
        clip_high=host.clip_high if loss.clip_high is None else loss.clip_high,
    )
