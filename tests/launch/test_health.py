"""A node or a link that is out of order is named before a run starts, by real processes over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_dppo.launch.health import faults_of_node
from megatron_dppo.parallel.meeting import loopback_interface

WAIT_S = 60.0


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def looked(folder: Path, ranks: Sequence[int], size: int, wait_s: float = WAIT_S) -> list[tuple[int, str]]:
    """Exit codes and words of some ranks, which find the folder's programs first."""
    code = f"import sys; from megatron_dppo.launch.health import main; sys.exit(main({wait_s}))"
    of_all = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    of_all |= {
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": loopback_interface() or "",
    }
    started = [
        subprocess.Popen([sys.executable, "-c", code], env={**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in ranks
    ]  # fmt: skip
    return [(process.wait(), said) for process in started for said in [process.communicate(timeout=120)[0]]]


def write_program(file: Path, words: str) -> None:
    file.write_text(f"#!/bin/sh\n{words}\n")
    file.chmod(0o755)


def test_ranks_that_are_well_add_up_and_say_how_fast(tmp_path: Path) -> None:
    (code, said), other = looked(tmp_path, [0, 1], 2)
    assert (code, other) == (0, (0, "")), said
    assert said.startswith(f"2 ranks on {socket.gethostname()} add up 64 MiB by gloo in ")
    assert said.endswith(" GB/s of bus bandwidth\n")


def test_one_rank_needs_no_other(tmp_path: Path) -> None:
    [(code, said)] = looked(tmp_path, [0], 1)
    assert code == 0 and said.startswith("1 ranks on"), said


@pytest.mark.parametrize(
    ("nvidia_smi", "dcgmi", "faults"),
    [
        (None, None, []),
        (None, "exit 1", []),  # as without a host engine
        (None, "exit 0", []),
        (None, "[ $1 = discovery ] || { echo Fail: PCIe; exit 9; }", ["dcgmi diag -r 1 ended with exit code 9: Fail"]),
        ("echo lost; exit 15", None, ["nvidia-smi ended with exit code 15: lost"]),
        (
            "printf '0, 0\\n1, 3\\n2, [N/A]\\n'",
            "exit 0",
            ["nvidia-smi lists 3 GPUs, and torch 2", "GPU 1 has had 3 uncorrected memory errors"],
        ),
    ],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs, and tools of its own")
def test_what_the_tools_of_a_node_find_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvidia_smi: str | None, dcgmi: str | None, faults: list[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, words in (("nvidia-smi", nvidia_smi), ("dcgmi", dcgmi)):
        if words is not None:
            write_program(tmp_path / name, words)
    found = list(faults_of_node())
    assert len(found) == len(faults)
    assert all(each.startswith(fault) for each, fault in zip(found, faults, strict=True)), found


def test_a_fault_of_one_node_is_said_once_and_ends_all_ranks(tmp_path: Path) -> None:
    write_program(tmp_path / "nvidia-smi", "echo lost; exit 15")
    (code, said), other = looked(tmp_path, [0, 1], 2)
    assert (code, other) == (1, (1, ""))
    assert said == f"error: {socket.gethostname()}: nvidia-smi ended with exit code 15: lost\n"


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    (code, said), _ = looked(tmp_path, [0, 2], 4, wait_s=20.0)
    assert code == 1
    assert said.endswith(f"error: ranks [1, 3] did not come within 20 s; there are:\n{socket.gethostname()}\n")


def test_a_rank_that_cannot_reach_the_first_one_names_its_node_and_the_address(tmp_path: Path) -> None:
    [(code, said)] = looked(tmp_path, [1], 2, wait_s=2.0)
    assert code == 1
    assert f"error: rank 1 on {socket.gethostname()} cannot reach rank 0 at 127.0.0.1:" in said
