"""The first lines of the page: each run's accuracy, reward, time and saving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from megatron_dppo.report.axes import duration, say
from megatron_dppo.report.cost import spent
from megatron_dppo.report.learning import wilson
from megatron_dppo.report.pruning import prunes
from megatron_dppo.report.run import Run
from megatron_dppo.rl.types import Floats


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, large, with what it is and what stands beside it."""

    title: str
    value: str
    about: str


@dataclass(frozen=True, slots=True)
class Headline:
    """Of one run."""

    run: Run
    what: str
    """What was run."""
    state: str
    """How far it is, if not at its end."""
    figures: Sequence[Figure]


def headline(run: Run) -> Headline:
    """Accuracy before and after, reward, time, and what pruning saved."""
    return Headline(run, _what(run), _state(run), list(_figures(run)))


def _what(run: Run) -> str:
    """The run in one line."""
    if not run.config:
        return "no settings are recorded"
    model, data = (PurePath(str(run.setting(key))).name for key in ("model.path", "data.train"))
    window = f"{run.setting('rollout.prompts_per_step')} prompts × {run.setting('rollout.samples_per_prompt')} samples"
    return f"{model or 'a policy'} on {data} · {run.setting('loss.name')} · {window} · seed {run.setting('run.seed')}"


def _state(run: Run) -> str:
    """Empty for a finished run. A run that goes on and one that was killed differ only in when they last wrote."""
    if not run.rows:
        return "no step is recorded yet"
    step, last = int(run.rows[-1]["step"]), int(run.setting("run.steps"))
    if step >= last or not run.config:
        return ""
    return f"not at its end: step {step:,} of {last:,}, last written {run.written:%Y-%m-%d %H:%M}"


def _figures(run: Run) -> Iterator[Figure]:
    accuracy = run.series("eval/accuracy")[1]
    if len(accuracy):
        before_after = f"{100 * accuracy[0]:.1f} → {say(accuracy[-1], 'share')}"
        yield Figure("held-out accuracy", before_after, _how_sure(run, accuracy))
    reward = run.series("rollout/raw_reward")[1]
    if len(reward):
        end = max(1, len(reward) // 10)
        about = f"mean of the first and of the last {end} step{'s' if end > 1 else ''}"
        yield Figure("reward", f"{reward[:end].mean():.2f} → {reward[-end:].mean():.2f}", about)
    if run.steps:
        seconds = [row["perf/step_time"] for row in run.steps]
        evaluations = sum(row.get("perf/eval_time", 0.0) for row in run.rows)
        mean = duration(sum(seconds) / len(seconds))
        about = f"{len(seconds):,} steps of {mean}, {duration(evaluations)} of evaluations"
        yield Figure("time", duration(sum(seconds) + evaluations), about)
        yield _pruning(run)


def _how_sure(run: Run, accuracy: Floats) -> str:
    points = f"{100 * (accuracy[-1] - accuracy[0]):+.1f} points".replace("-", "−")
    if not run.held_out:
        return points
    low, high = wilson(accuracy[-1], run.held_out)
    return f"{points}; {100 * low:.1f}–{100 * high:.1f}% is the 95% interval of {run.held_out} problems"


def _pruning(run: Run) -> Figure:
    prompts, tokens = run.mean("prune/kept_prompt_fraction"), run.mean("prune/kept_token_fraction")
    if prompts is None or tokens is None:
        return Figure("pruning", "–", "not recorded")
    kept = f"{100 * prompts:.0f}% of the prompts rolled out, {100 * tokens:.0f}% of their tokens trained on"
    if not prunes(run):
        return Figure("pruning", "off", kept)
    return Figure("saved by pruning, estimated", f"{100 * spent(run).share:.0f}% of the time", kept)
