"""``megatron-dppo eval`` as it is typed: it agrees with the trainer, and a kill costs it one batch at most."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.cli import main
from tests.commands import Command
from tests.small_runs import write_run

LIMIT_S = 120.0
SETTINGS = (
    "data.chat_template=false",
    "data.max_prompt_tokens=24",
    "data.arithmetic.problems=16",
    "data.arithmetic.eval_problems=40",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=2",
    "rollout.max_response_tokens=24",
    "pack.max_tokens=128",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("eval"))


def command(folder: Path, name: str, *words: str) -> list[str]:
    settings = [*SETTINGS, f"model.path={folder}/hf", f"reward.function={folder}/mixed.py:compute_score"]
    return [name, *settings, f"run.dir={folder}/run", *words]


def finished(words: list[str], log: Path, code: int = 0) -> str:
    log.unlink(missing_ok=True)
    ended = Command(["megatron-dppo", *words], log).exit_code()
    assert ended == code, log.read_text()
    return log.read_text()


def answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_bytes().splitlines()]


def test_a_run_s_checkpoint_has_the_accuracy_that_the_trainer_measured(folder: Path, tmp_path: Path) -> None:
    """Greedy, on the same problems, with the weights of the last step."""
    log = tmp_path / "log"
    finished(command(folder, "train", "run.steps=2", "run.export=false", "optimizer.lr=1e-3"), log)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    said = finished(command(folder, "eval", "--model", f"{folder}/run", "model.path=nowhere", "eval.batch=40"), log)
    out = folder / "run" / "eval" / "iter_0000002"
    scores = json.loads((out / "scores.json").read_text())
    figures = scores["benchmarks"]["arithmetic"]
    assert figures["avg@k"]["value"] == rows[-1]["eval/accuracy"]
    assert figures["mean_length"]["value"] == pytest.approx(rows[-1]["eval/response_len/mean"])
    assert 0.0 < figures["avg@k"]["low"] < figures["avg@k"]["value"] < figures["avg@k"]["high"] < 1.0
    assert (scores["step"], scores["engine"], scores["temperature"]) == (2, "local", 0.0)
    assert "arithmetic        40" in said and "95% interval" in said
    assert figures["mean_reward"]["value"] == pytest.approx(rows[-1]["eval/reward"])
    assert f"  {figures['mean_reward']['value']:.3f}  " in said
    questions = {file.name: file.read_text() for file in (out / "questions" / "arithmetic").iterdir()}
    assert len(questions) == 40
    for row in answers(out):
        text = questions[f"{row['problem']:04}-{int(row['correct'])}of1.txt"]
        verdict = "right" if row["correct"] else "wrong"
        assert f"\n{row['prompt']}\n\n--- answer 1 of 1: {verdict}, reward " in text
        assert f" {row['tokens']} tokens" in text and text.endswith(f"\n{row['answer']}\n")


def test_killed_in_the_middle_it_goes_on_to_the_same_answers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sampled, so that luck would show; the kill leaves half a line and the batch before it."""
    words = command(folder, "eval", "--samples", "2", "eval.batch=2")
    whole, killed, log = folder / "whole", folder / "killed", tmp_path / "log"
    finished([*words, "--out", str(whole)], log)
    process = Command(["megatron-dppo", *words, "--out", str(killed)], log).start()
    try:
        until = time.monotonic() + LIMIT_S
        while not (killed / "answers.jsonl").exists() or len(answers(killed)) < 8:
            assert process.is_alive() and time.monotonic() < until
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    left = len(answers(killed))
    assert 8 <= left < 80 and not (killed / "scores.json").exists()
    with (killed / "answers.jsonl").open("ab") as torn:
        torn.write(b'{"benchmark": "arith')
    said = finished([*words, "--out", str(killed)], log)
    assert f"{left // 4 * 2} of 40 problems are answered already" in said
    assert (killed / "answers.jsonl").read_bytes() == (whole / "answers.jsonl").read_bytes()
    assert (killed / "scores.json").read_bytes() == (whole / "scores.json").read_bytes()

    rows = answers(whole)
    assert [(row["problem"], row["sample"]) for row in rows] == [(i, k) for i in range(40) for k in range(2)]
    assert any(one["answer"] != two["answer"] for one, two in zip(rows[::2], rows[1::2], strict=True))
    capsys.readouterr()
    assert main(["eval", "--out", str(killed), "--against", str(whole)]) == 0
    assert "+0.0 [+0.0, +0.0]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "setting", "what"),
    [
        (["--model", "nowhere"], "--model", "is no folder"),
        (["--benchmarks", "gsm9k"], "eval.benchmarks", "gsm8k"),
        (["--benchmarks", "aime24", "--data", "nowhere"], "eval.benchmarks", "has no file in nowhere"),
        (["--benchmarks", "own=nowhere.jsonl"], "eval.benchmarks", "is no file"),
        (["--samples", "4", "--temperature", "0"], "eval.temperature", "greedy"),
        (["--samples", "300"], "rollout.max_batch", "300"),
        (["--samples", "0"], "eval.samples", ""),
        (["data.train=other.jsonl"], "eval.benchmarks", "--benchmarks"),
        (["--out", "a", "--against", "b", "run.steps=1"], "model.path", ""),
    ],
)
def test_a_mistake_is_named_before_anything_is_loaded(
    words: list[str],
    setting: str,
    what: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = [] if "--against" in words else [f"model.path={folder}/hf"]
    assert main(["eval", *SETTINGS, *model, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {setting} = ") and what in said
    assert list(tmp_path.iterdir()) == []


def test_a_training_run_s_limit_of_problems_is_not_the_command_s(capsys: pytest.CaptureFixture[str]) -> None:
    def problems(*words: str) -> str:
        assert main(["eval", "--print-config", "eval.every=1", *words]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  problems: "))

    assert problems() == "  problems: null"
    assert problems("eval.problems=7") == "  problems: 7"
    assert problems("--problems", "9") == "  problems: 9"


def test_another_benchmark_is_answered_beside_what_is_there(folder: Path, tmp_path: Path) -> None:
    words, out, log = command(folder, "eval"), folder / "beside", tmp_path / "log"
    own = folder / "own.jsonl"
    own.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(6)))
    finished([*words, "--out", str(out), "--problems", "8"], log)
    first = (out / "answers.jsonl").read_bytes()
    said = finished([*words, "--out", str(out), "--benchmarks", f"mine={own}"], log)
    assert "mine" in said and "arithmetic" in said
    assert (out / "answers.jsonl").read_bytes().startswith(first)
    assert [row["problem"] for row in answers(out) if row["benchmark"] == "mine"] == list(range(6))
    scores = json.loads((out / "scores.json").read_text())["benchmarks"]
    assert {name: of["problems"] for name, of in scores.items()} == {"arithmetic": 8, "mine": 6}


def test_answers_of_another_sampling_go_into_another_folder(folder: Path, tmp_path: Path) -> None:
    """Within an evaluation's own limit, and a folder of a version without these settings goes on."""
    words, out, log = command(folder, "eval", "--temperature", "1"), folder / "sampled", tmp_path / "log"
    own = ["eval.top_p=0.9", "eval.top_k=20", "eval.max_response_tokens=5"]
    words += ["--out", str(out), "--problems", "8", "--samples", "2"]
    finished([*words, *own], log)
    assert max(row["tokens"] for row in answers(out)) == 5
    scores = json.loads((out / "scores.json").read_text())
    assert (scores["top_p"], scores["top_k"], scores["max_response_tokens"]) == (0.9, 20, 5)
    for kept in itertools.combinations(own, 2):
        ((name, value),) = (setting.split("=") for setting in own if setting not in kept)
        said = " ".join(finished([*words, *kept], log, code=2).split())
        assert f"was begun with {name} = {value} (now null)" in said
    settings = json.loads((out / "evaluation.json").read_text())
    for setting in own:
        del settings[setting.partition("=")[0]]
    (out / "evaluation.json").write_text(json.dumps(settings))
    before = (out / "answers.jsonl").read_bytes()
    finished(words, log)
    assert (out / "answers.jsonl").read_bytes() == before


def test_a_warm_policy_is_not_warmed_up_again_by_accident(folder: Path, tmp_path: Path) -> None:
    words = command(folder, "sft", "sft.steps=1", "sft.batch=2", f"sft.out={folder}/warm")
    for _ in range(2):  # the same command again begins with the same policy
        finished(words, tmp_path / "log")
    said = finished([*words, f"model.path={folder}/warm"], tmp_path / "log", code=2)
    assert f"is a policy that sft has warmed up already, from {folder}/hf" in " ".join(said.split())
