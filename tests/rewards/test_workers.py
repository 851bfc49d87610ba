"""Scoring survives whatever a reward function does, counts failures, and never makes a zero of a
failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rewards import workers as workers_module
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.score import Score, collect_tracebacks, count_failures
from megatron_dppo.settings import load_config
from tests.rewards.math.test_completion import OPENED, THOUGHTS
from tests.waiting import is_alive, wait_until, wait_until_gone

REWARD = FAILING = f"{Path(__file__).parent / 'rewards_that_fail.py'}:compute_score"
REWARD_TIMEOUT_S = LIMIT_S = 0.3
GROUPS = """
import time

async def group_rm(args, samples, **kwargs):
    right = [sample.response_length for sample in samples if sample.label in sample.response]
    return [float(s.label in s.response and s.response_length == min(right)) for s in samples]

def one_too_few(args, samples):
    return [1.0 for sample in samples[1:]]

def slow(args, samples):
    began = time.process_time()
    while time.process_time() < began + float(samples[0].response):
        pass
    return [1.0 for sample in samples]
"""
AWAITED = """
import asyncio, os, sys, time

opened = most = 0

async def judged(text):
    # The number in a text, once so many are open together; the first number is answered last.
    global opened, most
    opened += 1
    most = max(most, opened)
    try:
        while text == "hang" or most < {wanted}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3 / (1.0 + float(text)))
        return float(text)
    except asyncio.CancelledError:
        open({marks!r}, "a").write(text + "\\n")
        raise
    finally:
        opened -= 1

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
        case ["most"]:
            return float(most)
        case ["stubborn"]:
            try:
                await judged("hang")
            except asyncio.CancelledError:
                return 1.0
    return await judged(solution_str)

async def trl(completions, **columns):
    return [await judged(text) for text in completions]
"""


def write_items(*solutions: str, label: str = "7") -> list[ScoreItem]:
    return [ScoreItem("here", text, label, {}, token_ids=range(len(text)), place=f"row {n}")
            for n, text in enumerate(solutions)]  # fmt: skip


def read_rewards(scores: list[Score]) -> list[float | None]:
    return [None if score.failure else score.reward for score in scores]


def score(spec: str, *solutions: str, **settings: Any) -> list[Score]:
    """Score completions with workers of their own, by default one."""
    with closing(RewardWorkers(spec, **{"workers": 1, "timeout_s": 20.0, **settings})) as pool:
        pool.wait_ready()
        return pool.score(write_items(*solutions))


def test_scores_keep_the_order_of_completions() -> None:
    scored = score(FAILING, *(f"score {n}" for n in range(100)), workers=2)
    assert read_rewards(scored) == list(range(100))
    assert (count_failures(scored), collect_tracebacks(scored)) == ((0, 0), ())


def test_abandoned_completions_leave_no_trace(workers: RewardWorkers) -> None:
    scoring = workers.begin(max_failures=9)
    scoring.add(write_items("sleep 1", "score 1"))
    while not any(worker.pending for worker in workers._workers):
        scoring.step(0.1)
    scoring.cancel()
    assert read_rewards(workers.score(write_items("score 4", "score 5"))) == [4.0, 5.0]


def test_functions_get_all_fields_in_a_process_of_one_thread(workers: RewardWorkers) -> None:
    assert workers.score([ScoreItem("here", "echo", "40", {"add": 2})]) == [Score(42.0, True)]
    assert workers.score([]) == []
    assert read_rewards(workers.score(write_items("modules", "threads"))) == [0.0, 1.0]


def test_settings_reach_the_scoring_processes() -> None:
    """A sum of functions, and the tags of thoughts, which the rendered prompt may open."""
    summed = "reward.function=[{function: math}, {function: exact, weight: 0}]"
    items = [ScoreItem("", completion, "43", rendered=prompt) for prompt, completion, _ in THOUGHTS]
    with closing(RewardWorkers.from_config(load_config(None, [summed]).reward)) as pool:
        assert read_rewards(pool.score(items)) == [float(answer == "43") for *_, answer in THOUGHTS]
    plain = load_config(None, ["reward.function=exact", "reward.thinking_tags=[]"])
    with closing(RewardWorkers.from_config(plain.reward)) as pool:
        assert read_rewards(pool.score([ScoreItem("", "<think>\n#43", "43", rendered=OPENED)])) == [
            1.0
        ]


@pytest.mark.parametrize(("how", "on_the_clock"), [("backtrack", 100), ("deaf", 4)])
def test_hanging_function_costs_its_completion_only(
    how: str, on_the_clock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C, with and without processor time: each has a limit of its own."""
    monkeypatch.setattr(workers_module, "ON_THE_CLOCK", on_the_clock)
    scored = score(FAILING, "score 1", how, *["score 2"] * 14, timeout_s=LIMIT_S)  # four to a chunk
    assert read_rewards(scored) == [1.0, None, *[2.0] * 14]
    assert count_failures(scored) == (1, 0)


