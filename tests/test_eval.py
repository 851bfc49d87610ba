"""``megatron-dppo eval`` agrees with the trainer, and a killed evaluation resumes to the same
answers."""

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
SETTINGS = """
data.chat_template=false data.max_prompt_tokens=24 data.arithmetic.problems=16 data.arithmetic.eval_problems=40
rollout.prompts_per_step=4 rollout.samples_per_prompt=2 rollout.max_response_tokens=24 pack.max_tokens=128
model.path=hf reward.function=mixed.py:compute_score run.dir=run
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("eval"))


def command(folder: Path, log: Path, words: str) -> Command:
    name, *more = words.split()
    return Command(["megatron-dppo", name, *SETTINGS.split(), *more], log, folder=folder)


def finish(folder: Path, log: Path, words: str, code: int = 0) -> str:
    """Run a command and return its output."""
    log.unlink(missing_ok=True)
    ended = command(folder, log, words).exit_code()
    assert ended == code, log.read_text()
    return log.read_text()


def read_answers(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_bytes().splitlines()]


@pytest.mark.quick
def test_a_checkpoint_has_the_accuracy_measured_in_training(folder: Path, tmp_path: Path) -> None:
    """Answers are greedy, to the same problems, with the weights of the last step."""
    finish(folder, tmp_path / "log", "train run.steps=2 run.export=false optimizer.lr=1e-3")
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    finish(folder, tmp_path / "log", "eval --model run model.path=nowhere eval.batch=40")
    out = folder / "run" / "eval" / "iter_0000002"
    scores = json.loads((out / "scores.json").read_text())
    figures = scores["benchmarks"]["arithmetic"]
    assert figures["avg@k"]["value"] == rows[-1]["eval/accuracy"]
    assert figures["mean_length"]["value"] == pytest.approx(rows[-1]["eval/response_len/mean"])
    assert (
        0.0 < figures["avg@k"]["low"] < figures["avg@k"]["value"] < figures["avg@k"]["high"] < 1.0
    )
    assert (scores["step"], scores["engine"], scores["temperature"]) == (2, "local", 0.0)
    assert figures["mean_reward"]["value"] == pytest.approx(rows[-1]["eval/reward"])
    questions = {
        file.name: file.read_text() for file in (out / "questions" / "arithmetic").iterdir()
    }
    assert len(questions) == 40
    for row in read_answers(out):
        assert (
            f"\n{row['answer']}\n" in questions[f"{row['problem']:04}-{int(row['correct'])}of1.txt"]
        )


def test_a_killed_evaluation_resumes_to_the_same_answers(folder: Path, tmp_path: Path) -> None:
    """Answers are sampled, which shows another seed. The kill leaves half a line behind the last
    whole batch."""
    words, log = "eval --samples 2 eval.batch=2 --out", tmp_path / "log"
    whole, killed = folder / "whole", folder / "killed"
    finish(folder, log, f"{words} whole")
    process = command(folder, log, f"{words} killed").start()
    try:
        until = time.monotonic() + LIMIT_S
        while not (killed / "answers.jsonl").exists() or len(read_answers(killed)) < 8:
            assert process.is_alive() and time.monotonic() < until
            time.sleep(0.005)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    left = len(read_answers(killed))
    assert 8 <= left < 80 and not (killed / "scores.json").exists()
    with (killed / "answers.jsonl").open("ab") as torn:
        torn.write(b'{"benchmark": "arith')
    assert f"{left // 4 * 2} of 40 problems are answered already" in finish(
        folder, log, f"{words} killed"
    )
    for name in ("answers.jsonl", "scores.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()

    rows = read_answers(whole)
    assert [(row["problem"], row["sample"]) for row in rows] == [
        (i, k) for i in range(40) for k in range(2)
    ]
    assert any(
        one["answer"] != two["answer"] for one, two in zip(rows[::2], rows[1::2], strict=True)
    )
    later = ("eval.top_p=0.9", "eval.top_k=3", "eval.max_response_tokens=5")
    said = " ".join(finish(folder, log, " ".join([words, "killed", *later]), code=2).split())
    assert all(f"{word.partition('=')[0]} = null (now" in said for word in later)


def test_the_limit_of_problems_is_not_the_training_run_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, limit in (("", "null"), ("--problems 9", "9")):
        assert main(["eval", "--print-config", "eval.every=1", *words.split()]) == 0
        assert f"\n  problems: {limit}\n" in capsys.readouterr().out
