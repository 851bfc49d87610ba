"""Real training runs, measured at three stages (two on ``smollm2_steps``), and the gradient of
every completion of a window."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from harness import arguments
from real_gradients import gradients, gram, single_packs
from word_problems import Prepared, prepared

from megatron_dppo.config import Config
from megatron_dppo.init import write_model
from megatron_dppo.parallel.world import initialize, shutdown
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.objectives import OBJECTIVES
from megatron_dppo.rl.pruning.schedule import find_nonzero_variance_groups
from megatron_dppo.rl.types import Floats, Ints, Selection, StepMetadata
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.settings import load_config
from megatron_dppo.sft import sft
from megatron_dppo.train import Trainer
from megatron_dppo.trainer.learner import PolicyLoss

T = TypeVar("T")
SETTINGS = (
    "run.checkpoint_every=0",
    "run.export=false",
    "eval.every=0",
    "eval.problems=0",
    # Measuring a stage takes long, but is no step that hangs.
    "rollout.timeout_s=1e5",
    "run.stall_warning_s=1e5",
)


@dataclass(frozen=True, slots=True)
class Task:
    """A training: initial policy, settings and stages."""

    warmed_up: Callable[[Path, Sequence[str]], Path]
    """Function of a folder and the run's settings that returns the policy's path: created in the
    folder, or an existing path."""
    stages: Mapping[str, float]
    """Sampled accuracy, mean of three steps, that starts the measurement of each stage."""
    settings: Sequence[str]
    config: str = "configs/quickstart.yaml"
    stride: int = 1
    """Every ``stride``-th coordinate of a gradient is used."""


def sums_policy(folder: Path, settings: Sequence[str]) -> Path:
    """Create a policy of half a million parameters, warmed up on sums."""
    write_model(
        folder / "initial",
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        ffn=448,
        std=0.05,
    )
    lessons = [
        "data.arithmetic.problems=7000",
        f"model.path={folder / 'initial'}",
        f"sft.out={folder / 'warm'}",
    ]
    with alone():
        sft(load_config(TASKS["sums"].config, [*settings, *lessons]))
    return folder / "warm"


WORD_PROBLEMS = Path("runs/word_problems")
SMOLLM2 = Path("runs/smollm2_steps")
ONE_RANK = ("layout.tp=1", "layout.dp=1")
SUMS = (
    "data.arithmetic.max_terms=4",
    "rollout.max_response_tokens=48",
    "optimizer.lr=4e-4",
    "sft.steps=300",
)
SPARSE = (
    "data.arithmetic.min_terms=5",
    "data.arithmetic.max_terms=6",
    "data.arithmetic.forgotten_carries=0.85",
    "rollout.max_response_tokens=64",
    "optimizer.lr=1e-4",
)
"""The warmed-up policy answers about one in fifty of these sums."""
TASKS = {
    "sums": Task(sums_policy, {"early": 0.3, "middle": 0.7, "late": 0.87}, (*ONE_RANK, *SUMS)),
    "sparse_sums": Task(
        sums_policy,
        {"2%": 0.02, "5%": 0.05},
        (*ONE_RANK, *SUMS, *SPARSE),
    ),
    "word_problems": Task(
        lambda *_: prepared(WORD_PROBLEMS).policy,
        {"early": 0.5, "middle": 0.65, "late": 0.8},
        (*Prepared(WORD_PROBLEMS).settings, *ONE_RANK, "optimizer.lr=1.5e-4"),
        stride=5,
    ),
    # configs/smollm2_steps.yaml describes how to make the policy.
    "smollm2_steps": Task(
        lambda *_: SMOLLM2 / "warm",
        {"early": 0.4, "late": 0.6},
        ONE_RANK,
        config="configs/smollm2_steps.yaml",
        stride=61,
    ),
}


@dataclass(frozen=True, slots=True)
class Stage:
    """Window of N prompts with G completions each, n = N·G: an unpruned rollout of the weights in
    training."""

    name: str
    step: int
    metadata: StepMetadata
    unit_gram: Floats
    """[n, n], inner products of the gradients of Σ_t log p_t, over every ``Task.stride``-th
    coordinate; 0 for completions of groups of equal rewards (advantage 0). On-policy, every
    objective's g_i is A_i times the gradient of Σ_t log p_t."""

    @property
    def unit_norms(self) -> Floats:
        """Norms of the gradients of Σ_t log p_t, [N, G]."""
        norms: Floats = np.sqrt(np.diag(self.unit_gram)).reshape(self.metadata.rewards.shape)
        return norms


def stage_arguments(description: str | None, **more: Any) -> argparse.ArgumentParser:
    """Return a parser of arguments for :func:`visit_stages`.

    Args:
        description: docstring of the script.
        more: further arguments, or other defaults, as for :func:`arguments`; None: no argument.
    """
    usual = {
        "prompts": (64, "of a window"),
        "samples": (8, "completions per prompt"),
        "steps": (150, "most steps of training until the late stage is measured"),
        "windows": (10, "of each stage"),
        "draws": (200, "of each arm on each window"),
    }
    given = {name: value for name, value in (usual | more).items() if value is not None}
    parser = arguments(description, **given)
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("settings", nargs="*", help="more settings of the training")
    return parser


