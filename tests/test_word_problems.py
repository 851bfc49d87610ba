"""The second task on which pruning is measured: its problems, its warm-up's slips, and the benchmark that takes it."""

from __future__ import annotations

import json
import random
import re
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest

from benchmarks.word_problems import FAMILIES, POOL, Prepared, Scratchpad, WordProblem, word_problems
from megatron_dppo.init import train_bpe, write_model
from tests.commands import Command, fork_commands

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


def test_what_pruning_buys_is_measured_on_them_by_name(tmp_path: Path) -> None:
    """A policy that stands where the warmed-up one would, so that nothing is warmed up; the pool is made."""
    folder = tmp_path / "runs" / "word_problems"
    write_model(folder / "warm", hidden=32, layers=1, heads=2, kv_heads=2, head_dim=16, ffn=64)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    words = ["python", str(ROOT / "benchmarks" / "pruning_speedup.py"), "--task", "word_problems", "--json"]
    words += ["--arms", "unpruned", "--seeds", "1", "--steps", "1", "--eval-every", "1"]
    words += ["--set", "data.max_prompt_tokens=512", "rollout.prompts_per_step=4"]
    words += ["rollout.samples_per_prompt=2", "rollout.max_response_tokens=8", "eval.problems=2"]
    log, errors = tmp_path / "log", tmp_path / "errors"
    assert Command(words, log, tmp_path, before=partial(fork_commands, errors)).exit_code() == 0, errors.read_text()
    report = json.loads(log.read_text())
    assert report["task"] == "word_problems"
    assert [run["arm"] for run in report["runs"]] == ["unpruned"]
    assert len((folder / "train.jsonl").read_text().splitlines()) == POOL
