"""A run from Python: ranks are processes of their own, and the calling process receives every
step."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from megatron_dppo.api import RunFailedError, evaluate, load_config, plan_step, step_metadata, train
from megatron_dppo.config import Config, RunConfig
from megatron_dppo.errors import UserError
from megatron_dppo.launch.start import start_ranks
from megatron_dppo.observe.metrics import RowFollower
from megatron_dppo.rl.losses import Tokens
from megatron_dppo.rl.pruning.completion_rules import CompletionCandidates
from megatron_dppo.rl.pruning.prompt_rules import PromptCandidates
from megatron_dppo.rollout.local import LocalEngine
from tests.commands import run_script
from tests.small_runs import small_run, write_run

LAYOUT = {"replicas": 1, "align": 1, "capacity_multiple": 1, "step": 0, "pipeline": 1}


def keep_all(candidates: CompletionCandidates, keep: float) -> NDArray[np.float64]:
    return np.ones_like(candidates.advantage)


@pytest.mark.quick
def test_a_run_with_own_functions_reports_every_step(tmp_path: Path) -> None:
    run_script(train_with_own_functions, tmp_path, log=tmp_path / "log")


def train_with_own_functions(tmp_path: Path) -> None:
    divisor, nothing, told = 3, 0.0, []

    def length(
        data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
    ) -> float:
        return float(len(solution_str) % divisor)

    def objective(tokens: Tokens) -> Tensor:
        return nothing * tokens.ratio * tokens.advantage

    folder, run_dir = write_run(tmp_path), tmp_path / "run"
    config = small_run(folder, run_dir, "run.steps=2")
    own = {"objective": objective, "completion_rule": keep_all, "on_step": told.append}
    run = train(config, reward=length, **own)
    assert run.finished and run.folder == run_dir
    assert told == run.metrics and [row["step"] for row in told] == [0, 1, 2]
    assert 0.0 < told[-1]["rollout/raw_reward"] < 2.0 and told[-1]["reward/errors"] == 0
    assert [row["train/grad_norm"] for row in told[1:]] == [0.0, 0.0]
    assert [row["prune/saved_tokens_completions"] for row in told[1:]] == [0.0, 0.0]
    kept = {
        "reward.function": "reward.py:length",
        "pruning.completions.function": "completion_rule.py:keep_all",
        "loss.objective": "objective.py:objective",
    }
    words = [f"{setting}={run_dir / place}" for setting, place in kept.items()]
    assert train(small_run(folder, run_dir, "run.steps=2", *words)).metrics == told, (
        "the run's folder has its functions"
    )
    found = evaluate(run)
    (scores,) = found.benchmarks.values()
    assert (scores["problems"], scores["avg@k"]["value"]) == (4, told[-1]["eval/accuracy"])
    assert [row["correct"] for row in found.answers].count(True) == 4 * scores["avg@k"]["value"]

    def length(
        data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
    ) -> float:
        return divisor + len(solution_str)

    with pytest.raises(UserError, match="length, given from Python, has changed"):
        train(config, reward=length, **own)
    with pytest.raises(UserError, match=r"pruning\.prompts\.function"):
        train(small_run(folder, run_dir, "pruning.prompts.function=nobodys"))


def test_rules_engines_and_functions_without_source_are_used(tmp_path: Path) -> None:
    run_script(train_without_source, tmp_path, log=tmp_path / "log")
    said = " ".join((tmp_path / "log").read_text().split())
    assert (
        said.count(
            "a resume does not notice changes of functions without source: loss.objective: still"
        )
        == 1
    )


def train_without_source(tmp_path: Path) -> None:
    file, typed = tmp_path / "generated", {"__name__": "typed"}
    exec(
        "def still(tokens): return 0.0 * tokens.ratio * tokens.advantage", typed
    )  # Python keeps no text, as at a prompt

    def all_prompts(candidates: PromptCandidates, keep: float) -> NDArray[np.float64]:
        return np.ones_like(candidates.expected_square)

    def noting(folder: Path, **parts: Any) -> LocalEngine:
        file.touch()
        return LocalEngine(folder, max_batch=64, **parts)

    config = small_run(write_run(tmp_path), tmp_path / "run", "run.steps=1")
    run = train(config, prompt_rule=all_prompts, engine=noting, objective=typed["still"])
    (_, row) = run.metrics
    assert file.exists() and (row["train/grad_norm"], row["prune/kept_prompt_fraction"]) == (
        0.0,
        1.0,
    )


def test_mistakes_are_raised_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"model\.path"):
        train(load_config(model={"path": str(tmp_path)}, run={"dir": str(tmp_path / "run")}))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="RANK"):
        train(Config())


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("reward", 0, "0: is no function"),
        (
            "on_step",
            lambda: None,
            "cannot be called with 1 argument (too many positional arguments)",
        ),
        ("reward", partial(print, Lock()), "cannot be sent to the ranks (TypeError: cannot pickle"),
    ],
)
def test_an_unusable_function_is_named(tmp_path: Path, name: str, given: Any, problem: str) -> None:
    with pytest.raises(UserError) as raised:
        train(load_config(run={"dir": str(tmp_path / "run")}), **{name: given})
    assert raised.value.setting == name and problem in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_failed_run_gives_the_calling_process_its_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The caller is a thread, as in some notebooks."""
    reasons: list[str] = []
    config = load_config(run={"dir": str(tmp_path)})
    with ThreadPoolExecutor() as pool:
        code = pool.submit(
            start_ranks, "tests.launch.jobs:fail_everywhere", config, 2, on_failure=reasons.append
        ).result()
    said = "error: layout.tp = 3\n  problem  is a mistake seen everywhere\n  remedy   Mend it"
    assert (code, reasons) == (2, [said]) and capfd.readouterr().err == f"{said}\n"
    failed = RunFailedError(code, *reasons)
    assert (failed.code, str(failed)) == (2, f"the run ended with exit code 2:\n{said}")
    assert pickle.loads(pickle.dumps(failed)).reason == said
    code = start_ranks("tests.launch.jobs:killed_on_rank_one", config, 2, on_failure=reasons.append)
    assert (
        code == 137
        and reasons[1] == "error: rank 1 was ended by SIGKILL (was the machine out of memory?)"
    )


