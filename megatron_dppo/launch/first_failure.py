"""Lets only the first rank that fails say why. The others fail because of it, or for the same reason."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

MARKER = "MEGATRON_DPPO_FAILURE"
"""Environment variable with the path of the marker that the launcher chose for its ranks."""

CLOCK_S = 1.0
"""By how much a file's time may lag behind this process's clock."""


class FirstFailure:
    """A marker file that the first failing rank makes, with the exit code of the run in it.

    A file works even if a rank can do no more than that, and if others hang in a collective.

    Args:
        marker: the same for every rank of the run, on a disk that they share if they can.
    """

    def __init__(self, marker: Path) -> None:
        self._marker, self._start = marker, time.time()

    def claim(self, code: int) -> tuple[bool, int]:
        """Whether this rank is the first to fail and should say why; and the exit code of the run."""
        try:
            self._remove_stale()
            descriptor = os.open(self._marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False, self.code() or code
        except OSError:
            return True, code  # better said twice than not at all
        os.write(descriptor, str(code).encode())
        os.close(descriptor)
        return True, code

    def code(self) -> int | None:
        """The exit code of the first failure; None if no rank has failed."""
        for _ in range(20):  # the file exists a moment before its content does
            try:
                if text := self._marker.read_text():
                    return int(text)
            except FileNotFoundError:
                return None
            time.sleep(0.01)
        return 1

    def made_before(self, moment: float) -> bool:
        """Whether a rank had failed by then, in seconds since the epoch."""
        try:
            return self._marker.stat().st_mtime < moment
        except FileNotFoundError:
            return False

    def wait(self, seconds: float) -> None:
        """Wait until a rank has failed, at most for so long."""
        deadline = time.monotonic() + seconds
        while not self._marker.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _remove_stale(self) -> None:
        """Remove a marker that is older than this rank: an earlier run left it, and it would silence this one."""
        if self._marker.exists() and self._marker.stat().st_mtime < self._start - CLOCK_S:
            self._marker.unlink(missing_ok=True)


def marker_for(run_dir: Path, environ: Mapping[str, str]) -> Path:
    """The path of the marker: as the launcher said, else in the run's own directory.

    Before that directory exists, and under torchrun without Slurm, only the ranks of one node share a marker.
    """
    if MARKER in environ:
        return Path(environ[MARKER])
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    parts = [str(run_dir.absolute()), *(environ.get(name, "") for name in names)]
    if "SLURM_STEP_ID" not in environ:
        parts.append(str(os.getppid()))  # torchrun's agent: its run ids and ports are the same run after run
    run = "/".join(parts)
    folder = run_dir if run_dir.is_dir() else Path(tempfile.gettempdir())
    return folder / f".megatron-dppo-failure-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
