"""Processes end with those that started them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_dppo.process import lifetime


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_with_odd_names_are_found() -> None:
    """Other processes on the machine may be called so, too: tmux has ``tmux: server``."""
    program = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) R 1 (b'); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in lifetime._children()
        child.kill()
