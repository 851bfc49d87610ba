"""Check whether a run can resume from the last checkpoint, and record the settings of each step.

``config.yaml`` has the settings in force, ``config_history.jsonl`` a line per change of settings::

    {"step": 0, "version": "0.1", "settings": {"loss.name": "grpo", "run.seed": 1, …}}
    {"step": 40, "version": "0.1", "settings": {"loss.name": "grpo", …, "optimizer.lr": 1e-06}}

means: steps 1 to 40 used the first settings, and steps from 41 on the second settings.

The policy, the data, the reward, the loss, the pruning, the random seed, and the files that these
settings name, define the result, and must not change during a run unless ``run.resume`` allows the
change: otherwise an old result would have a new name. Each checkpoint has fingerprints of the
files. Needs no torch, to be usable before any rank starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megatron_dppo import __version__
from megatron_dppo.bridge.checkpoint_folder import (
    find_latest_checkpoint,
    format_iteration_name,
    parse_step,
)
from megatron_dppo.config import Config
from megatron_dppo.config.loss import is_server
from megatron_dppo.config.types import Loader
from megatron_dppo.data.rows import is_too_deep
from megatron_dppo.data.stored import TOKENIZER_FILES
from megatron_dppo.errors import UserError
from megatron_dppo.observe.private import format_masked, has_secrets, mask_secrets
from megatron_dppo.process.files import replace_text
from megatron_dppo.settings import (
    HISTORY,
    IN_FORCE,
    as_yaml,
    flatten_tree,
    get_settings,
    translate_renamed,
)
from megatron_dppo.trainer.fingerprints import (
    FUNCTIONS,
    HELD_OUT,
    PICKLED,
    compute_fingerprints,
    describe_difference,
)
from megatron_dppo.trainer.writer import CheckpointFormat, check_resumable, read_state

WARM_UP = "sft.json"
"""File beside a policy written by ``sft``: the settings of the warm-up."""
Settings = Mapping[str, Any]

Rule = Literal["kept", "free", "by the checkpoint"]
RULES: Mapping[str, Rule] = {
    "run.": "free",
    "run.seed": "kept",
    "model.path": "kept",
    "model.checkpoint": "kept",
    "model.lora.": "kept",
    "model.dtype": "by the checkpoint",
    "model.": "free",
    "layout.": "free",
    "data.": "kept",
    "rollout.": "free",
    "rollout.temperature": "kept",
    "rollout.roles": "kept",
    "rollout.tree.": "kept",
    "rollout.conversation": "kept",
    "rollout.agent": "kept",
    "rollout.agent_timeout_s": "free",
    "rollout.prompts_per_step": "kept",
    "reward.": "kept",
    "reward.timeout_s": "free",
    "reward.workers": "free",
    "reward.concurrency": "free",
    "reward.memory_mib": "free",
    "reward.max_failures": "free",
    "loss.": "kept",
    "pruning.": "kept",
    "pack.": "free",
    "optimizer.": "free",
    "optimizer.distributed": "by the checkpoint",
    "eval.": "free",
    "sft.": "free",
    "cluster.": "free",
}
"""Rules for changes at a resume, by prefix of the setting's name; the longest prefix decides.

- ``kept``: defines the result, and changes with ``run.resume=force`` only.
- ``free``: duration, speed and place.
- ``by the checkpoint``: :func:`~megatron_dppo.trainer.writer.check_resumable` refuses a value that
  does not fit the checkpoint.
"""
PROMPTS = (
    "data.",
    "run.seed",
    *(f"model.path: {pattern.rstrip('*')}" for pattern in TOKENIZER_FILES),
)
"""Settings and files that decide the order of the prompts and their reward histories."""
SEGMENTS = ("rollout.roles", "rollout.tree.")
"""Settings that decide the segments of a completion, and which completions share segments."""
PLACES = (
    "model.path",
    "model.checkpoint",
    "loss.distillation.teacher",
    "data.train",
    "data.rollouts",
    "data.eval",
)
"""Settings of files and folders, which may have several names."""
OF_THE_START = ("run.dir", "run.resume")
"""Settings without effect on a step."""


@dataclass(frozen=True, slots=True)
class SettingsRecord:
    """Settings, and the number of steps finished before they came into force."""

    step: int
    settings: Settings
    renamed: tuple[str, ...] = ()
    """Old names in the file. ``settings`` has the new ones."""


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting, or a file's content, that has changed."""

    key: str
    """Setting; or file, in the form of :func:`compute_fingerprints`."""
    before: Any
    now: Any

    @property
    def affects_results(self) -> bool:
        return get_rule(self.key) == "kept"

    def __str__(self) -> str:
        if ": " in self.key:
            return describe_difference(self.key, self.before, self.now)
        return (
            f"{self.key} = {format_masked(self.key, self.now)} (was "
            f"{format_masked(self.key, self.before)})"
        )


