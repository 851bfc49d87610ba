"""Word problems of five families as JSONL, and a policy of two million parameters warmed up on
them: a second task beside the quickstart's sums for ``efficiency.py`` and ``time_to_accuracy.py``.

Prompts differ in kind, length and difficulty: a problem has one to six steps of arithmetic. The
warm-up's teacher forgets most carries and borrows, and in most families stops before the last step
more often than not. Rewards see the result alone; training finds out that carrying pays, and that
going on pays. Held-out problems, the training pool and the warm-up's lessons share no question.
"""

from __future__ import annotations

import json
import operator
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megatron_dppo.init import write_model
from megatron_dppo.process.files import replace_file

HELD_OUT, POOL, LESSONS = 400, 1024, 8192
"""Problems of each."""
FORGOTTEN_CARRIES = 0.65
"""Share of the carries and borrows that the warm-up's teacher forgets."""
NAMES = ("Anna", "Ben", "Eva", "Tom")
THINGS = ("apples", "books", "cards", "coins", "pens")
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}


@dataclass(slots=True)
class Scratchpad:
    """Where a problem is worked out, one line a step; wrong from the first slip on.

    With ``carries_forgotten`` 1, ``work(17, "+", 5)`` writes ``17+5=12`` and is 12.
    """

    draw: random.Random
    carries_forgotten: float = 0.0
    """Share of the additions with a carry, and of the subtractions with a borrow, that are worked
    out without."""
    ends_forgotten: float = 0.0
    """Share of the problems of which the last step is left out."""
    lines: list[str] = field(default_factory=list)

    def work(self, left: int, sign: str, right: int) -> int:
        result = OPERATIONS[sign](left, right)
        carry = {"+": -10 * (left % 10 + right % 10 >= 10), "-": 10 * (left % 10 < right % 10)}.get(
            sign, 0
        )
        if self.draw.random() < self.carries_forgotten:
            result += carry
        self.lines.append(f"{left}{sign}{right}={result}")
        return result

    def finish(self, left: int, sign: str, right: int) -> int:
        """The last step, or what the one before it came to."""
        return left if self.draw.random() < self.ends_forgotten else self.work(left, sign, right)


Solution = Callable[[Scratchpad], int]
"""Works a problem out, with or without slips."""


@dataclass(frozen=True, slots=True)
class Family:
    """One sort of word problem."""

    draw: Callable[[random.Random], tuple[str, Solution]]
    """A question and its solution."""
    ends_forgotten: float
    """Share of its problems of which the warm-up's teacher forgets the last step."""


def changes(draw: random.Random) -> tuple[str, Solution]:
    """One to five things happen to a number; every step counts, none is the last by its words."""
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    have = draw.randint(5, 40)
    question, steps = f"{name} has {have} {things}.", []
    total = have
    for _ in range(draw.randint(1, 5)):
        sign, number = "+" if total < 20 or draw.random() < 0.5 else "-", draw.randint(2, 12)
        question += f" {name} {'gets' if sign == '+' else 'gives away'} {number}."
        steps.append((sign, number))
        total = OPERATIONS[sign](total, number)

    def solve(pad: Scratchpad) -> int:
        result = have
        for sign, number in steps:
            result = pad.work(result, sign, number)
        return result

    return f"{question} How many now?", solve


def boxes(draw: random.Random) -> tuple[str, Solution]:
    things = draw.choice(THINGS)
    count, each = draw.randint(3, 9), draw.randint(4, 9)
    sign, words = draw.choice((("+", "lie beside them"), ("-", "are missing")))
    number = draw.randint(2, 12)
    question = f"{count} boxes hold {each} {things} each. {number} {words}. How many are there?"
    return question, lambda pad: pad.finish(pad.work(count, "*", each), sign, number)


def shares(draw: random.Random) -> tuple[str, Solution]:
    things = draw.choice(THINGS)
    friends, each, before = draw.randint(2, 9), draw.randint(3, 9), draw.randint(2, 30)
    question = (
        f"{friends} friends had {before} {things} each. They share {friends * each} more. "
        "How many has each?"
    )
    return question, lambda pad: pad.finish(pad.work(friends * each, "/", friends), "+", before)


def together(draw: random.Random) -> tuple[str, Solution]:
    """Two to four people, each with more than the one before."""
    names, things = draw.sample(NAMES, draw.randint(2, 4)), draw.choice(THINGS)
    first, more = draw.randint(3, 12), [draw.randint(2, 9) for _ in names[1:]]
    question = f"{names[0]} has {first} {things}."
    for (previous, name), number in zip(pairwise(names), more, strict=True):
        question += f" {name} has {number} more than {previous}."

    def solve(pad: Scratchpad) -> int:
        owned = [first]
        for number in more:
            owned.append(pad.work(owned[-1], "+", number))
        total = owned[0]
        for number in owned[1:-1]:
            total = pad.work(total, "+", number)
        return pad.finish(total, "+", owned[-1])

    return f"{question} How many together?", solve


