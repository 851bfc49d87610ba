"""Several reward functions are one reward: their weighted sum, and each one's own scores as a metric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import check_columns, check_labels
from megatron_dppo.rewards.workers import RewardWorkers, Scored
from megatron_dppo.rl.types import Score
from megatron_dppo.settings import load_config

THEIRS = '''
def brevity(completions, **columns):
    """TRL's form."""
    return [-float(len(completion)) for completion in completions]

def code_only(completions, task, log_metric, **columns):
    if task[0] != "code":
        return [None]
    log_metric("lines", 1)
    log_metric("lines", 2)
    log_metric("no_number", float("nan"))
    return [10.0]

async def judge(completions, log_metric, **columns):
    log_metric("asked", 1.0)
    return [4.0]

def group_rm(args, samples):
    """slime's form: the shortest of the group is worth 1."""
    shortest = min(len(sample.response) for sample in samples)
    return [float(len(sample.response) == shortest) for sample in samples]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form, with further numbers."""
    return {"score": 0.5, "acc": True, "pred": "it", "format": True, "depth": 3, "note": "well", "odd": float("inf"),
            "roles": {"solver": 2.0}}

def text(data_source, solution_str, ground_truth, extra_info=None):
    return "0.5"
'''


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    yield path


def configured(*parts: str) -> Config:
    return load_config(None, [f"reward.function=[{', '.join(f'{{{part}}}' for part in parts)}]"])


def scored(config: Config, *items: ScoreItem) -> Scored:
    with closing(RewardWorkers.of(config.reward)) as pool:
        scoring = pool.begin(most_failures=99)
        scoring.add(items)
        return scoring.finish()


def said(solution: str, **extra: object) -> ScoreItem:
    return ScoreItem("here", solution, "7", extra, place="row 3")


def test_the_weighted_sum_is_the_reward_and_the_first_function_judges(file: Path) -> None:
    config = configured("function: exact, weight: 2", f"function: {file}:brevity, weight: 0.1, name: short")
    assert scored(config, said("7"), said("it is 8")).scores == [
        Score(2 * 1.0 + 0.1 * -1.0, True, metrics={"exact": 1.0, "short": -1.0}),
        Score(0.1 * -7.0, False, metrics={"exact": 0.0, "short": -7.0}),
    ]


def test_a_function_of_weight_zero_is_a_metric_alone(file: Path) -> None:
    config = configured("function: exact", f"function: {file}:brevity, weight: 0")
    assert scored(config, said("77")).scores == [Score(0.0, False, metrics={"exact": 0.0, "brevity": -2.0})]


def test_a_function_that_returns_none_has_no_share_in_the_sum(file: Path) -> None:
    """TRL sums without the None of a function that a completion is not for."""
    config = configured(f"function: {file}:code_only, weight: 3", "function: exact")
    found = scored(config, said("7", task="math"), said("8", task="code"))
    assert found.scores == [
        Score(1.0, True, metrics={"exact": 1.0}),
        Score(30.0, True, metrics={"code_only": 10.0, "exact": 0.0, "lines": 1.5}),
    ]
    alone = scored(configured(f"function: {file}:code_only"), said("7", task="math"))
    assert alone.scores == [None] and "none of them scores this completion" in alone.tracebacks[0]


@pytest.mark.parametrize("others", [["judge"], ["group_rm"], ["judge", "group_rm"]])
def test_functions_of_all_forms_are_summed_together(file: Path, others: list[str]) -> None:
    parts = [f"function: {file}:{name}" for name in others]
    found = scored(configured("function: exact", *parts), said("7"), said("it is 8"))
    values = {"judge": (4.0, 4.0), "group_rm": (1.0, 0.0), "exact": (1.0, 0.0)}
    for place, score in enumerate(found.scores):
        own = {name: values[name][place] for name in ("exact", *others)}
        logged = {"asked": 1.0} if "judge" in others else {}
        assert score == Score(sum(own.values()), place == 0, metrics={**own, **logged}), found.tracebacks


def test_further_numbers_of_verls_dictionary_are_metrics_and_its_verdict_is_kept(file: Path) -> None:
    spec, numbers = f"function: {file}:compute_score", {"format": 1.0, "depth": 3.0}
    alone = load_config(None, [f"reward.function={file}:compute_score"])
    assert scored(alone, said("")).scores == [Score(0.5, True, "it", (), {"solver": 2.0}, numbers)]
    config = configured(f"{spec}, weight: 2", "function: exact, weight: 3")
    metrics = {**numbers, "compute_score": 0.5, "exact": 1.0}
    assert scored(config, said("7")).scores == [Score(4.0, True, "it", (), {"solver": 7.0}, metrics)]


def test_metrics_that_trls_functions_log_come_with_the_score(file: Path) -> None:
    for name, reward, metrics in (("code_only", 10.0, {"lines": 1.5}), ("judge", 4.0, {"asked": 1.0})):
        config = load_config(None, [f"reward.function={file}:{name}"])
        assert scored(config, said("7", task="code")).scores == [Score(reward, True, metrics=metrics)]


def test_the_function_that_returns_no_number_is_named(file: Path) -> None:
    found = scored(configured("function: exact", f"function: {file}:text"), said("7"))
    assert found.scores == [None] and found.errors == 1
    assert f"a str for a score ({file}:text): '0.5'" in found.tracebacks[0]


def test_a_sum_past_the_largest_reward_is_a_failure(file: Path) -> None:
    found = scored(configured("function: exact, weight: 1e9", f"function: {file}:judge, weight: 1e9"), said("7"))
    assert found.scores == [None] and "a score beyond" in found.tracebacks[0]


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([], "is empty"),
        (["function: exact", "function: a.py:exact"], "names exact more than once"),
        (["function: a.py:errors"], "names a metric errors, which counts failures"),
        (["function: exact, wieght: 2"], "wieght: extra inputs are not permitted"),
        (["function: exact, weight: inf"], "weight: should be a finite number"),
    ],
)
def test_a_list_of_functions_that_cannot_be_told_apart_is_refused(parts: list[str], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        configured(*parts)
    assert refused.value.setting == "reward.function" and problem in refused.value.problem


def test_labels_and_columns_are_checked_for_each_function(file: Path) -> None:
    config = configured(f"function: {file}:code_only", "function: exact")
    with pytest.raises(UserError, match="row 1 has an empty one"):
        check_labels(config.reward.spec, [("row 0", "7"), ("row 1", " ")])
    with pytest.raises(UserError, match="the column 'task', which row 1 does not have"):
        check_columns(config.reward.spec, [("row 0", {"task": "code"}), ("row 1", {"label": "7"})])
