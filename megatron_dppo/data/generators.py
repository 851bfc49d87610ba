"""Generate problems. ``data.train`` may name a generator instead of a file.

``arithmetic`` makes sums, which a policy with a million parameters learns in minutes::

    12+7+55=        question
    12+7=19         a line per addition, so that the length of an answer varies
    19+55=74
    #74             label

``reasoning_gym`` (github.com/open-thought/reasoning-gym, extra ``reasoning-gym``) has a hundred
families of tasks, each with a generator and a verifier for ``reward.function=reasoning_gym``.

``verifiers`` (extra ``agents``) has environments: problems for ``rollout.agent=verifiers``. See
``data/verifiers.py``.

Pools are finite: prompts are drawn again, and pruning by history has a history.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import cycle, islice
from typing import Any, Literal

from megatron_dppo.config import ArithmeticConfig, DataConfig, ReasoningGymConfig, VerifiersConfig
from megatron_dppo.data.rows import Row
from megatron_dppo.errors import UserError, install_command

Split = Literal["train", "eval"]
REASONING_GYM = "reasoning_gym"
"""Name in ``data.train``, and prefix of ``data_source`` before a slash."""
VERIFIERS = "verifiers"
TOOLS = "tools"
"""Column of the policy's tools."""
REPEATS = 20
"""Known problems in a row before a family counts as exhausted."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Problem of ``arithmetic``."""

    terms: tuple[int, ...]
    slips: tuple[bool, ...]
    """[terms − 1], True if the worked answer forgets the carry of an addition, if any."""
    short: bool = False
    """True if the worked answer is the result alone."""

    @property
    def question(self) -> str:
        return "+".join(map(str, self.terms)) + "="

    @property
    def label(self) -> str:
        return str(sum(self.terms))

    @property
    def worked_answer(self) -> str:
        """Lines of the additions, then the result, wrong after a forgotten carry."""
        if self.short:
            return f"#{self.label}"
        lines = []
        total = self.terms[0]
        for term, slip in zip(self.terms[1:], self.slips, strict=True):
            carries = total % 10 + term % 10 >= 10
            after = total + term - (10 if carries and slip else 0)
            lines.append(f"{total}+{term}={after}")
            total = after
        return "\n".join([*lines, f"#{total}"])


def make_sums(config: ArithmeticConfig) -> tuple[list[Sum], list[Sum]]:
    """Return the training pool and the held-out problems, all distinct.

    Raises:
        UserError: ``config`` requests more problems than distinct problems exist.
    """
    lengths = range(config.min_terms, config.max_terms + 1)
    wanted = config.problems + config.eval_problems
    # Powers for long sums would have millions of digits. 2 to the power of 64 exceeds every pool.
    left = {length: min(config.max_operand ** min(length, 64), wanted) for length in lengths}
    if (most := sum(left.values())) < wanted:
        problem = (
            f"is, with {config.eval_problems} held-out problems, more than the {most} distinct "
            f"sums of {config.min_terms} to {config.max_terms} numbers up to {config.max_operand}"
        )
        remedy = "Lower problems or eval_problems, or raise max_operand or max_terms"
        raise UserError("data.arithmetic.problems", config.problems, problem, remedy)
    draw = random.Random(config.seed)
    drawn: dict[tuple[int, ...], None] = {}
    while len(drawn) < wanted:
        # Draw the number of terms uniformly among lengths with sums left, because short sums are
        # soon used up.
        length = draw.choice([length for length in lengths if left[length]])
        terms = tuple(draw.randint(1, config.max_operand) for _ in range(length))
        if terms not in drawn:
            drawn[terms] = None
            left[length] -= 1
    teacher = random.Random(config.seed + 1)
    style = random.Random(config.seed + 2)
    sums = []
    for terms in drawn:
        slips = tuple(teacher.random() < config.forgotten_carries for _ in terms[1:])
        short = style.random() < config.short_answers
        sums.append(Sum(terms, slips, short))
    # The first draws are held out for every size of the training pool, because a warm-up may take a
    # larger pool than the following training.
    return sums[config.eval_problems :], sums[: config.eval_problems]


def check_tasks(config: ReasoningGymConfig) -> None:
    """Check that every task of ``data.reasoning_gym.tasks`` can generate problems.

    Raises:
        UserError: reasoning-gym is not installed, or refuses a family, setting or value.
    """
    for task, settings in config.tasks.items():
        _build_dataset(task, settings, size=1, seed=0)


def make_problems(config: ReasoningGymConfig, split: Split) -> list[Row]:
    """Return problems of all families in turn, in the form of a file's rows.

    - Columns are ``prompt``, ``label``, ``response``, ``data_source`` and ``extra_info``.
    - ``response`` is the bare answer, or None if a task has no reference answer.
    - Held-out problems are drawn first. No question is in both splits.

    Raises:
        UserError: an error of ``check_tasks``, or too few distinct problems.
    """
    check_tasks(config)
    return _generate_in_process("megatron_dppo.data.generators", config, split)


def check_environment(config: VerifiersConfig) -> None:
    """Check the environment of ``data.verifiers``.

    Raises:
        UserError: no environment is named, or verifiers is absent.
    """
    if find_spec(VERIFIERS) is None:
        remedy = f"Install it: {install_command('agents')}"
        raise UserError("data.train", VERIFIERS, "verifiers is not installed", remedy)
    if not config.environment:
        raise UserError(
            "data.verifiers.environment", "", "names no environment", "Give the id of one"
        )


def make_environment_problems(config: VerifiersConfig, split: Split) -> list[Row]:
    """Return problems of a verifiers environment as rows. ``extra_info`` has its input.

    Raises:
        UserError: an error of ``check_environment``; or the environment cannot be loaded, or has
            fewer problems than ``eval_problems``.
    """
    check_environment(config)
    return _generate_in_process("megatron_dppo.data.verifiers", config, split)


