"""What a step has to do: how many completions, how many tokens to generate, and how many to train on."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.config import CompletionPruningConfig, Config, PromptPruningConfig, replace
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.rl.pruning.schedule import scheduled_keep, window_size


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of responses, as the one-parameter family that ends at the limit: P(longer than s) = (1 - s/limit)^a.

    Its exponent follows from the mean. Where the mean is near the limit most responses are, and are cut off there;
    where it is small few come near.
    """

    mean: float
    limit: int

    @property
    def exponent(self) -> float:
        return self.limit / self.mean - 1.0

    def longer_than(self, tokens: float) -> float:
        """The share of the responses that are."""
        return max(1.0 - tokens / self.limit, 0.0) ** self.exponent

    @property
    def typical(self) -> float:
        """Mean length of the response that a token is in: E[l²]/E[l]."""
        return 2.0 * self.limit / (self.exponent + 2.0)


@dataclass(frozen=True, slots=True)
class Work:
    """Of a step, the mean over the run where a schedule moves."""

    prompts: float
    """Rolled out."""
    completions: float
    """Rolled out."""
    generated: float
    """Tokens rolled out, without prompts."""
    kept: float
    """Completions trained on."""
    trained: float
    """Tokens trained on, prompts included."""
    responses: float
    """Tokens trained on, without prompts."""
    seen: float
    """Tokens rolled out, prompts of each completion included."""
    updates: int


def lengths_of(config: Config, assume: Assumptions) -> Lengths:
    limit = config.rollout.max_response_tokens
    return Lengths(min(assume.response_share, 0.999) * limit, limit)


def prompt_tokens(config: Config, assume: Assumptions) -> float:
    """Mean tokens of a prompt."""
    return min(assume.prompt_tokens, config.data.max_prompt_tokens)


def without_pruning(config: Config) -> Config:
    """The run in which every prompt is rolled out and every completion that has a gradient is trained on."""
    off = replace(
        config.pruning,
        prompts=PromptPruningConfig(rule="none"),
        completions=CompletionPruningConfig(rule="none"),
        refill="none",
    )
    return replace(config, pruning=off)


def work_of(config: Config, assume: Assumptions) -> Work:
    """The work of a mean step."""
    steps, samples = config.run.steps, config.rollout.samples_per_prompt
    every = max(steps // 1000, 1)  # a thousand steps show the schedules of a million
    shares = [_shares(config, step, assume) for step in range(0, steps, every)]
    prompts, kept = (sum(values) / len(shares) for values in zip(*shares, strict=True))
    completions = prompts * samples
    mean, prompt = lengths_of(config, assume).mean, prompt_tokens(config, assume)
    return Work(
        prompts=prompts,
        completions=completions,
        generated=completions * mean,
        kept=kept * samples,
        trained=kept * samples * (prompt + mean),
        responses=kept * samples * mean,
        seen=completions * (prompt + mean),
        updates=config.loss.updates_per_rollout,
    )


def _shares(config: Config, step: int, assume: Assumptions) -> tuple[float, float]:
    """Prompts that are rolled out in a step, and those of them, completions counted in G-ths, that are trained on.

    Without a KL term, groups of equal reward have no gradient: they are not trained on, whatever the rule.
    """
    pruning, total, window = config.pruning, config.run.steps, float(window_size(config, step))
    keep = scheduled_keep(pruning.prompts.keep, pruning.prompts.schedule, step, total)
    threshold = 1.0 - assume.low_share
    live = assume.mixed_share if config.loss.kl_coef == 0.0 else 1.0
    match pruning.prompts.rule:
        case "dynamic_sampling":
            rolled, usable, live = window / assume.mixed_share, window, 1.0
        case "greso":
            refilled = pruning.refill == "prompts"
            rolled = window if refilled else window * assume.mixed_share
            usable, live = rolled, 1.0
        case "threshold":
            rolled = usable = window * (threshold + assume.low_share * keep)
        case rule:
            rolled = usable = window * (keep if rule == "neyman" else 1.0)
    keep = scheduled_keep(pruning.completions.keep, pruning.completions.schedule, step, total)
    match pruning.completions.rule:
        case "none":
            keep = live
        case "threshold" | "threshold_deterministic":
            keep = live * (threshold + assume.low_share * keep)
        case _:  # a budget of the tokens that were rolled out
            keep = min(keep, live)
    return rolled, usable * keep
