"""Completions by a user's function, slime's ``async custom_generate(args, sample, sampling_params)``: it has a
conversation with one server for each of them, calls tools between its turns, and says which tokens the policy sampled.

The function runs in a thread of its own, so that what it does between its requests holds up nobody's heartbeat. It is
given one server and no router: where that server breaks off, the prompt is asked anew of another one, whole.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.plugins.loading import load_function
from megatron_dppo.plugins.slime_modules import poster
from megatron_dppo.plugins.slime_sample import Arguments, Sample, Status
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.api import Piece, ServerApi
from megatron_dppo.rollout.servers.http import Http, ServerError

SETTING = "rollout.custom_generate"


class ConversationError(ServerError):
    """A conversation came to nothing, by no fault of the server that it was with: it may be tried again."""


class CustomGenerate:
    """Asks one server for the completions of a prompt through a user's function.

    Args:
        config: of the run, with ``rollout.custom_generate``.

    Raises:
        UserError: the function cannot be found or imported, or is not of slime's form.
    """

    def __init__(self, config: Config) -> None:
        rollout = config.rollout
        assert rollout.custom_generate is not None
        self._spec, self._timeout_s = rollout.custom_generate, rollout.request_timeout_s
        self._function = load_function(SETTING, self._spec)
        _check_form(self._function, self._spec)
        self._options = {
            "hf_checkpoint": config.model.path,
            "rollout_temperature": rollout.temperature,
            "rollout_max_response_len": rollout.max_response_tokens,
            "rollout_max_context_len": config.data.max_prompt_tokens + rollout.max_response_tokens,
            "n_samples_per_prompt": rollout.samples_per_prompt,
            "partial_rollout": False,
        }
        self._thread = Http()

    def close(self) -> None:
        self._thread.close()

    async def __call__(self, api: ServerApi, prompt: Prompt, sampling: Sampling) -> list[Piece]:
        """``sampling.samples`` completions from one server. In the HTTP thread.

        Raises:
            ServerError: the server failed.
            ConversationError: the function gave one of them up, or took too long, or a host that it asks failed it.
            UserError: the function raised, or returned what cannot be trained on.
        """
        future = self._thread.start(self._converse(api, prompt, sampling))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            problem = f"was spoken to by {self._spec} for {self._timeout_s:g} s, with no completion in the end"
            raise ConversationError(api.url, problem, alive=True) from None

    async def _converse(self, api: ServerApi, prompt: Prompt, sampling: Sampling) -> list[Piece]:
        before = await self._version(api)
        one = [asyncio.create_task(self._one(api, prompt, sampling, i, before)) for i in range(sampling.samples)]
        try:
            return list(await asyncio.gather(*one))
        finally:
            for task in one:
                task.cancel()

    async def _one(self, api: ServerApi, prompt: Prompt, sampling: Sampling, number: int, before: str) -> Piece:
        told: list[str] = []
        poster.set(lambda url, payload: self._post(api, url, payload, told))
        address = urlsplit(api.url)
        arguments = Arguments(
            sglang_router_ip=f"[{address.hostname}]" if ":" in (address.hostname or "") else address.hostname,
            sglang_router_port=address.port,
            sglang_api_key=api.secret,
            **self._options,
        )
        sample = Sample(
            prompt=prompt.text,
            label=copy.deepcopy(prompt.label),
            metadata=copy.deepcopy(dict(prompt.extra)),
            index=prompt.id * sampling.samples + number,
            group_index=prompt.id,
            session_id=f"{prompt.id}-{number}",
        )
        try:
            returned = await self._function(arguments, sample, _sampling_params(sampling, prompt.id, number))
        except ServerError:
            raise
        except Exception as error:
            problem = f"raised for prompt {prompt.id}:\n{traceback.format_exc(limit=-4)}"
            raise UserError(SETTING, self._spec, problem, "Mend it, or have it set sample.status") from error
        if isinstance(returned, Sample) and returned.status in (Status.ABORTED, Status.FAILED):
            raise ConversationError(api.url, f"was given up by {self._spec}: {returned.status.value}", alive=True)
        try:
            tokens, logprobs, mask, reason = _read(returned, prompt, sampling.max_tokens)
        except (TypeError, ValueError) as error:
            remedy = "Have it return the sample with tokens, response_length, rollout_log_probs, loss_mask and status"
            raise UserError(SETTING, self._spec, f"for prompt {prompt.id} it {error}", remedy) from None
        # A function that speaks to the server by means of its own leaves no word of who made which token.
        spans = _spans(told or [before, await self._version(api)], len(tokens))
        return Piece(tokens, logprobs, spans, reason, mask)

    async def _post(self, api: ServerApi, url: str, payload: Mapping[str, Any], told: list[str]) -> Any:
        parts = urlsplit(url)
        base, path = f"{parts.scheme}://{parts.netloc}", url.partition(parts.netloc)[2]
        if _host(url) != _host(api.url):
            try:
                return await self._thread.call("POST", base, path, body=payload, timeout_s=self._timeout_s)
            except ServerError as error:
                raise ConversationError(error.url, error.problem, alive=error.alive) from None
        answer = await self._thread.call(
            "POST", api.url, path, body=payload, secret=api.secret, timeout_s=self._timeout_s
        )
        for each in answer if isinstance(answer, list) else [answer]:
            if isinstance(each, Mapping) and "weight_version" in (each.get("meta_info") or {}):
                told.append(str(each["meta_info"]["weight_version"]))
        return answer

    async def _version(self, api: ServerApi) -> str:
        """Of a server's weights, now."""
        answer = await self._thread.call("GET", api.url, "/model_info", secret=api.secret, timeout_s=30.0)
        return str(answer["weight_version"])


