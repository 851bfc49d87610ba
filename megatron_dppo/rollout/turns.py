"""Turns of the policy in one completion, recorded as the engine generated the tokens.

- :meth:`Client.generate` continues token ids, and records context and turn. A recorded token keeps
  id, log-probability, version and routing of its generation: text never becomes tokens again.
- A context that begins with a recorded sequence continues the sequence. Tokens between are context,
  with loss mask False. Any other context begins a further sequence, see ``rl/sequences.py``.

Conversations (``conversation.py``) and agents (``agents/``) are clients of this record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.errors import UserError
from megatron_dppo.rl.sampling_mask import join_masks
from megatron_dppo.rl.types import Completion, Prompt, Routing
from megatron_dppo.rollout.conversation_checks import check_ids

if TYPE_CHECKING:  # torch
    from megatron_dppo.rollout.engine import Sampling

Part = Completion | Sequence[int] | NDArray[np.integer]
"""Turn of the policy, unchanged from :meth:`Client.generate`, or token ids of context."""
TurnFunction: TypeAlias = "Callable[[Client, list[int], Sampling], Awaitable[Completion]]"
"""Engine's function to generate a turn."""
RETRY_DELAY_S = 0.3
"""Seconds until an abandoned conversation, or a turn aborted by a paused server, is repeated."""
NO_VERSION = np.iinfo(np.int32).min
"""Version of context tokens before :func:`merge_parts`."""


class TryAgainError(Exception):
    """Abandonment of a conversation, for example because a tool is down. The prompt is requested
    again."""


@dataclass(frozen=True, slots=True)
class RolloutFunction(ABC):
    """Function that makes a completion of several turns: a conversation or an agent."""

    setting: str
    """Setting of the function, for error messages."""
    spec: str
    """Value of the setting."""
    roles: Sequence[str] = field(default=(), kw_only=True)
    """``rollout.roles``."""
    vocabulary: int = field(default=1 << 31, kw_only=True)
    """Exclusive upper bound of the policy's token ids."""
    tokenizer: Any = field(default=None, kw_only=True)
    """The policy's."""

    @abstractmethod
    async def run(self, client: Client) -> Completion:
        """Make one completion.

        Raises:
            TryAgainError: the function abandons the conversation.
            UserError: the function raises, or returns a value unusable for training.
            Exception: ``client.failure``.
        """

    async def close(self) -> None:  # noqa: B027
        """End the function's processes and connections."""

    def make_interference_error(self) -> UserError:
        """Return the error for a function that stopped the event loop, or cancelled the run's
        tasks."""
        problem = (
            "cancelled tasks of the run, or stopped the event loop that all conversations share"
        )
        remedy = "Cancel only the tasks that the function itself has created"
        return UserError(self.setting, self.spec, problem, remedy)


@dataclass(eq=False, slots=True)
class RecordedSequence:
    """Sequence of a completion, up to now."""

    token_ids: list[int]
    """All tokens, the prompt included."""
    parts: list[Part] = field(default_factory=list)
    """Parts after the prompt."""


@dataclass(kw_only=True, eq=False, slots=True)
class Client:
    """Client of one conversation, with the run's sampling settings."""

    turn: TurnFunction
    failure: type[Exception] = TryAgainError
    """Engine's error, raised unchanged by :meth:`RolloutFunction.run`."""
    function: RolloutFunction
    prompt: Prompt
    sampling: Sampling
    number: int
    """Index of the completion for its prompt."""
    generated: list[tuple[list[int], Completion]] = field(default_factory=list)
    """Context and result of every generated turn."""
    sequences: list[RecordedSequence] = field(init=False)
    """The first follows the prompt, and has no part if no context begins with the prompt."""

    def __post_init__(self) -> None:
        self.sequences = [RecordedSequence(self.prompt.token_ids.tolist())]

    @property
    def tokenizer(self) -> Any:
        """Hugging Face tokenizer of the policy."""
        return self.function.tokenizer

    @property
    def max_tokens(self) -> int:
        """Most tokens of the response, all turns included. A longer response is truncated."""
        return self.sampling.max_tokens

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Completion:
        """Continue ``token_ids`` with the policy, at the run's temperature.

        Args:
            token_ids: prompt and all earlier turns.
            max_tokens: most tokens of this turn; None: the rest of the response.
            stop_token_ids: further stop tokens of this turn.

        Returns:
            The turn, with the stop token; empty if the response is full.
        """
        context: list[int] = check_ids(
            token_ids, self.function.vocabulary, "requested a turn from a context"
        ).tolist()
        if not context:
            raise ValueError("The context of a turn has no token.")
        left = self.count_left(context)
        limit = left if max_tokens is None else min(left, max_tokens)
        stops = tuple(dict.fromkeys((*self.sampling.stop_token_ids, *map(int, stop_token_ids))))
        sampling = replace(self.sampling, samples=1, max_tokens=limit, stop_token_ids=stops)
        turn = await self.turn(self, context, sampling) if limit > 0 else merge_parts([])
        self._record(context, turn)
        return turn

    def count_left(self, context: Sequence[int]) -> int:
        """Return the most tokens of a turn after a context; 0 or less if a sequence is full."""
        return len(self.prompt.token_ids) + self.max_tokens - len(context)

    def find_sequence(self, context: Sequence[int]) -> RecordedSequence | None:
        """Return the longest recorded sequence with which a context begins; None: the context
        begins a further sequence."""
        continued = []
        for sequence in self.sequences:
            if context[: len(sequence.token_ids)] == sequence.token_ids:
                continued.append(sequence)
        return max(continued, key=lambda each: len(each.token_ids), default=None)

    def _record(self, context: list[int], turn: Completion) -> None:
        self.generated.append((context, turn))
        if not len(turn.token_ids):
            return
        sequence = self.find_sequence(context)
        if sequence is None:
            self.sequences.append(sequence := RecordedSequence([]))
        if given := context[len(sequence.token_ids) :]:
            sequence.parts.append(given)
        sequence.parts.append(turn)
        sequence.token_ids = [*context, *turn.token_ids.tolist()]


