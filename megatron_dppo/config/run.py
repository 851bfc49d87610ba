"""The run itself: where it goes, how long it is, what it evaluates, which machines it has."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import field_validator

from megatron_dppo.config.types import AboveZero, Count, NonNegative, Positive, Seconds, Section, each_once


class RunConfig(Section):
    dir: str = "runs/default"
    """Where checkpoints, logs, the picture and the export go. The same command run again resumes from here."""
    resume: Literal["same", "anyway"] = "same"
    """Changes allowed when a run is started again. ``same``: how long it runs, how fast and where; a change of the
    policy, the data, the prompts of a step, the reward, the loss, the pruning or the seed is refused, since the results
    would belong to neither the old settings nor the new. So is a file of these settings that has the same name and
    other content. ``anyway``: those too, from the last checkpoint on; other data, another tokenizer or another seed
    begin a new order of prompts. For ``sft``, ``anyway`` warms up a policy that was warmed up already."""
    seed: Count = 1
    """Seeds the order of the prompts, the draws of the pruning, and the sampling of the local engine."""
    steps: Positive = 100
    """Training steps, counted from the start of the run and not from a resume."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: Positive = 2
    """How many of the latest checkpoints stay on the disk."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out accuracy besides, of the steps that are both evaluated (eval.every)
    and saved (run.checkpoint_every)."""
    checkpoint_in_background: bool = False
    """Write checkpoints while training goes on, from a copy of the state in host memory."""
    checkpoint_durable: bool = True
    """Wait until the disk itself has a checkpoint, its files and directories, before it counts. Without that, a
    checkpoint survives whatever ends the run's processes all the same, and may take less time; but a power cut or a
    crash of the machine may damage the last ones, which their checksums then tell."""
    late_s: Seconds = 120.0
    """Seconds that ranks wait for another one before the log names it, with the place in the code where it stands; all
    are named where none has moved for half of layout.timeout_s. Also seconds without progress in rollouts and
    evaluations, after which the code or the conversation that hangs is named."""
    max_idle_steps: Count = 20
    """Steps in a row without anything to train on, after which the run is saved and ends with an error: where all
    rewards of every group are equal, as after a collapse, no further step changes the policy. 0: go on whatever
    comes."""
    export: bool = True
    """Write the trained policy as a Hugging Face directory (``DIR/hf``) at the end."""
    length_gate: Annotated[float, Gt(1.0)] | None = 1.5
    """Factor by which the mean response length may fall below or rise above that of the first steps before the log
    says so, once each time; null: never. A policy that takes to a short style early may not come back from it."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Where every row of metrics.jsonl goes besides: ``[tensorboard, wandb, mlflow, trackio]``, each an extra of this
    package but for the first. What is said of servers and accounts is read from their own environment variables
    (WANDB_MODE, MLFLOW_TRACKING_URI, …); without them all stays in the run's folder, and no network is asked."""

    profile: tuple[Positive, ...] = ()
    """Steps, counted from 1, in which torch's profiler watches every rank, and on GPUs the allocator is recorded; what
    they saw is in ``DIR/profile``. Such a step takes longer."""

    _once = field_validator("loggers")(each_once)


class EvalConfig(Section):
    every: Count = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    problems: Count | None = 200
    """Held-out problems of each file or benchmark that are answered, the first ones; null: all of them (what ``eval``
    does, unless its command line says otherwise); 0: no evaluation."""
    benchmarks: tuple[str, ...] = ()
    """Benchmarks by name (gsm8k, math500, aime24, minerva, olympiadbench, amc23), generators by theirs, for their
    held-out problems, and files of your own as ``NAME=FILE``. They come besides data.eval."""
    folder: str | None = None
    """Where the benchmarks' files lie; null: what $MEGATRON_DPPO_BENCHMARKS says, else ``data/eval``."""
    samples: Positive = 1
    """Answers to each problem."""
    temperature: NonNegative | None = None
    """Sampling temperature of the answers, 0 is greedy; null: greedy for one sample, rollout.temperature for more."""
    show: Count = 3
    """Answers printed before and after training."""
    batch: Positive = 64
    """``eval``: problems asked at a time, all that a kill can cost; servers idle while the last one is answered."""
    out: str | None = None
    """``eval``: where answers and scores go; null: ``RUN/eval/MODEL``."""
    against: str | None = None
    """``eval``: folder of an earlier evaluation, to compare with problem by problem."""


class SftConfig(Section):
    steps: Positive = 200
    """Optimizer steps."""
    batch: Positive = 32
    """Worked answers per step."""
    lr: AboveZero = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: Count = 10
    """Steps over which the learning rate rises to it."""
    out: str | None = None
    """Where the warmed-up policy goes, as a Hugging Face directory; null: ``RUN.DIR/sft``."""


class ProbeConfig(Section):
    """Read by ``probe-tree``."""

    at: tuple[Annotated[float, Gt(0.0), Lt(1.0)], ...] = (0.5, 0.8)
    """Where trees might fork, in shares of the mean response's length."""
    prompts: Annotated[int, Ge(2)] = 32
    """Prompts that are tried, of the training pool."""
    roots: Annotated[int, Ge(2)] = 4
    """Responses to each of them."""
    continuations: Annotated[int, Ge(2)] = 4
    """Continuations of each response at each place, its own included."""


class ClusterConfig(Section):
    """Read by ``plan`` and ``launch``. A run takes the machines that it is given, and reads ``gpu`` alone."""

    nodes: Positive = 1
    """Nodes of the actors."""
    server_nodes: Count = 0
    """Nodes of the rollout servers; 0: servers, if there are any, run on the actors' nodes."""
    gpus_per_node: Positive = 8
    """GPUs of each node, of actors and servers alike."""
    gpu: Literal["a100-40", "a100-80", "h100", "h200", "b200"] = "h100"
    """Kind of GPU. A plan goes by its memory, bandwidth and matrix rate; ``perf/actor_train_peak_share`` by its matrix
    rate."""
    price_per_gpu_hour: NonNegative | None = None
    """Price of one GPU for one hour, in whatever currency; null: plans say hours and no price."""
    account: str | None = None
    """Slurm account; null: the user's default."""
    partition: str | None = None
    """Slurm partition; null: the cluster's default."""
    hours: AboveZero = 4.0
    """Slurm's time limit for one job; a run that is not done by then saves, and goes on in the next one."""
    warn_s: Seconds = 600.0
    """Seconds before the time limit at which the run is told to save and stop: longer than a step and a checkpoint."""
    container: str | None = None
    """Image that the job's steps run in (Pyxis); null: the environment that submits it."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees, each as ``/from:/to``."""
