"""The run: its folder, length, evaluations and machines; its policy, how ranks share that, and the
optimizer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from annotated_types import Ge, Gt, Lt
from pydantic import field_validator

from megatron_dppo.config.types import (
    AboveZero,
    Count,
    Fraction,
    NonNegative,
    Positive,
    Seconds,
    Section,
    check_unique,
)
from megatron_dppo.hub import policy_folder

if TYPE_CHECKING:
    import torch


class RunConfig(Section):
    dir: str = "runs/default"
    """Where checkpoints, logs, the picture and the export go. The same command run again resumes
    from here."""
    resume: Literal["same", "anyway"] = "same"
    """Changes allowed when a run is started again. ``same``: how long it runs, how fast and where;
    a change of the policy, the data, the prompts of a step, the reward, the loss, the pruning or
    the seed is refused, since the results would belong to neither the old settings nor the new. So
    is a file of these settings that has the same name and other content. ``anyway``: those too,
    from the last checkpoint on; other data, another tokenizer or another seed begin a new order of
    prompts. For ``sft``, ``anyway`` warms up a policy that was warmed up already."""
    seed: Count = 1
    """Seeds the order of the prompts, the draws of the pruning, and the sampling of the local
    engine."""
    steps: Positive = 100
    """Training steps, counted from the start of the run and not from a resume."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: Positive = 2
    """How many of the latest checkpoints stay on the disk."""
    keep_best: bool = True
    """Keep the checkpoint with the best held-out accuracy besides, of the steps that are both
    evaluated (eval.every) and saved (run.checkpoint_every)."""
    checkpoint_in_background: bool = False
    """Write checkpoints while training goes on, from a copy of the state in host memory."""
    late_s: Seconds = 120.0
    """Seconds that ranks wait for another one before the log names it, with the place in the code
    where it stands; all are named where none has moved for half of layout.timeout_s. Also seconds
    without progress in rollouts and evaluations, after which the code or the conversation that
    hangs is named."""
    max_idle_steps: Count = 20
    """Steps in a row without a gradient, after which the run is saved and ends with an error: where
    all rewards of every group are equal, as after a collapse, no further step changes the policy.
    0: go on whatever comes."""
    export: bool = True
    """Write the trained policy as a Hugging Face directory (``DIR/hf``) at the end."""
    length_gate: Annotated[float, Gt(1.0)] | None = 1.5
    """Factor by which the mean response length may fall below or rise above that of the first steps
    before the log says so, once each time; null: never. A policy that takes to a short style early
    may not come back from it."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Where every row of metrics.jsonl goes besides: ``[tensorboard, wandb, mlflow, trackio]``,
    each an extra of this package but for the first. What is said of servers and accounts is read
    from their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, …); without them all
    stays in the run's folder, and no network is asked."""

    profile: tuple[Positive, ...] = ()
    """Steps, counted from 1, in which torch's profiler watches every rank, and on GPUs the
    allocator is recorded; what they saw is in ``DIR/profile``. Such a step takes longer."""

    _once = field_validator("loggers")(check_unique)


class EvalConfig(Section):
    every: Count = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    problems: Count | None = 200
    """Held-out problems of each file or benchmark that are answered, the first ones; null: all of
    them (what ``eval`` does, unless its command line says otherwise); 0: no evaluation."""
    benchmarks: tuple[str, ...] = ()
    """Benchmarks by name (gsm8k, math500, aime24, minerva, olympiadbench, amc23), generators by
    theirs, for their held-out problems, and files of your own as ``NAME=FILE``. They come besides
    data.eval."""
    folder: str | None = None
    """Where the benchmarks' files lie; null: what $MEGATRON_DPPO_BENCHMARKS says, else
    ``data/eval``."""
    samples: Positive = 1
    """Answers to each problem."""
    temperature: NonNegative | None = None
    """Sampling temperature of the answers, 0 is greedy; null: greedy for one sample,
    rollout.temperature for more."""
    top_p: Fraction | None = None
    """Sample each token of an answer from the likeliest tokens that together have at least this
    probability; null: from all. With top_k, of the probability of the tokens that top_k leaves
    (SGLang: of all)."""
    top_k: Positive | None = None
    """Sample each token of an answer from this many of the likeliest tokens; null: from all."""
    max_response_tokens: Positive | None = None
    """An answer is cut off here; null: at rollout.max_response_tokens."""
    show: Count = 3
    """Answers printed before and after training."""
    batch: Positive = 64
    """``eval``: problems asked at a time, all that a kill can cost; servers idle while the last one
    is answered."""
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


