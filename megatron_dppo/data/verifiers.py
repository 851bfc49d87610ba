"""Problems and rewards of *verifiers* environments (github.com/PrimeIntellect-ai/verifiers).

Releases before 0.4, with ``load_environment``. An environment receives each answer as if a server
had just generated the answer; then the rubric scores the whole group. With several turns or tools,
an environment receives the policy's turns and calls in order: see ``data/turns.py``.

An environment takes over signals, prints, and may have large imports. Therefore only reward
workers, ``python -m megatron_dppo.data.verifiers`` (the problems) and, for conversations, ranks
(``rollout/conversation_functions.py``) import this file.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import pickle
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import verifiers
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, Tool, ToolCall

from megatron_dppo.config import VerifiersConfig
from megatron_dppo.data.generators import SEVERAL_TURNS, TOOLS
from megatron_dppo.data.rows import Row
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.data.turns import (
    ChatSession,
    ConversationFormatError,
    Message,
    ResponseFullError,
    Tools,
    TurnReplay,
    parse_tool_calls,
)
from megatron_dppo.errors import UserError

HELD_OUT_SEED = 0
"""Random seed of held-out problems in all runs."""
RUBRICS = ("verifiers.rubrics", "verifiers.legacy.rubrics")
"""Loggers of rubrics in different releases."""
DOWN = (TimeoutError, verifiers.InfraError)
"""Temporary errors of :func:`run_environment`: another attempt may succeed."""


Answer = Callable[[Sequence[Message]], Awaitable[str]]
"""Function from all messages to the policy's answer."""


def load_environment(name: str, arguments: Mapping[str, Any]) -> Any:
    """Load an environment once per process. The first call must be on the main thread.

    Raises:
        Exception: any error of the environment's ``load_environment``.
    """
    return _load_environment(name, json.dumps(arguments, sort_keys=True))


@functools.cache
def _load_environment(name: str, arguments: str) -> Any:
    # Restore the handlers, because an environment replaces them.
    taken = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = verifiers.load_environment(name, **json.loads(arguments))
    for number, handler in taken.items():
        signal.signal(number, handler)
    logging.getLogger("verifiers").addHandler(_Failures(logging.ERROR))
    return environment


class _Failures(logging.Handler):
    """Raises a rubric's logged errors."""

    # A rubric only logs the error of a failed reward function, and counts a reward of zero.

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(RUBRICS):
            raise sys.exc_info()[1] or RuntimeError(record.getMessage())


class _Policy(Client):
    """Client that calls an :data:`Answer` instead of a server. ``tools``: of the problem's
    prompt."""

    # An environment treats a client's exception as a server's answer, so keep it here.
    failure: Exception | None = None

    def __init__(self, answer: Answer, tools: Tools) -> None:
        super().__init__(answer)
        self._tools = list(tools)
        self._turns: dict[int, tuple[Message, str]] = {}
        """Index of a message to the environment's form of the policy's turn, and the whole text."""

    def setup_client(self, config: Any) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> Any:
        return _get_schema(tool)

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        prompt = []
        for message in messages:
            known = isinstance(message, dict)
            prompt.append(message if known else message.model_dump(exclude_none=True))
        return prompt, {}

    async def get_native_response(
        self,
        prompt: Any,
        model: Any,
        sampling_args: Any,
        tools: Any = None,
        **_: Any,
    ) -> ResponseMessage:
        try:
            if (tools or []) != self._tools:
                raise ConversationFormatError("gives the policy other tools than its problem")
            turn = len(prompt)
            restored = [self._restore_message(place, each) for place, each in enumerate(prompt)]
            text: str = await self.client(restored)
        except ResponseFullError as error:
            raise verifiers.OverlongPromptError from error
        except Exception as error:
            self.failure = error
            raise
        content, calls = parse_tool_calls(text) if tools else (text, [])
        tool_calls = [
            ToolCall(id=f"call_{turn}_{number}", name=call.name, arguments=call.arguments)
            for number, call in enumerate(calls)
        ]
        reason = "tool_calls" if calls else "stop"
        message = ResponseMessage(
            content=content, tool_calls=tool_calls or None, finish_reason=reason, is_truncated=False
        )
        given = message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        self._turns[turn] = given, text
        return message

    def _restore_message(self, place: int, message: Message) -> Message:
        """Return a message; a turn of the policy has the text as sampled, calls included."""
        given, text = self._turns.get(place, (None, ""))
        return message if message != given else {"role": "assistant", "content": text}

    async def raise_from_native_response(self, response: ResponseMessage) -> None:
        pass

    async def from_native_response(self, response: ResponseMessage) -> Response:
        return Response(id="", created=0, model="policy", message=response)

    async def close(self) -> None:
        pass


def _get_schema(tool: Tool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude_none=True)}


async def run_environment(
    environment: Any,
    problem: Mapping[str, Any],
    answer: Answer,
    tools: Tools = (),
) -> dict[str, Any]:
    """Run an environment's conversation with the policy about a problem.

    Args:
        problem: row of the environment's data set.
        answer: the policy.
        tools: tools in the problem's prompt.

    Returns:
        The environment's state before scoring.

    Raises:
        TimeoutError: the environment exceeded ``timeout_seconds``.
        Exception: an error of ``answer`` or of the environment.
    """
    client = _Policy(answer, tools)
    state: dict[str, Any] = await environment.rollout(problem, client, "policy", {})
    if (error := client.failure or state.get("error")) is not None:
        raise error
    if state.get("timed_out"):
        raise TimeoutError(
            "The environment has waited longer than timeout_seconds = "
            f"{environment.timeout_seconds}."
        )
    return state


