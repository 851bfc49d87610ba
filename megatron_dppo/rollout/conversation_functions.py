"""Functions of a run that make completions of several turns: conversations and agents."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from megatron_dppo.config import Config
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.plugins import load_function
from megatron_dppo.rollout.conversation import ConversationFunction
from megatron_dppo.rollout.turns import RolloutFunction

SETTING = "rollout.conversation"


def load_rollout_function(config: Config) -> RolloutFunction | None:
    """Load the function of a run's conversations or agents; None if a completion is one request.
    Main thread only.

    Raises:
        UserError: the function cannot be found, imported or called with its arguments.
    """
    if config.rollout.agent is not None:
        # Late, because processes without agents need no HTTP server.
        from megatron_dppo.rollout.agents.function import load_agent_function

        return load_agent_function(config)
    spec = config.rollout.conversation
    if spec is None:
        return None
    roles = config.rollout.roles
    turns = f'("{roles[0]}", turn) for each turn' if roles else "the turns"
    remedy = (
        f"Have it return {turns} as client.generate returned them, with lists of token ids "
        "between them"
    )
    folder = config.model.folder
    return ConversationFunction(
        SETTING,
        spec,
        _load_coroutine(spec),
        remedy,
        roles=roles,
        vocabulary=read_shape(folder).vocab_size,
        tokenizer=load_tokenizer(folder),
    )


def check_rollout_function(config: Config) -> None:
    """Check the function of :func:`load_rollout_function`.

    Raises:
        UserError: the function is unusable.
    """
    if function := load_rollout_function(config):
        asyncio.run(function.close())


def _load_coroutine(spec: str) -> Callable[..., Any]:
    function = load_function(SETTING, spec)
    try:
        inspect.signature(function).bind("client", "prompt")
    except TypeError as error:
        problem = f"cannot be called with 2 arguments ({error})"
        raise UserError(
            SETTING, spec, problem, "Give it the parameters (client, prompt)"
        ) from error
    if not inspect.iscoroutinefunction(function):
        raise UserError(SETTING, spec, "is no coroutine", "Define it with async def")
    return function
