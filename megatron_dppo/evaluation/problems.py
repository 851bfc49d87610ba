"""Held-out problems as the policy reads them: of benchmarks, of a user's own files, of generators."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.config import Config, replace
from megatron_dppo.data.generators import GENERATORS
from megatron_dppo.data.prompts import load_prompts, prompts_of
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import SETTING, Source, rows_of, sources
from megatron_dppo.rewards.functions import check_labels
from megatron_dppo.rl.types import Prompt

MOST = 1 << 20
"""Problems of one name that have ids of their own."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One held-out problem."""

    name: str
    """Of its benchmark or file; "" where a run's only file has none."""
    number: int
    """Its place there, from 0."""
    prompt: Prompt
    verifier: str
    """The reward function that judges answers to it."""


def held_out(config: Config, tokenizer: Tokenizer, *, max_positions: int) -> list[Problem]:
    """All problems that a run holds out, source by source, at most ``eval.problems`` of each.

    Args:
        config: of the run.
        tokenizer: of the policy.
        max_positions: tokens that the policy was made for, prompt and answer together.

    Raises:
        UserError: as ``sources`` and ``load_prompts``; and for a benchmark's prompt that leaves an answer no room.
    """
    if config.eval.problems == 0:
        return []
    return [problem for source in sources(config) for problem in _load(source, config, tokenizer, max_positions)]


def names(problems: Sequence[Problem]) -> list[str]:
    """The names of the problems' sources, in their order."""
    return list(dict.fromkeys(problem.name for problem in problems))


def _load(source: Source, config: Config, tokenizer: Tokenizer, max_positions: int) -> list[Problem]:
    verifier = source.benchmark.verifier if source.benchmark else config.reward.function
    if source.file in GENERATORS:
        data = replace(config.data, eval=None, train=source.file)
        prompts: Sequence[Prompt] = load_prompts(data, tokenizer, split="eval")
    elif source.setting != SETTING:
        prompts = load_prompts(replace(config.data, eval=source.file), tokenizer, split="eval")
    else:
        prompts = _named(source, config, tokenizer, max_positions)
    prompts = prompts[: config.eval.problems]
    check_labels(verifier, [(prompt.place, prompt.label) for prompt in prompts])
    # Luck is a function of the id: problems of one number in two benchmarks are not to share it.
    first = zlib.crc32(source.name.encode()) * MOST if source.setting == SETTING else 0
    return [Problem(source.name, i, dataclasses.replace(p, id=first + i), verifier) for i, p in enumerate(prompts)]


def _named(source: Source, config: Config, tokenizer: Tokenizer, max_positions: int) -> Sequence[Prompt]:
    """Prompts of a file that ``eval.benchmarks`` names. None is ever left out: a score is of all problems."""
    rows, data = rows_of(source, config.data)
    prompts = prompts_of(rows, data, tokenizer)
    room = max_positions - config.rollout.max_response_tokens
    for row, prompt in zip(rows, prompts, strict=True):
        if len(prompt.token_ids) > room:
            raise UserError(
                "rollout.max_response_tokens",
                config.rollout.max_response_tokens,
                f"leaves {room} of the policy's {max_positions} positions for a prompt, and {row.place} has one of "
                f"{len(prompt.token_ids)} tokens",
                "Lower it",
            )
    return prompts
