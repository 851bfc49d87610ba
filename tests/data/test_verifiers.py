"""Environments of verifiers: their problems, conversations with the policy, and scores by their
rubrics."""

import asyncio
import dataclasses
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import Config, DataConfig, VerifiersConfig, replace
from megatron_dppo.data.prompts import load_prompts, make_prompts
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.init import build_character_tokenizer, write_tokenizer
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.score import collect_tracebacks, count_failures
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.conversation import Client
from megatron_dppo.rollout.conversation_functions import check_turns, load_conversation_function
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.scoring import GroupScoring
from megatron_dppo.settings import load_config
from tests.policies import write_policy
from tests.rollout.local import sampling_of

pytest.importorskip("verifiers")
REWARD, REWARD_TIMEOUT_S = "verifiers", 30.0

SUMS = """
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

def load_environment(size=9, held_out=0):
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "info": {"level": 1 + i}} for i in range(size + held_out)]
    own = {"eval_dataset": Dataset.from_list(rows[size:])} if held_out else {}
    rubric = vf.Rubric(funcs=[right, shortest, picky], weights=[1.0, 0.5, 1.0])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows[:size]), system_prompt="Add.", rubric=rubric, **own)
"""
GAME = """
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

async def guessed(completion, answer, state):
    guesses = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(guesses[-1] == answer) - 0.125 * len(guesses) - 0.5 * state["is_truncated"]

def shortest(completions):
    return [float(len(each) == min(map(len, completions))) for each in completions]

def load_environment(noisy=False):
    rows = [{"question": f"guess {i}", "answer": str(i)} for i in range(1, 9)]
    rubric = vf.Rubric(funcs=[guessed, shortest], weights=[1.0, 1.0])
    game = Guess(max_turns=4, system_prompt="play", dataset=Dataset.from_list(rows), rubric=rubric)
    game.noisy = noisy
    return game
"""
TOY = VerifiersConfig(environment="toy-sums", eval_problems=3)


