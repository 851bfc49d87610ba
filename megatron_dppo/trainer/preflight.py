"""What can be known to be wrong before any rank starts. Needs no torch; files of prompts, which are read whole, take a
second for each 20,000 rows or so, and all else a fraction of one.

``check_config`` holds settings against each other, ``preflight`` also against the machine: files, the policy, the disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.config import Config
from megatron_dppo.config.types import Command
from megatron_dppo.data.generators import GENERATORS, REASONING_GYM
from megatron_dppo.data.prompts import Example, Source, example_of, read_examples
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import KNOWN, SETTING, rows_of, sources
from megatron_dppo.models.shape import PolicyShape, check_layout, read_shape
from megatron_dppo.rewards.functions import BUILTIN, check_labels, resolve
from megatron_dppo.rollout.servers.preflight import check_rollout, check_servers
from megatron_dppo.trainer.disk_room import check_room, check_run_dir
from megatron_dppo.trainer.resume import check_resume, check_warm_up


def preflight(config: Config, command: Command) -> None:
    """Everything that a command needs and that can be looked at from one process.

    Raises:
        UserError: for the first thing that is wrong. Nothing has been written.
    """
    check_config(config, command)
    shape = read_shape(config.model.path)
    check_layout(shape, config.layout)
    if config.model.checkpoint is None:
        check_weights(Path(config.model.path), shape)
    else:
        place = find_checkpoint(Path(config.model.checkpoint))
        if command != "eval":
            _check_own(place, Path(config.model.checkpoint), Path(config.run.dir))
    _check_positions(config, shape, command)
    _check_data(config, command)
    if command != "sft":
        _check_reward(config.reward.function)
        if command == "train":
            _check_task_is_rewarded(config)
        check_servers(config, shape)
    if command == "eval":
        return
    check_run_dir(Path(config.run.dir))
    if command == "train":
        check_resume(config)
    else:
        check_warm_up(config)
    check_room(config, shape, command)


def check_config(config: Config, command: Command = "train") -> None:
    """Hold the settings against each other; looks at nothing outside of them.

    Raises:
        UserError: for the first contradiction.
    """
    for key, value in _numbers(config, ""):
        if not math.isfinite(value):
            raise UserError(key, value, "is not a finite number", f"Give {key} a finite value")
    _check_model(config)
    if command != "eval":
        _check_optimizer(config)
    if command == "train":
        _check_lengths(config)
        _check_loss(config)
        _check_window(config)
        _check_pruning(config)
    if command != "sft":
        _check_samples(config)
        check_rollout(config)


def _numbers(section: Any, prefix: str) -> Iterator[tuple[str, float]]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, float):
            yield prefix + field.name, value


def _check_model(config: Config) -> None:
    if config.model.spec == "te" and config.model.dtype == "fp32":
        problem = "has no fused attention for model.dtype = fp32, and would pad every sequence of a pack to the longest"
        raise UserError("model.spec", "te", problem, "Set model.dtype=bf16, or model.spec=torch")


def _check_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise UserError(
            "optimizer.min_lr",
            optimizer.min_lr,
            f"is above optimizer.lr = {optimizer.lr:g}",
            "Lower it, or raise optimizer.lr",
        )
    if optimizer.checkpoint_format == "dp_reshardable" and not optimizer.distributed:
        raise UserError(
            "optimizer.checkpoint_format",
            optimizer.checkpoint_format,
            "is a format of the distributed optimizer's state, and optimizer.distributed is false",
            "Leave it out, or set optimizer.distributed=true",
        )
    if optimizer.offload and not optimizer.distributed:
        raise UserError(
            "optimizer.offload",
            "true",
            "without the distributed optimizer its state is the policy's own weights",
            "Leave it out, or set optimizer.distributed=true",
        )


def _check_lengths(config: Config) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    unit = config.layout.pack_multiple
    most = config.pack.max_tokens // unit * unit
    if most < longest:
        usable = f"in this layout packs are multiples of {unit}, and the {most} that fit are" if unit > 1 else "is"
        raise UserError(
            "pack.max_tokens",
            config.pack.max_tokens,
            f"{usable} less than data.max_prompt_tokens + rollout.max_response_tokens = {longest}, the longest "
            "sequence that a pack must hold",
            f"Raise pack.max_tokens to {math.ceil(longest / unit) * unit} or more, or lower the two limits",
        )
    buffer, limit = config.reward.overlong_buffer, config.rollout.max_response_tokens
    if buffer is not None and buffer > limit:
        raise UserError(
            "reward.overlong_buffer",
            buffer,
            f"is more than rollout.max_response_tokens = {limit}",
            f"Lower it to {limit} or less",
        )


def _check_loss(config: Config) -> None:
    if config.loss.clip_low is not None and config.loss.clip_low >= 1.0:
        raise UserError(
            "loss.clip_low",
            config.loss.clip_low,
            "clips ratios to 1 - clip_low, which must stay above 0",
            "Set it below 1 (0.2 is usual)",
        )


def _check_window(config: Config) -> None:
    prompts, updates = config.rollout.prompts_per_step, config.loss.updates_per_rollout
    rule, keep = config.pruning.prompts.rule, config.pruning.prompts.keep
    kept = math.floor(prompts * keep) if rule in ("threshold", "neyman") else prompts
    if updates > kept:
        pruned = "" if kept == prompts else f", of which pruning.prompts.keep = {keep:g} leaves {kept}"
        raise UserError(
            "loss.updates_per_rollout",
            updates,
            f"is more than there are groups to split: rollout.prompts_per_step = {prompts}{pruned}",
            "Lower it, or raise rollout.prompts_per_step" + (" or pruning.prompts.keep" if pruned else ""),
        )
    generator = GENERATORS.get(config.data.train)
    pool = generator.problems(config.data) if generator else math.inf
    if prompts > pool:
        raise UserError(
            "rollout.prompts_per_step",
            prompts,
            f"is more than data.{config.data.train}.problems = {pool}, and a window holds no prompt twice",
            f"Lower it to {pool} or less, or raise data.{config.data.train}.problems",
        )


def _check_samples(config: Config) -> None:
    evaluation, batch = config.eval, config.rollout.max_batch
    if evaluation.samples > 1 and evaluation.temperature == 0.0:
        raise UserError(
            "eval.temperature",
            0,
            f"is greedy, and eval.samples = {evaluation.samples} greedy answers to a problem are one and the same",
            "Leave it out, give one above 0, or set eval.samples=1",
        )
    if config.rollout.engine == "local" and evaluation.samples > batch:
        raise UserError(
            "rollout.max_batch",
            batch,
            f"cannot hold the eval.samples = {evaluation.samples} of a single problem",
            f"Raise it to {evaluation.samples} or more",
        )


def _check_pruning(config: Config) -> None:
    prompts = config.pruning.prompts
    if prompts.rule == "neyman" and prompts.floor > prompts.keep:
        raise UserError(
            "pruning.prompts.floor",
            prompts.floor,
            f"is above pruning.prompts.keep = {prompts.keep:g}, so that more would be kept than asked for",
            f"Lower it to {prompts.keep:g} or less, or raise pruning.prompts.keep",
        )
    least = {"neyman": prompts.floor, "threshold": prompts.keep}.get(prompts.rule, 1.0)
    if least * config.pruning.max_weight < 1.0 - 1e-9:
        setting = "floor" if prompts.rule == "neyman" else "keep"
        raise UserError(
            f"pruning.prompts.{setting}",
            least,
            f"lets a prompt's weight reach {1.0 / least:g}, above pruning.max_weight = {config.pruning.max_weight:g}",
            f"Raise it to {1.0 / config.pruning.max_weight:g} or more, or raise pruning.max_weight",
        )
    _check_refill(config)
    for level, schedule in (("prompts", prompts.schedule), ("completions", config.pruning.completions.schedule)):
        rule = getattr(config.pruning, level).rule
        if schedule.shape == "adaptive" and rule not in ("threshold", "neyman"):
            raise UserError(
                f"pruning.{level}.schedule.shape",
                schedule.shape,
                f"wants a share to solve for and a variance to estimate, and pruning.{level}.rule = {rule} lacks one",
                f"Set pruning.{level}.rule to neyman or threshold, or take another shape",
            )
        if schedule.shape in ("linear", "cosine") and schedule.ramp + schedule.off_last > 1.0:
            raise UserError(
                f"pruning.{level}.schedule.ramp",
                schedule.ramp,
                f"with pruning.{level}.schedule.off_last = {schedule.off_last:g} it is longer than the run",
                "Lower one of the two: together they are shares of the run",
            )


def _check_refill(config: Config) -> None:
    pruning = config.pruning
    rule, schedule = pruning.completions.rule, pruning.completions.schedule
    if pruning.completions.normaliser == "kept" and rule != "top_k":
        raise UserError(
            "pruning.completions.normaliser",
            "kept",
            f"would make a biased rule of pruning.completions.rule = {rule}",
            "Leave it at full, or set pruning.completions.rule=top_k",
        )
    if pruning.refill == "none":
        return
    if schedule.shape == "adaptive" or rule.startswith("threshold"):
        what = "schedule.shape = adaptive" if schedule.shape == "adaptive" else f"rule = {rule}"
        raise UserError(
            "pruning.refill",
            pruning.refill,
            f"grows the window before the rollouts by what will be kept of them, which pruning.completions.{what} "
            "knows only afterwards",
            "Set it to none, or prune with neyman or top_k at a share that is known",
        )
    if rule == "none" and pruning.prompts.rule != "greso":
        raise UserError(
            "pruning.refill",
            pruning.refill,
            "has nothing to fill up: no completion is pruned",
            "Set it to none, or set pruning.completions.rule",
        )


def _check_positions(config: Config, shape: PolicyShape, command: Command) -> None:
    longest = config.data.max_prompt_tokens + (config.rollout.max_response_tokens if command != "sft" else 0)
    if longest > shape.max_positions:
        key = "data.max_prompt_tokens" if command == "sft" else "rollout.max_response_tokens"
        raise UserError(
            key,
            config.data.max_prompt_tokens if command == "sft" else config.rollout.max_response_tokens,
            f"the longest sequence has {longest} tokens, and the policy was made for {shape.max_positions} positions",
            f"Lower {key}" if command == "sft" else f"Lower {key} or data.max_prompt_tokens",
        )


def _check_data(config: Config, command: Command) -> None:
    if command != "eval":
        _check_file(Source(config.data.train, "data.train"), config, command)
    if command == "sft" or config.eval.problems == 0:
        return
    held_out = sources(config)
    if command == "eval" and not held_out:
        remedy = f"Name some with --benchmarks: {', '.join(KNOWN)}, or NAME=FILE"
        raise UserError("eval.benchmarks", "[]", "names nothing to evaluate on, and data.eval does not either", remedy)
    for source in held_out:
        if source.name and source.file not in GENERATORS and not Path(source.file).is_file():
            raise UserError(
                source.setting,
                source.file,
                "is no file",
                f"Put its problems there, one JSON object a line with the columns {config.data.prompt_key} and "
                f"{config.data.label_key}, or leave {source.name} out",
            )
        if source.setting == SETTING and source.file not in GENERATORS:
            rows, data = rows_of(source, config.data)
            verifier = source.benchmark.verifier if source.benchmark else config.reward.function
            _check_labels(verifier, [example_of(row, data) for row in rows[: config.eval.problems]])
        else:
            _check_file(Source(source.file, source.setting), config, command)


def _check_file(source: Source, config: Config, command: Command) -> None:
    """Every row of a file, as far as one can see without a tokenizer: templates and lengths are the ranks' to find."""
    if source.name in GENERATORS:
        GENERATORS[source.name].check(config.data)
        return
    examples = read_examples(source, config.data, "train", responses=command == "sft")
    if command != "sft":
        wanted = len(examples) if source.setting == "data.train" else config.eval.problems
        _check_labels(config.reward.function, examples[:wanted])


