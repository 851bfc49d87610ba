"""A run of one rank reports an early end, and NCCL's environment is that of the servers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_dppo.config import Config
from megatron_dppo.launch.rank import rank_main, set_environment
from megatron_dppo.rollout.servers.launch import ALLOCATOR
from megatron_dppo.settings import load_config
from tests.commands import Command

ALONE = """
import multiprocessing, os, sys
from megatron_dppo.launch.rank import rank_main
from megatron_dppo.process.lifetime import exit_process
from megatron_dppo.settings import load_config
copy = lambda config: multiprocessing.get_context("fork").Process(target=os._exit, args=(0,)).start()
ending = {"exit": lambda config: sys.exit(0), "leave": lambda config: os._exit(0), "saved": lambda config: os._exit(75)}
def endless():
    try:
        yield
    finally:
        while True: pass
def stuck(config):
    coroutine = endless()
    next(coroutine)
    raise ValueError("the run")
jobs = {**ending, "fork": copy, "stuck": stuck}
exit_process(rank_main(jobs[sys.argv[1]], load_config(None, ["run.dir=run"])))
"""


@pytest.mark.parametrize(
    ("how", "code"), [("exit", 1), ("leave", 1), ("saved", 1), ("fork", 0), ("stuck", 1)]
)
def test_a_rank_alone_that_ends_early_has_failed(tmp_path: Path, how: str, code: int) -> None:
    """No marker is left to the next start. Forked copies may end early."""
    (tmp_path / "run").mkdir()
    environ, log = {"RANK": "0", "WORLD_SIZE": "1"}, tmp_path / "log"
    assert (
        Command(["python", "-c", ALONE, how], log, folder=tmp_path, environ=environ).exit_code()
        == code
    )
    assert ("the run" in log.read_text()) is bool(code)
    assert [*(tmp_path / "run").iterdir()] == []


def lose_folder(config: Config) -> None:
    shutil.rmtree(config.run.dir)
    (Path(config.run.dir) / "answers.jsonl.partial").write_text("")


def write_over_folder(config: Config) -> None:
    """The error names the folder behind the link."""
    (Path(config.run.dir).resolve() / "checkpoints").write_text("")


@pytest.mark.parametrize(
    ("job", "run", "at_fault", "problem"),
    [
        (lose_folder, "run", "run", "was removed during the run"),
        (
            write_over_folder,
            "link",
            "run/checkpoints",
            "blocks a file or folder of the run (Is a directory)",
        ),
    ],
)
def test_disk_error_names_its_place_in_run_dir(
    job: Callable[[Config], None],
    run: str,
    at_fault: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "link").symlink_to("run")
    assert rank_main(job, load_config(None, [f"run.dir={tmp_path / run}"])) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"error: run.dir = {tmp_path / at_fault}\n  problem  {problem}"), said


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        (["rollout.engine=sglang"], None, "0"),  # SGLang sets 0 for itself
        (["rollout.engine=sglang"], "1", "1"),  # and leaves a given value alone
        (["rollout.engine=sglang", "rollout.sync.transport=disk"], None, "nothing"),
    ],
)
def test_a_rank_s_nccl_has_the_servers_environment(
    settings: list[str],
    given: str | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    assert (
        rank_main(
            "tests.launch.jobs:note_nccl",
            load_config(None, [f"run.dir={tmp_path}/said", *settings]),
        )
        == 0
    )
    assert (tmp_path / "said").read_text() == expected


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        (["rollout.engine=sglang"], {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (
            ["rollout.engine=sglang"],
            dict.fromkeys(ALLOCATOR[1:], "a:b"),
            dict.fromkeys(ALLOCATOR[1:], "a:b"),
        ),
        (
            ["rollout.engine=sglang", "rollout.colocated=true", "rollout.sync.transport=disk"],
            {},
            {},
        ),
    ],
)
def test_trainer_has_segments_that_grow_unless_colocated(
    settings: list[str],
    given: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    set_environment(load_config(None, settings))
    assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == expected
