"""Environments of verifiers, as a run reads their problems and scores answers by their rubrics."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import Config, DataConfig, ModelConfig, RolloutConfig, VerifiersConfig, replace
from megatron_dppo.data.prompts import load_prompts, prompts_of
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.data.turns import NothingLeftError, OtherAnswerError
from megatron_dppo.errors import UserError
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers, Scored
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.conversation import Client, ConversationFunction
from megatron_dppo.rollout.conversation_functions import check_turns, conversation_of
from megatron_dppo.rollout.scoring import GroupScoring
from tests.policies import write_policy
from tests.rollout.local import make_policy, sampling_of, weights_of

pytest.importorskip("verifiers")

TOY = """
import verifiers as vf
from datasets import Dataset

print("environments may print")

async def right(completion, answer, info):
    return float(completion[-1]["content"] == answer) * info["level"]

def shortest(completions):
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]

def picky(completion):
    if "fail" in completion[-1]["content"]:
        raise ArithmeticError("no such answer")
    return 0.0

def add(a: int, b: int) -> int:
    "Their sum."
    return a + b

def called(completion):
    return sum(message["role"] == "tool" for message in completion)

def load_environment(size=9, held_out=0, tools=0):
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "info": {"level": 1 + i}} for i in range(size + held_out)]
    own = {"eval_dataset": Dataset.from_list(rows[size:])} if held_out else {}
    funcs, weights = [right, shortest, picky, called], [1.0, 0.5, 1.0, 16.0]
    kind, more = (vf.ToolEnv, {"tools": [add]}) if tools else (vf.SingleTurnEnv, {})
    parts = {"dataset": Dataset.from_list(rows[:size]), "system_prompt": "Add.", **own, **more}
    made = [kind(**parts, rubric=vf.Rubric(funcs=funcs, weights=weights)) for _ in range(max(tools, 1))]
    return made[0] if len(made) == 1 else vf.EnvGroup(made)
"""
CONFIG = VerifiersConfig(environment="toy-sums", eval_problems=3)


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_sums.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def load(config: VerifiersConfig, split: Any) -> list[Prompt]:
    write_tokenizer(character_tokenizer(), Path(), max_tokens=512)
    tokenizer = load_tokenizer(Path())
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return load_prompts(DataConfig(train="verifiers", verifiers=config), tokenizer, split=split)


def scored(*groups: Sequence[ScoreItem]) -> Scored:
    with closing(RewardWorkers("verifiers", workers=1, timeout_s=30.0)) as pool:
        scoring = pool.begin(99)
        for group in groups:
            scoring.add(group)
        return scoring.finish()


def test_problems_are_the_environments_and_scores_its_rubrics() -> None:
    """Right is worth the problem's level, and half a point the shortest answer of the group."""
    prompts = load(CONFIG, "train")
    assert len(prompts) == 6 and {prompt.data_source for prompt in prompts} == {"verifiers/toy-sums"}
    first, second = prompts[0], prompts[-1]
    number = int(str(first.label)) // 2
    assert first.text == f"Add. {number}+{number}= " and second.label != first.label
    said = [(str(first.label), f"it is {first.label}", "?"), ("fail", "?"), (str(second.label),)]
    groups = [
        [ScoreItem.of(prompt, text, ()) for text in texts]
        for prompt, texts in zip((first, first, second), said, strict=True)
    ]
    found = scored(*groups)
    rewards = [score and score.reward for score in found.scores]
    shortest = [float(len(text) == 1) for text in said[0]]
    right = [1.0 + number, 0.0, 0.0]
    assert rewards[:3] == [a + 0.5 * b for a, b in zip(right, shortest, strict=True)]
    assert rewards[3:] == [None, None, 1.0 + int(str(second.label)) // 2 + 0.5]
    assert found.errors == 2 and "ArithmeticError: no such answer" in found.tracebacks[0], "and no zero is made of it"


def test_held_out_problems_are_the_environments_own_or_drawn_once() -> None:
    from megatron_dppo.data.verifiers import _problems

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train, held_out = (_problems(CONFIG, split) for split in ("train", "eval"))
    assert sorted(row["label"] for row in (*train, *held_out)) == sorted(str(2 * i) for i in range(9))
    assert len(held_out) == 3 and held_out == _problems(CONFIG, "eval")
    own = replace(CONFIG, arguments={"held_out": 2})
    assert [row["label"] for row in _problems(own, "eval")] == ["18", "20"]
    assert len(_problems(own, "train")) == 9
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(CONFIG, arguments={"tools": 2}), "(EnvGroup) has tools in one of its environments"),
        (replace(CONFIG, environment="no_such"), "no_such: cannot be loaded (ValueError: Could not import"),
        (replace(CONFIG, eval_problems=9), "leaves nothing to train on of the 9 problems"),
    ],
)
def test_an_environment_that_cannot_be_trained_on_is_refused(config: VerifiersConfig, words: str) -> None:
    from megatron_dppo.data.verifiers import _read

    refused = _read(config, "train")
    assert isinstance(refused, UserError) and refused.setting.startswith("data.verifiers.")
    assert words in str(refused)


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ("sys.exit(0)", "cannot be loaded (SystemExit: 0)"),
        ("os._exit(0)", "ended the process that makes its problems, with exit code 0"),
        ("os.kill(os.getpid(), 9)", "ended the process that makes its problems, with exit code -9"),
    ],
)
def test_an_environment_that_ends_its_process_is_named(tmp_path: Path, leaves: str, words: str) -> None:
    (tmp_path / "leaves_early.py").write_text(f"import os, sys\ndef load_environment():\n    {leaves}\n")
    with pytest.raises(UserError) as refused:
        load(replace(CONFIG, environment="leaves-early"), "train")
    assert (refused.value.setting, refused.value.value) == ("data.verifiers.environment", "leaves-early")
    assert refused.value.problem == words


