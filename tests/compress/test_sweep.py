"""A sweep makes and measures what is not there yet, and says which of its policies no other beats."""

from __future__ import annotations

import json
import os
import shutil
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dppo.cli import main
from megatron_dppo.compress import sweep
from megatron_dppo.compress.cut import plan_smaller, smaller_text
from megatron_dppo.compress.sweep import mark_frontier, worth
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.report.page import page
from megatron_dppo.report.run import read_runs
from megatron_dppo.settings import load_config
from tests.commands import run_command
from tests.policies import write_policy

TEXTS = [("1+2=", "3#3"), ("9+8=", "17#17"), ("5+5+5=", "10+5=15#15"), ("4+4=", "8#8")]
CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of this module alone, whose tests write it again."""
    return write_policy(tmp_path_factory.mktemp("policy") / "policy")


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
    assert main(words(policy, out, calibration, "--keep", "0.75", "--methods", "depth", "width:magnitude:refit")) == 0
    return out


def words(policy: Path, out: Path, calibration: Path, *more: str) -> list[str]:
    command = ["compress", "sweep", str(policy), str(out), "--calibrate", str(calibration)]
    return [*command, "--sequences", "2", "--multiple", "8", *more]


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def test_what_is_there_is_not_made_again(swept: Path, policy: Path, calibration: Path, tmp_path: Path) -> None:
    before = record(swept)
    assert [row["name"] for row in before["rows"]] == ["depth-shapley-loss-0.75", "width-magnitude-0.75-refit"]
    for row in before["rows"]:
        made = json.loads((swept / row["name"] / "policy" / "compress.json").read_text())
        assert (row["weights"], row["loss_after"]) == (made["weights_after"], made["loss_after"])
        assert row["refit"] == ("refitted" in made)
        assert row.get("loss_without_refit") == made.get("loss_without_refit")
        assert row["tokens_per_second_ratio"] > 0
    out = shutil.copytree(swept, tmp_path / "out")
    sums = out / "depth-shapley-loss-0.75" / ".policy.scoring"
    sums.mkdir()  # of a command that was killed when its policy was there
    assert main(words(policy, out, calibration, "--keep", "0.75", "0.5", "--methods", "depth")) == 0
    assert not sums.exists()
    after = record(out)
    assert [row["name"] for row in after["rows"]] == [*(r["name"] for r in before["rows"]), "depth-shapley-loss-0.5"]
    for old, new in zip(before["rows"], after["rows"], strict=False):  # a speed is never measured twice the same
        assert {**old, "frontier": None} == {**new, "frontier": None}


def test_a_sweep_in_shards_is_the_same_but_for_speeds(
    swept: Path, policy: Path, calibration: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = words(policy, tmp_path / "out", calibration, "--keep", "0.75", "--methods", "depth")
    assert main([*command, "--layout", "dp=1"]) == 0
    assert "speed –: it takes the whole policy in one process" in capfd.readouterr().out
    (row,), (expected, _) = record(tmp_path / "out")["rows"], record(swept)["rows"]
    assert (row["name"], row["weights"]) == (expected["name"], expected["weights"])
    for loss in ("loss_before", "loss_after"):
        assert row[loss] == pytest.approx(expected[loss], rel=1e-5)
    assert "tokens_per_second" not in row
    made = (tmp_path / "out" / row["name"] / "policy" / "compress.json").stat().st_mtime_ns
    assert main(command) == 0  # what is missing is measured, and nothing is made again
    (row,) = record(tmp_path / "out")["rows"]
    assert row["tokens_per_second"] > 0
    assert (tmp_path / "out" / row["name"] / "policy" / "compress.json").stat().st_mtime_ns == made


def test_other_sequences_are_another_sweep(
    swept: Path, policy: Path, calibration: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (swept / "sweep.json").read_bytes()
    assert main(words(policy, swept, calibration, "--keep", "0.5", "--seed", "2")) == 2
    assert "another seed" in " ".join(capsys.readouterr().err.split())
    assert main(words(policy, swept, calibration, "--keep", "0.5", "0.001")) == 2
    assert "--keep = 0.001" in capsys.readouterr().err
    assert (swept / "sweep.json").read_bytes() == before


@pytest.mark.parametrize("which", ["calibrate", "MODEL"])
def test_a_file_that_was_written_again_is_another_sweep(
    swept: Path, policy: Path, calibration: Path, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    """By its content, whatever its size and time say."""
    file = calibration if which == "calibrate" else policy / "model.safetensors"
    old, stat, before = file.read_bytes(), file.stat(), (swept / "sweep.json").read_bytes()
    try:
        file.write_bytes(old.replace(b"17#17", b"18#18") if which == "calibrate" else old[:-1] + bytes([old[-1] ^ 1]))
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert main(words(policy, swept, calibration, "--keep", "0.75", "--methods", "depth")) == 2
    finally:
        file.write_bytes(old)
    assert f"another content of {'--calibrate' if which == 'calibrate' else 'MODEL'}," in said(capsys)
    assert (swept / "sweep.json").read_bytes() == before


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("methods", "keep", "remedy"),
    [
        ("width:foo", "0.75", "Give one of activation"),
        ("2ssp", "0.6", "or --methods width or depth"),
        ("zig", "0.75", "Give of 2ssp"),
        ("depth:in-a-row", "0.75", "Give another --methods, or leave --layout out"),
        ("depth::refit", "0.75", "Leave :refit out with --layout"),
        ("depth:greedy:redone", "0.75", "Leave out what is behind METHOD:SCORE"),
        ("depth:shapley-reward", "0.75", "Give --config, the configuration of a run"),
    ],
)
def test_a_sweep_s_errors_name_its_own_options(
    policy: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    methods: str, keep: str, remedy: str,
) -> None:  # fmt: skip
    command = words(policy, tmp_path / "out", calibration, "--keep", keep, "--methods", methods)
    assert main([*command, "--layout", "tp=2"]) == 2
    text = said(capsys)
    assert f"error: --methods = {methods}" in text and remedy in text
    assert "--method " not in text and "--score" not in text and not (tmp_path / "out").exists()


def test_subnetworks_without_a_shapley_value_are_refused(
    policy: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(policy, tmp_path / "out", calibration, "--keep", "0.75", "--methods", "width", "depth:greedy")
    assert main([*command, "--subnetworks", "3"]) == 2
    assert "error: --subnetworks = 3" in said(capsys) and not (tmp_path / "out").exists()


def test_what_is_asked_is_known_before_anything_is_made(
    policy: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed on the way, a sweep leaves policies; another one must not take them for its own."""
    monkeypatch.setattr(sweep, "load_whole", None)  # an end after the first policy
    command = words(policy, tmp_path / "out", calibration, "--keep", "0.75", "--methods", "depth:random:refit")
    with pytest.raises(TypeError):
        main(command)
    made = tmp_path / "out" / "depth-random-0.75-refit" / "policy"
    assert "refitted" in json.loads((made / "compress.json").read_text())
    assert main([*command, "--seed", "2"]) == 2


