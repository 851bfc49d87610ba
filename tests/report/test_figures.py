"""What the page says in numbers is right: costs, intervals, races, and what thinning leaves of a
line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.special import stdtrit

from megatron_dppo.observe.timers import format_duration
from megatron_dppo.report.charts import format_number, reduce_points
from megatron_dppo.report.learning import compute_wilson_interval, make_learning_section
from megatron_dppo.report.page import render_page
from megatron_dppo.report.parts import Charts
from megatron_dppo.report.run import RunRecord, read_runs
from megatron_dppo.report.timing import (
    SpeedComparison,
    count_device_hours,
    make_comparison,
    make_cost_section,
)
from megatron_dppo.rl.intervals import compute_student_t
from tests.report.made_up import drawn_on_axes, write_lines, write_run

ROLLOUT_S, TRAIN_S, FIXED_S = 3e-4, 7e-4, 0.25
"""Of a machine whose seconds go with tokens."""


def one_step(folder: Path, *, prompts: float, completions: float, **held: float) -> RunRecord:
    """A step of such a machine. Of 1,000 tokens in the window this share is rolled out; of those a
    fifth has zero advantage, and of the rest this share is trained on."""
    rolled_out = 1000.0 * prompts
    trained = 0.8 * rolled_out * completions
    row = {
        "step": 1,
        "train/tokens": trained,
        "prune/saved_tokens_prompts": 1000.0 - rolled_out,
        "prune/saved_tokens_completions": 0.8 * rolled_out - trained,
        "prune/zero_advantage_tokens": 0.2 * rolled_out,
        "perf/rollout_time": ROLLOUT_S * rolled_out,
        "perf/actor_train_time": TRAIN_S * trained,
        "perf/step_time": FIXED_S + ROLLOUT_S * rolled_out + TRAIN_S * trained,
        **held,
    }
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", [row])
    return read_runs([folder])[0]


def test_saved_hours_equal_the_extra_hours_without_pruning(tmp_path: Path) -> None:
    def hours(name: str, prompts: float, completions: float) -> float:
        return count_device_hours(
            one_step(tmp_path / name, prompts=prompts, completions=completions)
        ).hours

    found = count_device_hours(one_step(tmp_path / "pruned", prompts=0.7, completions=0.5))
    assert found.hours + found.both == pytest.approx(hours("neither", 1.0, 1.0))
    assert found.hours + found.by_prompts == pytest.approx(hours("prompts", 1.0, 0.5))
    assert found.hours + found.by_completions == pytest.approx(hours("completions", 0.7, 1.0))
    assert found.both > found.by_prompts + found.by_completions


def test_hours_saved_at_equal_noise_are_those_beyond_a_smaller_batch(tmp_path: Path) -> None:
    pruning = {"prompts": 0.7, "completions": 0.5}
    full = count_device_hours(one_step(tmp_path / "full", prompts=1.0, completions=1.0)).hours
    plain = count_device_hours(one_step(tmp_path / "plain", **pruning))
    assert (plain.at_equal_noise, plain.share_at_equal_noise) == (None, None)  # a biased rule
    inflation = 1.2
    run = one_step(tmp_path / "run", **pruning, **{"prune/variance_inflation": inflation})
    found = count_device_hours(run)
    assert found.hours + found.at_equal_noise == pytest.approx(full / inflation)
    assert found.share_at_equal_noise == pytest.approx(1 - found.hours / (full / inflation))
    twice = replace(run, rows=[*run.rows, one_step(tmp_path / "other", **pruning).rows[0]])
    assert count_device_hours(twice).at_equal_noise is None
    assert count_device_hours(twice).hours == pytest.approx(2 * found.hours)


def test_hours_count_every_device(tmp_path: Path) -> None:
    run = read_runs([write_run(tmp_path / "run", 6, held={"perf/ranks": 8, "perf/gpus": 8})])[0]
    assert count_device_hours(run).hours == pytest.approx(8 * (6 * 2.0 + 4 * 3.0) / 3600)
    assert count_device_hours(run).devices == "8 GPUs"
    with_servers = replace(run, config={**run.config, **SERVERS})
    assert count_device_hours(with_servers).devices == "11 GPUs, 3 of them for servers"
    assert count_device_hours(with_servers).hours == pytest.approx(
        11 / 8 * count_device_hours(run).hours
    )
    on_cpu = read_runs([write_run(tmp_path / "cpu", 6, held={"perf/ranks": 2, "perf/gpus": 0})])[0]
    assert (count_device_hours(on_cpu).devices, count_device_hours(on_cpu).unit) == (
        "2 processes",
        "process-h",
    )


@pytest.mark.parametrize("given", [["http://a:30000", "http://b:30000"], "slurm"])
def test_externally_managed_servers_are_not_counted(tmp_path: Path, given: object) -> None:
    run = read_runs([write_run(tmp_path / "run", 6, held={"perf/ranks": 8, "perf/gpus": 8})])[0]
    own = {"rollout.engine": "sglang", "rollout.servers": given, "cluster.server_nodes": 2}
    with_servers = replace(run, config={**run.config, **own})
    assert count_device_hours(with_servers).devices == "8 GPUs, servers not counted"
    assert count_device_hours(with_servers).hours == count_device_hours(run).hours


SERVERS = {"rollout.engine": "sglang", "rollout.launch.count": 2, "rollout.launch.tp": [1, 2]}


def test_changed_number_of_ranks_is_counted_row_by_row(tmp_path: Path) -> None:
    run = one_step(tmp_path / "run", prompts=1.0, completions=1.0, **{"perf/ranks": 2})
    second = dict(run.rows[0]) | {"step": 2, "perf/ranks": 4}
    twice = replace(run, rows=[*run.rows, second])
    assert count_device_hours(twice).hours == pytest.approx(3 * count_device_hours(run).hours)


def test_price_of_the_command_line_comes_first(tmp_path: Path) -> None:
    run = read_runs([write_run(tmp_path / "run", 60, held={"perf/ranks": 1, "perf/gpus": 1})])[0]
    run, hours = (
        replace(run, config={**run.config, "cluster.price_per_gpu_hour": 3.0}),
        count_device_hours(run).hours,
    )
    for price, wanted in ((None, 3.0), (10.0, 10.0)):
        rows = {row[0]: row[1] for row in make_cost_section([run], price).parts[0].rows}
        assert rows["money spent"] == f"{hours * wanted:.2f}"


def test_race_ends_at_the_accuracy_of_the_slowest(tmp_path: Path) -> None:
    def run(name: str, seconds: float, accuracy: list[float]) -> Path:
        (tmp_path / name).mkdir()
        rows = [
            {"step": step, "eval/accuracy": share, **({"perf/step_time": seconds} if step else {})}
            for step, share in enumerate(accuracy)
        ]
        write_lines(tmp_path / name / "metrics.jsonl", rows)
        (tmp_path / name / "config.yaml").write_text("data: {train: arithmetic}")
        return tmp_path / name

    outcome = make_comparison(
        read_runs([run("fast", 1.0, [0.1, 0.3, 0.6, 0.9]), run("slow", 3.0, [0.1, 0.6, 0.5, 0.4])])
    )
    assert outcome is not None
    assert (outcome.target, dict(outcome.reached)) == (0.6, {"fast": 2.0, "slow": 3.0})
    assert "slow 3.00 s, 1.50 times as long" in outcome.describe()
    stuck = make_comparison(read_runs([tmp_path / "fast", run("stuck", 1.0, [0.05, 0.0, 0.0])]))
    assert stuck is not None and stuck.target is None
    assert make_comparison(read_runs([tmp_path / "fast"])) is None


def test_accuracy_that_chance_explains_has_no_time(tmp_path: Path) -> None:
    """Of 40 problems, none was right before training: up to 8.8% may have been."""
    runs = []
    for name, accuracy in (("a", [0.0, 0.05, 0.0]), ("b", [0.0, 0.05, 0.1])):
        run = read_runs([write_run(tmp_path / name, 3, problems={"": 40})])[0]
        rows = [
            {"step": step, "eval/accuracy": share, **({"perf/step_time": 1.0} if step else {})}
            for step, share in enumerate(accuracy)
        ]
        runs.append(replace(run, rows=rows))
    outcome = make_comparison(runs)
    assert outcome is not None and outcome.target is None and outcome.by_chance == 0.05
    assert "Every run reached 5.0%, which is within the 95% interval" in outcome.describe()
    runs[0].rows[1]["eval/accuracy"] = 0.1
    outcome = make_comparison(runs)
    assert outcome is not None and outcome.target == 0.1 and outcome.by_chance is None


def test_estimated_savings_stand_beside_a_slower_measured_step(tmp_path: Path) -> None:
    """Within the same figure, so that the signs do not contradict each other without a word."""
    runs = read_runs([write_run(tmp_path / name, 6) for name in ("pruned", "whole")])
    unpruned = {"pruning.prompts.rule": "none", "pruning.completions.rule": "none"}
    rows = [row | {"perf/step_time": row["perf/step_time"] / 2} for row in runs[1].steps]
    faster = replace(runs[1], config={**runs[1].config, **unpruned}, rows=rows)
    text = "steps of whole without pruning were faster"
    assert text in render_page([runs[0], faster])
    slower = replace(faster, rows=runs[1].rows)
    assert text not in render_page([runs[0], slower])


def test_seeds_of_one_configuration_give_an_interval(tmp_path: Path) -> None:
    def runs(arm: str, seconds: Sequence[float]) -> list[Path]:
        folders = [tmp_path / f"{arm}-{seed}" for seed in range(len(seconds))]
        for seed, (folder, of_step) in enumerate(zip(folders, seconds, strict=True)):
            folder.mkdir()
            shares = [
                {"step": 0, "eval/accuracy": 0.1},
                {"step": 1, "eval/accuracy": 0.6, "perf/step_time": of_step},
            ]
            write_lines(folder / "metrics.jsonl", shares)
            (folder / "config.yaml").write_text(f"run: {{seed: {seed}}}\nloss: {{name: {arm}}}")
        return folders

    first, second, single = (
        runs("grpo", [1.0, 2.0, 4.0]),
        runs("gspo", [2.0, 4.4, 7.2]),
        runs("dapo", [2.0]),
    )
    found = read_runs([*first, *second])
    outcome = make_comparison(found)
    assert outcome is not None and [arm.name for arm in outcome.arms] == [
        "grpo-0 (3 seeds)",
        "gspo-0 (3 seeds)",
    ]
    # Student's interval of the logarithms of 2, 2.2 and 1.8, seed by seed: the seeds' own spread
    # does not count.
    assert "1.99 times as long [1.55, 2.56]" in outcome.describe()
    assert "[1.55, 2.56]</b>" in render_page(found)
    mixed = make_comparison(read_runs([*first, *second, *single]))
    assert mixed is not None and mixed.describe().count(" times as long [") == 2


def against_another(
    folder: Path, problems: Mapping[str, int] | None = None, **own: object
) -> SpeedComparison:
    """A race of a run against one with settings of its own; the page says the same."""
    runs = read_runs([write_run(folder / "a", 6), write_run(folder / "b", 6, problems=problems)])
    other = replace(runs[1], config={**runs[1].config, **own})
    outcome = make_comparison([runs[0], other])
    assert outcome is not None
    assert ("are not compared" in render_page([runs[0], other])) == bool(outcome.differs)
    return outcome


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train", "reasoning_gym"), ("data.eval", "held_out.jsonl"),
        ("data.arithmetic.max_operand", 9),
        ("data.arithmetic.seed", 1), ("data.reasoning_gym.tasks", {"gcd": {}}), ("eval.benchmarks",
        ["aime24"]),
        ("eval.samples", 8), ("reward.function", "exact"),
    ],
)  # fmt: skip
def test_different_evaluations_are_not_raced(tmp_path: Path, key: str, value: object) -> None:
    outcome = against_another(tmp_path, **{key: value})
    assert outcome.target is None and not outcome.reached
    assert (
        f"The runs were tested on different problems, or in different ways ({key})"
        in outcome.describe()
    )
    assert "b 2.00 s, 1.00 times as long" in outcome.describe()


def test_different_numbers_of_problems_are_not_raced(tmp_path: Path) -> None:
    assert against_another(tmp_path / "more", problems={"": 100}).differs == ["how many they are"]
    untold = against_another(tmp_path / "untold", problems={}, **{"eval.problems": 100})
    assert untold.differs == ["eval.problems"]


@pytest.mark.parametrize(
    "key", ["run.seed", "data.arithmetic.problems", "data.arithmetic.short_answers"]
)
def test_runs_with_different_training_are_raced(tmp_path: Path, key: str) -> None:
    assert against_another(tmp_path, **{key: 1}).target == 0.75


def test_runs_without_evaluation_are_compared_by_step(tmp_path: Path) -> None:
    runs = [one_step(tmp_path / name, prompts=1.0, completions=1.0) for name in ("a", "b")]
    outcome = make_comparison(runs)
    assert outcome is not None and outcome.target is None
    assert "a step: a 1.11 s; b 1.11 s, 1.00 times as long. In brackets" in outcome.describe()


def test_run_without_recorded_settings_is_not_raced(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, 6) for name in ("a", "b")]
    (runs[1] / "config.yaml").unlink()
    outcome = make_comparison(read_runs(runs))
    assert outcome is not None and outcome.target is None
    assert "not every run's settings are recorded" in outcome.describe()


@pytest.mark.parametrize("freedom", [1, 2, 5, 30, 1000])
def test_student_t_equals_scipy(freedom: int) -> None:
    assert compute_student_t(freedom) == pytest.approx(stdtrit(freedom, 0.975), rel=1e-6)


def test_wilson_interval_stays_within_0_and_1() -> None:
    """An interval of Student's kind has no width there."""
    assert compute_wilson_interval(0.0, 30) == (0.0, pytest.approx(0.1135, abs=1e-4))
    assert compute_wilson_interval(1.0, 30) == (pytest.approx(0.8865, abs=1e-4), 1.0)


