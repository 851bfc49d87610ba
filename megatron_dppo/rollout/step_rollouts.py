"""Rollouts of one step, from the drawn prompts to the trained groups, and in a checkpoint.

A checkpoint of a run that rolls out ahead holds all rollouts not trained on yet:

- ``rollouts/`` holds the rollouts of the next step, ``rollouts_2/`` of the step after, and so on.
- ``step.npz`` holds the data common to all ranks, and ``rank_….npz`` the tokens of one rank's
  groups.
- Interrupted groups are stored as partial rollouts.
- A step with drawn prompts but no rollouts has ``step.npz`` alone.
- A run can resume with any number of ranks.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from megatron_dppo.bridge.checkpoint_folder import build_corruption_error
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.sampling_mask import SamplingMask
from megatron_dppo.rl.sequences import check_settings
from megatron_dppo.rl.types import Completion, Floats, Group, Prompt, Selection, StepMetadata
from megatron_dppo.rollout.engine import PartialRollout

FOLDER = "rollouts"
_STEP = "step.npz"
_CHOSEN = "selection."
_PART = "parts."
_LENGTHS = "_lengths"
_RANKS = "broken_off_by_ranks"


@dataclass(frozen=True, slots=True)
class CompleteRollouts:
    """Complete rollouts of a step, from the view of one rank."""

    held: dict[int, Group]
    """Groups with tokens on this rank, by row of ``metadata``."""
    metadata: StepMetadata
    """Metadata of all ranks."""
    metrics: dict[str, float]
    """``rollout/…`` and ``reward/…``, the same on every rank."""
    notes: tuple[str, ...]


@dataclass(slots=True)
class StepRollouts:
    """Rollouts of a step, from the view of one rank.

    State by the field that is not None:

    - no field: *selected*, as ``StepRollouts(Selection(...), step=4)``. Prompts are drawn, but no
      completion is requested.
    - ``partial``: interrupted.
    - ``prompts``: pending on the engine.
    - ``complete``: ready for training.
    """

    selection: Selection
    """Selection of all ranks."""
    step: int
    partial: list[PartialRollout] | None = None
    """This rank's partial rollouts."""
    prompts: Sequence[Prompt] | None = None
    """This rank's requested, incomplete prompts; None: not requested."""
    inclusion: Floats | None = None
    """[P], inclusion probabilities of ``prompts``."""
    pending: Any = None
    """Engine's return value for the request."""
    complete: CompleteRollouts | None = None

    @property
    def is_pending(self) -> bool:
        """Whether rollouts are requested and incomplete."""
        return self.prompts is not None

    def reset(self) -> None:
        """Remove everything except the selection and the step."""
        self.partial = self.prompts = self.inclusion = self.pending = self.complete = None

    def finish(self, complete: CompleteRollouts) -> None:
        """Replace the request by the complete rollouts."""
        self.reset()
        self.complete = complete

    def can_resume(self, config: Config, *, min_version: int, needs_routing: bool) -> bool:
        """Return whether a run with these settings can resume this rank's rollouts.

        Args:
            config: configuration; groups, roles, trees or teachers may differ from the writing run.
            min_version: oldest permitted version of a token.
            needs_routing: whether routing is required.

        Raises:
            UserError: a setting supports only one sequence, and a completion has several.
        """
        if self.complete is not None:
            return self._can_resume_complete(self.complete, config, min_version, needs_routing)
        limit = config.rollout.max_response_tokens
        for rollout in self.partial or ():
            completion = rollout.completion
            if _differs_in_mask(completion, config.rollout.top_k):
                return False
            if len(completion.token_ids) >= limit + rollout.ended:
                return False
            if completion.oldest_version < min_version:
                return False
            # A continuation's routing includes all earlier tokens: only ended completions need
            # routing.
            if needs_routing and rollout.ended and completion.routing is None:
                return False
        return True

    @staticmethod
    def _can_resume_complete(
        rollouts: CompleteRollouts,
        config: Config,
        min_version: int,
        needs_routing: bool,
    ) -> bool:
        known = rollouts.metadata
        rollout = config.rollout
        teaching = config.loss.distillation
        if (several := known.further_lengths.shape[2]) > 0:
            check_settings(config, 1 + several)
        if known.segments.shape[1:] != (rollout.samples_per_prompt, rollout.segments):
            return False
        if known.versions.min(initial=np.iinfo(np.int64).max) < min_version:
            return False
        for row, group in rollouts.held.items():
            source = group.prompt.data_source
            if known.teacher[row] != teaching.find_model_index(source):
                return False
            for completion in group.completions:
                if (completion.teacher_logprobs is not None) != teaching.has_server(source):
                    return False
                if needs_routing and completion.routing is None:
                    return False
                if _differs_in_mask(completion, rollout.top_k):
                    return False
        return True


