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

import argparse
import json
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
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29611")

import torch
import torch.distributed as dist
from servers_here import server_settings

from megatron_dppo.config import Config
from megatron_dppo.init import write_model
from megatron_dppo.parallel.world import World, initialize, shut_down
from megatron_dppo.rollout.servers.engine import ServerEngine
from megatron_dppo.rollout.servers.transports import BUCKET_MIB
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy

MIB = 2**20


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
        "pause_ms": 1e3 * median(row["pause"] for row in rows),
        "transfer_seconds": median(row["transfer"] for row in rows),
        "end_ms": 1e3 * median(row["end"] for row in rows),
        "resume_ms": 1e3 * median(row["resume"] for row in rows),
        "control_ms": 1e3 * median(row["seconds"] - row["transfer"] for row in rows),
        "bare_seconds": median(row["bare"] for row in rows),
        "transfer_over_bare": median(row["transfer"] / row["bare"] for row in rows),
        "gb_per_second": rows[0]["bytes"] / 1e9 / median(row["transfer"] for row in rows),
        "pairs": [{key: round(value, 4) for key, value in row.items()} for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="ranks of each server")
    parser.add_argument("--mb", type=int, default=100, help="size of the model, fp32")
    parser.add_argument("--transports", nargs="+", default=["collective", "disk"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"engine": chosen.engine, "tp": chosen.tp}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "policy")
        layers = max(1, round((chosen.mb * 1e6 / 4 - 2048 * 512) / (512 * (8 * 64 * 3 + 3 * 1536))))
        weights = write_model(
            place, hidden=512, layers=layers, heads=8, kv_heads=4, head_dim=64, ffn=1536, vocab_size=2048
        )
        results["model_mb"] = weights * 4 / 1e6
        for transport in chosen.transports:
            words = server_settings(chosen.engine, chosen.tp, place, Path(folder, transport))
            config = load_config(None, [*words, f"rollout.sync.transport={transport}", *chosen.settings])
            world = initialize(config.layout, seed=1, timeout_s=600.0)
            policy = assemble_policy(config, world, temperature=1.0)
            results[transport] = measure(config, world, policy, pairs=chosen.pairs)
            if not chosen.json:
                print(transport, {key: value for key, value in results[transport].items() if key != "pairs"})
        shut_down()
    if chosen.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
