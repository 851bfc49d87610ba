"""Reward functions as users of verl, slime and TRL write them give the scores that they give
there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import (
    GroupScoresError,
    NotScoredError,
    ScoreItem,
    run_awaitable,
)
from megatron_dppo.rewards.functions import parse_reward, resolve
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.score import Score

THEIRS = """
import asyncio
import re
from functools import partial, wraps

# verl: a dictionary, with more than the score in it
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    answer = solution_str.split("####")[-1].strip()
    acc = answer == ground_truth
    return {"score": 1.0 if acc else -0.5, "acc": acc, "pred": answer, "split": (extra_info or {}).get("split")}

# verl: asynchronous
async def compute_score_later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)

# slime: --custom-rm-path
async def custom_rm_with_reward_key(args, sample):
    return {"score": 0.5, "acc": sample.label == sample.response}

# slime: --group-rm
def one_for_all(args, samples):
    return 1.0

def three(args, samples, more):
    return [1.0]

# TRL: completions of text
def reward_columns(prompts, completions, ground_truth, **kwargs):
    return [float(c.endswith(g)) for c, g in zip(completions, ground_truth)]

# TRL: completions of chat messages
def format_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]

# TRL: one of several tasks
def math_reward(completions, task, solution, **kwargs):
    return [float(c == s) if t == "math" else None for c, t, s in zip(completions, task, solution)]

async def reward_later(completions, answer):
    await asyncio.sleep(0)
    return [float(c == a) for c, a in zip(completions, answer)]

def of_a_trainer(completions, trainer_state):
    return [1.0]

# verl calls by keyword.
def with_a_setting(solution_str, ground_truth, data_source, extra_info=None, weight=1.0, **kwargs):
    return told(data_source, solution_str, ground_truth, extra_info) * weight

def anything(*args, **kwargs):
    assert not args
    return told(**kwargs)

class Judge:
    def __call__(self, ground_truth, solution_str, extra_info, data_source):
        return told(data_source, solution_str, ground_truth, extra_info)
    async def later(self, ground_truth, solution_str, extra_info, data_source):
        return told(data_source, solution_str, ground_truth, extra_info)

called, method = Judge(), Judge().later
bound = partial(lambda weight, ground_truth, solution_str, extra_info, data_source:
                told(data_source, solution_str, ground_truth, extra_info) * weight, 1.0)

@wraps(with_a_setting)
def wrapped(*args, **kwargs):
    return with_a_setting(*args, **kwargs)

def told(data_source, solution_str, ground_truth, extra_info):
    return float((data_source, solution_str, ground_truth, extra_info) == ("here", "72", ["72"], {"level": 2}))

def by_position_only(data_source, solution_str, ground_truth, extra_info=None, /):
    return 1.0

def without_columns(data_source, solution_str, ground_truth):
    return 1.0

def of_one_more(data_source, solution_str, ground_truth, extra_info, weight):
    return 1.0

# slime calls by position.
async def slime(args, sample):
    return row(sample.prompt, sample.label, sample.metadata)

async def slime_other_names(args, s, *, evaluation=False, **kwargs):
    return row(s.prompt, s.label, s.metadata)

def slime_not_async(a, sample, **kwargs):
    return row(sample.prompt, sample.label, sample.metadata)

def row(prompt, label, metadata):
    assert prompt == "<user>1+1<assistant>", prompt
    assert label == {"target": ["2", "two"]} and metadata == {"level": 2}
    label["target"].clear()  # of no consequence for the next completion
    return 2.0

# TRL, too, calls by keyword.
def trl(prompts, completions, ground_truth, level, log_extra, log_metric, trainer_state=None, **kwargs):
    log_extra("level", level)
    log_metric("mean", 0.5)
    assert prompts == [[{"role": "user", "content": "1+1"}]]
    assert completions == [[{"role": "assistant", "content": "2"}]]
    assert kwargs["label"] == ground_truth == [{"target": ["2", "two"]}]
    return [float(level[0])]

def trl_behind_a_star(*, completions, level):
    return [float(level[0])]

