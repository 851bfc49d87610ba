"""A reward function written ``async def`` has several completions open at once, and the limits hold for each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers, Scored

THEIRS = """
import asyncio, os, sys, time

async def judged(text):
    reader, writer = await asyncio.open_connection("127.0.0.1", {port})
    try:
        writer.write(text.encode() + b"\\n")
        answer = await reader.readline()
        return float(answer)
    except asyncio.CancelledError:
        open({marks!r}, "a").write(text + "\\n")
        raise
    finally:
        writer.close()

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str.split():
        case ["raise"]:
            await judged("0")
            raise ValueError("no verdict")
        case ["sys-exit"]:
            sys.exit(3)
        case ["cancelled"]:
            raise asyncio.CancelledError("by itself")
        case ["nan"]:
            return float("nan")
        case ["die"]:
            os._exit(5)
        case ["spin"]:
            await judged("0")
            while True:
                pass
        case ["block"]:
            time.sleep(600.0)
        case ["pid"]:
            return float(os.getpid())
        case ["stubborn"]:
            try:
                await judged("hang")
            except asyncio.CancelledError:
                return 1.0
    return await judged(solution_str)

async def custom_rm(args, sample):
    return await judged(sample.response)

async def trl(completions, **columns):
    return [await judged(text) for text in completions]

async def group_rm(args, samples):
    return [await judged(samples[0].response)] * len(samples)