def _check_labels(verifier: str, examples: Sequence[Example]) -> None:
    check_labels(verifier, [(example.row.place, example.label) for example in examples])


def _check_reward(function: str) -> None:
    where = function.rpartition(":")[0]
    missing = where.endswith(".py") and not Path(where).is_file()
    if function not in BUILTIN and (not where or missing):
        resolve(function)  # says what is wrong; what exists is imported where it runs


def _check_task_is_rewarded(config: Config) -> None:
    function, task = config.reward.function, config.data.train
    if function == REASONING_GYM != task:
        problem = f"judges what data.train={REASONING_GYM} generates, and data.train is {task}"
        raise UserError("reward.function", function, problem, "Set one of the two")
    if task == REASONING_GYM and function in BUILTIN and function != REASONING_GYM:
        problem = "does not know how answers to reasoning-gym's tasks are judged, and they do"
        raise UserError("reward.function", function, problem, f"Set reward.function={REASONING_GYM}")


def _check_own(place: Path, folder: Path, run_dir: Path) -> None:
    place, own = place.resolve(), (run_dir / "checkpoints").resolve()
    if own in (place, *place.parents):
        raise UserError(
            "model.checkpoint",
            folder,
            "is a checkpoint of this very run, which would take what it has learned for the policy that it began with",
            "Leave it as it was when the run began (the run resumes by itself), or name another run.dir",
        )
