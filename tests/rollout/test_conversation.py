"""A conversation's turns become one completion, of which the policy is trained on sampled tokens
and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_dppo.rl.sampling_mask import SamplingMask
from megatron_dppo.rl.sequences import split_sequences
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout import conversation
from megatron_dppo.rollout.conversation import Client, ConversationFunction, Turn, merge_parts
from megatron_dppo.rollout.conversation_checks import InvalidCompletionError
from megatron_dppo.rollout.engine import Sampling
from tests.docs.documents import blocks

PROMPT = Prompt(0, np.array([7, 8], np.int32), "", "")
STOP = 99
TWO = ("solver", "critic")


def turn(*tokens: int, version: int = 3) -> Completion:
    """Return a turn of the policy, finished if its last token is a stop token."""
    ids = np.array(tokens, np.int32)
    reason = "stop" if tokens and tokens[-1] == STOP else "length"
    versions = np.full(len(ids), version, np.int32)
    return Completion(ids, -ids.astype(np.float32) / 100, np.ones(len(ids), bool), versions, reason)


def completed(
    returned: Any,
    prompt: Prompt,
    generated: list[tuple[list[int], Completion]],
    limit: int,
    roles: Sequence[str] = (),
    vocabulary: int = 200,
) -> Completion:
    """Return the completion of a conversation whose client generated these turns, each after its
    context."""
    function: Any = ConversationFunction(
        "rollout.conversation",
        "f.py:f",
        None,
        "Mend",
        roles=roles,
        vocabulary=vocabulary,
    )
    sampling, turn = Sampling(1, limit, 1.0, (), seed=0), None
    client: Any = Client(
        turn=turn,
        function=function,
        prompt=prompt,
        sampling=sampling,
        number=0,
        generated=generated,
    )
    return conversation.build_completion(returned, client)


def finished(turns: Sequence[Turn], *, limit: int = 20, roles: Sequence[str] = ()) -> Completion:
    """Return the completion of turns that were each generated after all tokens before them."""
    before, after = [7, 8], []
    for each in turns:
        each = each[1] if isinstance(each, tuple) else each
        if isinstance(each, Completion):
            after.append((list(before), each))
        before += list(each.token_ids if isinstance(each, Completion) else each)
    return completed(turns, PROMPT, after, limit, roles)


SAID = turn(1, 2)
FIRST, NEXT = turn(1, 2), turn(3, STOP, version=4)
SUMMED = [([7, 8], FIRST), ([6, 6, 6], NEXT)]
"""A turn after the prompt, and one in a context of its own."""


@pytest.mark.parametrize("turns", [[FIRST, [5] * 10_000_000], [FIRST, *([[5]] * 1_000_000)]])
def test_endless_turns_are_cut_off(turns: list[Turn]) -> None:
    endless = completed(turns, PROMPT, SUMMED, 20)
    assert (endless.token_ids.tolist(), endless.finish_reason) == ([1, 2] + [5] * 18, "length")


def test_sampled_tokens_are_trained_on_and_given_tokens_are_read() -> None:
    completion = finished([[5], turn(1, 2), [6, 5], np.array([4]), turn(3, STOP)])
    assert completion.token_ids.tolist() == [5, 1, 2, 6, 5, 4, 3, STOP]
    assert completion.loss_mask.tolist() == [False, True, True, False, False, False, True, True]
    np.testing.assert_allclose(
        completion.logprobs[completion.loss_mask], [-0.01, -0.02, -0.03, -0.99]
    )
    assert (completion.versions.tolist(), completion.finish_reason) == ([3] * 8, "stop")


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([turn(1), [5], turn(2)], "length"),
        ([turn(1), turn(2, STOP)], "stop"),
        ([turn(1, STOP), [5]], "stop"),
        ([turn(1, STOP), [5], merge_parts([])], "length"),  # nothing was left of the response
    ],
)
def test_response_ends_as_the_last_turn_of_the_policy(turns: list[Turn], reason: str) -> None:
    assert finished(turns).finish_reason == reason


def test_response_past_its_limit_is_cut_off() -> None:
    completion = finished([turn(1, STOP), [5, 6, 7], turn(2, STOP, version=4)], limit=4)
    assert completion.token_ids.tolist() == [1, STOP, 5, 6]
    assert len(completion.logprobs) == len(completion.loss_mask) == 4
    assert (completion.versions.tolist(), completion.finish_reason) == ([3, 3, 4, 4], "length")


ONCE = [([7, 8], SAID)]
OWN = Completion(
    np.array([1, 2]), np.array([-1, np.nan]), np.array([True, False]), SAID.versions, "stop"
)
"""A completion that a function put together by itself."""
IN_ROLES = replace(OWN, segments=np.array([0, -1], np.int8))


@pytest.mark.parametrize(
    ("returned", "generated", "words"),
    [
        ([[5], SAID], ONCE, "turn 1 whose context differs"),
        ([turn(1, 2)], ONCE, "turn 0 a completion that this conversation has not generated"),
        ([SAID, "73"], ONCE, "turn 1 that is no list of token ids"),
        (
            [SAID, [5, 150]],
            ONCE,
            "a turn 1 with the token id 150; the policy's vocabulary has 100 tokens",
        ),
        (
            replace(OWN, token_ids=np.array([5, 150])),
            [],
            "returned a completion with the token id 150",
        ),
        ([[5, 6]], [], "none of whose tokens the policy sampled"),
        (None, [], "returned a NoneType"),
        (
            replace(OWN, loss_mask=np.ones(2, bool)),
            [],
            "log-probabilities that are above 0, null or not finite",
        ),
        (replace(OWN, loss_mask=np.ones(3, bool)), [], "3 of loss_mask for a response of 2 tokens"),
        (replace(OWN, versions=()), [], "versions of 0 tokens for a response of 2"),
        ([[FIRST], NEXT], SUMMED, "turns beside lists of turns"),
        (
            [[[6, 6, 6], NEXT], [[7, 8], FIRST]],
            SUMMED,
            "turn 1 whose context differs",
        ),
        (replace(merge_parts([FIRST, [6], NEXT]), starts=(2, 9)), SUMMED, "begin at"),
        (
            replace(merge_parts([FIRST, [6] * 21, NEXT]), starts=(2,)),
            SUMMED,
            "a sequence 21 tokens longer than the prompt, and the limit is 20",
        ),
        ([("solver", SAID)], ONCE, "of the role 'solver', and rollout.roles has none"),
        (IN_ROLES, [], r"with roles, and rollout\.roles has none"),
    ],
)
def test_untrainable_results_are_refused(returned: Any, generated: list, words: str) -> None:
    with pytest.raises(InvalidCompletionError, match=words):
        completed(returned, PROMPT, generated, 20, vocabulary=100)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([SAID], "turn 0 of no role, and rollout.roles has 'solver', 'critic'"),
        ([("judge", SAID)], "of the role 'judge', and rollout.roles has 'solver', 'critic'"),
        (
            [("solver", SAID), ("solver", [5])],
            "turn 1 of the role 'solver' that the policy did not generate",
        ),
        (replace(OWN, segments=np.zeros(2, np.int8)), "not those of its sampled tokens"),
        (replace(OWN, segments=np.array([2, -1], np.int8)), "of a role 2, and rollout.roles has 2"),
    ],
)
def test_unknown_roles_are_refused(returned: Any, words: str) -> None:
    with pytest.raises(InvalidCompletionError, match=words):
        completed(returned, PROMPT, ONCE, 20, TWO)


def test_own_completion_of_a_function_is_taken() -> None:
    taken = completed(OWN, PROMPT, [], 20)
    assert (taken.token_ids.tolist(), taken.loss_mask.tolist()) == ([1, 2], [True, False])
    assert (taken.token_ids.dtype, taken.logprobs.dtype) == (np.int32, np.float32), (
        "as ranks exchange them"
    )


def test_lists_of_turns_are_sequences_with_a_context_of_their_own() -> None:
    whole = completed([[FIRST, [5]], [[6, 6], [6], NEXT]], PROMPT, SUMMED, 20)
    assert (whole.token_ids.tolist(), whole.starts) == ([1, 2, 5, 6, 6, 6, 3, STOP], (3,))
    assert whole.loss_mask.tolist() == [True, True, False, False, False, False, True, True]
    assert whole.versions.tolist() == [3] * 3 + [4] * 5 and whole.finish_reason == "stop"
    taken = completed(replace(whole, starts=np.array([3])), PROMPT, [], 20)
    assert (taken.starts, taken.token_ids.tolist()) == ((3,), whole.token_ids.tolist())
    said_by = completed(
        [[("a", FIRST)], [[6, 6, 6], ("b", NEXT)]], PROMPT, SUMMED, 20, ("a", "b")
    ).segments
    assert said_by is not None and said_by.tolist() == [0, 0, -1, -1, -1, 1, 1]
    assert merge_parts([[9], whole]).starts == (4,), (
        "as trees and resumed rollouts join completions"
    )


def test_sequences_past_their_limit_are_cut_off() -> None:
    nothing = turn()
    for turns, limit, tokens, starts in (
        ([[FIRST, [5]], [[6, 6, 6], NEXT]], 2, [1, 2, 6, 6, 6, 3], (2,)),
        # The first sequence is cut off, though the last has ended.
        ([[FIRST, [5] * 9], [[6, 6, 6], NEXT]], 3, [1, 2, 5, 6, 6, 6, 3, STOP], (3,)),
        # A context that leaves the policy no room is cut off whole.
        ([[FIRST, [5]], [[6] * 30, nothing]], 20, [1, 2, 5], ()),
    ):
        cut = completed(turns, PROMPT, [*SUMMED, ([6] * 30, nothing)], limit)
        assert (cut.token_ids.tolist(), cut.starts, cut.finish_reason) == (tokens, starts, "length")


def test_sampled_tokens_have_the_role_of_their_turn() -> None:
    turns = [("solver", turn(1, 2)), [6], ("critic", turn(3)), ("solver", turn(4, 5, STOP))]
    whole = finished(turns, roles=TWO)
    assert whole.segments is not None and whole.segments.dtype == np.int8
    assert whole.segments.tolist() == [0, 0, -1, 1, 0, 0, 0]
    for again, expected in (
        (merge_parts([whole, [6], turn(9)]), [*whole.segments, -1, -1]),
        (finished(turns, limit=4, roles=TWO), [0, 0, -1, 1]),
        (completed(whole, PROMPT, [], 20, TWO), whole.segments.tolist()),
    ):
        assert again.segments is not None and again.segments.tolist() == expected


def routed(turn: Completion, rows: int, number: int) -> Completion:
    return replace(turn, routing=np.full((rows, 1, 1), number, np.uint8))


def test_routing_of_a_token_is_that_of_its_first_reader() -> None:
    """The last token of a turn, and the given tokens after it, are read by the turn that
    follows."""
    turns = [routed(turn(1, 2), 3, 1), [5, 6], routed(turn(3, 4, STOP), 8, 2), [9]]
    for completion, expected in (
        (finished(turns), [1] * 3 + [2] * 5),
        (finished(turns, limit=5), [1] * 3 + [2] * 3),
        # A request that was broken off before its first token has read nothing.
        (merge_parts([routed(turn(1), 2, 1), turn(), routed(turn(2), 3, 2)]), [1, 1, 2]),
    ):
        assert completion.routing is not None and completion.routing.ravel().tolist() == expected
    assert finished([turn(1, 2), [5], turn(3)]).routing is None


def masked(turn: Completion, *kept: list[int]) -> Completion:
    return replace(turn, sampling_mask=SamplingMask.from_lists(kept))


@pytest.mark.parametrize(
    ("limit", "counts"), [(30, [2, 1, 0, 0, 1, 3, 1, 0]), (6, [2, 1, 0, 0, 1, 3])]
)
def test_kept_ids_stay_with_their_token(limit: int, counts: list[int]) -> None:
    """Through turns, contexts and the limit."""
    turns = [masked(turn(1, 2), [1, 9], [2]), [5, 6]]
    turns += [masked(turn(3, 4, STOP), [3], [8, 4, 1], [STOP]), [9]]
    mask = finished(turns, limit=limit).sampling_mask
    assert mask is not None and mask.counts.tolist() == counts
    assert mask.token_ids.tolist() == [1, 9, 2, 3, 8, 4, 1, STOP][: sum(counts)]
    assert finished([turn(1, 2), [5], turn(3)]).sampling_mask is None


class ScriptedClient:
    """Returns one text after the other, each up to the first token that is to end it."""

    max_tokens = 30

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self._texts = tokenizer, list(texts)
        self.generated: list[tuple[list[int], Completion]] = []

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> Completion:
        tokens = [*self.tokenizer.encode(self._texts.pop(0)), STOP]
        cut = next(
            (i + 1 for i, token in enumerate(tokens) if token in stop_token_ids), len(tokens)
        )
        said = turn(*tokens[:cut])
        self.generated.append((list(token_ids), said))
        return said


@pytest.mark.parametrize(
    ("title", "question", "texts", "roles", "expected"),
    [
        ("my_roles.py", "7+8=", ["14", "no", "15"], TWO, ["14#review no#answer 15"]),
        ("my_compacting_agent.py", "7+8=", ["ten", "5", "15"], (), ["ten#so 5", "7+8=515"]),
        (
            "my_agent.py",
            "7+8+1=",
            ["7+8=x", " 15+1=x", "a=x", " #16"],
            (),
            ["7+8=15 15+1=16a= #16"],
        ),
    ],
)
def test_worked_examples_have_their_conversation(
    title: str,
    question: str,
    texts: list[str],
    roles: Sequence[str],
    expected: list[str],
    tokenizer: Any,
) -> None:
    (block,) = [block for block in blocks("docs/recipes/conversation.md") if block.title == title]
    scope: dict[str, Any] = {}
    exec(block.text, scope)
    prompt = Prompt(0, np.array(tokenizer.encode(question), np.int32), "", "")
    client = ScriptedClient(tokenizer, *texts)
    completion = completed(
        asyncio.run(scope["rollout"](client, prompt)), prompt, client.generated, 60, roles
    )
    tokens = [completion.token_ids[of] for of in split_sequences(completion)]
    assert [tokenizer.decode(each[each != STOP]) for each in tokens] == expected
