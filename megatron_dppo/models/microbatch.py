"""A pack on its way through the policy: its arrays on the device, and what the loss sees of its responses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from megatron_dppo.models.context import Share
from megatron_dppo.models.teacher_head import TeacherHead
from megatron_dppo.rl.types import Pack

SHARE = tuple(field.name for field in fields(Share))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A pack, and what earlier passes said of its targets (on the last stage; None elsewhere or where not needed).

        Microbatch(pack, old_logprobs=np.array([-0.7, -0.3], np.float32))

    is a pack with two targets, to which the policy gave e^−0.7 and e^−0.3 before the rollout's first update.
    """

    pack: Pack
    old_logprobs: np.ndarray | None = None
    """[R]"""
    reference_logprobs: np.ndarray | None = None
    """[R]"""
    teachers: tuple[TeacherHead, ...] = ()
    """Each of some of the targets."""


@dataclass(frozen=True, slots=True)
class DeviceArrays:
    """A microbatch's arrays on the device: T tokens of S segments, R targets. See :class:`Pack` for an example."""

    token_ids: torch.Tensor
    """[T] int64"""
    position_ids: torch.Tensor
    """[T] int64"""
    cu_seqlens: torch.Tensor
    """[S + 1] int32"""
    predictors: torch.Tensor
    """[R] int64"""
    targets: torch.Tensor
    """[R] int64"""
    sample: torch.Tensor
    """[R] int64, which of the pack's training samples a target belongs to."""
    versions: torch.Tensor
    """[R] int64, the oldest weights that made any of that sample."""
    advantage: torch.Tensor
    """[R], fp32, as are the next five."""
    scale: torch.Tensor
    """Factor of a token's loss."""
    engine_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    teacher_logprobs: torch.Tensor | None
    """As in :class:`Pack`."""
    share: Share | None
    """This rank's share of the pack; None: all."""


@dataclass(frozen=True, slots=True)
class Responses:
    """A pack's response tokens as the loss sees them: R targets, on the device of the last stage.

        Responses(pack, arrays, logprobs=[-0.7, -0.3], entropy=[0.9, 0.5])

    are two tokens, whose advantages are ``arrays.advantage``. The lists stand for tensors.
    """

    pack: Pack
    arrays: DeviceArrays
    logprobs: torch.Tensor
    """[R], fp32, with gradient while training."""
    entropy: torch.Tensor
    """[R]"""
    divergence: torch.Tensor | None = None
    """[R], from the teacher, with gradient while training; None without one."""


def to_device(batch: Microbatch, device: torch.device, share: Share | None) -> DeviceArrays:
    """Copy a microbatch, and what this rank computes of it, to the device.

    All arrays go by one copy, since each copy would wait for the device. On CUDA they leave from pinned memory, and
    nothing waits for them to arrive. On a CPU they are views of the buffer that they are laid out in.
    """
    pack = batch.pack
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    # Whatever takes four bytes comes after all that takes eight, so that each begins on a multiple of its size.
    for name in ("token_ids", "position_ids", "predictors", "targets", "sample", "versions"):
        arrays[name] = np.asarray(getattr(pack, name), np.int64)
    for name in SHARE if share else ():
        arrays[f"share {name}"] = getattr(share, name).numpy()
    arrays["cu_seqlens"] = np.asarray(pack.cu_seqlens, np.int32)
    for name in ("advantage", "scale", "engine_logprobs"):
        arrays[name] = np.asarray(getattr(pack, name), np.float32)
    for name in ("old_logprobs", "reference_logprobs"):
        if (values := getattr(batch, name)) is not None:
            arrays[name] = np.asarray(values, np.float32)
    if pack.teacher_logprobs is not None:
        arrays["teacher_logprobs"] = np.asarray(pack.teacher_logprobs, np.float32)
    ends = np.cumsum([array.nbytes for array in arrays.values()]).tolist()
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.concatenate([array.view(np.uint8) for array in arrays.values()], out=staged.numpy())
    there = staged.to(device, non_blocking=True)
    placed: dict[str, Any] = dict.fromkeys(("old_logprobs", "reference_logprobs", "teacher_logprobs", "share"))
    for (name, array), end in zip(arrays.items(), ends, strict=True):
        placed[name] = there[end - array.nbytes : end].view(torch.from_numpy(array).dtype)
    if share:
        placed["share"] = Share(*(placed.pop(f"share {name}") for name in SHARE))
    return DeviceArrays(**placed)