GUESS = """
import itertools
import verifiers as vf
from datasets import Dataset

NOISE = itertools.count()

class Guess(vf.MultiTurnEnv):
    noisy = False

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="yes")]
            return state["final_env_response"]
        told = "a number" if not said.isdigit() else "more" if int(said) < int(state["answer"]) else "less"
        return [vf.UserMessage(content=f"{told} {next(NOISE)}" if self.noisy else told)]

class Forgets(Guess):
    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]

async def guessed(completion, answer, state):
    guesses = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(guesses[-1] == answer) - 0.125 * len(guesses) - 0.5 * state["is_truncated"]

def shortest(completions):
    return [float(len(each) == min(map(len, completions))) for each in completions]

def load_environment(kind="game"):
    rows = [{"question": f"guess {i}", "answer": str(i)} for i in range(1, 9)]
    parts = {"dataset": Dataset.from_list(rows), "rubric": vf.Rubric(funcs=[guessed, shortest], weights=[1.0, 1.0])}
    game = {"forgets": Forgets, "game": Guess, "noisy": Guess, "mixed": Guess}[kind]
    game = game(max_turns=4, system_prompt="play", **parts)
    game.noisy = kind == "noisy"
    return vf.EnvGroup([vf.SingleTurnEnv(**parts), game]) if kind == "mixed" else game
"""


def game(kind: str = "game", **rollout: Any) -> Config:
    Path("guess_game.py").write_text(GUESS)
    data = VerifiersConfig(environment="guess_game", arguments={"kind": kind}, eval_problems=1)
    talk = {"conversation": "verifiers"} | rollout
    write_policy(Path(), layers=1)
    return Config(
        model=ModelConfig(path="."), data=DataConfig(train="verifiers", verifiers=data), rollout=RolloutConfig(**talk)
    )