@pytest.fixture(scope="module", autouse=True)
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder: a policy with a tokenizer, and modules of environments."""
    folder = tmp_path_factory.mktemp("verifiers")
    write_policy(folder, layers=1)
    write_tokenizer(build_character_tokenizer(), folder, max_tokens=512)
    exits = "import sys\ndef load_environment():\n    sys.exit(0)\n"
    for name, text in {"toy_sums": SUMS, "guess_game": GAME, "exits": exits}.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def tokenizer(policy: Path) -> Tokenizer:
    return load_tokenizer(policy)


def problems_of(config: VerifiersConfig, split: str = "train") -> list[Any]:
    from megatron_dppo.data.verifiers import _load_problems

    return _load_problems(config, split)


def game(*words: str) -> Config:
    common = (
        "model.path=. data.train=verifiers data.verifiers.environment=guess_game "
        "data.verifiers.eval_problems=1"
    )
    return load_config(None, [*common.split(), "rollout.conversation=verifiers", *words])


def prompts_for(config: Config, tokenizer: Tokenizer) -> list[Prompt]:
    return make_prompts(problems_of(config.data.verifiers), config.data, tokenizer)


def test_problems_and_scores_are_the_environments(
    workers: RewardWorkers, tokenizer: Tokenizer
) -> None:
    """A right answer is worth the problem's level, and the shortest answer of a group half a
    point."""
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    prompts = load_prompts(DataConfig(train="verifiers", verifiers=TOY), tokenizer, split="train")
    assert len(prompts) == 6 and {prompt.data_source for prompt in prompts} == {
        "verifiers/toy-sums"
    }
    first, second = prompts[0], prompts[-1]
    number = int(str(first.label)) // 2
    assert first.text == f"Add. {number}+{number}= " and second.label != first.label
    said = [(str(first.label), f"it is {first.label}", "?"), ("fail", "?"), (str(second.label),)]
    scoring = workers.begin(99)
    for prompt, texts in zip((first, first, second), said, strict=True):
        scoring.add([ScoreItem.from_prompt(prompt, text, ()) for text in texts])
    found = scoring.finish()
    rewards = [None if score.failure else score.reward for score in found]
    shortest = [float(len(text) == 1) for text in said[0]]
    right = [1.0 + number, 0.0, 0.0]
    assert rewards[:3] == [a + 0.5 * b for a, b in zip(right, shortest, strict=True)]
    assert rewards[3:] == [None, None, 1.0 + int(str(second.label)) // 2 + 0.5]
    assert (
        count_failures(found) == (0, 2)
        and "ArithmeticError: no such answer" in collect_tracebacks(found)[0]
    )


def test_held_out_problems_are_given_or_drawn_once() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train, held_out = (problems_of(TOY, split) for split in ("train", "eval"))
    assert sorted(row["label"] for row in (*train, *held_out)) == sorted(
        str(2 * i) for i in range(9)
    )
    assert len(held_out) == 3 and held_out == problems_of(TOY, "eval")
    own = replace(TOY, arguments={"held_out": 2})
    assert [row["label"] for row in problems_of(own, "eval")] == ["18", "20"]
    assert len(problems_of(own)) == 9
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": "exits"}, "cannot be loaded (SystemExit: 0)"),
        ({"eval_problems": 9}, "leaves none of the 9 problems"),
    ],
)
def test_an_unusable_environment_is_refused(changes: dict[str, Any], words: str) -> None:
    from megatron_dppo.data.verifiers import _read

    error = _read(replace(TOY, **changes), "train")
    assert isinstance(error, UserError) and error.setting.startswith("data.verifiers.")
    assert words in str(error)


async def say(
    texts: list[str], client: Client, context: list[int], sampling: Sampling
) -> Completion:
    """Say the next text, within the room that is left, and end the turn."""
    ids = [*client.tokenizer.encode(texts.pop(0)), client.tokenizer.eos_token_id]
    said = np.array(ids[: sampling.max_tokens], np.int32)
    count = len(said)
    parts = -said.astype(np.float32), np.ones(count, bool), np.full(count, 1, np.int32)
    return Completion(said, *parts, "stop" if count == len(ids) else "length")


def converse(
    config: Config, tokenizer: Any, prompt: Prompt, *texts: str, limit: int = 200
) -> Completion:
    function = load_conversation_function(config)
    assert function is not None
    function = dataclasses.replace(function, tokenizer=tokenizer, vocabulary=len(tokenizer))
    sampling = sampling_of(samples=1, max_tokens=limit)
    turn = partial(say, list(texts))
    client = Client(function=function, prompt=prompt, sampling=sampling, number=0, turn=turn)
    return asyncio.run(function.run(client))


def test_conversations_have_the_tokens_and_rewards_of_rollouts(
    workers: RewardWorkers, tokenizer: Tokenizer
) -> None:
    """Also if cut off: in a turn of the policy, behind a turn, and in the environment's answer."""
    config = game()
    prompt = next(prompt for prompt in prompts_for(config, tokenizer) if prompt.label == "5")
    answered = len(tokenizer.encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"))
    group: list[tuple[Sequence[str], int]] = [
        (("3", "7", "5"), 200), (("1", "x", "1", "1"), 200), (("12",), 1), (("1",), 2), (("1",), 9),
        (("1", "2"), answered + 4),
    ]  # fmt: skip
    completions = [
        converse(config, tokenizer, prompt, *texts, limit=limit) for texts, limit in group
    ]
    assert sum(each.finish_reason == "length" for each in completions) == 4
    found = GroupScoring(workers, tokenizer, [prompt], max_failures=99).finish([tuple(completions)])
    # For the last guess, each guess, a conversation that is cut off, and the shortest of the group.
    assert found[0].rewards.tolist() == [0.625, -0.5, 0.375, 0.375, 0.375, -0.75]
    first = completions[0]
    turns = ["play", "guess 5", "3", "more", "7", "less", "5"]
    roles = ["system", "user", *["assistant", "user"] * 2, "assistant"]
    chat = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert prompt.text + tokenizer.decode(first.token_ids) + "\n" == whole
    assert tokenizer.decode(first.token_ids[first.loss_mask]) == "3<|im_end|>7<|im_end|>5<|im_end|>"
    assert (first.logprobs[first.loss_mask] == -first.token_ids[first.loss_mask]).all()


def test_several_turns_need_a_conversation(tokenizer: Tokenizer) -> None:
    config, silent = game(), game("rollout.conversation=null")
    extras = [prompt.extra for prompt in prompts_for(config, tokenizer)]
    check_turns(config, config.data, lambda: extras)
    with pytest.raises(UserError, match=r"rollout.conversation = null.*guess_game"):
        check_turns(silent, silent.data, lambda: extras)
