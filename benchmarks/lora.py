"""What training adapters saves over training all weights, and what merging them costs in bf16.

    python benchmarks/lora.py [--json] [--rank 16] [--hidden 512] [--layers 8] [--updates 8]

Two policies of the same weights, one with adapters on all matrices, are updated on the same packs on one rank and one
thread, in turns; seconds are medians. Then adapters are trained for as many updates in bf16. The trainer computes with
W and B A apart, servers get their sum, rounded once. ``merged_logprob_diff`` is the mean |log p| difference of the two,
which ``rollout.max_logprob_diff`` limits; ``untouched_logprob_diff`` is the same before the first update, when both
are one policy. ``update_lost`` is the part of the update that rounding takes: ‖merged − W − ΔW‖ / ‖ΔW‖ over all
matrices.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from training_stages import alone

from megatron_dppo.bridge.adapters import MergedParameters
from megatron_dppo.bridge.load import bind, bind_adapters
from megatron_dppo.config import Config, LoraConfig, replace
from megatron_dppo.init import write_model
from megatron_dppo.models.actor import Actor, learning_rate
from megatron_dppo.models.microbatch import Microbatch, Responses
from megatron_dppo.models.optimizer_state import optimizer_parts
from megatron_dppo.parallel.world import initialize
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts, assemble_frozen, assemble_policy
from megatron_dppo.trainer.checkpoint import Checkpoints

SAMPLES, TOKENS = 16, 128
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    for name, default in ("rank", 16), ("hidden", 512), ("layers", 8), ("updates", 8):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, alone():
        folder = Path(name)
        heads = arguments.hidden // 64
        sizes = {"hidden": arguments.hidden, "layers": arguments.layers, "heads": heads, "kv_heads": heads // 2}
        write_model(folder / "policy", **sizes, head_dim=64, ffn=3 * arguments.hidden, std=0.05)
        config = load_config(
            None,
            [f"model.path={folder / 'policy'}", "pack.max_tokens=1024", "optimizer.lr=2e-4", "rollout.temperature=1.0"],
        )
        adapted = replace(config, model=replace(config.model, lora=LoraConfig(rank=arguments.rank)))
        found = compare(folder, {"full": config, "lora": adapted}, arguments.updates)
        found |= rounding(folder, adapted, arguments.updates)
    figures = {**{name: getattr(arguments, name) for name in ("rank", "hidden", "layers", "updates")}, **found}
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key:28s} {value}")
    print(json.dumps(figures))


def compare(folder: Path, configs: dict[str, Config], updates: int) -> dict[str, Any]:
    """Bytes and seconds of both ways to train, and the second way's over the first's."""
    found: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    ready = {}
    for name, config in configs.items():
        config = replace(config, run=replace(config.run, dir=str(folder / name)))
        world = initialize(config.layout, seed=1, timeout_s=60.0)
        parts = assemble_policy(config, world, temperature=1.0)
        ready[name] = (parts, microbatches(parts))
        found[f"{name}_trained"] = sum(p.numel() for p in parts.actor.parameters() if p.requires_grad)
        found[f"{name}_optimizer_mib"] = optimizer_bytes(parts.actor) / MIB
        checkpoints = Checkpoints(config, world)
        checkpoints.save(parts.actor, 1, {})
        files = checkpoints.path(1).rglob("*")
        found[f"{name}_checkpoint_mib"] = sum(file.stat().st_size for file in files) / MIB
    for step in range(updates + 1):
        for name, (parts, batch) in ready.items():
            began = time.perf_counter()
            parts.actor.update(batch, likelihood, lr=learning_rate(parts.config.optimizer, step, updates))
            if step:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    for name, of_updates in seconds.items():
        found[f"{name}_update_seconds"] = median(of_updates)
    for what in ("trained", "optimizer_mib", "checkpoint_mib", "update_seconds"):
        found[f"{what}_ratio"] = found[f"lora_{what}"] / found[f"full_{what}"]
    return found


def optimizer_bytes(actor: Actor) -> int:
    """Adam's moments and fp32 gradients, and master weights where they are no views of the policy's own."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in actor.parameters()}
    total = 0
    for part in optimizer_parts(actor.optimizer):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                own = master.untyped_storage().data_ptr() not in weights
                moments = sum(value.nbytes for value in part.optimizer.state[master].values() if value.ndim)
                total += moments + (master.nbytes if own else 0)
    gradients = [p.main_grad.nbytes for p in actor.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    return total + sum(gradients)


def microbatches(parts: PolicyParts[Any]) -> list[Microbatch]:
    """Random samples, the same for every policy of one vocabulary."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, parts.shape.vocab_size, (SAMPLES, 2, TOKENS)).astype(np.int32)
    samples = [
        TrainingSample(
            prompt_ids=prompt[: TOKENS // 4],
            response_ids=response,
            engine_logprobs=np.zeros(TOKENS, np.float32),
            loss_mask=np.ones(TOKENS, bool),
            advantage=1.0,
            scale=1.0 / (SAMPLES * TOKENS),
            version=0,
        )
        for prompt, response in ids
    ]
    return [Microbatch(pack) for _, pack in parts.pack(samples)]


def likelihood(responses: Responses) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(responses.logprobs * responses.arrays.scale).sum()
    return loss, {"train/loss": loss.detach()}


def rounding(folder: Path, config: Config, updates: int) -> dict[str, float]:
    """How far the policy that servers get is from the one that is trained, in bf16."""
    model = replace(config.model, dtype="bf16", spec="torch")
    config = replace(config, model=model, run=replace(config.run, dir=str(folder / "rounded")))
    world = initialize(config.layout, seed=1, timeout_s=60.0)
    parts = assemble_policy(config, world, temperature=1.0)
    batch = microbatches(parts)
    found = {"untouched_logprob_diff": merged_difference(parts, config, batch, folder / "untouched")}
    for step in range(updates):
        parts.actor.update(batch, likelihood, lr=learning_rate(config.optimizer, step, updates))
    found["merged_logprob_diff"] = merged_difference(parts, config, batch, folder / "merged")
    chunks = parts.actor.chunks
    base, adapters = bind(chunks, world), bind_adapters(chunks, world)
    exact = {entry: weight.float() for entry, weight in base.items()}
    summed = MergedParameters(exact, adapters, config.model.lora.scale, world)
    merged = MergedParameters(base, adapters, config.model.lora.scale, world)
    lost = sum(float((merged[entry].float() - summed[entry]).square().sum()) for entry in base)
    update = sum(float((summed[entry] - exact[entry]).square().sum()) for entry in base)
    return {**found, "update_lost": (lost / update) ** 0.5}


def merged_difference(parts: PolicyParts[Any], config: Config, batch: list[Microbatch], out: Path) -> float:
    """Mean |log p difference| of the adapted policy and of what it exports."""
    parts.export(out, setting="run.dir")
    exported = replace(config.model, path=str(out), lora=LoraConfig())
    frozen = assemble_frozen(replace(config, model=exported), parts.world, temperature=1.0)
    packs = [microbatch.pack for microbatch in batch]
    ours, theirs = (each.log_probabilities(packs) for each in (parts.actor, frozen.actor))
    return float(np.mean(np.abs(np.concatenate(ours) - np.concatenate(theirs))))


if __name__ == "__main__":
    main()
