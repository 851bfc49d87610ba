"""Conversation functions of a run: the user's function, or environments of *verifiers*.

- ``rollout.conversation=FILE.py:NAME`` names a user's function (``conversation.py``).
- With ``rollout.conversation=verifiers`` the environment runs the loop, and calls the policy as a
  server. Prompts from other sources, for example a benchmark, are completed in one turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_dppo.config import Config, DataConfig, VerifiersConfig
from megatron_dppo.data.examples import resolve_sources, select_chat_template
from megatron_dppo.data.generators import SEVERAL_TURNS, TOOLS, VERIFIERS, check_environment
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.data.turns import (
    CALL,
    OTHER_CALL,
    ChatSession,
    ConversationFormatError,
    ResponseFullError,
)
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.plugins import FAILURES, load_function
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.conversation import ConversationFunction
from megatron_dppo.rollout.conversation_checks import InvalidCompletionError
from megatron_dppo.rollout.turns import Client, Part, TryAgainError

SETTING = "rollout.conversation"
REMEDY = "Write the turns and the reward as your own functions (rollout.conversation=FILE.py:NAME)"


def load_conversation_function(config: Config) -> ConversationFunction | None:
    """Load the function of a run's conversations; None if a completion is one request. Main thread
    only.

    Raises:
        UserError: the function cannot be found, imported or called with (client, prompt), or the
            environment cannot be loaded.
    """
    spec = config.rollout.conversation
    roles = config.rollout.roles
    function: Callable[..., Any]
    if spec is None:
        return None
    if spec == VERIFIERS:
        function = _Environment(config.data.verifiers)
        remedy = REMEDY
    else:
        turns = f'("{roles[0]}", turn) for each turn' if roles else "the turns"
        remedy = (
            f"Have it return {turns} as client.generate returned them, with lists of token "
            "ids between them"
        )
        function = _load_coroutine(spec)
    folder = config.model.folder
    return ConversationFunction(
        SETTING,
        spec,
        function,
        remedy,
        roles,
        read_shape(folder).vocab_size,
        load_tokenizer(folder),
    )


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


def check_turns(
    config: Config,
    data: DataConfig,
    problems: Callable[[], Iterable[Mapping[str, object]]],
) -> None:
    """Check the support of environments with several turns.

    Args:
        data: settings of the problems.
        problems: returns each problem's extra columns; called only if ``data.train`` has
            environments.

    Raises:
        UserError: an environment has several turns, and the run has no conversation function.
    """
    if config.rollout.conversation:
        return
    if VERIFIERS not in {source.name for source in resolve_sources(data, "train")}:
        return
    if any(SEVERAL_TURNS in each for each in problems()):
        problem = (
            "names no function for conversations, and the environment "
            f"{data.verifiers.environment} has several turns"
        )
        raise UserError(SETTING, "null", problem, f"Set {SETTING}={VERIFIERS}")


class _Environment:
    """Conversation with the environment of the prompt."""

    def __init__(self, config: VerifiersConfig) -> None:
        check_environment(config)
        # Late, because the import of verifiers takes seconds.
        from megatron_dppo.data.verifiers import DOWN, load_environment, run_environment

        # Report errors before the first conversation.
        try:
            load_environment(config.environment, config.arguments)
        except FAILURES as error:
            problem = f"cannot be loaded ({type(error).__name__}: {error})"
            remedy = "Install it, or correct data.verifiers.arguments"
            raise UserError(
                "data.verifiers.environment", config.environment, problem, remedy
            ) from error
        self._load_environment = load_environment
        self._run_environment = run_environment
        self._down = DOWN

    async def __call__(self, client: Client, prompt: Prompt) -> list[Part]:
        """Hold the conversation of one prompt.

        Raises:
            TryAgainError: the environment times out, or one of its services is down.
            InvalidCompletionError: the environment's messages cannot be converted to token ids.
        """
        turns: list[Part] = []
        tokens = prompt.token_ids.tolist()

        async def generate_turn(given: list[int]) -> list[int]:
            if given:
                turns.append(given)
            turn = await client.generate([*tokens, *given])
            sampled: list[int] = turn.token_ids.tolist()
            turns.append(turn)
            tokens.extend([*given, *sampled])
            # ``Client.generate`` returns no tokens if the response is full.
            if not sampled:
                raise ResponseFullError
            return sampled

        extra: Mapping[str, Any] = prompt.extra
        # A prompt from another source, such as a benchmark, has one turn.
        if "environment" not in extra:
            await generate_turn([])
            return turns
        tools = extra.get(TOOLS, ())
        template = select_chat_template(client.tokenizer, tools) if tools else ""
        if tools and (CALL not in template or OTHER_CALL in template):
            problem = (
                f"has tools, and the chat template has them called otherwise than by JSON in {CALL}"
            )
            raise InvalidCompletionError(f"{problem}, the only form that is read here")
        environment = self._load_environment(extra["environment"], extra["arguments"])
        messages = ChatSession(client.tokenizer, extra["input"]["prompt"], generate_turn, tools)
        try:
            await self._run_environment(environment, extra["input"], messages, tools)
        except ConversationFormatError as error:
            raise InvalidCompletionError(str(error)) from error
        except self._down as error:
            raise TryAgainError(str(error)) from error
        return turns
