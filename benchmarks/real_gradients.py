"""Gradients of single completions under a real actor. The error of every pruning rule follows by
algebra.

The surrogates of a step's completions add up. With g_i the gradient of Σ_t ℓ_t of completion i,
every estimate of the step's gradient is Σ_i scale_i g_i, for any pruning and any weights. Bias,
error and cosine of thousands of draws then need the inner products K = G Gᵀ, and no further pass
through the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_dppo.models.actor import Actor, Loss
from megatron_dppo.parallel.exchange import exchange_samples
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.types import Floats, Group, MinibatchPlan, Pack

BLOCK, TILE = 1 << 14, 256
"""Parameters and rows per block of products."""


def single_packs(groups: Sequence[Group], advantage: Floats, pad_id: int) -> list[Pack]:
    """Build one pack per completion, in order of (group, sample), with scale 1.

    Args:
        groups: Q groups, G completions each.
        advantage: [Q, G].
        pad_id: padding id of the tokenizer; a pack of one row has no padding.
    """
    packs = []
    for group, values in zip(groups, advantage.tolist(), strict=True):
        for completion, value in zip(group.completions, values, strict=True):
            row = TrainingSample(
                prompt_ids=group.prompt.token_ids,
                response_ids=completion.token_ids,
                engine_logprobs=completion.logprobs,
                loss_mask=completion.loss_mask,
                advantage=value,
                scale=1.0,
                version=completion.oldest_version,
            )
            capacity = len(row.prompt_ids) + len(row.response_ids)
            packs.append(build_pack([row], capacity, pad_id, align=1))
    return packs


def planned(
    minibatch: MinibatchPlan, held: Mapping[int, Group], world: World, pad_id: int
) -> list[Pack]:
    """Build the packs of a plan, on-policy, on one rank.

    Args:
        minibatch: the plan.
        held: all groups, by index in the plan.
        world: a world of one rank.
        pad_id: padding id of the tokenizer.
    """
    return [
        build_pack(samples, minibatch.capacity, pad_id, align=1)
        for samples in exchange_samples(world, minibatch, held)
    ]


def gradient(actor: Actor, packs: Sequence[Pack], loss: Loss) -> torch.Tensor:
    """Return the content of DDP's buffer after a backward pass over the packs, on one rank:
    [parameters], fp32."""
    actor.accumulate(packs, loss)
    return torch.cat([parameter.main_grad.flatten() for parameter in actor.parameters()])


def gradients(actor: Actor, packs: Sequence[Pack], loss: Loss, stride: int = 1) -> torch.Tensor:
    """Return the gradient of each microbatch alone, at every ``stride``-th coordinate:
    [n, parameters / stride], fp32."""
    first = gradient(actor, packs[:1], loss)[::stride]
    rows = torch.empty(len(packs), len(first))
    rows[0] = first
    for row, pack in zip(rows[1:], packs[1:], strict=True):
        row.copy_(gradient(actor, [pack], loss)[::stride])
    return rows


def gram(rows: torch.Tensor) -> Floats:
    """Return K = G Gᵀ of gradients [n, parameters], fp32: [n, n], fp64.

    Products of ``BLOCK`` parameters are fp32, their sums fp64.
    """
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for block in rows.split(BLOCK, dim=1):
        for start in range(0, len(rows), TILE):
            end = start + TILE
            total[start:end, :end] += block[start:end] @ block[:end].T
    # Tiles above the diagonal were left out.
    below = total.tril(-1)
    return (total.tril() + below.T).numpy()


def norm(gram: Floats, scales: Floats) -> Floats:
    """Return ‖Σ_i scale_i g_i‖, [...], for scales [..., n]."""
    squares = np.einsum("...i,...i->...", scales @ gram, scales)
    # The rounded square of a difference may be negative.
    lengths: Floats = np.sqrt(np.maximum(squares, 0.0))
    return lengths
