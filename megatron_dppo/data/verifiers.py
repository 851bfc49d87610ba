"""Environments of *verifiers* (github.com/PrimeIntellect-ai/verifiers): their problems, and what their rubrics say.

Those of one turn, ``SingleTurnEnv`` and groups of them, of releases that have ``load_environment`` (before 0.4). An
environment is told each answer as if a server had just given it, and its rubric then scores the whole group.

Only processes of their own import this file: those that score, and one that reads the problems, ``python -m
megatron_dppo.data.verifiers``. An environment takes signals for itself, prints, and may import much.
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
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage

from megatron_dppo.config import VerifiersConfig
from megatron_dppo.data.rows import Row
from megatron_dppo.errors import UserError

HELD_OUT_SEED = 0
"""Of the draw of held-out problems, the same for all runs."""
RUBRICS = ("verifiers.rubrics", "verifiers.legacy.rubrics")
"""Loggers of rubrics, by release."""


@functools.cache
def _environment(name: str, arguments: str) -> Any:
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


class _Said(Client):
    """In place of a server: its answer is known already."""

    def setup_client(self, config: Any) -> None:
        return None

    async def to_native_tool(self, tool: Any) -> Any:
        return tool

    async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
        return messages, {}

    async def get_native_response(self, *_: Any, **__: Any) -> str:
        return self.client

    async def raise_from_native_response(self, response: str) -> None:
        pass

    async def from_native_response(self, response: str) -> Response:
        message = ResponseMessage(content=response, finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model="policy", message=message)

    async def close(self) -> None:
        pass


def group_score(args: object, samples: Sequence[Any]) -> list[float]:
    """The rubric's rewards, in slime's ``group_rm`` form.

    Raises:
        KeyError: the prompt is none of an environment's.
        Exception: what a reward function raised, or what went wrong in the environment.
    """
    return _runner().run(_rewards([(sample.metadata, sample.response) for sample in samples]))


@functools.cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()  # one loop for all groups: a judge's connections belong to it


async def _rewards(answers: Sequence[tuple[Mapping[str, Any], str]]) -> list[float]:
    first, _ = answers[0]
    environment = _environment(first["environment"], json.dumps(first["arguments"], sort_keys=True))
    states = await asyncio.gather(
        *(environment.rollout(extra["input"], _Said(text), "policy", {}) for extra, text in answers)
    )
    for state in states:
        if state.get("error") is not None:
            raise state["error"]
    await environment.rubric.score_group(states)
    for state in states:
        await environment.rubric.cleanup(state)
    return [float(state["reward"]) for state in states]


def _problems(config: VerifiersConfig, split: str) -> list[Row]:
    name = config.environment
    environment = _environment(name, json.dumps(config.arguments, sort_keys=True))
    whole = environment.env_map.values() if isinstance(environment, verifiers.EnvGroup) else [environment]
    for each in whole:
        if not isinstance(each, verifiers.SingleTurnEnv):
            problem = f"has several turns ({type(each).__name__}), of which its rubric needs more than the text"
            remedy = "Take one of a single turn; for others write the turns as a rollout.conversation, and the reward"
            raise UserError("data.verifiers.environment", name, problem, remedy)
    own = environment.build_eval_dataset()
    inputs = list(own if split == "eval" and own is not None else environment.get_dataset())
    if own is None:
        if (count := config.eval_problems) >= len(inputs):
            problem = f"leaves nothing to train on of the {len(inputs)} problems of {name}, which holds out none itself"
            raise UserError("data.verifiers.eval_problems", count, problem, f"Lower it to {len(inputs) - 1} or less")
        held_out = set(random.Random(HELD_OUT_SEED).sample(range(len(inputs)), count))
        inputs = [row for number, row in enumerate(inputs) if (number in held_out) == (split == "eval")]
    return [_row(row, config, number) for number, row in enumerate(inputs, 1)]


def _row(given: dict[str, Any], config: VerifiersConfig, number: int) -> Row:
    name, answer = config.environment, given.get("answer")
    values = {
        "prompt": given["prompt"],
        "label": "" if answer is None else str(answer),
        "response": None,
        "data_source": f"verifiers/{name}",
        "extra_info": {"environment": name, "arguments": config.arguments, "input": given},
    }
    return Row(values, "data.verifiers", f"{name}, problem {number}")


def _read(config: VerifiersConfig, split: str) -> list[Row] | UserError:
    try:
        return _problems(config, split)
    except UserError as error:
        return error
    except Exception as error:
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        remedy = "Install it, or mend data.verifiers.arguments"
        return UserError("data.verifiers.environment", config.environment, problem, remedy)


def _main() -> None:
    config, split = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what an environment prints is no row
        out.write(pickle.dumps(_read(config, split)))


if __name__ == "__main__":
    _main()
