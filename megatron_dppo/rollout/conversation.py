"""Conversations: completions in several turns, with tools or an environment between the turns.

``rollout.conversation`` names a coroutine function (or is ``verifiers``: see
``conversation_functions.py``). It is called once for each completion:

    async def rollout(client: Client, prompt: Prompt) -> list[Turn]:
        tokens = prompt.token_ids.tolist()
        question = await client.generate(tokens)
        told = client.tokenizer.encode(await my_tool(question))
        answer = await client.generate([*tokens, *question.token_ids, *told])
        return [question, told, answer]

The completion is the three turns in a row. Its loss mask is True on the question and the answer,
which the policy sampled, and False on what it was told.

A conversation of several sequences, as of an agent that compacts its context, is a list of such
lists. All turns of the first come after the prompt. A further one begins with the token ids of its
own context: ``[[question, told, answer], [summary, next_answer]]``. See ``rl/sequences.py``.

With ``rollout.roles`` the policy speaks in several roles, each with a reward of its own, and every
turn of its says in which: ``[("solver", attempt), told, ("critic", review)]``. See
``rl/objectives.py``.
"""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.errors import UserError
from megatron_dppo.plugins import FAILURES
from megatron_dppo.rl.numbers import as_mask
from megatron_dppo.rl.sequences import find_sequence_error
from megatron_dppo.rl.types import Completion, Prompt, Routing
from megatron_dppo.rollout.conversation_checks import (
    InvalidCompletionError,
    check_completion,
    check_ids,
    check_roles,
)

if TYPE_CHECKING:  # torch
    from megatron_dppo.rollout.engine import Sampling

Part = Completion | Sequence[int] | NDArray[np.integer]
"""The policy's turn, as :meth:`Client.generate` returned it; or token ids that it was given to
read."""
Turn = Part | tuple[str, Completion]
"""With ``rollout.roles`` what the policy said stands behind its role."""


Returned = Completion | Sequence[Turn] | Sequence[Sequence[Turn]]
"""By a function of the user's: the turns in their order, those of each sequence in a list of their
own where there are several, or a completion that it has put together itself."""


TurnFunction: TypeAlias = "Callable[[Client, list[int], Sampling], Awaitable[Completion]]"
"""An engine's continuation of a client's context."""
RETRY_DELAY_S = 0.3
"""Seconds until a conversation that was given up, or a turn that a paused server aborted, is
requested again."""


class TryAgainError(Exception):
    """Raised by a conversation that came to nothing, for example because a tool is down: its prompt
    is asked again."""


@dataclass(kw_only=True, eq=False, slots=True)
class Client:
    """Client of one conversation, with the run's sampling."""

    turn: TurnFunction
    """The engine's."""
    failure: type[Exception] = TryAgainError
    """The engine's error, which :meth:`ConversationFunction.run` raises unchanged."""
    function: ConversationFunction
    """The function that has the conversation."""
    prompt: Prompt
    sampling: Sampling
    number: int
    """Index of the completion for its prompt."""
    generated: list[tuple[list[int], Completion]] = field(default_factory=list)
    """Every turn, after the token ids that it was generated from."""

    @property
    def tokenizer(self) -> Any:
        """Hugging Face's, of the policy."""
        return self.function.tokenizer

    @property
    def max_tokens(self) -> int:
        """Limit of the response, with all its turns. A longer response is cut off, and counts as
        truncated."""
        return self.sampling.max_tokens

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Completion:
        """Have the policy go on from ``token_ids``, at the run's temperature.

        Args:
            token_ids: the prompt's, and those of all turns so far.
            max_tokens: of this turn; None: as many as are left of the response.
            stop_token_ids: tokens that end this turn, besides those that end a response.

        Returns:
            The turn, with the token that ended it. It has no tokens where none are left of the
            response.
        """
        context: list[int] = check_ids(
            token_ids, self.function.vocabulary, "went on from a context"
        ).tolist()
        if not context:
            raise ValueError("There is no token to go on from.")
        left = len(self.prompt.token_ids) + self.max_tokens - len(context)
        limit = left if max_tokens is None else min(left, max_tokens)
        stops = tuple(dict.fromkeys((*self.sampling.stop_token_ids, *map(int, stop_token_ids))))
        sampling = replace(self.sampling, samples=1, max_tokens=limit, stop_token_ids=stops)
        turn = await self.turn(self, context, sampling) if limit > 0 else merge_parts([])
        self.generated.append((context, turn))
        return turn


