"""Checkpoints between real ranks and the conversion tools: what a run saved, and what Megatron's own loader reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dppo.bridge.load import load_checkpoint
from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.bridge.conversions import same, to_hf, to_megatron, weights
from tests.bridge.directories import FAMILIES, Sizes
from tests.bridge.on_ranks import loaded_policy
from tests.ranks import RankPool
from tests.steps import build, config_for

TP2, PP2 = LayoutConfig(tp=2, dp=1, sequence_parallel=True), LayoutConfig(pp=2, dp=1)
TP2PP2, TP4 = replace(TP2, pp=2), replace(TP2, tp=4)
ONE = LayoutConfig(dp=1)
TIED = Sizes(tie_word_embeddings=True)


def save(rank: int, size: int, config: Config) -> None:
    """What a run does before its first step: weights as they were loaded, and an optimizer's state of zeros."""
    world, _, policy = build(config)
    Checkpoints(config, world).save(policy.actor, 3, {})


def saved_by_ranks(ranks: RankPool, policy: Path, run: Path, layout: LayoutConfig) -> Path:
    config = config_for(policy, layout, LossConfig(), 64, distributed=True)
    ranks.run(layout.tp * layout.pp, save, replace(config, run=replace(config.run, dir=str(run))))
    return run / "checkpoints"


@pytest.mark.parametrize(
    ("layout", "sizes", "family"),
    [
        pytest.param(TP2, TIED, "Qwen3", id="tp2 tied"),
        pytest.param(PP2, TIED, "Qwen3", id="pp2 tied"),
        pytest.param(TP2PP2, Sizes(vocab_size=50), "Qwen3", id="tp2pp2, one rank of mere padding"),
        pytest.param(TP2PP2, Sizes(), "Qwen2.5", id="tp2pp2 Qwen2.5"),
        pytest.param(TP2PP2, Sizes(), "Qwen3-MoE", id="tp2pp2 Qwen3-MoE"),
    ],
)
def test_what_ranks_save_converts_to_the_directory_they_began_from(
    ranks: RankPool, tmp_path: Path, layout: LayoutConfig, sizes: Sizes, family: str
) -> None:
    shape = FAMILIES[family](tmp_path / "policy", sizes)
    checkpoints = saved_by_ranks(ranks, tmp_path / "policy", tmp_path / "run", layout)
    assert to_hf(checkpoints, tmp_path / "hf") == 0
    assert same(weights(tmp_path / "hf"), weights(tmp_path / "policy"))
    assert weights(tmp_path / "hf").keys() == expected_tensors(shape).keys()


def differing(rank: int, size: int, source: Path, checkpoint: Path, layout: LayoutConfig) -> list[str]:
    """The parameters that Megatron's own loader makes something else of than the loader of directories."""
    chunks, _, world = loaded_policy(source, layout)
    (model,) = chunks
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    load_checkpoint(chunks, checkpoint, world)
    assert len(expected) > 5
    return [name for name, parameter in model.named_parameters() if not torch.equal(parameter, expected[name])]


@pytest.mark.parametrize(
    ("family", "sizes", "layouts"),
    [
        ("Qwen3", Sizes(), [ONE, TP2PP2, TP4]),
        ("Qwen3", TIED, [ONE, PP2]),
        ("Qwen2.5", TIED, [TP2PP2]),
        ("Qwen3-MoE", Sizes(), [TP2PP2]),
    ],
    ids=["Qwen3", "Qwen3 tied", "Qwen2.5", "Qwen3-MoE"],
)
def test_megatron_loads_a_converted_checkpoint_in_every_layout(
    ranks: RankPool, tmp_path: Path, family: str, sizes: Sizes, layouts: list[LayoutConfig]
) -> None:
    FAMILIES[family](tmp_path / "policy", sizes)
    assert to_megatron(tmp_path / "policy", tmp_path / "megatron") == 0
    for layout in layouts:
        count = layout.tp * layout.pp
        found = ranks.run(count, differing, tmp_path / "policy", tmp_path / "megatron", layout)
        assert found == [[]] * count