def write_in_flight(place: Path, steps: Sequence[StepRollouts], world: World) -> None:
    """Write the rollouts of the next steps into a checkpoint's folder: this rank's groups, and on
    rank 0 the common data. Not collective."""
    for number, batch in enumerate(steps):
        folder = _get_folder(place, number)
        folder.mkdir(exist_ok=True)
        known: dict[str, Any] = {}
        if (rollouts := batch.complete) is not None:
            words = json.dumps(
                {"metrics": rollouts.metrics, "notes": rollouts.notes, "ranks": world.size}
            )
            known = {"words": np.array(words), **asdict(rollouts.metadata)}
            known |= {_PART + name: values for name, values in known.pop("parts").items()}
            _save_arrays(_get_file(folder, world.rank), _pack_groups(rollouts.held))
        elif batch.partial is not None:
            known = {_RANKS: np.array(world.size)}
            _save_arrays(_get_file(folder, world.rank), _pack_partial(batch.partial))
        if world.is_rank0:
            _save_arrays(
                folder / _STEP,
                known | {_CHOSEN + name: value for name, value in asdict(batch.selection).items()},
            )


def read_in_flight(
    place: Path,
    pool: Sequence[Prompt],
    world: World,
    step: int,
) -> list[StepRollouts]:
    """Read a checkpoint's rollouts of the next steps, in order. Collective.

    Each rank keeps its groups, or takes every n-th group of a run with a different number of ranks.

    Args:
        place: folder of the checkpoint.
        pool: prompts of the run that wrote the checkpoint.
        step: number of the next step.

    Raises:
        UserError: on every rank: the pool has different prompts, or a file is damaged.
    """
    # The first missing step ends the list.
    folders = (_get_folder(place, number) for number in count())
    stored = world.broadcast(
        lambda: [
            _load_arrays(folder / _STEP)
            for folder in takewhile(lambda folder: (folder / _STEP).exists(), folders)
        ]
    )
    return [
        _read(_get_folder(place, k), arrays, pool, world, step + k)
        for k, arrays in enumerate(stored)
    ]


def _read(
    folder: Path,
    stored: dict[str, Any],
    pool: Sequence[Prompt],
    world: World,
    step: int,
) -> StepRollouts:
    place = folder.parent
    chosen = {
        name.removeprefix(_CHOSEN): value
        for name, value in stored.items()
        if name.startswith(_CHOSEN)
    }
    selection = Selection(**chosen | {"window": int(chosen["window"])})
    rollouts = StepRollouts(selection, step)
    if _RANKS in stored:
        # Must match ``Collector.request``.
        share = set(selection.prompt_ids[world.rank :: world.size].tolist())
        files = [_get_file(folder, writer) for writer in range(int(stored[_RANKS]))]
        found = world.run_on_all_ranks(
            lambda: [_unpack_partial(_load_arrays(file), share) for file in files],
            description="rollouts broken off",
        )
        rollouts.partial = [one for each in found for one in each]
        return rollouts
    if "words" not in stored:
        return rollouts
    words = json.loads(str(stored["words"]))
    columns = [field.name for field in fields(StepMetadata) if field.name != "parts"]
    if missing := [name for name in columns if name not in stored]:
        problem = (
            "its rollouts were written by another version of this package, without "
            f"{', '.join(missing)}"
        )
        remedy = (
            "Resume with that version, or start another run.dir from its weights alone: "
            f"model.checkpoint={place}"
        )
        raise UserError("run.dir", place.parent.parent, problem, remedy)
    known = {name: stored[name] for name in columns}
    parts = {
        name.removeprefix(_PART): values
        for name, values in stored.items()
        if name.startswith(_PART)
    }
    metadata = StepMetadata(**known | {"window": float(known["window"]), "parts": parts})
    # A different number of ranks changes the owners, but not the names of files.
    written_by = metadata.owners
    if words["ranks"] != world.size:
        metadata = replace(metadata, owners=np.arange(len(written_by)) % world.size)

    def read_local() -> dict[int, Group]:
        rows = np.flatnonzero(metadata.owners == world.rank)
        prompts = {row: _find_prompt(place, pool, metadata, row) for row in rows.tolist()}
        held: dict[int, Group] = {}
        for writer in np.unique(written_by[rows]).tolist():
            held |= _unpack_groups(_load_arrays(_get_file(folder, writer)), metadata, prompts)
        return held

    held = world.run_on_all_ranks(read_local, description="rollouts in the checkpoint")
    rollouts.complete = CompleteRollouts(held, metadata, words["metrics"], tuple(words["notes"]))
    return rollouts


def _get_folder(place: Path, number: int) -> Path:
    return place / (f"{FOLDER}_{number + 1}" if number else FOLDER)


def _get_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.npz"


def _load_arrays(file: Path) -> dict[str, Any]:
    try:
        with np.load(file) as stored:  # without pickled objects
            return {name: stored[name] for name in stored.files}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        problem = f"{file.parent.name}/{file.name} cannot be read ({type(error).__name__}: {error})"
        raise build_corruption_error(file.parent.parent, "run.dir", problem) from error


def _save_arrays(file: Path, arrays: Mapping[str, Any]) -> None:
    np.savez(file, allow_pickle=False, **arrays)


