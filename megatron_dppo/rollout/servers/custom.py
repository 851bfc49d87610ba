"""Which function has a run's conversations: that of ``rollout.conversation``, or one written for slime.

slime's is ``async custom_generate(args, sample, sampling_params)``. It speaks to an SGLang server in the server's own
words, and returns the sample, or a list of several, which are one completion here, of several sequences
(``rl/sequences.py``). It becomes a conversation like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.models.shape import read_shape
from megatron_dppo.plugins.slime import Arguments, Sample, Status, poster
from megatron_dppo.rl.given import as_mask
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.conversation import ConversationFunction, TryAgainError, load_coroutine
from megatron_dppo.rollout.conversation_checks import UnusableError
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.environment import conversation_of
from megatron_dppo.rollout.servers.conversations import ConversationClient, Conversations
from megatron_dppo.rollout.servers.http import in_url


def conversations_of(config: Config) -> Conversations | None:
    """Conversations of a run; None if a completion is one request.

    Raises:
        UserError: the function cannot be found or imported, or cannot be called as it would be.
    """
    rollout = config.rollout
    if (function := conversation_of(config)) is None:
        if rollout.custom_generate is None:
            return None
        setting, spec = "rollout.custom_generate", rollout.custom_generate
        theirs = load_coroutine(setting, spec, ("args", "sample", "sampling_params"))
        remedy = "Have it return the sample with tokens, response_length, rollout_log_probs, loss_mask and status"
        function = ConversationFunction(setting, spec, _SlimesFunction(theirs, config), remedy)
    function = replace(function, vocabulary=read_shape(config.model.folder).vocab_size)
    return Conversations(function, tokenizer=load_tokenizer(config.model.folder), timeout_s=rollout.request_timeout_s)


class _SlimesFunction:
    """A function of slime's form, as a conversation."""

    def __init__(self, function: Callable[..., Any], config: Config) -> None:
        self._function = function
        self._options = {
            "hf_checkpoint": str(config.model.folder),
            "rollout_temperature": config.rollout.temperature,
            "rollout_max_response_len": config.rollout.max_response_tokens,
            "rollout_max_context_len": config.longest,
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
        address = urlsplit(client.server.url)
        arguments = Arguments(
            sglang_router_ip=in_url(address.hostname),
            sglang_router_port=address.port,
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
        tokens, logprobs, loss_mask, starts, stopped = _read_all(returned, prompt.token_ids.tolist(), client.max_tokens)
        # A function that speaks to the server by means of its own leaves no word of who made which token.
        told = client.told or [before, await client.version()]
        versions = await client.read_versions(_spans(told, len(tokens)))
        reason: Literal["stop", "length"] = "stop" if stopped else "length"
        return Completion(tokens, logprobs, loss_mask, tuple(versions), reason, starts=starts)


def _sampling_params(sampling: Sampling, prompt: int, number: int) -> dict[str, Any]:
    """As slime hands them over, in SGLang's words. The seed counts where inference is deterministic, and only there."""
    return {
        "sampling_seed": sampling.seed_at(prompt, number),
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": sampling.max_tokens,
        "stop": None,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def _read_all(
    returned: Any, prompt: Sequence[int], limit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...], bool]:
    """Tokens, log-probabilities, loss mask and starts of a completion; and whether it has ended, not cut off."""
    first, *further = returned if isinstance(returned, list) and returned else [returned]
    read = [_read(first, prompt, limit), *(_read(each, (), len(prompt) + limit) for each in further)]
    # A context may have left the policy no room.
    parts = [read[0], *(part for part in read[1:] if part.loss_mask.any() or not part.cut)]
    tokens, logprobs, loss_mask = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "logprobs", "loss_mask")
    )
    starts = tuple(accumulate(len(part.tokens) for part in parts[:-1]))
    return tokens, logprobs, loss_mask, starts, parts[-1].ended and not any(part.cut for part in read)


class _Read(NamedTuple):
    """A sample, from behind its prompt. Arrays are [L]."""

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    ended: bool
    cut: bool
    """Whether it was cut off here."""


def _read(sample: Any, prompt: Sequence[int], limit: int) -> _Read:
    """Read the response after a prompt, cut off at ``limit`` tokens."""
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
    cut = len(tokens) > limit
    return _Read(tokens[:limit], logprobs[:limit], loss_mask[:limit], status is Status.COMPLETED and not cut, cut)


def _spans(told: Sequence[str], length: int) -> list[tuple[str, int]]:
    """Which weights made which tokens is not known where several did; a completion counts by the oldest of them."""
    versions = list(dict.fromkeys(told))[:length]
    return [(versions[0], length - len(versions) + 1), *((version, 1) for version in versions[1:])] if versions else []
