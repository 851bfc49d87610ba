"""Every setting of a run, with its meaning. Imports neither torch nor Megatron, so any machine can check a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid")

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Seconds = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True, slots=True)
class RunConfig:
    __pydantic_config__ = STRICT

    dir: str = "runs/default"
    """Where checkpoints, logs, the picture and the export go. The same command run again resumes from here."""
    seed: Count = 1
    """Seeds the order of the prompts, the draws of the pruning, and the sampling of the local engine."""
    steps: Positive = 100
    """Training steps, counted from the start of the run and not from a resume."""
    checkpoint_every: Count = 50
    """Steps between checkpoints; 0: only after the last step."""
    keep_checkpoints: Positive = 2
    """How many of the latest checkpoints stay on the disk."""
    export: bool = True
    """Write the trained policy as a Hugging Face directory (``DIR/hf``) at the end."""
    length_gate: Annotated[float, Field(gt=1.0)] | None = 1.5
    """Factor by which the mean response length may fall below or rise above that of the first steps before the log
    says so, once each time; null: never. A policy that takes to a short style early may not come back from it."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    __pydantic_config__ = STRICT

    path: str = ""
    """Hugging Face directory of the initial policy: config.json, safetensors, tokenizer files."""
    checkpoint: str | None = None
    """Megatron checkpoint folder (of a run, or from tools/convert_ckpt/hf_to_megatron.py) whose weights take the place
    of those in model.path, where config.json and the tokenizer then suffice."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the weights in the forward pass; master weights and gradients are fp32."""
    spec: Literal["auto", "torch", "te"] = "auto"
    """Layers: ``torch`` runs anywhere, ``te`` is Transformer Engine; ``auto``: te where CUDA and it are present."""
    recompute: Literal["none", "full"] = "none"
    """Activation recomputation: ``full`` keeps only the input of each layer."""
    head_chunk_mib: Positive = 64
    """Size of the fp32 logits that the policy head holds at a time."""


