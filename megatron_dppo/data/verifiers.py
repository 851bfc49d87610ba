"""Environments of *verifiers* (github.com/PrimeIntellect-ai/verifiers): their problems, and what
their rubrics say.

Of releases that have ``load_environment`` (before 0.4). An environment is told each answer as if a
server had just given it, and its rubric then scores the whole group. One of several turns is told
the policy's turns one after the other, and where it has tools, the calls of them, too: see
``data/turns.py``.

An environment takes signals for itself, prints, and may import much. So processes of their own
import this file: those that score, and one that reads the problems, ``python -m
megatron_dppo.data.verifiers``. Besides, ranks do, where the policy speaks to the environment
(``rollout/conversation_functions.py``).
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
"""Seed of the draw of held-out problems, for all runs."""
RUBRICS = ("verifiers.rubrics", "verifiers.legacy.rubrics")
"""Loggers of rubrics, by release."""
DOWN = (TimeoutError, verifiers.InfraError)
"""Errors of :func:`run_environment` after which another attempt may succeed."""


Answer = Callable[[Sequence[Message]], Awaitable[str]]
"""The policy's answer to the messages so far."""


def load_environment(name: str, arguments: Mapping[str, Any]) -> Any:
    """An environment, loaded once in a process; at first in its main thread.

    Args:
        name: of the environment.
        arguments: for its ``load_environment``.

    Raises:
        Exception: whatever loading it raises.
    """
    return _load_environment(name, json.dumps(arguments, sort_keys=True))


@functools.cache
def _load_environment(name: str, arguments: str) -> Any:
    taken = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    environment = verifiers.load_environment(name, **json.loads(arguments))
    for number, handler in taken.items():
        signal.signal(number, handler)
    logging.getLogger("verifiers").addHandler(_Failures(logging.ERROR))
    return environment


class _Failures(logging.Handler):
    """Raises what a rubric would log: it makes a zero of a reward function that failed."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(RUBRICS):
            raise sys.exc_info()[1] or RuntimeError(record.getMessage())


class _Policy(Client):
    """In place of a server: an :data:`Answer`.

    Args:
        answer: of the policy.
        tools: that the problem's prompt tells it of.
    """

    failure: Exception | None = None
    """The answer's exception. An environment takes whatever a client raises for an answer of the
    server's."""

    def __init__(self, answer: Answer, tools: Tools) -> None:
        super().__init__(answer)
        self._tools = list(tools)
        self._turns: dict[int, tuple[Message, str]] = {}
        """By their places among the messages: turns as the environment has them, and all that the
        policy said."""

    def setup_client(self, config: Any) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> Any:
        return _get_schema(tool)

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return [
            each if isinstance(each, dict) else each.model_dump(exclude_none=True)
            for each in messages
        ], {}

    async def get_native_response(
        self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any
    ) -> ResponseMessage:
        try:
            if (tools or []) != self._tools:
                raise ConversationFormatError("gives the policy other tools than its problem")
            turn = len(prompt)
            text: str = await self.client(
                [self._restore_message(place, message) for place, message in enumerate(prompt)]
            )
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
        self._turns[turn] = (
            message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True),
            text,
        )
        return message

    def _restore_message(self, place: int, message: Message) -> Message:
        """A message, with the calls among the words where the policy spoke it."""
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
    environment: Any, problem: Mapping[str, Any], answer: Answer, tools: Tools = ()
) -> dict[str, Any]:
    """Have an environment pose a problem and speak with the policy to the end.

    Args:
        environment: loaded.
        problem: as it gave it.
        answer: the policy.
        tools: that the problem's prompt tells it of.

    Returns:
        The environment's state, not scored yet.

    Raises:
        TimeoutError: the environment's own time was up.
        Exception: what ``answer`` raised, or what went wrong in the environment.
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
    """The rubric's rewards.

    Args:
        items: the completions of one prompt, as :class:`~megatron_dppo.rewards.adapters.ScoreItem`.

    Raises:
        KeyError: the prompt is none of an environment's.
        OtherAnswerError: an environment of several turns went on otherwise than in the completion.
        Exception: what a reward function raised, or what went wrong in the environment.
    """
    return _get_runner().run(_compute_rewards(items))


@functools.cache
def _get_runner() -> asyncio.Runner:
    return asyncio.Runner()  # one loop for all groups: a judge's connections belong to it


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
    return (
        list(environment.env_map.values())
        if isinstance(environment, verifiers.EnvGroup)
        else [environment]
    )


def _is_multi_turn(environment: Any) -> bool:
    return not all(
        isinstance(each, verifiers.SingleTurnEnv) for each in _list_environments(environment)
    )


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
    except (Exception, SystemExit) as error:
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        remedy = "Install it, or correct data.verifiers.arguments"
        return UserError("data.verifiers.environment", config.environment, problem, remedy)


def _main() -> None:
    config, split = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what an environment prints is no row
        out.write(pickle.dumps(_read(config, split)))


if __name__ == "__main__":
    _main()
else:
    import transformers.models.auto.tokenization_auto  # noqa: F401 - before the memory of a process that scores is limited