@dataclass(frozen=True, slots=True)
class ConversationFunction:
    """A user's function, by the setting that names it."""

    setting: str
    spec: str
    """The setting's value."""
    function: Callable[[Any, Prompt], Awaitable[Returned]]
    remedy: str
    """Remedy for a return value that cannot be trained on."""
    roles: Sequence[str] = ()
    """``rollout.roles``."""
    vocabulary: int = 1 << 31
    """Token ids of the policy are below it."""
    tokenizer: Any = None
    """The policy's tokenizer."""

    async def run(self, client: Client) -> Completion:
        """Have one conversation. The function may write on the prompt's label and extra columns:
        they are copies.

        Raises:
            TryAgainError: the function gave it up.
            UserError: the function raised, or returned what cannot be trained on.
            Exception: ``client.failure``.
        """
        prompt = client.prompt
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
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run cancelled the conversation
            problem = f"raised for prompt {prompt.id}:\n{traceback.format_exc(limit=-4)}"
            raise UserError(self.setting, self.spec, problem, "Mend it") from error

    def make_interference_error(self) -> UserError:
        """Return the error for a function that cancelled others' tasks, or stopped the event
        loop."""
        problem = (
            "cancelled tasks of the run, or stopped the event loop that all conversations share"
        )
        return UserError(
            self.setting,
            self.spec,
            problem,
            "Cancel the tasks that it has made itself, and no others",
        )


NO_VERSION = np.iinfo(np.int32).min
"""Version of a token that no weights have made."""


def merge_parts(turns: Iterable[Part]) -> Completion:
    """One completion of several turns. It ends as the last of the policy's turns did.

    Tokens that the policy was given count as the version of the turn after them, or of the last
    turn. A token's routing is that of the first turn that has read it.
    """
    parts: list[Completion] = []
    finish_reason: Literal["stop", "length"] = "length"
    for turn in turns:
        if isinstance(turn, Completion):
            parts.append(turn)
            finish_reason = turn.finish_reason
        else:
            parts.append(_make_context_part(turn))
    befores = accumulate((len(part.token_ids) for part in parts), initial=0)
    return Completion(
        token_ids=np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        loss_mask=np.concatenate([np.empty(0, bool), *(part.loss_mask for part in parts)]),
        versions=_fill_versions(
            np.concatenate([np.empty(0, np.int32), *(part.versions for part in parts)])
        ),
        finish_reason=finish_reason,
        routing=_merge_routing([part.routing for part in parts if part.routing is not None]),
        segments=_merge_segments(parts)
        if any(part.segments is not None for part in parts)
        else None,
        starts=tuple(
            at + start for at, part in zip(befores, parts, strict=False) for start in part.starts
        ),
    )


