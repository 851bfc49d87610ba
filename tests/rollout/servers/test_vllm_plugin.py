"""The extension that vLLM's workers load."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from megatron_dppo.rollout.servers.vllm import PLUGIN


def test_vllm_that_splits_its_default_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``server_environment`` prevents it where the run starts vLLM."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    group = importlib.import_module("megatron_dppo_vllm.group")
    device = torch.device("cuda:0")
    monkeypatch.setattr(
        group, "_get_default_group", lambda: SimpleNamespace(bound_device_id=device)
    )
    places = {"host": "127.0.0.1", "port": 1, "rank": 1, "size": 2, "timeout_s": 1.0}
    with pytest.raises(RuntimeError, match="set VLLM_DISTRIBUTED_USE_SPLIT_GROUP=0"):
        group.ReceiverGroup(name="weights", backend="nccl", device=device, **places)
