"""What was pruned and why, and the noise that it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dppo.report.parts import Part, Plots, Section
from megatron_dppo.report.plot import Layer, Line, cell_plot, line_plot, stack_plot
from megatron_dppo.report.reading import Run
from megatron_dppo.report.shapes import Key, Plot
from megatron_dppo.rl.pruning.completion_rules import COMPLETION_RULES
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES
from megatron_dppo.rl.pruning.sampling import Rule
from megatron_dppo.rl.types import Floats

RULES: Mapping[str, Mapping[str, Rule[Any]]] = {"prompts": PROMPT_RULES, "completions": COMPLETION_RULES}
CHANCES = ("never", "25%", "50%", "75%", "always")


def pruned(runs: Sequence[Run]) -> Section:
    """The runs' kept shares and noise beside each other; then each run's answers, by what decided over them."""
    lead = (
        "An answer can teach something where its group's rewards differ. Of those, an unbiased rule keeps each with a "
        "known probability, and weights what it keeps so that the gradient stays right in the mean."
    )
    parts: list[Part] = []
    measured = [run for run in runs if run.mean("prune/kept_token_fraction") is not None]
    if measured:
        noise = [_inflation(measured)] if len(measured) > 1 else []  # of one run its parts are drawn below
        parts.append(Plots([_prompts(measured), _tokens(measured), *noise]))
    for run in measured:
        plots = [_step_tokens(run), *_answers(run), *_noise(run)]
        parts.append(Plots([plot for plot in plots if not plot.empty], run.name, _rules(run)))
    return Section("pruning", "What was pruned, and why", lead, parts, "No step of these runs says what was kept.")


def prunes(run: Run) -> bool:
    """Whether any rule was on."""
    return any(run.setting(f"pruning.{level}.rule") != "none" for level in RULES)


def _rules(run: Run) -> str:
    """What was on, and of a biased rule why it is."""
    words = []
    for level, known in RULES.items():
        rule, keep = run.setting(f"pruning.{level}.rule"), run.setting(f"pruning.{level}.keep")
        why = known[rule].biased if rule in known else ""
        biased = f", biased: {why}" if why else ""
        words.append(f"{level} by {rule} (keep {keep}){biased}" if rule != "none" else f"{level} not pruned")
    text = "; ".join(words)
    return f"{text[0].upper()}{text[1:]}."


def _prompts(runs: Sequence[Run]) -> Plot:
    return _shares("Prompts rolled out", "share of a step's candidates", "prune/kept_prompt_fraction", runs)


def _tokens(runs: Sequence[Run]) -> Plot:
    return _shares("Tokens trained on", "share of those rolled out", "prune/kept_token_fraction", runs)


def _shares(title: str, about: str, key: str, runs: Sequence[Run]) -> Plot:
    lines = [Line(run.name, run.css, *run.series(key), noisy=True) for run in runs]
    return line_plot(title, about, lines, form="share", low=0.0, high=1.02)


def _inflation(runs: Sequence[Run]) -> Plot:
    lines = [Line(run.name, run.css, *run.series("prune/variance_inflation"), noisy=True) for run in runs]
    about = "the gradient's variance over the full batch's, estimated"
    return line_plot(
        "Noise that pruning adds", about, lines, form="times", low=1.0, empty="not estimated: biased rules"
    )


def _step_tokens(run: Run) -> Plot:
    """Prompt and response tokens, by what became of them."""
    unseen = {row["step"]: row.get("prune/saved_tokens_prompts", 0.0) for row in run.rows}
    steps = np.array([row["step"] for row in run.census], dtype=np.float64)
    counted = np.array(
        [[*(row[what][1] for what in ("kept", "pruned", "idle")), unseen.get(row["step"], 0.0)] for row in run.census],
        dtype=np.float64,
    ).reshape(-1, 4)
    names = ("trained on", "pruned", "nothing to teach", "not rolled out")
    shares = counted.sum(axis=0) / max(counted.sum(), 1.0)
    layers = [
        Layer(name, f"fate{i}", counted[:, i], f"{100 * share:.0f}%")
        for i, (name, share) in enumerate(zip(names, shares, strict=True))
        if share > 0.0
    ]
    about = "by what became of them; those not rolled out are estimated"
    return stack_plot("Tokens of a step", about, steps, layers, form="count", empty="no pruning")


def _noise(run: Run) -> list[Plot]:
    """Variance over the full batch's, by where it comes from."""
    rows = [row for row in run.rows if "prune/noise_share_prompts" in row]
    if not rows or not prunes(run):
        return []
    shares = np.array([[row[f"prune/noise_share_{level}"] for level in ("prompts", "completions")] for row in rows]).T
    sampling = np.maximum(1.0 - shares.sum(axis=0), 1e-9)
    parts = (("sampling", np.ones(len(rows)), sampling), ("prompts pruned", shares[0] / sampling, shares[0]),
             ("completions pruned", shares[1] / sampling, shares[1]))  # fmt: skip
    layers = [
        Layer(name, f"noise{i}", values, f"{100 * share.mean():.0f}%") for i, (name, values, share) in enumerate(parts)
    ]
    steps = np.array([row["step"] for row in rows], dtype=np.float64)
    about = "variance over the full batch's, as estimated for independent draws"
    return [stack_plot("Noise of the gradient", about, steps, layers, form="times")]