@dataclass(frozen=True, slots=True)
class LayoutConfig:
    __pydantic_config__ = STRICT

    tp: Positive = 1
    """Tensor-parallel ranks."""
    pp: Positive = 1
    """Pipeline stages."""
    cp: Positive = 1
    """Context-parallel ranks."""
    dp: Positive | None = None
    """Data-parallel replicas; null: as many as the ranks (torchrun, srun) or this machine's GPUs give, else 1."""
    sequence_parallel: bool = False
    """Shard norms and their activations along the sequence over the tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class ArithmeticConfig:
    __pydantic_config__ = STRICT

    problems: Positive = 512
    """Size of the training pool. It is finite, so that prompts come back and pruning by history has a history."""
    eval_problems: Positive = 200
    """Held-out problems, none of which is in the training pool."""
    min_terms: Annotated[int, Field(ge=2)] = 2
    max_terms: Annotated[int, Field(ge=2)] = 4
    """Numbers in a sum; the written-out answer has one line per addition, so its length varies with this."""
    max_operand: Positive = 99
    """Largest number in a sum."""
    forgotten_carries: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the carries that the worked answers forget. Above one half ``sft`` teaches a policy that is mostly wrong
    where there is a carry and sometimes right: what reinforcement learning can mend."""
    short_answers: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the worked answers that are the result alone, always right: ``sft`` on both styles leaves it to
    reinforcement learning which of them the policy settles on."""
    seed: int = 0
    """Seed of the problems; apart from run.seed, so that runs with several seeds share their problems."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    __pydantic_config__ = STRICT

    train: str = "arithmetic"
    """JSONL or parquet file of prompts, or ``arithmetic`` for the generator."""
    eval: str | None = None
    """Held-out prompts, in the same form; null: the generator's held-out problems, or no evaluation for a file."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages. Dots reach into nested objects."""
    label_key: str = "label"
    """Column of the reference answer (``reward_model.ground_truth`` for files in verl's form)."""
    response_key: str | None = None
    """Column of the worked answer that ``sft`` imitates; null: the label's column."""
    system: str | None = None
    """System message put before a prompt that is a string."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false: the prompt's text as it stands."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What a prompt over max_prompt_tokens does: stop before the run begins, or leave the pool, counted."""
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Servers that the run starts itself, on the machine of its first rank, and restarts when they die."""

    __pydantic_config__ = STRICT

    count: Count = 0
    """How many; 0: none, they are given in rollout.servers."""
    tp: Positive | tuple[Positive, ...] = 1
    """Tensor-parallel ranks of each server: one number for all, or one for each."""
    command: tuple[str, ...] | None = None
    """What starts a server, before the flags that say which model, where and how; null: ``python -m
    sglang.launch_server`` or ``vllm serve``, from the path. Servers want an environment of their own: name its
    interpreter here."""
    flags: tuple[str, ...] = ()
    """More flags for the server, after ours."""
    env: tuple[str, ...] = ()
    """Environment variables, each as ``NAME=value``."""
    first_port: Annotated[int, Field(ge=1024, le=65535)] = 30000
    """Servers take free ports from here upwards."""
    ports: Positive = 1000
    """How many ports may be tried."""
    wait_s: Seconds = 900.0
    """How long a server may take until it can generate."""
    restarts: Count = 3
    """How often a server that died is started again, over the whole run."""


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """How weights reach the servers."""

    __pydantic_config__ = STRICT

    transport: Literal["collective", "tensor", "disk"] = "collective"
    """``collective``: a process group from each pipeline stage to all servers (NCCL, gloo without CUDA); ``tensor``:
    by value over HTTP; ``disk``: safetensors that servers read back."""
    bucket_mib: Positive | None = None
    """Weights that travel at a time; null: 512 from a GPU, 30 from a CPU (of more, fresh memory costs servers more than
    the wire does)."""
    in_flight: Literal["retract", "keep", "abort"] = "retract"
    """Requests that a sync finds unfinished (rollout.ahead = 1): ``retract`` recomputes what they have with the new
    weights and goes on; ``keep`` goes on with the old cache; ``abort`` sends them again with the tokens made so far."""
    timeout_s: Seconds = 120.0
    """How long a server may take for any one request of a sync, and a bucket to travel."""
    retries: Count = 2
    """How often a sync that failed is tried again, without the servers that failed in it."""
    check_every: Count = 10
    """Syncs between comparisons of the servers' log-probabilities with the actor's; the first one is always followed by
    one. 0: only the first."""
    folder: str | None = None
    """Where ``disk`` writes, on a file system that servers share; null: ``RUN.DIR/sync``."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    __pydantic_config__ = STRICT

    engine: Literal["local", "sglang", "vllm"] = "local"
    """What generates: ``local`` is the policy itself, in the trainer's own processes; the others are servers."""
    servers: Literal["slurm"] | tuple[str, ...] = ()
    """URLs of servers, or of an SGLang router, that run already; ``slurm``: one on each node of this job's second
    heterogeneous component, at rollout.launch.first_port."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    prompts_per_step: Positive = 64
    """N, the window of candidate prompts that a step considers, before pruning."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """G, completions for each prompt."""
    max_response_tokens: Positive = 1024
    """A completion is cut off here, and counted as truncated."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature; log-probabilities are those of the scaled distribution, in engine and trainer alike."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; null: the policy's end-of-sequence tokens."""
    ahead: Literal[0, 1] = 0
    """1: generate the next step's rollouts while a step trains, with weights that are one update old, corrected by
    truncated importance weights (loss.tis_cap); 0: exactly on-policy."""
    colocated: bool = False
    """Servers share the trainer's GPUs: they release their memory while it trains."""
    max_batch: Positive = 256
    """Completions that the local engine decodes at once on a rank."""
    max_in_flight: Positive = 64
    """Prompts that a rank has under way at each server."""
    timeout_s: Seconds = 1800.0
    """How long ranks wait, without progress, for rollouts or for a server that can generate, before the run stops."""
    request_timeout_s: Seconds = 1800.0
    """How long one prompt may take at a server before it is sent to another."""
    health_timeout_s: Seconds = 30.0
    """A server that says nothing for so long, though it is asked, is taken out."""
    attempts: Positive = 4
    """How often a prompt is sent before the run stops: servers may die, but not of the same prompt for ever."""
    heartbeat_s: Seconds = 60.0
    """Seconds between words on how far the rollouts are, while ranks wait for them."""
    max_logprob_diff: NonNegative | None = None
    """Mean |log p| difference of trainer and engine, on tokens of the trainer's own weights, past which the run stops;
    null: 1e-4 in fp32, 0.1 in bf16."""
    max_prob_error: Annotated[float, Field(ge=1.0)] | None = None
    """Mean of exp |log p difference| past which the run stops; null: 1.001 in fp32, 1.2 in bf16."""


