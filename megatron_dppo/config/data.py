"""Prompts, and what their answers are worth."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field, field_validator

from megatron_dppo.config.types import AboveZero, Count, Positive, Seconds, Section, Share


class ArithmeticConfig(Section):
    problems: Positive = 512
    """Size of the training pool. It is finite, so that prompts come back and pruning by history has a history."""
    eval_problems: Positive = 200
    """Held-out problems, none of which is in the training pool."""
    min_terms: Annotated[int, Ge(2)] = 2
    """Fewest numbers in a sum."""
    max_terms: Annotated[int, Ge(2)] = 4
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
    problems: Positive = 4096
    """Size of the training pool."""
    eval_problems: Positive = 200
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
    eval_problems: Positive = 200
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
    """JSONL or parquet file of prompts; a data set of the Hugging Face hub (``openai/gsm8k:main``: its id, then its
    configuration and its split, which may be left out where it has one, and for ``train``); ``arithmetic`` or
    ``reasoning_gym``, which generate them; or ``verifiers``, whose environments bring them. Or several of these, each
    with its share of every step: ``[{path: a.jsonl, weight: 3}, {path: b.parquet, weight: 1}]``; each goes through its
    prompts in an order and in epochs of its own."""
    rollouts: str | None = None
    """JSONL or parquet file of prompts with completions, rewards and log-probabilities of another policy, which are
    trained on in the place of data.train and of the policy's own rollouts; see ``data/offline.py``. Biased: a
    bounded weight for each token, policy over behaviour, is all that corrects for the other policy. null: the policy
    rolls out."""
    eval: str | dict[str, str] | None = None
    """Held-out prompts, a file or a data set of the hub (its split ``test`` where it names none); or several of them,
    each by its name: ``{aime24: aime24.jsonl, …}``, whose accuracy is then ``eval/aime24``; null: the held-out problems
    of the generator that data.train names, or no evaluation for files and for data.rollouts."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages (also as JSON text) that ends before the answer. Dots
    reach into nested objects."""
    label_key: str = "label"
    """Column of the reference answer (``reward_model.ground_truth`` for files in verl's form): a text, or a number,
    made one; objects and lists reach functions of your own as they are."""
    response_key: str | None = None
    """Column of the worked answer that ``sft`` imitates; null: the label's column."""
    system: str | None = None
    """System message put before every prompt that has none. A chat with a system message of its own keeps that, and is
    not given this one."""
    chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false: the prompt's text as it stands."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Switches of the chat template, such as ``{enable_thinking: false}`` of Qwen3's, that are not left as they are by
    default; as TRL and vLLM call them."""
    max_prompt_tokens: Positive = 512
    """Longest prompt, in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Handling of prompts over max_prompt_tokens: stop before the run begins, or drop and count them."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    reasoning_gym: ReasoningGymConfig = ReasoningGymConfig()
    verifiers: VerifiersConfig = VerifiersConfig()

    @property
    def names(self) -> tuple[str, ...]:
        """Names in data.train, each once."""
        return (self.train,) if isinstance(self.train, str) else tuple(dict.fromkeys(each.path for each in self.train))


class RewardConfig(Section):
    function: str = "math"
    """``math``, ``exact``, ``reasoning_gym`` (its tasks' own verifiers), ``verifiers`` (its environment's rubric), or a
    function with verl's, slime's or TRL's signature as ``module:function`` or ``file.py:function``."""
    timeout_s: Seconds = 10.0
    """Seconds of processor time for scoring one completion, and ten times as many on the clock, for functions that wait
    or have other processes compute; past either the worker is killed and the group leaves the step."""
    workers: Positive = 1
    """Worker processes per rank that generates."""
    concurrency: Positive = 32
    """Completions that a worker process awaits at once, if the reward function is written ``async def``, as one that
    asks a judge by HTTP. The time limits hold for each; one that waits for too long is cancelled, and the others go on.
    1: one after another, as other functions are called. Functions of a whole group get one group after another."""
    memory_mib: Positive = 4096
    """Memory of scoring beyond the reward function's imports, in MiB; past it the completion fails."""
    thinking_tags: tuple[str, ...] = ("<think>", "</think>")
    """The opening and the closing tag of the policy's thoughts. ``math`` and ``exact`` read the answer after the last
    closing tag. Thoughts without an end leave no answer, and reward 0, also if the chat template opens them in the
    prompt. []: the answer is read from the whole completion."""
    max_failures: Share = 0.1
    """Share of a step's completions whose scoring may fail (hang, raise, NaN) before the run stops."""
    overlong_buffer: Count | None = None
    """DAPO's soft penalty: over this many tokens up to the response limit the reward falls linearly by up to 1; null:
    the objective's (dapo a fifth of the limit, grpo none)."""

    @field_validator("thinking_tags")
    @classmethod
    def _are_two(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        if tags and (len(tags) != 2 or not all(tags) or tags[0] == tags[1]):
            raise ValueError("is not two different tags, the opening and the closing one")
        return tags
