"""Whatever has become of a run's files, its report is made, and says what it could not read or
draw."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from megatron_dppo.report.page import render_page
from megatron_dppo.report.pruning import make_answers_chart
from megatron_dppo.report.render import draw_pictures
from megatron_dppo.report.run import read_run, read_runs
from megatron_dppo.settings import load_config
from megatron_dppo.trainer import run_logger
from megatron_dppo.trainer.resume import record_settings
from tests.damage import DAMAGE
from tests.report.made_up import write_run
from tests.rollout.scripted import world_of

FILES = ("config_history.jsonl", "metrics.jsonl", "pruning.jsonl", "answers.jsonl", "scores.json")


def whole(folder: Path) -> Path:
    run = write_run(folder, 3)
    record_settings(run, 0, load_config(None, [f"run.dir={run}"]))
    scores = {"value": 0.5, "low": 0.4, "high": 0.6}
    of = {
        "problems": 4,
        "avg@k": scores,
        "pass@k": {"1": scores, "4": scores},
        "majority": scores,
        "unscored": 0,
    }
    (run / "scores.json").write_text(json.dumps({"samples": 4, "benchmarks": {"gsm8k": of}}))
    return run


def respell(file: Path, rng: random.Random) -> None:
    """Change the type of one value of one line."""
    lines = file.read_text().splitlines()
    at = rng.randrange(len(lines))
    row = json.loads(lines[at])
    row[rng.choice([*row, "eval/accuracy"])] = rng.choice(
        [None, "x", [], {}, [[1, 2]], -1, 1e300, True, [None] * 5]
    )
    lines[at] = json.dumps(row)
    file.write_text("\n".join([*lines, ""]))


@pytest.mark.parametrize("kind", ["flipped", "respelled", "foreign", "missing"])
@pytest.mark.parametrize("name", FILES)
def test_damaged_file_costs_no_page(tmp_path: Path, name: str, kind: str) -> None:
    run, rng = whole(tmp_path / "run"), random.Random(f"{name} {kind}")
    before = (run / name).read_bytes()
    for _ in range(12):
        (run / name).write_bytes(before)
        ({"respelled": respell} | DAMAGE)[kind](run / name, rng)
        assert "Reward and accuracy" in render_page(read_runs([run]))


def test_skipped_lines_are_counted(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    lines = (run / "pruning.jsonl").read_text().replace('"binary"', '"b9nary"', 2)
    (run / "pruning.jsonl").write_text(lines)
    assert "2 of the lines of pruning.jsonl cannot be read, and are left out" in render_page(
        read_runs([run])
    )


@pytest.mark.drawn
def test_failed_chart_is_named_in_its_place(tmp_path: Path) -> None:
    run = read_run(whole(tmp_path / "run"), "run")
    object.__setattr__(run, "census", [{"step": 1}])
    assert make_answers_chart(run).empty == "cannot be drawn: KeyError: 'binary'"
    object.__setattr__(run, "rows", [{"step": 1, "perf/step_time": "long"}])
    assert "cannot be drawn: TypeError: " in render_page([run])
    draw_pictures(run, tmp_path)


def test_failed_report_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps are done, and nothing was scored."""
    config = load_config(None, [f"run.dir={tmp_path}", "run.steps=1"])
    log = run_logger.RunLogger(config, world_of(1, 0), step=0, dropped_prompts=0)
    log.add({"perf/step_time": 1.0})
    log.write(1)
    (tmp_path / "answers.jsonl").write_text("no answers\n")
    monkeypatch.setattr(
        "megatron_dppo.report.render.draw_pictures", lambda run, folder: {}["a chart"]
    )
    log.finish(run_logger.BestCheckpoint(0.5, 1))
    said = " ".join(capsys.readouterr().out.split())
    assert "the pictures could not be made (KeyError: 'a chart'); the run is complete" in said
    assert "the sample answers could not be made (UserError: run.dir = " in said
    assert (tmp_path / "summary.json").is_file()
