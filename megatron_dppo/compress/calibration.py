"""Calibration sequences, and passes over them, which go on from their sums where a command was killed.

Scores are made of passes, one after the other. What a pass leaves out depends on nothing but the passes before it, so
that a command which is run again asks for the same passes in the same order. It is given the sums of those that were
done, and reads what the one under way lacks. The sums lie beside OUT until OUT is there::

    .OUT.scoring/rank-0.0.pt   sums of a rank, written every 30 seconds
                 rank-0.1.pt   those before, or after: the files are written in turn

A kill may come when some ranks have written and others have not. Then all go on from what each of them still has.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from megatron_dppo.config import DataConfig, replace
from megatron_dppo.data.date import prints_date
from megatron_dppo.data.prompts import WorkedAnswer, load_worked_answers
from megatron_dppo.data.rows import read_rows
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.answers import ANSWERS
from megatron_dppo.process.files import replacing_file
from megatron_dppo.process.streams import Advance, progress

BATCH_TOKENS = 4096
"""Most tokens of a forward pass, padding included, unless one sequence alone is longer."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, filled up on the right to T tokens. Attention is causal: no token sees what fills up.

    A prompt of two tokens with a response of two, beside one of two and one::

        tokens   [[5, 6, 7, 2], [5, 8, 2, 0]]
        valid    [[1, 1, 1, 1], [1, 1, 1, 0]]
        response [[0, 0, 1, 1], [0, 0, 1, 0]]
    """

    tokens: torch.Tensor
    """[B, T] int64"""
    valid: torch.Tensor
    """[B, T] bool"""
    response: torch.Tensor
    """[B, T] bool, the tokens whose loss counts."""


def read_sequences(
    source: Path, tokenizer: Tokenizer, *, prompt_key: str, response_key: str, chat_template: bool
) -> Sequence[WorkedAnswer]:
    """Prompts with responses, from a JSONL or parquet file, or an evaluation's own answers.

    Args:
        source: a file, or the folder that ``megatron-dppo eval --out`` has written. For a folder the three arguments
            below say nothing: prompts are as the policy read them, and responses that were cut off have no end.

    Raises:
        UserError: naming ``--calibrate``, for a folder without answers; as ``load_worked_answers``, but naming options
            instead of settings.
    """
    if source.is_dir():
        if not (source / "evaluation.json").is_file() or not (source / ANSWERS).is_file():
            problem = "is a folder, and of no evaluation"
            remedy = (
                "Give a file, or have the policy answer first: `megatron-dppo eval CONFIG --model MODEL --out FOLDER`"
            )
            raise UserError("--calibrate", source, problem, remedy)
        return _own_answers(source / ANSWERS, tokenizer)
    data = DataConfig(
        train=str(source),
        prompt_key=prompt_key,
        response_key=response_key,
        label_key=response_key,
        chat_template=chat_template,
        max_prompt_tokens=2**31,
    )
    if source.is_file() and prints_date(Path(tokenizer.name_or_path)):  # the same for all ranks, and on every day
        data = replace(data, date=date.fromtimestamp(source.stat().st_mtime).isoformat())
    try:
        return load_worked_answers(data, tokenizer)
    except UserError as error:
        names = {"data.train": "--calibrate", "data.prompt_key": "--prompt-key", "data.response_key": "--response-key"}
        words = [str(error.problem), str(error.remedy)]
        for setting, flag in {**names, "data.label_key": "--response-key"}.items():
            words = [text.replace(setting, flag) for text in words]
        raise UserError(names.get(error.setting, error.setting), error.value, *words) from error


def _own_answers(file: Path, tokenizer: Tokenizer) -> list[WorkedAnswer]:
    """Prompts and answers of a policy's evaluation; without empty answers."""
    rows = [row for row in read_rows(str(file), "--calibrate") if row.values.get("answer")]
    if not rows:
        raise UserError("--calibrate", file, "holds no answer with a text", "Give a file of prompts with responses")
    texts = [[str(row.values.get(key)) for row in rows] for key in ("prompt", "answer")]
    prompts, responses = (tokenizer(of, add_special_tokens=False)["input_ids"] for of in texts)
    end = end_token_id(tokenizer)
    return [
        WorkedAnswer(
            np.array(prompt, np.int32),
            np.array(response + ([end] if row.values.get("finish") == "stop" else []), np.int32),
        )
        for row, prompt, response in zip(rows, prompts, responses, strict=True)
    ]


