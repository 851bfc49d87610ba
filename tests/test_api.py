"""A run from Python: the ranks are processes of their own, and the process that calls hears of every step."""

from __future__ import annotations

import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.api import (
    RunFailedError,
    evaluate,
    load_config,
    plan_step,
    step_metadata,
    train,
)
from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    LayoutConfig,
    LossConfig,
    PromptPruningConfig,
    PruningConfig,
    RewardConfig,
    RunConfig,
    replace,
)
from megatron_dppo.errors import UserError
from megatron_dppo.launch.processes import FirstFailure, run_ranks
from megatron_dppo.launch.start import start_ranks
from megatron_dppo.observe.metrics import RowFollower
from megatron_dppo.rl.losses import Tokens
from megatron_dppo.rl.pruning.completion_rules import CompletionCandidates
from megatron_dppo.rl.pruning.prompt_rules import PromptCandidates
from megatron_dppo.rollout.local import LocalEngine
from tests.commands import run_script
from tests.small_runs import configure, write_run


def test_a_run_with_ones_own_functions_tells_of_every_step_and_is_evaluated(tmp_path: Path):
    run_script(train_with_own_functions, tmp_path, log=tmp_path / "log")


def train_with_own_functions(tmp_path: Path):
    divisor, nothing, told = 3, 0.0, []

    def length(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        return float(len(solution_str) % divisor)  # with what it knows of the place that it was made in

    def objective(tokens: Tokens) -> Tensor:
        return nothing * tokens.ratio * tokens.advantage

    def keep_all(candidates: CompletionCandidates, keep: float) -> NDArray[np.float64]:
        return np.ones_like(candidates.advantage)

    config = configure(write_run(tmp_path), tmp_path / "run", LayoutConfig(tp=1, dp=1), steps=2)
    run = train(config, reward=length, objective=objective, completion_rule=keep_all, on_step=told.append)
    assert run.finished and run.folder == tmp_path / "run"
    assert told == run.metrics and [row["step"] for row in told] == [0, 1, 2]
    assert 0.0 < told[-1]["rollout/raw_reward"] < 2.0 and told[-1]["reward/errors"] == 0
    assert [row["train/grad_norm"] for row in told[1:]] == [0.0, 0.0]
    assert "length, of the module tests.test_api" in (tmp_path / "run" / "reward.py").read_text()
    own = replace(config, reward=RewardConfig(function=str(tmp_path / "run" / "reward.py:length")))
    assert [row["prune/saved_tokens_completions"] for row in told[1:]] == [0.0, 0.0]
    kept = {"rule": "neyman", "function": str(tmp_path / "run" / "completion_rule.py:keep_all")}
    own = replace(own, pruning=replace(own.pruning, completions=CompletionPruningConfig(**kept)))
    own = replace(own, loss=LossConfig(objective=str(tmp_path / "run" / "objective.py:objective")))
    assert train(own).metrics == told  # at its end: nothing is trained, and its functions were kept
    found = evaluate(run)
    (scores,) = found.benchmarks.values()
    assert (scores["problems"], scores["avg@k"]["value"]) == (4, told[-1]["eval/accuracy"])
    assert [row["correct"] for row in found.answers].count(True) == 4 * scores["avg@k"]["value"]
    assert all(row["answer"] and row["prompt"] for row in found.answers)
    assert found.folder == tmp_path / "run" / "eval" / "iter_0000002"


def test_every_kind_of_function_can_be_given(tmp_path: Path):
    run_script(train_with_functions, tmp_path, log=tmp_path / "log")
    said = " ".join((tmp_path / "log").read_text().split())
    assert said.count("a resume does not notice changes of functions without source: loss.objective: still") == 1


def train_with_functions(tmp_path: Path):
    worth, heard, file = 0.5, [], tmp_path / "generated"

    def half(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        return worth * len(solution_str)

    typed: dict[str, Any] = {"__name__": "typed"}  # as at a prompt: Python keeps no text of it
    exec("def still(tokens): return 0.0 * tokens.ratio * tokens.advantage", typed)

    def all_prompts(candidates: PromptCandidates, keep: float) -> NDArray[np.float64]:
        return np.ones_like(candidates.expected_square)

    def all_completions(candidates: CompletionCandidates, keep: float) -> NDArray[np.float64]:
        return np.ones_like(candidates.advantage)

    def noting(folder: Path, **parts: Any) -> LocalEngine:
        file.touch()
        return LocalEngine(folder, max_batch=64, **parts)

    config = configure(write_run(tmp_path), tmp_path / "run", LayoutConfig(tp=1, dp=1), steps=1)
    own = {"prompt_rule": all_prompts, "completion_rule": all_completions, "engine": noting, "on_step": heard.append}
    own["objective"] = typed["still"]
    run = train(config, reward=half, **own)
    (_, row) = run.metrics
    assert heard == run.metrics and file.exists()
    assert row["train/grad_norm"] == 0.0 and row["rollout/raw_reward"] > 1.0
    assert row["prune/kept_prompt_fraction"] == 1.0 and row["prune/saved_tokens_completions"] == 0.0

    def half(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        return worth + len(solution_str)

    with pytest.raises(UserError, match="half, given from Python, has changed"):
        train(config, reward=half, **own)
    with pytest.raises(UserError, match=r"pruning\.prompts\.function"):
        train(replace(config, pruning=PruningConfig(prompts=PromptPruningConfig(function="nobodys"))))


def exact(completions: list[str]) -> list[float]:
    """Of a name that is taken."""
    return [0.0 for _ in completions]


def test_what_is_wrong_is_raised_before_a_rank_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"run\.stepz"):
        load_config(run={"stepz": 3})
    with pytest.raises(UserError, match=r"model\.path"):
        train(load_config(model={"path": str(tmp_path)}, run={"dir": str(tmp_path / "run")}))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="RANK"):
        train(Config())
    assert RunFailedError(1).code == 1


@pytest.mark.parametrize(
    ("given", "name", "problem"),
    [
        ({"reward": 5}, "reward", "5: is no function"),
        ({"reward": 0}, "reward", "0: is no function"),
        ({"on_step": lambda: None}, "on_step", "cannot be called with 1 argument (too many positional arguments)"),
        ({"on_step": 3}, "on_step", "3: is no function"),
        ({"reward": partial(print, Lock())}, "reward", "cannot be sent to the ranks (TypeError: cannot pickle"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(tmp_path: Path, given: dict[str, Any], name: str, problem: str):
    with pytest.raises(UserError) as raised:
        train(load_config(run={"dir": str(tmp_path / "run")}), **given)
    assert raised.value.setting == name and problem in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_says_why_to_the_process_that_calls(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """From a thread, as some notebooks run their cells."""
    reasons: list[str] = []
    config = load_config(run={"dir": str(tmp_path)})
    with ThreadPoolExecutor() as pool:
        code = pool.submit(start_ranks, "tests.launch.jobs:fail_everywhere", config, 2, failed=reasons.append).result()
    said = "error: layout.tp = 3\n  problem  is a mistake seen everywhere\n  remedy   Mend it"
    assert (code, reasons) == (2, [said]) and capfd.readouterr().err == f"{said}\n"
    failed = RunFailedError(code, *reasons)
    assert str(failed) == f"the run ended with exit code 2:\n{said}"
    assert pickle.loads(pickle.dumps(failed)).reason == said
    code = start_ranks("tests.launch.jobs:killed_on_rank_one", config, 2, failed=reasons.append)
    assert code == 137 and reasons[1] == "error: rank 1 was ended by SIGKILL (was the machine out of memory?)"


def test_settings_are_given_section_by_section(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("run: {steps: 3, dir: there}\npruning: {completions: {keep: 0.9}}\n")
    config = load_config(file, run={"dir": tmp_path}, pruning={"completions": {"rule": "top_k"}})
    assert config.run == RunConfig(steps=3, dir=str(tmp_path))
    assert (config.pruning.completions.keep, config.pruning.completions.rule) == (0.9, "top_k")
    tasks = {"leg_counting": {"max_animals": 3}}
    config = load_config(data={"reasoning_gym": {"tasks": tasks}, "eval": {"held out": tmp_path / "b.jsonl"}})
    assert config.data.reasoning_gym.tasks == tasks, "a setting may be a mapping itself"
    assert config.data.eval == {"held out": str(tmp_path / "b.jsonl")}
    with pytest.raises(UserError, match="there is no such setting"):
        load_config(run={5: "a name that YAML reads as a number"})


def test_a_step_is_planned_from_rewards_and_lengths_alone():
    given = {"response_lengths": [[40, 120], [30, 50]], "prompt_lengths": [20, 25]}
    metadata = step_metadata([[1, 0], [1, 1]], **given, prompt_inclusion=np.array([0.5, 1.0]), window=3.0)
    plan = plan_step(
        metadata,
        load_config(pruning={"completions": {"rule": "none"}}),
        replicas=1,
        align=1,
        capacity_multiple=1,
        step=0,
        pipeline=1,
    )
    samples = plan.minibatches[0].samples
    assert samples.group.tolist() == [0, 0] and samples.weight.tolist() == [2.0, 2.0]
    with pytest.raises(UserError, match="without window"):
        step_metadata([[1, 0], [1, 1]], **given, prompt_inclusion=[0.5, 1.0])


def test_a_step_is_planned_with_a_rule_that_is_given():
    def all_of_them(candidates: CompletionCandidates, keep: float) -> NDArray[np.float64]:
        return np.ones_like(candidates.advantage)

    metadata = step_metadata([[1, 0, 0, 0]], [[40, 120, 80, 60]], [20], prompt_inclusion=[1.0], window=1)
    of_layout = {"replicas": 1, "align": 1, "capacity_multiple": 1, "step": 0, "pipeline": 1}
    config = load_config(pruning={"completions": {"keep": 0.3}})
    planned = plan_step(metadata, config, completion_rule=all_of_them, **of_layout)
    assert planned.minibatches[0].samples.weight.tolist() == [1.0] * 4
    with pytest.raises(UserError, match=r"pruning\.completions\.function = nobodys"):
        plan_step(metadata, load_config(pruning={"completions": {"function": "nobodys"}}), **of_layout)


def test_ranks_end_with_a_callback_that_fails(tmp_path: Path):
    def fail() -> None:
        raise ZeroDivisionError

    started = time.monotonic()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(ZeroDivisionError):
        run_ranks(sleep, {}, 2, FirstFailure(tmp_path / "failure"), fail)
    assert time.monotonic() - started < 90


def test_rows_of_steps_that_are_taken_again_are_not_told(tmp_path: Path):
    """Until the run replaces the file, which it does as it resumes, the old rows stand there."""
    told: list[dict[str, float]] = []
    file, draft = tmp_path / "metrics.jsonl", tmp_path / "draft"
    file.write_text('{"step": 1, "of": 1}\n{"step": 2, "of": 1}\n')
    follower = RowFollower(tmp_path, told.append)
    follower.look()
    draft.write_text('{"step": 1, "of": 2}\n')
    draft.replace(file)
    follower.look()
    assert told == [{"step": 1, "of": 2}]


def test_rows_are_told_once_and_whole(tmp_path: Path):
    told: list[dict[str, float]] = []
    follower, file = RowFollower(tmp_path, told.append), tmp_path / "metrics.jsonl"
    follower.look()
    for text in ('{"step": 0}\n{"step"', '{"step": 0}\n{"step": 1}\n', '{"step": 0}\n{"step": 1}\n{"step": 2}\n'):
        file.write_text(text)
        follower.look()
    assert [row["step"] for row in told] == [0, 1, 2]