def group_score(items: Sequence[Any]) -> list[float]:
    """Return the rubric's rewards.

    Args:
        items: completions of one prompt, :class:`~megatron_dppo.rewards.adapters.ScoreItem` each.

    Raises:
        KeyError: the prompt does not come from an environment.
        ReplayMismatchError: an environment with several turns differs from the completion.
        Exception: an error of a reward function or of the environment.
    """
    return _get_runner().run(_compute_rewards(items))


@functools.cache
def _get_runner() -> asyncio.Runner:
    # All groups share a loop, because the connections of a judge belong to a loop.
    return asyncio.Runner()


async def _compute_rewards(items: Sequence[Any]) -> list[float]:
    first = items[0].extra
    environment = load_environment(first["environment"], first["arguments"])
    again = _replay_turns if _is_multi_turn(environment) else _replay_single_turn
    states = await asyncio.gather(*(again(environment, item) for item in items))
    await environment.rubric.score_group(states)
    for state in states:
        await environment.rubric.cleanup(state)
    return [float(state["reward"]) for state in states]


async def _replay_turns(environment: Any, item: Any) -> dict[str, Any]:
    problem = item.extra["input"]
    replay = TurnReplay(item.token_ids, item.loss_mask, cut_off=item.finish_reason == "length")
    tools = item.extra.get(TOOLS, ())
    turns = ChatSession(_tokenizer(item.policy), problem["prompt"], replay, tools)
    state = await run_environment(environment, problem, turns, tools)
    replay.check_end()
    return state


async def _replay_single_turn(environment: Any, item: Any) -> dict[str, Any]:
    async def answer(messages: Sequence[Message]) -> str:
        return str(item.solution)

    return await run_environment(
        environment, item.extra["input"], answer, item.extra.get(TOOLS, ())
    )


_tokenizer = functools.cache(load_tokenizer)


def _list_environments(environment: Any) -> list[Any]:
    is_group = isinstance(environment, verifiers.EnvGroup)
    return list(environment.env_map.values()) if is_group else [environment]


def _is_multi_turn(environment: Any) -> bool:
    parts = _list_environments(environment)
    return not all(isinstance(each, verifiers.SingleTurnEnv) for each in parts)


def _load_problems(config: VerifiersConfig, split: str) -> list[Row]:
    name = config.environment
    environment = load_environment(name, config.arguments)
    parts = _list_environments(environment)
    for each in parts:
        if not isinstance(each, verifiers.MultiTurnEnv):
            problem = f"({type(each).__name__}) is no MultiTurnEnv, the only supported type"
            remedy = (
                "Use another environment; or write its turns as a rollout.conversation, and the "
                "reward as a function"
            )
            raise UserError("data.verifiers.environment", name, problem, remedy)
    if len(parts) > 1 and any(each.tool_defs for each in parts):
        problem = (
            "(EnvGroup) has tools in one of its environments, and does not report the "
            "environment of a problem"
        )
        raise UserError(
            "data.verifiers.environment", name, problem, "Use its environments one at a time"
        )
    own = environment.build_eval_dataset()
    inputs = list(own if split == "eval" and own is not None else environment.get_dataset())
    # Hold out problems of the training set if the environment has no evaluation set.
    if own is None:
        if (count := config.eval_problems) >= len(inputs):
            problem = f"leaves none of the {len(inputs)} problems of {name} for training"
            raise UserError(
                "data.verifiers.eval_problems",
                count,
                problem,
                f"Lower it to {len(inputs) - 1} or less",
            )
        held_out = set(random.Random(HELD_OUT_SEED).sample(range(len(inputs)), count))
        inputs = [
            row for number, row in enumerate(inputs) if (number in held_out) == (split == "eval")
        ]
    marks = {SEVERAL_TURNS: True} if _is_multi_turn(environment) else {}
    known = parts[0].tool_defs if len(parts) == 1 else None
    return [
        _make_row(row, config, number, marks, known or ()) for number, row in enumerate(inputs, 1)
    ]


def _make_row(
    problem: dict[str, Any],
    config: VerifiersConfig,
    number: int,
    marks: Mapping[str, Any],
    default_tools: Sequence[Tool],
) -> Row:
    name = config.environment
    answer = problem.get("answer")
    info = problem.get("info")
    info = json.loads(info) if isinstance(info, str) else info
    offered = (
        info["tool_defs"] if isinstance(info, Mapping) and "tool_defs" in info else default_tools
    )
    tools = {TOOLS: [_get_schema(Tool.model_validate(tool)) for tool in offered]} if offered else {}
    values = {
        "prompt": problem["prompt"],
        "label": "" if answer is None else str(answer),
        "response": None,
        "data_source": f"verifiers/{name}",
        "extra_info": {
            "environment": name,
            "arguments": config.arguments,
            "input": problem,
            **marks,
            **tools,
        },
        **tools,
    }
    return Row(values, "data.verifiers", f"{name}, problem {number}")


def _read(config: VerifiersConfig, split: str) -> list[Row] | UserError:
    try:
        return _load_problems(config, split)
    except UserError as error:
        return error
    # Loading runs code of the environment's author, with any error or a call of sys.exit.
    except (Exception, SystemExit) as error:
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        remedy = "Install it, or correct data.verifiers.arguments"
        return UserError("data.verifiers.environment", config.environment, problem, remedy)


def _main() -> None:
    config, split = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        # Send the environment's output to standard error, because the parent reads rows from here.
        os.dup2(2, 1)
        out.write(pickle.dumps(_read(config, split)))


if __name__ == "__main__":
    _main()
else:
    # Import now, before a reward worker's memory is limited.
    import transformers.models.auto.tokenization_auto  # noqa: F401
