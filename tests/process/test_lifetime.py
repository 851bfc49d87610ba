"""A run notices who takes the signals that ask it to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from megatron_dppo.process import lifetime


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers and mask of this process are put back."""
    numbers, mask = (signal.SIGUSR1, signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(lifetime, "_asked", False)
    monkeypatch.setattr(lifetime, "_handlers", {signal.SIGTERM: before[signal.SIGTERM]})
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.usefixtures("ours")
def test_stop_is_heard_after_a_users_file_took_its_signal() -> None:
    lifetime.listen_for_stop()
    assert lifetime.taken_signals() == []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    assert [note.split(": ")[0] for note in lifetime.taken_signals()] == [
        "code of the user handles SIGTERM",
        "code of the user handles SIGUSR1",
    ]
    signal.raise_signal(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # the handler runs
    assert lifetime.stop_asked()
