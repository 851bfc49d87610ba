"""``python -m megatron_dppo.launch.health``: a check of a job's nodes before the run (``job.sh``).

srun or torchrun starts one process for each rank.

- The first process of each node queries ``nvidia-smi`` for memory errors, and DCGM for the quick
  diagnosis, if installed.
- All ranks connect by gloo and sum a tensor: by NCCL if torch sees GPUs, else by gloo.
- Rank 0 prints each fault, with exit code 1; or the time of the sum, with exit code 0.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_dppo.launch.start import (
    build_torch_environment,
    get_single_rank_environment,
    is_srun_task,
)

WAIT_S = 120.0
"""Longest wait of a rank for the other ranks, in seconds."""
MIB = {"gloo": 64, "nccl": 1024}
"""Size of the summed tensor by backend, in MiB; on GPUs large, so that latency between many nodes
is small."""
ROUNDS = 5
FLOOR = "HEALTH_CHECK_GBPS"
"""Environment variable with the smallest allowed bandwidth of a rank between nodes, in GB/s."""
FLOORS = {"gloo": 0.0, "nccl": 10.0}
"""Default of ``FLOOR``. NCCL over TCP, the silent fallback without InfiniBand's libraries, is
slower."""
DIAGNOSIS_S = 300.0
DCGM = ("dcgmi", "discovery", "-l"), ("dcgmi", "diag", "-r", "1")
"""Commands of DCGM; the second works only if the first finds a host engine."""
ERRORS = (
    "nvidia-smi",
    "--query-gpu=index,ecc.errors.uncorrected.volatile.total",
    "--format=csv,noheader,nounits",
)


def find_node_faults() -> Iterator[str]:
    """Yield the faults that the node's own tools find."""
    if shutil.which("nvidia-smi"):
        code, output = _run_command(*ERRORS)
        if code:
            yield f"nvidia-smi ended with exit code {code}: {output[-200:]}"
        elif not torch.cuda.is_available():
            yield (
                f"nvidia-smi lists {len(output.splitlines())} GPUs, and torch {torch.__version__} "
                "sees none"
            )
        # Memory errors are counted from the start of the driver.
        for gpu, _, count in (line.partition(", ") for line in output.splitlines() if not code):
            # A GPU that does not count errors has [N/A].
            if count.isdecimal() and int(count):
                yield f"GPU {gpu} has had {count} uncorrected memory errors"
    if shutil.which("dcgmi") and _run_command(*DCGM[0])[0] == 0:
        code, output = _run_command(*DCGM[1])
        if code:
            yield f"dcgmi diag -r 1 ended with exit code {code}: {output[-200:]}"


