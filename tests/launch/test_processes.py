"""Of several failing ranks one message is seen, and its cause decides the exit code."""

import os
import signal
import stat
import sys
import tempfile
import time
from pathlib import Path

import pytest

from megatron_dppo.launch import processes
from megatron_dppo.launch.processes import CLOCK_S, FirstFailure, resolve_marker, run_ranks


@pytest.mark.parametrize(
    ("failed", "claimed_s_ago", "code", "named"),
    [
        ({1: -signal.SIGKILL}, None, 137, "rank 1 was ended by SIGKILL"),
        (
            {0: 1, 1: -signal.SIGSEGV},
            0.0,
            139,
            "rank 1 was ended by SIGSEGV",
        ),  # rank 0 has spoken since then
        ({0: -signal.SIGABRT, 1: -signal.SIGBUS}, None, 135, "rank 1 was ended by SIGBUS"),
        ({0: 2, 1: -signal.SIGABRT}, 0.0, 2, ""),  # NCCL ends a rank that has lost its peers
        ({0: 2, 1: -signal.SIGKILL}, 9.0, 2, ""),  # long after rank 0 had named the reason
        ({1: 3}, None, 3, "rank 1 ended with exit code 3 without a message"),
    ],
)
def test_the_first_cause_is_named(
    failed: dict[int, int],
    claimed_s_ago: float | None,
    code: int,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure, now = FirstFailure(tmp_path / "marker"), time.time()
    if claimed_s_ago is not None:
        failure.claim(failed[0], "a reason")
        os.utime(tmp_path / "marker", (now - claimed_s_ago,) * 2)
    assert processes._first_cause(failed, failure, previous_poll=now - 0.05) == code
    said = capsys.readouterr().err.removeprefix("a reason\n")
    assert said.startswith(f"error: {named}") if named else said == ""


def test_the_first_to_fail_speaks_with_everyone_s_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [FirstFailure(tmp_path / "marker") for _ in range(3)]
    assert ranks[0].get_code() is None
    claims = [
        rank.claim(code, f"{i}")
        for i, (rank, code) in enumerate(zip(ranks, (2, 1, 1), strict=True))
    ]
    assert claims == [2, 2, 2] and capsys.readouterr().err == "0\n"
    assert (
        FirstFailure(tmp_path / "nowhere" / "marker").claim(2, "without a marker every rank speaks")
        == 2
    )
    assert "every rank" in capsys.readouterr().err


def test_marker_before_the_run_folder_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, second = (resolve_marker(tmp_path / "run", {}) for _ in range(2))
    assert first == second and stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    first.parent.chmod(0o777)  # as somebody else may have made it
    other = resolve_marker(tmp_path / "run", {})
    assert other.parent != first.parent and stat.S_IMODE(other.parent.stat().st_mode) == 0o700


def test_an_earlier_run_s_marker_silences_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FirstFailure(tmp_path / "marker").claim(1, "earlier")
    before = time.time() - CLOCK_S - 0.5
    os.utime(tmp_path / "marker", (before, before))
    ranks = [FirstFailure(tmp_path / "marker") for _ in range(2)]
    assert [rank.claim(2, "now") for rank in ranks] == [2, 2]
    assert capsys.readouterr().err == "earlier\nnow\n"


def test_ranks_end_with_a_failing_callback(tmp_path: Path) -> None:
    def fail_once_ranks_run() -> None:
        if len([*tmp_path.iterdir()]) == 2:
            raise ZeroDivisionError

    code = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w'); time.sleep(600)"
    with pytest.raises(ZeroDivisionError):
        run_ranks(
            [sys.executable, "-c", code],
            {},
            2,
            FirstFailure(tmp_path / "failure"),
            fail_once_ranks_run,
        )
    assert not [
        process.name for process in tmp_path.iterdir() if Path("/proc", process.name).exists()
    ]


@pytest.mark.parametrize("ended", [(0, 1), (0,)])
def test_ranks_are_well_if_each_noted_its_end(
    ended: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = FirstFailure(tmp_path / "failure")
    for rank in ended:
        failure.record_end(rank)
    code = run_ranks([sys.executable, "-c", ""], {}, 2, failure)
    assert code == (0 if len(ended) == 2 else 1)
    assert ("rank 1 ended with exit code 0 before its job" in capsys.readouterr().err) == bool(code)