def chat_prompts(config: Config) -> tuple[Any, list[Prompt]]:
    from megatron_dppo.data.verifiers import _problems

    write_tokenizer(character_tokenizer(), Path(), max_tokens=512)
    tokenizer = load_tokenizer(Path.cwd())
    return tokenizer, prompts_of(_problems(config.data.verifiers, "train"), config.data, tokenizer)


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class ScriptedClient(Client):
    """Says one text after the other, as long as there is room, and ends each turn."""

    texts: list[str]

    async def turn(self, context: list[int], limit: int, stops: tuple[int, ...]) -> Completion:
        ids = [*self.tokenizer.encode(self.texts.pop(0)), self.tokenizer.eos_token_id]
        said, count = np.array(ids[:limit], np.int32), min(len(ids), limit)
        parts = -said.astype(np.float32), np.ones(count, bool), (VersionSpan(1, count),)
        return Completion(said, *parts, "stop" if count == len(ids) else "length")


def function_of(config: Config) -> ConversationFunction:
    write_policy(Path("policy"), layers=1)
    function = conversation_of(replace(config, model=ModelConfig(path="policy")))
    assert function is not None
    return function


def conversation(config: Config, tokenizer: Any, prompt: Prompt, *texts: str, limit: int = 200) -> Completion:
    function = dataclasses.replace(function_of(config), tokenizer=tokenizer, vocabulary=len(tokenizer))
    sampling = sampling_of(samples=1, max_tokens=limit)
    client = ScriptedClient(function=function, prompt=prompt, sampling=sampling, number=0, texts=list(texts))
    return asyncio.run(function.have(client))


def item(prompt: Prompt, completion: Completion, tokenizer: Any) -> ScoreItem:
    """As ``GroupScoring`` makes it."""
    made = completion.token_ids.tolist(), completion.loss_mask.tolist(), completion.finish_reason, str(Path.cwd())
    return ScoreItem.of(prompt, tokenizer.decode(made[0], skip_special_tokens=True), *made)


def told_by_rubric(config: Config, prompt: Prompt, group: Sequence[Sequence[str]]) -> list[float]:
    """The rubric's rewards of rollouts of the environment itself, in which the policy says these texts, and then has no
    room for more."""
    from megatron_dppo.data.verifiers import load_environment, play

    async def score() -> list[float]:
        environment, states = load_environment("guess_game", config.data.verifiers.arguments), []
        for texts in group:
            left = list(texts)

            async def answer(messages: Any, left: list[str] = left) -> str:
                if not left:
                    raise NothingLeftError
                return left.pop(0)

            states.append(await play(environment, prompt.extra["input"], answer))
        await environment.rubric.score_group(states)
        return [state["reward"] for state in states]

    return asyncio.run(score())


def test_the_policy_speaks_with_the_environment_in_the_tokens_that_it_makes() -> None:
    config = game()
    tokenizer, prompts = chat_prompts(config)
    prompt = next(prompt for prompt in prompts if prompt.label == "5")
    completion = conversation(config, tokenizer, prompt, "3", "7", "5", "no more")
    turns = ["play", "guess 5", "3", "more", "7", "less", "5"]
    roles = ["system", "user", *["assistant", "user"] * 2, "assistant"]
    chat = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    assert prompt.text + tokenizer.decode(completion.token_ids) + "\n" == tokenizer.apply_chat_template(
        chat, tokenize=False
    )
    assert tokenizer.decode(completion.token_ids[completion.loss_mask]) == "3<|im_end|>7<|im_end|>5<|im_end|>"
    assert (completion.logprobs[completion.loss_mask] == -completion.token_ids[completion.loss_mask]).all()
    assert completion.finish_reason == "stop"
    other = dataclasses.replace(prompt, extra={})
    assert tokenizer.decode(conversation(config, tokenizer, other, "3", "7").token_ids) == "3<|im_end|>"


