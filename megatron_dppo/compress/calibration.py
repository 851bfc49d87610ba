"""Calibration sequences (prompts with responses), and their batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch

from megatron_dppo.config import DataConfig, replace
from megatron_dppo.data.date import uses_date
from megatron_dppo.data.prompts import SupervisedExample, load_supervised_examples
from megatron_dppo.data.rows import read_rows
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.answers import ANSWERS, SETTINGS

BATCH_TOKENS = 4096
"""Maximum tokens of a batch, padding included, unless a single sequence is longer."""
OPTIONS = {
    "data.train": "--calibrate",
    "data.prompt_key": "--prompt-key",
    "data.response_key": "--response-key",
    "data.label_key": "--response-key",
}
"""Command-line options, by the settings that errors name."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, padded on the right to T tokens; causal attention ignores the padding.

    Prompts of two tokens, with responses of two tokens and of one token::

        tokens   [[5, 6, 7, 2], [5, 8, 2, 0]]
        valid    [[1, 1, 1, 1], [1, 1, 1, 0]]
        response [[0, 0, 1, 1], [0, 0, 1, 0]]
    """

    tokens: torch.Tensor
    """[B, T] int64"""
    valid: torch.Tensor
    """[B, T] bool"""
    response: torch.Tensor
    """[B, T] bool, the tokens of the loss."""


def read_sequences(
    source: Path,
    tokenizer: Tokenizer,
    *,
    prompt_key: str,
    response_key: str,
    chat_template: bool,
) -> Sequence[SupervisedExample]:
    """Read prompts with responses.

    Args:
        source: a JSONL or Parquet file, or the ``--out`` folder of ``megatron-dppo eval``, with
            prompts as read by the policy. A folder ignores the other arguments.

    Raises:
        UserError: naming the option.
    """
    if source.is_dir():
        return _read_evaluation(source, tokenizer)
    data = DataConfig(
        train=str(source),
        prompt_key=prompt_key,
        response_key=response_key,
        label_key=response_key,
        chat_template=chat_template,
        # No limit: ``make_batches`` truncates.
        max_prompt_tokens=2**31,
    )
    if source.is_file() and uses_date(Path(tokenizer.name_or_path)):
        # With the file's date, prompts are the same on every day.
        data = replace(data, date=date.fromtimestamp(source.stat().st_mtime).isoformat())
    try:
        return load_supervised_examples(data, tokenizer)
    # Name the command's options instead of a run's settings.
    except UserError as error:
        texts = [str(error.setting), str(error.problem), str(error.remedy)]
        for setting, option in OPTIONS.items():
            texts = [text.replace(setting, option) for text in texts]
        raise UserError(texts[0], error.value, *texts[1:]) from error


def _read_evaluation(folder: Path, tokenizer: Tokenizer) -> list[SupervisedExample]:
    """Read an evaluation's answers: truncated answers without end token; empty answers skipped."""
    file = folder / ANSWERS
    if not (folder / SETTINGS).is_file() or not file.is_file():
        problem = "is a folder without an evaluation"
        remedy = (
            "Give a file, or let the policy answer: `megatron-dppo eval CONFIG --model MODEL "
            "--out FOLDER`"
        )
        raise UserError("--calibrate", folder, problem, remedy)
    rows = [row.values for row in read_rows(str(file), "--calibrate") if row.values.get("answer")]
    if not rows:
        raise UserError(
            "--calibrate",
            file,
            "holds no answer with a text",
            "Give a file of prompts with responses",
        )
    end = end_token_id(tokenizer)
    answers = []
    for row in rows:
        # The stored prompt contains the special tokens already.
        prompt = tokenizer(str(row.get("prompt")), add_special_tokens=False)["input_ids"]
        response = tokenizer(str(row["answer"]), add_special_tokens=False)["input_ids"]
        if row.get("finish") == "stop":
            response = [*response, end]
        answers.append(SupervisedExample(np.array(prompt, np.int32), np.array(response, np.int32)))
    return answers


def draw_sequences(
    answers: Sequence[SupervisedExample],
    count: int,
    seed: int,
) -> tuple[list[SupervisedExample], list[SupervisedExample]]:
    """Draw at most ``count`` sequences for the scores, and at most ``count`` other sequences for
    the loss."""
    order = np.random.default_rng(seed).permutation(len(answers))
    return [answers[i] for i in order[:count]], [answers[i] for i in order[count : 2 * count]]


def make_batches(
    answers: Sequence[SupervisedExample],
    max_tokens: int,
    device: torch.device,
) -> list[Batch]:
    """Batch sequences of similar lengths, truncated to ``max_tokens``."""
    rows = []
    for answer in answers:
        ids = np.concatenate([answer.prompt_ids, answer.response_ids])[:max_tokens]
        rows.append((ids, len(answer.prompt_ids)))
    # Padding costs time: sort by length.
    rows.sort(key=lambda row: -len(row[0]))
    batches = []
    while rows:
        width = len(rows[0][0])
        count = max(1, BATCH_TOKENS // width)
        taken = rows[:count]
        rows = rows[count:]
        tokens = torch.zeros(len(taken), width, dtype=torch.int64)
        for row, (ids, _) in zip(tokens, taken, strict=True):
            row[: len(ids)] = torch.from_numpy(ids.astype(np.int64))
        lengths = torch.tensor([len(ids) for ids, _ in taken])[:, None]
        prompts = torch.tensor([prompt for _, prompt in taken])[:, None]
        valid = torch.arange(width) < lengths
        response = valid & (torch.arange(width) >= prompts)
        batches.append(Batch(tokens.to(device), valid.to(device), response.to(device)))
    return batches