class ClusterConfig(Section):
    """Read by ``plan`` and ``launch``. A run takes the machines that it is given, and reads ``gpu``
    alone."""

    nodes: Positive = 1
    """Nodes of the actors."""
    server_nodes: Count = 0
    """Nodes of the rollout servers; 0: servers, if there are any, run on the actors' nodes."""
    gpus_per_node: Positive = 8
    """GPUs of each node, of actors and servers alike."""
    gpu: Literal["a100-40", "a100-80", "h100", "h200", "b200"] = "h100"
    """Kind of GPU. A plan goes by its memory, bandwidth and matrix rate;
    ``perf/actor_train_peak_share`` by its matrix rate."""
    price_per_gpu_hour: NonNegative | None = None
    """Price of one GPU for one hour, in whatever currency; null: plans say hours and no price."""
    account: str | None = None
    """Slurm account; null: the user's default."""
    partition: str | None = None
    """Slurm partition; null: the cluster's default."""
    hours: AboveZero = 4.0
    """Slurm's time limit for one job; a run that is not done by then saves, and goes on in the next
    one."""
    warn_s: Seconds = 600.0
    """Seconds before the time limit at which the run is told to save and stop: longer than a step
    and a checkpoint."""
    container: str | None = None
    """Image that the job's steps run in (Pyxis); null: the environment that submits it."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees, each as ``/from:/to``."""


HEAD_CHUNK_MIB = {"cpu": 64, "cuda": 1024}
"""Default of ``model.head_chunk_mib`` by type of device. Each chunk reads the output layer and its
gradient again, which takes little of a CPU's time, and much of a GPU's."""
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a weight, by ``model.dtype``."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Types of weights, as torch, config.json and servers name them."""

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""A matrix of a layer, by its Hugging Face name. In a mixture, the last three are those of every
expert."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) beside frozen weights. Only they are trained, and
    checkpoints hold nothing else."""

    rank: Count = 0
    """Rank of the adapters; 0: none, and all weights are trained."""
    alpha: AboveZero = 32.0
    """The adapters' outputs are multiplied by alpha/rank."""
    targets: tuple[Projection, ...] = get_args(Projection)
    """Matrices that get an adapter, each its own, by their Hugging Face names: those of all layers,
    and of all experts."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    _once = field_validator("targets")(check_unique)


class ModelConfig(Section):
    path: str = ""
    """Hugging Face directory of the initial policy: config.json, safetensors, tokenizer files; or
    the id of one on the hub (``Qwen/Qwen3-0.6B``), which is fetched into the hub's own cache unless
    it is there; or the folder of a run, for the policy that it has trained."""
    checkpoint: str | None = None
    """Megatron checkpoint folder (of a run, or from `megatron-dppo convert from-hf`) whose weights
    take the place of those in model.path, where config.json and the tokenizer then suffice."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights in the forward pass; master weights and gradients are fp32."""
    spec: Literal["auto", "torch", "te"] = "auto"
    """Layers: ``torch`` runs anywhere, ``te`` is Transformer Engine; ``auto``: te for bf16 where
    CUDA and it are present."""
    deterministic: bool = False
    """Keep Transformer Engine's layers to kernels that repeat bit by bit, which are slower. Without
    it a resumed run on a GPU goes on as well as before, but not with the very same bits."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: ``selective`` runs the feed-forward part of each layer again (its
    experts, where it has them), ``full`` keeps only the input of each layer."""
    head_chunk_mib: Positive | None = None
    """MiB of logits, with their gradient, that the policy head holds at a time; null: 1024 on a
    GPU, else 64. A GPU makes all logits twice, in the forward and the backward pass, but once where
    those of a pack fit: 6 bytes for each token of a response and each token of the vocabulary,
    divided by layout.tp."""
    reference_on_host: bool = False
    """Keep the frozen reference (with loss.kl_coef) in the host's memory while it is not needed;
    its weights then cross to the GPU once a step."""
    lora: LoraConfig = LoraConfig()

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return found

    @property
    def folder(self) -> Path:
        """The directory that ``path`` names; fetched where it has to be, without weights if
        ``checkpoint`` has them.

        Raises:
            UserError: as ``hub.policy_folder``.
        """
        return policy_folder(self.path, weights=self.checkpoint is None)


