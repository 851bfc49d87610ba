"""Versions of NCCL, which must be equal in trainer and servers; every torch installs one."""

from __future__ import annotations

import re
from importlib import metadata

import torch.distributed as dist

from megatron_dppo.errors import UserError

MISMATCH = re.compile(
    r"Mismatched NCCL version detected\s*: rank \d+ version (\d+) rank \d+ version (\d+)"
)
"""NCCL's error message about two versions, raised on every rank."""


def get_loaded_version() -> str | None:
    """Return the NCCL version of this process, ``2.29.7``; None for a torch without NCCL."""
    if not dist.is_nccl_available():
        return None
    # Torch's stub declares a ``self``, so mypy misses an argument.
    version = dist.ProcessGroupNCCL.get_runtime_nccl_version()  # type: ignore[call-arg]
    return ".".join(map(str, version[:3]))


def list_packages() -> list[str]:
    """List the installed packages with NCCL in pip's notation: ``nvidia-nccl-cu13 2.29.7``."""
    found = []
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def check_mismatch(message: str) -> None:
    """Raise a UserError if a failed group's message reports two NCCL versions."""
    if (found := MISMATCH.search(message)) is None:
        return
    older, newer = (
        f"{code // 10000}.{code // 100 % 100}.{code % 100}"
        for code in sorted(map(int, found.groups()))
    )
    problem = f"needs one NCCL for the trainer and its servers, and they have {older} and {newer}"
    remedy = (
        f"Run pip install --no-deps nvidia-nccl-cu13=={newer} (cu12 with a torch of CUDA 12) in "
        "the environment of the older one, or set rollout.sync.transport=disk"
    )
    raise UserError("rollout.sync.transport", "collective", problem, remedy)
