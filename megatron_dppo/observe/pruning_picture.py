"""One picture of what pruning did: which completions are trained on and why, and what that costs and saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.ticker import FixedLocator, FuncFormatter, PercentFormatter

from megatron_dppo.observe import panels
from megatron_dppo.observe.panels import BLUE, GREEN, ORANGE, Rows

Census = Sequence[Mapping[str, Any]]

RED = "#c8553d"
SAMPLING, TRAINED, IDLE = "#cfd6dc", "#4a6076", "#f0d3b8"
CHANCE = LinearSegmentedColormap.from_list("chance", [ORANGE, "#dcd6cd", TRAINED])
UNPRUNED = "every answer that could teach something was trained on"


def draw_pruning(metrics: Rows, census: Census, out: Path, *, title: str = "") -> None:
    """Draw who is trained on, by the answer's group and by its length and score; the noise; and the tokens.

    Args:
        metrics: rows of ``metrics.jsonl``.
        census: rows of ``pruning.jsonl``. A panel that has nothing to show, as of a run without pruning, says so.
        out: a PNG file, 1,760 pixels wide; replaced in one piece.
        title: a line above the panels.
    """
    with panels.picture(out, height=7.2, title=title) as ((answers, causes), (noise, tokens)):
        _draw_answers(answers, census)
        _draw_causes(causes, census)
        _draw_noise(noise, metrics)
        _draw_tokens(tokens, metrics, census)
        for panel in (noise, tokens):
            panels.finish(panel, metrics)
            panel.set_xlabel("step", loc="right")


def _draw_answers(panel: Axes, census: Census) -> None:
    binary = all(row["binary"] for row in census)
    panels.title(panel, "Which answers are trained on", "probability, over all steps; area: how many")
    cells = _cells(census, "by_group" if binary else "by_reward")
    if not _pruned(cells):
        return panels.nothing(panel, UNPRUNED if len(cells) else "no answer could teach anything")
    panel.set_xlabel("their group's accuracy" if binary else "reward, in deviations from the group's mean", loc="right")
    panel.set_ylim(0, 1.16)
    panel.set_yticks(np.linspace(0, 1, 5))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    words = ("right answers", "wrong answers") if binary else ("above the mean", "below the mean")
    for side, colour, label in ((1.0, GREEN, words[0]), (-1.0, RED, words[1])):
        x, _, count, chance = cells[cells[:, 1] == side].T
        panel.plot(x, chance, color=colour, linewidth=2.0, zorder=2)
        panel.scatter(x, chance, s=16 + 160 * count / cells[:, 2].max(), color=colour, edgecolor="white", zorder=3)
        if len(x):
            # Right answers are rare, and kept, on the left; wrong ones on the right.
            end, align = (0, "left") if (side > 0) == binary else (-1, "right")
            panels.note(panel, x[end], chance[end], label, colour, (0, 15), align)
    if binary:
        panel.set_xlim(-0.02, 1.02)
        panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    else:
        reach = 1.1 * np.abs(cells[:, 0]).max()
        panel.set_xlim(-reach, reach)


def _draw_causes(panel: Axes, census: Census) -> None:
    panels.title(panel, "… and why", "score over the step's median, by length")
    cells = _cells(census, "by_cause")
    if not _pruned(cells):
        return panels.nothing(panel, UNPRUNED if len(cells) else "no answer could teach anything")
    panel.set_xlabel("tokens of the response", loc="right")
    x, y, count, chance = cells.T
    order = np.argsort(-count)
    largest = min(180.0, (400.0 / len(np.unique(x))) ** 2)  # neighbours may touch, and not hide each other
    panel.scatter(
        x[order], y[order], s=(largest * count / count.max() + 5)[order], c=chance[order], cmap=CHANCE, vmin=0, vmax=1,
        edgecolor="white", linewidth=0.5,
    )  # fmt: skip
    panel.set_xlim(x.min() - 0.3, x.max() + 0.3)
    panel.set_ylim(y.min() - 0.7, y.max() + 2.6)  # the key wants room
    shortest, longest = int(np.floor(x.min())), int(np.ceil(x.max()))
    panel.xaxis.set_major_locator(FixedLocator(list(range(shortest, longest + 1, 1 + (longest - shortest) // 8))))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda power, _: f"{2**power:,.0f}"))
    panel.yaxis.set_major_locator(FixedLocator(list(range(-4, 5, 2))))
    panel.yaxis.set_major_formatter(
        FuncFormatter(lambda power, _: f"{2**power:g}×" if power >= 0 else f"1/{2**-power:g}")
    )
    words = ("never", "25%", "50%", "75%", "always")
    panels.key(panel, [(word, to_hex(CHANCE(i / 4))) for i, word in enumerate(words)], columns=5)


def _draw_noise(panel: Axes, metrics: Rows) -> None:
    panels.title(panel, "Noise of the gradient", "variance, as estimated for independent draws")
    rows = [row for row in metrics if "prune/noise_share_prompts" in row]
    if not rows:
        pruned = any("prune/kept_token_fraction" in row for row in metrics)
        return panels.nothing(panel, "not estimated: the rule is biased" if pruned else "no pruning")
    shares = np.array([[row["prune/noise_share_prompts"], row["prune/noise_share_completions"]] for row in rows]).T
    sampling = 1.0 - shares.sum(axis=0)
    prompts, completions = shares / sampling
    layers = [(np.ones(len(rows)), SAMPLING), (prompts, BLUE), (completions, ORANGE)]
    ends = panels.stack(panel, np.array([row["step"] for row in rows], float), layers)
    panel.set_ylim(0, 1.32 * panels.usual_top(ends))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    named = (
        (sampling, "sampling", SAMPLING),
        (shares[0], "prompts", BLUE),
        (shares[1], "completions", ORANGE),
    )
    panels.key(panel, [(f"{word} {100 * share.mean():.0f}%", colour) for share, word, colour in named], columns=3)


def _draw_tokens(panel: Axes, metrics: Rows, census: Census) -> None:
    panels.title(panel, "Tokens of a step", "prompt and response; not rolled out: estimated")
    unseen = {row["step"]: row.get("prune/saved_tokens_prompts", 0.0) for row in metrics}
    if not census:
        return panels.nothing(panel, "no pruning")
    counted = np.array(
        [[*(row[what][1] for what in ("kept", "pruned", "idle")), unseen.get(row["step"], 0.0)] for row in census],
        float,
    ).T
    words = ("trained on", "pruned", "nothing to teach", "not rolled out")
    colours = (TRAINED, ORANGE, IDLE, BLUE)
    steps = np.array([row["step"] for row in census], float)
    ends = panels.stack(panel, steps, list(zip(counted, colours, strict=True)))
    panel.set_ylim(0, 1.4 * max(panels.usual_top(ends), 1.0))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    shares = counted.sum(axis=1) / max(counted.sum(), 1.0)
    named = [(f"{word} {100 * share:.0f}%", colour) for word, share, colour in zip(words, shares, colours, strict=True)]
    panels.key(panel, named, columns=2)


def _cells(census: Census, table: str) -> np.ndarray:
    """[cells, 4]: two coordinates, completions of all steps, their mean inclusion probability; ascending."""
    total: dict[tuple[float, float], np.ndarray] = {}
    for row in census:
        for x, y, count, inclusion, _ in row[table]:
            total[x, y] = total.get((x, y), np.zeros(2)) + np.array([count, inclusion])
    rows = [(x, y, count, inclusion / count) for (x, y), (count, inclusion) in sorted(total.items())]
    return np.array(rows).reshape(-1, 4)


def _pruned(cells: np.ndarray) -> bool:
    return bool((cells[:, 3] < 1.0).any())
