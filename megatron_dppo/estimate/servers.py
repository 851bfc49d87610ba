"""Memory of rollout servers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dppo.estimate.assumptions import GIB
from megatron_dppo.estimate.memory import (
    Memory,
    count_cache_bytes,
    count_parameter_kinds,
    count_resident_bytes,
    estimate_actor_memory,
    get_bucket_bytes,
)
from megatron_dppo.estimate.workload import Setup


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Memory of one GPU of a server, and its maximum of concurrent completions."""

    memory: Memory
    tokens: int
    """Capacity of the cache."""
    concurrency: int
    """Completions that fit into the cache, on average half decoded. An engine interrupts some when
    the cache is full."""

    @property
    def fits(self) -> bool:
        return self.memory.fits and self.concurrency >= 1


def estimate_memory(setup: Setup) -> tuple[Memory, ServerMemory]:
    """Estimate the memory of the trainer's fullest rank and of the server with the fewest ranks."""
    actor = estimate_actor_memory(setup)
    resident = count_resident_bytes(setup.config, actor) if setup.placement.shared else 0.0
    return actor, estimate_server_memory(setup, resident=resident)


def estimate_server_memory(setup: Setup, *, resident: float) -> ServerMemory:
    """Estimate the memory of the server with the fewest ranks, beside ``resident`` bytes of the
    trainer on the same GPU."""
    config = setup.config
    assume = setup.assume
    tp = min(setup.placement.servers)
    gpu_bytes = setup.gpu.memory_gib * GIB
    room = max(min(gpu_bytes * assume.server_memory_share, gpu_bytes - resident), 0.0)
    parts = {
        "weights": float(count_parameter_kinds(setup.shape).total * setup.width // tp),
        "sync": float(get_bucket_bytes(config)),
        "buffers": assume.server_buffers_gib * GIB,
    }
    per_token = count_cache_bytes(setup.shape, tp, setup.width)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    tokens = max(int((room - sum(parts.values())) / per_token), 0)
    # A server must hold a sequence of maximum length.
    parts["cache"] = float(max(tokens, longest) * per_token)
    most = 10**9 if config.rollout.served else config.rollout.max_batch
    concurrency = int(tokens / (setup.prompt + setup.lengths.token_weighted_mean / 2))
    return ServerMemory(Memory(0, parts, room), tokens, min(concurrency, most))
