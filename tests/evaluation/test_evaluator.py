"""Accuracy is that of scored answers, every problem has its own verifier, and the most frequent
answer wins."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.config import Config
from megatron_dppo.data.tokenizer import Tokenizer, end_token_id
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.evaluator import (
    Answer,
    EvalAnswers,
    EvalProblem,
    EvalScores,
    Evaluator,
    ExampleAnswer,
    compute_majority_vote,
    evaluate,
)
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.score import Score
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.scoring import check_failures
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts
from megatron_dppo.trainer.run_logger import read_answers, record_answers
from tests.rollout.scripted import (
    FAILING,
    LIMIT_TOKENS,
    Said,
    ScriptedEngine,
    ScriptedWorkers,
    as_ranks,
    collect_config,
    pool_of,
    world_of,
)

Answers = Sequence[str | Sequence[Said]]
"""Of each prompt in its order. Texts tell the reward function what to do."""


def build_evaluator(
    tokenizer: Tokenizer,
    answers: Answers,
    world: World,
    config: Config,
    verifiers: Mapping[str, object],
) -> tuple[Evaluator, ScriptedEngine]:
    script = {i: [Said(said)] if isinstance(said, str) else said for i, said in enumerate(answers)}
    engine = ScriptedEngine(tokenizer, script)
    parts = PolicyParts(config, world, None, None, tokenizer, 0, (end_token_id(tokenizer),))
    return Evaluator(config, world, parts.build_collectors(engine, verifiers)), engine


def evaluate_answers(
    tokenizer: Tokenizer,
    answers: Answers,
    *overrides: str,
    max_failures: float = 1.0,
    ranks: int = 1,
    files: Mapping[str, Sequence[Prompt]] | None = None,
    workers: object = None,
) -> list[tuple[EvalScores, ScriptedEngine]]:
    """Return the scores and the engine of every rank."""
    config = collect_config(*overrides, max_failures=max_failures)
    named = files or {"": pool_of(len(answers))}
    problems = [
        EvalProblem(name, i, prompt, FAILING)
        for name, of in named.items()
        for i, prompt in enumerate(of)
    ]

    def evaluate_on_a_rank(world: World) -> tuple[EvalScores, ScriptedEngine]:
        evaluator, engine = build_evaluator(
            tokenizer, answers, world, config, {FAILING: workers or ScriptedWorkers()}
        )
        return evaluate(evaluator, problems, config), engine

    return as_ranks(ranks, evaluate_on_a_rank)


def score_answers(
    tokenizer: Tokenizer, answers: Answers, *overrides: str, **more: object
) -> EvalScores:
    return evaluate_answers(tokenizer, answers, *overrides, **more)[0][0]


@pytest.mark.parametrize(
    ("answers", "metrics"),
    [
        (
            ["score 1", "raise it", "score 0", "score 2", "raise it  ", "score 1e-1"],
            {
                "accuracy": 2 / 4,
                "reward": 3.1 / 4,
                "unscored": 2.0,
                "response_len/mean": (8 + 9 + 8 + 8 + 11 + 11) / 6,
            },
        ),
        (["raise it"] * 3, {"unscored": 3.0, "response_len/mean": 9.0}),
        (
            ["score 0"] * 3,
            {"accuracy": 0.0, "reward": 0.0, "unscored": 0.0, "response_len/mean": 8.0},
        ),
    ],
)
def test_accuracy_and_reward_are_means_of_scored_answers(
    tokenizer: Tokenizer, answers: Answers, metrics: dict[str, float]
) -> None:
    expected = {f"eval/{name}": pytest.approx(value) for name, value in metrics.items()}
    assert score_answers(tokenizer, answers).metrics == expected


def test_several_data_sources_have_their_own_accuracies(tokenizer: Tokenizer) -> None:
    answers = ["score 1", "raise it", "score 0", "score 2", "score 0", "raise it too"]
    sources = ["x", "x", "y/z", "x", "x", "w"]
    pool = [
        dataclasses.replace(p, data_source=of) for p, of in zip(pool_of(6), sources, strict=True)
    ]
    metrics = score_answers(tokenizer, answers, files={"a": pool[:3], "b": pool[3:]}).metrics
    found = {name: value for name, value in metrics.items() if name.startswith("eval/source/")}
    assert found == {"eval/source/x": 2 / 3, "eval/source/y/z": 0.0}


def test_too_many_failures_of_all_ranks_stop_an_evaluation(tokenizer: Tokenizer) -> None:
    """A quarter of eight may fail; both failures are among the four answers of rank 0."""
    answers = ["raise first" if i in (0, 2) else "score 1" for i in range(8)]
    for result, _ in evaluate_answers(tokenizer, answers, max_failures=0.25, ranks=2):
        assert result.metrics["eval/unscored"] == 2.0
    with pytest.raises(UserError, match="2 of 8 completions") as caught:
        score_answers(tokenizer, answers, max_failures=0.2)
    assert caught.value.setting == "reward.function"
    assert "raise first" in caught.value.problem


def test_failures_are_limited_in_a_whole_evaluation_not_a_batch(tokenizer: Tokenizer) -> None:
    answers = ["raise one", "score 1", "score 1", "score 0", "score 1", "raise two"]
    config = collect_config(max_failures=0.2)
    evaluator, _ = build_evaluator(
        tokenizer, answers, world_of(1, 0), config, {FAILING: ScriptedWorkers()}
    )
    problems = [EvalProblem("", i, prompt, FAILING) for i, prompt in enumerate(pool_of(6))]
    first, second, third = (
        evaluator.generate_answers(problems[i : i + 2], keep=0, total=6).failed for i in (0, 2, 4)
    )
    check_failures(config.reward, [*first, *second], 6)
    with pytest.raises(UserError, match="2 of 6 completions"):
        check_failures(config.reward, [*first, *second, *third], 6)


def test_an_evaluation_has_its_own_limits_and_sampling(tokenizer: Tokenizer) -> None:
    words = ["eval.samples=2", "eval.temperature=0.6", "eval.top_p=0.9", "eval.top_k=20"]
    limit = LIMIT_TOKENS + 7
    answers = [[Said("score 1"), Said("score 0")]]
    ((_, engine),) = evaluate_answers(
        tokenizer, answers, *words, f"eval.max_response_tokens={limit}"
    )
    ((_, sampling),) = engine.asked
    asked = (
        sampling.samples,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.max_tokens,
    )
    assert asked == (2, 0.6, 0.9, 20, limit)


def test_ranks_share_the_prompts_and_agree(tokenizer: Tokenizer) -> None:
    answers = ["score 1", "score 0", "raise odd", "raise even", "score 1"]
    alone = score_answers(tokenizer, answers, "eval.show=3")
    (one, here), (other, there) = evaluate_answers(tokenizer, answers, "eval.show=3", ranks=2)
    asked = [
        [prompt for prompts, _ in engine.asked for prompt in prompts] for engine in (here, there)
    ]
    assert all(asked) and sorted(asked[0] + asked[1]) == [0, 1, 2, 3, 4]
    assert one == other
    assert one.metrics == pytest.approx(alone.metrics)
    assert one.metrics["eval/accuracy"] == pytest.approx(2 / 3)
    shown = [("score 1", True), ("score 0", False), ("raise odd", False)]
    assert one.shown == tuple(
        ExampleAnswer(f"prompt {i}", text, "1", right) for i, (text, right) in enumerate(shown)
    )
    assert set(one.notes) == set(alone.notes) == {"raise odd", "raise even"}


def test_files_have_own_accuracies_and_equal_weight_in_the_mean(tokenizer: Tokenizer) -> None:
    """Of the file ``lost`` nothing can be scored."""
    answers = ["score 1", "score 0", "score 1", "raise it", "score 1"]
    prompts = pool_of(5)
    files = {"aime24": prompts[:3], "lost": prompts[3:4], "amc23": prompts[4:]}
    for result, _ in evaluate_answers(tokenizer, answers, ranks=2, files=files):
        assert result.metrics == {
            "eval/aime24": pytest.approx(2 / 3),
            "eval/aime24/truncated_ratio": 0.0,
            "eval/lost/truncated_ratio": 0.0,
            "eval/amc23": 1.0,
            "eval/amc23/truncated_ratio": 0.0,
            "eval/accuracy": pytest.approx((2 / 3 + 1) / 2),
            "eval/reward": pytest.approx(3 / 4),
            "eval/unscored": 1.0,
            "eval/response_len/mean": pytest.approx((4 * 8 + 9) / 5),
        }


def test_several_answers_give_pass_at_k_and_a_vote(tokenizer: Tokenizer) -> None:
    right, wrong, other, lost = (
        Said("score 1"),
        Said("score 0"),
        Said("score 5e-1", ended=False),
        Said("raise it"),
    )
    answers = [
        [right, right, wrong, wrong],
        [wrong, wrong, wrong, right],
        [right, wrong, other, lost],
    ]
    ((result, engine),) = evaluate_answers(tokenizer, answers, "eval.samples=4")
    ((_, sampling),) = engine.asked
    assert (sampling.samples, sampling.temperature) == (4, 0.7), (
        "the rollouts' temperature is the default"
    )
    assert result.metrics == {
        "eval/accuracy": pytest.approx((1 / 2 + 1 / 4 + 1 / 3) / 3),
        "eval/accuracy-pass@2": pytest.approx((5 / 6 + 1 / 2 + 2 / 3) / 3),
        "eval/accuracy-pass@4": 1.0,
        "eval/accuracy-maj@4": pytest.approx((1 / 2 + 0 + 1 / 3) / 3),
        "eval/reward": pytest.approx(4.5 / 11),
        "eval/unscored": 1.0,
        "eval/response_len/mean": pytest.approx((10 * 8 + 10 + 9) / 12),
    }


def test_recorded_answers_replace_those_of_later_steps(tmp_path: Path) -> None:
    def record(step: int, text: str) -> None:
        record_answers(
            tmp_path, step, EvalScores({}, (ExampleAnswer("1+1=", text, "2", text == "2"),), ())
        )

    for step in (0, 10, 20, 30):
        record(step, f"at {step}")
    record(20, "2")
    rows = read_answers(tmp_path)
    assert [row["step"] for row in rows] == [0, 10, 20]
    assert rows[-1]["answers"] == [{"prompt": "1+1=", "answer": "2", "label": "2", "correct": True}]


HALF, QUARTERS = "so #1/2", ("#3/4", "#6/8", "#9/12")
SCRIPT = [
    [HALF, "#2/4", QUARTERS[0], QUARTERS[1]],  # two right answers, and two wrong ones
    [HALF, *QUARTERS],  # four different texts
    [HALF, "#7", "#8", "none"],
    ["x #1/2 y #7", "x #8 y #7", "x #7", "#1/2"],
]


@pytest.fixture(scope="module")
def verifiers() -> Iterator[dict[str, RewardWorkers]]:
    found = {
        verifier: RewardWorkers(verifier, workers=1, timeout_s=20.0)
        for verifier in ("math", "exact")
    }
    yield found
    for each in found.values():
        each.close()


def judge_script(
    tokenizer: Tokenizer, workers: Mapping[str, object], verifiers: list[str], *overrides: str
) -> EvalAnswers:
    """Judge the four answers to each prompt of the script by the prompt's verifier."""
    config = load_config(None, ["eval.samples=4", "rollout.max_response_tokens=16", *overrides])
    answers = [[Said(text) for text in texts] for texts in SCRIPT]
    evaluator, _ = build_evaluator(tokenizer, answers, world_of(1, 0), config, workers)
    prompts = [
        Prompt(i, np.arange(3, dtype=np.int32), f"prompt {i}", "1/2") for i in range(len(verifiers))
    ]
    problems = [
        EvalProblem("here", i, prompts[i], verifier) for i, verifier in enumerate(verifiers)
    ]
    return evaluator.generate_answers(problems, keep=2, total=4 * len(problems))


