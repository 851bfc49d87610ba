"""Processes end with those that started them, and a run notices who takes its signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_dppo.process import lifetime


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers and mask of this process are put back."""
    numbers, mask = (signal.SIGUSR1, signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(lifetime, "_stop_requested", False)
    monkeypatch.setattr(lifetime, "_handlers", {signal.SIGTERM: before[signal.SIGTERM]})
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.usefixtures("ours")
def test_stop_is_heard_after_a_users_file_took_its_signal() -> None:
    lifetime.install_stop_handler()
    assert lifetime.list_replaced_handlers() == []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    assert [note.split(": ")[0] for note in lifetime.list_replaced_handlers()] == [
        "code of the user handles SIGTERM",
        "code of the user handles SIGUSR1",
    ]
    signal.raise_signal(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the handler runs
    assert lifetime.is_stop_requested()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_with_odd_names_are_found() -> None:
    """Other processes on the machine may be called so, too: tmux has ``tmux: server``."""
    program = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) R 1 (b'); print(flush=True); "
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in lifetime._list_children()
        child.kill()