@dataclass(frozen=True, slots=True)
class RewardConfig:
    __pydantic_config__ = STRICT

    function: str = "math"
    """``math``, ``exact``, or a function with verl's signature as ``module:function`` or ``file.py:function``."""
    timeout_s: Seconds = 10.0
    """Wall-clock limit for scoring one completion; past it the worker is killed and the group leaves the step."""
    workers: Positive = 1
    """Worker processes per rank that generates."""
    max_failures: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Share of a step's completions whose scoring may fail (hang, raise, NaN) before the run stops."""
    overlong_buffer: Count | None = None
    """DAPO's soft penalty: over this many tokens up to the response limit the reward falls linearly by up to 1; null:
    the host's (dapo a fifth of the limit, grpo none)."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    __pydantic_config__ = STRICT

    name: Literal["grpo", "dr_grpo", "dapo", "gspo"] = "grpo"
    """The host. grpo: mean over each sequence, then over sequences; dr_grpo: sums over one constant, advantages not
    divided by their deviation; dapo: mean over tokens, a higher upper clip; gspo: one ratio for a whole sequence."""
    clip_low: NonNegative | None = None
    """Clip of the ratio below 1; null: the host's (0.2; gspo 3e-4)."""
    clip_high: NonNegative | None = None
    """Clip of the ratio above 1; null: the host's (0.2; dapo 0.28; gspo 4e-4)."""
    kl_coef: NonNegative = 0.0
    """Weight of the k3 estimate of KL(policy || initial policy), per token; 0 keeps no reference model."""
    tis_cap: Annotated[float, Field(ge=1.0)] | None = None
    """Cap of the truncated importance weight of policy over engine, per token; null: off, or 2 with rollout.ahead."""
    updates_per_rollout: Positive = 1
    """Optimizer steps per rollout: the window is split into so many minibatches of whole groups."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    __pydantic_config__ = STRICT

    shape: Literal["constant", "linear", "cosine", "adaptive"] = "constant"
    """How the kept share moves from 1 at the first step to ``keep``: at once, or along a line or half a cosine.
    ``adaptive``: at every step the least share, from ``keep`` upwards, that keeps the estimated variance inflation of
    this level under ``max_inflation``."""
    max_inflation: Annotated[float, Field(ge=1.0)] = 1.2
    """adaptive: by how much this level may multiply the estimated sum of squares of the gradient's terms."""
    ramp: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """Share of the run over which a linear or cosine schedule gets there."""
    off_last: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the run, at its end, without pruning (as InfoBatch does)."""


@dataclass(frozen=True, slots=True)
class PromptPruningConfig:
    __pydantic_config__ = STRICT

    rule: Literal["none", "threshold", "neyman", "greso", "dynamic_sampling"] = "neyman"
    """Unbiased: none, threshold (the paper's), neyman (least variance). Biased: greso (skips prompts that gave equal
    rewards again and again), dynamic_sampling (DAPO's: groups of equal reward are replaced)."""
    keep: Fraction = 0.7
    """neyman: share of the window's prompts that is rolled out; threshold: 1 − r, the chance of a low-scored one.
    greso and dynamic_sampling have no budget and do not look at it."""
    floor: Fraction = 0.2
    """neyman: least inclusion probability of a prompt."""
    decay: Fraction = 0.9
    """Weight that a visit's evidence keeps at the prompt's next visit."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """``systematic``: the number kept is fixed to within one; ``bernoulli``: each prompt by itself; null: the rule's
    (threshold and greso by themselves, neyman systematic)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True, slots=True)
