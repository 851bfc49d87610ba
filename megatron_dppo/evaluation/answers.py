"""Folder of an evaluation. Answers are written in batches: a kill costs at most a batch.

- ``answers.jsonl`` has a line per completion.
- ``evaluation.json`` has the settings of the answers. Other settings are refused; other benchmarks
  are added.
- ``scores.json`` is written at the end.
- ``questions/`` has a file per question with all answers, to read.
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
AnswerRow = Mapping[str, Any]
Key = tuple[str, int]


def resolve_out_folder(config: Config) -> Path:
    """Return ``eval.out``, else a folder in the run of the checkpoint."""
    if config.eval.out:
        return Path(config.eval.out)
    if config.model.checkpoint is None:
        return Path(config.run.dir) / "eval" / Path(config.model.path).name
    checkpoint = find_checkpoint(Path(config.model.checkpoint))
    folder = checkpoint.parent
    run = folder.parent if folder.name == "checkpoints" else Path(config.run.dir)
    return run / "eval" / checkpoint.name


def find_policy(folder: Path) -> dict[str, str | None]:
    """Return the ``model`` settings of a Hugging Face directory, hub id, run, or run's checkpoint.

    Raises:
        UserError: if ``folder`` has no policy.
    """
    if (folder / "config.json").is_file() or is_id(str(folder)):
        return {"path": str(folder), "checkpoint": None}
    inside = folder / "checkpoints"
    place = find_checkpoint(inside if inside.is_dir() else folder, "--model")
    companions = place.parent / HF_FOLDER
    found: dict[str, str | None] = {"checkpoint": str(place)}
    return {**found, "path": str(companions)} if (companions / "config.json").is_file() else found


class AnswerLog:
    """Appends to an evaluation's answers; rank 0 only.

    Args:
        folder: created if missing.
        settings: all settings of the answers, under user-visible names. ``problems`` has an entry
            per benchmark; existing entries are kept.
        batches: batches of problems, in answering order.
        samples: answers per problem.

    Raises:
        UserError: if the folder has answers of other settings, is not writable, or is in use.
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
                # Two evaluations in a folder would mix their lines.
                self._lock = on_failure.enter_context(closing(FolderLock(folder, "eval.out")))
                _check_settings(folder, settings)
                self.whole = self._drop_partial_batches(batches, samples)
                self._file = self._path.open("ab")
            except OSError as error:
                problem = f"cannot be written to ({error})"
                raise UserError("eval.out", folder, problem, "Name another folder") from error
            on_failure.pop_all()

    def append(self, rows: Sequence[AnswerRow]) -> None:
        """Append a batch, flushed to disk."""
        self._file.write(
            "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        )
        self._file.flush()
        os.fsync(self._file.fileno())

    def read_rows(self) -> list[AnswerRow]:
        """Return all rows, without prompts and texts."""
        with self._path.open("rb") as lines:
            return _parse_rows(lines, "eval.out")

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def _drop_partial_batches(self, batches: Sequence[Sequence[Key]], samples: int) -> list[bool]:
        """Drop a kill's half line and the rest of its batch. Return whether each batch is
        complete."""
        # Answer the whole batch again, because an engine's answers may depend on the batch. Keep
        # other benchmarks, whose batches are unknown here.
        found: Counter[Key] = Counter(key for _, key in self._read_lines() if key is not None)
        whole = []
        torn: set[Key] = set()
        for batch in batches:
            is_whole = all(found[key] == samples for key in batch)
            whole.append(is_whole)
            if not is_whole:
                torn |= {key for key in batch if found[key]}
        if torn or any(key is None for _, key in self._read_lines()):
            with replace_file(self._path) as partial, partial.open("wb") as kept:
                kept.writelines(
                    line for line, key in self._read_lines() if key is not None and key not in torn
                )
                kept.flush()
                os.fsync(kept.fileno())
        return whole

    def _read_lines(self) -> Iterator[tuple[bytes, Key | None]]:
        """Yield each line with its problem; None for an incomplete line."""
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
    try:
        return set(json.loads((folder / SCORES).read_text(encoding="utf-8"))["benchmarks"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def write_scores(folder: Path, scores: Mapping[str, Any]) -> None:
    replace_text(folder / SCORES, json.dumps(scores, indent=2) + "\n")


def read_finished(folder: Path, setting: str) -> list[AnswerRow]:
    """Return the rows of a finished evaluation, without prompts and texts.

    Raises:
        UserError: naming ``setting``, if the folder has no finished evaluation.
    """
    if not (folder / SCORES).is_file():
        is_begun = (folder / ANSWERS).is_file()
        problem = "holds an evaluation that is not finished" if is_begun else "holds no evaluation"
        remedy = "Name the --out folder of a finished evaluation"
        raise UserError(setting, folder, problem, remedy)
    try:
        with (folder / ANSWERS).open("rb") as lines:
            return _parse_rows(lines, setting)
    except OSError as error:
        raise UserError(
            setting, folder, f"cannot be read ({error})", "Name another folder"
        ) from error


def _parse_rows(lines: BinaryIO, setting: str) -> list[AnswerRow]:
    rows: list[AnswerRow] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            # Drop prompts and texts, which would fill the memory in a large evaluation.
            rows.append(
                {key: value for key, value in row.items() if key not in ("prompt", "answer")}
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
    """Compare with the folder's original settings; add new benchmarks' problems to the file."""
    file = folder / SETTINGS
    # Compare in JSON's types: a tuple has become a list in the file.
    now = json.loads(json.dumps(settings))
    stored = _read_settings(folder, file) if file.exists() else {}
    if stored:
        before = stored.pop(PROBLEMS, None) or {}
        ours = now.pop(PROBLEMS, None) or {}
        pairs = [(key, stored.get(key), now.get(key)) for key in {**stored, **now}]
        pairs += [
            (f"the problems of {name}", before[name], ours[name]) for name in before if name in ours
        ]
        changed = [
            f"{key} = {_truncate(old)} (now {_truncate(new)})"
            for key, old, new in pairs
            if old != new
        ]
        if changed:
            remedy = "Name another folder with --out, or give the earlier settings"
            raise UserError("eval.out", folder, f"was begun with {'; '.join(changed)}", remedy)
        stored = {**stored, PROBLEMS: before}
        now = {**now, PROBLEMS: {**before, **ours}}
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
    """Write ``questions/BENCHMARK/NUMBER-RIGHTofSAMPLES.txt``; earlier files are replaced.

    NUMBER is the problem's index, from 0: ``gsm8k/0017-2of8.txt`` has two right answers of eight.
    """
    out = folder / QUESTIONS
    with replace_directory(out) as draft, (folder / ANSWERS).open("rb") as lines:
        rows = map(json.loads, lines)
        by_problem = groupby(rows, key=lambda row: (row["benchmark"], row["problem"]))
        for (benchmark, number), group in by_problem:
            answers = sorted(group, key=lambda row: row["sample"])
            right = sum(row["correct"] is True for row in answers)
            (place := draft / benchmark.replace("/", "-")).mkdir(exist_ok=True)
            file = place / f"{number:04}-{right}of{len(answers)}.txt"
            # Replace half a surrogate pair in an answer: UTF-8 has no bytes for a half.
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
