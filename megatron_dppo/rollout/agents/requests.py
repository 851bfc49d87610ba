"""Requests of agents: the served part of OpenAI's API, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.data.examples import Tools
from megatron_dppo.data.turns import Message

MODEL = "policy"
"""Name of the policy in requests."""
NEUTRAL: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Parameters with the only served values, the defaults."""
IGNORED = frozenset(
    {
        *("model", "messages", "prompt", "tools", "stop", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "user", "metadata", "store", "service_tier"),
        *("safety_identifier", "prompt_cache_key"),
    }
)
"""Parameters that are read elsewhere, or cannot change a turn."""


class RefusedError(Exception):
    """Refusal of a request.

    Args:
        message: a sentence.
        param: parameter of the request.
        code: OpenAI's code of the error.
        status: HTTP status. Clients repeat requests after 408, 409, 429 and from 500 on.
        is_limit: whether a limit of the rollout is reached, so that the completion is truncated.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "unsupported_value",
        *,
        status: int = 400,
        is_limit: bool = False,
    ) -> None:
        super().__init__(message)
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": param,
                "code": code,
            }
        }
        self.status = status
        self.is_limit = is_limit


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """Limits of one turn."""

    max_tokens: int | None
    stops: Sequence[str]


def read_request(body: Any, sampling: Mapping[str, Sequence[object]]) -> TurnRequest:
    """Check the parameters of a request.

    Args:
        sampling: sampling parameters, with the values that are the run's.

    Raises:
        RefusedError: a parameter has a value that is not served.
    """
    if not isinstance(body, dict):
        raise RefusedError("The request is no JSON object.")
    if (model := body.get("model", MODEL)) != MODEL:
        raise RefusedError(
            f"There is no model {model!r:.80}: this endpoint serves the model {MODEL!r} alone.",
            "model",
            "model_not_found",
            status=404,
        )
    served = {**NEUTRAL, **sampling}
    for name, value in body.items():
        if name in IGNORED or value is None:
            continue
        if name not in served:
            raise RefusedError(f"The parameter {name} is not served: remove it.", name)
        if value not in served[name]:
            values = " or ".join(map(repr, served[name]))
            raise RefusedError(
                f"{name} = {value!r:.80} is not served, only {values}: leave it out, because a "
                "rollout has the sampling settings of the run.",
                name,
            )
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    given = [limit for limit in limits if limit is not None]
    if any(type(limit) is not int or limit < 1 for limit in given):
        raise RefusedError("max_tokens is no whole number above 0.", "max_tokens")
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RefusedError("stop is neither a text nor a list of texts.", "stop")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RefusedError("stream_options is no object.", "stream_options")
    return TurnRequest(min(given, default=None), stops)


def read_messages(body: Mapping[str, Any]) -> tuple[list[Message], Tools]:
    """Return the messages and tools of a chat request.

    Raises:
        RefusedError: the messages are no list of messages that ends before the policy's turn, or a
            tool is no function.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages is no list of messages.", "messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RefusedError("A message has no role.", "messages")
    if messages[-1]["role"] == "assistant":
        raise RefusedError("The last message is the policy's: add a message to answer.", "messages")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or any(
        not isinstance(tool, dict) or tool.get("type") != "function" for tool in tools
    ):
        raise RefusedError("A tool is no function.", "tools")
    return messages, tools
