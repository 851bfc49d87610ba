"""A command's exit code is 0 only if the command itself has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_until

GUARDED = "from megatron_dppo.process.guard import run_guarded\nrun_guarded(command)\n"


def start(body: str) -> subprocess.Popen[str]:
    program = f"import ctypes, os, sys, threading, time\ndef command():\n    {body}\n{GUARDED}"
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 3", 3),
        ("sys.exit(0)", 0),
        ("ctypes.CDLL(None)._exit(5)", 5),
        ("threading.Thread(target=time.sleep, args=(600,)).start(); return 3", 3),
        ("os.kill(os.getpid(), 15)", -signal.SIGTERM),
    ],
)
def test_exit_code_is_the_commands(body: str, code: int) -> None:
    process = start(body)
    assert (process.communicate()[1], process.returncode) == ("", code)


@pytest.mark.parametrize(
    ("number", "said"),
    [(11, "SIGSEGV"), (9, "SIGKILL (was the machine out of memory?)"), (40, "signal 40")],
)
def test_signal_that_nobody_sent_is_reported(number: int, said: str) -> None:
    process = start(f"os.kill(os.getpid(), {number})")
    assert process.communicate()[1] == f"error: the command's process was ended by {said}\n"
    assert process.returncode == -number


@pytest.mark.parametrize(
    "body", ["ctypes.CDLL(None)._exit(0)", "os._exit(0)", "os.execv('/bin/true', ['true'])"]
)
def test_end_below_python_is_no_success(body: str) -> None:
    process = start(body)
    assert "ended with exit code 0 before the command had ended" in process.communicate()[1]
    assert process.returncode == 1


def test_thread_does_not_outlive_a_successful_command_for_long() -> None:
    limit = "import megatron_dppo.process.lifetime as l; l.EXIT_S = 0.3"
    process = start(f"{limit}; threading.Thread(target=time.sleep, args=(600,)).start(); return 0")
    assert "still ran 0.3 s after the command had ended" in process.communicate()[1]
    assert process.returncode == 0


def test_nothing_that_a_command_leaves_behind_outlives_it() -> None:
    process = start(
        "import subprocess as s; print(s.Popen(['setsid', 'sleep', '600']).pid, file=sys.stderr)"
    )
    child = process.communicate(timeout=30)[1]
    assert process.returncode == 0 and not Path("/proc", child.strip()).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_command_ends_with_its_guard(number: signal.Signals, tmp_path: Path) -> None:
    process = start(
        f"print(os.getpid(), file=open({str(tmp_path / 'pid')!r}, 'w')); time.sleep(600)"
    )
    child = tmp_path / "pid"
    wait_until(lambda: child.exists() and child.read_text())
    process.send_signal(number)
    assert process.wait() == -number
    wait_until(lambda: not Path("/proc", child.read_text().strip()).exists())
