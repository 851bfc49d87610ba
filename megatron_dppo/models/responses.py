"""A pack's arrays on the device, and the loss's view of a pack's responses."""

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
    """A pack's response tokens in the loss: R targets, on the device of the last stage.

        Responses(pack, columns, logprobs=[-0.7, -0.3], entropy=[0.9, 0.5])

    has two tokens, with advantages ``columns["advantage"]``. (Lists replace tensors.)
    """

    pack: Pack
    columns: Mapping[str, torch.Tensor]
    """Present columns, each with R rows, on the device; see :func:`to_device`."""
    logprobs: torch.Tensor
    """[R], fp32, with gradient during training."""
    entropy: torch.Tensor
    """[R], of the distribution of ``logprobs``, with gradient during training."""
    divergence: torch.Tensor | None = None
    """[R], divergence from the teacher, with gradient during training; None without a teacher."""


def to_device(
    pack: Pack,
    device: torch.device,
    share: PackShare | None,
) -> tuple[dict[str, torch.Tensor], PackShare | None]:
    """Copy a pack's arrays, and this rank's share of the pack, to the device.

    On CUDA the copy is asynchronous, from pinned memory; on a CPU the arrays are views of the
    staging buffer.

    Returns:
        The pack's present arrays by field name, with numbers in fp32; and the share, if given.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    # 8-byte types before 4-byte types, so that each array begins at a multiple of its item size.
    for name in ("token_ids", "position_ids", "predictors", "targets", "sample", "versions"):
        arrays[name] = np.asarray(getattr(pack, name), np.int64)
    if pack.kept_ids is not None:
        arrays["kept_ids"] = np.ascontiguousarray(pack.kept_ids, np.int64)
    for name in SHARE if share else ():
        arrays[f"share {name}"] = getattr(share, name).numpy()
    arrays["cu_seqlens"] = np.asarray(pack.cu_seqlens, np.int32)
    for name in ("advantage", "scale", *LOGPROBS):
        if (values := getattr(pack, name)) is not None:
            arrays[name] = np.asarray(values, np.float32)
    ends = np.cumsum([array.nbytes for array in arrays.values()]).tolist()
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.concatenate(
        [array.reshape(-1).view(np.uint8) for array in arrays.values()], out=staged.numpy()
    )
    # Copy once, because each copy would wait for the device.
    there = staged.to(device, non_blocking=True)
    placed: dict[str, torch.Tensor] = {}
    for (name, array), end in zip(arrays.items(), ends, strict=True):
        flat = there[end - array.nbytes : end].view(torch.from_numpy(array).dtype)
        placed[name] = flat.view(array.shape)
    if share is None:
        return placed, None
    return placed, PackShare(*(placed.pop(f"share {name}") for name in SHARE))
