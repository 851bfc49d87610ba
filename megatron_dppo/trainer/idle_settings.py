"""Settings that were changed from their defaults and have no effect in a training run."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from megatron_dppo.config import Config
from megatron_dppo.config.loss import ScheduleConfig
from megatron_dppo.rewards.adapters import AsyncScorer
from megatron_dppo.rewards.functions import resolve
from megatron_dppo.settings import settings


def idle_settings(config: Config) -> list[str]:
    """The dotted keys of changed settings that no part of ``train`` reads, given the others."""
    idle = tuple(_idle(config))
    values = dict(config.leaves())
    changed = [key for key, setting in settings().items() if values[key] != setting.default]
    found = [key for key in changed if key.startswith(idle) and not key.endswith(".rule")]
    if "reward.concurrency" in changed and not isinstance(resolve(config.reward.function), AsyncScorer):
        found.append("reward.concurrency")
    return found + (["run.keep_best"] if _best_is_never_saved(config) else [])


def _idle(config: Config) -> Iterator[str]:
    """Beginnings of the keys of settings without effect."""
    loss, pruning, rollout = config.loss, config.pruning, config.rollout
    weighed = loss.tis_cap or loss.mask_below or loss.mask_above or rollout.ahead or config.data.rollouts
    sources = {config.data.train} if isinstance(config.data.train, str) else {s.path for s in config.data.train}
    tasks = {name.partition("=")[0] for name in config.eval.benchmarks}
    tasks |= set() if config.data.rollouts else sources
    served = rollout.engine != "local"
    prompts, completions = pruning.prompts, pruning.completions
    predicts = prompts.rule in ("neyman", "function") or rollout.allocation.rule == "neyman"
    in_rounds = prompts.rule == "dynamic_sampling" or (prompts.rule == "greso" and pruning.refill == "prompts")
    for is_idle, keys in (
        (not weighed, ("loss.tis_level",)),
        (not loss.distillation.named, ("loss.distillation.coef", "loss.distillation.direction")),
        (
            prompts.rule not in ("neyman", "threshold", "function"),
            ("pruning.prompts.keep", "pruning.prompts.schedule."),
        ),
        (prompts.rule not in ("neyman", "function"), ("pruning.prompts.floor",)),
        (not predicts, ("pruning.prompts.predictor",)),
        (not in_rounds, ("pruning.max_rounds",)),
        (completions.rule == "none", ("pruning.completions.",)),
        (completions.rule != "neyman", ("pruning.completions.score",)),
        (config.optimizer.schedule == "constant", ("optimizer.min_lr",)),
        (served or rollout.engine_function is not None, ("rollout.draft_tokens", "rollout.max_batch")),
        (
            not served,
            ("rollout.launch.", "rollout.sync.transport", "rollout.sync.in_flight", "rollout.sync.bucket_mib"),
        ),
        (not served, ("rollout.max_in_flight", "rollout.request_timeout_s", "rollout.health_timeout_s")),
        (rollout.allocation.rule == "equal", ("rollout.allocation.least", "rollout.allocation.most")),
        (not rollout.tree.branches, ("rollout.tree.roots", "rollout.tree.baseline", "rollout.tree.fusion")),
        (not config.model.lora.rank, ("model.lora.",)),
        (not loss.kl_coef, ("model.reference_on_host",)),
        *((task not in tasks, (f"data.{task}.",)) for task in ("arithmetic", "reasoning_gym", "verifiers")),
        *_idle_schedule("prompts", prompts.schedule),
        *_idle_schedule("completions", completions.schedule),
    ):
        if is_idle:
            yield from keys


def _idle_schedule(level: str, schedule: ScheduleConfig) -> Iterator[tuple[bool, tuple[str, ...]]]:
    yield schedule.shape != "adaptive", (f"pruning.{level}.schedule.max_inflation",)
    yield schedule.shape not in ("linear", "cosine"), (f"pruning.{level}.schedule.ramp",)


def _best_is_never_saved(config: Config) -> bool:
    """Whether checkpoints are saved before the last step, evaluations are made there, and never at the same step."""
    run, every = config.run, config.eval.every
    if not run.keep_best or not 0 < run.checkpoint_every < run.steps or not 0 < every < run.steps:
        return False
    return lcm(run.checkpoint_every, every) >= run.steps
