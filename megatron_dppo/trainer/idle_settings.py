"""Settings that were changed from their defaults and have no effect in a training run."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from megatron_dppo.config import Config
from megatron_dppo.config.loss import ScheduleConfig
from megatron_dppo.data.generators import GENERATORS
from megatron_dppo.evaluation.benchmarks import sources
from megatron_dppo.rewards.adapters import AsyncScorer
from megatron_dppo.rewards.functions import resolve
from megatron_dppo.settings import settings

OF_SERVERS = (
    "rollout.servers",
    "rollout.launch.",
    "rollout.heartbeat_s",
    "rollout.health_timeout_s",
    *(f"rollout.sync.{name}" for name in ("transport", "bucket_mib", "in_flight", "timeout_s", "retries", "folder")),
)


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
    loss, pruning, rollout, model = config.loss, config.pruning, config.rollout, config.model
    prompts, completions = pruning.prompts, pruning.completions
    weighed = loss.tis_cap or loss.mask_below or loss.mask_above or rollout.ahead or config.data.rollouts
    held_out = sources(config) if config.eval.problems != 0 else []
    tasks = {source.file for source in held_out} | (set() if config.data.rollouts else {*config.data.names})
    served, talks = rollout.served, rollout.conversation is not None
    predicts = prompts.rule == "neyman"
    rounds = prompts.rule == "dynamic_sampling" or (prompts.rule == "greso" and pruning.refill == "prompts")
    for is_read, keys in (
        (config.data.chat_template, ("data.chat_template_kwargs",)),
        (weighed, ("loss.tis_level",)),
        (loss.distillation.named, ("loss.distillation.coef", "loss.distillation.direction")),
        (
            prompts.rule in ("neyman", "threshold"),
            ("pruning.prompts.keep", "pruning.prompts.schedule."),
        ),
        (prompts.rule == "neyman", ("pruning.prompts.floor",)),
        (predicts, ("pruning.prompts.predictor",)),
        (rounds, ("pruning.max_rounds",)),
        (completions.rule != "none", ("pruning.completions.",)),
        (completions.named == "neyman", ("pruning.completions.score",)),
        (config.optimizer.schedule != "constant", ("optimizer.min_lr",)),
        (not served and rollout.engine_function is None, ("rollout.max_batch",)),
        (served, OF_SERVERS),
        (served or talks, ("rollout.attempts", "rollout.request_timeout_s")),
        (served or loss.distillation.servers, ("rollout.max_in_flight",)),
        (rollout.tree.branches, ("rollout.tree.",)),
        (model.lora.rank, ("model.lora.",)),
        (loss.kl_coef, ("model.reference_on_host",)),
        (model.spec != "torch" and model.dtype != "fp32", ("model.deterministic",)),
        (held_out, ("eval.every", "eval.samples", "eval.show", "eval.temperature")),
        (config.eval.problems != 0, ("data.eval", "eval.benchmarks")),
        (any(source.benchmark for source in held_out), ("eval.folder",)),
        *((task in tasks, (f"data.{task}.",)) for task in GENERATORS),
        *_schedule_read("prompts", prompts.schedule),
        *_schedule_read("completions", completions.schedule),
    ):
        if not is_read:
            yield from keys


def _schedule_read(level: str, schedule: ScheduleConfig) -> Iterator[tuple[bool, tuple[str, ...]]]:
    yield schedule.shape == "adaptive", (f"pruning.{level}.schedule.max_inflation",)
    yield schedule.shape in ("linear", "cosine"), (f"pruning.{level}.schedule.ramp",)


def _best_is_never_saved(config: Config) -> bool:
    """Whether checkpoints are saved before the last step, evaluations are made there, and never at the same step."""
    run, every = config.run, config.eval.every
    if not run.keep_best or not 0 < run.checkpoint_every < run.steps or not 0 < every < run.steps:
        return False
    return lcm(run.checkpoint_every, every) >= run.steps
