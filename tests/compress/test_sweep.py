"""A sweep makes and measures what is not there yet, and says which of its policies no other beats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.cli import main
from megatron_dppo.compress import sweep
from megatron_dppo.compress.sweep import mark_frontier, worth
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.estimate.smaller import plan_smaller
from megatron_dppo.report.page import page
from megatron_dppo.report.run import read_runs
from megatron_dppo.settings import load_config

TEXTS = [("1+2=", "3#3"), ("9+8=", "17#17"), ("5+5+5=", "10+5=15#15"), ("4+4=", "8#8")]
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("calibration") / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "response": text}) + "\n" for prompt, text in TEXTS))
    return file


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """What a speed comes to is of no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "NEW_TOKENS", 4)
        yield


@pytest.fixture(scope="module")
def swept(policy: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "out"
    assert main(words(policy, out, calibration, "--keep", "0.75", "--methods", "depth", "width:magnitude")) == 0
    return out


def words(policy: Path, out: Path, calibration: Path, *more: str) -> list[str]:
    command = ["compress", "sweep", str(policy), str(out), "--calibrate", str(calibration)]
    return [*command, "--sequences", "2", "--multiple", "8", *more]


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def test_what_is_there_is_not_made_again(swept: Path, policy: Path, calibration: Path, tmp_path: Path) -> None:
    before = record(swept)
    assert [row["name"] for row in before["rows"]] == ["depth-shapley-loss-0.75", "width-magnitude-0.75"]
    for row in before["rows"]:
        made = json.loads((swept / row["name"] / "policy" / "compress.json").read_text())
        assert (row["weights"], row["loss_after"]) == (made["weights_after"], made["loss_after"])
        assert row["tokens_per_second_ratio"] > 0
    out = shutil.copytree(swept, tmp_path / "out")
    assert main(words(policy, out, calibration, "--keep", "0.75", "0.5", "--methods", "depth")) == 0
    after = record(out)
    assert [row["name"] for row in after["rows"]] == [*(r["name"] for r in before["rows"]), "depth-shapley-loss-0.5"]
    for old, new in zip(before["rows"], after["rows"], strict=False):  # a speed is never measured twice the same
        assert {**old, "frontier": None} == {**new, "frontier": None}


def test_other_sequences_are_another_sweep(
    swept: Path, policy: Path, calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (swept / "sweep.json").read_bytes()
    assert main(words(policy, swept, calibration, "--keep", "0.5", "--seed", "2")) == 2
    assert "another seed" in " ".join(capsys.readouterr().err.split())
    assert main(words(policy, swept, calibration, "--keep", "0.5", "0.001")) == 2
    assert "--keep = 0.001" in capsys.readouterr().err
    assert (swept / "sweep.json").read_bytes() == before


def test_the_least_budget_that_is_enough_recovers(swept: Path, policy: Path, calibration: Path, tmp_path: Path) -> None:
    """As after a kill: some answers are there, and are not asked for again. A larger budget is not needed."""
    out = shutil.copytree(swept, tmp_path / "out")
    folder = out / "depth-shapley-loss-0.75"
    for place, accuracy in ((out / "whole" / "eval", 0.8), (folder / "sft-1-eval", 0.5), (folder / "sft-3-eval", 0.77)):
        place.mkdir(parents=True)
        (place / "scores.json").write_text(json.dumps({"benchmarks": {"sums": {"avg@k": {"value": accuracy}}}}))
    done, log = shutil.copytree(folder / "policy", folder / "sft-1"), folder / "sft-1-run" / "sft-log"
    log.mkdir(parents=True)
    (log / "metrics.jsonl").write_text('{"train/tokens": 100.0}\n')
    small = "layout.tp=1", "eval.problems=2", "rollout.max_response_tokens=8", "sft.batch=4", "sft.warmup_steps=1"
    budgets = ["--recover", "4", "3", "1", "--config", str(CONFIG), *small, "data.arithmetic.problems=16"]
    assert main(words(policy, out, calibration, "--keep", "0.75", "--methods", "depth", *budgets)) == 0
    row, other = record(out)["rows"]
    assert [(point["steps"], point["accuracy"]) for point in row["recovered"]] == [(1, 0.5), (3, 0.77)]
    logged = (folder / "sft-3-run" / "sft-log" / "metrics.jsonl").read_text().splitlines()
    assert row["recovery_tokens"] == sum(json.loads(line)["train/tokens"] for line in logged) > 0
    assert row["accuracy"] == 0.0 and worth(row) == 0.77
    assert row["frontier"] and not other["frontier"]  # of which no accuracy is known
    before, after = (path.joinpath("model.safetensors").read_bytes() for path in (done, folder / "sft-3"))
    assert before != after
    shown = page(read_runs([out]))
    assert "Reward and accuracy" not in shown and "No budget was enough" not in shown
    assert "Smaller policies" in shown and "77.0%" in shown and f">{row['recovery_tokens']:,.0f}<" in shown


def test_on_the_frontier_is_what_no_other_beats() -> None:
    sizes = {"large": (100, 0.9), "small": (50, 0.7), "worse": (50, 0.6), "larger": (60, 0.7), "twin": (50, 0.7)}
    rows = [{"name": name, "weights": weights, "accuracy": accuracy} for name, (weights, accuracy) in sizes.items()]
    mark_frontier(rows)
    assert [row["name"] for row in rows if row["frontier"]] == ["large", "small", "twin"]


def test_a_plan_says_of_a_smaller_policy_what_it_says_of_its_directory(swept: Path, policy: Path) -> None:
    whole, smaller = (
        load_config(str(CONFIG), [f"model.path={path}"])
        for path in (policy, swept / "depth-shapley-loss-0.75" / "policy")
    )
    planned, known = plan_smaller(make_plan(whole, Assumptions()), 0.75, "depth"), make_plan(smaller, Assumptions())
    assert (planned.pruned, planned.actor, planned.server) == (known.pruned, known.actor, known.server)
    assert planned.parameters.total < make_plan(whole, Assumptions()).parameters.total
