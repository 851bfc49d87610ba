"""The logs of a run, exact and equal after a resume; and its summary."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_dppo.observe.console import Console
from megatron_dppo.observe.metrics import (
    MetricsLog,
    compute_summary,
    print_summary,
    read_metrics,
    write_summary,
)
from tests.observe.made_up import made_up_rows


def _run(folder: Path, steps: range, *, resume_step: int) -> None:
    log = MetricsLog(folder, resume_step)
    for step in steps:
        log.write(
            step,
            {
                "train/loss": math.sqrt(step) / 3,
                "rollout/raw_reward": 0.1 * step,
                "eval/accuracy": 1,
            },
        )
    log.close()


def shown(summary: dict[str, Any], folder: Path | str = "nowhere") -> str:
    said = io.StringIO()
    print_summary(folder, summary, Console(4, file=said))
    return said.getvalue()


def test_floats_keep_their_bits(tmp_path: Path) -> None:
    values = {
        f"x/{i}": float(value)
        for i, value in enumerate(np.random.default_rng(0).normal(size=50) * 1e-7)
    }
    log = MetricsLog(tmp_path, 0)
    log.write(1, values | {"x/numpy": np.float64(1 / 3)})
    log.close()
    assert read_metrics(tmp_path) == [{"step": 1, **values, "x/numpy": 1 / 3}]


def test_resumed_metrics_equal_uninterrupted_ones(tmp_path: Path) -> None:
    _run(tmp_path / "whole", range(1, 7), resume_step=0)
    _run(
        tmp_path / "cut", range(0, 3), resume_step=0
    )  # of another run: a start from nothing drops every row
    _run(
        tmp_path / "cut", range(1, 6), resume_step=0
    )  # the checkpoint is of step 3: two rows too many
    _run(tmp_path / "cut", range(4, 7), resume_step=3)
    whole, cut = (tmp_path / name / "metrics.jsonl" for name in ("whole", "cut"))
    assert cut.read_bytes() == whole.read_bytes()


def test_row_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 4), resume_step=0)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 4, "train/lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    MetricsLog(tmp_path, 3).close()
    assert file.read_bytes() == whole


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    _run(tmp_path, range(1, 6), resume_step=0)
    time.sleep(1.1)  # event files are read in the order of the seconds in their names
    _run(tmp_path, range(4, 7), resume_step=3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = [(event.step, round(event.value, 6)) for event in events.Scalars("train/loss")]
    assert shown == [(step, round(math.sqrt(step) / 3, 6)) for step in range(1, 7)]


def test_names_that_are_no_utf8_are_escaped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.write(1, {"reward/\ud800": 2.0, "eval/source/\udfffé": 3.0})
    log.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "eval/source/\\udfffé": 3.0, "reward/\\ud800": 2.0}
    ]


def test_rewards_name_at_most_50_metrics_of_a_run(tmp_path: Path) -> None:
    """A resume keeps the names of the steps before it. The note is printed once."""
    said: list[str] = []
    for resume_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = MetricsLog(tmp_path, resume_step, loggers=(), log=said.append)
        for step in steps:
            log.write(
                step,
                {"reward/errors": 0.0, "reward/same": 1.0}
                | {f"reward/{step}{n:02}": 1.0 for n in range(30)},
            )
        log.close()
    assert [len(row) for row in read_metrics(tmp_path)] == [33, 22, 3, 3]
    assert (
        len(said) == 2
        and "first reward/219, reward/220, reward/221, reward/222, reward/223. Log" in said[0]
    )


def test_summary_shows_partial_rewards_beside_accuracy() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.0, "eval/reward": 0.0}]
    rows += [{"step": 1, "eval/accuracy": 0.0, "eval/reward": 0.125}]
    assert "(+0.0 points); reward 0.000 before, 0.125 after" in shown(compute_summary(rows))
    rows[1]["eval/reward"] = 0.0
    assert "reward" not in shown(compute_summary(rows))


def test_summary_has_the_figures_of_the_rows() -> None:
    summary = compute_summary(made_up_rows(4))
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert summary["seconds"] == 4 * 2.0 + 3 * 3.0  # three evaluations
    assert summary["seconds_per_step"] == 2.0
    assert summary["kept_prompt_fraction"] == 0.75
    assert summary["kept_token_fraction"] == pytest.approx(0.45)
    assert summary["pack_fill"] == pytest.approx(0.98)
    assert (summary["steps"], summary["generated_tokens"], summary["trained_tokens"]) == (
        4,
        4000,
        1600,
    )
    assert (summary["effective_sample_size"], summary["variance_inflation"]) == (
        pytest.approx(0.8),
        1.25,
    )
    assert summary["phase_seconds"] == {
        "rollout": 4.0,
        "train": 2.0,
        "other": 2.0,
        "evaluation": 9.0,
    }


def test_steps_without_kept_samples_are_counted_and_shown() -> None:
    rows = made_up_rows(4)
    del rows[2]["train/grad_norm"]
    rows[2] |= {"prune/kept_token_fraction": 0.0, "pack/fill": 0.0}
    rows[3]["reward/timeouts"] = 2.0
    summary = compute_summary(rows)
    assert (summary["no_op_steps"], summary["reward_timeouts"]) == (1, 2)
    assert summary["kept_token_fraction"] == pytest.approx((0.5 + 0.0 + 0.5 + 0.4) / 4)
    assert summary["pack_fill"] == pytest.approx(0.98)  # no pack, no fill
    text = shown(summary)
    assert "1 step kept nothing" in text and "2 timeouts" in text


def test_summary_shows_savings_and_files(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for row in made_up_rows(4):
        log.write(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
    log.close()
    (tmp_path / "progress.png").touch()
    summary = write_summary(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    text = shown(summary, tmp_path)
    assert "25.0% before, 75.0% after (+50.0 points)" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "4 steps of 2.00 s; 17 s with evaluations" in lines
    # Of 4,800 tokens in the window 4,000 were rolled out; of 3,600 of them with a gradient 1,600
    # were trained on.
    saved = "pruning saved about 17% of the tokens to roll out and 63% of the tokens to train on"
    assert saved in lines
    assert "1.25 times the gradient's variance, estimated" in lines
    assert f"the rest megatron-dppo report {tmp_path}" in lines
    assert str(tmp_path / "progress.png") in text


def test_summary_has_one_scale_and_at_most_six_lines() -> None:
    rows = made_up_rows(4)
    for row in rows[1:]:
        row |= {"perf/pruning_efficiency": 1.11, "reward/timeouts": 1.0}
        row["prune/discarded_groups"] = 2.0
    del rows[2]["train/grad_norm"]
    text = shown(compute_summary(rows))
    assert "worth 1.11 of a smaller batch (1.25 times the gradient's variance, estimated)" in text
    figures = text.strip().partition("\n\n")[0].splitlines()
    assert len(figures) == 6


def test_summary_of_a_biased_rule_shows_no_variance() -> None:
    rows = made_up_rows(4)
    for row in rows[2:]:
        for name in ("variance_inflation", "noise_share_prompts", "noise_share_completions"):
            del row[f"prune/{name}"]
    rows[1]["prune/discarded_groups"] = 12.0
    summary = compute_summary(rows)
    assert summary["variance_inflation"] is summary["noise_share_prompts"] is None
    text = shown(summary)
    assert "no variance is estimated" in text and "gradient's variance" not in text
    assert "12 groups were rolled out and discarded" in text