class LayoutConfig(Section):
    tp: Positive = 1
    """Tensor-parallel ranks."""
    pp: Positive = 1
    """Pipeline stages."""
    cp: Positive = 1
    """Context-parallel ranks, which share the tokens of every sequence: for sequences that one GPU
    has no room for."""
    ep: Positive = 1
    """Expert-parallel ranks: each has its part of every layer's experts. They are taken from tp, cp
    and dp together."""
    etp: Positive | None = None
    """Tensor-parallel ranks of one expert; null: as many as tp."""
    vpp: Positive = 1
    """Virtual pipeline stages on each rank, interleaved: a smaller bubble for more messages."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage, where it has fewer or more than the others; null: as many
    as they."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; null: as many as the others."""
    dp: Positive | None = None
    """Data-parallel replicas; null: as many as the ranks (torchrun, srun) or this machine's GPUs
    give, else 1."""
    sequence_parallel: bool = False
    """Shard norms and their activations along the sequence over the tensor-parallel ranks."""
    timeout_s: AboveZero = 600.0
    """How long the ranks' collectives wait for the slowest rank while they train, synchronise
    weights and write checkpoints. What waits for rollouts has a limit of its own,
    rollout.timeout_s."""

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def min_ranks(self) -> int:
        """Ranks that the layout needs at least, if ``dp`` is open: any number of them is a multiple
        of this."""
        return self.pp * math.lcm(self.tp * self.cp, self.expert_tp * self.ep)

    @property
    def min_packs(self) -> int:
        """Packs that a replica has at least: interleaved stages cannot work on fewer than there are
        stages."""
        return self.pp if self.vpp > 1 else 1

    @property
    def row_multiple(self) -> int:
        """Tokens that each sequence of a pack is padded to a multiple of: two chunks for each
        context-parallel rank."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """Tokens that a pack is a multiple of: whole sequences, and as many tokens for each rank
        that the sequence dimension is cut for."""
        return math.lcm(self.row_multiple, self.cp * (self.tp if self.sequence_parallel else 1))


class OptimizerConfig(Section):
    lr: AboveZero = 1e-6
    """Learning rate after warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or half a cosine down to min_lr at the last step."""
    min_lr: NonNegative = 0.0
    """Where a cosine ends."""
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises linearly from lr/warmup_steps."""
    clip_grad: NonNegative = 1.0
    """Limit of the gradient's global norm; 0: none."""
    weight_decay: NonNegative = 0.0
    """AdamW's, times the learning rate, of matrices; norms and biases have none."""
    beta1: Annotated[float, Ge(0.0), Lt(1.0)] = 0.9
    """Adam's decay of the mean of gradients."""
    beta2: Annotated[float, Ge(0.0), Lt(1.0)] = 0.95
    """Adam's decay of the mean of their squares."""
    eps: AboveZero = 1e-8
    """Adam's, added to the root of that mean."""
    distributed: bool = True
    """Shard the optimizer's state over the data-parallel and context-parallel ranks."""
    overlap: bool = False
    """Sum gradients over these ranks while the backward pass goes on, bucket by bucket."""
    offload: bool = False
    """Keep the optimizer's state (12 bytes per parameter, over the ranks that share it) in the
    host's memory, but for the optimizer step itself. Needs optimizer.distributed."""