def get_rule(key: str) -> Rule:
    """Return the rule for changes of a setting, or of its files.

    Raises:
        ValueError: if the table has no rule.
    """
    return RULES[max((start for start in RULES if key.startswith(start)), key=len)]


def flatten_config(config: Config) -> dict[str, Any]:
    """Return every setting by dotted key, with JSON types."""
    return dict(json.loads(json.dumps(dict(config.iter_settings()), default=dict)))


def read_history(folder: Path) -> list[SettingsRecord]:
    """Return the settings of a run's steps, oldest first; without a history, the settings in
    force."""
    try:
        lines = (folder / HISTORY).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    if entries := [entry for line in lines if (entry := _parse_entry(line)) is not None]:
        return entries
    try:
        text = (folder / IN_FORCE).read_text(encoding="utf-8", errors="replace")
        # The loader limits nesting and repetition, because the file may be anyone's.
        tree = yaml.load(text, Loader=Loader)
    except (OSError, ValueError, yaml.YAMLError):
        return []
    if not isinstance(tree, dict):
        return []
    return [SettingsRecord(0, *translate_renamed(dict(flatten_tree(tree))))]


def list_renamed(history: Iterable[SettingsRecord]) -> list[str]:
    """Return the old names of settings in a run's files, each once."""
    return list(dict.fromkeys(old for record in history for old in record.renamed))


def find_changes(before: Settings, now: Settings) -> list[SettingChange]:
    """Return the settings that differ. Settings unknown to this version are ignored."""
    found = []
    for key, setting in get_settings().items():
        default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
        # A setting unknown to an older version counts as its default.
        was = before.get(key, default)
        is_now = now.get(key, default)
        same = (
            was == is_now
            or (key.startswith(PLACES) and _are_equal_places(was, is_now))
            or _are_equal_copies(was, is_now)
        )
        if key not in OF_THE_START and not same:
            found.append(SettingChange(key, was, is_now))
    return found


def find_changes_since(
    folder: Path,
    step: int,
    config: Config,
    function_texts: Mapping[str, str | None] | None = None,
) -> list[SettingChange]:
    """Return settings and files that differ from the run's steps up to ``step``.

    Args:
        folder: folder of the run.
        step: number of finished steps.
        config: new configuration.
        function_texts: see :func:`compute_fingerprints`.
    """
    # Ignore records from ``step`` on, because the resume repeats the steps after ``step``.
    entries = [entry for entry in read_history(folder) if entry.step < step]
    found = find_changes(entries[-1].settings, flatten_config(config)) if entries else []
    stored = read_state(folder / "checkpoints" / format_iteration_name(step))
    before = stored.files if stored else {}
    # Checkpoints of earlier versions have no fingerprints.
    now = compute_fingerprints(config, function_texts) if before else {}
    files = [
        SettingChange(name, before.get(name), now.get(name))
        for name in sorted(before.keys() | now.keys())
    ]
    # Report a changed setting once, without the files, because other files follow from the change.
    settings_of = tuple(change.key for change in found)
    return found + [
        file for file in files if _is_changed(file) and not file.key.startswith(settings_of)
    ]


def _is_changed(file: SettingChange) -> bool:
    """Return whether two digests are known and differ."""
    # Digests may be unknown: ``eval.problems`` decides whether held-out problems are read, and some
    # functions from Python have no text.
    unknown = file.key.startswith((*HELD_OUT, *FUNCTIONS)) and None in (file.before, file.now)
    return bool(file.before != file.now) and not unknown


