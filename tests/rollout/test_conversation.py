"""A conversation's turns become one completion, of which the policy is trained on what it sampled and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.rl.sequences import sequences
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.conversation import Turn, completed, joined
from megatron_dppo.rollout.conversation_checks import UnusableError
from tests.docs.documents import blocks

PROMPT = Prompt(0, np.array([7, 8], np.int32), "", "")
STOP = 99


def turn(*tokens: int, version: int = 3) -> Completion:
    """What the policy said; it has stopped if it says so."""
    ids = np.array(tokens, np.int32)
    reason = "stop" if tokens and tokens[-1] == STOP else "length"
    return Completion(
        ids, -ids.astype(np.float32) / 100, np.ones(len(ids), bool), (VersionSpan(version, len(ids)),), reason
    )


def finished(turns: Sequence[Turn], *, limit: int = 20) -> Completion:
    """The completion of turns that were each generated after all that stands before them."""
    before, after = [7, 8], []
    for each in turns:
        if isinstance(each, Completion):
            after.append((list(before), each))
        before += list(each.token_ids if isinstance(each, Completion) else each)
    return completed(turns, PROMPT, after, limit)


def test_a_turn_of_ten_million_tokens_is_cut_off_and_foreign_ids_are_named() -> None:
    """In a moment, and wherever they stand."""
    began = time.process_time()
    endless = completed([FIRST, [5] * 10_000_000], PROMPT, SUMMED, 20)
    assert (len(endless.token_ids), endless.finish_reason) == (20, "length")
    many = completed([FIRST, *([[5]] * 1_000_000)], PROMPT, SUMMED, 20)
    assert (many.token_ids.tolist(), many.finish_reason) == (endless.token_ids.tolist(), "length")
    assert time.process_time() - began < 10.0
    for token in (9, -1, 1 << 40):
        with pytest.raises(
            UnusableError, match=f"a turn 1 with the token id {token}; the policy's vocabulary has 9 tokens"
        ):
            completed([FIRST, [5, token]], PROMPT, SUMMED, 20, vocabulary=9)
        whole = replace(completed([FIRST, [5]], PROMPT, SUMMED, 20), token_ids=np.array([5, 6, token], np.int64))
        with pytest.raises(UnusableError, match="returned a completion with the token id"):
            completed(whole, PROMPT, [], 20, vocabulary=9)


def test_what_was_generated_is_trained_on_and_what_was_told_is_read() -> None:
    completion = finished([turn(1, 2), [5, 6, 5], np.array([4]), turn(3, STOP)])
    assert completion.token_ids.tolist() == [1, 2, 5, 6, 5, 4, 3, STOP]
    assert completion.loss_mask.tolist() == [True, True, False, False, False, False, True, True]
    np.testing.assert_allclose(completion.logprobs[completion.loss_mask], [-0.01, -0.02, -0.03, -0.99])
    assert (completion.versions, completion.finish_reason) == ((VersionSpan(3, 8),), "stop")
    types = completion.token_ids.dtype, completion.logprobs.dtype, completion.loss_mask.dtype
    assert types == (np.int32, np.float32, bool)


def test_versions_cover_every_token_and_a_completion_is_as_old_as_its_first_turn() -> None:
    completion = finished([[5], turn(1, 2), [6, 6], turn(3, version=4), [5]])
    assert completion.versions == (VersionSpan(3, 3), VersionSpan(4, 4))
    assert completion.oldest_version == 3


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([turn(1), [5], turn(2)], "length"),
        ([turn(1), turn(2, STOP)], "stop"),
        ([turn(1, STOP), [5]], "stop"),
        ([turn(1, STOP), [5], joined([])], "length"),  # nothing was left of the response
    ],
)
def test_a_response_ends_as_the_last_turn_of_the_policy_did(turns: list[Turn], reason: str) -> None:
    assert finished(turns).finish_reason == reason


def test_a_response_is_cut_off_at_its_limit_and_counts_as_truncated() -> None:
    completion = finished([turn(1, STOP), [5, 6, 7], turn(2, STOP, version=4)], limit=4)
    assert completion.token_ids.tolist() == [1, STOP, 5, 6]
    assert len(completion.logprobs) == len(completion.loss_mask) == 4
    assert (completion.versions, completion.finish_reason) == ((VersionSpan(3, 2), VersionSpan(4, 2)), "length")


SAID = turn(1, 2)


@pytest.mark.parametrize(
    ("turns", "generated", "words"),
    [
        ([[5], SAID], [([7, 8], SAID)], "turn 1 that was generated after other tokens"),
        ([SAID], [([7], SAID)], "turn 0 that was generated after other tokens"),
        ([turn(1, 2)], [([7, 8], SAID)], "turn 0 a completion that this conversation has not generated"),
        ([SAID, "73"], [([7, 8], SAID)], "turn 1 that is no list of token ids"),
        ([SAID, 7], [([7, 8], SAID)], "turn 1 that is no list of token ids"),
        ([[5, 6]], [], "none of whose tokens the policy sampled"),
        ([], [], "none of whose tokens the policy sampled"),
        (None, [], "returned a NoneType"),
    ],
)
def test_turns_whose_log_probabilities_would_not_hold_are_refused(turns: Any, generated: list, words: str) -> None:
    with pytest.raises(UnusableError, match=words):
        completed(turns, PROMPT, generated, 20)


def test_a_completion_of_the_functions_own_is_taken_if_it_can_be_trained_on() -> None:
    mask = np.array([True, False])
    own = Completion(np.array([1, 2]), np.array([-1, np.nan]), mask, SAID.versions, "stop")
    taken = completed(own, PROMPT, [], 20)
    assert (taken.token_ids.tolist(), taken.loss_mask.tolist()) == ([1, 2], [True, False])
    assert (taken.token_ids.dtype, taken.logprobs.dtype) == (np.int32, np.float32), "as ranks send them to each other"
    for wrong, words in (
        ({"loss_mask": np.ones(2, bool)}, "log-probabilities that are above 0, null or not finite"),
        ({"logprobs": np.array([0.5, np.nan], np.float32)}, "log-probabilities that are above 0, null or not finite"),
        ({"loss_mask": [0.5, 1]}, "a loss_mask of other values than true and false"),
        ({"loss_mask": ["yes", "no"]}, "a loss_mask of other values than true and false"),
        ({"loss_mask": np.ones(3, bool)}, "3 of loss_mask for a response of 2 tokens"),
        ({"logprobs": np.zeros(1, np.float32)}, "1 of logprobs for a response of 2 tokens"),
        ({"versions": ()}, "versions of 0 tokens for a response of 2"),
    ):
        fields = {name: getattr(own, name) for name in Completion.__slots__} | wrong
        with pytest.raises(UnusableError, match=words):
            completed(Completion(**fields), PROMPT, [], 20)


FIRST, NEXT = turn(1, 2), turn(3, STOP, version=4)
SUMMED = [([7, 8], FIRST), ([6, 6, 6], NEXT)]
"""A turn after the prompt, and one in a context of its own."""


def test_lists_of_turns_are_sequences_each_with_a_context_of_its_own() -> None:
    whole = completed([[FIRST, [5]], [[6, 6], [6], NEXT]], PROMPT, SUMMED, 20)
    assert (whole.token_ids.tolist(), whole.starts) == ([1, 2, 5, 6, 6, 6, 3, STOP], (3,))
    assert whole.loss_mask.tolist() == [True, True, False, False, False, False, True, True]
    assert whole.versions == (VersionSpan(3, 3), VersionSpan(4, 5)) and whole.finish_reason == "stop"
    taken = completed(whole, PROMPT, [], 20)
    assert (taken.starts, taken.token_ids.tolist()) == (whole.starts, whole.token_ids.tolist())
    said_by = completed([[("a", FIRST)], [[6, 6, 6], ("b", NEXT)]], PROMPT, SUMMED, 20, ("a", "b")).segments
    assert said_by is not None and said_by.tolist() == [0, 0, -1, -1, -1, 1, 1]
    assert joined([[9], whole]).starts == (4,), "as a tree or a server that goes on joins it to what is before"
    listed = completed(replace(whole, starts=np.array([3])), PROMPT, [], 20)
    assert listed.starts == (3,)
    one = completed([[FIRST]], PROMPT, SUMMED, 20)
    assert (one.token_ids.tolist(), one.starts) == ([1, 2], ())


def test_each_sequence_is_cut_off_where_the_prompts_would_be() -> None:
    cut = completed([[FIRST, [5]], [[6, 6, 6], NEXT]], PROMPT, SUMMED, 2)
    assert (cut.token_ids.tolist(), cut.starts, cut.finish_reason) == ([1, 2, 6, 6, 6, 3], (2,), "length")
    first = completed([[FIRST, [5] * 9], [[6, 6, 6], NEXT]], PROMPT, SUMMED, 3)
    assert (first.token_ids.tolist()[-1], first.finish_reason) == (STOP, "length"), "though the last one has ended"


def test_a_context_that_leaves_the_policy_no_room_is_cut_off_whole() -> None:
    nothing = turn()
    cut = completed([[FIRST, [5]], [[6] * 30, nothing]], PROMPT, [*SUMMED, ([6] * 30, nothing)], 20)
    assert (cut.token_ids.tolist(), cut.starts, cut.finish_reason) == ([1, 2, 5], (), "length")


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([[FIRST], NEXT], "turns beside lists of turns"),
        ([[FIRST], [[6, 6], NEXT]], "turn 1 that was generated after other tokens"),
        ([[FIRST], [NEXT]], "turn 0 that was generated after other tokens"),
        ([[[6, 6, 6], NEXT], [[7, 8], FIRST]], "turn 1 that was generated after other tokens"),
        (replace(joined([FIRST, [6], NEXT]), starts=(2, 9)), "begin at"),
        (replace(joined([FIRST, [6], NEXT]), starts=(3,)), "sequence 1 that does not begin with token ids"),
        (replace(joined([FIRST, [6, 6], NEXT]), starts=(2, 3)), "sequence 1 none of whose tokens"),
        (replace(joined([FIRST, [6] * 21, NEXT]), starts=(2,)), "of 21 tokens more than the prompt's, and 20"),
    ],
)
def test_sequences_that_cannot_be_trained_on_are_refused(returned: Any, words: str) -> None:
    with pytest.raises(UnusableError, match=words):
        completed(returned, PROMPT, SUMMED, 20)


def test_each_sampled_token_has_the_role_of_its_turn() -> None:
    first, second, third = turn(1, 2), turn(3), turn(4, 5, STOP)
    generated = [([7, 8], first), ([7, 8, 1, 2, 6], second), ([7, 8, 1, 2, 6, 3], third)]
    turns = [("solver", first), [6], ("critic", second), ("solver", third)]
    whole = completed(turns, PROMPT, generated, 20, ("solver", "critic"))
    assert whole.segments is not None and whole.segments.dtype == np.int8
    assert whole.segments.tolist() == [0, 0, -1, 1, 0, 0, 0]
    again = joined([whole, [6], turn(9)])
    assert again.segments is not None and again.segments.tolist() == [*whole.segments, -1, -1]
    cut = completed(turns, PROMPT, generated, 4, ("solver", "critic"))
    assert cut.segments is not None and cut.segments.tolist() == [0, 0, -1, 1]
    taken = completed(whole, PROMPT, [], 20, ("solver", "critic"))
    assert taken.segments is not None and taken.segments.tolist() == whole.segments.tolist()
    for wrong, words in (
        (None, "without the role of each token, and rollout.roles has solver, critic"),
        (whole.segments[:-1], "not those of its sampled tokens"),
        (np.zeros(7, np.int8), "not those of its sampled tokens"),
        (np.where(whole.segments < 0, -1, 2), "of a role 2, and rollout.roles has 2"),
    ):
        with pytest.raises(UnusableError, match=words):
            completed(replace(whole, segments=wrong), PROMPT, [], 20, ("solver", "critic"))
    with pytest.raises(UnusableError, match=r"with roles, and rollout\.roles has none"):
        completed(whole, PROMPT, [], 20)


@pytest.mark.parametrize(
    ("turns", "roles", "words"),
    [
        ([SAID], ("solver",), "turn 0 of no role, and rollout.roles has 'solver'"),
        ([("judge", SAID)], ("solver", "critic"), "of the role 'judge', and rollout.roles has 'solver', 'critic'"),
        ([("solver", SAID)], (), "of the role 'solver', and rollout.roles has none"),
        ([("solver", SAID), ("solver", [5])], ("solver",), "turn 1 of the role 'solver' that the policy has not said"),
    ],
)
def test_turns_without_a_known_role_are_refused(turns: list[Turn], roles: tuple[str, ...], words: str) -> None:
    with pytest.raises(UnusableError, match=words):
        completed(turns, PROMPT, [([7, 8], SAID)], 20, roles)


def routed(turn: Completion, rows: int, number: int) -> Completion:
    return replace(turn, routing=np.full((rows, 1, 1), number, np.uint8))


def test_of_a_tokens_routing_the_first_turn_that_has_read_it_speaks() -> None:
    """The last token of a turn, and what the policy is told after it, are read by the turn that follows."""
    first, second = routed(turn(1, 2), 3, 1), routed(turn(3, 4, STOP), 8, 2)
    whole = finished([first, [5, 6], second, [9]])
    assert whole.routing is not None and whole.routing.ravel().tolist() == [1] * 3 + [2] * 5
    cut = finished([first, [5, 6], second, [9]], limit=5)
    assert cut.routing is not None and len(cut.routing) == len(PROMPT.token_ids) + 5 - 1
    assert finished([turn(1, 2), [5], turn(3)]).routing is None
    # A request that was broken off before its first token has read nothing.
    parts = joined([routed(turn(1), 2, 1), turn(), routed(turn(2), 3, 2)])
    assert parts.routing is not None and parts.routing.ravel().tolist() == [1, 1, 2]


class ScriptedClient:
    """Says one text after the other, each up to the first token that is to end it."""

    max_tokens = 30

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self._texts = tokenizer, list(texts)
        self.generated: list[tuple[list[int], Completion]] = []

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids=()
    ) -> Completion:
        said = turn(*self.tokenizer.encode(self._texts.pop(0)), STOP)
        cut = [i + 1 for i, token in enumerate(said.token_ids) if token in stop_token_ids]
        said = turn(*said.token_ids[: cut[0]]) if cut else said
        self.generated.append((list(token_ids), said))
        return said


def worked_example(title: str) -> dict[str, Any]:
    (block,) = [block for block in blocks("docs/recipes/conversation.md") if block.title == title]
    scope: dict[str, Any] = {}
    exec(block.text, scope)
    return scope


def test_the_worked_example_of_several_roles_gives_each_its_tokens_and_its_reward(tmp_path: Path) -> None:
    scope = worked_example("my_roles.py")
    write_tokenizer(character_tokenizer(), tmp_path, max_tokens=512)
    tokenizer: Any = load_tokenizer(tmp_path)
    prompt = Prompt(0, np.array(tokenizer.encode("7+8="), np.int32), "", "")
    client = ScriptedClient(tokenizer, "14", "no", "15")
    returned = asyncio.run(scope["rollout"](client, prompt))
    completion = completed(returned, prompt, client.generated, 60, ("solver", "critic"))
    sampled = [[token for token in tokens if token != STOP] for tokens in _by_role(completion)]
    assert [tokenizer.decode(tokens) for tokens in sampled] == ["1415", "no"]
    text = tokenizer.decode([token for token in completion.token_ids if token != STOP])
    assert text == "14#review no#answer 15"
    scored = [scope["compute_score"]("", text, label) for label in ("15", "14", "16")]
    assert [(each["score"], each["roles"]["critic"]) for each in scored] == [(1.0, 1.0), (0.0, -1.0), (0.0, 0.0)]


def test_the_worked_example_of_several_sequences_goes_on_from_the_summary(tmp_path: Path) -> None:
    write_tokenizer(character_tokenizer(), tmp_path, max_tokens=512)
    tokenizer: Any = load_tokenizer(tmp_path)
    prompt = Prompt(0, np.array(tokenizer.encode("7+8="), np.int32), "", "")
    client = ScriptedClient(tokenizer, "ten", "5", "15")
    returned = asyncio.run(worked_example("my_compacting_agent.py")["rollout"](client, prompt))
    completion = completed(returned, prompt, client.generated, 60)
    first, second = (completion.token_ids[of] for of in sequences(completion))
    assert tokenizer.decode(first[first != STOP]) == "ten#so 5"
    assert tokenizer.decode(second[second != STOP]) == "7+8=515"


def _by_role(completion: Completion) -> list[list[int]]:
    return [completion.token_ids[completion.segments == role].tolist() for role in (0, 1)]


def test_the_worked_example_of_the_recipe_reads_what_the_calculator_says(tmp_path: Path) -> None:
    scope = worked_example("my_agent.py")
    write_tokenizer(character_tokenizer(), tmp_path, max_tokens=512)
    tokenizer: Any = load_tokenizer(tmp_path)
    prompt = Prompt(0, np.array(tokenizer.encode("7+8+1="), np.int32), "", "")
    client = ScriptedClient(tokenizer, "7+8=x", " 15+1=x", "a=x", " #16")
    completion = completed(asyncio.run(scope["rollout"](client, prompt)), prompt, client.generated, client.max_tokens)
    ended = completion.token_ids.tolist().index(STOP)
    assert tokenizer.decode(completion.token_ids[:ended]) == "7+8=15 15+1=16a= #16"
    told = np.flatnonzero(~completion.loss_mask).tolist()
    assert told == [4, 5, 12, 13], "15 and 16; nothing is said where no sum stands before the sign"
    assert completion.finish_reason == "stop"
