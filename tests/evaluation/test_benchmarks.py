"""Benchmarks load by declaration with the right number of problems and their answers, or say what
is missing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.benchmarks import (
    BENCHMARKS,
    FOLDER,
    Question,
    find_file,
    list_sources,
    read_benchmark,
)
from megatron_dppo.evaluation.evaluator import load_problems
from megatron_dppo.init import train_bpe, write_tokenizer
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.settings import load_config

SHAPES: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "gsm8k": (
        "gsm8k_test.jsonl",
        [
            {"question": "2+2?", "answer": "It is 2 + 2 = <<2+2=4>>4.\n#### 4"},
            {"question": "Pay?", "answer": "#### 1,200"},
        ],
        ["4", "1,200"],
    ),
    "math500": (
        "math500/test.jsonl",
        [{"problem": "p", "solution": r"\boxed{\frac12}", "answer": r"\frac{1}{2}", "level": 2}],
        [r"\frac{1}{2}"],
    ),
    "aime24": (
        "aime24.jsonl",
        [{"id": 60, "problem": "p", "question": "p", "solution": "s", "answer": 204, "url": "u"}],
        ["204"],
    ),
    "minerva": (
        "minerva_math.jsonl",
        [
            {
                "problem": "p",
                "solution": r"First \boxed{1}, then \boxed{4.5e33} erg/s",
                "type": "t",
                "idx": 0,
            }
        ],
        ["4.5e33"],
    ),
    "olympiadbench": (
        "olympiadbench.json",
        [{"id": 1, "question": "q", "solution": ["s"], "final_answer": ["1", "-1"], "unit": None}],
        ["1, -1"],
    ),
    "amc23": ("amc23.jsonl", [{"id": 0, "question": "q", "answer": 27.0, "url": "u"}], ["27"]),
}
"""By benchmark: the name of a published file, some rows, and their answers."""


def write(folder: Path, name: str) -> Path:
    """A file of a benchmark's shape."""
    file, rows, _ = SHAPES[name]
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        json.dumps(rows)
        if path.suffix == ".json"
        else "".join(json.dumps(row) + "\n" for row in rows)
    )
    path.write_text(text)
    return path


def shortened(name: str) -> Any:
    return replace(BENCHMARKS[name], problems=len(SHAPES[name][1]))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a small file of every benchmark, which is all of it."""
    for name in SHAPES:
        monkeypatch.setitem(BENCHMARKS, name, shortened(name))
        write(tmp_path, name)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def test_a_file_with_another_number_of_problems_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "gsm8k")
    with pytest.raises(UserError, match="holds 2 problems, and gsm8k has 1319"):
        read_benchmark("gsm8k", str(file), BENCHMARKS["gsm8k"])


@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("gsm8k", {"question": "q", "answer": "no mark"}, "states no answer in column 'answer'"),
        (
            "minerva",
            {"problem": "p", "answer": "1"},
            r"has nothing in a column solution \(it has problem, answer\)",
        ),
        ("math500", {"prompt": "p", "answer": "1"}, "has nothing in a column problem or question"),
        ("math500", {"problem": " ", "answer": "1"}, "has no problem that is a text"),
    ],
)
def test_a_row_without_problem_or_answer_is_named(
    name: str, row: dict[str, str], problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=problem) as caught:
        read_benchmark(name, str(file), replace(BENCHMARKS[name], problems=1))
    assert caught.value.value == f"{file}, line 1"


def test_the_generator_s_problems_are_held_out_by_default(short: Path) -> None:
    def named(*overrides: str) -> list[str]:
        return [source.name for source in list_sources(load_config(None, overrides))]

    assert named() == [""]
    assert named("eval.benchmarks=[aime24]") == ["aime24"]
    assert named("eval.benchmarks=[aime24, arithmetic]") == ["aime24", "arithmetic"]
    assert named("data.train=other.jsonl") == []
    assert named("data.eval=some.jsonl", "eval.benchmarks=[own=a.jsonl]") == ["", "own"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "corpus.jsonl").write_text(json.dumps({"text": "Please reason step by step."}) + "\n")
    write_tokenizer(train_bpe(folder / "corpus.jsonl", 300), folder, max_tokens=512)
    return load_tokenizer(folder)


def test_problems_are_rendered_and_numbered_with_own_ids(short: Path, bpe: Tokenizer) -> None:
    own = short / "own.jsonl"
    own.write_text(
        '{"question": "1+1=", "ground_truth": 2}\n{"question": "2+2=", "ground_truth": 4}\n'
    )
    config = load_config(
        None, [f"eval.benchmarks=[gsm8k, own={own}, arithmetic]", "eval.problems=2"]
    )
    problems = load_problems(config, bpe, max_positions=4096)
    assert list(dict.fromkeys(problem.name for problem in problems)) == [
        "gsm8k",
        "own",
        "arithmetic",
    ]
    assert [(p.number, p.verifier) for p in problems] == [
        (0, "math"),
        (1, "math"),
        *[(0, "math"), (1, "math")] * 2,
    ]
    assert len({problem.prompt.id for problem in problems}) == 6
    gsm8k, own_first = problems[0].prompt, problems[2].prompt
    assert gsm8k.text.startswith("<|im_start|>user\n2+2?\n\nPlease reason step by step")
    assert gsm8k.data_source == "gsm8k"
    assert (
        own_first.text == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
        and own_first.label == "2"
    )


def test_math_judges_benchmarks_under_any_reward_function(short: Path, bpe: Tokenizer) -> None:
    config = load_config(
        None, ["eval.benchmarks=[aime24, arithmetic]", "reward.function=exact", "eval.problems=1"]
    )
    problems = load_problems(config, bpe, max_positions=4096)
    assert [problem.verifier for problem in problems] == ["math", "exact"]


def test_long_problems_are_kept_and_without_room_refused(short: Path, bpe: Tokenizer) -> None:
    words = ["eval.benchmarks=[gsm8k]", "data.max_prompt_tokens=8", "data.overlong_prompts=drop"]
    words += ["rollout.max_response_tokens=100"]
    assert len(load_problems(load_config(None, words), bpe, max_positions=1000)) == 2
    with pytest.raises(UserError, match="leaves 28 of the policy's 128 positions") as caught:
        load_problems(load_config(None, words), bpe, max_positions=128)
    assert caught.value.setting == "rollout.max_response_tokens"


def solved(question: Question) -> str:
    """The published solution; with its answer in a box at the end, where solutions do not mark
    theirs."""
    row = question.row.values
    if "final_answer" in row or "url" in row:  # olympiads, AIME and AMC
        return f"{row.get('solution')}\nThe answer is $\\boxed{{{question.label}}}$."
    return str(row.get("solution") or row["answer"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_gold_solutions_are_right_and_nonsense_is_wrong(
    name: str, short: Path, workers: RewardWorkers
) -> None:
    questions = read_benchmark(name, str(find_file(name, short)), BENCHMARKS[name])
    assert [question.label for question in questions] == SHAPES[name][2]
    assert all(
        "\\boxed{}" in question.prompt and "{problem}" not in question.prompt
        for question in questions
    )
    gold = workers.score(
        [ScoreItem(name, solved(question), question.label) for question in questions]
    )
    none = workers.score(
        [ScoreItem(name, "\\boxed{furiously}", question.label) for question in questions]
    )
    for found, right in ((gold, True), (none, False)):
        assert [score.correct for score in found] == [right] * len(questions)
