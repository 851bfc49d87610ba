"""Functions that have a run's conversations with the policy: the user's own, slime's, and environments of *verifiers*.

``rollout.conversation=FILE.py:NAME`` names a function of the user's own (``conversation.py``).

With ``rollout.conversation=verifiers`` the environment runs its own loop, and calls the policy as its server. Prompts
of other sources, such as a benchmark's, are answered in one turn.

``rollout.custom_generate`` names a function written for slime: ``async custom_generate(args, sample,
sampling_params)``. It sends requests to SGLang's own HTTP interface, and returns the sample, or a list of
several, which are one completion here, of several sequences (``rl/sequences.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config, DataConfig, VerifiersConfig
from megatron_dppo.data.examples import chat_template_for, sources_of
from megatron_dppo.data.generators import SEVERAL_TURNS, TOOLS, VERIFIERS, check_environment
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.data.turns import CALL, OTHER_CALL, NothingLeftError, Turns, TurnsError
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.plugins import FAILURES, Arguments, Sample, Status, load_function, poster
from megatron_dppo.rl.numbers import as_mask
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.conversation import Client, ConversationFunction, Part, TryAgainError, completed
from megatron_dppo.rollout.conversation_checks import UnusableError

if TYPE_CHECKING:  # torch, and HTTP, which the local engine does without
    from megatron_dppo.rollout.engine import Sampling
    from megatron_dppo.rollout.servers.conversations import ConversationClient

SETTING, OF_SLIME = "rollout.conversation", "rollout.custom_generate"
REMEDY = "Write the turns as a function of your own (rollout.conversation=FILE.py:NAME), and the reward, too"
REMEDY_OF_SLIME = "Have it return the sample with tokens, response_length, rollout_log_probs, loss_mask and status"


def conversation_of(config: Config) -> ConversationFunction | None:
    """The function of a run's conversations; None if a completion is one request. In the main thread.

    Raises:
        UserError: it cannot be found or imported, or cannot be called as it would be; or the environment cannot be
            loaded.
    """
    spec, custom_generate, roles = config.rollout.conversation, config.rollout.custom_generate, config.rollout.roles
    function: Callable[..., Any]
    if spec == VERIFIERS:
        setting, function, remedy = SETTING, _Environment(config.data.verifiers), REMEDY
    elif spec is not None:
        turns = f'("{roles[0]}", turn) for each turn' if roles else "the turns"
        remedy = f"Have it return {turns} as client.generate returned them, with lists of token ids between them"
        setting, function = SETTING, load_coroutine(SETTING, spec, ("client", "prompt"))
    elif custom_generate is not None:
        coroutine = load_coroutine(OF_SLIME, custom_generate, ("args", "sample", "sampling_params"))
        spec, setting, function, remedy = custom_generate, OF_SLIME, _SlimeFunction(coroutine, config), REMEDY_OF_SLIME
    else:
        return None
    folder = config.model.folder
    return ConversationFunction(
        setting, spec, function, remedy, roles, read_shape(folder).vocab_size, load_tokenizer(folder)
    )


def load_coroutine(setting: str, spec: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """The coroutine function that a setting names.

    Args:
        setting, spec: its name and value.
        parameters: that it is called with, by position.

    Raises:
        UserError: it cannot be found or imported, or cannot be called so.
    """
    function = load_function(setting, spec)
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        problem, form = f"cannot be called with {len(parameters)} arguments ({error})", ", ".join(parameters)
        raise UserError(setting, spec, problem, f"Give it the parameters ({form})") from error
    if not inspect.iscoroutinefunction(function):
        raise UserError(setting, spec, "is no coroutine", "Define it with async def")
    return function


def check_turns(config: Config, data: DataConfig, problems: Callable[[], Iterable[Mapping[str, object]]]) -> None:
    """
    Args:
        config: of the run.
        data: of these problems.
        problems: the extra columns of each; called where ``data.train`` has environments.

    Raises:
        UserError: some are of an environment of several turns, and nothing has a conversation.
    """
    rollout = config.rollout
    one_turn = rollout.conversation is None and rollout.custom_generate is None
    if not one_turn or VERIFIERS not in {source.name for source in sources_of(data, "train")}:
        return
    if any(SEVERAL_TURNS in each for each in problems()):
        problem = f"and the environment {data.verifiers.environment} speaks with the policy in several turns"
        raise UserError(SETTING, "null", problem, f"Set {SETTING}={VERIFIERS}")


class _Environment:
    """A conversation with the environment that has made the prompt."""

    def __init__(self, config: VerifiersConfig) -> None:
        check_environment(config)
        from megatron_dppo.data.verifiers import DOWN, load_environment, play  # takes seconds

        try:
            load_environment(config.environment, config.arguments)
        except FAILURES as error:
            problem = f"cannot be loaded ({type(error).__name__}: {error})"
            remedy = "Install it, or mend data.verifiers.arguments"
            raise UserError("data.verifiers.environment", config.environment, problem, remedy) from error
        self._load, self._play, self._down = load_environment, play, DOWN

    async def __call__(self, client: Client, prompt: Prompt) -> list[Part]:
        """
        Raises:
            TryAgainError: the environment's time was up, or something that it runs on was down.
            UnusableError: it cannot speak with the policy in token ids.
        """
        turns: list[Part] = []
        tokens = prompt.token_ids.tolist()

        async def generate(given: list[int]) -> list[int]:
            if given:
                turns.append(given)
            turn = await client.generate([*tokens, *given])
            sampled: list[int] = turn.token_ids.tolist()
            turns.append(turn)
            tokens.extend([*given, *sampled])
            if not sampled:
                raise NothingLeftError
            return sampled

        extra: Mapping[str, Any] = prompt.extra
        if "environment" not in extra:
            await generate([])
            return turns
        tools = extra.get(TOOLS, ())
        template = chat_template_for(client.tokenizer, tools) if tools else ""
        if tools and (CALL not in template or OTHER_CALL in template):
            problem = f"has tools, and the chat template has them called otherwise than by JSON in {CALL}"
            raise UnusableError(f"{problem}, the only form that is read here")
        environment = self._load(extra["environment"], extra["arguments"])
        messages = Turns(client.tokenizer, extra["input"]["prompt"], generate, tools)
        try:
            await self._play(environment, extra["input"], messages, tools)
        except TurnsError as error:
            raise UnusableError(str(error)) from error
        except self._down as error:
            raise TryAgainError(str(error)) from error
        return turns


class _SlimeFunction:
    """A function of slime's form, as a conversation."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        self._function = function
        self._options = {
            "hf_checkpoint": str(config.model.folder),
            "rollout_temperature": config.rollout.temperature,
            "rollout_max_response_len": config.rollout.max_response_tokens,
            "rollout_max_context_len": config.longest_context,
            "n_samples_per_prompt": config.rollout.samples_per_prompt,
            "partial_rollout": False,
        }

    async def __call__(self, client: ConversationClient, prompt: Prompt) -> Completion:
        """
        Raises:
            TryAgainError: the function gave the sample up.
            UnusableError: the sample is no completion of the prompt that could be trained on.
        """
        before = await client.version()
        poster.set(client.post)
        host, _, port = urlsplit(client.server.url).netloc.rpartition(":")
        arguments = Arguments(
            sglang_router_ip=host,
            sglang_router_port=int(port),
            sglang_api_key=client.server.secret,
            **self._options,
        )
        sample = Sample(
            prompt=prompt.text,
            label=prompt.label,
            metadata=dict(prompt.extra),
            index=prompt.id * client.sampling.samples + client.number,
            group_index=prompt.id,
            session_id=f"{prompt.id}-{client.number}",
        )
        sampling_params = _sampling_params(client.sampling, prompt.id, client.number)
        returned = await self._function(arguments, sample, sampling_params)
        whole = completion_of_samples(returned, prompt, client.max_tokens)
        # A function with an HTTP client of its own does not record which weights made which token.
        versions = client.told or [before, await client.version()]
        return replace(whole, versions=tuple(await client.read_versions(_spans(versions, len(whole.token_ids)))))