def read_rights(found: EvalAnswers, place: int) -> list[bool]:
    return [bool(answer.score and answer.score.correct) for answer in found.answers[place]]


def test_answers_come_with_statements_and_verdicts(
    tokenizer: Tokenizer, verifiers: dict[str, RewardWorkers]
) -> None:
    found = judge_script(tokenizer, verifiers, ["math"] * 3)
    first = found.answers[0]
    assert [answer.extracted for answer in first] == ["1/2", "2/4", "3/4", "6/8"]
    assert read_rights(found, 0) == [True, True, False, False]
    assert [answer.score.by for answer in first if answer.score] == [(), ("number",), (), ()]
    assert [answer.text for answer in found.answers[1]] == [HALF, *QUARTERS]
    assert [answer.text for answer in found.answers[2]] == [None] * 4, "two were to be kept"
    assert [answer.tokens for answer in first] == [8, 5, 5, 5]
    np.testing.assert_allclose(found.votes, [1.0, 1 / 4, 1 / 3])
    by_text = judge_script(tokenizer, verifiers, ["exact"] * 3)
    np.testing.assert_allclose(by_text.votes, [1 / 4, 1 / 4, 1 / 3])


@pytest.mark.parametrize("verifier", ["math", "exact"])
def test_an_answer_is_read_after_its_thoughts(tokenizer: Tokenizer, verifier: str) -> None:
    words = [f"reward.function={verifier}", "reward.timeout_s=20", "reward.thinking_tags=[x,y]"]
    with closing(RewardWorkers.from_config(load_config(None, words).reward)) as pool:
        found = judge_script(tokenizer, {verifier: pool}, [verifier] * 4, *words)
    assert [answer.extracted for answer in found.answers[3]] == ["7", "7", "", "1/2"]
    assert read_rights(found, 3) == [False, False, False, True]


def test_each_problem_is_judged_by_its_own_verifier(
    tokenizer: Tokenizer, verifiers: dict[str, RewardWorkers]
) -> None:
    found = judge_script(tokenizer, verifiers, ["exact", "math", "exact"])
    assert [read_rights(found, place) for place in range(3)] == [[True, False, False, False]] * 3
    assert [group[1].text for group in found.answers[:2]] == ["#2/4", QUARTERS[0]]


def test_equal_answers_vote_together_and_empty_ones_never() -> None:
    def vote_of(right: int, *wrong: str) -> float:
        scores = [("2", Score(1.0, True))] * right + [(text, Score(0.0, False)) for text in wrong]
        return compute_majority_vote(
            [Answer(None, text, score, 1, "stop") for text, score in scores]
        )

    assert (vote_of(1, "", "", ""), vote_of(0, "", "")) == (1.0, 0.0)
    assert vote_of(2, "1/2", "0.5", "3") == 1.0
    assert vote_of(2, "3", "3", "4") == 0.5
    assert vote_of(2, "3", "3", "3") == 0.0
    assert np.isnan(compute_majority_vote([Answer(None, "3", None, 1, "stop")]))