def count_sequences(batches: Sequence[Batch]) -> int:
    return sum(len(batch.tokens) for batch in batches)


def digest_of_answers(answers: Sequence[WorkedAnswer]) -> str:
    """Digest of their token ids, in order."""
    seen = hashlib.blake2b(digest_size=16)
    for ids in (ids for answer in answers for ids in (answer.prompt_ids, answer.response_ids)):
        seen.update(len(ids).to_bytes(8) + ids.tobytes())
    return seen.hexdigest()


def draw(answers: Sequence[WorkedAnswer], count: int, seed: int) -> tuple[list[WorkedAnswer], list[WorkedAnswer]]:
    """``count`` sequences to score parts on, and as many others, if there are, to measure the loss on."""
    order = np.random.default_rng(seed).permutation(len(answers))
    return [answers[i] for i in order[:count]], [answers[i] for i in order[count : 2 * count]]


def batches(answers: Sequence[WorkedAnswer], *, max_tokens: int, device: torch.device) -> Iterator[Batch]:
    """Sequences of like length together. Of those over ``max_tokens`` the end is left out.

    A prompt that fills ``max_tokens`` by itself has no response left, and none of its tokens counts for a loss.
    """
    rows = [
        (np.concatenate([answer.prompt_ids, answer.response_ids])[:max_tokens], len(answer.prompt_ids))
        for answer in answers
    ]
    rows.sort(key=lambda row: -len(row[0]))
    while rows:
        width = len(rows[0][0])
        taken, rows = rows[: max(1, BATCH_TOKENS // width)], rows[max(1, BATCH_TOKENS // width) :]
        tokens = torch.zeros(len(taken), width, dtype=torch.int64)
        lengths = torch.tensor([len(ids) for ids, _ in taken])[:, None]
        prompts = torch.tensor([prompt for _, prompt in taken])[:, None]
        for row, (ids, _) in zip(tokens, taken, strict=True):
            row[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
        valid = torch.arange(width) < lengths
        response = valid & (torch.arange(width) >= prompts)
        yield Batch(tokens.to(device), valid.to(device), response.to(device))


T = TypeVar("T")
Sums = dict[Any, torch.Tensor]
"""Sums of a pass, by name, on the CPU."""

KEEP_EVERY_S = 30.0
"""Between two times that sums are written."""
FORM = 3
"""Version of kept sums and of the order of passes. Sums that were kept in another version are not used."""


class Ranks(Protocol):
    """The used part of a :class:`~megatron_dppo.parallel.world.World`."""

    @property
    def rank(self) -> int: ...

    def gather(self, value: T) -> list[T]: ...


class Alone:
    """The one rank of a command without ``--layout``."""

    rank = 0

    def gather(self, value: T) -> list[T]:
        return [value]


def tell(text: str, ranks: Ranks | None = None) -> None:
    """Print a line to standard error, of several ranks on the first."""
    if ranks is None or ranks.rank == 0:
        print(text, file=sys.stderr, flush=True)


class Accumulator:
    """The passes of one command. Without a folder nothing is kept."""

    def __init__(
        self, folder: Path | None = None, asked: Mapping[str, Any] | None = None, ranks: Ranks | None = None
    ) -> None:
        """Look for sums to go on from. Collective.

        Args:
            folder: see :func:`folder_beside`.
            asked: what sums depend on; the same on every rank.
            ranks: which read together.
        """
        self._folder, self._asked, self._ranks = folder, {"form": FORM, **(asked or {})}, ranks or Alone()
        self._number, self._finished, self._under_way = 0, list[Sums](), (0, Sums())
        self._slot, self._due, self._can_write = 0, time.monotonic() + KEEP_EVERY_S, True
        self.read = 0
        """Sequences that have been read so far, each as often as it was; on resuming, those of the killed command."""
        self.advance: Advance | None = None
        if folder is not None:
            self._go_on()

    def over(self, pieces: Sequence[T], sums: Sums, *, sequences: int) -> Iterator[T]:
        """The pieces of the next pass that are not in its sums. Collective: ranks have equally many pieces.

        Args:
            pieces: batches of the sequences, or packs.
            sums: filled with those of the pieces that were read before the first one is given; the caller adds to them.
            sequences: that are read in the whole pass, for the progress.
        """
        number, self._number = self._number, self._number + 1
        if number < len(self._finished):
            _fill(sums, self._finished[number])
            return
        (done, kept), self._under_way = self._under_way, (0, Sums())
        _fill(sums, kept)
        for place in range(done, len(pieces)):
            yield pieces[place]
            count = sequences * (place + 1) // len(pieces) - sequences * place // len(pieces)
            self.read += count
            if self.advance:
                self.advance(count)
            if place + 1 < len(pieces):
                self._keep(place + 1, sums)
        if self._folder is not None:
            self._finished.append({name: tensor.clone() for name, tensor in sums.items()})
        self._keep(0, Sums())

    def _file(self, slot: int) -> Path:
        assert self._folder is not None
        return self._folder / f"rank-{self._ranks.rank}.{slot}.pt"

    def _go_on(self) -> None:
        found, damaged, differ = {}, False, set[str]()
        for slot in (0, 1):
            try:
                kept = torch.load(self._file(slot), weights_only=True)
            except FileNotFoundError:
                continue
            except Exception:  # whatever torch makes of a file that was torn when the machine stopped
                damaged = True
                continue
            changed = {name for name in self._asked if kept["asked"].get(name) != self._asked[name]}
            differ |= changed
            if not changed:
                found[kept["place"]] = slot, kept
        places, torn, others = zip(*self._ranks.gather((set(found), damaged, differ)), strict=True)
        if common := set.intersection(*places):
            slot, kept = found[max(common)]
            self._finished, self._under_way = kept["finished"], (kept["place"][1], kept["sums"])
            self._slot, self.read = 1 - slot, kept["read"]
            tell(f"{self._folder}: goes on from the sums of {self.read:,} sequences", self._ranks)
        elif differ := set.union(*others):
            tell(f"{self._folder}: has sums of another {', '.join(sorted(differ))}, which are not used", self._ranks)
        elif any(torn):
            tell(f"{self._folder}: has damaged sums, which are not used", self._ranks)

    def _keep(self, place: int, sums: Sums) -> None:
        """Write where the pass under way is, if it is time. By the first rank's clock; and no rank writes twice before
        all others have written once, or they could have no place in common."""
        if self._folder is None or not self._ranks.gather(time.monotonic() >= self._due)[0]:
            return
        kept = {
            "asked": self._asked,
            "place": (len(self._finished), place),
            "read": self.read,
            "finished": self._finished,
            "sums": dict(sums),
        }
        try:
            if self._can_write:
                self._folder.mkdir(parents=True, exist_ok=True)
                with replacing_file(self._file(self._slot)) as partial:
                    try:
                        torch.save(kept, partial)
                    except BaseException:  # what there is of it would take room that OUT needs
                        partial.unlink(missing_ok=True)
                        raise
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter where a disk is full
            self._can_write = False
            print(f"{self._folder}: sums cannot be kept ({error}); scoring goes on without", file=sys.stderr)
        self._slot, self._due = 1 - self._slot, time.monotonic() + KEEP_EVERY_S


@contextmanager
def scoring(out: Path, asked: Mapping[str, Any], sequences: int, ranks: Ranks | None = None) -> Iterator[Accumulator]:
    """Passes whose progress is shown. Collective.

    Args:
        out: beside which sums are kept, until :func:`forget`.
        asked: what sums depend on, by names for messages.
        sequences: that all passes together read, each as often as it is read.
        ranks: which read together.
    """
    passes = Accumulator(folder_beside(out), asked, ranks)
    shown = sequences > 0 and (ranks is None or ranks.rank == 0)
    with progress("sequences", sequences, done=passes.read, shown=shown) as advance:
        passes.advance = advance
        yield passes


def folder_beside(out: Path) -> Path:
    out = out.resolve()
    return out.parent / f".{out.name}.scoring"


def forget(out: Path) -> None:
    """Remove the sums of this machine's disks, once ``out`` is there. Several ranks may do so at the same time."""
    shutil.rmtree(folder_beside(out), ignore_errors=True)


def _fill(sums: Sums, kept: Sums) -> None:
    """In place where there is a tensor already: its owner may hold it by another name."""
    for name, tensor in kept.items():
        if name in sums:
            sums[name].copy_(tensor)
        else:
            sums[name] = tensor.clone()
