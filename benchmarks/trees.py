"""What trees of completions are worth, over flat groups of as many leaves: by the variance of their gradients, and by
the time to an accuracy.

    python benchmarks/trees.py [--json] [--tasks sums ending] [--prompts 32] [--draws 8] [--seeds 3] [--folder DIR]

Two tasks, whose policies are warmed up by a teacher who forgets carries. ``sums`` is the quickstart's: errors arise all
along an answer. ``ending`` has an answer copy its question four times before it adds (``347+8=``, always with a
carry), so that the end decides.

``variance``: groups are drawn again and again for each prompt, by the warmed-up policy. Gains are flat's variance ×
tokens over the tree's, with intervals over prompts. ``training`` (``--seeds`` 0: none): the tree of the largest gain
per generated token against flat, seed by seed in turn, over the seconds of steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pruning_speedup
import torch
from real_gradients import gradient, planned
from training_stages import alone

from megatron_dppo.config import BranchConfig, Config, LossConfig, TreeConfig, replace
from megatron_dppo.data.generators import Sum
from megatron_dppo.init import write_model
from megatron_dppo.models.actor import Actor
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.plan import plan_step, take_groups
from megatron_dppo.rl.trees import Interval, interval
from megatron_dppo.rl.types import Floats, Group, Selection, StepMetadata
from megatron_dppo.rollout.tree import unique_tokens
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy, load_training_pool
from megatron_dppo.trainer.learner import PolicyLoss
from megatron_dppo.trainer.prompt_sampler import order_of

LEAVES = 8
FLAT = "flat"
TREES: dict[str, tuple[tuple[float, int], ...]] = {
    FLAT: (),
    "4 × 2 after 0.3": ((0.3, 2),),
    "4 × 2 after 0.6": ((0.6, 2),),
    "4 × 2 after 0.85": ((0.85, 2),),
    "2 × 4 after 0.6": ((0.6, 4),),
    "2 × 4 after 0.85": ((0.85, 4),),
    "2 × 2 × 2 after 0.3, 0.85": ((0.3, 2), (0.85, 2)),
}
"""Roots × children, and after which shares of the mean response they fork."""
COPIES, HELD_OUT, FORGOTTEN = 4, 200, 0.65
TASKS = {
    "sums": ("data.train=arithmetic",),
    "ending": ("data.train={folder}/train.jsonl", "data.eval={folder}/eval.jsonl", "data.response_key=response"),
}
ACCURACY = {"sums": 0.6, "ending": 0.8}
"""Held-out accuracy that a training is to reach."""
WORDS = (
    "layout.tp=1",
    "data.prompt_key=prompt",
    "data.label_key=label",
    "loss.name=dr_grpo",
    "pruning.prompts.rule=none",
    "pruning.completions.rule=none",
    f"rollout.samples_per_prompt={LEAVES}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--draws", type=int, default=8, help="groups of each prompt, for the variance")
    parser.add_argument("--seeds", type=int, default=3, help="of the trainings; 0: none")
    parser.add_argument("--steps", type=int, default=40, help="of a training")
    parser.add_argument("--folder", type=Path, help="where warmed-up policies are, or are left for the next time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for task in options.tasks:
            folder = (options.folder or Path(temporary)) / task
            words = [*WORDS, *(word.format(folder=folder) for word in TASKS[task])]
            warm_up(task, words, folder)
            words.append(f"model.path={folder / 'warm'}")
            found = variances(words, folder, options)
            if options.seeds:
                found["training"] = trainings(
                    task, found["best"], found["forks"][found["best"]], words, folder, options
                )
            report[task] = found
            if not options.json:
                print_task(task, found)
    print(json.dumps(report))


def warm_up(task: str, words: Sequence[str], folder: Path) -> None:
    if (folder / "warm").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    more = ["data.arithmetic.problems=8192"]
    if task == "ending":
        problems = [f"{json.dumps(_row(problem))}\n" for problem in carries()]
        (folder / "eval.jsonl").write_text("".join(problems[:HELD_OUT]))
        (folder / "train.jsonl").write_text("".join(problems[HELD_OUT:]))
        more = []
    write_model(folder / "initial", std=0.05)
    settings = [f"model.path={folder / 'initial'}", f"run.dir={folder / 'sft'}", f"sft.out={folder / 'warm'}"]
    _command("sft", *words, *settings, *more, "layout.dp=2")


def carries() -> list[Sum]:
    """Three digits and one, in a random order, whose last digits have a carry that the teacher mostly forgets."""
    draw = random.Random(0)
    pairs = [(total, term) for total in range(100, 1000) for term in range(1, 10) if total % 10 + term >= 10]
    draw.shuffle(pairs)
    return [Sum(pair, slips=(draw.random() < FORGOTTEN,)) for pair in pairs]


def _row(problem: Sum) -> dict[str, str]:
    answer = f"{problem.question}\n" * COPIES + problem.worked_answer
    return {"prompt": problem.question, "label": problem.label, "response": answer}


def _command(command: str, *words: str) -> None:
    line = [sys.executable, "-m", "megatron_dppo", command, "configs/quickstart.yaml", *words]
    subprocess.run(line, check=True, stdout=sys.stderr)


def variances(words: Sequence[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Of the estimate of each prompt's gradient, [P] for each tree, and the tokens that it takes."""
    config = load_config("configs/quickstart.yaml", [*words, f"run.dir={folder / 'variance'}", "eval.problems=0"])
    reward = config.reward
    with alone(), ExitStack() as to_close:
        world = initialize(config.layout, seed=1, timeout_s=60.0)
        workers = RewardWorkers(reward.function, workers=1, timeout_s=reward.timeout_s)
        to_close.enter_context(closing(workers))
        parts = assemble_policy(config, world, temperature=1.0)
        laboratory = Laboratory(parts, workers, options.prompts, to_close)
        length = laboratory.length()
        forks = {name: [(max(1, round(at * length)), m) for at, m in tree] for name, tree in TREES.items()}
        found = {name: laboratory.measure(tree, options.draws) for name, tree in forks.items()}
    rows = {name: compared(found[FLAT], tree) for name, tree in found.items()}
    best = max((name for name in rows if name != FLAT), key=lambda name: rows[name]["per_generated_token"][0])
    return {"response_length": length, "trees": rows, "best": best, "forks": forks}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of each of P prompts."""

    variance: Floats
    """[P], the trace of the covariance of the estimate of a group."""
    generated: Floats
    """[P], mean tokens that a group's policy sampled."""
    trained: Floats
    """[P], mean tokens that its packs hold, prompts included."""


