"""A run of one rank reports an early end, and NCCL's environment is that of the servers."""

from pathlib import Path

import pytest

from megatron_dppo.launch.rank import rank_main
from megatron_dppo.settings import load_config
from tests.commands import Command

ALONE = """
import multiprocessing, os, sys
from megatron_dppo.launch.rank import rank_main
from megatron_dppo.settings import load_config
copy = lambda config: multiprocessing.get_context("fork").Process(target=os._exit, args=(0,)).start()
ending = {"exit": lambda config: sys.exit(0), "leave": lambda config: os._exit(0), "saved": lambda config: os._exit(75)}
sys.exit(rank_main({**ending, "fork": copy}[sys.argv[1]], load_config(None, ["run.dir=run"])))
"""


@pytest.mark.parametrize(("how", "code"), [("exit", 1), ("leave", 1), ("saved", 1), ("fork", 0)])
def test_a_rank_alone_that_ends_early_has_failed(tmp_path: Path, how: str, code: int) -> None:
    """No marker is left to the next start. Forked copies may end early."""
    (tmp_path / "run").mkdir()
    environ, log = {"RANK": "0", "WORLD_SIZE": "1"}, tmp_path / "log"
    assert Command(["python", "-c", ALONE, how], log, folder=tmp_path, environ=environ).exit_code() == code
    assert ("the run" in log.read_text()) is bool(code)
    assert [*(tmp_path / "run").iterdir()] == []


@pytest.mark.parametrize(
    ("settings", "given", "expected"),
    [
        (["rollout.engine=sglang"], None, "0"),  # SGLang sets 0 for itself
        (["rollout.engine=sglang"], "1", "1"),  # and leaves a given value alone
        (["rollout.engine=sglang", "rollout.sync.transport=disk"], None, "nothing"),
    ],
)
def test_a_rank_s_nccl_has_the_servers_environment(
    settings: list[str], given: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    assert rank_main("tests.launch.jobs:note_nccl", load_config(None, [f"run.dir={tmp_path}/said", *settings])) == 0
    assert (tmp_path / "said").read_text() == expected