class Reward:
    async def __call__(self, completions, solution, **kwargs):
        return [2.0]

trl_object = Reward()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "theirs.py"
    path.write_text(THEIRS)
    return path


@pytest.mark.parametrize(
    ("name", "solution", "label", "extra", "expected"),
    [
        ("compute_score", "so\n#### 71", "72", {}, (-0.5, False)),
        ("compute_score_later", "72", "72", {}, (1.0, True)),
        ("custom_rm_with_reward_key", "72", "72", {}, (0.5, True)),
        ("reward_columns", "it is 72", "72", {"ground_truth": "71"}, (0.0, False)),
        ("format_reward", "<think>2</think>2", "", {}, (1.0, True)),
        ("math_reward", "5", "5", {"task": "math"}, (1.0, True)),
        ("reward_later", "5", "6", {"prompt": "1+4"}, (0.0, False)),
    ],
)
def test_functions_are_called_as_by_their_trainer(
    file: Path,
    name: str,
    solution: str,
    label: str,
    extra: dict[str, object],
    expected: tuple[float, bool],
) -> None:
    prompt = [{"role": "user", "content": "1+1"}] if name == "format_reward" else "1+1"
    assert (
        parse_reward(
            run_awaitable(
                resolve(f"{file}:{name}")(ScoreItem("here", solution, label, extra, prompt))
            )
        )
        == expected
    )


def test_none_of_trl_leaves_a_completion_unscored(file: Path) -> None:
    with pytest.raises(NotScoredError):
        resolve(f"{file}:math_reward")(ScoreItem("", "5", "5", {"task": "code"}))


@pytest.mark.parametrize(
    "name", ["with_a_setting", "anything", "called", "method", "bound", "wrapped"]
)
def test_verls_functions_are_called_by_keyword(file: Path, name: str) -> None:
    function = resolve(f"{file}:{name}")
    assert run_awaitable(function(ScoreItem("here", "72", ["72"], {"level": 2}))) == 1.0
    assert run_awaitable(function(ScoreItem("there", "72", ["72"], {"level": 2}))) == 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "by_position_only",
            r"\(data_source, solution_str, ground_truth, extra_info\), each by its name",
        ),
        ("without_columns", "each by its name"),
        ("of_one_more", "each by its name"),
        ("three", r"cannot be called with \(args, samples\), as slime does"),
        ("of_a_trainer", "trainer_state"),
    ],
)
def test_functions_that_no_trainer_could_call_are_refused(
    file: Path, name: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        resolve(f"{file}:{name}")


@pytest.mark.parametrize(
    "name",
    ["slime", "slime_other_names", "slime_not_async", "trl", "trl_behind_a_star", "trl_object"],
)
def test_functions_get_the_columns_of_their_row(file: Path, name: str) -> None:
    """A completion's label and columns are its own: the next completion gets them unchanged."""
    prompt, place = [{"role": "user", "content": "1+1"}], "rows.jsonl, line 7"
    item = ScoreItem(
        "", "2", {"target": ["2", "two"]}, {"level": 2}, prompt, "<user>1+1<assistant>", place
    )
    pool = RewardWorkers(f"{file}:{name}", workers=1, timeout_s=5.0)
    scored = pool.score([item] * 3)
    pool.close()
    metrics = {"mean": 0.5} if name == "trl" else {}
    assert scored == [Score(2.0, True, metrics=metrics)] * 3


def test_group_function_returns_one_score_for_each_completion(file: Path) -> None:
    with pytest.raises(
        GroupScoresError, match="a float, not a list of scores for a group of 2 completions"
    ):
        resolve(f"{file}:one_for_all")([ScoreItem("", "", "")] * 2)


def test_functions_of_lazy_modules_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazy_rewards.py").write_text(
        "__all__ = ['accuracy_reward']\n"
        "def __getattr__(name):\n"
        "    if name == 'accuracy_reward':\n"
        "        return lambda completions, solution, **kwargs: [float(completions == solution)]\n"
        "    raise AttributeError(name)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert resolve("lazy_rewards:accuracy_reward")(ScoreItem("", "72", "72")) == 1.0