def is_unchanged(folder: Path, step: int, config: Config, keys: tuple[str, ...]) -> bool:
    """Return whether settings and files with these prefixes are the same as up to ``step``."""
    return not any(
        change.key.startswith(keys) for change in find_changes_since(folder, step, config)
    )


def check_resume(config: Config, function_texts: Mapping[str, str | None] | None = None) -> None:
    """Check that the run can resume from the last checkpoint, if any.

    ``function_texts``: see :func:`compute_fingerprints`.

    Raises:
        UserError: if the run cannot resume, or if the results would be of other settings, without
            permission by ``run.resume``.
    """
    folder = Path(config.run.dir)
    place = find_latest_checkpoint(folder / "checkpoints")
    if place is None or (step := parse_step(place)) is None:
        return
    check_resumable(place, CheckpointFormat.from_config(config))
    other = [
        change
        for change in find_changes_since(folder, step, config, function_texts)
        if change.affects_results
    ]
    if other and config.run.resume != "force":
        problem = "\n".join(
            [f"holds {step} steps that were taken with other settings or files:", *map(str, other)]
        )
        remedy = (
            "Name another run.dir; or restore the earlier settings and files; or set "
            "run.resume=force to resume with the new ones, which the log then lists"
        )
        raise UserError("run.dir", folder, problem, remedy)


def record_settings(folder: Path, step: int, config: Config) -> None:
    """Record that the steps after ``step`` use these settings."""
    # Records of steps that are repeated are removed.
    entries = [entry for entry in read_history(folder) if entry.step < step]
    now = flatten_config(config)
    if not entries or find_changes(entries[-1].settings, now):
        entries.append(SettingsRecord(step if entries else 0, now))
    lines = [
        {"step": entry.step, "version": __version__, "settings": dict(entry.settings)}
        for entry in entries
    ]
    # Restrict the files' permissions if any recorded setting is secret.
    private = any(map(has_secrets, (now, *(entry.settings for entry in entries))))
    for name, text in (
        (HISTORY, "".join(json.dumps(line) + "\n" for line in lines)),
        (IN_FORCE, as_yaml(config)),
    ):
        replace_text(folder / name, text, private=private)


def check_warm_up(config: Config) -> None:
    """Check that ``sft`` starts from a policy without a warm-up.

    Raises:
        UserError: if ``sft`` has already warmed up the policy.
    """
    file = config.model.folder / WARM_UP
    if config.run.resume == "force" or config.model.checkpoint is not None or not file.exists():
        return
    try:
        source = str(json.loads(file.read_text(encoding="utf-8"))["model.path"])
    except (OSError, ValueError, KeyError, TypeError):
        source = "THE_INITIAL_POLICY"
    problem = f"is a policy that sft has warmed up already, from {source}"
    remedy = (
        f"Set model.path={source} to warm up the original policy again, or run.resume=force to "
        "continue with this one"
    )
    raise UserError("model.path", config.model.path, problem, remedy)


def record_warm_up(out: Path, config: Config) -> None:
    """Write the settings of a warm-up beside the policy."""
    # Without secrets, because policies are published.
    shown = {key: mask_secrets(key, value) for key, value in flatten_config(config).items()}
    replace_text(out / WARM_UP, json.dumps(shown, indent=2) + "\n")


def _parse_entry(line: str) -> SettingsRecord | None:
    try:
        row = json.loads(line)
        entry = SettingsRecord(int(row["step"]), *translate_renamed(dict(row["settings"])))
        return None if is_too_deep(row) else entry
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _are_equal_copies(one: Any, other: Any) -> bool:
    """Return whether both name functions given from Python."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    # The run has a single file for any name of the function.
    files = {value.rpartition(":")[0] for value in (one, other)}
    return (
        len(files) == 1
        and (file := files.pop()).endswith(".py")
        and Path(file).with_suffix(PICKLED).is_file()
    )


def _are_equal_places(one: Any, other: Any) -> bool:
    """Return whether two values name the same file or folder, or both servers."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(
            one[name] == other[name] or _are_equal_places(one[name], other[name]) for name in one
        )
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(a == b or _are_equal_places(a, b) for a, b in zip(one, other, strict=True))
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    # Servers change addresses, so that two URLs count as the same place.
    return (is_server(one) and is_server(other)) or Path(one).resolve() == Path(other).resolve()
