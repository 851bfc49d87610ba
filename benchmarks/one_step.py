"""Draws one real step: its prompts, their completions, what pruning kept with which weight, and the packs.

    python benchmarks/one_step.py [--policy runs/quickstart/warm] [--out docs/one_step.png] [--step 12] [--json]

The quickstart trains with 16 prompts a step up to the step that is drawn. What is drawn is the step's plan, which is
what it trains on: nothing is made up or chosen for the picture. The JSON line has the picture's numbers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from training_stages import alone

from megatron_dppo.observe.palette import colour_of
from megatron_dppo.parallel.world import initialize
from megatron_dppo.report.pictures import STYLE
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import MinibatchPlan, StepMetadata
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer

SETTINGS = ("layout.tp=1", "rollout.prompts_per_step=16", "pack.max_tokens=384", "eval.every=0", "run.export=false")
GAP, HEIGHT = 3, 0.72


def one_step(policy: Path, step: int) -> tuple[StepMetadata, MinibatchPlan, int]:
    """Train up to a step, and give what was rolled out in it, its plan, and how many prompts were considered."""
    with tempfile.TemporaryDirectory() as folder, alone(), ExitStack() as to_close:
        words = [*SETTINGS, f"model.path={policy}", f"run.dir={folder}/run", f"run.steps={step + 1}"]
        config = load_config("configs/quickstart.yaml", words)
        world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
        workers = RewardWorkers(config.reward.function, workers=1, timeout_s=config.reward.timeout_s)
        trainer = Trainer(config, world, to_close.enter_context(closing(workers)), to_close)
        trainer.sync(0)
        while True:
            selection = trainer.select(trainer.step)
            rollouts = trainer.roll_out(selection)
            plan = trainer.plan(rollouts)
            if trainer.step == step:
                [minibatch] = plan.minibatches
                return rollouts.metadata, minibatch, selection.window
            trainer.train(plan, rollouts)
            trainer.step += 1


def draw(metadata: StepMetadata, minibatch: MinibatchPlan, window: int, out: Path) -> None:
    """Left: a row for each prompt, its completions as bars as long as their responses. Right: the packs."""
    samples = minibatch.samples
    kept = {(g, i): k for k, (g, i) in enumerate(zip(samples.group, samples.completion, strict=True))}
    right = metadata.rewards > 0.5
    order = np.argsort(right.mean(axis=1), kind="stable")
    with matplotlib.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(12, 5.4), layout="constrained")
        left, packs = figure.subplots(1, 2, width_ratios=(2.2, 1))
        for row, group in enumerate(order):
            _draw_group(left, row, int(group), metadata, right, kept, samples.weight)
        for row in range(len(order), window):
            left.text(0, row, "not rolled out", color=colour_of("soft"), va="center", fontsize=8)
        left.set_yticks(
            range(window),
            [f"{right[g].sum()} of {right.shape[1]} right" for g in order] + ["pruned"] * (window - len(order)),
        )
        left.set_ylim(window - 0.4, -0.6)
        left.set_xlabel("tokens of a prompt's completions, side by side")
        left.set_title(f"{window} prompts, {len(order)} rolled out, 8 completions each; numbers are weights")
        _draw_packs(packs, minibatch, right)
        figure.legend(
            handles=[
                Patch(color=colour_of("good"), label="right, trained on"),
                Patch(color=colour_of("bad"), label="wrong, trained on"),
                Patch(facecolor="none", edgecolor=colour_of("slate"), label="pruned"),
                Patch(facecolor="none", edgecolor=colour_of("pale"), label="all of the group alike: no gradient"),
            ],
            loc="outside lower center",
            ncols=4,
            frameon=False,
        )
        figure.savefig(out, dpi=110, metadata={"Software": ""})


def _draw_group(
    axes: Axes,
    row: int,
    group: int,
    metadata: StepMetadata,
    right: np.ndarray,
    kept: dict[tuple[int, int], int],
    weights: np.ndarray,
) -> None:
    start = 0.0
    alike = right[group].all() or not right[group].any()
    for i, length in enumerate(metadata.response_lengths[group]):
        place = (group, i)
        colour = colour_of("good" if right[place] else "bad")
        if place in kept:
            axes.add_patch(Rectangle((start, row - HEIGHT / 2), length, HEIGHT, color=colour, linewidth=0))
            weight = weights[kept[place]]
            axes.text(start + length / 2, row, f"{weight:.1f}", color="white", ha="center", va="center", fontsize=6.5)
        else:
            edge = colour_of("pale" if alike else "slate")
            axes.add_patch(
                Rectangle((start, row - HEIGHT / 2), length, HEIGHT, fill=False, edgecolor=edge, linewidth=0.8)
            )
        start += length + GAP
    axes.set_xlim(0, max(axes.get_xlim()[1], start))


def _draw_packs(axes: Axes, minibatch: MinibatchPlan, right: np.ndarray) -> None:
    samples = minibatch.samples
    packs = [pack for replica in minibatch.packs for pack in replica]
    for row, pack in enumerate(packs):
        start = 0
        for k in pack:
            length = samples.lengths[k] - samples.shared_length[k]
            prompt = max(samples.prompt_length[k] - samples.shared_length[k], 0)
            colour = colour_of("good" if right[samples.group[k], samples.completion[k]] else "bad")
            for first, tokens, shade in (
                (start, prompt, colour_of("slate")),
                (start + prompt, length - prompt, colour),
            ):
                axes.add_patch(Rectangle((first, row - 0.4), tokens, 0.8, color=shade, linewidth=0))
            axes.add_patch(Rectangle((start, row - 0.4), length, 0.8, fill=False, edgecolor="white", linewidth=0.6))
            start += length
    axes.set_xlim(0, minibatch.capacity)
    axes.set_ylim(len(packs) - 0.4, -0.6)
    axes.set_yticks(range(len(packs)), [f"pack {k + 1}" for k in range(len(packs))])
    axes.set_xlabel(f"tokens, {minibatch.capacity} in each pack")
    axes.set_title("what is trained on, prompts in grey")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("runs/quickstart/warm"))
    parser.add_argument("--out", type=Path, default=Path("docs/one_step.png"))
    parser.add_argument("--step", type=int, default=12, help="counted from 0")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    args = parser.parse_args()
    metadata, minibatch, window = one_step(args.policy, args.step)
    draw(metadata, minibatch, window, args.out)
    print(
        json.dumps(
            {
                "prompts": window,
                "rolled_out": len(metadata.prompt_ids),
                "completions": int(metadata.samples.sum()),
                "trained_on": len(minibatch.samples.weight),
                "tokens": int(metadata.tokens.sum()),
                "tokens_trained_on": int(minibatch.samples.lengths.sum()),
                "packs": sum(len(replica) for replica in minibatch.packs),
                "capacity": minibatch.capacity,
                "largest_weight": float(minibatch.samples.weight.max()),
            }
        )
    )


if __name__ == "__main__":
    main()
