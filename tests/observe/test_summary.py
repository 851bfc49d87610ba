"""The figures at the end of a run are those of its rows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megatron_dppo.observe.console import Console
from megatron_dppo.observe.metrics import MetricsLog, print_summary, summarise, write_summary
from tests.observe.made_up import made_up_rows


def test_the_figures_are_those_of_the_rows() -> None:
    summary = summarise(made_up_rows(4))
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.75)
    assert summary["seconds"] == 4 * 2.0 + 3 * 3.0  # three evaluations
    assert summary["seconds_per_step"] == 2.0
    assert summary["kept_prompt_fraction"] == 0.75
    assert summary["kept_token_fraction"] == pytest.approx(0.45)
    assert summary["pack_fill"] == pytest.approx(0.98)
    assert (summary["steps"], summary["generated_tokens"], summary["trained_tokens"]) == (4, 4000, 1600)
    assert (summary["saved_tokens_prompts"], summary["saved_tokens_completions"]) == (800, 2000)
    assert (summary["saved_seconds_prompts"], summary["saved_seconds_completions"]) == (1.0, 3.0)
    assert (summary["effective_sample_size"], summary["variance_inflation"]) == (pytest.approx(0.8), 1.25)
    assert (summary["noise_share_prompts"], summary["noise_share_completions"]) == (0.15, pytest.approx(0.05))
    assert summary["phase_seconds"] == {"rollout": 4.0, "train": 2.0, "other": 2.0, "evaluation": 9.0}


def test_a_step_that_kept_nothing_is_counted_and_said() -> None:
    rows = made_up_rows(4)
    del rows[2]["train/grad_norm"]
    rows[2] |= {"prune/kept_token_fraction": 0.0, "pack/fill": 0.0}
    rows[3]["reward/timeouts"] = 2.0
    summary = summarise(rows)
    assert (summary["no_op_steps"], summary["reward_timeouts"]) == (1, 2)
    assert summary["kept_token_fraction"] == pytest.approx((0.5 + 0.0 + 0.5 + 0.4) / 4)
    assert summary["pack_fill"] == pytest.approx(0.98)  # no pack, no fill
    said = io.StringIO()
    print_summary("nowhere", summary, Console(4, file=said))
    assert "1 step kept nothing" in said.getvalue()
    assert "2 timeouts" in said.getvalue()


def test_what_pruning_saved_and_where_things_lie_is_said(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    for row in made_up_rows(4):
        log.write(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
    log.close()
    (tmp_path / "progress.png").touch()
    summary = write_summary(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    said = io.StringIO()
    print_summary(tmp_path, summary, Console(4, file=said))
    text = said.getvalue()
    assert "25.0% before, 75.0% after (+50.0 points)" in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "75% of the prompts were rolled out; of the tokens of all prompts:" in lines
    # Of 4,800 tokens in the window 4,000 were rolled out; of 3,600 of them with a gradient 1,600 were trained on.
    assert "33% trained on" in lines
    assert "17% not rolled out: about 800 tokens, which saved about 1 s" in lines
    assert "42% rolled out and pruned: 2,000 tokens, which saved about 3 s" in lines
    assert "8% rolled out, with zero advantage: no run trains on those" in lines
    assert "saved about 17% of the tokens to roll out and 63% of those to train on" in text
    assert "weights leave an effective sample size of 80% of what was trained on" in lines
    assert "the gradient's variance, estimated for independent draws: 1.25 times the full batch's" in lines
    assert "its noise: 80% sampling, 15% pruned prompts, 5% pruned completions" in lines
    assert str(tmp_path / "progress.png") in text
    assert "checkpoints" not in text  # there are none


def test_a_run_that_prunes_nothing_says_of_no_saving() -> None:
    """Its zero advantages are not trained on either, and are no saving."""
    off = {"prune/saved_tokens_prompts": 0.0, "prune/saved_tokens_completions": 0.0}
    said = io.StringIO()
    print_summary("nowhere", summarise([row | off for row in made_up_rows(4)]), Console(4, file=said))
    assert "20% rolled out, with zero advantage" in said.getvalue()
    assert "saved" not in said.getvalue() and "pruned:" not in said.getvalue()


def test_of_a_biased_rule_no_variance_is_said_not_even_of_the_steps_that_have_one() -> None:
    rows = made_up_rows(4)
    for row in rows[2:]:
        for name in ("variance_inflation", "noise_share_prompts", "noise_share_completions"):
            del row[f"prune/{name}"]
    rows[1]["prune/discarded_groups"] = 12.0
    summary = summarise(rows)
    assert summary["variance_inflation"] is summary["noise_share_prompts"] is None
    said = io.StringIO()
    print_summary("nowhere", summary, Console(4, file=said))
    assert "no variance is estimated" in said.getvalue()
    assert "sampling" not in said.getvalue()
    assert "12 groups were rolled out and discarded" in said.getvalue()


def test_a_run_without_evaluation_or_pruning_has_no_such_figures() -> None:
    summary = summarise([{"step": 1, "train/loss": 2.0, "perf/step_time": 1.0}])
    assert summary["accuracy_before"] is None
    assert summary["kept_prompt_fraction"] is None
    said = io.StringIO()
    print_summary("nowhere", summary, Console(1, file=said))
    assert "1 step of 1.00 s" in said.getvalue()
