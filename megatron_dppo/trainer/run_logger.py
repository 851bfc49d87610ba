"""Output of rank 0: console, metrics, answers, summary, pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from inspect import iscoroutinefunction
from math import lcm
from pathlib import Path
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.config.exclusions import find_idle_keys
from megatron_dppo.data.tokenizer import strip_chat_marks
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.evaluator import EvalScores, ExampleAnswer
from megatron_dppo.observe.console import Console, CutOffGate, LengthGate
from megatron_dppo.observe.metrics import (
    MetricsLog,
    StepLog,
    print_summary,
    read_metrics,
    read_summary,
    write_summary,
)
from megatron_dppo.observe.timers import saved_seconds
from megatron_dppo.parallel.world import World
from megatron_dppo.process.files import replace_text
from megatron_dppo.rewards.functions import resolve
from megatron_dppo.rl.census import PruningStats
from megatron_dppo.rl.pruning.draw import describe_bound
from megatron_dppo.rl.types import StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts
from megatron_dppo.settings import HISTORY, IN_FORCE, describe_renamed, get_settings
from megatron_dppo.trainer.collapse import BestCheckpoint
from megatron_dppo.trainer.fingerprints import list_functions_without_text
from megatron_dppo.trainer.learner import describe_weight_bound
from megatron_dppo.trainer.resume import (
    find_changes_since,
    flatten_config,
    list_renamed,
    read_history,
    record_settings,
)

WIDEST = 100
"""Characters of an answer on the console, from its end, because the end has the result."""

CENSUS = "pruning.jsonl"
"""File of the pruning statistics, which depend only on the settings and the random seed."""

NO_GRADIENT = (
    "the gradient of a step is exactly 0 although its plan kept completions: either all their "
    "tokens are clipped or masked (train/pg_clipfrac, train/tis_clipfrac), or the loss has no "
    "gradient"
)


class RunLogger:
    """Collect a row of metrics from the phases of each step, and write it after the step."""

    def __init__(self, config: Config, world: World, *, step: int, dropped_prompts: int) -> None:
        self._folder = Path(config.run.dir)
        self._held = {
            "perf/ranks": world.size,
            "perf/gpus": world.size if world.device.type == "cuda" else 0,
        }
        self._row: dict[str, float] = {}
        self._census: PruningStats | None = None
        self._log: MetricsLog | None = None
        self._leads = world.is_rank0
        if not self._leads:
            return
        self._console = Console(config.run.steps)
        history = read_history(self._folder)
        if step and (renamed := list_renamed(history)):
            self._console.print_note(describe_renamed(IN_FORCE, renamed))
        for change in find_changes_since(self._folder, step, config):
            self._console.print_note(f"changed since step {step}: {change}")
        if step >= config.run.steps:
            done = (
                f"{step} steps are done, and run.steps = {config.run.steps}: nothing is left to "
                "train"
            )
            self._console.print_note(f"{done}; to resume, raise run.steps")
            return
        if step and not history:
            self._console.print_note(
                f"{HISTORY} cannot be read: changes of settings since step {step} are unknown"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        record_settings(self._folder, step, config)
        self._log = MetricsLog(
            self._folder,
            resume_step=step,
            loggers=config.run.loggers,
            settings=flatten_config(config),
            log=self._console.print_note,
        )
        self._pruning = StepLog(self._folder / CENSUS, resume_step=step)
        self._gate = LengthGate(config.run.length_gate)
        self._cut_off = CutOffGate()
        # The gate compares with earlier steps.
        for row in read_metrics(self._folder):
            self._gate.check(row["step"], row)
        # An unreadable file is an error now, rather than at the next evaluation.
        read_answers(self._folder)
        if step:
            self._console.print_note(f"resuming after step {step}")
        for note in (*_describe_bias(config), describe_bound(config.pruning)):
            if note:
                self._console.print_note(note)
        if idle := find_idle_settings(config):
            self._console.print_note(f"without effect in this run: {', '.join(idle)}")
        if unknown := list_functions_without_text(config):
            self._console.print_note(
                "a resume does not notice changes of functions without source: "
                f"{', '.join(unknown)}"
            )
        if dropped_prompts:
            self._console.print_note(
                f"{dropped_prompts} prompts are dropped, because they are longer than "
                "data.max_prompt_tokens"
            )

    def add(self, metrics: dict[str, float]) -> None:
        self._row |= metrics

    def record(
        self,
        rollouts: CompleteRollouts,
        plan: StepPlan,
        metrics: dict[str, float],
        notes: Sequence[str] = (),
    ) -> None:
        """Add the metrics of a step's phases, and print the notes, each once per run."""
        self._row |= rollouts.metrics | dict(plan.metrics) | metrics
        self._row |= saved_seconds(self._row)
        self._census = plan.census
        if metrics.get("train/grad_norm") == 0.0:
            notes = (*notes, NO_GRADIENT)
        for note in (*rollouts.notes, *plan.notes, *notes) if self._log else ():
            self._console.print_note(note)

    def add_evaluation(self, step: int, evaluation: EvalScores, seconds: dict[str, float]) -> None:
        self._row |= evaluation.metrics | seconds
        if self._log:
            try:
                record_answers(self._folder, step, evaluation)
            # The file may have been damaged since the beginning of the run.
            except UserError as error:
                self._console.print_note(
                    f"the sample answers of step {step} were not kept: {error}"
                )
            for note in evaluation.notes:
                self._console.print_note(note)

    def write(self, step: int) -> None:
        """Write the row of ``step``, and start the next."""
        if self._log:
            self._log.write(step, self._row | self._held)
            self._console.print_step(step, self._row)
            if self._census:
                self._pruning.write(step, self._census.to_dict())
            if warning := self._gate.check(step, self._row):
                self._console.print_note(warning, repeat=True)
            if note := self._cut_off.check(self._row):
                self._console.print_note(note)
        self._row = {}
        self._census = None

    def close(self) -> None:
        """Flush loggers that send rows late, when a run ends before the last step."""
        if self._log:
            self._log.close(finished=False)
            self._pruning.close()

    def finish(self, best: BestCheckpoint | None = None) -> None:
        """Draw the pictures, write and print the summary, and name the best checkpoint if the last
        is worse."""
        if not self._leads:
            return
        if self._log:
            self._log.close()
            self._pruning.close()
        # Without a step, the existing summary is printed.
        elif (summary := read_summary(self._folder)) is not None:
            self._run_report(
                "the summary", lambda: print_summary(self._folder, summary, self._console)
            )
            return
        self._run_report("the pictures", self._render_pictures)
        self._run_report("the sample answers", self._print_answers)
        self._run_report(
            "the summary",
            lambda: print_summary(self._folder, write_summary(self._folder), self._console),
        )
        if best:
            self._run_report("the best checkpoint", partial(self._print_best, best))

    def _run_report(self, name: str, report: Callable[[], object]) -> None:
        """Run a report after the last step."""
        try:
            report()
        # A failure, for example because of a damaged file, becomes a note.
        except Exception as error:
            self._console.print_note(
                f"{name} could not be made ({type(error).__name__}: {error}); the run is complete"
            )

    def _render_pictures(self) -> None:
        # matplotlib is slow to import.
        from megatron_dppo.report.render import draw_pictures
        from megatron_dppo.report.run import read_run

        draw_pictures(run := read_run(self._folder, self._folder.name), self._folder)
        for words in run.left_out:
            self._console.print_note(words)

    def _print_answers(self) -> None:
        if answers := _format_answers(read_answers(self._folder)):
            self._console.print_banner(answers)

    def _print_best(self, best: BestCheckpoint) -> None:
        rows = [row for row in read_metrics(self._folder) if "eval/accuracy" in row]
        if rows and rows[-1]["eval/accuracy"] < best.accuracy:
            self._console.print_note(
                f"{best}: its checkpoint is kept in {self._folder / 'checkpoints'}"
            )