def _host(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def _check_form(function: Callable[..., Any], spec: str) -> None:
    try:
        inspect.signature(function).bind("args", "sample", "sampling_params")
    except TypeError as error:
        remedy = "Give it slime's three parameters (args, sample, sampling_params)"
        raise UserError(SETTING, spec, f"cannot be called as slime would ({error})", remedy) from error
    if not inspect.iscoroutinefunction(function):
        raise UserError(SETTING, spec, "is no coroutine", "Define it with async def")


def _sampling_params(sampling: Sampling, prompt: int, number: int) -> dict[str, Any]:
    """As slime hands them over, in SGLang's words. The seed counts where inference is deterministic, and only there."""
    digest = hashlib.blake2b(f"{sampling.seed}/{prompt}/{number}".encode(), digest_size=4).digest()
    return {
        "sampling_seed": int.from_bytes(digest, "little") >> 1,
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


def _read(sample: Any, prompt: Prompt, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """Tokens, log-probabilities, loss mask and the reason of a completion, cut off at ``limit`` tokens.

    Raises:
        ValueError: they are no completion of the prompt that could be trained on; to stand after "it".
    """
    if not isinstance(sample, Sample):
        raise ValueError(f"returned a {type(sample).__name__}, not the one sample that it was given")
    if sample.reward is not None:
        raise ValueError("set sample.reward: rewards are made by reward.function, where they can be killed and counted")
    start, length = len(prompt.token_ids), sample.response_length
    if list(sample.tokens[:start]) != prompt.token_ids.tolist():
        raise ValueError("returned tokens that do not begin with the prompt's")
    if len(sample.tokens) != start + length:
        raise ValueError(f"returned {len(sample.tokens)} tokens for a prompt of {start} and a response of {length}")
    mask = np.array([1] * length if sample.loss_mask is None else sample.loss_mask, bool)
    logprobs = np.array(() if sample.rollout_log_probs is None else sample.rollout_log_probs, np.float32)
    for name, values in (("loss_mask", mask), ("rollout_log_probs", logprobs)):
        if len(values) != length:
            raise ValueError(f"returned {len(values)} of sample.{name} for a response of {length} tokens")
    if not mask[:limit].any():
        raise ValueError("returned a response none of whose tokens the policy sampled")
    if not np.isfinite(logprobs[mask]).all():
        raise ValueError("returned log-probabilities of sampled tokens that are not finite")
    stopped = sample.status is Status.COMPLETED and length <= limit
    tokens = np.array(sample.tokens[start:][:limit], np.int32)
    return tokens, logprobs[:limit], mask[:limit], "stop" if stopped else "length"


def _spans(told: Sequence[str], length: int) -> tuple[tuple[str, int], ...]:
    """Which weights made which tokens is not known where several did; a completion counts by the oldest of them."""
    versions = list(dict.fromkeys(told))[:length]
    return ((versions[0], length - len(versions) + 1), *((version, 1) for version in versions[1:]))