"""


class Judge:
    """A server that answers a number once ``wanted`` requests have been open together, and ``hang`` never."""

    def __init__(self) -> None:
        self.open = self.most_open = 0
        self.wanted = 1
        self._loop = asyncio.new_event_loop()
        self._enough = asyncio.Event()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._answer, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            self._loop.run_until_complete(asyncio.wait([task]))
        self._server.close()
        self._loop.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = (await reader.readline()).decode().strip()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open >= self.wanted:
            self._enough.set()
        try:
            if text == "hang":
                await reader.read()  # until the other side closes
            else:
                await self._enough.wait()
                await asyncio.sleep(0.3 / (1.0 + float(text)))  # the first is answered last
        finally:
            self.open -= 1
        writer.write(f"{text}\n".encode())
        writer.close()


@pytest.fixture
def judge() -> Iterator[Judge]:
    server = Judge()
    yield server
    server.close()


@pytest.fixture
def file(judge: Judge, tmp_path: Path) -> Path:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS.format(port=judge.port, marks=str(tmp_path / "marks")))
    return path


def items(*solutions: str) -> list[ScoreItem]:
    return [ScoreItem("", text, "1", place=f"row {n}") for n, text in enumerate(solutions)]


def scored(
    file: Path,
    *solutions: str,
    name: str = "compute_score",
    workers: int = 1,
    concurrency: int = 32,
    timeout_s: float = 20.0,
    most_failures: int | None = None,
) -> Scored:
    how = {"workers": workers, "concurrency": concurrency, "timeout_s": timeout_s}
    with closing(RewardWorkers(f"{file}:{name}", **how)) as pool:
        return pool.score(items(*solutions), most_failures=most_failures)


def rewards(found: Scored) -> list[float | None]:
    return [score and score.reward for score in found.scores]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


@pytest.mark.parametrize(
    ("name", "workers", "concurrency", "at_once"),
    [
        ("compute_score", 1, 32, 16),
        ("compute_score", 1, 4, 4),
        ("compute_score", 2, 4, 8),
        ("compute_score", 2, 32, 16),
        ("compute_score", 1, 1, 1),
        ("custom_rm", 1, 5, 5),
        ("trl", 1, 5, 5),
    ],
)
def test_so_many_completions_are_open_at_once_and_scores_keep_their_order(
    file: Path, judge: Judge, name: str, workers: int, concurrency: int, at_once: int
) -> None:
    judge.wanted = at_once
    found = scored(file, *map(str, range(16)), name=name, workers=workers, concurrency=concurrency)
    assert rewards(found) == list(range(16)), found.tracebacks
    assert judge.most_open == at_once


def test_completions_are_spread_over_the_worker_processes(file: Path) -> None:
    with closing(RewardWorkers(f"{file}:compute_score", workers=4, timeout_s=20.0)) as pool:
        pool.wait_ready()
        assert len(set(rewards(pool.score(items(*["pid"] * 16))))) == 4


def test_what_comes_up_later_does_not_wait_for_what_is_open(file: Path, judge: Judge) -> None:
    judge.wanted = 4
    with closing(RewardWorkers(f"{file}:compute_score", workers=1, timeout_s=20.0)) as pool:
        pool.wait_ready()
        scoring = pool.begin(most_failures=9)
        scoring.add(items("1", "2"))
        while judge.open < 2:
            scoring.advance(0.1)
        scoring.add(items("3", "4"))
        assert rewards(scoring.finish()) == [1.0, 2.0, 3.0, 4.0] and judge.most_open == 4


def test_groups_are_scored_one_after_another(file: Path, judge: Judge) -> None:
    with closing(RewardWorkers(f"{file}:group_rm", workers=1, timeout_s=20.0)) as pool:
        scoring = pool.begin(most_failures=9)
        for text in "12345":
            scoring.add(items(text, "0"))
        assert rewards(scoring.finish()) == [float(text) for text in "1122334455"] and judge.most_open == 1


def test_a_completion_that_waits_too_long_is_cancelled_by_itself(
    file: Path, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge.wanted = 6
    monkeypatch.setattr("megatron_dppo.rewards.workers.ON_THE_CLOCK", 4)
    with closing(RewardWorkers(f"{file}:compute_score", workers=1, timeout_s=0.5)) as pool:
        (before,) = rewards(pool.score(items("pid")))
        found = pool.score(items("1", "hang", "2", "stubborn", "hang", "3"))
        assert rewards(found) == [1.0, None, 2.0, None, None, 3.0]
        assert (found.timeouts, found.errors) == (3, 0)
        assert rewards(pool.score(items("pid"))) == [before], "the others' process goes on"
    assert (tmp_path / "marks").read_text() == "hang\n" * 3
    wait_until(lambda: judge.open == 0)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "ValueError: no verdict"),
        ("sys-exit", "SystemExit: 3"),
        ("cancelled", "CancelledError: by itself"),
        ("nan", "not finite"),
        ("die", "ended with exit code 5"),
    ],
)
def test_a_completion_that_fails_is_named_and_costs_no_other(file: Path, judge: Judge, how: str, words: str) -> None:
    found = scored(file, "1", "2", how, *map(str, range(3, 9)))
    assert rewards(found) == [1.0, 2.0, None, *range(3, 9)]
    assert (found.timeouts, found.errors) == (0, 1)
    assert words in found.tracebacks[0] and "for row 2:" in found.tracebacks[0]


@pytest.mark.parametrize("how", ["spin", "block"])
def test_a_completion_that_lets_no_other_go_on_is_found_and_costs_no_other(
    file: Path, judge: Judge, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "spin":  # the limit of processor time alone can end it in time
        monkeypatch.setattr("megatron_dppo.rewards.workers.ON_THE_CLOCK", 100)
    monkeypatch.setattr("megatron_dppo.rewards.workers.END_LIMIT_S", 1.0)
    found = scored(file, "1", "2", how, "3", timeout_s=0.3)
    assert rewards(found) == [1.0, 2.0, None, 3.0]
    assert (found.timeouts, found.errors) == (1, 0)


def test_past_the_failures_that_are_allowed_the_rest_is_cancelled(file: Path, judge: Judge) -> None:
    judge.wanted = 7
    with closing(RewardWorkers(f"{file}:compute_score", workers=1, timeout_s=20.0)) as pool:
        found = pool.score(items("hang", "hang", "raise", "hang", *["0"] * 3), most_failures=0)
        assert found.errors == 1 and "for row 2" in found.tracebacks[0] and rewards(found)[:4] == [None] * 4
        wait_until(lambda: judge.open == 0)