class Laboratory:
    """A policy and an engine, and some prompts."""

    def __init__(self, parts: PolicyParts[Actor], workers: RewardWorkers, prompts: int, to_close: ExitStack) -> None:
        self._parts, self._workers = parts, workers
        self._engine = to_close.enter_context(closing(parts.engine()))
        parts.sync(self._engine, 0)
        self._pool = load_training_pool(parts)
        ids = np.sort(order_of(self._pool, 1).next_window(prompts))
        self._selection = Selection(ids, np.ones(prompts), window=prompts)

    def length(self) -> float:
        """Mean tokens of a response."""
        return float(self._rollouts(self._parts.config, 0)[0].response_lengths.mean())

    def measure(self, forks: Sequence[tuple[int, int]], draws: int) -> Measured:
        config = with_tree(self._parts.config, forks)
        first, *others = (self._draw(config, 1 + draw) for draw in range(draws))
        total, squares = first[0].double(), first[0].double().square().sum(dim=1)
        tokens = first[1]
        for gradients, more in others:
            total += gradients
            squares += gradients.double().square().sum(dim=1)
            tokens = tokens + more
        variance = (squares - total.square().sum(dim=1) / draws) / (draws - 1)
        return Measured(variance.numpy(), *(tokens / draws))

    def _rollouts(self, config: Config, step: int) -> tuple[StepMetadata, Mapping[int, Group]]:
        parts = dataclasses.replace(self._parts, config=config)
        collector = parts.collector(self._engine, self._workers)
        collected = collector.collected([collector.finish(collector.request(self._pool, StepRollouts(self._selection, step)))])
        return collected.metadata, collected.held

    def _draw(self, config: Config, step: int) -> tuple[torch.Tensor, Floats]:
        """The estimates of all prompts, [P, parameters], and the tokens, [2, P]: generated, trained."""
        metadata, held = self._rollouts(config, step)
        # A flat group's own rewards are in its mean, which takes 1/G of the gradient.
        unbiased = 1.0 if config.rollout.tree.branches else LEAVES / (LEAVES - 1)
        rows, tokens = [], np.zeros((2, len(held)))
        for q, group in sorted(held.items()):
            part = dataclasses.replace(take_groups(metadata, np.array([q])), window=1.0)
            plan = plan_step(part, config, replicas=1, align=1, capacity_multiple=1, step=step, pipeline=1)
            (minibatch,) = plan.minibatches
            of = minibatch.samples
            tokens[:, q] = (
                unique_tokens(group.completions, config.rollout.tree.branches),
                (of.prompt_length + of.response_length - of.shared_length).sum(),
            )
            packs = planned(minibatch, {0: group}, self._parts.world, self._parts.pad_id)
            rows.append(unbiased * gradient(self._parts.actor, packs, loss()) if packs else None)
        size = next(len(row) for row in rows if row is not None)
        return torch.stack([torch.zeros(size) if row is None else row for row in rows]), tokens


