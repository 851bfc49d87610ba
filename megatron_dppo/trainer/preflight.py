"""What can be known to be wrong before any rank starts. Needs no torch; files of prompts, which are read whole, take a
second for each 20,000 rows or so, and all else a fraction of one.

``check_config`` holds settings against each other, as they say themselves in ``config/``; ``preflight`` also against
the machine: files, the policy, the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.config import Config
from megatron_dppo.config.types import Command
from megatron_dppo.data.examples import Example, Source, example_of, read_examples
from megatron_dppo.data.generators import GENERATORS, REASONING_GYM
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import KNOWN, SETTING, rows_of, sources
from megatron_dppo.models.shape import PolicyShape, check_layout, read_shape
from megatron_dppo.rewards.functions import BUILTIN, check_labels, resolve
from megatron_dppo.rollout.servers.preflight import check_rollout, check_servers
from megatron_dppo.trainer.disk_room import check_room, check_run_dir
from megatron_dppo.trainer.history import check_resume, check_warm_up


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
    config.check(command)
    if command != "sft":
        check_rollout(config)


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