def test_settings_are_given_section_by_section(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {steps: 3, dir: there}\npruning: {completions: {keep: 0.9}}\n")
    config = load_config(file, run={"dir": tmp_path}, pruning={"completions": {"rule": "top_k"}})
    assert config.run == RunConfig(steps=3, dir=str(tmp_path))
    assert (config.pruning.completions.keep, config.pruning.completions.rule) == (0.9, "top_k")
    for wrong in ({5: "YAML reads a number as this name"}, {"stepz": 3}):
        with pytest.raises(UserError, match="there is no such setting"):
            load_config(run=wrong)


def test_a_step_is_planned_from_rewards_and_lengths() -> None:
    given = {"response_lengths": [[40, 120], [30, 50]], "prompt_lengths": [20, 25]}
    metadata = step_metadata(
        [[1, 0], [1, 1]], **given, prompt_inclusion=np.array([0.5, 1.0]), window=3.0
    )
    plan = plan_step(metadata, load_config(pruning={"completions": {"rule": "none"}}), **LAYOUT)
    samples = plan.minibatches[0]
    assert samples.group.tolist() == [0, 0] and samples.weight.tolist() == [2.0, 2.0]
    with pytest.raises(UserError, match="without window"):
        step_metadata([[1, 0], [1, 1]], **given, prompt_inclusion=[0.5, 1.0])
    with pytest.raises(UserError, match=r"pruning\.completions\.function = nobodys"):
        plan_step(metadata, load_config(pruning={"completions": {"function": "nobodys"}}), **LAYOUT)


def test_a_step_is_planned_with_an_own_rule() -> None:
    metadata = step_metadata(
        [[1, 0, 0, 0]], [[40, 120, 80, 60]], [20], prompt_inclusion=[1.0], window=1
    )
    config = load_config(pruning={"completions": {"keep": 0.3}})
    planned = plan_step(metadata, config, completion_rule=keep_all, **LAYOUT)
    assert planned.minibatches[0].weight.tolist() == [1.0] * 4


def test_rows_are_reported_once_and_whole_by_a_resumed_run(tmp_path: Path) -> None:
    """The run replaces the file with the old rows as it resumes."""
    told: list[dict[str, float]] = []
    file, draft = tmp_path / "metrics.jsonl", tmp_path / "draft"
    file.write_text('{"step": 1, "of": 1}\n')
    follower = RowFollower(tmp_path, told.append)
    follower.read_new_rows()
    draft.write_text('{"step": 1, "of": 2}\n{"step"')
    draft.replace(file)
    follower.read_new_rows()
    assert told == [{"step": 1, "of": 2}]
    file.write_text('{"step": 1, "of": 2}\n{"step": 2, "of": 2}\n')
    follower.read_new_rows()
    assert told == [{"step": 1, "of": 2}, {"step": 2, "of": 2}]
