"""Conversations: completions in several turns, with tools or an environment between the turns.

``rollout.conversation`` names a coroutine function (or is ``verifiers``: see
``conversation_functions.py``), called once for each completion:

    async def rollout(client: Client, prompt: Prompt) -> list[Turn]:
        tokens = prompt.token_ids.tolist()
        question = await client.generate(tokens)
        result = client.tokenizer.encode(await my_tool(question))
        answer = await client.generate([*tokens, *question.token_ids, *result])
        return [question, result, answer]

The completion concatenates the three turns. The loss mask is True on tokens sampled from the policy
(question and answer), and False on context tokens (result).

A function may return a list of sequences, for example with context compaction: ``[[question,
result, answer], [summary, next_answer]]``. The first sequence follows the prompt; a further
sequence begins with the token ids of a new context. See ``rl/sequences.py``.

With ``rollout.roles`` every turn of the policy names a role, and each role has a separate reward:
``[("solver", attempt), result, ("critic", review)]``. See ``rl/objectives.py``.
"""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.plugins import FAILURES
from megatron_dppo.rl.numbers import as_mask
from megatron_dppo.rl.sequences import find_sequence_error
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.conversation_checks import (
    InvalidCompletionError,
    check_completion,
    check_ids,
    check_roles,
)
from megatron_dppo.rollout.turns import (
    Client,
    Part,
    RolloutFunction,
    TryAgainError,
    merge_parts,
    merge_sequences,
    truncate_completion,
)

Turn = Part | tuple[str, Completion]
"""Part of a conversation; with ``rollout.roles``, a tuple of role and policy's turn."""


Returned = Completion | Sequence[Turn] | Sequence[Sequence[Turn]]
"""Return value of a user's function: a completion, the turns in order, or the turns of each of
several sequences."""


