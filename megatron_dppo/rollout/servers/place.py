"""Where the servers go that a run starts itself: the address they listen on, and their GPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.meeting import LOOPBACK, on_one_machine
from megatron_dppo.rollout.servers.kinds import tensor_parallel
from megatron_dppo.rollout.servers.launch import ServerProcess


def servers_to_start(config: Config, secret: str, environ: Mapping[str, str] = os.environ) -> list[ServerProcess]:
    """The servers of ``rollout.launch``, not yet started; for the run's first rank.

    Raises:
        UserError: if the GPUs are too few, or no address of this machine is fit for others to reach.
    """
    host = listening_address(environ)
    shares = gpu_shares(config, visible_gpus(environ), local_ranks(environ))
    return [ServerProcess(config, i, host=host, secret=secret, gpus=share) for i, share in enumerate(shares)]


def listening_address(environ: Mapping[str, str]) -> str:
    """Loopback where all ranks are on this machine, else the address at which they find rank 0."""
    if on_one_machine(environ):
        return LOOPBACK
    for name in (environ.get("MASTER_ADDR", ""), socket.gethostname()):
        for address in _addresses(name):
            if not address.startswith("127."):  # some systems give a machine's own name one of these
                return address
    raise UserError(
        "MASTER_ADDR",
        environ.get("MASTER_ADDR", ""),
        "is not an address at which ranks on other machines could reach a server that this one starts",
        "Set it to this machine's address in their network",
    )


def local_ranks(environ: Mapping[str, str]) -> int:
    """Ranks of the trainer on the machine of rank 0, as torchrun or srun has them."""
    per_node = environ.get("LOCAL_WORLD_SIZE") or environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return int(per_node.partition(",")[0].partition("(")[0])  # Slurm writes 8(x4),2


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES would name them."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def gpu_shares(config: Config, gpus: Sequence[str], local_ranks: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each server: the GPUs after those of the trainer's ranks, or, colocated, the same ones.

    Args:
        config: of the run.
        gpus: of this machine; without any, all shares are None.
        local_ranks: ranks of the trainer on this machine.

    Raises:
        UserError: if there are fewer GPUs than the servers need.
    """
    sizes = tensor_parallel(config.rollout)
    if not gpus:
        return [None] * len(sizes)
    colocated = config.rollout.colocated
    free = list(gpus[:local_ranks] if colocated else gpus[local_ranks:])
    if sum(sizes) > len(free):
        whose = "the trainer's ranks on it have" if colocated else f"its {local_ranks} ranks of the trainer leave"
        raise UserError(
            "rollout.launch.tp",
            config.rollout.launch.tp,
            f"{len(sizes)} servers need {sum(sizes)} GPUs on this machine, and {whose} {len(free)} of {len(gpus)}",
            "Lower rollout.launch.count or tp, or start servers elsewhere and name them in rollout.servers",
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [",".join(free[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]
