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
    NonNegative,
    Pool,
    Positive,
    Seconds,
    Section,
    Share,
    each_once,
)


class ArithmeticConfig(Section):
    problems: Pool = 512
    """Size of the training pool. It is finite, so that prompts come back and pruning by history has a history."""
    eval_problems: Pool = 200
    """Held-out problems, none of which is in the training pool."""
    min_terms: Annotated[int, Ge(2)] = 2
    """Fewest numbers in a sum."""
    max_terms: Annotated[int, Ge(2), Le(1000)] = 4
    """Most numbers in a sum; the written-out answer has one line per addition, so its length varies with this."""
    max_operand: Positive = 99
    """Largest number in a sum."""
    forgotten_carries: Share = 0.0
    """Share of the carries that the worked answers forget. Above one half ``sft`` teaches a policy that is mostly wrong
    where there is a carry and sometimes right: what reinforcement learning can mend."""
    short_answers: Share = 0.0
    """Share of the worked answers that are the result alone, always right: ``sft`` on both styles leaves it to
    reinforcement learning which of them the policy settles on."""
    seed: int = 0
    """Seed of the problems; apart from run.seed, so that runs with several seeds share their problems."""


class ReasoningGymConfig(Section):
    """Read where ``data.train`` is ``reasoning_gym``; see ``data/generators.py``."""

    tasks: dict[str, dict[str, Any]] = Field(default={"chain_sum": {}})
    """reasoning-gym's names of the tasks, each with settings for its generator (``{}``: its own defaults); problems are
    taken from them in turn."""
    problems: Pool = 4096
    """Size of the training pool."""
    eval_problems: Pool = 200
    """Held-out problems, none of which is in the training pool."""
    seed: int = 0
    """Seed of the problems."""


class VerifiersConfig(Section):
    """Read where ``data.train`` is ``verifiers``; see ``data/verifiers.py``."""

    environment: str = ""
    """An environment, by the id that verifiers' ``load_environment`` takes. One of several turns wants
    ``rollout.conversation=verifiers``."""
    arguments: dict[str, Any] = Field(default={})
    """For its ``load_environment``."""
    eval_problems: Pool = 200
    """Problems that are drawn to be held out where the environment has no held-out ones of its own."""


class SourceConfig(Section):
    path: str
    """As ``data.train`` names it."""
    weight: AboveZero = 1.0
    """Its prompts' share of every step, relative to the other sources'."""
    prompt_key: str | None = None
    """null: ``data.prompt_key``."""
    label_key: str | None = None
    """null: ``data.label_key``."""


