"""Settings of the run, the machines, the policy, the layout over ranks, and the optimizer."""

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
    """Folder of checkpoints, logs, the picture and the export. The same command resumes from this
    folder."""
    resume: Literal["same", "force"] = "same"
    """Changes that are allowed when a run is started again. ``same``: length, speed and place of
    the run. A change of the policy, the data, the prompts of a step, the reward, the loss, the
    pruning, the seed or the content of their files is refused, because the results would mix old
    and new settings. ``force``: all changes, from the last checkpoint on; other data, another
    tokenizer or another seed begin a new order of prompts. ``sft`` with ``force`` warms up a
    policy that was warmed up already."""
    seed: Count = 1
    """Random seed of the order of prompts, the draws of the pruning, and the local engine's
    sampling."""
    steps: Positive = 100
    """Training steps, counted from the start of the run, not from a resume."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: Positive = 2
    """Number of the latest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out accuracy, of the steps that are both
    evaluated (eval.every) and saved (run.checkpoint_every)."""
    checkpoint_in_background: bool = False
    """Write checkpoints during training, from a copy of the state in host memory."""
    stall_warning_s: Seconds = 120.0
    """Seconds that ranks wait for a late rank before the log names the rank and the rank's place in
    the code. If no rank has moved for half of layout.timeout_s, the log names all ranks. Also
    seconds without progress in rollouts and evaluations, before the log names the code or
    conversation that hangs."""
    max_idle_steps: Count = 20
    """Consecutive steps without a gradient before the run is saved and ends with an error: if all
    rewards of every group are equal, as after a collapse, no further step changes the policy. 0: no
    limit."""
    export: bool = True
    """Write the trained policy as a Hugging Face directory (``DIR/hf``) at the end."""
    length_gate: Annotated[float, Gt(1.0)] | None = 1.5
    """Largest factor of a fall or rise of the mean response length from the mean of the first
    steps. Beyond it the log has a warning, once for each fall or rise; null: no warning. A policy
    that shortens its responses early may never lengthen them again."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)
    """Destinations of every row of metrics.jsonl, in addition to the file: ``[tensorboard, wandb,
    mlflow, trackio]``. All except tensorboard are extras of this package, and read servers and
    accounts from their own environment variables (WANDB_MODE, MLFLOW_TRACKING_URI, …). Without
    these variables all data stays in the run's folder, and no network is used."""

    profile: tuple[Positive, ...] = ()
    """Steps, counted from 1, to record in ``DIR/profile``: every rank with torch's profiler, and on
    GPUs the allocator. Recording makes a step slower."""

    _once = field_validator("loggers")(check_unique)


class EvalConfig(Section):
    every: Count = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    problems: Count | None = 200
    """Number of held-out problems to answer, the first of each file or benchmark; null: all (as in
    ``eval``, unless the command line has another value); 0: no evaluation."""
    benchmarks: tuple[str, ...] = ()
    """Benchmarks in addition to data.eval: by name (gsm8k, math500, aime24, minerva, olympiadbench,
    amc23); generators by name, for their held-out problems; files as ``NAME=FILE``."""
    folder: str | None = None
    """Folder of the benchmarks' files; null: $MEGATRON_DPPO_BENCHMARKS if set, else
    ``data/eval``."""
    samples: Positive = 1
    """Answers to each problem."""
    temperature: NonNegative | None = None
    """Sampling temperature of the answers, 0 is greedy; null: greedy for one sample,
    rollout.temperature for more."""
    top_p: Fraction | None = None
    """Sample each token of an answer from the likeliest tokens that together have at least this
    probability; null: all tokens. With top_k, a fraction of the probability that top_k leaves
    (SGLang: of all tokens)."""
    top_k: Positive | None = None
    """Sample each token of an answer from this number of likeliest tokens; null: all tokens, also
    with rollout.top_k."""
    max_response_tokens: Positive | None = None
    """Largest number of tokens in an answer; longer answers are cut off. null:
    rollout.max_response_tokens."""
    show: Count = 3
    """Answers printed before and after training."""
    batch: Positive = 64
    """``eval``: problems to request at a time. A kill loses at most these problems; servers idle
    while the last one is answered."""
    out: str | None = None
    """``eval``: folder of answers and scores; null: ``RUN/eval/MODEL``."""
    baseline: str | None = None
    """``eval``: folder of an earlier evaluation to compare with, problem by problem."""