def _pack_groups(held: dict[int, Group]) -> dict[str, np.ndarray]:
    """Pack groups by row; the metadata holds prompts, lengths and rewards."""
    completions = [completion for group in held.values() for completion in group.completions]
    return {"rows": np.array(list(held), np.int64), **_pack_completions(completions)}


def _pack_partial(partial_rollouts: Sequence[PartialRollout]) -> dict[str, np.ndarray]:
    """Pack partial rollouts: [n, 3] prompt, slot and ``ended``, and the completions."""
    places = [(one.prompt, one.slot, one.ended) for one in partial_rollouts]
    return {
        "places": np.array(places, np.int64).reshape(-1, 3),
        **_pack_completions([one.completion for one in partial_rollouts]),
    }


def _unpack_partial(stored: dict[str, Any], prompt_ids: set[int]) -> list[PartialRollout]:
    """Unpack the given prompts' partial rollouts."""
    completions = _unpack_completions(stored)
    return [
        PartialRollout(prompt, slot, completion, bool(ended))
        for (prompt, slot, ended), completion in zip(
            stored["places"].tolist(), completions, strict=True
        )
        if prompt in prompt_ids
    ]


def _differs_in_mask(completion: Completion, top_k: int | None) -> bool:
    """Return whether sampled tokens lack the mask that ``rollout.top_k`` needs, or have a mask
    without the setting."""
    has_mask = completion.sampling_mask is not None
    return bool(completion.loss_mask.any()) and has_mask != (top_k is not None)


_COLUMNS = (
    "token_ids",
    "logprobs",
    "loss_mask",
    "versions",
    "routing",
    "teacher_logprobs",
    "segments",
    "starts",
)
"""Fields of a completion with separate lengths, or None."""
_MASK_COLUMNS = ("counts", "token_ids")
"""Fields of a completion's sampling mask."""
_MASK = "mask_"


def _pack_completions(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """Pack completions: each column, concatenated, and lengths; length −1 encodes None."""
    packed = {
        "stopped": np.array(
            [completion.finish_reason == "stop" for completion in completions], bool
        )
    }
    columns = {}
    for name in _COLUMNS:
        columns[name] = [getattr(completion, name) for completion in completions]
    masks = [completion.sampling_mask for completion in completions]
    for name in _MASK_COLUMNS:
        columns[_MASK + name] = [mask and getattr(mask, name) for mask in masks]
    for name, values in columns.items():
        known = [np.asarray(value) for value in values if value is not None]
        packed[name] = np.concatenate(known) if known else np.zeros(0)
        lengths = np.full(len(values), -1, np.int64)
        for index, value in enumerate(values):
            if value is not None:
                lengths[index] = len(value)
        packed[name + _LENGTHS] = lengths
    return packed


def _unpack_completions(stored: dict[str, Any]) -> Iterator[Completion]:
    columns = {}
    # Checkpoints of versions without sampling masks lack the last columns.
    has_masks = _MASK + _MASK_COLUMNS[0] in stored
    for name in (*_COLUMNS, *(_MASK + each for each in _MASK_COLUMNS if has_masks)):
        lengths = stored[name + _LENGTHS]
        parts = np.split(stored[name], np.cumsum(np.maximum(lengths, 0))[:-1])
        # For no completions, ``np.split`` returns one part too many.
        column: list[Any] = []
        for length, part in zip(lengths, parts, strict=False):
            column.append(None if length < 0 else part)
        columns[name] = column
    for number, stopped in enumerate(stored["stopped"].tolist()):
        found: dict[str, Any] = {name: column[number] for name, column in columns.items()}
        found["starts"] = tuple(map(int, found["starts"]))
        mask = [found.pop(_MASK + name, None) for name in _MASK_COLUMNS]
        found["sampling_mask"] = None if mask[0] is None else SamplingMask(*mask)
        yield Completion(**found, finish_reason="stop" if stopped else "length")


def _unpack_groups(
    stored: dict[str, Any],
    metadata: StepMetadata,
    prompts: dict[int, Prompt],
) -> dict[int, Group]:
    """Unpack the stored groups of the given prompts, by row of the metadata."""
    rows = stored["rows"]
    completions = _unpack_completions(stored)
    groups = [(row, tuple(islice(completions, metadata.rewards.shape[1]))) for row in rows.tolist()]
    return {
        row: Group(prompts[row], own, metadata.rewards[row])
        for row, own in groups
        if row in prompts
    }


def _find_prompt(place: Path, pool: Sequence[Prompt], metadata: StepMetadata, row: int) -> Prompt:
    prompt = int(metadata.prompt_ids[row])
    tokens = int(metadata.prompt_lengths[row])
    if prompt >= len(pool) or len(pool[prompt].token_ids) != tokens:
        completions = f"completions of prompt {prompt}, which has {tokens} tokens"
        problem = f"its checkpoint holds {completions}, and no such prompt is in the pool"
        data = "Resume with the original data"
        alone = "start another run.dir from its weights alone"
        raise UserError(
            "run.dir", place.parent.parent, problem, f"{data}, or {alone}: model.checkpoint={place}"
        )
    return pool[prompt]
