"""Tokens per second through our client, against a bare HTTP loop that sends the same requests to the same server.

    source scripts/install_servers.sh
    python benchmarks/rollout.py [--json] [--engine sglang] [--prompts 48] [--samples 8] [--tokens 96] [--pairs 5]
                                 [setting=value …]

The bare loop has the bodies of its requests ready, posts them all at once with aiohttp, and counts the tokens in the
answers; it checks nothing and makes no completions. Decoding is greedy, so that both ask for the very same tokens. The
two alternate, after one pass of each that is not timed; ratios are taken within a pair, and their median counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29612")

import aiohttp
import numpy as np
import orjson
import torch
from servers_here import server_settings

from megatron_dppo.bridge.stream import weight_stream
from megatron_dppo.init import write_model
from megatron_dppo.parallel.world import initialize, shut_down
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Sampling, generate
from megatron_dppo.rollout.servers.engine import ServerEngine
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import assemble_policy


def ours(engine: ServerEngine, prompts: list[Prompt], sampling: Sampling) -> tuple[int, float]:
    start = time.perf_counter()
    groups = generate(engine, prompts, sampling)
    return sum(len(c.token_ids) for group in groups for c in group), time.perf_counter() - start


def bare(url: str, secret: str, bodies: list[bytes], path: str) -> tuple[int, float]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}

    async def one(session: aiohttp.ClientSession, body: bytes) -> int:
        async with session.post(url + path, data=body, headers=headers) as answer:
            said = orjson.loads(await answer.read())
        choices = said if isinstance(said, list) else said["choices"]
        return sum(len(choice.get("output_ids") or choice["token_ids"]) for choice in choices)

    async def all_of_them() -> int:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return sum(await asyncio.gather(*(one(session, body) for body in bodies)))

    start = time.perf_counter()
    return asyncio.run(all_of_them()), time.perf_counter() - start


def requests(engine: str, prompts: list[Prompt], sampling: Sampling) -> tuple[str, list[bytes]]:
    """The route, and what our client posts to it."""
    shared = {"n": sampling.samples, "temperature": 0.0, "stop_token_ids": [], "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    if engine == "sglang":
        more = {"sampling_params": shared | {"max_new_tokens": sampling.max_tokens}, "return_logprob": True}
        return "/generate", [orjson.dumps({"input_ids": p.token_ids.tolist()} | more) for p in prompts]
    vllm = shared | {"max_tokens": sampling.max_tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False, "n": 1}
    bodies = [orjson.dumps({"token_ids": p.token_ids.tolist(), "sampling_params": vllm}) for p in prompts]
    return "/inference/v1/generate", bodies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "policy")
        write_model(place, hidden=192, layers=2, heads=4, kv_heads=2, head_dim=64, ffn=640, std=0.2)
        words = server_settings(chosen.engine, [1], place, Path(folder, "run"))
        config = load_config(None, [*words, *chosen.settings])
        world = initialize(config.layout, seed=1, timeout_s=600.0)
        policy = assemble_policy(config, world, temperature=1.0)
        engine = ServerEngine(config, world, policy.shape, print)
        try:
            engine.update_weights(partial(weight_stream, policy.actor.chunks, world), 0)
            engine.resume()
            draw = np.random.default_rng(0)
            prompts = [Prompt(i, draw.integers(3, 40, 32).astype(np.int32), "", "") for i in range(chosen.prompts)]
            sampling = Sampling(chosen.samples, chosen.tokens, 0.0, (), seed=1)
            path, bodies = requests(chosen.engine, prompts, sampling)
            url, secret = engine.servers[0].url, engine.secret or ""
            rates = []
            for pair in range(chosen.pairs + 1):
                through = ours(engine, prompts, sampling)
                directly = bare(url, secret, bodies, path)
                if pair:
                    rates.append((through[0] / through[1], directly[0] / directly[1]))
        finally:
            engine.close()
        shut_down()
    result = {
        "engine": chosen.engine,
        "tokens_per_second": median(rate for rate, _ in rates),
        "bare_tokens_per_second": median(rate for _, rate in rates),
        "ours_over_bare": median(rate / directly for rate, directly in rates),
        "pairs": [[round(rate), round(directly)] for rate, directly in rates],
    }
    print(json.dumps(result) if chosen.json else result)


if __name__ == "__main__":
    main()
