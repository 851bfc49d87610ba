"""What starts a server of either kind: its command line and environment, and where its secret goes."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_dppo.config import Config, RolloutConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DEFAULT_COMMANDS = {"sglang": (sys.executable, "-m", "sglang.launch_server"), "vllm": ("vllm", "serve")}
OUR_FLAGS = {
    "sglang": ("--model-path", "--model", "--host", "--port", "--tp", "--tp-size", "--tensor-parallel-size", "--dtype",
               "--pp-size", "--pipeline-parallel-size", "--api-key", "--admin-api-key", "--config"),
    "vllm": ("--model", "--host", "--port", "--tensor-parallel-size", "-tp", "--dtype", "--api-key"),
}  # fmt: skip
"""What ``rollout.launch.flags`` may not say: it would contradict what is known of a server, or show its secret."""

MEMORY_FLAGS = {
    "sglang": ("--mem-fraction-static", "a share of what is free when it starts"),
    "vllm": ("--gpu-memory-utilization", "a share of the whole GPU"),
}
"""What bounds a server's memory, and what that is a share of."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of torch's allocator. Segments that expand are good for training; servers that give memory back refuse
them."""


def tensor_parallel(rollout: RolloutConfig) -> tuple[int, ...]:
    """Tensor-parallel ranks of each server that the run starts."""
    count, tp = rollout.launch.count, rollout.launch.tp
    return (tp if isinstance(tp, tuple) else (tp,) * count)[:count]


def gpus_to_reserve(rollout: RolloutConfig) -> int:
    """GPUs beside the trainer's that servers will want on a machine that has any."""
    return 0 if rollout.colocated else sum(tensor_parallel(rollout))


def base_command(rollout: RolloutConfig) -> tuple[str, ...]:
    """What starts a server, without flags."""
    return rollout.launch.command or DEFAULT_COMMANDS[rollout.engine]


def server_command(config: Config, index: int, *, host: str, port: int, secret_file: Path) -> list[str]:
    """The command line of one server. Everybody on the machine can read it, so the secret is not in it.

    Args:
        config: of the run.
        index: of the server.
        host, port: where it shall listen.
        secret_file: YAML with the secret, where the kind takes one.
    """
    rollout, tp = config.rollout, tensor_parallel(config.rollout)[index]
    model, ranks = {"sglang": ("--model-path", "--tp"), "vllm": ("--model", "--tensor-parallel-size")}[rollout.engine]
    words = [*base_command(rollout), model, str(Path(config.model.path).absolute()), "--host", host]
    words += ["--port", str(port), ranks, str(tp), "--dtype", DTYPES[config.model.dtype]]
    if config.model.checkpoint is not None:
        words += ["--load-format", "dummy"]  # the directory may hold no weights; the first sync brings them
    return [*words, *_kind_flags(rollout, secret_file), *rollout.launch.flags]


def _kind_flags(rollout: RolloutConfig, secret_file: Path) -> list[str]:
    if rollout.engine == "sglang":
        memory = ["--enable-memory-saver"] if rollout.colocated else []
        return ["--config", str(secret_file), "--skip-tokenizer-init", *memory]
    from megatron_dppo.rollout.servers.vllm import server_flags

    return server_flags(secret=True, sleeps=rollout.colocated)


def server_environment(rollout: RolloutConfig, *, secret: str) -> dict[str, str]:
    """Environment variables that its kind wants of a server, besides those of ``rollout.launch.env``."""
    if rollout.engine == "sglang":
        return {}
    from megatron_dppo.rollout.servers.vllm import server_environment as of_vllm

    return {"VLLM_API_KEY": secret, **of_vllm()}
