"""A pack reaches the device whole, by one copy."""

from __future__ import annotations

from dataclasses import fields
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_dppo.models.context import Share, share_of
from megatron_dppo.models.microbatch import DeviceArrays, Microbatch, to_device
from megatron_dppo.rl.pack import TrainingSample, build_pack


def sample(prompt: int, response: int, seed: int) -> TrainingSample:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 99, prompt + response).astype(np.int32)
    logprobs = rng.normal(size=response).astype(np.float32)
    numbers = (logprobs, np.ones(response, bool), float(rng.normal()), float(rng.random()))
    teacher = logprobs - 1.0 if seed < 4 else None
    return TrainingSample(ids[:prompt], ids[prompt:], *numbers, version=seed, teacher_logprobs=teacher)


PACKS = {
    "of three samples": build_pack([sample(3, 4, 1), sample(1, 7, 2), sample(5, 1, 3)], 32, pad_id=0, align=4),
    "full": build_pack([sample(3, 5, 4)], 8, pad_id=0, align=1),
    "of padding": build_pack([], 8, pad_id=0, align=1),
}


@pytest.mark.parametrize(("name", "shared"), [("of three samples", True), ("full", False), ("of padding", True)])
def test_every_array_arrives_by_one_copy(name: str, shared: bool) -> None:
    pack = PACKS[name]
    lengths = np.diff(pack.cu_seqlens).tolist()
    share = share_of(lengths, torch.from_numpy(pack.predictors), rank=1, size=2) if shared else None
    known = np.linspace(-2, 0, len(pack.targets))[::-1] if shared else None
    copies: list[torch.Tensor] = []
    to = torch.Tensor.to

    def counted(self: torch.Tensor, *arguments: object, **settings: object) -> torch.Tensor:
        copies.append(self)
        return to(self, *arguments, **settings).clone()

    with mock.patch.object(torch.Tensor, "to", counted):
        placed = to_device(Microbatch(pack, old_logprobs=known, reference_logprobs=None), torch.device("cpu"), share)
    assert len(copies) == 1
    for field in fields(DeviceArrays):
        if hasattr(pack, field.name):
            assert_placed(getattr(placed, field.name), getattr(pack, field.name))
    assert placed.reference_logprobs is None
    assert_placed(placed.old_logprobs, known)
    assert (placed.share is None) == (share is None)
    if share is not None:
        for field in fields(Share):
            assert torch.equal(getattr(placed.share, field.name), getattr(share, field.name))


def assert_placed(tensor: torch.Tensor | None, array: np.ndarray | None) -> None:
    """Compare bit for bit; fp64 arrays arrive in fp32."""
    assert (tensor is None) == (array is None)
    if tensor is not None and array is not None:
        assert torch.equal(tensor, torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array))
