"""Prompts, and the engines that complete them."""

from __future__ import annotations

import math
from datetime import date
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le
from pydantic import Field, field_validator, model_validator

from megatron_dppo.config.types import (
    AboveZero,
    AtLeastOne,
    Count,
    Fraction,
    NonNegative,
    Pool,
    Positive,
    Seconds,
    Section,
    Share,
    check_unique,
)


class ArithmeticConfig(Section):
    problems: Pool = 512
    """Size of the training pool: finite, so that prompts come back and have a history for the
    pruning."""
    eval_problems: Pool = 200
    """Number of held-out problems, disjoint from the training pool."""
    min_terms: Annotated[int, Ge(2)] = 2
    """Fewest numbers in a sum."""
    max_terms: Annotated[int, Ge(2), Le(1000)] = 4
    """Most numbers in a sum. The worked answer has one line per addition, so that lengths vary."""
    max_operand: Positive = 99
    """Largest number in a sum."""
    forgotten_carries: Share = 0.0
    """Fraction of the carries that the worked answers forget. Above one half, ``sft`` teaches a
    policy that is mostly wrong on sums with a carry, but sometimes right: a mistake that
    reinforcement learning can correct."""
    short_answers: Share = 0.0
    """Fraction of the worked answers that are the result alone, always right. After ``sft`` on both
    styles, reinforcement learning decides the style."""
    seed: int = 0
    """Seed of the problems, separate from run.seed, so that runs with several seeds share
    problems."""


class ReasoningGymConfig(Section):
    """Problems of reasoning-gym, if ``data.train`` is ``reasoning_gym``; see
    ``data/generators.py``."""

    tasks: dict[str, dict[str, Any]] = Field(default={"chain_sum": {}})
    """reasoning-gym's names of the tasks, each with settings for the task's generator (``{}``:
    defaults). Problems are taken from the tasks in turn."""
    problems: Pool = 4096
    """Size of the training pool."""
    eval_problems: Pool = 200
    """Number of held-out problems, disjoint from the training pool."""
    seed: int = 0
    """Seed of the problems."""


class VerifiersConfig(Section):
    """Environment of verifiers, if ``data.train`` is ``verifiers``; see ``data/verifiers.py``."""

    environment: str = ""
    """Id of the environment, or of the taskset from verifiers 0.4 on. Requires
    ``rollout.agent=verifiers``."""
    arguments: dict[str, Any] = Field(default={})
    """Arguments of the environment's ``load_environment``; from verifiers 0.4 on, its
    configuration."""
    eval_problems: Pool = 200
    """Number of problems to hold out, if the environment has no held-out problems."""


class SourceConfig(Section):
    path: str
    """Source of prompts, in a form that ``data.train`` accepts."""
    weight: AboveZero = 1.0
    """Weight of the source's prompts in every step, relative to the other sources."""
    prompt_key: str | None = None
    """null: ``data.prompt_key``."""
    label_key: str | None = None
    """null: ``data.label_key``."""


