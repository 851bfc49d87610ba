"""A pack on its way through the policy: its arrays on the device, and what the loss sees of its
responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from megatron_dppo.models.context import PackShare
from megatron_dppo.rl.types import Pack

SHARE = tuple(field.name for field in fields(PackShare))
LOGPROBS = ("engine_logprobs", "old_logprobs", "reference_logprobs", "teacher_logprobs")


@dataclass(frozen=True, slots=True)
class Responses:
    """A pack's response tokens as the loss sees them: R targets, on the device of the last stage.

        Responses(pack, columns, logprobs=[-0.7, -0.3], entropy=[0.9, 0.5])

    are two tokens, whose advantages are ``columns["advantage"]``. The lists stand for tensors.
    """

    pack: Pack
    columns: Mapping[str, torch.Tensor]
    """The pack's columns [R] on the device, see ``to_device``; those that it has."""
    logprobs: torch.Tensor
    """[R], fp32, with gradient while training."""
    entropy: torch.Tensor
    """[R]"""
    divergence: torch.Tensor | None = None
    """[R], from the teacher, with gradient while training; None without one."""


def to_device(
    pack: Pack, device: torch.device, share: PackShare | None
) -> tuple[dict[str, torch.Tensor], PackShare | None]:
    """Copy a pack's arrays, and this rank's share of it, to the device.

    All go by one copy, since each copy would wait for the device. On CUDA they leave from pinned
    memory, and nothing waits for them to arrive. On a CPU they are views of the buffer that they
    are laid out in.

    Returns:
        The arrays by the names of their fields, without those that the pack does not have; numbers
        are fp32.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    # Whatever takes four bytes comes after all that takes eight, so that each begins on a multiple
    # of its size.
    for name in ("token_ids", "position_ids", "predictors", "targets", "sample", "versions"):
        arrays[name] = np.asarray(getattr(pack, name), np.int64)
    for name in SHARE if share else ():
        arrays[f"share {name}"] = getattr(share, name).numpy()
    arrays["cu_seqlens"] = np.asarray(pack.cu_seqlens, np.int32)
    for name in ("advantage", "scale", *LOGPROBS):
        if (values := getattr(pack, name)) is not None:
            arrays[name] = np.asarray(values, np.float32)
    ends = np.cumsum([array.nbytes for array in arrays.values()]).tolist()
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.concatenate([array.view(np.uint8) for array in arrays.values()], out=staged.numpy())
    there = staged.to(device, non_blocking=True)
    placed: dict[str, torch.Tensor] = {}
    for (name, array), end in zip(arrays.items(), ends, strict=True):
        placed[name] = there[end - array.nbytes : end].view(torch.from_numpy(array).dtype)
    return placed, PackShare(*(placed.pop(f"share {name}") for name in SHARE)) if share else None