def _run_command(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DIAGNOSIS_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {DIAGNOSIS_S:.0f} s"
    if done.returncode:
        return done.returncode, " ".join(f"{done.stdout}\n{done.stderr}".split())
    return done.returncode, done.stdout


def time_all_reduce(rank: int, size: int, mib: int, group: dist.ProcessGroup | None) -> float:
    """Return the shortest time of several sums over all ranks, in seconds. Collective.

    Raises:
        RuntimeError: a sum is wrong.
    """
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    times = []
    for _ in range(ROUNDS):
        tensor = torch.full((mib * 2**18,), rank + 1.0, device=device)
        # The barrier uses gloo, like a run's control group.
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        # The clock stops after this check, because only reading a result waits for the device.
        wrong = int((tensor != size * (size + 1) / 2).sum())
        times.append(time.perf_counter() - began)
        if wrong:
            raise RuntimeError(
                f"the sum over all ranks is wrong in {wrong} of {tensor.numel()} places"
            )
    return min(times)


def check_network(bandwidth: float, nodes: Sequence[str], backend: str) -> str | None:
    """Return the fault of a network between nodes that is slower than ``HEALTH_CHECK_GBPS``.

    Args:
        bandwidth: bus bandwidth of a sum over all ranks, in GB/s.
        nodes: node of each rank.
        backend: ``gloo`` or ``nccl``.
    """
    given = os.environ.get(FLOOR, "")
    try:
        least = float(given) if given else FLOORS[backend]
    except ValueError:
        return f"{FLOOR} = {given}: is no number of GB/s"
    ranks = Counter(nodes)
    # The bus bandwidth is the bandwidth of a whole node's network.
    each = bandwidth / max(ranks.values())
    if len(ranks) == 1 or each >= least:
        return None
    hint = "with NCCL_DEBUG=INFO, NCCL names its network: NET/IB is InfiniBand, NET/Socket is TCP"
    return f"{each:.3g} GB/s a rank between nodes, by {backend}: below {FLOOR} = {least:g}; {hint}"


def main(wait_s: float = WAIT_S) -> int:
    """Check this rank's node, sum a tensor with the other ranks, and return the exit code."""
    if is_srun_task(os.environ):
        os.environ.update(build_torch_environment(os.environ))
    environment = {**get_single_rank_environment(), **os.environ}
    rank = int(environment["RANK"])
    size = int(environment["WORLD_SIZE"])
    local = int(environment["LOCAL_RANK"])
    port = int(environment["MASTER_PORT"])
    # torchrun's agent already has a store at this address.
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host = environment["MASTER_ADDR"]
    limit = timedelta(seconds=wait_s)
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        store = dist.TCPStore(
            host, port, size, is_master=hosts, timeout=limit, wait_for_workers=False
        )
    except dist.DistError as error:
        why = str(error).splitlines()[0]
        print(f"error: rank {rank} on {node} cannot reach rank 0 at {host}:{port}: {why}")
        return 1
    store.set(f"node {rank}", node)
    nodes = [f"node {each}" for each in range(size)]
    try:
        store.wait(nodes, limit)
    except dist.DistError:
        # Print on rank 0 alone; srun ends the other ranks.
        if rank == 0:
            there = {each for each in range(size) if store.check([nodes[each]])}
            print(
                f"error: ranks {sorted({*range(size)} - there)} did not connect within "
                f"{wait_s:g} s; connected:"
            )
            print(*sorted({store.get(nodes[each]).decode() for each in there}))
        return 1
    store.set(f"faults {rank}", "\n".join(find_node_faults() if local == 0 else ()))
    store.set_timeout(timedelta(seconds=2 * DIAGNOSIS_S))
    found = [
        (store.get(nodes[each]).decode(), store.get(f"faults {each}").decode())
        for each in range(size)
    ]
    if any(faults for _, faults in found):
        if rank == 0:
            for name, faults in found:
                for line in faults.splitlines():
                    print(f"error: {name}: {line}")
            # Wait, because the other ranks still read the store, which ends with this process.
            time.sleep(1.0)
        return 1
    gpus = torch.cuda.device_count()
    by = "nccl" if gpus else "gloo"
    if gpus:
        torch.cuda.set_device(0 if gpus == 1 else local)
    # Name the backend in use, because an error may come from either backend.
    trying = "gloo"
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        trying = by
        group = dist.new_group(backend=by, timeout=limit) if gpus else None
        seconds = time_all_reduce(rank, size, MIB[by], group)
        dist.destroy_process_group()
    except RuntimeError as error:
        hint = f"{trying.upper()}_SOCKET_IFNAME names the network's interface between nodes"
        print(f"error: {node}: {trying}: {str(error).splitlines()[0]}; {hint}")
        return 1
    if rank:
        return 0
    among = [name for name, _ in found]
    bandwidth = 1e-9 * 2 * (size - 1) / size * MIB[by] * 2**20 / seconds
    figures = f"{1e3 * seconds:.1f} ms: {bandwidth:.2f} GB/s of bus bandwidth"
    print(
        f"{size} ranks on {' '.join(dict.fromkeys(among))} add up {MIB[by]} MiB by {by} in "
        f"{figures}"
    )
    if fault := check_network(bandwidth, among, by):
        print(f"error: {fault}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