def _generate_in_process(
    module: str,
    config: ReasoningGymConfig | VerifiersConfig,
    split: Split,
) -> list[Row]:
    """Generate problems in a process with a fixed hash seed."""
    # Fix the hash seed: some families iterate over sets, with another order in each process.
    made = subprocess.run(
        [sys.executable, "-m", module],
        env=os.environ | {"PYTHONHASHSEED": "0"},
        input=pickle.dumps((config, split)),
        stdout=subprocess.PIPE,
        check=False,
    )
    if made.returncode or not made.stdout:
        if isinstance(config, VerifiersConfig):
            setting = "data.verifiers.environment"
            value = config.environment
        else:
            setting = "data.reasoning_gym.tasks"
            value = ", ".join(config.tasks)
        problem = f"ended the process that makes its problems, with exit code {made.returncode}"
        raise UserError(
            setting, value, problem, "Read the output of that process, and correct the cause"
        )
    rows = pickle.loads(made.stdout)
    if isinstance(rows, UserError):
        raise rows
    return rows


def _generate_problems(config: ReasoningGymConfig, split: Split) -> list[Row]:
    wanted = config.eval_problems + (config.problems if split == "train" else 0)
    # Families take turns, so every family needs its part of both splits. Draw more, because
    # questions repeat.
    each = math.ceil((config.eval_problems + config.problems) / len(config.tasks))
    seen: set[str] = set()
    streams = []
    for task, settings in config.tasks.items():
        dataset = _build_dataset(task, settings, size=2 * each + REPEATS, seed=config.seed)
        streams.append(_iter_distinct(task, settings, dataset, seen))
    rows = [next(stream) for stream in islice(cycle(streams), wanted)]
    return rows if split == "eval" else rows[config.eval_problems :]


def _iter_distinct(
    task: str,
    settings: Mapping[str, Any],
    dataset: Any,
    seen: set[str],
) -> Iterator[Row]:
    number = repeats = 0
    for number, entry in enumerate(dataset):
        if entry["question"] in seen:
            repeats += 1
            if repeats == REPEATS:
                break
            continue
        repeats = 0
        seen.add(entry["question"])
        label = None if entry["answer"] is None else str(entry["answer"])
        worked = label and f"<answer>{label}</answer>"
        extra = {"entry": entry, "settings": dict(settings)}
        source = f"{REASONING_GYM}/{task}"
        yield _make_row(
            entry["question"], label or "", worked, source, extra, "data.reasoning_gym", number
        )
    problem = f"has no more than about {number + 1} distinct problems"
    remedy = "Ask for fewer problems, name more tasks, or give it settings with more variety"
    raise UserError("data.reasoning_gym.tasks", task, problem, remedy)


def _build_dataset(task: str, settings: Mapping[str, Any], *, size: int, seed: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        remedy = f"Install it: {install_command('reasoning-gym')}"
        raise UserError(
            "data.train", REASONING_GYM, f"reasoning-gym is not installed ({error})", remedy
        ) from error
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS, 1)
        remedy = (
            f"Perhaps {near[0]!r} was meant" if near else f"Take some of its {len(DATASETS)} tasks"
        )
        raise UserError("data.reasoning_gym.tasks", task, "is no task of reasoning-gym", remedy)
    try:
        return create_dataset(task, size=size, seed=seed, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        setting = f"data.reasoning_gym.tasks.{task}"
        remedy = "Look into reasoning-gym's docs"
        raise UserError(setting, json.dumps(dict(settings)), str(error), remedy) from error


def _main() -> None:
    config, split = pickle.load(sys.stdin.buffer)
    try:
        made: list[Row] | UserError = _generate_problems(config, split)
    except UserError as error:
        made = error
    sys.stdout.buffer.write(pickle.dumps(made))


@dataclass(frozen=True, slots=True)
class Generator:
    """Generator of problems. The splits are disjoint, and functions of the settings alone."""

    check: Callable[[DataConfig], object]
    """Check of the settings; raises UserError."""
    rows: Callable[[DataConfig, Split], list[Row]]
    """Rows with the columns ``prompt``, ``label``, ``response``, ``data_source`` and
    ``extra_info``, as in verl."""


def _make_sum_rows(data: DataConfig, split: Split) -> list[Row]:
    train, held_out = make_sums(data.arithmetic)
    problems = train if split == "train" else held_out
    return [
        _make_row(
            problem.question,
            problem.label,
            problem.worked_answer,
            "arithmetic",
            {},
            "data.arithmetic",
            number,
        )
        for number, problem in enumerate(problems, 1)
    ]


def _make_row(
    question: str,
    label: str,
    response: str | None,
    source: str,
    extra: Mapping[str, Any],
    setting: str,
    number: int,
) -> Row:
    values = {
        "prompt": question,
        "label": label,
        "response": response,
        "data_source": source,
        "extra_info": extra,
    }
    return Row(values, setting, f"{source.rpartition('/')[2]}, problem {number}")


GENERATORS: Mapping[str, Generator] = {
    "arithmetic": Generator(check=lambda data: make_sums(data.arithmetic), rows=_make_sum_rows),
    REASONING_GYM: Generator(
        check=lambda data: check_tasks(data.reasoning_gym),
        rows=lambda data, split: make_problems(data.reasoning_gym, split),
    ),
    VERIFIERS: Generator(
        check=lambda data: check_environment(data.verifiers),
        rows=lambda data, split: make_environment_problems(data.verifiers, split),
    ),
}

if __name__ == "__main__":
    _main()
