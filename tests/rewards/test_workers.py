"""Scoring survives whatever a reward function does, counts it, and never makes a zero of it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Score

FAILING = f"{Path(__file__).parent / 'rewards_that_fail.py'}:compute_score"
LIMIT_S = 0.3


def items(*solutions: str) -> list[ScoreItem]:
    return [ScoreItem("here", solution, "1") for solution in solutions]


@pytest.fixture
def workers() -> Iterator[RewardWorkers]:
    pool = RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S)
    yield pool
    pool.close()


def rewards(scores: list[Score | None]) -> list[float | None]:
    return [score and score.reward for score in scores]


def test_scores_come_back_in_order_however_the_work_is_spread() -> None:
    pool = RewardWorkers(FAILING, workers=2, timeout_s=5.0)
    scored = pool.score(items(*(f"score {n}" for n in range(100))))
    pool.close()
    assert rewards(scored.scores) == list(range(100))
    assert (scored.timeouts, scored.errors, scored.tracebacks) == (0, 0, [])


def test_what_comes_up_later_is_scored_too_and_what_came_first_does_not_wait_for_it(workers: RewardWorkers) -> None:
    workers.wait_ready()
    scoring = workers.begin(most_failures=9)
    scoring.add(items("score 1", "raise", "score 2"))
    while scoring.advance(5.0):
        pass
    assert rewards(scoring._scored.scores) == [1.0, None, 2.0]
    scoring.add(items("score 3"))
    scored = scoring.finish()
    assert rewards(scored.scores) == [1.0, None, 2.0, 3.0] and scored.errors == 1
    assert rewards(workers.score(items("score 4")).scores) == [4.0]


def test_what_is_abandoned_leaves_no_trace(workers: RewardWorkers) -> None:
    scoring = workers.begin(most_failures=9)
    scoring.add(items("sleep 1", "score 1"))
    while not any(worker.pending for worker in workers._workers):
        scoring.advance(0.1)
    scoring.abandon()
    assert rewards(workers.score(items("score 4", "score 5")).scores) == [4.0, 5.0]


def test_all_that_a_function_is_given_reaches_it(workers: RewardWorkers) -> None:
    item = ScoreItem("here", "echo", "40", {"add": 2})
    assert workers.score([item]).scores == [Score(42.0, True)]
    assert workers.score([]).scores == []


@pytest.mark.parametrize("how", ["spin", "sleep 60", "deaf", "backtrack"])
def test_function_that_hangs_costs_its_completion_only(
    workers: RewardWorkers, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.wait_ready()
    start, computes = time.monotonic(), how in ("spin", "backtrack")
    on_the_clock = 100 if computes else 4  # half a minute: the limit of processor time alone can end it in time
    limit_s = LIMIT_S if computes else on_the_clock * LIMIT_S
    monkeypatch.setattr("megatron_dppo.rewards.workers.ON_THE_CLOCK", on_the_clock)
    scored = workers.score(items("score 1", how, *["score 2"] * 14))  # four to a chunk
    assert rewards(scored.scores) == [1.0, None, *[2.0] * 14]
    assert (scored.timeouts, scored.errors) == (1, 0)
    assert limit_s < time.monotonic() - start < limit_s + 15.0  # and the start of another worker, on a busy machine


def test_limits_hold_for_each_completion_and_not_for_a_chunk() -> None:
    pool = RewardWorkers(FAILING, workers=1, timeout_s=0.2)
    scored = pool.score(items(*["sleep 0.6"] * 4, *["busy 0.1"] * 4, *["score 1"] * 24))  # fours travel in one chunk
    pool.close()
    assert rewards(scored.scores) == [0.5] * 4 + [1.0] * 28


def test_limit_is_of_processor_time_and_a_busy_machine_costs_nothing() -> None:
    pool = RewardWorkers(FAILING, workers=1, timeout_s=0.5)
    pool.wait_ready()
    (scorer,) = psutil.Process(pool._workers[0].process.pid).children()

    def hold_up() -> None:  # as a machine that is busy otherwise would, for longer than the limit
        time.sleep(0.1)
        scorer.suspend()
        time.sleep(0.8)
        scorer.resume()

    held = threading.Thread(target=hold_up)
    held.start()
    scored = pool.score(items("busy 0.3", "sleep 0.7", "busy 0.3", "busy 0.3", "spin", "score 2"))
    held.join()
    pool.close()
    assert rewards(scored.scores) == [1.0, 0.5, 1.0, 1.0, None, 2.0]
    assert (scored.timeouts, scored.errors) == (1, 0)


def test_fork_that_comes_back_says_nothing(workers: RewardWorkers) -> None:
    scored = workers.score(items("fork", "score 2", "fork-raise", "score 3", "fork"))
    assert rewards(scored.scores) == [1.0, 2.0, 1.0, 3.0, 1.0]
    assert (scored.timeouts, scored.errors) == (0, 0), scored.tracebacks


@pytest.mark.parametrize("end", ["close", "spin", "segfault", "exit-at-once", "trainer"])
def test_what_a_function_leaves_behind_ends_with_its_worker(tmp_path: Path, end: str) -> None:
    file = tmp_path / "pids"
    if end == "trainer":
        script = tmp_path / "trainer.py"
        script.write_text(TRAINER)
        trainer = subprocess.Popen([sys.executable, script, FAILING, f"leave {file}"], stdout=subprocess.PIPE)
        wait_until(lambda: file.exists() and len(file.read_text().split()) >= 3)
        trainer.kill()
        trainer.wait()
    else:
        pool = RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S)
        assert rewards(pool.score(items(f"leave {file}")).scores) == [1.0]
        assert all(map(alive, read_pids(file)))  # a call's end is not theirs: it may be a server for the next
        if end != "close":
            pool.score(items(end))
            wait_until(lambda: not any(map(alive, read_pids(file))))
        pool.close()
    pids = read_pids(file)
    wait_until(lambda: not any(map(alive, pids)))
    assert len(pids) >= 3 and not any(map(alive, pids))


def read_pids(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("number", ["1e308", "-1e308", "inf", "1j"])
def test_reward_that_cannot_be_trained_on_names_the_function_and_the_row(workers: RewardWorkers, number: str) -> None:
    scored = workers.score([ScoreItem("", f"huge {number}", "1", place="rows.jsonl, line 7")])
    assert scored.scores == [None] and scored.errors == 1
    assert all(
        word in scored.tracebacks[0] for word in (f"reward.function = {FAILING}, for rows.jsonl, line 7", number)
    )


def test_function_that_takes_more_memory_than_it_may_costs_its_completion_only() -> None:
    pool = RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S + 4.0, memory_mib=256)
    scored = pool.score(items("allocate 100", "allocate 1000", "allocate 100"))
    pool.close()
    assert rewards(scored.scores) == [1.0, None, 1.0]
    assert (scored.timeouts, scored.errors) == (0, 1) and "MemoryError" in scored.tracebacks[0]


def test_errors_are_counted_each_and_shown_once(workers: RewardWorkers) -> None:
    scored = workers.score(items("raise one", "raise two", "raise-elsewhere", "score 1", "nan", "nan", "none", "exit"))
    assert rewards(scored.scores) == [None, None, None, 1.0, None, None, None, None]
    assert (scored.timeouts, scored.errors) == (0, 7)
    assert len(scored.tracebacks) == 5
    assert "ValueError: one" in scored.tracebacks[0] and "rewards_that_fail.py" in scored.tracebacks[0]
    assert any("not finite: nan" in text for text in scored.tracebacks)
    again = workers.score(items("raise three", "nan"))
    assert (again.errors, again.tracebacks) == (2, [])


def test_function_that_takes_its_process_down_is_an_error(workers: RewardWorkers) -> None:
    scored = workers.score(items("score 1", "segfault", "score 2"))
    assert rewards(scored.scores) == [1.0, None, 2.0]
    assert scored.errors == 1 and "SIGSEGV" in scored.tracebacks[0]


def test_completion_whose_worker_was_killed_once_is_scored_by_another(workers: RewardWorkers, tmp_path: Path) -> None:
    scored = workers.score(items(f"killed-once {tmp_path / 'mark'}", "score 2"))
    assert rewards(scored.scores) == [1.0, 2.0] and scored.errors == 0


def test_worker_killed_while_idle_is_replaced(workers: RewardWorkers) -> None:
    pid = int(workers.score(items("pid")).scores[0].reward)
    os.kill(pid, signal.SIGKILL)
    scored = workers.score(items("pid"))
    assert scored.errors == 0 and scored.scores[0].reward != pid


def test_worker_goes_on_when_slurm_tells_every_process_that_time_is_short(workers: RewardWorkers) -> None:
    pid = int(workers.score(items("pid")).scores[0].reward)
    os.kill(pid, signal.SIGUSR1)
    assert workers.score(items("pid")).scores[0].reward == pid


def test_worker_holds_one_thread_and_nothing_of_the_trainer(workers: RewardWorkers) -> None:
    assert rewards(workers.score(items("modules", "threads")).scores) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("function", "word"),
    [("nowhere.py:f", "there is no file"), (FAILING.replace("compute_score", "compute"), "Perhaps 'compute_score'")],
)
def test_function_that_cannot_be_found_is_refused_before_anything_is_scored(function: str, word: str) -> None:
    pool = RewardWorkers(function, workers=1, timeout_s=1.0)
    with pytest.raises(UserError, match=word):
        pool.wait_ready()
    pool.close()


def test_process_that_dies_while_importing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(4)\n")
    pool = RewardWorkers(f"{tmp_path}/dies.py:f", workers=1, timeout_s=1.0)
    with pytest.raises(UserError, match="ended with exit code 4 while importing it"):
        pool.score(items("score 1"))
    pool.close()


@pytest.mark.parametrize(("deaths", "scored"), [(1, True), (2, False)])
def test_process_killed_once_while_importing_is_started_again(tmp_path: Path, deaths: int, scored: bool) -> None:
    (tmp_path / "killed.py").write_text(
        "import os, signal\nfrom pathlib import Path\n\n"
        "lives = Path(__file__).with_suffix('.lives')\nlives.open('a').write('.')\n"
        f"if len(lives.read_text()) <= {deaths}:\n    os.kill(os.getpid(), signal.SIGKILL)\n\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    pool = RewardWorkers(f"{tmp_path}/killed.py:compute_score", workers=1, timeout_s=1.0)
    if scored:
        assert rewards(pool.score(items("score 1")).scores) == [1.0]
    else:
        with pytest.raises(UserError, match="killed by SIGKILL while importing it"):
            pool.wait_ready()
    pool.close()


TRAINER = """
import os, sys, threading, time
print("main", flush=True)
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers
pool = RewardWorkers(sys.argv[1], workers=2, timeout_s=600.0)
pool.wait_ready()
print(*(worker.process.pid for worker in pool._workers), flush=True)
pool.score([ScoreItem("", sys.argv[2], "")] * 2)
"""


@pytest.mark.parametrize("busy_with", ["deaf", "sleep 600"])
def test_workers_die_with_a_trainer_that_is_killed(tmp_path: Path, busy_with: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen([sys.executable, script, FAILING, busy_with], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None and trainer.stdout.readline() == "main\n"
    pids = [int(pid) for pid in trainer.stdout.readline().split()]  # no second "main": it is not imported again
    time.sleep(0.3)  # both are at work
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 5.0
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2 and not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_worker_whose_trainer_is_gone_before_it_read_an_answer_ends_quietly(workers: RewardWorkers) -> None:
    workers.wait_ready()
    (worker,) = workers._workers
    worker.pipe.send([(range(1), [pickle.dumps(*items("score 1"))])])
    assert worker.pipe.poll(10.0)
    worker.pipe.close()
    assert worker.process.wait(10.0) == 0


def test_close_leaves_no_process(workers: RewardWorkers) -> None:
    pids = [worker.process.pid for worker in workers._workers]
    workers.close()
    workers.close()
    assert not any(map(alive, pids))
