"""Settings with which a benchmark starts real servers on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_dppo.errors import UserError

SGLANG_ON_CPU = Path(__file__).parents[1] / "tests" / "servers" / "sglang_cpu" / "server.py"
PYTHONS = {"sglang": "SGLANG_PYTHON", "vllm": "VLLM_PYTHON"}
"""Environment variables with the interpreters of the servers' environments; scripts/install_servers.sh makes both."""


def server_settings(engine: str, tp: Sequence[int], policy: Path, folder: Path) -> list[str]:
    """
    Args:
        engine: ``sglang`` or ``vllm``.
        tp: tensor-parallel ranks of each server.
        policy: Hugging Face directory.
        folder: for logs.

    Raises:
        UserError: the environment variable with the interpreter is not set.
    """
    if (python := os.environ.get(PYTHONS[engine])) is None:
        remedy = f"Run `source scripts/install_servers.sh`, or set it to a Python that has {engine}"
        raise UserError(PYTHONS[engine], "", "is not set", remedy)
    settings = [
        f"run.dir={folder}",
        f"model.path={policy}",
        "data.max_prompt_tokens=64",
        "rollout.max_response_tokens=512",
        f"rollout.engine={engine}",
        f"rollout.launch.count={len(tp)}",
        f"rollout.launch.tp=[{','.join(map(str, tp))}]",
        "rollout.launch.first_port=27000",
    ]
    cuda = torch.cuda.is_available()
    if engine == "sglang":
        start = [python, "-m", "sglang.launch_server"] if cuda else [python, str(SGLANG_ON_CPU)]
    else:
        start = [python, "-m", "vllm.entrypoints.openai.api_server"]
        if not cuda:
            settings.append("rollout.launch.flags=[--enforce-eager,--max-model-len,1024,--max-num-seqs,64]")
            settings.append("rollout.launch.env=[VLLM_CPU_KVCACHE_SPACE=1,HF_HUB_OFFLINE=1,OMP_NUM_THREADS=1]")
    return [*settings, f"rollout.launch.command=[{','.join(start)}]"]
