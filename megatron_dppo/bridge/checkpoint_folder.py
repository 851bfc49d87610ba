"""Where a Megatron checkpoint stands: what is passed around is the parent folder, whose tracker names the latest one.

Needs no torch, so that a setting can be checked before anything heavy is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from megatron_dppo.bridge.checksums import Checksums, DamagedError
from megatron_dppo.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
"""What the tracker says, and the folder's name, where weights were converted and not trained."""
FORMAT = "metadata.json"
"""Megatron's own marker of a checkpoint in its distributed format, written after everything else."""
METADATA = ".metadata"
"""Torch's index of a checkpoint."""
COMPANIONS_FOLDER = "hf"
"""Beside the checkpoints: configuration and tokenizer of the policy, for the way back to Hugging Face."""


def iteration_name(step: int) -> str:
    """Megatron's name of the folder of a step."""
    return f"iter_{step:07d}"


def step_in(place: Path) -> int | None:
    """The step of a checkpoint, by its folder's name; None where weights were converted and not trained."""
    word = place.name.removeprefix("iter_")
    return int(word) if _is_step(word) else None


def steps_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in ``folder``, in order. What has another form of name is none, and nobody's."""
    places = folder.iterdir() if folder.is_dir() else ()
    steps = (step for place in places if place.is_dir() and (step := step_in(place)) is not None)
    return sorted(step for step in steps if (folder / iteration_name(step)).is_dir())


def latest_step(folder: Path) -> int | None:
    """The step of the last good checkpoint that a run left in ``folder``, None if there is none.

    It is the one that the tracker names. Without a tracker, which a run writes after every checkpoint, it is the newest
    one that is whole: to begin anew would overwrite them all.

    Raises:
        UserError: naming ``run.dir``, if what is there was not trained by a run, or no checkpoint of many is whole.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError("run.dir", folder.parent, f"{folder} is no folder", "Move it away, or name another run.dir")
    tracker = folder / TRACKER
    if not os.path.lexists(tracker):
        if not (steps := steps_in(folder)):
            return None
        if (step := _newest_whole(folder)) is not None:
            return step
        problem = f"{folder} has no {TRACKER}, and no whole checkpoint ({_flaw(folder / iteration_name(steps[-1]))})"
        raise UserError("run.dir", folder.parent, problem, "Fetch its files again, or name another run.dir")
    word = _word(tracker)
    if word == RELEASE:
        problem = f"{tracker} says {word!r}: no run can go on from there"
        remedy = f"Name another run.dir; converted weights are started from with model.checkpoint={folder}"
        raise UserError("run.dir", folder.parent, problem, remedy)
    if not _is_step(word):
        newest = _newest_whole(folder)
        write = f"Write {newest} into that file, of which the checkpoint is whole, or name" if newest else "Name"
        raise UserError("run.dir", folder.parent, f"{tracker} says {word[:40]!r}: no step", f"{write} another run.dir")
    return int(word)


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a run goes on from, None if there is none.

    Raises:
        UserError: as :func:`latest_step`; and if the checkpoint that the tracker names is not there.
    """
    if (step := latest_step(folder)) is None:
        return None
    return checkpoint_place(folder, "run.dir") if (folder / TRACKER).exists() else folder / iteration_name(step)


def checkpoint_place(folder: Path, setting: str = "model.checkpoint") -> Path:
    """The folder of the checkpoint itself: the one that the tracker in ``folder`` names, or ``folder`` if it is one.

    Raises:
        UserError: naming ``setting``, if there is no checkpoint in the distributed format.
    """
    if (folder / FORMAT).is_file():
        return folder
    if not folder.is_dir():
        above = next(place for place in folder.absolute().parents if place.is_dir())
        there = ", ".join(sorted(p.name for p in above.iterdir() if p.is_dir() and p.name[0] != ".")) or "no folder"
        raise UserError(setting, folder, f"is no folder; {above} has {there}", "Name the folder that holds " + TRACKER)
    tracker = folder / TRACKER
    if not tracker.is_file():
        inside = [p.parent for p in sorted(folder.glob(f"*/{TRACKER}"))]
        inside += [folder / iteration_name(step)] if (step := _newest_whole(folder)) is not None else []
        problem = f"holds neither {TRACKER} nor a checkpoint in Megatron's distributed format ({FORMAT})"
        raise UserError(setting, folder, problem, f"Name {inside[0] if inside else f'one that has {TRACKER}'}")
    word = _word(tracker)
    if word != RELEASE and not _is_step(word):
        problem = f"{TRACKER} says {word[:40]!r}, which is neither a step nor {RELEASE!r}"
        raise UserError(setting, folder, problem, "Write the step to take into that file, or name its folder itself")
    place = folder / (RELEASE if word == RELEASE else iteration_name(int(word)))
    if not (place / FORMAT).is_file():
        problem = f"{TRACKER} names {place.name}, where no checkpoint in Megatron's distributed format is ({FORMAT})"
        others = [p.parent.name for p in sorted(folder.glob(f"*/{FORMAT}"))]
        remedy = f"Write one of these into that file: {', '.join(others)}" if others else "Name another folder"
        raise UserError(setting, folder, problem, remedy)
    return place


def damaged(place: Path, setting: str, problem: str) -> UserError:
    """The refusal of a checkpoint of which a file does not hold what it should, with the one to take instead."""
    step = _newest_whole(place.parent, besides=place)
    if step is None:
        return UserError(setting, place, problem, "Fetch its files again; no other checkpoint beside it is whole")
    instead = f"write {step} into {place.parent / TRACKER}: {iteration_name(step)} beside it is whole"
    return UserError(setting, place, problem, f"Fetch its files again, or {instead}")


@contextmanager
def refusing_damage(place: Path, setting: str) -> Iterator[None]:
    """Raise a ``DamagedError`` as a ``UserError`` that names ``setting``."""
    try:
        yield
    except DamagedError as error:
        raise damaged(place, setting, str(error)) from error


@cache
def say_unchecked(place: Path) -> None:
    """Say of a checkpoint, once, that nothing in it can be checked."""
    text = f"note: {place} has no checksums, as an earlier version wrote it: damage to it may go unnoticed"
    print(text, file=sys.stderr, flush=True)


def _newest_whole(folder: Path, besides: Path | None = None) -> int | None:
    places = {step: folder / iteration_name(step) for step in reversed(steps_in(folder))}
    return next((step for step, place in places.items() if place != besides and _flaw(place) is None), None)


def _flaw(place: Path) -> str | None:
    """What a checkpoint lacks, by its small files and the sizes of all; None if it is whole so far."""
    try:
        checksums = Checksums.read(place)
        if checksums is not None:
            checksums.check_sizes()
            checksums.check(checksums.small)
    except DamagedError as error:
        return f"{place.name}: {error}"
    missing = [name for name in (FORMAT, METADATA) if not (place / name).is_file() or not (place / name).stat().st_size]
    return f"{place.name} has no {missing[0]}" if missing else None


def _word(tracker: Path) -> str:
    """What a tracker says; empty where it cannot be read."""
    try:
        return tracker.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _is_step(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 19