def test_conversations_have_the_rewards_of_the_environments_own_rollouts() -> None:
    """Those that are cut off among them: in a turn of the policy, behind one, and in what it is told."""
    config = game()
    tokenizer, prompts = chat_prompts(config)
    prompt = next(prompt for prompt in prompts if prompt.label == "5")
    told = len(tokenizer.encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"))
    group: list[tuple[Sequence[str], int]] = [
        (("3", "7", "5"), 200), (("5",), 200), (("1", "x", "1", "1"), 200), (("12",), 1), (("1", "4"), told + 3),
        (("1",), 2), (("1",), 9), (("1",), told + 2), (("1", "2"), told + 4), (("1", "5"), told + 4),
    ]  # fmt: skip
    completions = [conversation(config, tokenizer, prompt, *texts, limit=limit) for texts, limit in group]
    assert sum(each.finish_reason == "length" for each in completions) == 6
    with closing(RewardWorkers("verifiers", workers=1, timeout_s=30.0)) as pool:
        found = GroupScoring(pool, tokenizer, [prompt], most_failures=99).finish([tuple(completions)])
    assert not found.failures.tracebacks, found.failures.tracebacks[0]
    said = [("1",) if texts == ("12",) else texts for texts, _ in group]
    assert [score and score.reward for score in found.scores[0]] == told_by_rubric(config, prompt, said)


def test_an_environments_tools_answer_the_policys_calls(calling: Any) -> None:
    """Words and calls, two calls at once, a call that fails, and one that cannot be read and so ends the rollout."""
    from megatron_dppo.data.verifiers import _problems, group_score

    config = Config(
        data=DataConfig(train="verifiers", verifiers=replace(CONFIG, arguments={"tools": 1})),
        rollout=RolloutConfig(conversation="verifiers"),
    )
    prompt = prompts_of(_problems(config.data.verifiers, "train"), config.data, calling)[0]
    assert '{"type": "function", "function": {"name": "add", "description": "Their sum.", "parame' in prompt.text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": %s}}\n</tool_call>'
    right = str(prompt.label)
    spoken = [(f"So: {call % 2}\n{call % 3}", call % '"?"', right), ("<tool_call>add</tool_call>", right)]
    group = [conversation(config, calling, prompt, *texts, limit=1000) for texts in spoken]
    told = [calling.decode(each.token_ids[~each.loss_mask]) for each in group]
    answers = [part.partition("\n</tool_response>")[0] for part in told[0].split("<tool_response>\n")[1:]]
    assert answers[:2] == ["3", "4"] and "unsupported operand" in answers[2] and len(answers) == 3
    assert told[1] == "" and calling.decode(group[1].token_ids) == "<tool_call>add</tool_call><|im_end|>"
    assert told[0].startswith("\n<|im_start|>user\n<tool_response>\n3") and told[0].endswith("<|im_start|>assistant\n")
    policy = calling.name_or_path
    made = [ScoreItem.of(prompt, "", e.token_ids.tolist(), e.loss_mask.tolist(), "stop", policy) for e in group]
    level = 1.0 + int(right) // 2
    shortest = [float(len(right) <= len(spoken[1][0])), 0.0]
    assert group_score(made) == [level + 0.5 * shortest[0] + 16.0 * 3, 0.0]


def test_an_environment_that_answers_otherwise_when_it_is_scored_is_an_error() -> None:
    from megatron_dppo.data.verifiers import group_score

    config = game("noisy")
    tokenizer, prompts = chat_prompts(config)
    completion = conversation(config, tokenizer, prompts[0], "0", prompts[0].label)
    with pytest.raises(OtherAnswerError, match="The environment answered, otherwise than when"):
        group_score([item(prompts[0], completion, tokenizer)])


def test_what_an_environment_of_several_turns_lacks_is_said() -> None:
    config = game(conversation=None)
    tokenizer, prompts = chat_prompts(config)
    assert conversation_of(config) is None
    with pytest.raises(UserError, match=r"guess_game speaks with the policy in several turns.*=verifiers"):
        check_turns(config, config.data, lambda: [prompt.extra for prompt in prompts])
    check_turns(game(), config.data, lambda: [prompt.extra for prompt in prompts])
    with pytest.raises(UserError, match=r"guess_game: cannot be loaded"):
        conversation_of(game("no such kind"))
    forgets = game("forgets")
    tokenizer, prompts = chat_prompts(forgets)
    with pytest.raises(UserError, match="it asks the policy other messages at first than its problem has"):
        conversation(forgets, tokenizer, prompts[0], "0")
