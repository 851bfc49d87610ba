"""Word problems of five families as JSONL, with a warmed-up policy of two million parameters:
after the quickstart's sums, a second task for ``efficiency.py`` and ``time_to_accuracy.py``.

- Prompts differ in kind, length and difficulty: a problem has one to six steps of arithmetic.
- The warm-up's teacher forgets most carries and borrows. In most families, the teacher omits the
  last step of most problems.
- The reward depends on the result alone. Training discovers the value of carries and last steps.
- Held-out problems, the training pool and the warm-up's lessons share no question.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from harness import package_command

from megatron_dppo.init import write_model
from megatron_dppo.process.files import replace_file

# Numbers of problems.
HELD_OUT = 400
POOL = 1024
LESSONS = 8192
FORGOTTEN_CARRIES = 0.65
"""Fraction of carries and borrows forgotten by the warm-up's teacher."""
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
    """Worked answer, one line a step. A slip carries over to all later steps.

    With ``carries_forgotten`` 1, ``work(17, "+", 5)`` writes ``17+5=12`` and returns 12.
    """

    draw: random.Random
    carries_forgotten: float = 0.0
    """Probability of a forgotten carry (addition) or borrow (subtraction)."""
    ends_forgotten: float = 0.0
    """Probability of an omitted last step."""
    lines: list[str] = field(default_factory=list)

    def work(self, left: int, sign: str, right: int) -> int:
        result = OPERATIONS[sign](left, right)
        carries = sign == "+" and left % 10 + right % 10 >= 10
        borrows = sign == "-" and left % 10 < right % 10
        if self.draw.random() < self.carries_forgotten:
            result += 10 * (borrows - carries)
        self.lines.append(f"{left}{sign}{right}={result}")
        return result

    def finish(self, left: int, sign: str, right: int) -> int:
        """Return the result of the last step, or ``left`` if the step is omitted."""
        if self.draw.random() < self.ends_forgotten:
            return left
        return self.work(left, sign, right)


Solution = Callable[[Scratchpad], int]
"""Work out a problem, with or without slips; return the result."""


@dataclass(frozen=True, slots=True)
class Family:
    """Kind of word problem."""

    draw: Callable[[random.Random], tuple[str, Solution]]
    """Draw a question and the solution."""
    ends_forgotten: float
    """Fraction of problems without a last step in the teacher's answers."""


def changes(draw: random.Random) -> tuple[str, Solution]:
    """Change a number one to five times. All steps count; no wording marks the last step."""
    name = draw.choice(NAMES)
    things = draw.choice(THINGS)
    have = draw.randint(5, 40)
    question = f"{name} has {have} {things}."
    steps = []
    total = have
    for _ in range(draw.randint(1, 5)):
        sign = "+" if total < 20 or draw.random() < 0.5 else "-"
        number = draw.randint(2, 12)
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
    count = draw.randint(3, 9)
    each = draw.randint(4, 9)
    sign, words = draw.choice((("+", "lie beside them"), ("-", "are missing")))
    number = draw.randint(2, 12)
    question = f"{count} boxes hold {each} {things} each. {number} {words}. How many are there?"
    return question, lambda pad: pad.finish(pad.work(count, "*", each), sign, number)


def shares(draw: random.Random) -> tuple[str, Solution]:
    things = draw.choice(THINGS)
    friends = draw.randint(2, 9)
    each = draw.randint(3, 9)
    before = draw.randint(2, 30)
    question = (
        f"{friends} friends had {before} {things} each. They share {friends * each} more. "
        "How many has each?"
    )
    return question, lambda pad: pad.finish(pad.work(friends * each, "/", friends), "+", before)


