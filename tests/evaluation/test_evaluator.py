"""Every answer is judged by its problem's own verifier, and votes count what that verifier takes for the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.config import Config, EvalConfig, RolloutConfig
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id, load_tokenizer
from megatron_dppo.data.vocabulary import character_tokenizer, write_tokenizer
from megatron_dppo.evaluation.evaluator import Answered, Evaluator, Problem
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Prompt
from megatron_dppo.trainer.assemble import PolicyParts
from tests.rollout.scripted import Said, ScriptedEngine, as_ranks

HALF, QUARTERS = "so #1/2", ("#3/4", "#6/8", "#9/12")
SCRIPT = {
    0: [HALF, "#2/4", QUARTERS[0], QUARTERS[1]],  # two right, and two wrong that are one
    1: [HALF, *QUARTERS],  # outvoted, though no two texts are the same
    2: [HALF, "#7", "#8", "none"],
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


def problem(place: int, verifier: str) -> Problem:
    return Problem("here", place, Prompt(place, np.arange(3, dtype=np.int32), f"prompt {place}", "1/2"), verifier)


def answered(tokenizer: Tokenizer, workers: dict[str, RewardWorkers], verifiers: list[str], keep: int) -> Answered:
    config = Config(eval=EvalConfig(samples=4), rollout=RolloutConfig(max_response_tokens=16))

    def on_a_rank(world: World) -> Answered:
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


def test_each_problem_has_its_own_verifier_and_all_stay_in_their_order(
    tokenizer: Tokenizer, workers: dict[str, RewardWorkers]
) -> None:
    found = answered(tokenizer, workers, ["exact", "math", "exact"], keep=3)
    rights = [[bool(answer.score and answer.score.correct) for answer in group] for group in found.answers]
    assert rights == [[True, False, False, False]] + [[True, False, False, False]] * 2
    assert [group[1].text for group in found.answers] == ["#2/4", QUARTERS[0], "#7"]
