"""A pack on its way through the policy: its arrays on the device, and what the loss sees of its responses."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from megatron_dppo.models.context import Share
from megatron_dppo.rl.types import Pack

SHARE = tuple(field.name for field in fields(Share))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A pack, and what earlier passes said of its targets (on the last stage; None elsewhere or where not needed)."""

    pack: Pack
    old_logprobs: np.ndarray | None = None
    reference_logprobs: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A microbatch's arrays on the device: T tokens of S segments, R targets."""

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
    row: torch.Tensor
    """[R] int64"""
    versions: torch.Tensor
    """[R] int64"""
    advantage: torch.Tensor
    """[R], fp32, as are the next four."""
    scale: torch.Tensor
    engine_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None
    share: Share | None
    """What this rank computes of the pack; None: all."""


@dataclass(frozen=True, slots=True)
class Responses:
    """A pack's response tokens as the loss sees them: R targets, on the device of the last stage."""

    pack: Pack
    logprobs: torch.Tensor
    """[R], fp32, with gradient while training."""
    entropy: torch.Tensor
    """[R]"""
    score_norm: torch.Tensor | None
    """[R], the norm of the gradient of log p by the logits over the temperature; None unless it was asked for."""
    row: torch.Tensor
    """[R] int64, which of the pack's rows a target belongs to."""
    versions: torch.Tensor
    """[R] int64, the oldest weights that made any of that row."""
    advantage: torch.Tensor
    scale: torch.Tensor
    """[R], fp32; what a token's loss is multiplied by."""
    engine_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None
    reference_logprobs: torch.Tensor | None

    @classmethod
    def of(cls, pack: Pack, placed: Placed, scores: tuple[torch.Tensor, ...]) -> Responses:
        """From what the policy's last stage returned for a pack: log-probability, entropy and perhaps score norm."""
        logprobs, entropy, *score_norm = scores
        return cls(
            pack=pack,
            logprobs=logprobs,
            entropy=entropy,
            score_norm=score_norm[0] if score_norm else None,
            row=placed.row,
            versions=placed.versions,
            advantage=placed.advantage,
            scale=placed.scale,
            engine_logprobs=placed.engine_logprobs,
            old_logprobs=placed.old_logprobs,
            reference_logprobs=placed.reference_logprobs,
        )


def place(batch: Microbatch, device: torch.device, share: Share | None) -> Placed:
    """Copy a microbatch, and what this rank computes of it, to the device.

    In one go: a copy for each array would wait for the device each time.

    On CUDA the arrays leave from pinned memory, and nothing waits for them to arrive. On a CPU they are views of the
    buffer that they are laid out in.
    """
    pack = batch.pack
    # Whatever takes four bytes comes after all that takes eight, so that each begins on a multiple of its size.
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "token_ids": np.asarray(pack.token_ids, np.int64),
        "position_ids": np.asarray(pack.position_ids, np.int64),
        "predictors": np.asarray(pack.predictors, np.int64),
        "targets": np.asarray(pack.targets, np.int64),
        "row": np.asarray(pack.sample, np.int64),
        "versions": np.asarray(pack.versions, np.int64),
        **({f"share {name}": getattr(share, name).numpy() for name in SHARE} if share else {}),
        "cu_seqlens": np.asarray(pack.cu_seqlens, np.int32),
        "advantage": np.asarray(pack.advantage, np.float32),
        "scale": np.asarray(pack.scale, np.float32),
        "engine_logprobs": np.asarray(pack.engine_logprobs, np.float32),
    }
    for name in ("old_logprobs", "reference_logprobs"):
        if (values := getattr(batch, name)) is not None:
            arrays[name] = np.asarray(values, np.float32)
    ends = np.cumsum([array.nbytes for array in arrays.values()]).tolist()
    staged = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    np.concatenate([array.view(np.uint8) for array in arrays.values()], out=staged.numpy())
    there = staged.to(device, non_blocking=True)
    placed: dict[str, Any] = {"old_logprobs": None, "reference_logprobs": None, "share": None}
    for (name, array), end in zip(arrays.items(), ends, strict=True):
        placed[name] = there[end - array.nbytes : end].view(torch.from_numpy(array).dtype)
    if share:
        placed["share"] = Share(*(placed.pop(f"share {name}") for name in SHARE))
    return Placed(**placed)