class SftConfig(Section):
    steps: Positive = 200
    """Optimizer steps."""
    batch: Positive = 32
    """Worked answers per step."""
    lr: AboveZero = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: Count = 10
    """Steps of a linear rise of the learning rate to sft.lr."""
    out: str | None = None
    """Folder of the warmed-up policy, a Hugging Face directory; null: ``RUN.DIR/sft``."""


class ClusterConfig(Section):
    """Machines that ``plan`` and ``launch`` use. A run takes the machines at hand, and reads only
    ``gpu``."""

    nodes: Positive = 1
    """Nodes of the actors."""
    server_nodes: Count = 0
    """Nodes of the rollout servers; 0: any servers run on the actors' nodes."""
    gpus_per_node: Positive = 8
    """GPUs of each node, both for actors and for servers."""
    gpu: Literal["a100-40", "a100-80", "h100", "h200", "b200"] = "h100"
    """Kind of GPU. A plan uses the kind's memory, bandwidth and matrix rate;
    ``perf/actor_train_peak_share`` the matrix rate."""
    price_per_gpu_hour: NonNegative | None = None
    """Price of one GPU for one hour, in any currency; null: plans have hours and no price."""
    account: str | None = None
    """Slurm account; null: the user's default."""
    partition: str | None = None
    """Slurm partition; null: the cluster's default."""
    hours: AboveZero = 4.0
    """Slurm's time limit for one job, in hours. Before the limit an unfinished run saves, and
    resumes in the next job."""
    stop_before_limit_s: Seconds = 600.0
    """Seconds between the signal to save and stop, and the time limit: longer than a step and a
    checkpoint."""
    container: str | None = None
    """Container image for the job's steps (Pyxis); null: the environment that submits the job."""
    mounts: tuple[str, ...] = ()
    """Folders to mount in the container, each as ``/from:/to``."""


HEAD_CHUNK_MIB = {"cpu": 64, "cuda": 1024}
"""Default of ``model.head_chunk_mib`` by type of device. Each chunk reads the output layer and its
gradient again: little of a CPU's time, and much of a GPU's."""
WEIGHT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a weight, by ``model.dtype``."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Types of weights, by the names in torch, config.json and servers."""

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Matrix of a layer, by Hugging Face name. In a mixture, the last three are matrices of every
expert."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685) beside frozen weights. Only adapters are trained
    and stored in checkpoints."""

    rank: Count = 0
    """Rank of the adapters; 0: no adapters, and all weights are trained."""
    alpha: AboveZero = 32.0
    """Scale of the adapters: outputs are multiplied by alpha/rank."""
    targets: tuple[Projection, ...] = get_args(Projection)
    """Matrices with an adapter, by Hugging Face name, in all layers and experts."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    _once = field_validator("targets")(check_unique)


class ModelConfig(Section):
    path: str = ""
    """Initial policy: a Hugging Face directory with config.json, safetensors and tokenizer files;
    the id of a model on the hub (``Qwen/Qwen3-0.6B``), fetched into the hub's cache if absent; or
    the folder of a run, with the trained policy."""
    checkpoint: str | None = None
    """Megatron checkpoint folder (from a run, or from `megatron-dppo convert from-hf`) with weights
    that replace model.path's. Then model.path needs only config.json and the tokenizer."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights in the forward pass; master weights and gradients are fp32."""
    spec: Literal["auto", "torch", "te"] = "auto"
    """Implementation of the layers: ``torch`` runs anywhere, ``te`` is Transformer Engine;
    ``auto``: te for bf16 if CUDA and Transformer Engine are present."""
    deterministic: bool = False
    """Restrict Transformer Engine's layers to kernels that repeat bit by bit, which are slower.
    Otherwise a resumed run on a GPU trains as well as before, but not with identical bits."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: ``selective`` runs the feed-forward part of each layer again (or
    its experts), ``full`` keeps only the input of each layer."""
    head_chunk_mib: Positive | None = None
    """MiB of logits, including gradients, that the policy head holds at a time; null: 1024 on a
    GPU, else 64. A GPU computes all logits twice, in the forward and the backward pass, but once if
    the logits of a pack fit: 6 bytes times response tokens times vocabulary, divided by
    layout.tp."""
    reference_on_host: bool = False
    """Keep the frozen reference (with loss.kl_coef) in host memory while it is not needed. Its
    weights are then copied to the GPU once a step."""
    lora: LoraConfig = LoraConfig()

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return found

    @property
    def folder(self) -> Path:
        """Directory of the policy that ``path`` names. A model on the hub is fetched if needed.

        Raises:
            UserError: see ``hub.policy_folder``.
        """
        # A fetch leaves out the weights if ``checkpoint`` has weights.
        return policy_folder(self.path, weights=self.checkpoint is None)