def shopping(draw: random.Random) -> tuple[str, Solution]:
    name, (one, other) = draw.choice(NAMES), draw.sample(THINGS, 2)
    price, dearer = draw.randint(2, 5), draw.randint(5, 9)
    few, many = draw.randint(2, 5), draw.randint(2, 5)
    prices = f"{one} cost {price}, {other} cost {dearer}."

    def solve(pad: Scratchpad) -> int:
        return pad.finish(pad.work(few, "*", price), "+", pad.work(many, "*", dearer))

    return f"{prices} {name} buys {few} {one} and {many} {other}. How much is that?", solve


FAMILIES = {
    "changes": Family(changes, ends_forgotten=0.0),
    "boxes": Family(boxes, ends_forgotten=0.55),
    "shares": Family(shares, ends_forgotten=0.65),
    "together": Family(together, ends_forgotten=0.6),
    "shopping": Family(shopping, ends_forgotten=0.4),
}


@dataclass(frozen=True, slots=True)
class WordProblem:
    """One problem: ``Ben has 17 pens. Ben gets 5. How many now?`` with label ``22``, and
    ``17+5=12\\n#12``."""

    family: str
    question: str
    label: str
    worked_answer: str
    """As the warm-up's teacher writes it: a line a step, then the result."""


def word_problems(count: int, seed: int = 0) -> list[WordProblem]:
    """Distinct problems, of all families in turn; the first ones are the same for every count."""
    draw = random.Random(seed)
    found: dict[str, WordProblem] = {}
    while len(found) < count:
        name = list(FAMILIES)[len(found) % len(FAMILIES)]
        question, solve = FAMILIES[name].draw(draw)
        teacher = Scratchpad(draw, FORGOTTEN_CARRIES, FAMILIES[name].ends_forgotten)
        result = solve(teacher)
        answer = "\n".join([*teacher.lines, f"#{result}"])
        problem = WordProblem(name, question + "\n", str(solve(Scratchpad(draw))), answer)
        found.setdefault(question, problem)  # one that comes again changes nothing
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Prepared:
    """The files of the task."""

    folder: Path

    @property
    def policy(self) -> Path:
        """The warmed-up policy, as a Hugging Face directory."""
        return self.folder / "warm"

    @property
    def settings(self) -> list[str]:
        """What makes a configuration of the quickstart's train on this task, on one rank."""
        return [
            f"data.train={self.folder / 'train.jsonl'}",
            f"data.eval={self.folder / 'held_out.jsonl'}",
            "data.max_prompt_tokens=96",
            "rollout.prompts_per_step=48",
            "rollout.max_response_tokens=96",
            "optimizer.lr=7e-5",
            "eval.problems=400",
            "layout.tp=1",
        ]


def prepared(folder: Path) -> Prepared:
    """Problems, tokenizer, policy and warm-up, made where they are not there yet: some minutes on
    one core."""
    made = Prepared(folder)
    lessons, train = folder / "lessons.jsonl", folder / "train.jsonl"
    if not train.exists():
        problems = word_problems(HELD_OUT + POOL + LESSONS)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "held_out.jsonl", problems[:HELD_OUT])
        _write(lessons, problems[HELD_OUT + POOL :])
        _write(train, problems[HELD_OUT : HELD_OUT + POOL])  # last: where it is, the others are
    if not (made.policy / "config.json").exists():
        initial = folder / "initial"
        write_model(
            initial,
            hidden=224,
            layers=3,
            std=0.05,
            tokenizer="bpe",
            corpus=lessons,
            vocab_size=512,
            overwrite=True,
        )
        command = [
            sys.executable,
            "-m",
            "megatron_dppo",
            "sft",
            "configs/quickstart.yaml",
            *made.settings,
        ]
        command += [
            f"data.train={lessons}",
            "data.response_key=response",
            f"model.path={initial}",
            "sft.steps=700",
        ]
        command += [f"sft.out={made.policy}", f"run.dir={folder / 'sft'}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return made


def _write(file: Path, problems: Sequence[WordProblem]) -> None:
    rows = [
        {"prompt": one.question, "label": one.label, "response": one.worked_answer}
        for one in problems
    ]
    with replace_file(file) as draft:
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
