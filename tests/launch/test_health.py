"""A node or a link that is out of order is named before a run starts, by real processes over
gloo."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_dppo.launch.health import FLOOR, check_network, find_node_faults
from megatron_dppo.parallel.meeting import find_loopback_interface
from tests.commands import Command

NODE = socket.gethostname()


def find_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def check_nodes(
    folder: Path,
    ranks: Sequence[int],
    size: int,
    wait_s: float = 60.0,
    nodes: str = NODE,
    **environ: str,
) -> list[tuple[int | None, str]]:
    """Return exit codes and outputs of some ranks, which find the folder's programs first.

    Args:
        nodes: each rank's node, ``{rank}`` replaced.
    """
    code = f"import sys; from megatron_dppo.launch.health import main; sys.exit(main({wait_s}))"
    common = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_port()),
    }
    common |= {
        "WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": find_loopback_interface() or "",
        **environ,
    }
    logs = [folder / f"log{rank}" for rank in ranks]
    started = []
    for rank, log in zip(ranks, logs, strict=True):
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "SLURMD_NODENAME": nodes.format(rank=rank),
        }
        started.append(Command(["python", "-c", code], log, environ=common | own).start())
    for process in started:
        process.join(120)
    return [(process.exitcode, log.read_text()) for process, log in zip(started, logs, strict=True)]


def write_program(file: Path, words: str) -> None:
    file.write_text(f"#!/bin/sh\n{words}\n")
    file.chmod(0o755)


@pytest.mark.parametrize("size", [1, 2])
def test_healthy_ranks_add_up_and_report_their_speed(tmp_path: Path, size: int) -> None:
    (code, said), *others = check_nodes(tmp_path, range(size), size)
    assert (code, others) == (0, [(0, "")] * (size - 1)), said
    assert said.startswith(f"{size} ranks on {NODE} add up 64 MiB by gloo in ")


@pytest.mark.parametrize(
    ("nvidia_smi", "dcgmi", "faults"),
    [
        (None, "exit 1", []),  # as without a host engine
        (None, "[ $1 = discovery ] || { echo Fail: PCIe; exit 9; }", ["dcgmi diag -r 1 ended with "
                                                                      "exit code 9: Fail"]),
        ("echo lost; exit 15", None, ["nvidia-smi ended with exit code 15: lost"]),
        (
            "printf '0, 0\\n1, 3\\n2, [N/A]\\n'",
            "exit 0",
            ["nvidia-smi lists 3 GPUs, and torch 2", "GPU 1 has had 3 uncorrected memory errors"],
        ),
    ],
)  # fmt: skip
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs, and tools of its own")
def test_findings_of_a_node_s_tools_are_faults(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvidia_smi: str | None,
    dcgmi: str | None,
    faults: list[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, words in (("nvidia-smi", nvidia_smi), ("dcgmi", dcgmi)):
        if words is not None:
            write_program(tmp_path / name, words)
    found = list(find_node_faults())
    assert len(found) == len(faults)
    assert all(each.startswith(fault) for each, fault in zip(found, faults, strict=True)), found


def test_a_node_s_fault_is_printed_once_and_ends_all_ranks(tmp_path: Path) -> None:
    write_program(tmp_path / "nvidia-smi", "echo lost; exit 15")
    said = f"error: {NODE}: nvidia-smi ended with exit code 15: lost\n"
    assert check_nodes(tmp_path, [0, 1], 2) == [(1, said), (1, "")]


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    (code, said), _ = check_nodes(tmp_path, [0, 2], 4, wait_s=4.0)
    assert code == 1
    assert said.endswith(f"error: ranks [1, 3] did not connect within 4 s; connected:\n{NODE}\n")


def test_a_rank_without_the_first_names_its_node_and_the_address(tmp_path: Path) -> None:
    [(code, said)] = check_nodes(tmp_path, [1], 2, wait_s=0.5)
    assert code == 1
    assert f"error: rank 1 on {NODE} cannot reach rank 0 at 127.0.0.1:" in said


def test_gloo_without_a_network_is_named_with_its_variable(tmp_path: Path) -> None:
    [(code, said)] = check_nodes(tmp_path, [0], 1, GLOO_SOCKET_IFNAME="nowhere0")
    assert code == 1
    assert said.startswith(f"error: {NODE}: gloo: ") and "GLOO_SOCKET_IFNAME" in said


@pytest.mark.parametrize(
    ("bandwidth", "nodes", "floor", "fault"),
    [
        (
            79.0,
            "n1 " * 8 + "n2 " * 8,
            "",
            "9.88 GB/s a rank between nodes, by nccl: below HEALTH_CHECK_GBPS = 10",
        ),
        (80.0, "n1 " * 8 + "n2 " * 8, "", None),
        (79.0, "n1 " * 8 + "n2 " * 8, "9", None),
        (79.0, "n1 " * 8, "", None),  # one node has no network
        (9.0, "n1 n2", "", "9 GB/s a rank"),
        (9.0, "n1 n2", "ten", "HEALTH_CHECK_GBPS = ten: is no number"),
    ],
)
def test_a_slow_network_between_nodes_is_a_fault(
    bandwidth: float, nodes: str, floor: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLOOR, floor)
    found = check_network(bandwidth, nodes.split(), "nccl")
    assert found is None if fault is None else (found or "").startswith(fault)


def test_two_nodes_over_a_slow_network_fail_their_check(tmp_path: Path) -> None:
    (code, said), (other, _) = check_nodes(
        tmp_path, [0, 1], 2, nodes="n{rank}", HEALTH_CHECK_GBPS="1e6"
    )
    assert (code, other) == (1, 0)
    assert (
        "2 ranks on n0 n1 add up" in said
        and "error: " in said
        and "below HEALTH_CHECK_GBPS = 1e+06" in said
    )
