"""Choice of a layer specification, and settings of Transformer Engine's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dppo.config import LayoutConfig, ModelConfig, OptimizerConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models import layer_specs
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.layer_specs import choose_spec
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.world import initialize
from tests.bridge.record_te import making
from tests.ranks import RankPool


def test_auto_takes_te_on_cuda_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, installed, expected in ((True, True, "te"), (True, False, "torch"), (False, True, "torch")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(layer_specs, "transformer_engine_installed", lambda installed=installed: installed)
        assert choose_spec(ModelConfig(dtype="bf16")) == expected
        assert choose_spec(ModelConfig(dtype="fp32")) == "torch"
        assert choose_spec(ModelConfig(dtype="bf16", spec="torch")) == "torch"


def test_te_spec_without_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_specs, "transformer_engine_installed", lambda: False)
    with pytest.raises(UserError, match="no Transformer Engine") as caught:
        choose_spec(ModelConfig(spec="te"))
    assert caught.value.setting == "model.spec"


def ranks_of_attention(rank: int, size: int, path: Path, layout: LayoutConfig) -> list[int]:
    """Build an actor of Transformer Engine's layers, which never run; return ranks that share each attention."""
    world = initialize(layout, seed=1, timeout_s=60.0)
    with making("te"):
        model = ModelConfig(path=str(path), spec="te", dtype="bf16")
        arguments = (read_shape(path), model, layout, OptimizerConfig(), world)
        actor = Actor(*arguments, temperature=1.0, load=lambda bare: None)
    attention = [layer.self_attention.core_attention for layer in actor.chunks[0].decoder.layers]
    return [module.cp_group.size() for module in attention if module.cp_group is not None]


@pytest.mark.skipif(not layer_specs.transformer_engine_installed(), reason="Transformer Engine is not installed")
def test_te_layers_share_attention(ranks: RankPool, policy: Path) -> None:
    for shared_by in ranks.run(2, ranks_of_attention, policy, LayoutConfig(cp=2, dp=1)):
        assert shared_by == [2] * len(shared_by) != []
