"""Pruning of the benchmarks' arms: complete settings without any default, and names made of the
settings."""

from __future__ import annotations

import math
from typing import Any

from megatron_dppo.config import PruningConfig

BERNOULLI = ("threshold", "greso")
"""Rules of papers that draw each unit independently; all other rules draw systematically."""
KINDS = {"full": "all", "kept": "the kept"}


def pruning(
    prompts: str = "none",
    completions: str = "none",
    *,
    keep: tuple[float, float | str] = (1.0, 1.0),
    floor: float = 0.2,
    max_weight: float = 10.0,
    normaliser: str = "full",
    resample: str = "none",
    target_noise: float | None = None,
) -> tuple[str, ...]:
    """Return a value for every setting of ``pruning.*``.

    Args:
        prompts: rule for prompts.
        completions: rule for completions.
        keep: ``keep`` of both rules.
        floor: least probability of a prompt under ``neyman``.
        max_weight: bound of the weights.
        normaliser: ``kept`` divides by the completions trained on, as CPPO does.
        resample: ``prompts`` fills a window of ``greso``.
        target_noise: see ``pruning.target_noise``.
    """
    settings = [
        f"pruning.prompts.floor={floor:g}",
        f"pruning.completions.normaliser={normaliser}",
        "pruning.completions.score=engine",
        f"pruning.max_weight={max_weight:g}",
        f"pruning.resample={resample}",
        f"pruning.target_noise={'null' if target_noise is None else f'{target_noise:g}'}",
        "pruning.max_rounds=10",
    ]
    for level, rule, share in (
        ("prompts", prompts, keep[0]),
        ("completions", completions, keep[1]),
    ):
        draw = "bernoulli" if rule in BERNOULLI else "systematic"
        values = {"rule": rule, "keep": share, "function": "null", "draw": draw}
        schedule = {"schedule.shape": "constant", "schedule.ramp": 0.2, "schedule.off_last": 0}
        settings += [f"pruning.{level}.{key}={value}" for key, value in (values | schedule).items()]
    return tuple(settings)


UNPRUNED = pruning()


def neyman(prompts: float | None, completions: float | str | None, **more: Any) -> tuple[str, ...]:
    """Return ``neyman`` with these fractions, for both levels or for one."""
    if prompts is None:
        return pruning("none", "neyman", keep=(1.0, completions or 1.0), **more)
    if completions is None:
        return pruning("neyman", "none", keep=(prompts, 1.0), **more)
    return pruning("neyman", "neyman", keep=(prompts, completions), **more)


def threshold(prompts: float, completions: float, rule: str = "threshold") -> tuple[str, ...]:
    """Return DPPO's rule with the paper's ratios r, and with a bound that changes no weight."""
    keep = (round(1.0 - prompts, 9), round(1.0 - completions, 9))
    bound = math.ceil(round(10.0 / (keep[0] * keep[1]), 6)) / 10.0
    return pruning(rule, rule, keep=keep, max_weight=bound)


def describe(config: PruningConfig) -> str:
    """Return an arm's name, with every setting that its rules read."""
    prompts = config.prompts
    completions = config.completions
    rules = (prompts.rule, completions.rule)
    weights = f"weights to {config.max_weight:g}"
    if rules == ("none", "none"):
        name = "unpruned"
    elif rules[0] == rules[1] != "neyman":
        r = f"{1.0 - prompts.keep:.2g} / {1.0 - float(completions.keep):.2g}"
        name = f"{prompts.rule}, r {r}, {weights}"
        if rules[0] != "threshold":
            name = f"{prompts.rule}, r {r}"
    elif rules == ("neyman", "neyman"):
        name = f"prompts {prompts.keep:g}, tokens {completions.keep}, {weights}"
    elif rules == ("neyman", "none"):
        name = f"prompts {prompts.keep:g} alone"
    elif rules == ("none", "neyman"):
        name = f"tokens {completions.keep} alone, {weights}"
    elif rules == ("none", "top_k"):
        name = f"top_k {completions.keep:g}, divided by {KINDS[completions.normaliser]}"
    elif rules == ("greso", "none"):
        name = "greso, refilled" if config.resample == "prompts" else "greso, not refilled"
    elif rules == ("dynamic_sampling", "none"):
        name = "dynamic_sampling"
    else:
        raise ValueError(f"arms with the rules {rules} have no name yet")
    if prompts.rule == "neyman" and prompts.floor != 0.2:
        name += f", floor {prompts.floor:g}"
    if config.target_noise is not None:
        name += f", noise {config.target_noise:g}"
    return name