def test_no_policy_stays_loaded_beside_what_comes_next(
    policy: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load_whole, compress = [], sweep.load_whole, sweep.compress

    def load(*of: Any) -> Any:
        model = load_whole(*of)
        loaded.append(weakref.ref(model))
        return model

    def alone(*of: Any) -> int:
        assert not [model for model in loaded if model() is not None]
        return compress(*of)

    monkeypatch.setattr(sweep, "load_whole", load)
    monkeypatch.setattr(sweep, "compress", alone)
    command = words(policy, tmp_path / "out", calibration, "--keep", "0.75", "0.7", "--methods", "width:random")
    assert main(command) == 0
    assert len(loaded) == 4


@pytest.mark.parametrize(("ending", "code"), [("kill -9 $$", 137), ("exit 3", 3), ("exit 2", 2)])
def test_the_exit_code_of_a_command_that_fails_is_the_sweep_s(
    swept: Path, policy: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], ending: str, code: int,
) -> None:  # fmt: skip
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{ending}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    out = shutil.copytree(swept, tmp_path / "out")
    command = words(policy, out, calibration, "--keep", "0.75", "--methods", "depth", "--config", str(CONFIG))
    if code == 2:
        assert main(command) == 2
    else:
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == code
    assert ("ended with signal 9 " if code == 137 else f"ended with code {code}, and") in said(capfd)


def test_no_budget_was_enough_only_where_one_was_tried(swept: Path, tmp_path: Path) -> None:
    out = shutil.copytree(swept, tmp_path / "out")
    found = record(out)
    for row, recovered in zip(found["rows"], ([], [{"steps": 1, "tokens": 9.0, "accuracy": 0.1}]), strict=True):
        row |= {"accuracy": 0.0, "recovered": recovered, "recovery_tokens": None}
    (out / "sweep.json").write_text(json.dumps(found))
    shown = page(read_runs([out]))
    assert "No budget was enough for width-magnitude-0.75-refit." in shown
    assert "to 95% of the whole policy&#39;s accuracy" in shown


