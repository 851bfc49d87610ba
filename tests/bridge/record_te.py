"""Recorder of the names of Transformer Engine's layers, if it is installed: ``python -m
tests.bridge.record_te``.

No GPU is needed: the layers are made, and written to a checkpoint, but never run.
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch
from megatron.core import dist_checkpointing

from megatron_dppo.config import Config, LayoutConfig, ModelConfig, RunConfig
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.layer_specs import Spec
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.parallel.world import initialize
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.bridge.directories import Sizes, write_qwen2, write_qwen3, write_qwen3_moe
from tests.ranks import RankPool

RECORDING = Path(__file__).with_name("recorded_te.json")
TPS = (1, 2)
Shapes = dict[str, tuple[int, ...]]

_SIZES = Sizes(intermediate_size=36, head_dim=10)
POLICIES: dict[str, Callable[[Path], PolicyShape]] = {
    "qwen3": partial(write_qwen3, sizes=_SIZES),
    "qwen3 tied": partial(write_qwen3, sizes=replace(_SIZES, tie_word_embeddings=True)),
    "qwen2.5": partial(write_qwen2, sizes=_SIZES),
    "qwen3 moe": partial(write_qwen3_moe, sizes=_SIZES, experts=3),
}
"""Writers of directories. No two dimensions of these policies have one size, so that none can be
taken for another."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names and shapes of a policy's tensors."""

    parameters: Shapes
    """Of this rank, as the model has them."""
    checkpoint: Shapes
    """Of the whole policy and of its optimizer's state, as they are read back from the checkpoint's
    own index."""


def making(spec: Spec) -> AbstractContextManager[object]:
    """Let Transformer Engine make its layers without a GPU, which only running them requires."""
    return patch.object(torch.cuda, "is_available", lambda: True) if spec == "te" else nullcontext()


def names(
    rank: int, size: int, path: Path, layout: LayoutConfig, spec: Spec, folder: Path
) -> Names:
    """Return the names of the policy at ``path``. The trainer's own code writes its checkpoint into
    ``folder``."""
    world, shape = initialize(layout, seed=1, timeout_s=60.0), read_shape(path)
    model, run = ModelConfig(path=str(path), spec=spec), RunConfig(dir=str(folder))
    config = Config(model=model, layout=layout, run=run)
    with making(spec), patch("megatron_dppo.models.actor.check_attention"):  # which asks the GPU
        actor = Actor(
            shape, model, layout, config.optimizer, world, temperature=1.0, load=lambda model: None
        )
        Checkpoints(config, world).save(actor, 1, {})
    world.barrier("checkpoint")
    stored = dist_checkpointing.load_tensors_metadata(str(folder / "checkpoints" / "iter_0000001"))
    return Names(
        {name: tuple(parameter.shape) for name, parameter in actor.chunks[0].named_parameters()},
        {key: tuple(tensor.global_shape) for key, tensor in stored.items()},
    )


def layout_of(tp: int, pp: int = 1) -> LayoutConfig:
    return LayoutConfig(
        tp=tp, pp=pp, sequence_parallel=True
    )  # without which experts are not trained at tp 2


def record(ranks: RankPool, write: Callable[[Path], PolicyShape]) -> dict[str, dict[str, list]]:
    """Return ``parameters``, with their shapes at each of :data:`TPS`, and ``checkpoint``,
    the same at all."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "policy"))
        runs = {
            tp: (Path(folder, "policy"), layout_of(tp), "te", Path(folder, f"tp{tp}")) for tp in TPS
        }
        by_tp = [ranks.run(tp, names, *arguments)[0] for tp, arguments in runs.items()]
    first, *others = by_tp
    assert all(other.checkpoint == first.checkpoint for other in others), (
        "the checkpoint depends on tp"
    )
    return {
        "parameters": {
            name: [list(found.parameters[name]) for found in by_tp] for name in first.parameters
        },
        "checkpoint": {key: list(size) for key, size in sorted(first.checkpoint.items())},
    }


def main() -> None:
    ranks = RankPool()
    policies = {family: record(ranks, write) for family, write in POLICIES.items()}
    packages = ("transformer_engine", "megatron-core", "torch")
    recording = {"versions": {package: version(package) for package in packages}, **policies}
    text = json.dumps(recording, indent=1)
    RECORDING.write_text(re.sub(r"\n\s*(?=[\[\]\d])", "", text) + "\n")
    print(f"wrote {RECORDING}", file=sys.stderr)


if __name__ == "__main__":
    main()