def _fill_versions(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Those of given tokens, ``ASSIGNMENT``, replaced by the next one that is known, or by the
    last."""
    known = np.flatnonzero(versions != NO_VERSION)
    if not len(known):
        return versions
    following = np.searchsorted(known, np.arange(len(versions)))
    return versions[known[np.minimum(following, len(known) - 1)]]


def _merge_segments(parts: Sequence[Completion]) -> NDArray[np.int8]:
    return np.concatenate(
        [
            np.full(len(p.token_ids), -1, np.int8) if p.segments is None else p.segments
            for p in parts
        ]
    )


def _merge_routing(tables: Sequence[Routing]) -> Routing | None:
    """Each turn's begins with the first token of the prompt; what earlier turns have read is left
    out of later ones."""
    if not tables:
        return None
    read = np.maximum.accumulate([0, *map(len, tables)]).tolist()
    return np.concatenate([table[start:] for table, start in zip(tables, read, strict=False)])


def truncate_completion(completion: Completion, length: int, read: int) -> Completion:
    """The first ``length`` tokens of a completion, as one that was cut off there.

    Args:
        completion: that is longer.
        length: of what is left of it.
        read: of how many tokens, the prompt's included, the routing is kept.
    """
    return Completion(
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        loss_mask=completion.loss_mask[:length],
        versions=completion.versions[:length],
        finish_reason="length",
        routing=None if completion.routing is None else completion.routing[:read],
        segments=None if completion.segments is None else completion.segments[:length],
    )


def build_completion(result: Returned, client: Client) -> Completion:
    """Return the completion of a conversation from what its function returned.

    Each sequence is cut off at ``client.max_tokens`` tokens more than the prompt's.

    Raises:
        UnusableError: the completion cannot be trained on.
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
        before, longest = ([], len(start) + limit) if number else (start, limit)
        sequence = _build_sequence(client, turns, before, len(before) + longest)
        truncated |= len(sequence.token_ids) > longest
        if number and len(sequence.token_ids) >= longest and not sequence.loss_mask[:longest].any():
            truncated = True  # its context has left the policy no room
        else:
            cut.append(_truncate_sequence(sequence, len(before), longest, roles))
    whole = cut[0]
    if len(cut) > 1:
        starts = tuple(accumulate(len(each.token_ids) for each in cut[:-1]))
        whole = _validate_completion(replace(merge_parts(cut), routing=None, starts=starts), client)
    return replace(whole, finish_reason="length") if truncated else whole


def _validate_completion(completion: Completion, client: Client) -> Completion:
    if problem := find_sequence_error(len(client.prompt.token_ids), completion, client.max_tokens):
        raise InvalidCompletionError(problem)
    return completion


def _split_sequences(turns: Sequence[Any]) -> list[Sequence[Turn]]:
    """The turns of each sequence: a list among the turns that holds what the policy said is one."""
    several = [
        isinstance(each, list | tuple)
        and any(isinstance(part, Completion | tuple) for part in each)
        and not isinstance(each[0], str)
        for each in turns
    ]
    if any(several) and not all(several):
        raise InvalidCompletionError("returned turns beside lists of turns")
    return list(turns) if any(several) else [turns]


def _build_sequence(
    client: Client, turns: Sequence[Turn], prefix: Sequence[int], limit: int
) -> Completion:
    """One sequence, without most of what the policy was given past ``limit`` tokens, which is cut
    off.

    The log-probabilities of a turn hold after the tokens that it was generated from, and after no
    others.

    Args:
        prefix: tokens before its turns.
        limit: tokens that it may have, with those.
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
                said_as = f"the role {role!r}" if role else "no role"
                raise InvalidCompletionError(f"returned a turn {number} of {said_as}, {known}")
            if id(turn) not in contexts:
                raise InvalidCompletionError(
                    f"returned as turn {number} a completion that this conversation has not "
                    "generated"
                )
            if not past and contexts[id(turn)] != context:
                problem = (
                    f"returned a turn {number} that was generated after other tokens than "
                    "stand before it"
                )
                raise InvalidCompletionError(problem)
        elif role is not None:
            raise InvalidCompletionError(
                f"returned a turn {number} of the role {role!r} that the policy has not said"
            )
        elif past:
            continue
        else:
            begin: Any = turn[: limit + 1] if isinstance(turn, Sequence | np.ndarray) else turn
            turn = check_ids(begin, client.function.vocabulary, f"returned a turn {number}")
        tokens = turn.token_ids if isinstance(turn, Completion) else turn
        parts.append(turn)
        context += tokens.tolist()
        speakers += [-1 if role is None else roles.index(role)] * len(tokens)
    whole = merge_parts(parts)
    return replace(whole, segments=np.array(speakers, np.int8)) if roles else whole


def _truncate_sequence(
    completion: Completion, offset: int, limit: int, roles: Sequence[str]
) -> Completion:
    """A sequence that comes after so many tokens, checked; one put together by the function may be
    several."""
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


def _make_context_part(token_ids: Sequence[int] | NDArray[np.integer]) -> Completion:
    """Tokens that the policy reads, as a part of a completion."""
    length = len(token_ids)
    tokens = np.array(token_ids, np.int32)
    versions = np.full(length, NO_VERSION, np.int32)
    return Completion(
        tokens, np.zeros(length, np.float32), np.zeros(length, bool), versions, "length"
    )