class DataConfig(Section):
    train: str | tuple[SourceConfig, ...] = "arithmetic"
    """Source of prompts: a JSONL or parquet file; a folder of JSONL or parquet files, read in the
    order of file names; a data set of the Hugging Face hub, such as ``openai/gsm8k:main``; a
    generator, ``arithmetic`` or ``reasoning_gym``; or ``verifiers``, with an environment's prompts.
    The name of a data set is the id, the configuration and the split; a data set's only
    configuration and the split ``train`` may be left out. Several sources have a weight each:
    ``[{path: a.jsonl, weight: 3}, {path: b.parquet, weight: 1}]``. The weights divide every step
    among the sources; each source has its own epochs and order of prompts."""
    rollouts: str | None = None
    """JSONL or parquet file of prompts with completions, rewards and log-probabilities of another
    policy, which replaces data.train and the policy's own rollouts; see ``data/offline.py``.
    Biased: the only correction for the file's policy is a bounded weight for each token, the
    policy's probability divided by the file's. null: the policy generates the rollouts."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts: a file, a folder or a data set of the hub (default split: ``test``); or
    several by name: ``{aime24: aime24.jsonl, …}`` gives the accuracy ``eval/aime24``. null: the
    held-out problems of the generator in data.train; no evaluation for files and data.rollouts."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages (also as JSON text) that ends
    before the answer. Dots reach into nested objects."""
    label_key: str = "label"
    """Column of the reference answer (``reward_model.ground_truth`` for files in verl's form): a
    text, or a number, which becomes a text. User-defined functions receive objects and lists
    unchanged."""
    response_key: str | None = None
    """Column of the worked answer that ``sft`` imitates; null: the label's column."""
    system: str | None = None
    """System message before every prompt, except before a chat with a system message. An empty text
    removes the template's default message."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template. false: the prompt's text, after the
    tokenizer's special tokens, such as Llama's beginning of text."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as ``{enable_thinking: false}`` for Qwen3; same name as
    in TRL and vLLM."""
    date: str | None = None
    """Date for a chat template that prints one, such as Llama 3.2's: ``2026-01-31``. null: the day
    of the first start, stored in the folder of the run or evaluation."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Prompts over max_prompt_tokens: stop before the run begins, or drop and count the prompts."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    verifiers: VerifiersConfig = VerifiersConfig()

    @field_validator("date")
    @classmethod
    def _validate_date(cls, text: str | None) -> str | None:
        return text and date.fromisoformat(text).isoformat()

    @property
    def names(self) -> tuple[str, ...]:
        """Names in data.train, each once."""
        if isinstance(self.train, str):
            return (self.train,)
        return tuple(dict.fromkeys(each.path for each in self.train))


ServerKind = Literal["sglang", "vllm"]
"""Kinds of rollout servers. Each kind has a file of the same name in ``rollout/servers``."""


class LaunchConfig(Section):
    """Servers that the run starts on the machine of rank 0, and restarts if a server dies."""

    count: Count = 0
    """Number of servers; 0: rollout.servers names running servers."""
    tp: Positive | tuple[Positive, ...] = 1
    """Tensor-parallel ranks of a server: one number for all servers, or one per server."""
    command: tuple[str, ...] | None = None
    """Command that starts a server, before the flags for model, address and layout; null: ``python
    -m sglang.launch_server`` or ``vllm serve``, from the path. Servers require a separate Python
    environment: name its interpreter here, or in the environment variable SERVER_PYTHON."""
    flags: tuple[str, ...] = ()
    """Further flags, after the trainer's. With rollout.colocated a flag must bound the server's
    memory: ``--mem-fraction-static`` (SGLang, fraction of the memory that is free at the start) or
    ``--gpu-memory-utilization`` (vLLM, fraction of all memory)."""
    env: tuple[str, ...] = ()
    """Environment variables, each as ``NAME=value``."""
    first_port: Annotated[int, Ge(1024), Le(65535)] = 30000
    """First port; servers take free ports from here upwards."""
    ports: Positive = 1000
    """Largest number of ports to try."""
    wait_s: Seconds = 900.0
    """Longest time until a started server can generate, in seconds."""
    restarts: Count = 3
    """Largest number of restarts of dead servers, over the whole run."""

    @property
    def sizes(self) -> int:
        """Numbers in rollout.launch.tp, if the setting is a list."""
        return len(self.tp) if isinstance(self.tp, tuple) else 0

    @property
    def last_port(self) -> int:
        """The last of rollout.launch.ports."""
        return self.first_port + self.ports - 1


class SyncConfig(Section):
    """Transfer of the weights to the servers."""

    transport: Literal["collective", "disk"] = "collective"
    """``collective``: a process group from each pipeline stage to all servers (NCCL, gloo without
    CUDA); ``disk``: safetensors that servers read back."""
    bucket_mib: Positive | None = None
    """MiB of weights per transfer; null: 512 from a GPU, 30 from a CPU. In larger transfers from a
    CPU, fresh memory costs servers more time than the network."""
    in_flight: Literal["retract", "keep", "abort"] = "retract"
    """Requests that a sync finds unfinished (with rollout.ahead). ``retract``: recompute the cache
    with the new weights, and continue. ``keep``: continue with the cache from older weights.
    ``abort``: send the requests again with the generated tokens."""
    timeout_s: Seconds = 120.0
    """Longest time for one request of a sync to a server, and for one bucket's transfer, in
    seconds."""
    retries: Count = 2
    """Number of retries of a failed sync, each without the servers that failed."""
    check_every: Count = 10
    """Number of syncs between comparisons of the servers' log-probabilities with the actor's; 0:
    compare only after the first sync, which every run does."""
    adapter: bool = False
    """With model.lora: servers hold the policy of model.path, and each sync sends only the
    adapters, to SGLang with a request, and to vLLM as files in ``folder``."""
    folder: str | None = None
    """Folder of the files that ``disk`` writes, and ``adapter`` with vLLM, on a file system that
    the servers share; /dev/shm serves servers on the same machine. null: ``RUN.DIR/sync``."""

    @property
    def patience_s(self) -> float:
        """Twice rollout.sync.timeout_s: ranks without data to send wait in gloo until
        rollout.timeout_s."""
        return 2 * self.timeout_s


class BranchConfig(Section):
    """A level of forks in a tree of completions. Name ``at`` or ``entropy``, not both."""

    at: Positive | None = None
    """Number of tokens of the response before the fork."""
    entropy: AboveZero | None = None
    """Fork before the first token whose distribution has more entropy (nats). Later tokens have no
    influence, because they would bias the gradient. Servers report only likely tokens, which give a
    lower bound: all other tokens count as one."""
    children: Annotated[int, Ge(2)] = 2
    """Continuations of each branch."""

    @model_validator(mode="after")
    def _validate_fork_condition(self) -> Self:
        if (self.at is None) == (self.entropy is None):
            raise ValueError("is to have either at (tokens of the response) or entropy (nats)")
        return self


class TreeConfig(Section):
    """A tree of completions that share prefixes. The leaves are the group of a prompt."""

    branches: tuple[BranchConfig, ...] = ()
    """Forks of a response, by level; empty: no tree. With ``[{at: 200, children: 2}]`` each
    response is continued twice after 200 tokens. With ``entropy`` (nats) instead of ``at``, the
    fork is before the first token whose distribution has more entropy. A response that ends before
    a fork becomes each of the leaves below the fork."""
    roots: Annotated[int, Ge(2)] | None = None
    """Completions from the prompt on; null: rollout.samples_per_prompt divided by all levels'
    children."""
    baseline: Literal["mixed", "depth"] = "mixed"
    """Baseline of a segment's value, which is the mean reward of the leaves below the segment.
    ``mixed``, unbiased: the mean of the siblings' values and of the remaining roots' mean value.
    ``depth``, biased, as in BranchGRPO: the value is normalised by mean and standard deviation of
    all segments of the level."""
    depths: tuple[Count, ...] = ()
    """Depths of the segments to train on: numbers of forks before a segment; empty: all. Some
    depths only: BranchGRPO's pruning in depth, which is biased."""
    fusion: Literal["mean", "probability"] = "mean"
    """Value of a branch. ``mean``: mean of the children's values; ``probability``: weighted by the
    softmax of the children's log-probabilities (BranchGRPO's option), biased."""

    @field_validator("branches")
    @classmethod
    def _check_order(cls, branches: tuple[BranchConfig, ...]) -> tuple[BranchConfig, ...]:
        fixed = [branch.at for branch in branches if branch.at is not None]
        if sorted(set(fixed)) != fixed:
            raise ValueError("is to have earlier forks first")
        return branches

    @property
    def levels(self) -> int:
        """Levels of rollout.tree.branches."""
        return len(self.branches)

    @property
    def deepest(self) -> int:
        """The largest of rollout.tree.depths."""
        return max(self.depths, default=0)

    @property
    def last_fork(self) -> int:
        """The largest ``at`` of rollout.tree.branches."""
        return max((branch.at or 0 for branch in self.branches), default=0)


