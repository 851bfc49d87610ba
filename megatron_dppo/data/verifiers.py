"""Environments of *verifiers* (github.com/PrimeIntellect-ai/verifiers) as problems and as agents.

An environment talks with the policy as an OpenAI client, and returns a reward. Releases before 0.4
have ``load_environment``; later releases have tasksets.

An environment takes over signals, prints, and may have large imports. Therefore only ``python -m
megatron_dppo.data.verifiers`` (the problems) and the processes of agents import this file.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megatron_dppo.config import VerifiersConfig
from megatron_dppo.data.rows import Row
from megatron_dppo.errors import UserError

SETTING = "data.verifiers.environment"
HELD_OUT_SEED = 0
"""Random seed of held-out problems in all runs."""
RUBRICS = ("verifiers.rubrics", "verifiers.legacy.rubrics")
"""Loggers of rubrics in different releases."""
MODEL = "policy"
KEY = "OPENAI_API_KEY"
Problem = dict[str, Any]
"""Columns ``prompt``, a chat, and ``answer``; all columns are the environment's input."""


class _Environment:
    """Environment of a release before 0.4.

    Raises:
        UserError: a reward function of the environment compares the rollouts of a group.
    """

    def __init__(self, config: VerifiersConfig) -> None:
        import verifiers

        self._verifiers = verifiers
        self._environment = verifiers.load_environment(config.environment, **config.arguments)
        if self._environment.rubric.has_group_rewards:
            problem = "has reward functions that compare the rollouts of a group"
            remedy = "Remove them: an agent scores each rollout by itself"
            raise UserError(SETTING, config.environment, problem, remedy)
        logging.getLogger("verifiers").addHandler(_Failures(logging.ERROR))

    def list_problems(self) -> tuple[list[Problem], list[Problem] | None]:
        """Return the problems for training, and held-out problems, if any."""
        own = self._environment.build_eval_dataset()
        return list(self._environment.get_dataset()), None if own is None else list(own)

    async def run(self, problem: Problem) -> float:
        """Run a rollout; return the reward."""
        url = os.environ["OPENAI_BASE_URL"]
        client = self._verifiers.ClientConfig(api_key_var=KEY, api_base_url=url)
        output = await self._environment.run_rollout(problem, client, MODEL, {})
        if (error := output.get("error")) is not None:
            raise RuntimeError(f"The environment failed: {error}")
        return float(output["reward"])


class _Failures(logging.Handler):
    """Raises a rubric's logged errors."""

    # A rubric only logs the error of a failed reward function, and counts a reward of zero.

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(RUBRICS):
            raise sys.exc_info()[1] or RuntimeError(record.getMessage())


class _Taskset:
    """Environment of verifiers 0.4 and later."""

    def __init__(self, config: VerifiersConfig) -> None:
        from verifiers import v1
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._v1 = v1
        arguments = config.arguments
        taskset = {**arguments.get("taskset", {}), "id": config.environment}
        self._environment = load_environment(resolve_env_config({**arguments, "taskset": taskset}))
        if not self._environment.taskset.bounded:
            problem = "has no end of its tasks"
            raise UserError(
                SETTING, config.environment, problem, "Limit them in data.verifiers.arguments"
            )
        self._tasks = list(self._environment.taskset)

    def list_problems(self) -> tuple[list[Problem], list[Problem] | None]:
        """Return the problems for training, and held-out problems, if any."""
        problems = []
        for number, task in enumerate(self._tasks):
            data = task.data.model_dump(mode="json", exclude_none=True)
            prompt = data.get("prompt") or data.get("description") or str(number)
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if system := data.get("system_prompt"):
                chat = [{"role": "system", "content": system}, *chat]
            problems.append({"prompt": chat, "answer": data.get("answer"), "number": number})
        return problems, None

    async def run(self, problem: Problem) -> float:
        """Run a rollout; return the sum of the agents' rewards."""
        client = self._v1.EvalClientConfig(api_key_var=KEY, base_url=os.environ["OPENAI_BASE_URL"])
        context = self._v1.ModelContext(model=MODEL, client=client)
        async with self._environment.serving():
            episode = await self._environment.run_episode(self._tasks[problem["number"]], context)
        if not episode.ok:
            errors = [*episode.errors, *(error for each in episode.traces for error in each.errors)]
            raise RuntimeError(f"The environment failed: {errors}")
        return float(sum(trace.reward for trace in episode.traces))


def _load(config: VerifiersConfig) -> _Environment | _Taskset:
    import verifiers

    # Restore the handlers, because an environment replaces them.
    taken = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        is_old = hasattr(verifiers, "load_environment")
        return _Environment(config) if is_old else _Taskset(config)
    except UserError:
        raise
    # Loading runs code of the environment's author, with any error or a call of sys.exit.
    except (Exception, SystemExit) as error:
        problem = f"cannot be loaded ({type(error).__name__}: {error})"
        remedy = "Install it, or correct data.verifiers.arguments"
        raise UserError(SETTING, config.environment, problem, remedy) from error
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def load_agent(config: VerifiersConfig) -> Callable[[Mapping[str, Any]], Awaitable[float | None]]:
    """Return an agent that runs the environment of a task.

    Raises:
        UserError: the environment cannot be loaded, or compares rollouts.
    """
    environment = _load(config)

    async def run_task(task: Mapping[str, Any]) -> float | None:
        problem = task["extra_info"].get("input")
        if problem is not None:
            return await environment.run(problem)
        await _ask(task["prompt"])
        return None

    return run_task


async def _ask(prompt: str | Sequence[Mapping[str, Any]]) -> None:
    """Request one turn about a prompt from another source, such as a benchmark."""
    from openai import AsyncOpenAI

    chat: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    await AsyncOpenAI().chat.completions.create(model=MODEL, messages=chat)


def _list_rows(config: VerifiersConfig, split: str) -> list[Row]:
    name = config.environment
    inputs, held_out = _load(config).list_problems()
    # Hold out problems of the training set if the environment has no evaluation set.
    if held_out is None:
        if (count := config.eval_problems) >= len(inputs):
            problem = f"leaves none of the {len(inputs)} problems of {name} for training"
            remedy = f"Lower it to {len(inputs) - 1} or less"
            raise UserError("data.verifiers.eval_problems", count, problem, remedy)
        drawn = set(random.Random(HELD_OUT_SEED).sample(range(len(inputs)), count))
        held_out = [row for number, row in enumerate(inputs) if number in drawn]
        inputs = [row for number, row in enumerate(inputs) if number not in drawn]
    chosen = held_out if split == "eval" else inputs
    return [_make_row(row, config, number) for number, row in enumerate(chosen, 1)]


def _make_row(problem: Problem, config: VerifiersConfig, number: int) -> Row:
    name = config.environment
    answer = problem.get("answer")
    values = {
        "prompt": problem["prompt"],
        "label": "" if answer is None else str(answer),
        "response": None,
        "data_source": f"verifiers/{name}",
        # As JSON and back, because an environment may return any object.
        "extra_info": {"input": json.loads(json.dumps(problem, default=str))},
    }
    return Row(values, "data.verifiers", f"{name}, problem {number}")


def _main() -> None:
    config, split = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        # Send the environment's output to standard error, because the parent reads rows from here.
        os.dup2(2, 1)
        try:
            made: list[Row] | UserError = _list_rows(config, split)
        except UserError as error:
            made = error
        out.write(pickle.dumps(made))


if __name__ == "__main__":
    _main()
