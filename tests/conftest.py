"""Fixtures that all tests share. A module sets a constant to choose other arguments for one of
them.

| constant of the module | fixture | default |
|---|---|---|
| ``POLICY``, a function of a folder | ``policy`` | ``write_policy`` |
| ``REWARD``, ``REWARD_TIMEOUT_S`` | ``workers``, ``fresh_workers`` | ``math``, 20 |
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import hypothesis
import pytest

from tests.ranks import RankPool

SLOW_LIST = Path(__file__).with_name("slow.txt")
"""The second tier: ids of tests that took ``SLOW_S`` seconds or more. ``scripts/test.sh --measure``
writes the file."""
SLOW_S = 1.0
KEPT = {"quick", "servers", "slurm", "browser", "gpu"}
"""Markers of tests that are never in the list: representatives of a law or a command, and tests of
other tiers."""

GONE = pytest.StashKey[str]()
"""Why no test runs."""

# A shell has what it starts in the background ignore Ctrl-C, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run draws the same examples, and no clock decides: a busy machine is no failure.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--measure", action="store_true", help=f"write the ids of slow tests to {SLOW_LIST}"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow tests, and begin with groups: a group runs on one worker, so that the others must
    not wait for it."""
    slow = set(SLOW_LIST.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    # A file that skips itself, for want of an extra, has no items.
    collected = {item.nodeid.partition("::")[0] for item in items}
    gone = slow - {item.nodeid for item in items}
    gone = {
        test
        for test in gone
        if (file := test.partition("::")[0]) in collected or not Path(file).is_file()
    }
    whole_suite = {Path(word).resolve() for word in config.args} == {Path(__file__).parent}
    if whole_suite and gone and not config.getoption("measure"):
        # Each test fails: an error here would end xdist's workers without a word.
        config.stash[GONE] = (
            f"{SLOW_LIST} names tests that are gone: {sorted(gone)}. Run scripts/test.sh --measure"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if GONE in item.config.stash:
        pytest.fail(item.config.stash[GONE], pytrace=False)


class Stopwatch:
    """Adds up the seconds of each test: set-up, call and teardown."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.kept: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        if "xdist_group" in report.keywords and "@" in test:
            test = test.rpartition("@")[0]  # pytest-xdist appends the group's name
        self.seconds[test] = self.seconds.get(test, 0.0) + report.duration
        if KEPT & set(report.keywords):
            self.kept.add(test)

    def pytest_sessionfinish(self) -> None:
        """Replace the entries of the tests that ran; other entries stay."""
        found = {test for test, seconds in self.seconds.items() if seconds >= SLOW_S} - self.kept
        others = set(SLOW_LIST.read_text(encoding="utf-8").splitlines()) - self.seconds.keys()
        SLOW_LIST.write_text(
            "".join(f"{test}\n" for test in sorted(found | others)), encoding="utf-8"
        )


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    return RankPool()


@pytest.fixture(scope="session")
def write_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Callable[[Path], object]], Path]:
    """Return the folder that a writer (a function of a folder, or a ``partial``) filled. Equal
    writers share it."""
    folders: dict[object, Path] = {}

    def folder_of(writer: Callable[[Path], object]) -> Path:
        key: object = writer
        if isinstance(writer, partial):
            key = (writer.func, writer.args, tuple(sorted(writer.keywords.items())))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("policy") / "qwen3"
            writer(folders[key])
        return folders[key]

    return folder_of


@pytest.fixture(scope="module")
def policy(
    request: pytest.FixtureRequest, write_once: Callable[[Callable[[Path], object]], Path]
) -> Path:
    """A folder of a small random policy, which other modules may share: read only."""
    from tests.policies import write_policy

    return write_once(getattr(request.module, "POLICY", write_policy))


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A tokenizer of single characters, of at most 512 tokens."""
    from megatron_dppo.data.tokenizer import load_tokenizer
    from megatron_dppo.init import build_character_tokenizer, write_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(build_character_tokenizer(), folder, max_tokens=512)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def workers(request: pytest.FixtureRequest) -> Iterator[object]:
    """One reward worker, shared by the tests of a module."""
    yield from _workers(request.module)


@pytest.fixture
def fresh_workers(request: pytest.FixtureRequest) -> Iterator[object]:
    """One reward worker that has scored nothing yet."""
    yield from _workers(request.module)


def _workers(module: object) -> Iterator[object]:
    from megatron_dppo.rewards.workers import RewardWorkers

    timeout_s = getattr(module, "REWARD_TIMEOUT_S", 20.0)
    pool = RewardWorkers(getattr(module, "REWARD", "math"), workers=1, timeout_s=timeout_s)
    pool.wait_ready()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def http() -> Iterator[object]:
    from megatron_dppo.rollout.servers.http import Http

    http = Http()
    yield http
    http.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 9 MiB."""
    place = tmp_path / "small-disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", place], check=True)
