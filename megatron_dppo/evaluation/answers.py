"""The folder of one evaluation. Answers are written batch by batch, so that a kill costs one batch
at most.

- ``answers.jsonl`` has a line for each completion.
- ``evaluation.json`` has the settings that the answers depend on. An evaluation with other settings
  is refused. Other benchmarks of the same policy and settings are added to the same folder.
- ``scores.json`` is written in one piece at the end.

For people to read there is besides a file for each question, with all answers to it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from megatron_dppo.bridge.checkpoint_folder import HF_FOLDER, find_checkpoint
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.hub import is_id
from megatron_dppo.process.files import (
    FolderLock,
    replace_directory,
    replace_file,
    replace_text,
)

ANSWERS = "answers.jsonl"
SETTINGS = "evaluation.json"
SCORES = "scores.json"
PROBLEMS = "problems"
"""The setting that has an entry for each benchmark."""
AnswerRow = Mapping[str, Any]
"""A line of ``answers.jsonl``."""
Key = tuple[str, int]
"""A problem: its benchmark, and its number there."""


def resolve_out_folder(config: Config) -> Path:
    """Where the answers go: into ``eval.out``, else into the folder of the run that the checkpoint
    is of."""
    if config.eval.out:
        return Path(config.eval.out)
    if config.model.checkpoint is None:
        return Path(config.run.dir) / "eval" / Path(config.model.path).name
    checkpoint = find_checkpoint(Path(config.model.checkpoint))
    run = (
        checkpoint.parent.parent
        if checkpoint.parent.name == "checkpoints"
        else Path(config.run.dir)
    )
    return run / "eval" / checkpoint.name


def find_policy(folder: Path) -> dict[str, str | None]:
    """The settings of ``model`` that name the policy of a Hugging Face directory, an id on the hub,
    a run, or a checkpoint of a run.

    Raises:
        UserError: it is none of them.
    """
    if (folder / "config.json").is_file() or is_id(str(folder)):
        return {"path": str(folder), "checkpoint": None}
    inside = folder / "checkpoints"
    place = find_checkpoint(inside if inside.is_dir() else folder, "--model")
    companions = place.parent / HF_FOLDER
    found: dict[str, str | None] = {"checkpoint": str(place)}
    return {**found, "path": str(companions)} if (companions / "config.json").is_file() else found


class AnswerLog:
    """Appends to an evaluation's answers; only the leader has one.

    Args:
        folder: made where there is none.
        settings: all that the answers depend on, by names that a user knows, for JSON.
            ``problems`` has an entry for each benchmark; those that the folder has already
            are kept.
        batches: of problems, each by its benchmark and its number, in the order in which they are
            answered.
        samples: answers to each problem.

    Raises:
        UserError: if the folder has answers of other settings, cannot be written to, or is being
            written to.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        batches: Sequence[Sequence[Key]],
        samples: int,
    ) -> None:
        self._path = folder / ANSWERS
        with ExitStack() as on_failure:
            try:
                self._lock = on_failure.enter_context(closing(FolderLock(folder, "eval.out")))
                _check_settings(folder, settings)
                self.whole = self._drop_partial_batches(batches, samples)
                """Whether each batch is there."""
                self._file = self._path.open("ab")
            except OSError as error:
                problem = f"cannot be written to ({error})"
                raise UserError("eval.out", folder, problem, "Name another folder") from error
            on_failure.pop_all()

    def append(self, rows: Sequence[AnswerRow]) -> None:
        """Add a batch; it is on the disk when this returns."""
        self._file.write(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        )
        self._file.flush()
        os.fsync(self._file.fileno())

    def read_rows(self) -> list[AnswerRow]:
        """All that has been written, without prompts and texts."""
        with self._path.open("rb") as lines:
            return _parse_rows(lines, "eval.out")

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def _drop_partial_batches(self, batches: Sequence[Sequence[Key]], samples: int) -> list[bool]:
        """Drop half a line that a kill has left, and the rest of its batch, which is answered
        again. Answers of other benchmarks are kept, because their batches are not known here."""
        found: Counter[Key] = Counter(key for _, key in self._read_lines() if key is not None)
        whole = [all(found[key] == samples for key in batch) for batch in batches]
        torn = {
            key
            for batch, there in zip(batches, whole, strict=True)
            if not there
            for key in batch
            if found[key]
        }
        if torn or any(key is None for _, key in self._read_lines()):
            with replace_file(self._path) as partial, partial.open("wb") as kept:
                kept.writelines(
                    line for line, key in self._read_lines() if key is not None and key not in torn
                )
                kept.flush()
                os.fsync(kept.fileno())
        return whole

    def _read_lines(self) -> Iterator[tuple[bytes, Key | None]]:
        """Each line with the problem that it answers; None for a line that is incomplete."""
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            for line in lines:
                try:
                    row = json.loads(line)
                    key = (row["benchmark"], row["problem"]) if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    key = None
                yield line, key


