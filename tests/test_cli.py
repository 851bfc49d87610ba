"""The command line as a user meets it: real processes, exit codes, and what is printed where."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dppo import __version__
from megatron_dppo.cli import COMMANDS, main
from megatron_dppo.config import Config
from megatron_dppo.errors import WIDTH, UserError, error_text
from megatron_dppo.settings import load_config


def _type(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_dppo", *words], capture_output=True, text=True, timeout=60, cwd=cwd
    )


def test_version() -> None:
    said = _type("--version")
    assert (said.returncode, said.stdout) == (0, f"megatron-dppo {__version__}\n")


def test_an_unknown_key_is_one_block_on_stderr_and_exit_code_2() -> None:
    said = _type("train", "pruning.completions.kep=0.3")
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        "error: pruning.completions.kep = 0.3\n"
        "  problem  there is no such setting\n"
        "  remedy   Write pruning.completions.keep, if that was meant\n"
    )


def test_an_override_may_be_longer_than_a_file_s_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"data.system={'long ' * 999}", "--print-config"]) == 0
    assert "long " * 99 in capsys.readouterr().out


def test_what_is_printed_can_be_run(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {steps: 4}\n")
    said = _type("train", "a.yaml", "--print-config", "layout.tp=2", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (0, "")
    (tmp_path / "b.yaml").write_text(said.stdout)
    config = load_config(str(tmp_path / "b.yaml"), [])
    assert (config.run.steps, config.layout.tp) == (4, 2)


def test_settings_are_answered_without_torch_or_megatron(tmp_path: Path) -> None:
    """A stand-in that fails on import proves it: a file can be checked on a machine that has neither."""
    for package in ("torch", "megatron", "transformers"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not needed for this')\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    for words, code in (("--print-config",), 0), (("model.path=nowhere",), 2), (("pack.max_tokens=5",), 2):
        said = subprocess.run(
            [sys.executable, "-m", "megatron_dppo", "train", *words], capture_output=True, text=True, env=environment
        )
        assert said.returncode == code, said.stderr
        assert "not needed" not in said.stderr


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["train"], "model.path"),
        (["sft", "model.path=nowhere"], "model.path"),
        (["train", "nowhere.yaml"], "CONFIG"),
        (["train", "a.yaml", "b.yaml"], "CONFIG"),
        (["train", "run.steps=none"], "run.steps"),
    ],
)
def test_a_mistake_ends_with_2_before_anything_is_written(
    words: list[str], setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {setting} = ")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_option_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["init", "a", "--stpes", "3"])
    assert ended.value.code == 2
    assert "usage: megatron-dppo" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "remedy"), [("trian", "Did you mean train?"), ("xyzzy", "lists the commands")])
def test_an_unknown_command_names_the_nearest(word: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "configs/quickstart.yaml"]) == 2
    said = capsys.readouterr().err
    assert f"error: command = {word}\n" in said and remedy in said


def test_no_command_shows_what_help_shows_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    alone = capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == alone
    shown = re.findall(r"^  ([a-z-]+(?: [a-z-]+)?)  +[A-Z].*\.$", alone, re.MULTILINE)
    assert shown == [command for commands in COMMANDS.values() for command in commands]


def test_an_option_that_is_a_setting_elsewhere_is_answered_with_how_settings_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "run.steps=3", "--learning-rate", "3", "--check"]) == 2
    assert main(["train", "--lr=3"]) == 2
    said = capsys.readouterr().err
    assert "error: argument = --learning-rate\n" in said and "error: argument = --lr=3\n" in said
    assert "Settings are written without dashes: optimizer.lr=…" in said


def test_ctrl_c_is_130_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(command: str, config: Config) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return 0

    monkeypatch.setattr("megatron_dppo.launch.start.run", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert main(["train"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == ""


def test_doctor_tells_programs_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["installed"]["torch"]
    assert findings["machine"]["cores"] >= 1
    assert (findings["machine"]["nccl"] is None) == (findings["machine"]["cuda"] is None)
    assert findings["will_use"]["layers (model.spec auto)"] in ("torch", "te")
    assert findings["will_use"]["rehearsals (megatron-dppo rehearse)"].startswith(("ready", "missing: "))


def test_doctor_tells_which_nccl_runs_and_which_torch_was_built_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers must have the one that runs, which another package or a preloaded library may have brought."""
    monkeypatch.setattr("megatron_dppo.rollout.servers.nccl.loaded", lambda: "2.30.7")
    monkeypatch.setattr("megatron_dppo.rollout.servers.nccl.packages", lambda: ["nvidia-nccl-cu13 2.30.7"])
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 7))
    assert main(["doctor"]) == 0
    assert "2.30.7 (nvidia-nccl-cu13 2.30.7, torch was built with 2.29.7)" in " ".join(capsys.readouterr().out.split())


def test_an_error_text_fits_a_terminal_and_keeps_the_lines_of_a_traceback() -> None:
    problem = "word " * 60 + "\nTraceback:\n  File x\n    raise"
    text = error_text(UserError("a.b", "3", problem, "do this"))
    lines = text.splitlines()
    assert lines[0] == "error: a.b = 3"
    assert max(map(len, lines)) <= WIDTH
    assert [line.removeprefix(" " * 11) for line in lines[-4:-1]] == ["Traceback:", "  File x", "    raise"]
    assert lines[-1] == "  remedy   Do this"
