"""Held-out accuracy by greedy decoding, shared out over all ranks; pruning history and data order stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.collect import Collector


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer for people to read."""

    prompt: str
    answer: str
    label: str
    correct: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What greedy answers to the held-out problems were worth."""

    metrics: dict[str, float]
    """``eval/…``; of several files each one's accuracy under its name, and ``eval/accuracy`` is their mean."""
    shown: tuple[Shown, ...]
    notes: tuple[str, ...]
    """What the log must say in words: how scoring failed."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank tells the others of its share."""

    asked: tuple[int, ...]
    """Problems by file, in their order; so are the correct and the unscored ones."""
    correct: tuple[int, ...]
    unscored: tuple[int, ...]
    reward: float
    tokens: int
    timeouts: int
    errors: int
    tracebacks: tuple[str, ...]
    shown: tuple[Shown, ...]


def evaluate(world: World, collector: Collector, held_out: Mapping[str, Sequence[Prompt]], *, show: int) -> Evaluation:
    """Answer every prompt once, greedily. Collective. Rates are over the answers that could be scored.

    Args:
        world, collector: of the run.
        held_out: the problems of each file, by its name.
        show: answers to return for people to read.

    Raises:
        UserError: on every rank, if more than ``reward.max_failures`` of the answers could not be scored.
    """
    prompts = [(i, prompt) for i, of_file in enumerate(held_out.values()) for prompt in of_file]
    parts = world.gather(_share(world, collector, prompts, len(held_out), show))
    collector.check_failures(parts, len(prompts))
    unscored, correct, asked = (
        [sum(of_rank) for of_rank in zip(*(getattr(part, field) for part in parts), strict=True)]
        for field in ("unscored", "correct", "asked")
    )
    metrics = {
        "eval/unscored": float(sum(unscored)),
        "eval/response_len/mean": sum(part.tokens for part in parts) / max(len(prompts), 1),
    }
    scored = [all_of - lost for all_of, lost in zip(asked, unscored, strict=True)]
    # Of nothing there is no accuracy, not even 0.
    accuracy = {name: right / n for name, right, n in zip(held_out, correct, scored, strict=True) if n}
    metrics |= {f"eval/{name}": value for name, value in accuracy.items() if name}
    if accuracy:
        metrics["eval/accuracy"] = sum(accuracy.values()) / len(accuracy)
        metrics["eval/reward"] = sum(part.reward for part in parts) / sum(scored)
    in_turn = [part.shown[i] for i in range(show) for part in parts if i < len(part.shown)]
    notes = dict.fromkeys(text for part in parts for text in part.tracebacks)
    return Evaluation(metrics, tuple(in_turn[:show]), tuple(notes))


def _share(world: World, collector: Collector, prompts: Sequence[tuple[int, Prompt]], files: int, show: int) -> _Part:
    mine = prompts[world.rank :: world.size]
    asked = collector.ask([prompt for _, prompt in mine], samples=1, temperature=0.0, seed=0)
    answers = collector.answers(asked, of_all=len(prompts))
    scores = [group[0] for group in answers.scores]
    shown = [
        Shown(prompt.text, texts[0], prompt.label, bool(score and score.correct))
        for prompt, texts, score in zip(answers.prompts, answers.texts, scores, strict=True)
    ]
    of_file = [[score for (i, _), score in zip(mine, scores, strict=True) if i == file] for file in range(files)]
    return _Part(
        asked=tuple(len(found) for found in of_file),
        correct=tuple(sum(score.correct for score in found if score is not None) for found in of_file),
        unscored=tuple(sum(score is None for score in found) for found in of_file),
        reward=sum(score.reward for score in scores if score is not None),
        tokens=sum(len(group[0].token_ids) for group in answers.completions),
        timeouts=answers.timeouts,
        errors=answers.errors,
        tracebacks=answers.tracebacks,
        shown=tuple(shown[:show]),
    )


def record_answers(run_dir: Path, step: int, evaluation: Evaluation) -> None:
    """Append the shown answers to ``answers.jsonl``, in place of earlier ones of the same or a later step."""
    file = run_dir / "answers.jsonl"
    rows = [row for row in read_answers(run_dir) if row["step"] < step]
    rows.append({"step": step, "answers": [asdict(shown) for shown in evaluation.shown]})
    partial = file.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(file)


def read_answers(run_dir: Path) -> list[dict]:
    """The rows of ``answers.jsonl``, oldest first; none if there is no such file."""
    file = run_dir / "answers.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
