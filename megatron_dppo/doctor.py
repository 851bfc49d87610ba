"""``megatron-dppo doctor``: installed packages, and a run's resulting choices."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from megatron_dppo import __version__
from megatron_dppo.config.rollout import ServerKind
from megatron_dppo.launch.start import count_usable_cores
from megatron_dppo.rollout.servers.launch import load_engine_spec

PACKAGES: dict[str, tuple[str, str]] = {
    "torch": ("torch", "torch"),
    "megatron-core": ("megatron-core", "megatron.core"),
    "transformers": ("transformers", "transformers"),
    "Transformer Engine": ("transformer-engine", "transformer_engine"),
    # The registry's ``apex`` is another project, so its module proves Apex.
    "Apex": ("apex", "apex.multi_tensor_apply"),
    "SGLang": ("sglang", "sglang"),
    "vLLM": ("vllm", "vllm"),
}
"""Distribution and proving module by shown name."""

REQUIRED = ("torch", "megatron-core", "transformers")


def print_diagnostics(*, as_json: bool) -> int:
    """Print the findings; return 1 if a required package is missing."""
    findings = collect_diagnostics()
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        _print_table(findings)
    return 1 if any(findings["installed"][name] is None for name in REQUIRED) else 0


def collect_diagnostics() -> dict[str, Any]:
    """Return ``installed`` (versions or None), ``machine``, ``will_use``."""
    installed = {name: _find_version(*where) for name, where in PACKAGES.items()}
    cuda = _collect_cuda() if installed["torch"] else {"cuda": None, "nccl": None, "gpus": []}
    return {
        "megatron-dppo": __version__,
        "installed": {"Python": platform.python_version(), **installed},
        "machine": {
            "cores": count_usable_cores(),
            "memory_gib": round(_get_memory_gib(), 1),
            **cuda,
        },
        "will_use": _describe_choices(installed, on_gpu=bool(cuda["gpus"])),
    }


def _describe_choices(installed: dict[str, str | None], *, on_gpu: bool) -> dict[str, str]:
    engine = on_gpu and installed["Transformer Engine"] is not None
    fused = "Transformer Engine" if engine else "Apex" if on_gpu and installed["Apex"] else None
    # List servers that a run can start without settings.
    found = [kind for kind in get_args(ServerKind) if load_engine_spec(kind).installed]
    return {
        "device": "CUDA over NCCL" if on_gpu else "CPU over gloo",
        "layers (model.spec auto)": "te for bf16, torch for fp32" if engine else "torch",
        "optimizer": f"fused Adam of {fused}" if fused else "Adam of torch",
        "rollouts (rollout.engine)": "local",
        "servers (rollout.launch)": ", ".join(
            [*found, "servers of rollout.launch.command and rollout.servers"]
        ),
    }


def _find_version(distribution: str, module: str) -> str | None:
    """Return the version; None if the version or module is missing."""
    # Do not import, because a broken package may end the process.
    try:
        version = metadata.version(distribution)
        return version if importlib.util.find_spec(module) else None
    except (metadata.PackageNotFoundError, ModuleNotFoundError):
        return None


def _collect_cuda() -> dict[str, Any]:
    """Return CUDA, NCCL (loaded, torch's, pip's) and the GPUs."""
    import torch

    from megatron_dppo.rollout.servers.nccl import get_loaded_version, list_packages

    nccl = None
    if (version := get_loaded_version()) is not None:
        built = ".".join(map(str, torch.cuda.nccl.version()[:3]))
        nccl = {"loaded": version, "built_with": built, "packages": list_packages()}
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    sizes = [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]
    return {"cuda": torch.version.cuda, "nccl": nccl, "gpus": sizes}


def _get_memory_gib() -> float:
    """Return the machine's memory, or the container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    return total / 2**30


def _print_table(findings: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    machine = findings["machine"]
    nccl = findings["machine"]["nccl"]
    # Show all NCCL versions, because servers must have the same version.
    if nccl is not None:
        nccl = (
            f"{nccl['loaded']} "
            f"({', '.join([*nccl['packages'], 'torch was built with ' + nccl['built_with']])})"
        )
    table = Table(
        title=f"megatron-dppo {findings['megatron-dppo']}",
        title_justify="left",
        box=None,
        show_header=False,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, version in findings["installed"].items():
        missing = (
            "[bold red]missing: nothing trains without it[/]"
            if name in REQUIRED
            else "[dim]not installed[/]"
        )
        table.add_row(name, version or missing)
    table.add_row()
    table.add_row("cores", str(machine["cores"]))
    table.add_row("memory", f"{machine['memory_gib']} GiB")
    table.add_row("CUDA", machine["cuda"] or "[dim]torch was built without it[/]")
    table.add_row("NCCL", nccl or "[dim]torch was built without it[/]")
    table.add_row("GPUs", "\n".join(machine["gpus"]) or "[dim]none[/]")
    table.add_row()
    for part, choice in findings["will_use"].items():
        table.add_row(part, f"[bold]{choice}[/]")
    Console(file=sys.stdout, highlight=False).print(table)
