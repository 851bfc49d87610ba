"""Conversations with an environment of *verifiers*: ``rollout.conversation=verifiers``.

The environment has its own loop go, and the policy is its server. Prompts of none of its problems, such as those of a
benchmark, are answered in one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_dppo.config import Config, DataConfig, VerifiersConfig
from megatron_dppo.data.examples import sources_of
from megatron_dppo.data.generators import SEVERAL_TURNS, TOOLS, VERIFIERS, check_environment
from megatron_dppo.data.turns import CALL, OTHER_CALL, NothingLeftError, Turns, TurnsError
from megatron_dppo.errors import UserError
from megatron_dppo.plugins.loading import FAILURES
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.conversation import Client, ConversationFunction, Part, TryAgainError
from megatron_dppo.rollout.conversation_checks import UnusableError

SETTING = "rollout.conversation"
REMEDY = "Write the turns as a function of your own (rollout.conversation=FILE.py:NAME), and the reward, too"


def conversation_of(config: Config) -> ConversationFunction | None:
    """That of ``rollout.conversation``; None: it names none. In the main thread.

    Raises:
        UserError: it cannot be found or imported, or cannot be called as it would be; or the environment cannot be
            loaded.
    """
    spec = config.rollout.conversation
    if spec is None:
        return None
    if spec != VERIFIERS:
        return ConversationFunction.load(spec, config.rollout.roles)
    return ConversationFunction(SETTING, spec, _Environment(config.data.verifiers), REMEDY)


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
    alone = rollout.conversation is None and rollout.custom_generate is None
    if not alone or VERIFIERS not in {source.name for source in sources_of(data, "train")}:
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

        async def say(told: list[int]) -> list[int]:
            if told:
                turns.append(told)
            turn = await client.generate([*tokens, *told])
            said: list[int] = turn.token_ids.tolist()
            turns.append(turn)
            tokens.extend([*told, *said])
            if not said:
                raise NothingLeftError
            return said

        extra: Mapping[str, Any] = prompt.extra
        if "environment" not in extra:
            await say([])
            return turns
        tools = extra.get(TOOLS, ())
        template = client.tokenizer.chat_template
        if tools and (CALL not in template or OTHER_CALL in template):
            problem = f"has tools, and the chat template has them called otherwise than by JSON in {CALL}"
            raise UnusableError(f"{problem}, the only form that is read here")
        environment = self._load(extra["environment"], extra["arguments"])
        turns_of_it = Turns(client.tokenizer, extra["input"]["prompt"], say)
        try:
            await self._play(environment, extra["input"], turns_of_it, tools)
        except TurnsError as error:
            raise UnusableError(str(error)) from error
        except self._down as error:
            raise TryAgainError(str(error)) from error
        return turns
