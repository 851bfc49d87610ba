"""The second task on which pruning is measured: its problems, its warm-up's slips, and the benchmark that takes it."""

from __future__ import annotations

import json
import random
import re
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.word_problems import FAMILIES, POOL, Prepared, Scratchpad, WordProblem, word_problems
from megatron_dppo.init import train_bpe, write_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def problems() -> list[WordProblem]:
    return word_problems(1000)


def answered(problem: WordProblem) -> int:
    """The answer by a formula in the numbers of the question."""
    question = problem.question
    first, *others = map(int, re.findall(r"\d+", question))
    if problem.family == "changes":
        return first + sum(
            int(number) * (1 if verb == "gets" else -1)
            for verb, number in re.findall(r"(gets|gives away) (\d+)", question)
        )
    if problem.family == "boxes":
        return first * others[0] + (-others[1] if "missing" in question else others[1])
    if problem.family == "shares":
        assert others[1] % first == 0, "a share is a whole number"
        return others[0] + others[1] // first
    if problem.family == "together":
        return sum(accumulate([first, *others]))
    return first * others[1] + others[0] * others[2]


def test_a_label_answers_its_question(problems: list[WordProblem]) -> None:
    assert {problem.family for problem in problems} == set(FAMILIES)
    assert [problem.label for problem in problems] == [str(answered(problem)) for problem in problems]


def test_no_question_occurs_twice_and_a_larger_pool_begins_with_the_smaller_one(problems: list[WordProblem]) -> None:
    assert len({problem.question for problem in problems}) == len(problems)
    assert word_problems(300) == problems[:300]


def test_the_teacher_is_sometimes_right_in_every_family_and_mostly_wrong(problems: list[WordProblem]) -> None:
    for family in FAMILIES:
        own = [problem for problem in problems if problem.family == family]
        right = sum(problem.worked_answer.endswith(f"#{problem.label}") for problem in own) / len(own)
        assert 0.05 < right < 0.55, family


@pytest.mark.parametrize(
    ("left", "sign", "right", "result"),
    [
        (17, "+", 5, 12), (15, "+", 5, 10), (12, "+", 5, 17),
        (42, "-", 27, 25), (45, "-", 25, 20), (47, "-", 22, 25),
        (7, "*", 8, 56), (56, "/", 8, 7),
    ],
)  # fmt: skip
def test_a_slip_leaves_out_a_carry_or_a_borrow_and_nothing_else(left: int, sign: str, right: int, result: int) -> None:
    pad = Scratchpad(random.Random(0), carries_forgotten=1.0)
    assert pad.work(left, sign, right) == result
    assert pad.lines == [f"{left}{sign}{right}={result}"]


def test_a_forgotten_end_is_what_the_step_before_it_came_to() -> None:
    pad = Scratchpad(random.Random(0), ends_forgotten=1.0)
    assert pad.finish(pad.work(7, "*", 8), "+", 5) == 56
    assert pad.lines == ["7*8=56"]


def test_the_longest_prompt_and_answer_fit_the_task_s_limits(problems: list[WordProblem], tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": p.question + p.worked_answer}) + "\n" for p in problems))
    tokenizer = train_bpe(corpus, 512)
    limits = dict(setting.split("=") for setting in Prepared(tmp_path).settings)
    asked = max(len(tokenizer.encode(problem.question).ids) for problem in problems)
    said = max(len(tokenizer.encode(problem.worked_answer).ids) for problem in problems)
    assert asked <= int(limits["data.max_prompt_tokens"]) * 0.8
    assert said <= int(limits["rollout.max_response_tokens"]) * 0.8


def test_the_time_to_an_accuracy_is_measured_on_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By name, from a policy that stands where the warmed-up one would; seconds are fitted, and interpolated."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    import time_to_accuracy as script

    folder = tmp_path / "runs" / "word_problems"
    write_model(folder / "warm", hidden=32, layers=1, heads=2, kv_heads=2, head_dim=16, ffn=64)
    assert str(script.Task.named("word_problems").policy) == "runs/word_problems/warm"
    assert len((folder / "train.jsonl").read_text().splitlines()) == POOL
    draw = random.Random(0)
    rows = [{"step": 0, "eval/accuracy": 0.1}]
    for step in range(1, 9):
        generated, trained = draw.randint(100, 200), draw.randint(100, 300)
        row = {"step": step, "rollout/generated_tokens": generated, "train/tokens": trained}
        rows.append(
            row | {"perf/step_time": 1.0 + 0.02 * generated + 0.01 * trained, "eval/accuracy": 0.1 * step + 0.1}
        )
    run = script.Run("arm", 1e-4, 1, list(script.points(rows)))
    costs = script.Costs.of([run])
    assert (costs.step, costs.generated, costs.trained) == pytest.approx((1.0, 0.02, 0.01))
    second, third = (sum(row["perf/step_time"] for row in rows[1 : 1 + steps]) for steps in (2, 3))
    assert costs.to(run, 0.35) == pytest.approx((second + third) / 2)
    assert costs.to(run, 0.95) == pytest.approx(sum(row["perf/step_time"] for row in rows[1:])), "not reached"
    store = script.Store(tmp_path / "store.jsonl")
    store.add(run)
    assert script.Store(tmp_path / "store.jsonl").runs.keys() == {("arm", 1e-4, 1)}