class LayoutConfig(Section):
    tp: Positive = 1
    """Tensor-parallel ranks."""
    pp: Positive = 1
    """Pipeline stages."""
    cp: Positive = 1
    """Context-parallel ranks, which share the tokens of every sequence, for sequences that are too
    long for one GPU."""
    ep: Positive = 1
    """Expert-parallel ranks, each with a part of every layer's experts, taken from tp, cp and dp
    together."""
    etp: Positive | None = None
    """Tensor-parallel ranks of one expert; null: equal to tp."""
    vpp: Positive = 1
    """Virtual pipeline stages on each rank, interleaved: a smaller bubble for more messages."""
    first_stage_layers: Positive | None = None
    """Layers of the first pipeline stage; null: the same number as in the other stages."""
    last_stage_layers: Positive | None = None
    """Layers of the last pipeline stage; null: the same number as in the other stages."""
    dp: Positive | None = None
    """Data-parallel replicas; null: the number that the ranks (torchrun, srun) or this machine's
    GPUs give, else 1."""
    sequence_parallel: bool = False
    """Shard norms and their activations along the sequence over the tensor-parallel ranks."""
    timeout_s: AboveZero = 600.0
    """Longest time, in seconds, that collectives wait for the slowest rank in training, weight
    synchronisation and writing of checkpoints. Waits for rollouts have rollout.timeout_s."""

    @property
    def expert_tp(self) -> int:
        return self.etp or self.tp

    @property
    def min_ranks(self) -> int:
        """Smallest number of ranks for the layout if ``dp`` is open; possible numbers are
        multiples."""
        return self.pp * math.lcm(self.tp * self.cp, self.expert_tp * self.ep)

    @property
    def min_packs(self) -> int:
        """Smallest number of packs of a replica."""
        # Interleaved stages cannot process fewer packs than stages.
        return self.pp if self.vpp > 1 else 1

    @property
    def row_multiple(self) -> int:
        """Unit, in tokens, of the padded length of each sequence in a pack."""
        # Context parallelism gives two chunks of each sequence to each rank, to balance the work.
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def pack_multiple(self) -> int:
        """Unit of the pack length in tokens."""
        # Each rank with a slice of the sequence dimension needs an equal number of tokens.
        return math.lcm(self.row_multiple, self.cp * (self.tp if self.sequence_parallel else 1))


class OptimizerConfig(Section):
    lr: AboveZero = 1e-6
    """Learning rate after warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or half a cosine down to min_lr at the last step."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of a cosine schedule."""
    warmup_steps: Count = 0
    """Optimizer steps of the linear rise of the learning rate from lr/warmup_steps to lr."""
    clip_grad: NonNegative = 1.0
    """Limit of the gradient's global norm; 0: no limit."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay of matrices, multiplied by the learning rate; not of norms and
    biases."""
    beta1: Annotated[float, Ge(0.0), Lt(1.0)] = 0.9
    """Adam's decay of the mean of gradients."""
    beta2: Annotated[float, Ge(0.0), Lt(1.0)] = 0.95
    """Adam's decay of the mean of squared gradients."""
    eps: AboveZero = 1e-8
    """Adam's epsilon, added to the root of the mean of squared gradients."""
    distributed: bool = True
    """Shard the optimizer's state over the data-parallel and context-parallel ranks."""
    overlap: bool = False
    """Sum gradients over these ranks during the backward pass, bucket by bucket."""
    offload: bool = False
    """Keep the optimizer's state (12 bytes per parameter, over the ranks that share the state) in
    host memory outside the optimizer step. Requires optimizer.distributed."""