def _answers(run: Run) -> list[Plot]:
    """Who is trained on: by the answer's group, and by its length and score."""
    binary = all(row["binary"] for row in run.census)
    groups, causes = _cells(run, "by_group" if binary else "by_reward"), _cells(run, "by_cause")
    if not (groups[:, 3] < 1.0).any():
        return []
    words = ("right", "wrong") if binary else ("above the mean", "below the mean")
    lines = [
        Line(name, css, *groups[groups[:, 1] == side][:, [0, 3]].T)
        for side, css, name in ((1.0, "good", words[0]), (-1.0, "bad", words[1]))
    ]
    x_label = "accuracy of the answer's group" if binary else "reward, in deviations from the group's mean"
    return [
        line_plot(
            "Which answers are trained on", "probability, over all steps", lines, x_label=x_label,
            x_form="share" if binary else "number", form="share", low=0.0, high=1.02,
        ),
        _why(causes),
    ]  # fmt: skip


def _why(cells: Floats) -> Plot:
    """Cells of length and score: the colour tells the probability, the strength how many answers are there."""
    x, y, count, chance = cells.T
    wide, tall = (min(np.diff(np.unique(values)).min(initial=np.inf), 1.0) / 2 for values in (x, y))
    left, right, bottom, top = x.min() - wide, x.max() + wide, y.min() - tall, y.max() + tall
    sides = tuple(
        (values - low) / (high - low)
        for values, low, high in (
            (x - wide, left, right), (x + wide, left, right), (y - tall, bottom, top), (y + tall, bottom, top),
        )
    )  # fmt: skip
    colours = np.round(4 * np.clip(chance, 0.0, 1.0)).astype(int)
    strength = 0.25 + 0.75 * np.sqrt(count / count.max())
    powers = range(int(np.ceil(left)), int(np.floor(right)) + 1, 1 + int((right - left) // 7))
    octaves = [power for power in range(-4, 5, 2) if bottom < power < top]
    return cell_plot(
        "… and why",
        "score over the step's median, by length; stronger: more answers",
        (sides[0], sides[1], sides[2], sides[3]),
        [(f"chance{colour}", float(opacity)) for colour, opacity in zip(colours, strength, strict=True)],
        x_label="tokens of the response",
        x_ticks=[((power - left) / (right - left), f"{2**power:,}" if power >= 0 else "") for power in powers],
        y_ticks=[((p - bottom) / (top - bottom), f"{2**p}×" if p >= 0 else f"1/{2**-p}") for p in octaves],
        key=[Key(f"chance{i}", word) for i, word in enumerate(CHANCES)],
    )


def _cells(run: Run, table: str) -> Floats:
    """[cells, 4]: two coordinates, answers of all steps, their mean probability of being kept; ascending."""
    total: dict[tuple[float, float], Floats] = {}
    for row in run.census:
        for x, y, count, inclusion, _ in row[table]:
            total[x, y] = total.get((x, y), np.zeros(2)) + np.array([count, inclusion])
    rows = [(x, y, count, inclusion / count) for (x, y), (count, inclusion) in sorted(total.items())]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)
