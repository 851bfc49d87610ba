"""The losses that pruning is a guest of, as a table: one row per member of the GRPO family."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.config import LossConfig
from megatron_dppo.rl.aggregation import Aggregation


@dataclass(frozen=True, slots=True)
class Host:
    """What tells one policy-gradient loss of the family from another."""

    name: str
    aggregation: Aggregation
    normalise: bool
    """Whether advantages are divided by the group's standard deviation."""
    clip_low: float
    """The ratio is clipped at 1 − clip_low …"""
    clip_high: float
    """… and at 1 + clip_high."""
    overlong_share: float
    """Share of the response limit over which long responses are penalised, softly."""


HOSTS: dict[str, Host] = {
    host.name: host
    for host in (
        # DeepSeekMath, arXiv:2402.03300
        Host("grpo", aggregation="seq_mean", normalise=True, clip_low=0.2, clip_high=0.2, overlong_share=0.0),
        # DAPO, arXiv:2503.14476
        Host("dapo", aggregation="token_mean", normalise=True, clip_low=0.2, clip_high=0.28, overlong_share=0.2),
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
