"""Evaluations while a run goes on: held-out accuracy as metrics, and some answers for people to read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from megatron_dppo.config import EvalConfig
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.evaluator import Answer, EvalProblem, Evaluator, by_name
from megatron_dppo.evaluation.scores import mean, pass_at, per_problem_mean, powers_up_to
from megatron_dppo.process.files import replace_text
from megatron_dppo.rl.types import Floats


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """One answer for people to read."""

    prompt: str
    answer: str
    label: str
    correct: bool


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """The scores of the answers to the held-out problems."""

    metrics: dict[str, float]
    """``eval/…``; of several files each one's accuracy under its name, and ``eval/accuracy`` is their mean."""
    shown: tuple[ShownAnswer, ...]
    notes: tuple[str, ...]
    """Notes for the log on how scoring failed."""
    problems: Mapping[str, int] = field(default_factory=dict)
    """How many were asked, by name. The interval of an accuracy depends on it."""


def evaluate(evaluator: Evaluator, problems: Sequence[EvalProblem], config: EvalConfig) -> HeldOutScores:
    """Answer every problem. Collective. Rates are over the answers that could be scored.

    Args:
        evaluator: of the run.
        problems: held out, those of one file after those of another.
        config: says how often each is answered, and how many answers are returned for people to read.

    Raises:
        UserError: on every rank, if more than ``reward.max_failures`` of the answers could not be scored.
    """
    of_all = config.samples * len(problems)
    found = evaluator.answer(problems, keep=config.show, of_all=of_all)
    evaluator.check_failures([found.failures], of_all)
    answers = [answer for group in found.answers for answer in group]
    rewards = [answer.score.reward for answer in answers if answer.score]
    metrics = {
        "eval/unscored": float(len(answers) - len(rewards)),
        "eval/response_len/mean": sum(answer.tokens for answer in answers) / max(len(answers), 1),
    }
    accuracies = []
    indices = by_name(problems)
    for name, mine in indices.items():
        figures = _figures(name, [found.answers[i] for i in mine], found.votes[mine])
        if name:
            metrics |= {f"eval/{key}": value for key, value in figures.items()}
        else:
            metrics |= {f"eval/accuracy{key}": value for key, value in figures.items() if key.startswith("-")}
        accuracies += [figures[name]] if name in figures else []
    if accuracies:  # of nothing there is no accuracy, not even 0
        metrics["eval/accuracy"] = sum(accuracies) / len(accuracies)
        metrics["eval/reward"] = sum(rewards) / len(rewards)
    shown = [
        ShownAnswer(problem.prompt.text, group[0].text or "", problem.prompt.label_text, _is_right(group[0]) == 1.0)
        for problem, group in zip(problems[: config.show], found.answers, strict=False)
    ]
    counts = {name: len(of) for name, of in indices.items()}
    return HeldOutScores(metrics, tuple(shown), found.failures.tracebacks, counts)


def _figures(name: str, groups: Sequence[Sequence[Answer]], votes: Floats) -> dict[str, float]:
    """The metrics of one file under slime's names; without those that have no value."""
    correct = np.array([[_is_right(answer) for answer in group] for group in groups], np.float64)
    samples = correct.shape[1]
    truncated = [answer.finish_reason == "length" for group in groups for answer in group]
    figures = {name: mean(per_problem_mean(correct)), f"{name}/truncated_ratio": sum(truncated) / len(truncated)}
    if samples > 1:
        figures |= {f"{name}-pass@{k}": mean(pass_at(correct, k)) for k in powers_up_to(samples) if k > 1}
        figures[f"{name}-maj@{samples}"] = mean(votes)
    return {key: value for key, value in figures.items() if value == value}


def _is_right(answer: Answer) -> float:
    """1 or 0, and not a number where scoring failed."""
    return float("nan") if answer.score is None else float(answer.score.correct)


def record_answers(run_dir: Path, step: int, evaluation: HeldOutScores) -> None:
    """Append the shown answers to ``answers.jsonl``, in place of earlier ones of the same or a later step."""
    file = run_dir / "answers.jsonl"
    rows = [row for row in read_answers(run_dir) if row["step"] < step]
    answers = [asdict(shown) for shown in evaluation.shown]
    rows.append({"step": step, "problems": dict(evaluation.problems), "answers": answers})
    replace_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def read_answers(run_dir: Path) -> list[dict]:
    """The rows of ``answers.jsonl``, oldest first; none if there is no such file.

    Raises:
        UserError: naming the file and the line, if one is no such row.
    """
    file = run_dir / "answers.jsonl"
    if not os.path.lexists(file):
        return []
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            shown = [ShownAnswer(**answer) for answer in row["answers"]]
            if not all(isinstance(text, str) for of in shown for text in (of.prompt, of.answer, of.label)):
                raise TypeError("an answer is no text")
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"line {number} holds no answers of a run ({type(error).__name__}: {error})"
            remedy = "Fetch the file again, take that line out, or move the file away; the run goes on without them"
            raise UserError("run.dir", file, problem, remedy) from error
    return rows
