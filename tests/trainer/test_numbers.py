"""Numbers that overflow a clock, a generator or 32-bit arithmetic are refused by name, and few open files are named."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config
from tests.commands import Command
from tests.small_runs import write_run


@pytest.mark.parametrize(
    "word",
    ["run.seed=18446744073709551616", "data.arithmetic.seed=9223372036854775808", "rollout.timeout_s=1e308",
     "optimizer.clip_grad=1e308", "loss.clip_high=1e300", "rollout.request_timeout_s=1e10"],
)  # fmt: skip
def test_a_number_that_nothing_can_hold_is_refused(word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(UserError) as caught:
        check_config(load_config(None, [word]))
    assert (caught.value.setting, caught.value.problem) == (key, "is more than can be computed with")


def test_the_largest_numbers_are_taken() -> None:
    check_config(load_config(None, ["run.seed=9223372036854775807", "rollout.timeout_s=1e9"]))


@pytest.mark.parametrize("seed", ["-1", "18446744073709551616", "x"])
def test_a_seed_of_compress_is_one(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compress", "a", "b", "--keep", "0.5", "--seed", seed])
    assert "--seed" in capsys.readouterr().err


def few_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@pytest.mark.parametrize("count", [24, 64, 128])
def test_few_open_files_are_enough_or_named(tmp_path: Path, count: int) -> None:
    folder = write_run(tmp_path)
    words = [f"run.dir={tmp_path}/run", f"model.path={folder}/hf", "data.train=arithmetic", "data.chat_template=false",
             "data.max_prompt_tokens=24",
             "run.steps=1", "layout.dp=1", f"reward.function={folder}/mixed.py:compute_score", "eval.problems=2",
             "data.arithmetic.problems=8", "rollout.prompts_per_step=4", "rollout.max_response_tokens=4"]  # fmt: skip
    command = Command(["megatron-dppo", "train", *words], tmp_path / "log", before=partial(few_files, count))
    code, said = command.exit_code(), (tmp_path / "log").read_text()
    assert "Traceback" not in said, said
    assert code == 0 or (code == 2 and f"error: ulimit -n = {count}" in said), said
