"""The report: a self-contained HTML file, without network requests or foreign scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from importlib.resources import files
from pathlib import Path, PurePath

import jinja2
from markupsafe import Markup

from megatron_dppo import __version__
from megatron_dppo.errors import UserError
from megatron_dppo.observe.console import PALETTE, SAME
from megatron_dppo.observe.metrics import compute_summary
from megatron_dppo.observe.timers import format_duration
from megatron_dppo.process.files import replace_file
from megatron_dppo.report.charts import Chart, Line, count_end_values, format_number, try_or_explain
from megatron_dppo.report.learning import (
    format_wilson_interval,
    make_learning_section,
    make_packs_section,
    make_signs_section,
)
from megatron_dppo.report.parts import Section
from megatron_dppo.report.pruning import has_pruning, make_pruning_section
from megatron_dppo.report.run import RunRecord, get_data_names, read_runs
from megatron_dppo.report.tables import (
    make_answers_section,
    make_benchmarks_section,
    make_settings_section,
)
from megatron_dppo.report.timing import (
    SpeedComparison,
    compute_ratios,
    count_device_hours,
    make_comparison,
    make_cost_section,
    make_timing_section,
)
from megatron_dppo.rl.types import Floats

MOST_ARMS = 3
"""Most arms in large figures."""


Figure = tuple[str, str, str]
"""Title, number, remark."""


def report(
    folders: Sequence[Path],
    out: Path,
    *,
    png: Path | None = None,
    price: float | None = None,
) -> None:
    """Write the page atomically, and pictures if a folder is given (``megatron-dppo report``).

    Args:
        png: folder for ``<run>-progress.png`` and ``<run>-pruning.png``.
        price: price of a GPU-hour; None: each run's ``cluster.price_per_gpu_hour``.

    Raises:
        UserError: if a folder holds no run, or the page is a folder or cannot be written.
    """
    if out.is_dir():
        raise UserError("--out", out, "is a folder", "Name a file in it, report.html perhaps")
    runs = read_runs(folders)
    text = render_page(runs, price)
    with _convert_write_errors("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(out) as partial:
            # Replace half a surrogate pair in an answer: UTF-8 has no bytes for a half.
            partial.write_text(text, encoding="utf-8", errors="replace")
    print(f"report               {out}")
    if png is not None:
        # Import here, because only pictures need matplotlib.
        from megatron_dppo.report.render import draw_pictures

        with _convert_write_errors("--png", png):
            png.mkdir(parents=True, exist_ok=True)
            for run in runs:
                draw_pictures(run, png, prefix=f"{run.name.replace('/', '-')}-", title=run.name)
        print(f"pictures             {png}")


@contextmanager
def _convert_write_errors(option: str, place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot be written: {error.strerror or error}"
        remedy = f"Name a place that you may write to: {option} /tmp/{place.name}"
        raise UserError(option, place, problem, remedy) from None


def render_page(runs: Sequence[RunRecord], price: float | None = None) -> str:
    chapters: list[tuple[str, str, Callable[[Sequence[RunRecord]], Section]]] = [
        ("learning", "Reward and accuracy", make_learning_section),
        ("time", "Where a step's time goes", make_timing_section),
        ("pruning", "What was pruned, and why", make_pruning_section),
        ("packs", "Packs, and agreement of trainer and engine", make_packs_section),
        ("signs", "Signs of health", make_signs_section),
        ("answers", "Sample answers", make_answers_section),
        ("benchmarks", "Benchmarks", make_benchmarks_section),
        ("cost", "Cost", partial(make_cost_section, price=price)),
        ("settings", "Settings", make_settings_section),
    ]
    empty = partial(Section, "", [])
    # A damaged file must not hide the other sections.
    sections = [
        (name, title, try_or_explain(partial(make, runs), empty)) for name, title, make in chapters
    ]
    outcome = try_or_explain(partial(make_comparison, runs), lambda why: None)
    measured: list[Figure] = []
    if outcome and len(outcome.arms) <= MOST_ARMS:
        measured = list(_list_measured(outcome))
    folder = files(__package__)
    text, style, script = (
        (folder / name).read_text("utf-8") for name in ("page.html", "style.css", "page.js")
    )
    # Answers and settings are untrusted text.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["drawn"] = _render_chart
    return environment.from_string(text).render(
        runs=runs,
        headlines=[
            (
                run,
                *try_or_explain(partial(_make_headline, run, outcome), lambda why: (why, "", [])),
            )
            for run in runs
        ],
        outcome=outcome,
        measured=measured,
        sections=sections,
        palette=Markup(_render_css()),
        style=Markup(style),
        script=Markup(script),
        # The page's policy permits only the script with this hash.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        now=f"{datetime.now():%Y-%m-%d %H:%M}",
    )


def _render_chart(chart: Chart) -> Markup:
    """Return a chart as SVG, or the reason why not."""
    reason_of = Markup('<p class="empty">{}</p>').format
    if chart.draw is None:
        return reason_of(chart.empty)
    try:
        from megatron_dppo.report.render import render_svg
    except ModuleNotFoundError:
        return reason_of("needs matplotlib: pip install matplotlib")
    return try_or_explain(lambda: Markup(render_svg(chart)), reason_of)


def _make_headline(
    run: RunRecord, outcome: SpeedComparison | None
) -> tuple[str, str, list[Figure]]:
    return _describe_run(run), _describe_state(run), list(_list_figures(run, outcome))


def _render_css() -> str:
    """Return CSS variables of all colours, and a class per colour."""
    variables = "".join(
        f"--{name}: light-dark({light}, {dark}); " for name, (light, dark) in PALETTE.items()
    )
    classes = "".join(
        f".{name} {{ --c: var(--{SAME.get(name, name)}); }}\n" for name in (*PALETTE, *SAME)
    )
    return f":root {{ color-scheme: light dark; {variables}}}\n{classes}"


def _describe_run(run: RunRecord) -> str:
    if not run.config:
        return "no settings are recorded"
    model = PurePath(str(run.get_setting("model.path"))).name
    data = get_data_names(run)
    window = (
        f"{run.get_setting('rollout.prompts_per_step')} prompts × "
        f"{run.get_setting('rollout.samples_per_prompt')} samples"
    )
    return (
        f"{model or 'a policy'} on {data} · {run.get_setting('loss.name')} · {window} · seed "
        f"{run.get_setting('run.seed')}"
    )


def _describe_state(run: RunRecord) -> str:
    if not run.rows:
        return "no step is recorded yet"
    step = int(run.rows[-1]["step"])
    last = int(run.get_setting("run.steps"))
    # A finished run needs no remark.
    if step >= last or not run.config:
        return ""
    # A running and a killed run differ only in the time of the last row.
    return f"not at its end: step {step:,} of {last:,}, last written {run.written:%Y-%m-%d %H:%M}"


def _list_measured(outcome: SpeedComparison) -> Iterator[Figure]:
    """Yield measured ratios to the first arm."""
    seconds_by_goal = {"a step": outcome.pace}
    if outcome.target is not None:
        seconds_by_goal[f"to {format_number(outcome.target, 'share')}"] = outcome.reached
    for goal, seconds in seconds_by_goal.items():
        for arm, _, ratio in compute_ratios(outcome.arms, seconds):
            if ratio is None:
                continue
            name = arm.first
            against = outcome.arms[0].first
            sure = f"{ratio.seeds} seeds each, paired by seed, with the 95% interval"
            sure = sure if ratio.interval else "fewer than two seeds in common, no interval"
            about = f"{name}'s time over {against}'s, {sure}; below 1: {name} is faster"
            yield f"{goal}, measured", format_number(ratio.value, "times") + ratio.brackets, about


def _list_figures(run: RunRecord, outcome: SpeedComparison | None) -> Iterator[Figure]:
    accuracy = run.get_series("eval/accuracy")[1]
    if len(accuracy):
        before_after = f"{100 * accuracy[0]:.1f} → {format_number(accuracy[-1], 'share')}"
        yield "held-out accuracy", before_after, _format_certainty(run, accuracy)
    partial = run.get_series("eval/reward")[1]
    if len(partial) and list(partial) != list(accuracy):
        before_after = f"{partial[0]:.3f} → {partial[-1]:.3f}"
        yield "held-out reward", before_after, "mean score of the same answers"
    reward = Line(run.name, run.colour, *run.get_series("rollout/raw_reward"), noisy=True)
    if len(reward.y):
        drawn = f"{format_number(reward.first, 'number')} → {format_number(reward.last, 'number')}"
        steps = "step" if (ends := count_end_values(len(reward.y))) == 1 else f"{ends} steps"
        about = f"the bold line's first and last value: means of the first and of the last {steps}"
        yield "reward", drawn, about
    if run.steps:
        found = compute_summary(run.rows)
        pace = format_duration(found["seconds_per_step"])
        evaluations = format_duration(found["phase_seconds"]["evaluation"])
        about = f"{found['steps']:,} steps of {pace}, {evaluations} of evaluations"
        yield "time", format_duration(found["seconds"]), about
        yield _describe_pruning(run, outcome)


def _format_certainty(run: RunRecord, accuracy: Floats) -> str:
    points = f"{100 * (accuracy[-1] - accuracy[0]):+.1f} points".replace("-", "−")
    if not run.held_out:
        return points
    return (
        f"{points}; {format_wilson_interval(accuracy[-1], run.held_out)}% is the 95% interval of "
        f"{run.held_out} problems"
    )


def _describe_pruning(run: RunRecord, outcome: SpeedComparison | None) -> Figure:
    prompts = run.compute_mean("prune/kept_prompt_fraction")
    tokens = run.compute_mean("prune/kept_token_fraction")
    if prompts is None or tokens is None:
        return "pruning", "–", "not recorded"
    kept = (
        f"{100 * prompts:.0f}% of the prompts rolled out, {100 * tokens:.0f}% of their tokens "
        "trained on"
    )
    if not has_pruning(run):
        return "pruning", "off", kept
    costs = count_device_hours(run)
    if outcome and costs.share > 0.0:
        pace = outcome.pace
        slower = [name for name in outcome.unpruned if pace[name] < pace[run.name]]
        if slower:
            kept += (
                f"; measured, steps of {', '.join(slower)} without pruning were faster: other "
                "processes on the machine, or settings other than pruning, outweigh the estimate"
            )
    steps = f"{100 * costs.share:.0f}% at equal steps"
    if (saved := costs.share_at_equal_noise) is None:
        return "saved by pruning, estimated", steps, f"of the time; {kept}"
    noise = f"{100 * saved:.0f}% at equal noise".replace("-", "−")
    return "saved by pruning, estimated", noise, f"of the time, {steps}; {kept}"
