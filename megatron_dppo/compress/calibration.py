"""Calibration sequences, and passes over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from megatron_dppo.config import DataConfig, replace
from megatron_dppo.data.date import prints_date
from megatron_dppo.data.prompts import WorkedAnswer, load_worked_answers
from megatron_dppo.data.rows import read_rows
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.answers import ANSWERS
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


class Accumulator:
    """The passes of one command."""

    def __init__(self) -> None:
        self.read = 0
        """Sequences that have been read so far, each as often as it was."""
        self.advance: Advance | None = None

    def over(self, pieces: Sequence[T], *, sequences: int) -> Iterator[T]:
        """The pieces of the next pass.

        Args:
            pieces: batches of the sequences.
            sequences: that are read in the whole pass, for the progress.
        """
        for place, piece in enumerate(pieces):
            yield piece
            count = sequences * (place + 1) // len(pieces) - sequences * place // len(pieces)
            self.read += count
            if self.advance:
                self.advance(count)


@contextmanager
def scoring(sequences: int) -> Iterator[Accumulator]:
    """Passes whose progress is shown.

    Args:
        sequences: that all passes together read, each as often as it is read.
    """
    passes = Accumulator()
    with progress("sequences", sequences, shown=sequences > 0) as advance:
        passes.advance = advance
        yield passes