def test_the_least_budget_that_is_enough_recovers(
    swept: Path, policy: Path, calibration: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As after a kill: some answers are there, and are not asked for again. A larger budget is not needed."""
    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(run=partial(run_command, log=tmp_path / "log")))
    out = shutil.copytree(swept, tmp_path / "out")
    folder = out / "depth-shapley-loss-0.75"
    for place, accuracy in ((out / "whole" / "eval", 0.8), (folder / "sft-1-eval", 0.5), (folder / "sft-3-eval", 0.77)):
        place.mkdir(parents=True)
        (place / "scores.json").write_text(json.dumps({"benchmarks": {"sums": {"avg@k": {"value": accuracy}}}}))
    done, log = shutil.copytree(folder / "policy", folder / "sft-1"), folder / "sft-1-run" / "sft-log"
    log.mkdir(parents=True)
    (log / "metrics.jsonl").write_text('{"train/tokens": 100.0}\n')
    small = "layout.tp=1", "eval.problems=2", "rollout.max_response_tokens=8", "sft.batch=4", "sft.warmup_steps=1"
    config = Path(shutil.copy(CONFIG, tmp_path / "config.yaml"))
    asked = ["--config", str(config), *small, "data.arithmetic.problems=16"]
    command = words(policy, out, calibration, "--keep", "0.75", "--methods", "depth")
    assert main([*command, "--recover", "4", "3", "1", *asked]) == 0
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

    # Less may be enough: what a smaller budget gives is there already, too.
    shutil.copytree(folder / "sft-1", folder / "sft-2")
    shutil.copytree(folder / "sft-1-run", folder / "sft-2-run")
    shutil.copytree(folder / "sft-3-eval", folder / "sft-2-eval")
    capfd.readouterr()
    assert main([*command, "--recover", "2", "3", *asked]) == 0
    assert [point["steps"] for point in record(out)["rows"][0]["recovered"]] == [1, 2, 3]
    assert record(out)["rows"][0]["recovery_tokens"] == 100.0
    assert "to 95% of the whole policy's accuracy" in capfd.readouterr().out
    known = record(out)["asked"]
    assert main([*command, "--enough", "0.99"]) == 0  # without --config, and by another threshold
    assert (record(out)["enough"], record(out)["rows"][0]["recovery_tokens"]) == (0.99, None)
    assert record(out)["asked"] == known and "settings" in known
    config.write_text(config.read_text().replace("every: 10", "every: 11"))
    assert main([*command, *asked]) == 2
    assert "another eval.every," in said(capfd)


def test_on_the_frontier_is_what_no_other_beats() -> None:
    sizes = {"large": (100, 0.9), "small": (50, 0.7), "worse": (50, 0.6), "larger": (60, 0.7), "twin": (50, 0.7)}
    rows = [{"name": name, "weights": weights, "accuracy": accuracy} for name, (weights, accuracy) in sizes.items()]
    mark_frontier(rows)
    assert [row["name"] for row in rows if row["frontier"]] == ["large", "small", "twin"]


@pytest.mark.parametrize(
    ("method", "name"), [("depth", "depth-shapley-loss-0.75"), ("width", "width-magnitude-0.75-refit")]
)
def test_a_plan_says_of_a_smaller_policy_what_it_says_of_its_directory(
    swept: Path, policy: Path, method: str, name: str
) -> None:
    whole, smaller = (load_config(str(CONFIG), [f"model.path={path}"]) for path in (policy, swept / name / "policy"))
    assert whole.layout.tp == 2
    planned, known = plan_smaller(make_plan(whole, Assumptions()), 0.75, method, 8), make_plan(smaller, Assumptions())
    assert (planned.pruned, planned.actor, planned.server) == (known.pruned, known.actor, known.server)
    assert planned.parameters.total < make_plan(whole, Assumptions()).parameters.total


def test_a_plan_of_a_smaller_policy_says_its_size_in_its_own_unit(policy: Path) -> None:
    made = make_plan(load_config(str(CONFIG), [f"model.path={policy}"]), Assumptions())
    lines = list(smaller_text(made, plan_smaller(made, 0.75, "depth"), ""))
    small = f"{made.parameters.total / 1e6:.2f}"
    assert any(line.split()[:3] == ["million", "parameters", small] for line in lines)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--keep", "nan"], "--keep = nan"),
        (["--keep", "inf"], "--keep = inf"),
        (["--keep", "1.5", "--method", "depth"], "--keep = 1.5"),
        (["--keep", "0.75"], "--multiple = 128"),  # of which no width is one
        (["--keep", "0.75", "--multiple", "0"], "--multiple = 0"),
        (["--keep", "0.75", "--multiple", "3"], "leaves 45 feed-forward units, which layout.tp = 2 does not"),
        (["--keep", "0.75", "--method", "experts"], "--method = experts"),
        (["--method", "depth"], "--method = depth"),
        (["--multiple", "8"], "--multiple = 8"),
    ],
)
def test_a_plan_refuses_what_compress_does(
    policy: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["plan", str(CONFIG), f"model.path={policy}", *options]) == 2
    assert named in said(capsys)


def test_a_plan_of_fewer_experts_keeps_as_many_as_ranks_divide(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(CONFIG.with_name("qwen3_30b_a3b_dppo.yaml")), "--keep", "0.5", "--method", "experts"]
    assert main([*command, "--multiple", "3"]) == 2
    assert "leaves 63 experts, which layout.ep = 2 does not divide" in said(capsys)
    assert main(command) == 0
    assert ["30.53", "16.03"] in [line.split()[-2:] for line in capsys.readouterr().out.splitlines()]
