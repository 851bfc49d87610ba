"""A model directory is written to the last tensor, or its writer names the missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dppo.bridge.hf_directory import SafetensorsWriter, plan_files
from megatron_dppo.bridge.safetensors_files import INDEX
from megatron_dppo.models.shape import PolicyShape

SHAPE = PolicyShape(2, 12, 6, 3, 4, 10, 37, False, 1e6, 1e-6, 128)
PLAN = plan_files(SHAPE, torch.bfloat16, 4000)
NORM = "model.norm.weight"


def test_a_missing_tensor_is_named_and_no_index_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"not written: {NORM}"), SafetensorsWriter.open(PLAN, tmp_path) as writer:
        for name in PLAN.tensors.keys() - {NORM}:
            writer.write(name, torch.ones(PLAN.tensors[name]))
    assert not (tmp_path / INDEX).exists()


def test_a_tensor_comes_once_in_the_planned_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not written: "), SafetensorsWriter.open(PLAN, tmp_path) as writer:
        for name, size in ((NORM, (13,)), (NORM, (12, 1)), ("model.norm.bias", (12,))):
            with pytest.raises(ValueError, match="is not in the plan"):
                writer.write(name, torch.ones(size))
        writer.write(NORM, torch.ones(12))
        with pytest.raises(ValueError, match="was written before"):
            writer.write(NORM, torch.ones(12))
        with pytest.raises(ValueError, match="has 26 bytes instead of 888"):
            writer.write_bytes("lm_head.weight", [memoryview(bytes(26))])