def test_limits_hold_for_each_completion_on_a_busy_machine() -> None:
    """Neither the time of a whole chunk counts, nor the time in which the machine does something
    else."""
    with closing(RewardWorkers(FAILING, workers=1, timeout_s=0.2)) as pool:
        pool.wait_ready()
        (scorer,) = psutil.Process(pool._workers[0].process.pid).children()

        def hold_up() -> None:
            time.sleep(0.1)
            scorer.suspend()
            time.sleep(0.4)
            scorer.resume()

        held = threading.Thread(target=hold_up)
        held.start()
        scored = pool.score(
            write_items(*["busy 0.1"] * 4, *["sleep 0.6"] * 4, "spin", *["score 1"] * 23)
        )
        held.join()
    assert read_rewards(scored) == [1.0] * 4 + [0.5] * 4 + [None] + [1.0] * 23
    assert count_failures(scored) == (1, 0)


def test_forked_children_of_a_function_answer_nothing(workers: RewardWorkers) -> None:
    scored = workers.score(write_items("fork", "score 2", "fork-raise", "score 3", "fork"))
    assert read_rewards(scored) == [1.0, 2.0, 1.0, 3.0, 1.0]
    assert count_failures(scored) == (0, 0), collect_tracebacks(scored)


TRAINER = """
import sys
print("main", flush=True)
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers
pool = RewardWorkers(sys.argv[1], workers=2, timeout_s=600.0)
pool.wait_ready()
print(*(worker.process.pid for worker in pool._workers), flush=True)
pool.score([ScoreItem("", word, "") for word in sys.argv[2:]])
"""


def test_killed_trainer_takes_its_workers_along(tmp_path: Path) -> None:
    """One holds the interpreter's lock, the other has left processes behind."""
    (script := tmp_path / "trainer.py").write_text(TRAINER)
    words = ["deaf", f"leave {tmp_path / 'pids'}"]
    trainer = subprocess.Popen(
        [sys.executable, script, FAILING, *words], stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None and trainer.stdout.readline() == "main\n"
    pids = [
        int(pid) for pid in trainer.stdout.readline().split()
    ]  # no second "main": nothing is imported twice
    wait_until(lambda: len(read_pids(tmp_path)) == 3)
    pids += read_pids(tmp_path)
    trainer.kill()
    trainer.wait()
    wait_until_gone(pids)
    assert len(pids) == 5


@pytest.mark.parametrize("end", ["close", "spin", "exit-at-once"])
def test_processes_of_a_function_end_with_its_worker(tmp_path: Path, end: str) -> None:
    with closing(RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S)) as pool:
        pool.score(write_items(f"leave {tmp_path / 'pids'}"))
        pids = [*read_pids(tmp_path), pool._workers[0].process.pid]
        assert len(pids) == 4 and all(map(is_alive, pids)), (
            "a call's end is not theirs: they may serve the next"
        )
        if end == "close":
            pool.close()
            assert not is_alive(pids[-1])
        else:
            pool.score(write_items(end))
        wait_until_gone(pids)


def read_pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def test_function_past_its_memory_costs_its_completion_only() -> None:
    scored = score(FAILING, "allocate 100", "allocate 1000", "allocate 100", memory_mib=256)
    assert read_rewards(scored) == [1.0, None, 1.0]
    assert count_failures(scored) == (0, 1) and "MemoryError" in collect_tracebacks(scored)[0]