def _sampling_params(sampling: Sampling, prompt: int, number: int) -> dict[str, Any]:
    """Sampling parameters as slime hands them over. SGLang uses the seed with deterministic inference only."""
    return {
        "sampling_seed": sampling.seed_at(prompt, number),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_tokens,
        "stop": None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def completion_of_samples(returned: Any, prompt: Prompt, limit: int) -> Completion:
    """The completion of a sample, or of several samples, each of which is a sequence. Its versions are placeholders.

    Raises:
        TryAgainError: the function gave a sample up.
        UnusableError: they are no completion of the prompt that could be trained on.
    """
    if returned == []:
        raise UnusableError("returned an empty list, not the sample that it was given, nor a list of samples")
    first, *further = returned if isinstance(returned, list) else [returned]
    start = prompt.token_ids.tolist()
    generated = [(start, _read(first, start)), *(([], _read(sample, ())) for sample in further)]
    return completed([[turn] for _, turn in generated], prompt, generated, limit)


def _read(sample: Any, prompt: Sequence[int]) -> Completion:
    """Read the response after a prompt; without a prompt, all tokens."""
    if not isinstance(sample, Sample):
        problem = f"returned a {type(sample).__name__}, not the sample that it was given, nor a list of samples"
        raise UnusableError(problem)
    status = Status(sample.status.value)  # of slime's own, where slime is installed
    if status in (Status.ABORTED, Status.FAILED):
        raise TryAgainError(status.value)
    if sample.reward is not None:
        problem = "set sample.reward: rewards are made by reward.function, where they can be killed and counted"
        raise UnusableError(problem)
    start, length = len(prompt), sample.response_length
    if list(sample.tokens[:start]) != list(prompt):
        raise UnusableError("returned tokens that do not begin with the prompt's")
    context = len(sample.tokens) - length
    if context < 1 or (prompt and context != start):
        raise UnusableError(f"returned {len(sample.tokens)} tokens for a prompt of {start} and a response of {length}")
    try:
        loss_mask: NDArray[Any] = as_mask([1] * length if sample.loss_mask is None else sample.loss_mask)
        tokens = np.array(sample.tokens[start:], np.int32)
        logprobs = np.array(() if sample.rollout_log_probs is None else sample.rollout_log_probs, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnusableError(f"returned a sample whose lists cannot be used ({error})") from None
    for name, values in (("loss_mask", loss_mask), ("rollout_log_probs", logprobs)):
        if len(values) != length:
            raise UnusableError(f"returned {len(values)} of sample.{name} for a response of {length} tokens")
    if not prompt:  # a sequence with a context of its own
        logprobs, loss_mask = (np.pad(values, (context, 0)) for values in (logprobs, loss_mask))
    versions = (VersionSpan(0, len(tokens)),)
    return Completion(tokens, logprobs, loss_mask, versions, "stop" if status is Status.COMPLETED else "length")


def _spans(versions: Sequence[str], length: int) -> list[tuple[str, int]]:
    """Which weights made which tokens is not known where several did; a completion counts by the oldest of them."""
    versions = list(dict.fromkeys(versions))[:length]
    return [(versions[0], length - len(versions) + 1), *((version, 1) for version in versions[1:])] if versions else []