def merge_parts(turns: Iterable[Part]) -> Completion:
    """Merge several turns into one completion.

    - The finish reason comes from the last turn of the policy.
    - Context tokens get the version of the following turn, or of the last turn.
    - A token's routing comes from the first turn with the token in its context.
    """
    parts: list[Completion] = []
    finish_reason: Literal["stop", "length"] = "length"
    for turn in turns:
        if isinstance(turn, Completion):
            parts.append(turn)
            finish_reason = turn.finish_reason
        else:
            parts.append(_make_context_part(turn))
    offsets = accumulate((len(part.token_ids) for part in parts), initial=0)
    has_segments = any(part.segments is not None for part in parts)
    # Begin each array with an empty one of the right type, because ``parts`` may be empty.
    return Completion(
        token_ids=np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        logprobs=np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        loss_mask=np.concatenate([np.empty(0, bool), *(part.loss_mask for part in parts)]),
        versions=_fill_versions(
            np.concatenate([np.empty(0, np.int32), *(part.versions for part in parts)])
        ),
        finish_reason=finish_reason,
        routing=_merge_routing([part.routing for part in parts if part.routing is not None]),
        segments=_merge_segments(parts) if has_segments else None,
        sampling_mask=join_masks(
            [part.sampling_mask for part in parts], [len(part.token_ids) for part in parts]
        ),
        starts=tuple(
            at + start for at, part in zip(offsets, parts, strict=False) for start in part.starts
        ),
    )


def _fill_versions(versions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Replace ``NO_VERSION`` by the next known version; at the end, by the last."""
    known = np.flatnonzero(versions != NO_VERSION)
    if not len(known):
        return versions
    following = np.searchsorted(known, np.arange(len(versions)))
    return versions[known[np.minimum(following, len(known) - 1)]]


def _merge_segments(parts: Sequence[Completion]) -> NDArray[np.int8]:
    segments: list[NDArray[np.int8]] = []
    for part in parts:
        if part.segments is None:
            segments.append(np.full(len(part.token_ids), -1, np.int8))
        else:
            segments.append(part.segments)
    return np.concatenate(segments)


def _merge_routing(tables: Sequence[Routing]) -> Routing | None:
    if not tables:
        return None
    # Each table begins at the first token of the prompt: skip the tokens of earlier tables.
    read = np.maximum.accumulate([0, *map(len, tables)]).tolist()
    return np.concatenate([table[start:] for table, start in zip(tables, read, strict=False)])


def merge_sequences(sequences: Sequence[Completion]) -> Completion:
    """Merge sequences into one completion. A completion of several sequences has no routing."""
    if len(sequences) == 1:
        return sequences[0]
    starts = tuple(accumulate(len(each.token_ids) for each in sequences[:-1]))
    return replace(merge_parts(sequences), routing=None, starts=starts)


def truncate_completion(completion: Completion, length: int, read: int) -> Completion:
    """Return the first ``length`` tokens of a completion, with finish reason ``length``.

    Args:
        read: tokens with kept routing, prompt included.
    """
    mask = completion.sampling_mask
    return Completion(
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        loss_mask=completion.loss_mask[:length],
        versions=completion.versions[:length],
        finish_reason="length",
        routing=None if completion.routing is None else completion.routing[:read],
        segments=None if completion.segments is None else completion.segments[:length],
        sampling_mask=mask and mask.select(slice(length)),
    )


def _make_context_part(token_ids: Sequence[int] | NDArray[np.integer]) -> Completion:
    length = len(token_ids)
    tokens = np.array(token_ids, np.int32)
    versions = np.full(length, NO_VERSION, np.int32)
    return Completion(
        tokens, np.zeros(length, np.float32), np.zeros(length, bool), versions, "length"
    )
