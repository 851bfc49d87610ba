"""Shared parts of the benchmarks: arguments, alternating runs, paired ratios, peak memory,
processes and the JSON line.

A script gets a parser from ``arguments``, measures baseline and candidate with ``in_turn``,
compares both with ``paired_ratio``, and ends with ``finish``. All imports are of the standard
library, because some environments lack the package.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import re
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

# Megatron-Core warns of absent optional packages when a script imports the trainer.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
WARM_UP = 2
TIMED = 5
T = TypeVar("T")
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Student's t at 97.5% for 1, 2, … degrees of freedom; the last value also serves for more."""
MIB = 2**20
RESULTS = Path(__file__).parent / "results"
"""Folder of recorded figures: a file per script, with figures and origin by command."""


def arguments(description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser with ``--json``, ``--record`` and one option per keyword.

    Args:
        description: the script's docstring.
        options: default, or (default, help). False makes a flag, a list an option of several
            values, a type an option without a default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object alone")
    parser.add_argument(
        "--record", action="store_true", help="also store the figures in benchmarks/results"
    )
    for name, given in options.items():
        default, text = given if isinstance(given, tuple) else (given, "default: %(default)s")
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, help=text)
        elif isinstance(default, list):
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default, help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser


def finish(
    figures: Mapping[str, Any],
    options: argparse.Namespace,
    print_table: Callable[[], None] | None = None,
) -> None:
    """Print a table, by default a line per figure, unless ``--json`` is set; then all figures as
    one JSON object on the last line."""
    if not options.json:
        (print_table or partial(print_figures, figures))()
    if options.record:
        record(figures)
    print(json.dumps(figures))


def print_figures(figures: Mapping[str, Any]) -> None:
    for name, value in _flat("", figures):
        text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
        print(f"{name:<44} {text}")


def record(figures: Mapping[str, Any]) -> None:
    """Store figures and origin, under this command, in the script's file of
    ``benchmarks/results``."""
    script, *words = sys.argv
    given = shlex.join(word for word in words if word not in ("--json", "--record"))
    file = RESULTS / f"{Path(script).stem}.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    stored[f"{Path(script).name} {given}".strip()] = origin() | {"figures": figures}
    file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def origin() -> dict[str, str]:
    """Return the checkout's commit, the date and the processor."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.check_output(command, cwd=RESULTS, text=True).strip()
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="ascii")
    names = re.findall(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    processor = f"{len(names)} cores, {names[0]}" if names else platform.machine()
    return {"commit": commit, "date": time.strftime("%Y-%m-%d"), "processor": processor}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested figures, names joined by points; lists of numbers stay whole."""
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{name}.{key}".lstrip("."), each)
    else:
        yield name, value


def in_turn(
    contenders: Mapping[str, Callable[[int], T]], repeats: int, *, warm_up: int = 1
) -> dict[str, list[T]]:
    """Call all contenders in every round, so that a noisy machine affects all equally.

    Returns:
        ``repeats`` results per contender; results of the first ``warm_up`` rounds are dropped.
    """
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(warm_up + repeats):
        for name, run in contenders.items():
            found = run(number)
            if number >= warm_up:
                results[name].append(found)
    return results


def timed(work: Callable[[], T], wait: Callable[[], object] = lambda: None) -> tuple[float, T]:
    """Return seconds and result of one call. ``wait`` is called before and after ``work``, so that
    a device finishes."""
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


def median_seconds(work: Callable[[], object], wait: Callable[[], object] = lambda: None) -> float:
    """Return median seconds of ``TIMED`` calls, after ``WARM_UP`` uncounted calls."""
    times = [timed(work, wait)[0] for _ in range(WARM_UP + TIMED)]
    return statistics.median(times[WARM_UP:])


def mean_and_reach(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and half the width of the 95% interval by Student's t; infinite for a single
    value."""
    free = len(values) - 1
    if not free:
        return values[0], math.inf
    t = T_975[min(free, len(T_975)) - 1]
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float]) -> dict[str, Any]:
    """Return the geometric mean of baseline over candidate, pair by pair, with a 95% interval; the
    interval of a single pair is None."""
    pairs = zip(baseline, candidate, strict=True)
    mean, reach = mean_and_reach([math.log(one / other) for one, other in pairs])
    interval = [math.exp(mean - reach), math.exp(mean + reach)] if math.isfinite(reach) else None
    return {"ratio": math.exp(mean), "interval": interval, "pairs": len(baseline)}


def own_status(field: str, file: str = "status") -> int:
    """Return a number of this process from ``/proc/self``: bytes for fields in kB, such as
    ``RssAnon`` or ``VmHWM``."""
    status = Path("/proc/self", file).read_text(encoding="ascii")
    lines = (line.partition(":") for line in status.splitlines())
    words = next(value.split() for name, _, value in lines if name == field)
    return int(words[0]) * (1024 if words[-1] == "kB" else 1)


class PeakMemory:
    """Peak memory of this process within the ``with`` block, in bytes, sampled by a thread.

    Args:
        field: ``VmRSS`` (resident) or ``RssAnon`` (anonymous).
        every_s: seconds between samples.
    """

    def __init__(self, field: str, every_s: float = 0.002) -> None:
        self._field = field
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.before = self.peak = own_status(self._field)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak = max(self.peak, own_status(self._field))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, own_status(self._field))

    @property
    def grown(self) -> int:
        """Peak minus memory at the start of the block, in bytes."""
        return self.peak - self.before


def in_own_process(function: Callable[..., T], *given: Any) -> T:
    """Return the result of a module's function, called in a fresh process.

    Raises:
        SystemExit: the process failed; the traceback is on standard error.
    """
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[T] = context.Queue()
    process = context.Process(target=_put, args=(results, function, given))
    process.start()
    while process.is_alive() and results.empty():
        process.join(0.2)
    if results.empty() and process.exitcode:
        code = process.exitcode
        raise SystemExit(f"{function.__name__}: the process ended with exit code {code}")
    found = results.get(timeout=60)
    process.join()
    return found


def _put(
    results: multiprocessing.Queue[T], function: Callable[..., T], given: Sequence[Any]
) -> None:
    results.put(function(*given))


def be_the_only_rank() -> None:
    """Set the environment variables of a process group of this process alone, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def package_command(command: str, *words: str) -> None:
    """Run a command of the package in a separate process, with output on standard error.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    program = [sys.executable, "-m", "megatron_dppo", command, *words]
    subprocess.run(program, check=True, stdout=sys.stderr)
