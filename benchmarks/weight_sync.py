"""A new version of the weights reaches real servers: seconds from pause to continue, and the transfer against a bare
broadcast of the same bytes.

    source scripts/install_servers.sh
    python benchmarks/weight_sync.py [--json] [--engine sglang] [--tp 1 2] [--mb 100] [--pairs 5]
                                     [--transports collective disk] [setting=value …]

One trainer rank, one thread. The yardstick is gloo's broadcast from this process to as many idle processes as the
servers have ranks, in pieces of a bucket's size, with buffers that were touched before: it neither tells anybody what
comes, nor loads what came. Each pair is one update and, right after it, one bare broadcast; ratios are taken within a
pair, and their median counts. ``control_ms`` is everything from pause to continue that is not the transfer.
With ``--transports collective -- model.lora.rank=16 rollout.sync.adapter=true`` adapters travel alone, with a request.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from harness import MIB, arguments, be_the_only_rank, finish

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.init import write_model
from megatron_dppo.parallel.world import World, initialize, shut_down
from megatron_dppo.rollout.servers.engine import ServerEngine
from megatron_dppo.rollout.servers.transports import BUCKET_MIB
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy

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


class BareBroadcast:
    """Processes that receive, and nothing else."""

    def __init__(self, receivers: int, total: int, bucket: int) -> None:
        self._pieces = [bucket] * (total // bucket) + ([total % bucket] if total % bucket else [])
        size = receivers + 1
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_receive, args=(theirs, store.port, rank, size, self._pieces), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._store = store
        self._group = _group(store, 0, size)
        self._data = torch.ones(max(self._pieces), dtype=torch.uint8)

    def seconds(self) -> float:
        """Of one broadcast, until the last receiver has the last piece."""
        for pipe in self._pipes:
            pipe.send("receive")
        for pipe in self._pipes:
            pipe.recv()  # it stands ready
        start = time.perf_counter()
        for piece in self._pieces:
            _broadcast(self._group, self._data[:piece])
        for pipe in self._pipes:
            pipe.recv()
        return time.perf_counter() - start

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def _receive(pipe: Connection, port: int, rank: int, size: int, pieces: Sequence[int]) -> None:
    torch.set_num_threads(1)
    group = _group(dist.TCPStore("127.0.0.1", port, size, is_master=False), rank, size)
    data = torch.ones(max(pieces), dtype=torch.uint8)
    while pipe.recv() is not None:
        pipe.send("ready")
        for piece in pieces:
            _broadcast(group, data[:piece])
        pipe.send("received")


def _group(store: dist.Store, rank: int, size: int) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, size, timedelta(seconds=120))


def _broadcast(group: dist.ProcessGroupGloo, data: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([data], options).wait()


def measure(config: Config, world: World, policy: PolicyParts, *, pairs: int) -> dict[str, Any]:
    """Updates by one transport, each with its bare broadcast."""
    engine: ServerEngine = ServerEngine(config, world, policy.shape, print)
    rows, bare = [], None
    try:
        for version in range(pairs + 1):  # the first joins the group and is not counted
            start = time.perf_counter()
            engine.pause()
            engine.update_weights(policy.source, version)
            engine.resume()
            seconds = time.perf_counter() - start
            timings = engine.timings
            if bare is None:
                ranks = sum(server.ranks for server in engine.servers)
                bare = BareBroadcast(
                    ranks, timings.bytes, (config.rollout.sync.bucket_mib or BUCKET_MIB[world.device.type]) * MIB
                )
                bare.seconds()
                continue
            rows.append({"seconds": seconds, "bare": bare.seconds(), **asdict(timings)})
    finally:
        engine.close()
        if bare is not None:
            bare.close()
    return {
        "seconds": median(row["seconds"] for row in rows),
        "transfer_seconds": median(row["transfer"] for row in rows),
        **{f"{name}_ms": 1e3 * median(row[name] for row in rows) for name in ("pause", "end", "resume")},
        "control_ms": 1e3 * median(row["seconds"] - row["transfer"] for row in rows),
        "bare_seconds": median(row["bare"] for row in rows),
        "transfer_over_bare": median(row["transfer"] / row["bare"] for row in rows),
        "gb_per_second": rows[0]["bytes"] / 1e9 / median(row["transfer"] for row in rows),
        "pairs": [{key: round(value, 4) for key, value in row.items()} for row in rows],
    }


def main() -> None:
    parser = arguments(
        __doc__,
        tp=([1, 2], "ranks of each server"),
        mb=(100, "size of the model, fp32"),
        transports=["collective", "disk"],
        pairs=5,
    )
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    options = parser.parse_args()
    torch.set_num_threads(1)
    be_the_only_rank()
    results: dict[str, Any] = {"engine": options.engine, "tp": options.tp}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "policy")
        layers = max(1, round((options.mb * 1e6 / 4 - 2048 * 512) / (512 * (8 * 64 * 3 + 3 * 1536))))
        weights = write_model(
            place, hidden=512, layers=layers, heads=8, kv_heads=4, head_dim=64, ffn=1536, vocab_size=2048
        )
        results["model_mb"] = weights * 4 / 1e6
        for transport in options.transports:
            words = server_settings(options.engine, options.tp, place, Path(folder, transport))
            config = load_config(None, [*words, f"rollout.sync.transport={transport}", *options.settings])
            world = initialize(config.layout, seed=1, timeout_s=600.0)
            policy = assemble_policy(config, world, temperature=1.0)
            results[transport] = measure(config, world, policy, pairs=options.pairs)
        shut_down()
    finish(results, options)


if __name__ == "__main__":
    main()