def test_errors_are_counted_each_and_shown_once(fresh_workers: RewardWorkers) -> None:
    failing = ["raise one", "raise two", "elsewhere", "score nan", "exit", "segfault"]
    scored = fresh_workers.score(write_items("score 1", *failing, "score 2"))
    assert read_rewards(scored) == [1.0, *[None] * len(failing), 2.0]
    assert count_failures(scored) == (0, 6)
    expected = {
        1: "ValueError: one",
        3: "AssertionError: elsewhere",
        4: "not finite: nan",
        5: "SystemExit: 3",
        6: "SIGSEGV",
    }
    for text, (row, words) in zip(collect_tracebacks(scored), expected.items(), strict=True):
        assert words in text and text.startswith(f"reward.function = {FAILING}, for row {row}: "), (
            text
        )
    assert "rewards_that_fail.py" in collect_tracebacks(scored)[0]
    again = fresh_workers.score(write_items("raise three", "score nan"))
    assert (count_failures(again), collect_tracebacks(again)) == ((0, 2), ())


def test_killed_workers_are_replaced(workers: RewardWorkers, tmp_path: Path) -> None:
    """One killed at work for the first time loses no completion. Slurm's signal that time is short
    kills none."""
    scored = workers.score(write_items(f"killed-once {tmp_path / 'mark'}", "score 2"))
    assert read_rewards(scored) == [1.0, 2.0] and count_failures(scored)[1] == 0
    (pid,) = read_rewards(workers.score(write_items("pid")))
    os.kill(int(pid or 0), signal.SIGUSR1)
    assert read_rewards(workers.score(write_items("pid"))) == [pid]
    os.kill(int(pid or 0), signal.SIGKILL)
    scored = workers.score(write_items("pid"))
    assert count_failures(scored)[1] == 0 and read_rewards(scored) not in ([pid], [None])


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import os; os._exit(4)", "ended with exit code 4 while importing it"),
        (
            "if lives() <= 1: os.kill(os.getpid(), signal.SIGKILL)\ndef compute_score(**row): "
            "return 1.0",
            None,
        ),
        (
            "if lives() <= 2: os.kill(os.getpid(), signal.SIGKILL)",
            "killed by SIGKILL while importing it",
        ),
        ("time.sleep(60)", "its import did not end within 1 s"),
    ],
)
def test_import_that_fails_is_refused(
    tmp_path: Path, module: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed once is started again."""
    if module.startswith("time"):
        monkeypatch.setattr(workers_module, "START_LIMIT_S", 1.0)
    (tmp_path / "mine.py").write_text(
        "import os, signal, time\nfrom pathlib import Path\n"
        "def lives():\n    file = Path(__file__).with_suffix('.lives')\n    "
        "file.open('a').write('.')\n"
        f"    return len(file.read_text())\n{module}\n"
    )
    if words is None:
        assert read_rewards(score(f"{tmp_path}/mine.py:compute_score", "")) == [1.0]
        return
    with pytest.raises(UserError, match=words):
        score(f"{tmp_path}/mine.py:compute_score", "")


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    path = tmp_path / "groups.py"
    path.write_text(GROUPS)
    return path


def score_groups(spec: str, *groups: list[str], workers: int = 1) -> list[Score]:
    with closing(RewardWorkers(spec, workers=workers, timeout_s=LIMIT_S)) as pool:
        scoring = pool.begin(max_failures=99)
        for group in groups:
            scoring.add(write_items(*group))
        return scoring.finish()


def test_group_function_gets_the_completions_of_one_prompt(groups: Path) -> None:
    """Of the right answers the shortest is worth something; the second group's is longer than all
    of the first."""
    scored = score_groups(
        f"{groups}:group_rm", ["it is 7", "7", "8"], ["it is 7!", "it is 8"], ["8"], workers=2
    )
    assert (
        read_rewards(scored) == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0] and count_failures(scored)[1] == 0
    ), collect_tracebacks(scored)


def test_failing_group_function_fails_for_the_whole_group(groups: Path) -> None:
    scored = score_groups(f"{groups}:one_too_few", ["a", "b", "c"], ["a", "b", "c"])
    assert (read_rewards(scored), count_failures(scored)) == ([None] * 6, (0, 6))
    (text,) = collect_tracebacks(scored)
    assert "returned 2 scores for a group of 3 completions" in text and "for row 0" in text


def test_group_has_the_time_of_all_its_completions(groups: Path) -> None:
    """Twice the limit of one completion, for groups of four and of one."""
    scored = score_groups(f"{groups}:slow", ["0.6", "b", "c", "d"], ["0.6"], ["0"])
    assert read_rewards(scored) == [1.0] * 4 + [None, 1.0]
    assert count_failures(scored) == (1, 0)


@pytest.fixture
def awaited(tmp_path: Path) -> Callable[..., str]:
    """A maker of a function that answers once ``wanted`` completions are open in its process."""

    def make(wanted: int = 1, name: str = "compute_score") -> str:
        path = tmp_path / "awaited.py"
        path.write_text(AWAITED.format(wanted=wanted, marks=str(tmp_path / "marks")))
        return f"{path}:{name}"

    return make


@pytest.mark.parametrize(
    ("name", "workers", "concurrency", "at_once"),
    [
        ("compute_score", 1, 4, 4),
        ("compute_score", 4, 32, 4),
        ("compute_score", 1, 1, 1),
        ("trl", 1, 5, 5),
    ],
)
def test_awaited_completions_are_open_together_and_scored_in_order(
    awaited: Callable[..., str], name: str, workers: int, concurrency: int, at_once: int
) -> None:
    spec = awaited(wanted=at_once, name=name)
    with closing(
        RewardWorkers(spec, workers=workers, timeout_s=20.0, concurrency=concurrency)
    ) as pool:
        pool.wait_ready()
        scored = pool.score(write_items(*map(str, range(16))))
        assert read_rewards(scored) == list(range(16)), collect_tracebacks(scored)
        if name == "compute_score":
            assert read_rewards(pool.score(write_items("most"))) == [at_once]
            assert len(set(read_rewards(pool.score(write_items(*["pid"] * 16))))) == workers, (
                "the work is spread"
            )


def test_later_completions_join_awaited_completions(awaited: Callable[..., str]) -> None:
    with closing(RewardWorkers(awaited(wanted=4), workers=1, timeout_s=20.0)) as pool:
        scoring = pool.begin(max_failures=9)
        scoring.add(write_items("1", "2"))
        while not pool._workers[0].pending:
            scoring.step(0.1)
        scoring.add(write_items("3", "4"))
        assert read_rewards(scoring.finish()) == [1.0, 2.0, 3.0, 4.0]


def test_awaited_completion_past_its_time_is_cancelled(
    awaited: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "ON_THE_CLOCK", 4)
    with closing(RewardWorkers(awaited(wanted=6), workers=1, timeout_s=0.5)) as pool:
        before = read_rewards(pool.score(write_items("pid")))
        scored = pool.score(write_items("1", "hang", "2", "stubborn", "hang", "3"))
        assert read_rewards(scored) == [1.0, None, 2.0, None, None, 3.0]
        assert count_failures(scored) == (3, 0)
        assert read_rewards(pool.score(write_items("pid"))) == before, "the others' process goes on"
    assert (tmp_path / "marks").read_text() == "hang\n" * 3


def test_failing_awaited_completions_are_named_and_cost_no_other(
    awaited: Callable[..., str],
) -> None:
    failing = {
        "raise": "ValueError: no verdict",
        "sys-exit": "SystemExit: 3",
        "cancelled": "CancelledError: by itself",
        "nan": "not finite",
        "die": "ended with exit code 5",
    }
    scored = score(awaited(), *failing, *map(str, range(5, 11)))
    assert read_rewards(scored) == [None] * 5 + [*range(5, 11)]
    assert count_failures(scored) == (0, 5)
    for row, words in enumerate(failing.values()):
        assert any(
            words in text and f"for row {row}:" in text for text in collect_tracebacks(scored)
        ), collect_tracebacks(scored)


@pytest.mark.parametrize(("how", "on_the_clock"), [("spin", 100), ("block", 4)])
def test_awaited_completion_that_blocks_the_loop_costs_no_other(
    awaited: Callable[..., str], how: str, on_the_clock: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without processor time: each has a limit of its own."""
    monkeypatch.setattr(workers_module, "ON_THE_CLOCK", on_the_clock)
    monkeypatch.setattr(workers_module, "END_LIMIT_S", 0.5)
    scored = score(awaited(), "1", "2", how, "3", timeout_s=LIMIT_S)
    assert read_rewards(scored) == [1.0, 2.0, None, 3.0]
    assert count_failures(scored) == (1, 0)


def test_past_most_failures_awaited_completions_are_left(awaited: Callable[..., str]) -> None:
    with closing(RewardWorkers(awaited(), workers=1, timeout_s=20.0)) as pool:
        pool.wait_ready()
        busy = pool._workers[0].process
        scored = pool.score(write_items("hang", "hang", "raise", "hang"), max_failures=0)
        assert (count_failures(scored), read_rewards(scored)) == ((0, 1), [None] * 4)
        assert "for row 2" in collect_tracebacks(scored)[0]
        assert busy.poll() is not None, "nothing hangs any more"
