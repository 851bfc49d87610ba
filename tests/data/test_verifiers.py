"""Environments of verifiers: their problems, and rollouts with the policy as agents.

Releases before 0.4 and later releases have different environments. The tests run the form of the
installed release.
"""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import DataConfig, VerifiersConfig, replace
from megatron_dppo.data.prompts import load_prompts
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Completion
from tests.rollout.agents.draws import list_draws
from tests.rollout.agents.local import log_draws, open_engine, sampling, write_agents_policy
from tests.rollout.local import generate

verifiers = pytest.importorskip("verifiers")
IS_OLD = hasattr(verifiers, "load_environment")
before_tasksets = pytest.mark.skipif(not IS_OLD, reason="verifiers 0.4 or later")

SUMS = """
import verifiers as vf
from datasets import Dataset

print("environments may print")

async def right(completion, answer, info):
    return float(completion[-1]["content"] == answer) * info["level"]

def shortest(completions):
    return [0.0 for completion in completions]

def picky(completion):
    if "fail" in completion[-1]["content"]:
        raise ArithmeticError("no such answer")
    return 0.0

def load_environment(size=9, held_out=0, compares=False):
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "info": {"level": 1 + i}} for i in range(size + held_out)]
    own = {"eval_dataset": Dataset.from_list(rows[size:])} if held_out else {}
    rubric = vf.Rubric(funcs=[right, picky, *([shortest] if compares else [])])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows[:size]), system_prompt="Add.", rubric=rubric, **own)
"""
GAME = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="yes")]
            return state["final_env_response"]
        told = "a number" if not said.isdigit() else "more" if int(said) < int(state["answer"]) else "less"
        return [vf.UserMessage(content=told)]

async def guessed(completion, answer, state):
    guesses = [message["content"] for message in completion if message["role"] == "assistant"]
    return float(guesses[-1:] == [answer]) - 0.125 * len(guesses) - 0.5 * state["is_truncated"]

def load_environment():
    rows = [{"question": f"guess {i}", "answer": str(i)} for i in range(1, 9)]
    rubric = vf.Rubric(funcs=[guessed])
    return Guess(max_turns=4, system_prompt="play", dataset=Dataset.from_list(rows), rubric=rubric)
"""
TASKSET = """
import json
import openai
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Guess(vf.Task[Data, vf.State]):
    @vf.reward(weight=1.0)
    async def guessed(self, trace) -> float:
        guesses = [node.message for node in trace.nodes if node.message.role == "assistant"]
        return 1.0 - 0.125 * len(guesses)

class Guesses(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        return [Guess(Data(prompt=f"guess {i}", system_prompt="play", answer=str(i))) for i in range(1, 9)]

class Player(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *rest, **more):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(3):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=6)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": "more"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Guesses", "Player"]
"""
TOY = VerifiersConfig(environment="toy-sums", eval_problems=3)
HERE = {"agent": {"runtime": {"type": "subprocess"}}}
GUESSES = VerifiersConfig(
    environment="guess_game" if IS_OLD else "guess_tasks",
    arguments={} if IS_OLD else HERE,
    eval_problems=1,
)


@pytest.fixture(scope="module", autouse=True)
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder: a policy with a tokenizer, and modules of environments."""
    folder = tmp_path_factory.mktemp("verifiers")
    write_agents_policy(folder)
    exits = "import sys\ndef load_environment():\n    sys.exit(0)\nsys.exit(0)\n"
    modules = {"toy_sums": SUMS, "guess_game": GAME, "guess_tasks": TASKSET, "exits": exits}
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture
def tokenizer(policy: Path) -> Tokenizer:
    return load_tokenizer(policy)


def list_labels(config: VerifiersConfig, split: str = "train") -> list[str]:
    from megatron_dppo.data.verifiers import _list_rows

    return [str(row["label"]) for row in _list_rows(config, split)]


def test_an_environment_runs_as_an_agent(
    policy: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained tokens are the engine's draws, and the reward is the environment's."""
    data = DataConfig(train="verifiers", verifiers=GUESSES)
    prompts = [*load_prompts(data, tokenizer, split="train")][:3]
    assert prompts[0].text.startswith(
        "<|im_start|>system\nplay<|im_end|>\n<|im_start|>user\nguess "
    )
    draws = log_draws(monkeypatch)
    settings = (
        "rollout.agent=verifiers",
        "data.train=verifiers",
        f"data.verifiers.environment={GUESSES.environment}",
        f"data.verifiers.arguments={json.dumps(GUESSES.arguments)}",
        "reward.memory_mib=8192",
    )
    with open_engine(policy, *settings) as engine:
        groups = generate(engine, prompts, sampling(2, 250))
    found = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.score is not None, "the environment scores its rollout"
            # Releases before 0.4 take a turn without text for an error.
            if IS_OLD and completion.score.failure:
                continue
            assert completion.score.failure is None, completion.score.traceback
            turns = list(list_draws(prompt, completion))
            found += turns
            check_reward(completion, len(turns))
            assert completion.starts == (), "the first request is the prompt"
    assert found and set(found) <= set(draws)
    assert IS_OLD or len(found) == len(draws)


def check_reward(completion: Completion, turns: int) -> None:
    """Check that every turn costs an eighth."""
    assert completion.score is not None
    assert (completion.score.reward + turns / 8) % 0.5 == 0


@before_tasksets
def test_held_out_problems_are_given_or_drawn_once() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train, held_out = (list_labels(TOY, split) for split in ("train", "eval"))
    assert sorted((*train, *held_out)) == sorted(str(2 * i) for i in range(9))
    assert len(held_out) == 3 and held_out == list_labels(TOY, "eval")
    own = replace(TOY, arguments={"held_out": 2})
    assert list_labels(own, "eval") == ["18", "20"]
    assert len(list_labels(own)) == 9
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_problems_are_held_out_if_none_are_given() -> None:
    train, held_out = (list_labels(GUESSES, split) for split in ("train", "eval"))
    assert sorted((*train, *held_out)) == sorted(str(i) for i in range(1, 9)) and len(held_out) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment": "exits"}, "cannot be loaded (SystemExit: 0)"),
        ({"environment": GUESSES.environment, "eval_problems": 8}, "leaves none of the 8 problems"),
        pytest.param(
            {"arguments": {"compares": True}}, "that compare the rollouts", marks=before_tasksets
        ),
    ],
    ids=["exits", "too few", "compares"],
)
def test_an_unusable_environment_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        list_labels(replace(TOY, **changes))
    assert raised.value.setting.startswith("data.verifiers.") and words in str(raised.value)
