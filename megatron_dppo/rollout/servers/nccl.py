"""NCCL's version and environment variables, which the trainer and its servers must share; every torch brings its own
version."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata

from megatron_dppo.errors import UserError

ASK_S = 120.0
"""How long an interpreter may take to import torch."""
TOLD = re.compile(r"Mismatched NCCL version detected\s*: rank \d+ version (\d+) rank \d+ version (\d+)")
"""NCCL's message about two versions, on every rank."""


def loaded() -> str | None:
    """Version of the NCCL that torch uses in this process, ``2.29.7``; None without CUDA.

    That is the library which is loaded, be it preloaded or newer than the one that torch was built with.
    """
    # Its source is also run by servers' interpreters, which have torch and nothing of this project.
    import ctypes
    import os

    import torch

    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:  # a torch that has it built in
        return ".".join(map(str, torch.cuda.nccl.version()[:3]))
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


def of_command(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Version of the NCCL that a server's command would use; None if unknown, or without NCCL.

    Args:
        command: what starts the server. The words before ``-m``, or before a script, are taken for an interpreter.
        environ: of the server.
    """
    end = next((i for i, word in enumerate(command) if word == "-m" or word.endswith(".py")), 0)
    if end == 0:
        return None
    program = f"{inspect.getsource(loaded)}\nprint(loaded() or '')"
    try:
        asked = subprocess.run(
            [*command[:end], "-c", program], env=environ, capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = asked.stdout.split()
    return said[-1] if said else None


def packages() -> list[str]:
    """The packages that hold NCCL, as pip has them: ``nvidia-nccl-cu13 2.29.7``."""
    found = []
    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def refuse_two(setting: str, value: object, ours: str | None, theirs: str | None) -> None:
    """
    Args:
        setting, value: what names the server.
        ours: of the trainer; None where NCCL does not connect the two.
        theirs: of the server; None where that is not known.

    Raises:
        UserError: the two differ.
    """
    if ours is not None and theirs is not None and ours != theirs:
        remedy = _remedy(ours, theirs)
        raise UserError(setting, value, f"has NCCL {theirs}, and the trainer has {ours}: no group has two", remedy)


def refuse_told(said: str) -> None:
    """
    Args:
        said: what went wrong with a group, in whoever's words.

    Raises:
        UserError: it is that the versions differ.
    """
    if (told := TOLD.search(said)) is not None:
        codes = sorted({int(code) for code in told.groups()})
        names = [f"{code // 10000}.{code // 100 % 100}.{code % 100}" for code in codes]
        problem = f"needs one NCCL for the trainer and its servers, and they have {' and '.join(names)}"
        raise UserError("rollout.sync.transport", "collective", problem, _remedy(*names))


def _remedy(*versions: str) -> str:
    newer = max(versions, key=lambda version: [int(part) for part in version.split(".")])
    package = f"nvidia-nccl-cu13=={newer}"
    return (
        f"Run pip install --no-deps {package} (cu12 with a torch of CUDA 12) in the environment of the older one, "
        "or set rollout.sync.transport=disk"
    )