class RolloutConfig(Section):
    engine: Literal["local", ServerKind] = "local"
    """``local``: the policy in the trainer's own processes; ``sglang`` and ``vllm``: servers."""
    engine_function: str | None = None
    """Factory of a user-defined engine, which replaces the local engine: ``file.py:name`` or
    ``module:name``, called on every rank with the policy's folder, and ``device``, ``dtype`` and
    ``world``."""
    servers: Literal["slurm"] | tuple[str, ...] = ()
    """URLs of running servers, or of a running SGLang router; ``slurm``: one server on each node of
    this job's second heterogeneous component, at rollout.launch.first_port."""
    launch: LaunchConfig = LaunchConfig()
    sync: SyncConfig = SyncConfig()
    prompts_per_step: Positive = 64
    """N, the window of candidate prompts of a step, before pruning."""
    samples_per_prompt: Annotated[int, Ge(2)] = 8
    """G, completions for each prompt."""
    tree: TreeConfig = TreeConfig()
    max_response_tokens: Positive = 1024
    """Largest number of tokens in a completion; longer ones are cut off and counted as
    truncated."""
    temperature: AboveZero = 1.0
    """Sampling temperature. Log-probabilities in engine and trainer belong to the scaled
    distribution."""
    top_p: Fraction | None = None
    """Sample each token from the likeliest tokens that together have at least this fraction of the
    probability that rollout.top_k leaves (SGLang: of the whole probability); null: from all
    rollout.top_k tokens. Requires rollout.top_k."""
    top_k: Annotated[int, Ge(2), Le(64)] | None = None
    """Sample each token from this number of likeliest tokens. The engine reports the ids that top_k
    and top_p keep, and the trainer normalises over the same ids; see ``rl/sampling_mask.py``. null:
    all tokens."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; null: the stop tokens of generation_config.json, else of
    config.json, and the tokenizer's end of turn."""
    conversation: str | None = None
    """``async rollout(client, prompt)`` as ``module:function`` or ``file.py:function``: a function
    that converses with the policy for each completion, in one sequence or several, and may call
    tools between turns. null: a completion is one request."""
    agent: str | tuple[str, ...] | None = None
    """Agent that talks with the policy as with a server of OpenAI's API: ``agent(task)`` as
    ``module:function`` or ``file.py:function``, or a command as a list, which reads the task as
    JSON. Each rollout is a process with the address in OPENAI_BASE_URL and OPENAI_API_KEY; the
    model is ``policy``. The result, or the last line that a command prints, is the reward, as of a
    reward function; None leaves the reward to ``reward.function``. ``verifiers``: the environment
    of ``data.verifiers``. null: no agent."""
    agent_turns: Positive = 64
    """Most requests of an agent in one rollout. Later requests are refused, and the completion
    counts as truncated."""
    agent_tokens: Positive = 65536
    """Most tokens of all sequences of an agent's rollout together, contexts included. A request
    beyond them is refused, and the completion counts as truncated."""
    agent_timeout_s: Seconds = 300.0
    """Longest time of an agent without a pending request, in seconds. Past this limit the agent's
    processes are killed, and the rollout counts in reward/timeouts."""
    roles: tuple[str, ...] = ()
    """Roles of the policy in rollout.conversation, such as ``[solver, critic]``. Each turn of the
    policy names a role, and reward.function gives each role a reward with a separate baseline.
    Biased if the roles have different rewards: see ``rl/advantages.py``. Empty: one reward for a
    conversation."""
    ahead: Count = 0
    """Further steps whose rollouts are requested before a step trains. Servers generate during
    training, with weights at most this number of updates old; truncated importance weights
    (loss.tis_cap) correct for older weights. Steps train in the order of the requests. 0: exactly
    on-policy."""
    colocated: bool = False
    """Servers share the trainer's GPUs: servers release their memory during training, and the
    trainer its gradients and caches during generation. Requires rollout.sync.transport = disk and
    rollout.ahead = 0."""
    max_batch: Positive = 256
    """Completions that the local engine decodes at once on a rank."""
    longest_first: bool = True
    """Request the prompts of a step by expected tokens, longest first; false: in the epoch's
    order."""
    max_in_flight: Positive = 64
    """Largest number of pending prompts of a rank at each server."""
    timeout_s: Seconds = 1800.0
    """Longest wait of ranks without progress, in seconds, for rollouts or for a server that can
    generate, before the run stops. Also the longest time that user code may hang in rollouts and
    evaluations, even on a single rank."""
    request_timeout_s: Seconds = 1800.0
    """Longest time for one prompt at a server, in seconds, before another server gets the
    prompt."""
    health_timeout_s: Seconds = 30.0
    """Longest time for the answer to a health check, in seconds. A server that fails two checks in
    a row is marked unhealthy and removed."""
    attempts: Positive = 4
    """Largest number of attempts for a prompt before the run stops, so that one prompt cannot keep
    killing servers."""
    heartbeat_s: Seconds = 60.0
    """Seconds between messages on progress, while ranks wait for rollouts."""
    max_logprob_diff: NonNegative | None = None
    """Largest mean |log p| difference of trainer and engine, on tokens of the trainer's own
    weights, above which the run stops. null: 1e-4 in fp32, 0.1 in bf16."""
    max_prob_error: AtLeastOne | None = None
    """Largest mean of exp |log p difference|, above which the run stops. null: 1.001 in fp32, 1.2
    in bf16."""

    _once = field_validator("roles")(check_unique)

    @property
    def served(self) -> bool:
        return self.engine != "local"

    @property
    def has_turns(self) -> bool:
        """Whether a function or an agent makes each completion of several turns."""
        return self.conversation is not None or self.agent is not None

    @property
    def segments(self) -> int:
        """Segments of a completion, each with an advantage; 0: a completion has one advantage."""
        return len(self.tree.branches) + 1 if self.tree.branches else len(self.roles)

    @property
    def tree_leaves(self) -> int:
        """Leaves of rollout.tree."""
        each = math.prod(branch.children for branch in self.tree.branches)
        return each * (self.tree.roots or max(self.samples_per_prompt // each, 2))