def test_each_axis_places_the_same_values_elsewhere(tmp_path: Path) -> None:
    run = read_runs([write_run(tmp_path / "run", 6)])[0]
    parts = [part for part in make_learning_section([run]).parts if isinstance(part, Charts)]
    lines = {part.axis: drawn_on_axes(part.charts[1]).lines[-1] for part in parts}
    assert len({tuple(line.get_ydata()) for line in lines.values()}) == 1
    assert {axis: list(line.get_xdata()) for axis, line in lines.items()} == {
        "steps": [0, 2, 4, 6],
        "tokens generated": [0, 2000, 4000, 6000],
        "tokens trained on": [0, 800, 1600, 2400],
        "time": [0, 4, 8, 12],
    }


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(1, 50))
def test_thinning_keeps_the_mean_and_the_extremes(values: list[float], most: int) -> None:
    y = np.array(values)
    x, mean, least, greatest = reduce_points(np.arange(float(len(y))), y, most)
    assert min(len(y), most // 2) <= len(x) <= most
    assert least.min() == y.min() and greatest.max() == y.max()
    assert (least <= mean + 1e-6).all() and (mean <= greatest + 1e-6).all()
    assert (np.diff(x) > 0).all()
    if len(y) % len(x) == 0:
        assert mean.mean() == pytest.approx(y.mean(), abs=1e-6)


def test_numbers_and_times_are_short() -> None:
    assert [format_duration(s) for s in (0.0, 4e-5, 42.4, 18_720)] == [
        "0 s",
        "<0.001 s",
        "42 s",
        "5 h 12 min",
    ]
    assert [format_number(v, "number") for v in (None, 3.3e-7, 1234.5)] == [
        "–",
        "3.3e−7",
        "1,234.5",
    ]


def test_scores_are_found_in_any_subfolder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "eval" / "hf").mkdir(parents=True)
    (run / "eval" / "hf" / "scores.json").write_text(json.dumps({"benchmarks": {}}))
    assert [place for place, _ in read_runs([run])[0].scores] == ["eval/hf"]
    assert read_runs([run / "eval" / "hf"])[0].rows == []