class CompletionPruningConfig:
    __pydantic_config__ = STRICT

    rule: Literal["none", "threshold", "neyman", "threshold_deterministic", "top_k"] = "neyman"
    """Unbiased: none, threshold (the paper's), neyman (least variance). Biased: threshold_deterministic (the paper's
    Appendix A), top_k (CPPO's: the largest advantages)."""
    keep: Fraction = 0.5
    """neyman: share of the rolled-out tokens that is trained on; top_k: of the completions; threshold and
    threshold_deterministic: 1 − r, the chance or share of the low-scored ones."""
    score: Literal["engine", "head", "advantage"] = "engine"
    """What neyman takes for the norm of a completion's gradient. ``engine``: the advantage times how surprising its
    tokens were to the engine, for free; ``head``: times the policy head's exact score norms, which costs a forward pass
    over all rollouts; ``advantage``: the advantage alone, for engines without log-probabilities."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """As at the level of prompts; null: the rule's own (threshold by themselves, neyman systematic)."""
    normaliser: Literal["full", "kept"] = "full"
    """top_k: what the loss is divided by: the whole minibatch, or what is kept of it, as CPPO has it (which makes steps
    longer, the more is pruned)."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True, slots=True)
class PruningConfig:
    __pydantic_config__ = STRICT

    prompts: PromptPruningConfig = field(default_factory=PromptPruningConfig)
    completions: CompletionPruningConfig = field(default_factory=CompletionPruningConfig)
    max_weight: Annotated[float, Field(ge=1.0)] = 5.0
    """Bound on 1/(π_prompt·π_completion), kept by a floor on the completions' probabilities; no weight is cut off."""
    refill: Literal["none", "prompts"] = "none"
    """``prompts``: what completion pruning saves goes into more prompts: the window grows by 1/completions.keep, so
    that as much is trained on as without pruning (CPPO's dynamic allocation). Under greso, more prompts are rolled out
    until the window is full of groups of mixed reward (its adaptive batch), as dynamic_sampling always does."""
    max_rounds: Positive = 10
    """greso with refill, and dynamic_sampling: how often a step rolls out prompts before it trains on what it has."""


@dataclass(frozen=True, slots=True)
class PackConfig:
    __pydantic_config__ = STRICT

    max_tokens: Positive = 4096
    """Most tokens in a pack (one microbatch); a step's capacity is chosen below it so that packs are full."""
    window: Positive = 64
    """How many of the longest unpacked sequences the packer looks at."""
    min_per_rank: Count = 0
    """Fewest packs per data-parallel rank, as long as sequences suffice; 0: twice the pipeline stages, or 1 without."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    __pydantic_config__ = STRICT

    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or half a cosine down to min_lr at the last step."""
    min_lr: NonNegative = 0.0
    warmup_steps: Count = 0
    """Optimizer steps over which the learning rate rises linearly from lr/warmup_steps."""
    clip_grad: NonNegative = 1.0
    """Limit of the gradient's global norm; 0: none."""
    weight_decay: NonNegative = 0.0
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    distributed: bool = True
    """Shard the optimizer's state over the data-parallel ranks."""
    checkpoint_format: Literal["fully_reshardable", "dp_reshardable"] = "fully_reshardable"
    """How a distributed optimizer's state is written: ``fully_reshardable`` resumes in any layout; ``dp_reshardable``
    gathers nothing and is faster, and resumes at the same layout.tp and pp only."""


@dataclass(frozen=True, slots=True)
class EvalConfig:
    __pydantic_config__ = STRICT

    every: Count = 50
    """Steps between evaluations; 0: only before the first and after the last step."""
    problems: Count = 200
    """Held-out problems answered greedily; 0: no evaluation."""
    show: Count = 3
    """Answers printed before and after training."""


@dataclass(frozen=True, slots=True)
class SftConfig:
    __pydantic_config__ = STRICT

    steps: Positive = 200
    batch: Positive = 32
    """Worked answers per step."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    warmup_steps: Count = 10
    out: str | None = None
    """Where the warmed-up policy goes, as a Hugging Face directory; null: ``RUN.DIR/sft``."""


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run. ``megatron-dppo train FILE a.b=c`` reads FILE over these defaults, then the overrides."""

    __pydantic_config__ = STRICT

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