class DataConfig(Section):
    train: str | tuple[SourceConfig, ...] = "arithmetic"
    """JSONL or parquet file of prompts, or a folder of such files, which are read in the order of their names; a data
    set of the Hugging Face hub (``openai/gsm8k:main``: its id, then its configuration and its split, which may be left
    out where it has one, and for ``train``); ``arithmetic`` or ``reasoning_gym``, which generate them; or
    ``verifiers``, whose environments bring them. Or several of these, each with its share of every step: ``[{path:
    a.jsonl, weight: 3}, {path: b.parquet, weight: 1}]``; each goes through its prompts in an order and in epochs of its
    own."""
    rollouts: str | None = None
    """JSONL or parquet file of prompts with completions, rewards and log-probabilities of another policy, which are
    trained on in the place of data.train and of the policy's own rollouts; see ``data/offline.py``. Biased: a
    bounded weight for each token, policy over behaviour, is all that corrects for the other policy. null: the policy
    rolls out."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts, a file, a folder or a data set of the hub (its split ``test`` where it names none); or several
    of them, each by its name: ``{aime24: aime24.jsonl, …}``, whose accuracy is then ``eval/aime24``; null: the held-out
    problems of the generator that data.train names, or no evaluation for files and for data.rollouts."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages (also as JSON text) that ends before the answer. Dots
    reach into nested objects."""
    label_key: str = "label"
    """Column of the reference answer (``reward_model.ground_truth`` for files in verl's form): a text, or a number,
    made one; objects and lists reach functions of your own as they are."""
    response_key: str | None = None
    """Column of the worked answer that ``sft`` imitates; null: the label's column."""
    system: str | None = None
    """System message put before every prompt that has none; an empty one leaves out a template's own. A chat with a
    system message of its own keeps that, and is not given this one."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template. false: the prompt's text, after the special tokens that the
    tokenizer puts before text, such as Llama's beginning of text."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Switches of the chat template, such as ``{enable_thinking: false}`` of Qwen3's, that are not left as they are by
    default; as TRL and vLLM call them."""
    date: str | None = None
    """Date for a chat template that prints one, such as Llama 3.2's: ``2026-01-31``. null: the day of the first start,
    which is stored in the folder of the run or evaluation."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Handling of prompts over max_prompt_tokens: stop before the run begins, or drop and count them."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    verifiers: VerifiersConfig = VerifiersConfig()

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, text: str | None) -> str | None:
        return text and date.fromisoformat(text).isoformat()

    @property
    def names(self) -> tuple[str, ...]:
        """Names in data.train, each once."""
        return (self.train,) if isinstance(self.train, str) else tuple(dict.fromkeys(each.path for each in self.train))


ServerKind = Literal["sglang", "vllm"]
"""Kinds of rollout servers; each has a file of its name in ``rollout/servers``."""


class LaunchConfig(Section):
    """Servers that the run starts itself, on the machine of its first rank, and restarts when they die."""

    count: Count = 0
    """How many; 0: none, they are given in rollout.servers."""
    tp: Positive | tuple[Positive, ...] = 1
    """Tensor-parallel ranks of each server: one number for all, or one for each."""
    command: tuple[str, ...] | None = None
    """Command that starts a server, before the flags for model, address and layout; null: ``python -m
    sglang.launch_server`` or ``vllm serve``, from the path. Servers require their own environment: name its interpreter
    here, or in the environment variable SERVER_PYTHON."""
    flags: tuple[str, ...] = ()
    """More flags for the server, after ours. With rollout.colocated one of them must bound its memory:
    ``--mem-fraction-static`` (SGLang, of what is free as it starts) or ``--gpu-memory-utilization`` (vLLM, of all)."""
    env: tuple[str, ...] = ()
    """Environment variables, each as ``NAME=value``."""
    first_port: Annotated[int, Ge(1024), Le(65535)] = 30000
    """Servers take free ports from here upwards."""
    ports: Positive = 1000
    """How many ports may be tried."""
    wait_s: Seconds = 900.0
    """How long a server may take until it can generate."""
    restarts: Count = 3
    """How often a server that died is started again, over the whole run."""

    @property
    def sizes(self) -> int:
        """Numbers in rollout.launch.tp, if it is a list."""
        return len(self.tp) if isinstance(self.tp, tuple) else 0

    @property
    def last_port(self) -> int:
        """The last of rollout.launch.ports."""
        return self.first_port + self.ports - 1


class SyncConfig(Section):
    """How weights reach the servers."""

    transport: Literal["collective", "disk"] = "collective"
    """``collective``: a process group from each pipeline stage to all servers (NCCL, gloo without CUDA); ``disk``:
    safetensors that servers read back."""
    bucket_mib: Positive | None = None
    """Weights that travel at a time; null: 512 from a GPU, 30 from a CPU (of more, fresh memory costs servers more than
    the wire does)."""
    in_flight: Literal["retract", "keep", "abort"] = "retract"
    """Requests that a sync finds unfinished (with rollout.ahead): ``retract`` recomputes what they have with the new
    weights and continues; ``keep`` continues with the cache that older weights have made; ``abort`` sends them again
    with the tokens made so far."""
    timeout_s: Seconds = 120.0
    """How long a server may take for any one request of a sync, and a bucket to travel."""
    retries: Count = 2
    """How often a sync that failed is tried again, without the servers that failed in it."""
    check_every: Count = 10
    """Syncs between comparisons of the servers' log-probabilities with the actor's; the first one is always followed by
    one. 0: only the first."""
    adapter: bool = False
    """With model.lora: servers hold the policy of model.path, and each sync sends them the adapters alone: SGLang
    with a request, vLLM as files in ``folder``."""
    folder: str | None = None
    """Where ``disk``, and with vLLM ``adapter``, writes, on a file system that servers share, such as a folder in
    /dev/shm for servers on the same machine; null: ``RUN.DIR/sync``."""

    @property
    def patience_s(self) -> float:
        """Twice rollout.sync.timeout_s: ranks that have nothing to send wait in gloo until rollout.timeout_s."""
        return 2 * self.timeout_s


class BranchConfig(Section):
    """A level of forks in a tree of completions. Name ``at`` or ``entropy``, not both."""

    at: Positive | None = None
    """Fork after so many tokens of the response."""
    entropy: AboveZero | None = None
    """Fork before the first token whose distribution has more entropy (nats). Later tokens have no influence, because
    they would bias the gradient. Servers report likely tokens alone, which give a lower bound of the entropy: all other
    tokens count as one."""
    children: Annotated[int, Ge(2)] = 2
    """Continuations of each branch."""

    @model_validator(mode="after")
    def _forks_once(self) -> Self:
        if (self.at is None) == (self.entropy is None):
            raise ValueError("is to have either at (tokens of the response) or entropy (nats)")
        return self


class TreeConfig(Section):
    """A tree of completions that share prefixes. The leaves are the group of a prompt."""

    branches: tuple[BranchConfig, ...] = ()
    """Forks of a response, by level; empty: no tree. With ``[{at: 200, children: 2}]`` each response is continued twice
    after 200 tokens. With ``entropy`` (nats) in place of ``at`` the fork is before the first token whose distribution
    has more entropy. A response that ends before a fork is each of the leaves below."""
    roots: Annotated[int, Ge(2)] | None = None
    """Completions from the prompt on; null: rollout.samples_per_prompt divided by the children of all levels."""
    baseline: Literal["mixed", "depth"] = "mixed"
    """Baseline of a segment's value, which is the mean reward of the leaves below the segment. ``mixed`` is unbiased:
    the mean of the siblings' values and of the other roots' mean value. ``depth`` is biased: as in BranchGRPO, mean and
    standard deviation of all segments of the level normalise the value."""
    depths: tuple[Count, ...] = ()
    """Depths of the segments to train on: numbers of forks before a segment; empty: all. A list of some depths is
    BranchGRPO's pruning in depth, which is biased."""
    fusion: Literal["mean", "probability"] = "mean"
    """Value of a branch. ``mean``: mean of the children's values; ``probability``: weighted by the softmax of the
    children's log-probabilities (BranchGRPO's option), which is biased."""

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
    """Rollout engine: ``local`` is the policy itself, in the trainer's own processes; the others are servers."""
    engine_function: str | None = None
    """Factory of an engine of your own, which replaces the local one: a class or function, ``file.py:name`` or
    ``module:name``, called on every rank with the policy's folder, and ``device``, ``dtype`` and ``world``."""
    servers: Literal["slurm"] | tuple[str, ...] = ()
    """URLs of servers, or of an SGLang router, that run already; ``slurm``: one on each node of this job's second
    heterogeneous component, at rollout.launch.first_port."""
    launch: LaunchConfig = LaunchConfig()
    sync: SyncConfig = SyncConfig()
    prompts_per_step: Positive = 64
    """N, the window of candidate prompts that a step considers, before pruning."""
    samples_per_prompt: Annotated[int, Ge(2)] = 8
    """G, completions for each prompt."""
    tree: TreeConfig = TreeConfig()
    max_response_tokens: Positive = 1024
    """A completion is cut off here, and counted as truncated."""
    temperature: AboveZero = 1.0
    """Sampling temperature; log-probabilities are those of the scaled distribution, in engine and trainer alike."""
    stop_token_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; null: those of generation_config.json, else of config.json, and the tokenizer's end
    of turn."""
    conversation: str | None = None
    """``async rollout(client, prompt)`` as ``module:function`` or ``file.py:function``: it has a conversation with the
    policy for each completion, of one sequence or several, and may call tools between its turns. ``verifiers``: the
    environment of ``data.verifiers`` has it. null: a completion is one request."""
    roles: tuple[str, ...] = ()
    """Roles in which the policy speaks in rollout.conversation, such as ``[solver, critic]``. Each of its turns says
    which, and reward.function gives each role a reward, whose baseline is that role's alone. Biased where they differ:
    see ``rl/advantages.py``. Empty: a conversation has one reward."""
    ahead: Count = 0
    """Steps whose rollouts are asked for before a step trains, beyond its own: servers generate meanwhile, with weights
    that are so many updates old at most, corrected by truncated importance weights (loss.tis_cap). Steps train in the
    order in which they were asked for. 0: exactly on-policy."""
    colocated: bool = False
    """Servers share the trainer's GPUs: they release their memory while it trains, and it gives back its gradients and
    caches while they generate. Wants rollout.sync.transport = disk and rollout.ahead = 0."""
    max_batch: Positive = 256
    """Completions that the local engine decodes at once on a rank."""
    longest_first: bool = True
    """Ask for the prompts of a step by their expected tokens, longest first; false: in the order of the epoch."""
    max_in_flight: Positive = 64
    """Prompts that a rank has under way at each server."""
    timeout_s: Seconds = 1800.0
    """How long ranks wait, without progress, for rollouts or for a server that can generate, before the run stops; also
    how long a user's code may hang in rollouts and evaluations, on one rank too."""
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
    max_prob_error: AtLeastOne | None = None
    """Mean of exp |log p difference| past which the run stops; null: 1.001 in fp32, 1.2 in bf16."""

    _once = field_validator("roles")(each_once)

    @property
    def served(self) -> bool:
        """Whether servers generate."""
        return self.engine != "local"

    @property
    def segments(self) -> int:
        """Segments of a completion, each with an advantage of its own; 0: a completion has one."""
        return len(self.tree.branches) + 1 if self.tree.branches else len(self.roles)

    @property
    def tree_leaves(self) -> int:
        """Leaves of rollout.tree."""
        each = math.prod(branch.children for branch in self.tree.branches)
        return each * (self.tree.roots or max(self.samples_per_prompt // each, 2))
