"""Waits of tests for other processes and threads."""

import time
from collections.abc import Callable, Iterable

import psutil


def wait_until(holds: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.01)


def wait_until_gone(pids: Iterable[int], limit_s: float = 60.0) -> None:
    """Wait until processes have ended; name those that are left."""
    try:
        wait_until(lambda: not any(map(is_alive, pids)), limit_s)
    except AssertionError as error:
        left = [psutil.Process(pid) for pid in pids if is_alive(pid)]
        told = [each.as_dict(["pid", "ppid", "status", "cmdline"]) for each in left]
        raise AssertionError(f"still alive: {told}") from error


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
