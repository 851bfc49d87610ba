"""Every answer is judged by its problem's own verifier, and the most frequent answer wins, with shared ties."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.config import Config, EvalConfig, RewardConfig, RolloutConfig
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id, load_tokenizer
from megatron_dppo.evaluation.evaluator import EvalAnswers, EvalProblem, Evaluator, Pair, vote, votes
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Prompt
from megatron_dppo.trainer.assemble import PolicyParts
from tests.rollout.scripted import Said, ScriptedEngine, as_ranks

MATHEMATICS = RewardConfig()
HALF, QUARTERS = "so #1/2", ("#3/4", "#6/8", "#9/12")
SCRIPT = {
    0: [HALF, "#2/4", QUARTERS[0], QUARTERS[1]],  # two right, and two wrong that are one
    1: [HALF, *QUARTERS],  # outvoted, though no two texts are the same
    2: [HALF, "#7", "#8", "none"],
    3: ["x #1/2 y #7", "x #8 y #7", "x #7", "#1/2"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(character_tokenizer(), folder, max_tokens=512)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, RewardWorkers]]:
    found = {verifier: RewardWorkers(verifier, workers=1, timeout_s=20.0) for verifier in ("math", "exact")}
    yield found
    for each in found.values():
        each.close()


def problem(place: int, verifier: str) -> EvalProblem:
    return EvalProblem("here", place, Prompt(place, np.arange(3, dtype=np.int32), f"prompt {place}", "1/2"), verifier)


def answered(
    tokenizer: Tokenizer,
    workers: dict[str, RewardWorkers],
    verifiers: list[str],
    keep: int,
    reward: RewardConfig = MATHEMATICS,
) -> EvalAnswers:
    config = Config(eval=EvalConfig(samples=4), rollout=RolloutConfig(max_response_tokens=16), reward=reward)

    def on_a_rank(world: World) -> EvalAnswers:
        engine = ScriptedEngine(tokenizer, {i: [Said(text) for text in texts] for i, texts in SCRIPT.items()})
        parts = PolicyParts(config, world, None, None, tokenizer, 0, (end_token_id(tokenizer),))
        problems = [problem(i, verifier) for i, verifier in enumerate(verifiers)]
        return Evaluator(config, world, parts.collectors(engine, workers)).answer(
            problems, keep=keep, of_all=4 * len(problems)
        )

    (found,) = as_ranks(1, on_a_rank)
    return found


def test_answers_come_with_what_they_state_and_why_they_are_right(
    tokenizer: Tokenizer, workers: dict[str, RewardWorkers]
) -> None:
    found = answered(tokenizer, workers, ["math"] * 3, keep=2)
    first = found.answers[0]
    assert [answer.extracted for answer in first] == ["1/2", "2/4", "3/4", "6/8"]
    assert [answer.score.correct for answer in first if answer.score] == [True, True, False, False]
    assert [answer.score.by for answer in first if answer.score] == [(), ("number",), (), ()]
    assert [answer.text for answer in found.answers[1]] == [HALF, *QUARTERS]
    assert [answer.text for answer in found.answers[2]] == [None] * 4, "nobody wanted these"
    assert [answer.tokens for answer in first] == [8, 5, 5, 5]


def test_equal_wrong_answers_vote_together_where_the_verifier_can_tell(
    tokenizer: Tokenizer, workers: dict[str, RewardWorkers]
) -> None:
    by_mathematics = answered(tokenizer, workers, ["math"] * 3, keep=0)
    np.testing.assert_allclose(by_mathematics.votes, [1 / 2, 0.0, 1 / 3])
    by_text = answered(tokenizer, workers, ["exact"] * 3, keep=0)
    np.testing.assert_allclose(by_text.votes, [1 / 4, 1 / 4, 1 / 3])


@pytest.mark.parametrize("verifier", ["math", "exact"])
def test_an_answer_is_read_after_its_thoughts(tokenizer: Tokenizer, verifier: str) -> None:
    reward = RewardConfig(function=verifier, timeout_s=20.0, thinking_tags=("x", "y"))
    with closing(RewardWorkers.of(reward)) as pool:
        last = answered(tokenizer, {verifier: pool}, [verifier] * 4, keep=0, reward=reward).answers[3]
    assert [(answer.extracted, bool(answer.score and answer.score.correct)) for answer in last] == [
        ("7", False), ("7", False), ("", False), ("1/2", True)
    ]  # fmt: skip


def test_each_problem_has_its_own_verifier_and_all_stay_in_their_order(
    tokenizer: Tokenizer, workers: dict[str, RewardWorkers]
) -> None:
    found = answered(tokenizer, workers, ["exact", "math", "exact"], keep=3)
    rights = [[bool(answer.score and answer.score.correct) for answer in group] for group in found.answers]
    assert rights == [[True, False, False, False]] + [[True, False, False, False]] * 2
    assert [group[1].text for group in found.answers] == ["#2/4", QUARTERS[0], "#7"]


@given(st.integers(0, 5), st.lists(st.sampled_from("abc"), max_size=8))
def test_a_vote_is_what_drawing_among_the_most_frequent_gives_on_average(right: int, wrong: list[str]) -> None:
    counts = Counter({"RIGHT": right, **Counter(wrong)})
    most = max(counts.values())
    leaders = [answer for answer, count in counts.items() if count == most]
    expected = leaders.count("RIGHT") / len(leaders) if right else 0.0
    assert vote(right, wrong) == pytest.approx(expected)


def test_who_states_nothing_has_no_vote() -> None:
    assert vote(1, ["", "", ""]) == 1.0
    assert vote(0, ["", ""]) == 0.0


def test_wrong_answers_that_the_verifier_takes_for_one_another_vote_together() -> None:
    assert vote(2, ["1/2", "0.5", "3"]) == 1.0
    assert vote(2, ["1/2", "0.5", "3"], {("1/2", "0.5")}) == 0.5
    assert vote(2, ["1/2", "0.5", "0.5"], {("1/2", "0.5")}) == 0.0


def numbers(pairs: Sequence[Pair]) -> list[bool]:
    return [float(one) == float(other) for one, other in pairs]


def test_the_verifier_is_asked_once_and_only_where_its_word_matters() -> None:
    asked: list[Sequence[Pair]] = []

    def same(pairs: Sequence[Pair]) -> list[bool]:
        asked.append(pairs)
        return numbers(pairs)

    problems = [
        (0, ["1", "1.0", "2"]),  # none is right
        (5, ["1", "1.0", "2"]),  # all the others together are fewer
        (1, ["1", "1", "2"]),  # outvoted already
        (2, ["1", "1.0", "2"]),
        (2, ["2", "1", "1.0", "1.00"]),
    ]
    assert votes(problems, same) == [0.0, 1.0, 0.0, 0.5, 0.0]
    (pairs,) = asked
    assert len(pairs) == 3 + 6


def test_what_is_not_asked_changes_no_vote() -> None:
    draw = random.Random(3)
    for _ in range(300):
        right = draw.randint(0, 4)
        wrong = [draw.choice(["1", "1.0", "1.00", "2", "2.0", ""]) for _ in range(draw.randint(0, 7))]
        by_value = [str(float(text)) if text else "" for text in wrong]
        assert votes([(right, wrong)], numbers) == [vote(right, by_value)]