def together(draw: random.Random) -> tuple[str, Solution]:
    """Name two to four people in ascending order of belongings."""
    names = draw.sample(NAMES, draw.randint(2, 4))
    things = draw.choice(THINGS)
    first = draw.randint(3, 12)
    more = [draw.randint(2, 9) for _ in names[1:]]
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
    name = draw.choice(NAMES)
    one, other = draw.sample(THINGS, 2)
    price = draw.randint(2, 5)
    dearer = draw.randint(5, 9)
    few = draw.randint(2, 5)
    many = draw.randint(2, 5)
    prices = f"{one} cost {price}, {other} cost {dearer}."

    def solve(pad: Scratchpad) -> int:
        return pad.finish(pad.work(few, "*", price), "+", pad.work(many, "*", dearer))

    return f"{prices} {name} buys {few} {one} and {many} {other}. How much is that?", solve


FAMILIES = (
    Family(changes, ends_forgotten=0.0),
    Family(boxes, ends_forgotten=0.55),
    Family(shares, ends_forgotten=0.65),
    Family(together, ends_forgotten=0.6),
    Family(shopping, ends_forgotten=0.4),
)


@dataclass(frozen=True, slots=True)
class WordProblem:
    """Word problem: ``Ben has 17 pens. Ben gets 5. How many now?``, label ``22``, worked answer
    ``17+5=12\\n#12``."""

    question: str
    label: str
    worked_answer: str
    """The warm-up teacher's answer: a line a step, then the result."""


def word_problems(count: int, seed: int = 0) -> list[WordProblem]:
    """Draw distinct problems from all families in turn. A larger ``count`` appends problems."""
    draw = random.Random(seed)
    found: dict[str, WordProblem] = {}
    while len(found) < count:
        family = FAMILIES[len(found) % len(FAMILIES)]
        question, solve = family.draw(draw)
        teacher = Scratchpad(draw, FORGOTTEN_CARRIES, family.ends_forgotten)
        result = solve(teacher)
        answer = "\n".join([*teacher.lines, f"#{result}"])
        problem = WordProblem(question + "\n", str(solve(Scratchpad(draw))), answer)
        # A repeated question keeps the first answer.
        found.setdefault(question, problem)
    return list(found.values())


def composed(count: int, seed: int = 1) -> list[tuple[str, str]]:
    """Draw distinct problems of a family that no training has, ``boxes`` followed by ``changes``.

    Returns:
        Questions and labels.
    """
    draw = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        name = draw.choice(NAMES)
        boxes = draw.randint(3, 9)
        each = draw.randint(4, 9)
        gets = draw.randint(2, 12)
        gives = draw.randint(2, 12)
        question = (
            f"{boxes} boxes hold {each} {draw.choice(THINGS)} each. {name} gets {gets}. {name} "
            f"gives away {gives}. How many now?\n"
        )
        found[question] = str(boxes * each + gets - gives)
    return list(found.items())


@dataclass(frozen=True, slots=True)
class Prepared:
    """Files of the task."""

    folder: Path

    @property
    def policy(self) -> Path:
        """Warmed-up policy (Hugging Face directory)."""
        return self.folder / "warm"

    @property
    def settings(self) -> list[str]:
        """Overrides of the quickstart's configuration for this task, on one rank."""
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
    """Write problems and tokenizer, and warm up the policy, unless the files exist: some minutes on
    one core."""
    made = Prepared(folder)
    lessons = folder / "lessons.jsonl"
    train = folder / "train.jsonl"
    if not train.exists():
        problems = word_problems(HELD_OUT + POOL + LESSONS)
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / "held_out.jsonl", problems[:HELD_OUT])
        _write(lessons, problems[HELD_OUT + POOL :])
        # Written last: train.jsonl marks the completion of all three files.
        _write(train, problems[HELD_OUT : HELD_OUT + POOL])
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
        settings = [
            *made.settings,
            f"data.train={lessons}",
            "data.response_key=response",
            f"model.path={initial}",
            "sft.steps=700",
            f"sft.out={made.policy}",
            f"run.dir={folder / 'sft'}",
        ]
        package_command("sft", "configs/quickstart.yaml", *settings)
    return made


def _write(file: Path, problems: Sequence[WordProblem]) -> None:
    rows = [
        {"prompt": one.question, "label": one.label, "response": one.worked_answer}
        for one in problems
    ]
    with replace_file(file) as draft:
        draft.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
