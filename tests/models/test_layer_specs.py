"""Choice of a layer specification."""

import pytest
import torch

from megatron_dppo.config import ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models import layer_specs
from megatron_dppo.models.layer_specs import choose_spec


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
