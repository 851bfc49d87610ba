"""The loss, what is pruned from it, and how the rest is packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from megatron_dppo.config.types import STRICT, Count, Fraction, NonNegative, Positive


@dataclass(frozen=True, slots=True)
class LossConfig:
    __pydantic_config__ = STRICT

    name: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    """The objective. grpo: mean over each sequence, then over sequences; dr_grpo: sums over one constant, advantages
    not divided by their deviation; dapo: mean over tokens, a higher upper clip; gspo: one ratio for a sequence."""
    clip_low: NonNegative | None = None
    """Clip of the ratio below 1; null: the objective's (0.2; gspo 3e-4)."""
    clip_high: NonNegative | None = None
    """Clip of the ratio above 1; null: the objective's (0.2; dapo 0.28; gspo 4e-4)."""
    kl_coef: NonNegative = 0.0
    """Weight of the k3 estimate of KL(policy || initial policy), per token; 0 keeps no reference model."""
    tis_cap: Annotated[float, Field(ge=1.0)] | None = None
    """Cap of the truncated importance weight of policy over engine, per token; null: off, or 2 with rollout.ahead."""
    updates_per_rollout: Positive = 1
    """Optimizer steps per rollout: the window is split into so many minibatches of whole groups."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    __pydantic_config__ = STRICT

    shape: Literal["constant", "linear", "cosine", "adaptive"] = "constant"
    """How the kept share moves from 1 at the first step to ``keep``: at once, or along a line or half a cosine.
    ``adaptive``: at every step the least share, from ``keep`` upwards, that keeps the estimated variance inflation of
    this level under ``max_inflation``."""
    max_inflation: Annotated[float, Field(ge=1.0)] = 1.2
    """adaptive: by how much this level may multiply the estimated sum of squares of the gradient's terms."""
    ramp: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Share of the run over which a linear or cosine schedule gets there."""
    off_last: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the run, at its end, without pruning (as InfoBatch does)."""


@dataclass(frozen=True, slots=True)
class PromptPruningConfig:
    __pydantic_config__ = STRICT

    rule: Literal["none", "threshold", "neyman", "greso", "dynamic_sampling"] = "neyman"
    """Unbiased: none, threshold (the paper's), neyman (least variance). Biased: greso (skips prompts that gave equal
    rewards again and again), dynamic_sampling (DAPO's: groups of equal reward are replaced)."""
    keep: Fraction = 0.7
    """neyman: share of the window's prompts that is rolled out; threshold: 1 − r, the chance of a low-scored one.
    greso and dynamic_sampling have no budget and do not look at it."""
    floor: Fraction = 0.2
    """neyman: least inclusion probability of a prompt."""
    decay: Fraction = 0.9
    """Weight that a visit's evidence keeps at the prompt's next visit."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """``systematic``: the number kept is fixed to within one; ``bernoulli``: each prompt by itself; null: the rule's
    (threshold and greso by themselves, neyman systematic)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True, slots=True)
class CompletionPruningConfig:
    __pydantic_config__ = STRICT

    rule: Literal["none", "threshold", "neyman", "threshold_deterministic", "top_k"] = "neyman"
    """Unbiased: none, threshold (the paper's), neyman (least variance). Biased: threshold_deterministic (the paper's
    Appendix A), top_k (CPPO's: the largest advantages)."""
    keep: Fraction = 0.5
    """neyman: share of the rolled-out tokens that is trained on; top_k: of the completions; threshold and
    threshold_deterministic: 1 − r, the chance or share of the low-scored ones."""
    score: Literal["engine", "head", "advantage"] = "engine"
    """What neyman takes for the norm of a completion's gradient. ``engine``: the advantage times how surprising its
    tokens were to the engine, for free; ``head``: times the policy head's exact score norms, which costs a forward pass
    over all rollouts; ``advantage``: the advantage alone, for engines without log-probabilities."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """As at the level of prompts; null: the rule's own (threshold by themselves, neyman systematic)."""
    normaliser: Literal["full", "kept"] = "full"
    """top_k: what the loss is divided by: the whole minibatch, or what is kept of it, as CPPO has it (which makes steps
    longer, the more is pruned)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True, slots=True)
class PruningConfig:
    __pydantic_config__ = STRICT

    prompts: PromptPruningConfig = field(default_factory=PromptPruningConfig)
    completions: CompletionPruningConfig = field(default_factory=CompletionPruningConfig)
    max_weight: Annotated[float, Field(ge=1.0)] = 5.0
    """Bound on 1/(π_prompt·π_completion), kept by a floor on the completions' probabilities; no weight is cut off."""
    refill: Literal["none", "prompts"] = "none"
    """``prompts``: what completion pruning saves goes into more prompts: the window grows by 1/completions.keep, so
    that as much is trained on as without pruning (CPPO's dynamic allocation). Under greso, more prompts are rolled out
    until the window is full of groups of mixed reward (its adaptive batch), as dynamic_sampling always does."""
    max_rounds: Positive = 10
    """greso with refill, and dynamic_sampling: how often a step rolls out prompts before it trains on what it has."""


@dataclass(frozen=True, slots=True)
class PackConfig:
    __pydantic_config__ = STRICT

    max_tokens: Positive = 4096
    """Most tokens in a pack (one microbatch); a step's capacity is chosen below it so that packs are full."""
    window: Positive = 64
    """How many of the longest unpacked sequences the packer looks at."""
    min_per_rank: Count = 0
    """Fewest packs per data-parallel rank, as long as sequences suffice; 0: twice the pipeline stages, or 1 without."""