def _describe_bias(config: Config) -> Iterator[str]:
    """Describe biases of the gradient from tokens that this policy has not generated."""
    level = config.loss.tis_level
    bound = describe_weight_bound(config)
    others = {"token": "before", "prefix": "after"}.get(level)
    before = f", and no weight corrects for the tokens {others} it" if others else ""
    weight = f"the ratio of its {level}'s probabilities now and at generation, {bound}"
    if ahead := config.rollout.ahead:
        yield (
            f"rollout.ahead = {ahead}: tokens may be {ahead} updates old. Each counts by "
            f"{weight}. This is biased: tokens whose probability has grown beyond the bound count "
            f"too little{before}"
        )
    if config.data.rollouts:
        yield (
            f"data.rollouts: tokens are another policy's. Each counts by {weight}. This is "
            "biased: by the bound, by contexts of another policy, and by advantages within another "
            "policy's groups"
        )


def _format_answers(rows: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for before, after in zip(rows[0]["answers"], rows[-1]["answers"], strict=False) if rows else ():
        lines.append(f"{_format_line(before['prompt'])}  (answer: {_format_line(before['label'])})")
        for when, answer in (("before", before), ("after", after)):
            verdict = "right" if answer["correct"] else "wrong"
            lines.append(f"  {when:<6} {verdict}  {_format_line(answer['answer'])}")
    return lines


def _format_line(text: str) -> str:
    joined = " ⏎ ".join(strip_chat_marks(text).splitlines())
    return joined if len(joined) <= WIDEST else f"…{joined[1 - WIDEST :]}"


def find_idle_settings(config: Config) -> list[str]:
    """Return the changed settings that no part of ``train`` reads."""
    values = dict(config.iter_settings())
    idle = find_idle_keys(config)
    changed = [key for key, setting in get_settings().items() if values[key] != setting.default]
    found = [key for key in changed if key.startswith(idle) and not key.endswith(".rule")]
    if "reward.concurrency" in changed and not iscoroutinefunction(resolve(config.reward.spec)):
        found.append("reward.concurrency")
    return found + (["run.keep_best"] if _is_best_unsaved(config) else [])


def _is_best_unsaved(config: Config) -> bool:
    """Return whether checkpoints and evaluations are never made at the same step before the
    last."""
    run = config.run
    every = config.eval.every
    if not run.keep_best or not 0 < run.checkpoint_every < run.steps or not 0 < every < run.steps:
        return False
    # The first step with both is the least common multiple of the intervals.
    return lcm(run.checkpoint_every, every) >= run.steps


def record_answers(run_dir: Path, step: int, evaluation: EvalScores) -> None:
    """Append the shown answers to ``answers.jsonl``."""
    file = run_dir / "answers.jsonl"
    # Rows of the same or a later step are from before a resume.
    rows = [row for row in read_answers(run_dir) if row["step"] < step]
    answers = [asdict(shown) for shown in evaluation.shown]
    rows.append({"step": step, "problems": dict(evaluation.problems), "answers": answers})
    replace_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def read_answers(run_dir: Path) -> list[dict]:
    """Return the rows of ``answers.jsonl``, oldest first.

    Raises:
        UserError: naming file and line of an invalid row.
    """
    file = run_dir / "answers.jsonl"
    if not os.path.lexists(file):
        return []
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            shown = [ExampleAnswer(**answer) for answer in row["answers"]]
            texts = [text for each in shown for text in (each.prompt, each.answer, each.label)]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("an answer is no text")
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"line {number} holds no answers of a run ({type(error).__name__}: {error})"
            remedy = (
                "Copy the file again, remove that line, or move the file away; the run can "
                "resume without it"
            )
            raise UserError("run.dir", file, problem, remedy) from error
    return rows