@dataclass(frozen=True, slots=True)
class ConversationFunction(RolloutFunction):
    """User's function of ``rollout.conversation``."""

    function: Callable[[Any, Prompt], Awaitable[Returned]]
    remedy: str
    """Remedy for an unusable return value."""

    async def run(self, client: Client) -> Completion:
        prompt = client.prompt
        # Copy the label and the extra columns, because the function may modify both.
        own = replace(
            prompt, label=copy.deepcopy(prompt.label), extra=copy.deepcopy(dict(prompt.extra))
        )
        try:
            returned = await self.function(client, own)
            return build_completion(returned, client)
        except (TryAgainError, UserError, client.failure):
            raise
        except InvalidCompletionError as error:
            raise UserError(
                self.setting, self.spec, f"for prompt {prompt.id} it {error}", self.remedy
            ) from None
        except (*FAILURES, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            # ``task.cancelling()`` is true only for a cancellation by the run. Otherwise the
            # function raised the error, or cancelled a task.
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            problem = f"raised for prompt {prompt.id}:\n{traceback.format_exc(limit=-4)}"
            raise UserError(self.setting, self.spec, problem, "Mend it") from error


def build_completion(result: Returned, client: Client) -> Completion:
    """Build a conversation's completion from the function's return value.

    Each sequence is cut off at the prompt's length plus ``client.max_tokens``.

    Raises:
        InvalidCompletionError: the completion is unusable for training.
    """
    start = client.prompt.token_ids.tolist()
    limit = client.max_tokens
    roles = client.function.roles
    if isinstance(result, Completion):
        check_ids(result.token_ids, client.function.vocabulary, "returned a completion")
        return _validate_completion(_truncate_sequence(result, len(start), limit, roles), client)
    if not isinstance(result, Sequence):
        raise InvalidCompletionError(
            f"returned a {type(result).__name__}, neither a list of turns nor a completion"
        )
    cut: list[Completion] = []
    truncated = False
    for number, turns in enumerate(_split_sequences(result)):
        # A further sequence lacks the prompt, but may have the same total length.
        before, longest = ([], len(start) + limit) if number else (start, limit)
        sequence = _build_sequence(client, turns, before, len(before) + longest)
        truncated |= len(sequence.token_ids) > longest
        if number and len(sequence.token_ids) >= longest and not sequence.loss_mask[:longest].any():
            # Drop a sequence that context fills up to the limit.
            truncated = True
        else:
            cut.append(_truncate_sequence(sequence, len(before), longest, roles))
    whole = _validate_completion(merge_sequences(cut), client)
    return replace(whole, finish_reason="length") if truncated else whole


def _validate_completion(completion: Completion, client: Client) -> Completion:
    if problem := find_sequence_error(len(client.prompt.token_ids), completion, client.max_tokens):
        raise InvalidCompletionError(problem)
    return completion


def _split_sequences(turns: Sequence[Any]) -> list[Sequence[Turn]]:
    several = [_is_sequence(each) for each in turns]
    if any(several) and not all(several):
        raise InvalidCompletionError("returned turns beside lists of turns")
    return list(turns) if any(several) else [turns]


def _is_sequence(turn: Any) -> bool:
    if not isinstance(turn, list | tuple):
        return False
    # A list without a turn of the policy is context. A leading string is the role of one turn.
    has_turns = any(isinstance(part, Completion | tuple) for part in turn)
    return has_turns and not isinstance(turn[0], str)


def _build_sequence(
    client: Client,
    turns: Sequence[Turn],
    prefix: Sequence[int],
    limit: int,
) -> Completion:
    """Build one sequence, with enough tokens past ``limit`` for the caller to detect a truncation.

    Args:
        prefix: tokens before the turns.
        limit: most tokens of the sequence, ``prefix`` included.
    """
    roles = client.function.roles
    contexts = {id(turn): context for context, turn in client.generated}
    known = f"and rollout.roles has {', '.join(map(repr, roles)) or 'none'}"
    context = [*prefix]
    parts = list[Part]()
    speakers = list[int]()
    for number, given in enumerate(turns):
        role = None
        turn = given
        if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
            role, turn = given
        past = len(context) > limit
        if isinstance(turn, Completion):
            if role not in (roles or (None,)):
                name = f"the role {role!r}" if role else "no role"
                raise InvalidCompletionError(f"returned a turn {number} of {name}, {known}")
            if id(turn) not in contexts:
                raise InvalidCompletionError(
                    f"returned as turn {number} a completion that this conversation has not "
                    "generated"
                )
            # A turn's log-probabilities are valid only after the context of its generation.
            if not past and contexts[id(turn)] != context:
                problem = (
                    f"returned a turn {number} whose context differs from the tokens before it"
                )
                raise InvalidCompletionError(problem)
        elif role is not None:
            raise InvalidCompletionError(
                f"returned a turn {number} of the role {role!r} that the policy did not generate"
            )
        elif past:
            continue
        else:
            # Keep one token past the limit, so that the caller detects the truncation.
            begin: Any = turn[: limit + 1] if isinstance(turn, Sequence | np.ndarray) else turn
            turn = check_ids(begin, client.function.vocabulary, f"returned a turn {number}")
        tokens = turn.token_ids if isinstance(turn, Completion) else turn
        parts.append(turn)
        context += tokens.tolist()
        speakers += [-1 if role is None else roles.index(role)] * len(tokens)
    whole = merge_parts(parts)
    return replace(whole, segments=np.array(speakers, np.int8)) if roles else whole


def _truncate_sequence(
    completion: Completion,
    offset: int,
    limit: int,
    roles: Sequence[str],
) -> Completion:
    """Check a sequence, and cut the sequence off at ``limit`` tokens; not if the user's function
    built a completion with several sequences.

    Args:
        offset: tokens before the sequence.
    """
    try:
        mask = as_mask(completion.loss_mask)
    except ValueError as error:
        raise InvalidCompletionError(f"returned {error}") from None
    whole = replace(
        completion,
        token_ids=np.asarray(completion.token_ids, np.int32),
        logprobs=np.asarray(completion.logprobs, np.float32),
        loss_mask=mask,
        starts=tuple(map(int, completion.starts)),
    )
    check_completion(whole, limit)
    check_roles(whole, roles)
    if len(whole.token_ids) <= limit or whole.starts:
        return whole
    return truncate_completion(whole, limit, read=offset + limit - 1)
