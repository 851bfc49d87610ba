"""Generated problems: distinct, held out, functions of their settings, and scored by their own
verifiers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import (
    ArithmeticConfig,
    DataConfig,
    ReasoningGymConfig,
    VerifiersConfig,
    replace,
)
from megatron_dppo.data import generators
from megatron_dppo.data.generators import Sum, check_tasks, make_problems, make_sums
from megatron_dppo.data.prompts import load_prompts
from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import reasoning_gym_score
from megatron_dppo.rl.score import count_failures

REWARD = "reasoning_gym"
REWARD_TIMEOUT_S = 60.0
CONFIG = ArithmeticConfig(problems=300, eval_problems=50, max_terms=5, max_operand=30)


def questions(sums: list[Sum]) -> list[str]:
    return [problem.question for problem in sums]


def test_sums_are_distinct_and_a_function_of_settings() -> None:
    train, held_out = make_sums(CONFIG)
    assert (len(train), len(held_out)) == (300, 50)
    assert len({*questions(train), *questions(held_out)}) == 350
    assert make_sums(CONFIG) == (train, held_out)
    assert make_sums(replace(CONFIG, seed=1)) != (train, held_out)
    larger, same = make_sums(replace(CONFIG, problems=900))
    assert same == held_out and larger[:300] == train
    for problem in train:
        assert 2 <= len(problem.terms) <= 5 and all(1 <= term <= 30 for term in problem.terms)
        assert int(problem.label) == sum(problem.terms)


def test_a_worked_answer_forgets_a_carry_only_when_told() -> None:
    assert Sum((12, 7, 55), (False, False)).worked_answer == "12+7=19\n19+55=74\n#74"
    assert Sum((12, 7, 55), (False, False)).question == "12+7+55="
    forgetful = Sum((5, 8, 6), (True, True))  # the first addition carries, the second does not
    assert forgetful.worked_answer == "5+8=3\n3+6=9\n#9"
    assert forgetful.label == "19"
    assert dataclasses.replace(forgetful, short=True).worked_answer == "#19"
    assert all(
        problem.worked_answer.endswith(f"#{problem.label}") for problem in make_sums(CONFIG)[0]
    )


def test_all_distinct_sums_can_be_used_up_but_no_more() -> None:
    every = ArithmeticConfig(problems=5, eval_problems=7, max_terms=3, max_operand=2)  # 4 + 8 sums
    train, held_out = make_sums(every)
    assert len({*questions(train), *questions(held_out)}) == 12
    with pytest.raises(UserError, match="the 12 distinct sums"):
        make_sums(replace(every, problems=6))


TASKS: dict[str, dict[str, Any]] = {
    "chain_sum": {"max_terms": 3},
    "leg_counting": {},
    "bitwise_arithmetic": {"difficulty": 1},
}
GYM = ReasoningGymConfig(tasks=TASKS, problems=60, eval_problems=15, seed=7)


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw problems of reasoning-gym in this process, which has imported the package."""
    pytest.importorskip("reasoning_gym")

    def draw(module: object, config: Any, split: Any) -> object:
        return generators._generate_problems(config, split)

    monkeypatch.setattr(generators, "_generate_in_process", draw)


@pytest.mark.usefixtures("gym")
def test_pools_share_no_question_and_grow_without_change() -> None:
    def questions_of(split: str, **changes: int) -> list[str]:
        return [row["prompt"] for row in make_problems(replace(GYM, **changes), split)]

    train, held_out = questions_of("train"), questions_of("eval")
    assert (len(train), len(held_out)) == (60, 15)
    assert len({*train, *held_out}) == 75
    assert questions_of("train") == train != questions_of("train", seed=8)
    assert questions_of("eval", problems=90) == held_out
    sources = [row["data_source"].partition("/")[2] for row in make_problems(GYM, "train")]
    assert {sources.count(task) for task in TASKS} == {20}


def test_pools_do_not_depend_on_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some families walk through sets."""
    pytest.importorskip("reasoning_gym")
    config = ReasoningGymConfig(
        tasks={"isomorphic_strings": {}, "ransom_note": {}}, problems=6, eval_problems=2
    )
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        made.append([row["prompt"] for row in make_problems(config, "train")])
    assert made[0] == made[1] and "isomorphic" in made[0][0]


@pytest.mark.usefixtures("gym")
def test_settings_of_a_task_decide_right_answers() -> None:
    tasks = {"decimal_arithmetic": {"min_num_decimal_places": 8, "max_num_decimal_places": 10}}
    (row,) = make_problems(
        ReasoningGymConfig(tasks=tasks, problems=1, eval_problems=1, seed=3), "train"
    )
    for answer, right in ((row["label"], True), (f"{float(row['label']):.3f}", False)):
        assert (
            reasoning_gym_score(row["data_source"], answer, row["label"], row["extra_info"])["acc"]
            is right
        )


@pytest.mark.usefixtures("gym")
def test_each_tasks_verifier_scores_answers(tokenizer: Any, request: pytest.FixtureRequest) -> None:
    data = DataConfig(
        train="reasoning_gym", chat_template=False, max_prompt_tokens=4096, reasoning_gym=GYM
    )
    prompts = [
        *load_prompts(data, tokenizer, split="train")[:9],
        *load_prompts(data, tokenizer, split="eval")[:3],
    ]
    answers = [
        "I think <answer>1</answer>, no, <answer>{}</answer>",
        "{}",
        "<answer>nonsense</answer>",
    ]
    items = [
        ScoreItem(p.data_source, text.format(p.label), p.label, p.extra)
        for p in prompts
        for text in answers
    ]
    scored = request.getfixturevalue("workers").score(items, max_failures=0)
    assert count_failures(scored) == (0, 0)
    assert [score.correct for score in scored] == [True, True, False] * 12
    assert all((score.reward == 1.0) if score.correct else (score.reward < 0.5) for score in scored)


@pytest.mark.usefixtures("gym")
@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"chain_sm": {}}, "Perhaps 'chain_sum' was meant"),
        ({"chain_sum": {"max_term": 3}}, "unexpected keyword argument 'max_term'"),
    ],
)
def test_an_unknown_task_or_setting_is_refused(tasks: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        check_tasks(ReasoningGymConfig(tasks=tasks))
    assert caught.value.setting.startswith("data.reasoning_gym.tasks")


@pytest.mark.usefixtures("gym")
def test_a_task_with_too_few_problems_is_refused() -> None:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(UserError, match="has no more than about"):
        make_problems(ReasoningGymConfig(tasks={"chain_sum": digits}, problems=500), "train")


@pytest.mark.parametrize(("leaves", "code"), [("", 0), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_a_process_without_problems_is_named(
    leaves: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text(leaves)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"ended the process .*, with exit code {code}") as caught:
        generators._generate_in_process("leaves", VerifiersConfig(environment="leaves"), "train")
    assert caught.value.setting == "data.verifiers.environment"