def list_finished_benchmarks(folder: Path) -> set[str]:
    """The benchmarks that the folder has scores of."""
    try:
        return set(json.loads((folder / SCORES).read_text(encoding="utf-8"))["benchmarks"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def write_scores(folder: Path, scores: Mapping[str, Any]) -> None:
    """Write ``scores.json`` in one piece."""
    replace_text(folder / SCORES, json.dumps(scores, indent=2) + "\n")


def read_finished(folder: Path, setting: str) -> list[AnswerRow]:
    """The rows of a finished evaluation, without prompts and texts.

    Raises:
        UserError: naming ``setting``, if the folder holds none.
    """
    if not (folder / SCORES).is_file():
        there = (
            "an evaluation that is not finished"
            if (folder / ANSWERS).is_file()
            else "no evaluation"
        )
        raise UserError(setting, folder, f"holds {there}", "Name the --out folder of one that is")
    try:
        with (folder / ANSWERS).open("rb") as lines:
            return _parse_rows(lines, setting)
    except OSError as error:
        raise UserError(
            setting, folder, f"cannot be read ({error})", "Name another folder"
        ) from error


def _parse_rows(lines: BinaryIO, setting: str) -> list[AnswerRow]:
    """The rows without prompts and texts, which would fill the memory in a large evaluation."""
    rows: list[AnswerRow] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(
                {
                    key: value
                    for key, value in json.loads(line).items()
                    if key not in ("prompt", "answer")
                }
            )
        except (ValueError, AttributeError, RecursionError) as error:
            problem = f"line {number} is not an answer ({error})"
            remedy = (
                "Remove this line and all later lines, and their problems are answered again; or "
                "name another folder"
            )
            raise UserError(setting, lines.name, problem, remedy) from error
    return rows


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Compare the settings with those that the folder was begun with, and write down both
    benchmarks' problems."""
    file = folder / SETTINGS
    now = json.loads(json.dumps(settings))
    stored = _read_settings(folder, file) if file.exists() else {}
    if stored:
        before = stored.pop(PROBLEMS, None) or {}
        ours = now.pop(PROBLEMS, None) or {}
        pairs = [(key, stored.get(key), now.get(key)) for key in {**stored, **now}]
        pairs += [
            (f"the problems of {name}", before[name], ours[name]) for name in before if name in ours
        ]
        if changed := [
            f"{key} = {_truncate(was)} (now {_truncate(is_now)})"
            for key, was, is_now in pairs
            if was != is_now
        ]:
            remedy = "Name another folder with --out, or give the earlier settings"
            raise UserError("eval.out", folder, f"was begun with {'; '.join(changed)}", remedy)
        stored, now = (
            {**values, PROBLEMS: problems}
            for values, problems in ((stored, before), (now, {**before, **ours}))
        )
    if now != stored:
        replace_text(file, json.dumps(now, indent=2) + "\n")


def _read_settings(folder: Path, file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problem = (
            f"{SETTINGS} cannot be read ({error}), so that the settings of the stored answers are "
            "unknown"
        )
        remedy = "Name another folder with --out, or copy that file again"
        raise UserError("eval.out", folder, problem, remedy) from error


def _truncate(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


QUESTIONS = "questions"


def write_questions(folder: Path) -> Path:
    """Write ``questions/BENCHMARK/NUMBER-RIGHTofSAMPLES.txt`` from ``answers.jsonl``, in place of
    what is there.

    The number is the problem's place in its file, from 0: ``gsm8k/0017-2of8.txt`` has two right
    answers among eight.
    """
    out = folder / QUESTIONS
    with replace_directory(out) as draft, (folder / ANSWERS).open("rb") as lines:
        rows = map(json.loads, lines)
        for (benchmark, number), group in groupby(
            rows, key=lambda row: (row["benchmark"], row["problem"])
        ):
            answers = sorted(group, key=lambda row: row["sample"])
            right = sum(row["correct"] is True for row in answers)
            (place := draft / benchmark.replace("/", "-")).mkdir(exist_ok=True)
            file = place / f"{number:04}-{right}of{len(answers)}.txt"
            # An answer may hold half of a surrogate pair, which UTF-8 has no bytes for.
            file.write_text(
                "\n".join(_format_answers(answers)) + "\n", encoding="utf-8", errors="replace"
            )
    return out


def _format_answers(answers: Sequence[dict[str, Any]]) -> Iterator[str]:
    first = answers[0]
    yield f"{first['benchmark']}, problem {first['problem']}; reference: {first['label']}"
    yield f"\n{first['prompt']}"
    for row in answers:
        verdict = {True: "right", False: "wrong", None: "not scored"}[row["correct"]]
        facts = [verdict, f"reward {row['reward']:g}" if row["reward"] is not None else "no reward"]
        facts += [f"read as {row['extracted']}"] if row["extracted"] is not None else []
        facts.append(f"{row['tokens']} tokens" + (", cut off" if row["finish"] == "length" else ""))
        yield (
            f"\n--- answer {row['sample'] + 1} of {len(answers)}: "
            f"{', '.join(facts)}\n{row['answer']}"
        )
