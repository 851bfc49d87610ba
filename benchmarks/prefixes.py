"""What a group costs whose prompt is in its pack once, over one whose prompt is there with each completion.

    python benchmarks/prefixes.py [--json] [--hidden 512] [--layers 2] [--repeats 3] [--only 0]

Each row is a group: tokens of its prompt, tokens of each response, completions, and the share of them that is kept. The
same policy trains on both kinds of packs in turns, on one rank and one thread; seconds are of forward and backward
passes together, medians. ``memory`` is how far a pass raises the process's memory. ``nothing_shared`` compares
``auto`` and ``off`` on groups of which one completion each is kept, whose packs are the same.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import psutil
import torch
from training_stages import alone

from megatron_dppo.init import write_model
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.microbatch import Microbatch, Responses
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.packing import CostModel, pack_sequences
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import assemble_policy

GROUPS = ((2000, 1000, 8), (500, 1000, 8), (2000, 1000, 16))
KEPT = (1.0, 0.5)
MAX_TOKENS = 32768
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--only", type=int, default=len(GROUPS), help="how many of the groups")
    for name, default in ("hidden", 512), ("layers", 2), ("repeats", 3):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, alone():
        actor = policy(Path(folder), arguments.hidden, arguments.layers)
        costs = CostModel.of_width(arguments.hidden)
        rows = []
        for prompt, response, completions in GROUPS[: arguments.only]:
            for kept in KEPT:
                samples = groups(1, prompt, response, round(kept * completions))
                row = {"prompt": prompt, "response": response, "completions": completions, "kept": kept}
                rows.append(row | compare(actor, samples, costs, arguments.repeats))
        apart = compare(actor, groups(4, 500, 1000, 1), costs, 2 * arguments.repeats)
    sizes = {name: getattr(arguments, name) for name in ("hidden", "layers", "repeats")}
    figures = {**sizes, "rows": rows, "nothing_shared": apart["backward_time_ratio"]}
    if not arguments.json:
        for row in rows:
            print("  ".join(f"{key} {value:g}" for key, value in row.items()))
        print("nothing shared", apart["backward_time_ratio"])
    print(json.dumps(figures))


def policy(folder: Path, hidden: int, layers: int) -> Actor:
    """Of random weights."""
    heads = hidden // 64
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": heads // 2}
    write_model(folder / "policy", **sizes, head_dim=64, ffn=3 * hidden, std=0.05)
    settings = [f"model.path={folder / 'policy'}", f"run.dir={folder}", f"pack.max_tokens={MAX_TOKENS}"]
    config = load_config(None, settings)
    world = initialize(config.layout, seed=1, timeout_s=60.0)
    return assemble_policy(config, world, temperature=1.0).actor


def groups(count: int, prompt: int, response: int, kept: int) -> list[TrainingSample]:
    """Random tokens; each group's completions follow its one prompt."""
    rng = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(3, 20, length).astype(np.int32)

    prompts = [tokens(prompt) for _ in range(count)]
    return [
        TrainingSample(
            prompt_ids=prompts[group],
            response_ids=tokens(response),
            engine_logprobs=np.zeros(response, np.float32),
            loss_mask=np.ones(response, bool),
            advantage=1.0,
            scale=1.0 / (count * kept * response),
            version=0,
            shared=prompt if completion else 0,
        )
        for group in range(count)
        for completion in range(kept)
    ]


def compare(actor: Actor, samples: list[TrainingSample], costs: CostModel, repeats: int) -> dict[str, float]:
    """Ratios of the packs that share nothing over those that share what is worth it."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("off", "auto"):
        packs, tokens = packed(samples, name, costs)
        found[name] = {"packs": packs, "tokens": tokens, "seconds": [], "memory": []}
    for turn in range(repeats + 1):
        for arm in found.values():
            seconds, memory = measure(actor, arm["packs"])
            if turn:  # the first warms up
                arm["seconds"].append(seconds)
                arm["memory"].append(memory)
    off, on = found["off"], found["auto"]
    return {
        "trained_tokens_ratio": off["tokens"] / on["tokens"],
        "backward_time_ratio": median(off["seconds"]) / median(on["seconds"]),
        "seconds": median(on["seconds"]),
        "memory_mib": median(on["memory"]),
        "memory_unshared_mib": median(off["memory"]),
    }


def packed(
    samples: list[TrainingSample], share: Literal["off", "auto"], costs: CostModel
) -> tuple[list[Microbatch], int]:
    """The packs, and the tokens in them without padding."""
    lengths = np.array([len(sample.prompt_ids) + len(sample.response_ids) for sample in samples])
    shared = [sample.shared for sample in samples]
    packing = pack_sequences(lengths, shared=shared, share=share, ranks=1, max_tokens=MAX_TOKENS, costs=costs)
    laid = [replace(sample, shared=common) for sample, common in zip(samples, packing.shared, strict=True)]
    packs = [build_pack([laid[k] for k in pack], packing.capacity, pad_id=0, align=1) for pack in packing.packs[0]]
    return [Microbatch(pack) for pack in packs], int(lengths.sum()) - packing.saved


def measure(actor: Actor, microbatches: list[Microbatch]) -> tuple[float, float]:
    """Seconds of forward and backward passes, and the MiB by which they raise the process's memory."""
    ctypes.CDLL(None).malloc_trim(0)  # what passes before have freed would be taken without a trace
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    actor.accumulate(microbatches, likelihood)
    seconds = time.perf_counter() - began
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return seconds, (int(status["VmHWM"].split()[0]) * 1024 - before) / MIB


def likelihood(responses: Responses) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(responses.logprobs * responses.arrays.scale).sum()
    return loss, {"train/loss": loss.detach()}


if __name__ == "__main__":
    main()
