"""Choice of a layer specification."""

import pytest
import torch

from megatron_dppo.config import Config, ModelConfig, PackConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models import layer_specs
from megatron_dppo.models.layer_specs import choose_sharing, choose_spec
from megatron_dppo.models.shape import PolicyShape


def test_auto_takes_te_on_cuda_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda, installed, expected in (
        (True, True, "te"),
        (True, False, "torch"),
        (False, True, "torch"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(
            layer_specs, "has_transformer_engine", lambda installed=installed: installed
        )
        assert choose_spec(ModelConfig(dtype="bf16")) == expected
        assert choose_spec(ModelConfig(dtype="fp32")) == "torch"
        assert choose_spec(ModelConfig(dtype="bf16", spec="torch")) == "torch"


def test_te_spec_without_transformer_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_specs, "has_transformer_engine", lambda: False)
    with pytest.raises(UserError, match="no Transformer Engine") as caught:
        choose_spec(ModelConfig(spec="te"))
    assert caught.value.setting == "model.spec"


def test_prefixes_are_shared_in_half_precision_alone_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = PolicyShape(2, 64, 8, 4, 32, 128, 64, True, 1e6, 1e-6, 1536)
    monkeypatch.setattr(layer_specs, "has_transformer_engine", lambda: False)
    for cuda, dtype, expected in (
        (False, "fp32", "auto"),
        (True, "fp32", "off"),
        (True, "bf16", "auto"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert (
            choose_sharing(Config(model=ModelConfig(dtype=dtype)), shape).pack.share_prefixes
            == expected
        )
    on = PackConfig(share_prefixes="on")
    with pytest.raises(UserError, match=r"pack.share_prefixes = on.*model.dtype=bf16"):
        choose_sharing(Config(model=ModelConfig(dtype="fp32"), pack=on), shape)