def visit_stages(
    options: argparse.Namespace,
    visit: Callable[[Trainer, str], T],
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> list[T]:
    """Return the results of :func:`training_stages`, in a temporary folder."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        stages = training_stages(
            TASKS[options.task],
            options.prompts,
            options.samples,
            options.steps,
            Path(folder),
            options.settings,
            visit,
            prepare,
        )
        return list(stages)


def draw_windows(trainer: Trainer, count: int) -> Iterator[Ints]:
    """Yield the prompts of windows without a common prompt.

    Raises:
        SystemExit: the pool has fewer prompts.
    """
    size = trainer.config.rollout.prompts_per_step
    if count * size > len(trainer.pool):
        raise SystemExit(
            f"--windows {count} of {size} prompts are more than the pool's {len(trainer.pool)}"
        )
    order = np.random.default_rng(0).permutation(len(trainer.pool))
    for number in range(count):
        yield np.sort(order[number * size : (number + 1) * size])


def training_stages(
    task: Task,
    prompts: int,
    samples: int,
    most_steps: int,
    folder: Path,
    settings: Sequence[str],
    visit: Callable[[Trainer, str], T],
    prepare: Callable[[Trainer], None] = lambda trainer: None,
) -> Iterator[T]:
    """Train a warmed-up policy, and yield the result of ``visit`` at each stage. One rank, one
    thread.

    Args:
        task: the training.
        prompts: prompts per step.
        samples: completions per prompt.
        most_steps: training steps until all remaining stages are measured.
        folder: parent folder of the run.
        settings: further settings of the run.
        visit: function of the trainer and the stage's name. May train.
        prepare: called with the trainer before the first step.
    """
    sizes = [
        f"run.dir={folder / 'run'}",
        f"run.steps={most_steps}",
        f"rollout.prompts_per_step={prompts}",
        f"rollout.samples_per_prompt={samples}",
    ]
    words = [*SETTINGS, *task.settings, *sizes, *settings]
    if any(word.startswith("model.path=") for word in settings):
        raise SystemExit("error: model.path: the benchmark makes the task's policy; remove it")
    policy = task.warmed_up(folder, words)
    with alone(), ExitStack() as to_close:
        config = load_config(task.config, [*words, f"model.path={policy}"])
        yield from _train(task, config, to_close, visit, prepare)


@contextmanager
def alone() -> Iterator[None]:
    """Open a process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
        try:
            yield
        finally:
            shutdown()


def _train(
    task: Task,
    config: Config,
    to_close: ExitStack,
    visit: Callable[[Trainer, str], T],
    prepare: Callable[[Trainer], None],
) -> Iterator[T]:
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    workers = to_close.enter_context(closing(RewardWorkers.from_config(config.reward)))
    trainer = Trainer(config, world, workers, to_close)
    prepare(trainer)
    trainer.sync(0)
    left = dict(task.stages)
    accuracy = [0.0, 0.0, 0.0]
    while left:
        name, mark = next(iter(left.items()))
        if np.mean(accuracy[-3:]) >= mark or trainer.step >= config.run.steps:
            yield visit(trainer, name)
            del left[name]
            continue
        rollouts = trainer.roll_out(trainer.select(trainer.step))
        trainer.train(trainer.plan(rollouts), rollouts)
        trainer.step += 1
        accuracy.append(rollouts.metrics["rollout/accuracy"])


def first_prompts(trainer: Trainer, name: str) -> Stage:
    """Measure the window of the pool's first prompts."""
    return measure(trainer, name, np.arange(trainer.config.rollout.prompts_per_step))


def measure(
    trainer: Trainer, name: str, prompt_ids: Ints, seeds: int = 1, stride: int = 1
) -> Stage:
    """Roll out a window, and compute the gradient of each completion.

    Args:
        trainer: the run's trainer.
        name: name of the stage.
        prompt_ids: prompts of the window.
        seeds: number of the rollouts' random seeds, from 1; another number has other rollouts.
        stride: step between the gradient coordinates in use, see ``Task.stride``.
    """
    rollouts = roll_out_window(trainer, prompt_ids, seeds)
    live, rows = compute_unit_gradients(trainer, rollouts, stride)
    products = np.zeros((rollouts.metadata.rewards.size,) * 2)
    products[np.ix_(live, live)] = gram(rows)
    return Stage(name, trainer.step, rollouts.metadata, products)


def roll_out_window(trainer: Trainer, prompt_ids: Ints, seeds: int = 1) -> CompleteRollouts:
    """Roll out all prompts of a window, with random seeds that no training step has."""
    window = Selection(prompt_ids, np.ones(len(prompt_ids)), window=len(prompt_ids))
    return trainer.roll_out(StepRollouts(window, trainer.config.run.steps + seeds))


def compute_unit_gradients(
    trainer: Trainer, rollouts: CompleteRollouts, stride: int = 1
) -> tuple[Ints, torch.Tensor]:
    """Return the indices [m] of the completions in groups of unequal rewards, and their gradients
    of Σ_t log p_t, [m, parameters / stride]."""
    metadata = rollouts.metadata
    groups = [rollouts.held[row] for row in range(len(metadata.prompt_ids))]
    packs = single_packs(groups, np.ones_like(metadata.rewards), trainer.policy.pad_id)
    loss = PolicyLoss(OBJECTIVES["grpo"], kl_coef=0.0, tis_cap=None, version=trainer.version)
    loss.take_scored()
    samples = metadata.rewards.shape[1]
    varied = find_nonzero_variance_groups(metadata, trainer.config)
    live = (varied[:, None] * samples + np.arange(samples)).ravel()
    if not len(live):
        return live, torch.zeros(0, 1)
    return live, gradients(trainer.policy.actor, [packs[i] for i in live], loss, stride)