def loss() -> PolicyLoss:
    return PolicyLoss(objective_for(LossConfig(name="dr_grpo")), kl_coef=0.0, tis_cap=None, version=0)


def with_tree(config: Config, forks: Sequence[tuple[int, int]]) -> Config:
    tree = TreeConfig(branches=tuple(BranchConfig(at=at, children=children) for at, children in forks))
    return replace(config, rollout=replace(config.rollout, tree=tree))


def compared(flat: Measured, tree: Measured) -> dict[str, Any]:
    """The gains per generated and per trained token, each with its interval."""

    def gain(kind: str) -> list[float]:
        def of(prompts: Any) -> Floats:
            one, other = (
                each.variance[prompts].mean(axis=-1) * getattr(each, kind)[prompts].mean(axis=-1)
                for each in (flat, tree)
            )
            return one / other

        found: Interval = interval(of, len(flat.variance))
        return [found.value, found.low, found.high]

    return {
        "per_generated_token": gain("generated"),
        "per_trained_token": gain("trained"),
        "variance_ratio": float(flat.variance.mean() / tree.variance.mean()),
        "generated_tokens_ratio": float(flat.generated.mean() / tree.generated.mean()),
    }


def trainings(
    task: str,
    best: str,
    forks: Sequence[tuple[int, int]],
    words: Sequence[str],
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Ratios over seeds, flat over the tree."""
    branches = json.dumps([{"at": at, "children": m} for at, m in forks])
    arms = {pruning_speedup.BASELINE: [], best: [f"rollout.tree.branches={branches}"]}
    runs = [
        pruning_speedup.measure(
            name,
            seed,
            pruning_speedup.trained(
                ["configs/quickstart.yaml", *words, *more, f"run.steps={options.steps}", "eval.every=4"],
                folder / "training",
                seed=seed,
            ),
            ACCURACY[task],
        )
        for seed in range(1, options.seeds + 1)
        for name, more in arms.items()
    ]
    figures = "seconds_to_accuracy", "steps_to_accuracy", "seconds_per_step"
    return {
        **{figure: pruning_speedup.ratio(runs, best, figure) for figure in figures},
        "final_accuracy": {
            name: float(np.mean([run.final_accuracy for run in runs if run.arm == name])) for name in arms
        },
        "runs": [dataclasses.asdict(run) for run in runs],
    }


def print_task(task: str, found: Mapping[str, Any]) -> None:
    print(
        f"{task}: {found['response_length']:.0f} tokens a response\n{'flat over':<28}{'generated':>22}{'trained':>22}"
    )
    for name, row in found["trees"].items():
        cells = ("{:.2f} [{:.2f}, {:.2f}]".format(*row[f"per_{kind}_token"]) for kind in ("generated", "trained"))
        print(f"{name:<28}" + "".join(f"{cell:>22}" for cell in cells))
    if "training" in found:
        print(f"training, flat over {found['best']}:", found["training"]["seconds_to_accuracy"])


if __name__ == "__main__":
    main()
