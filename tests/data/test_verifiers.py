"""Environments of verifiers, as a run reads their problems and scores answers by their rubrics."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import DataConfig, VerifiersConfig, replace
from megatron_dppo.data.generators import check_environment
from megatron_dppo.data.prompts import load_prompts
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.data.vocabulary import character_tokenizer, write_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers, Scored
from megatron_dppo.rl.types import Prompt

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

class Tools(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return []

def load_environment(size=9, held_out=0, tools=False):
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i), "info": {"level": 1 + i}} for i in range(size + held_out)]
    own = {"eval_dataset": Dataset.from_list(rows[size:])} if held_out else {}
    rubric = vf.Rubric(funcs=[right, shortest, picky], weights=[1.0, 0.5, 1.0])
    kind = Tools if tools else vf.SingleTurnEnv
    return kind(dataset=Dataset.from_list(rows[:size]), system_prompt="Add.", rubric=rubric, **own)
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
        (replace(CONFIG, arguments={"tools": True}), "has several turns (Tools)"),
        (replace(CONFIG, environment="no_such"), "no_such: cannot be loaded (ValueError: Could not import"),
        (replace(CONFIG, eval_problems=9), "leaves nothing to train on of the 9 problems"),
    ],
)
def test_an_environment_that_cannot_be_trained_on_is_refused(config: VerifiersConfig, words: str) -> None:
    from megatron_dppo.data.verifiers import _read

    refused = _read(config, "train")
    assert isinstance(refused, UserError) and refused.setting.startswith("data.verifiers.")
    assert words in str(refused)


def test_an_environment_has_to_be_named() -> None:
    with pytest.raises(UserError, match="names no environment"):
        check_environment(VerifiersConfig())
