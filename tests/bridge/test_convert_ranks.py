"""Law 4 over every route: directory → checkpoint → ranks in a layout → directory, by the tools and by the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dppo.bridge.export import export_hf
from megatron_dppo.bridge.load import load_checkpoint
from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.bridge.conversions import contents, same, to_hf, to_megatron, weights
from tests.bridge.directories import FAMILIES, Sizes
from tests.ranks import RankPool
from tests.steps import build, config_for

ONE, DP2, PP2 = LayoutConfig(dp=1), LayoutConfig(dp=2), LayoutConfig(pp=2, dp=1)
TP2 = LayoutConfig(tp=2, dp=1, sequence_parallel=True)
TP2PP2, TP4 = replace(TP2, pp=2), replace(TP2, tp=4)
TIED = Sizes(tie_word_embeddings=True)
ROUTES = {
    "Qwen3": ("Qwen3", Sizes(), [ONE, DP2, TP2PP2, TP4]),
    "Qwen3 tied": ("Qwen3", TIED, [ONE, TP2, PP2]),
    "Qwen3, one rank of mere padding": ("Qwen3", Sizes(vocab_size=50), [TP2PP2]),
    "Qwen2.5": ("Qwen2.5", Sizes(), [TP2PP2]),
    "Qwen2.5 tied": ("Qwen2.5", TIED, [TP2PP2]),
    "Qwen3-MoE": ("Qwen3-MoE", Sizes(), [TP2PP2]),
}
"""A family, its sizes, and the layouts that read what the tools have written, and write what they read."""
SHARD_BYTES = 40_000


def pass_on(rank: int, size: int, config: Config, converted: Path) -> list[str]:
    """Save and export what Megatron's own loader reads of a converted checkpoint. The parameters of which it makes
    something else than the loader of directories."""
    world, _, policy = build(config)
    (chunk,) = policy.actor.chunks
    expected = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    for parameter in chunk.parameters():
        parameter.data.fill_(torch.nan)
    load_checkpoint([chunk], converted, world)
    Checkpoints(config, world).save(policy.actor, 3, {})
    export_hf(
        [chunk],
        world,
        source=Path(config.model.path),
        out=Path(config.run.dir, "exported"),
        max_shard_bytes=SHARD_BYTES,
        dtype=torch.float32,
    )
    assert len(expected) > 5
    return [name for name, parameter in chunk.named_parameters() if not torch.equal(parameter, expected[name])]


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_leads_back_to_the_directory_it_began_from(route: str, ranks: RankPool, tmp_path: Path) -> None:
    family, sizes, layouts = ROUTES[route]
    policy, converted, exported = tmp_path / "policy", tmp_path / "megatron", []
    shape = FAMILIES[family](policy, sizes)
    assert to_megatron(policy, converted) == 0
    for number, layout in enumerate(layouts):
        run, count = tmp_path / str(number), layout.tp * layout.pp * (layout.dp or 1)
        config = config_for(policy, layout, LossConfig(), 64, distributed=True)
        config = replace(config, run=replace(config.run, dir=str(run)))
        assert ranks.run(count, pass_on, config, converted) == [[]] * count
        assert to_hf(run / "checkpoints", run / "hf") == 0
        for back in (run / "hf", run / "exported"):
            assert same(weights(back), weights(policy))
            assert weights(back).keys() == expected_tensors(shape).keys()
        exported.append(contents(run / "exported"))
    assert all(files == exported[0] for files in exported), "the same bytes from every layout"
