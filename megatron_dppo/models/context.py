"""Split of a pack over context-parallel ranks: every segment is cut into 2 · cp chunks, and rank r
holds chunks r and 2 · cp − 1 − r of each segment.

- Late tokens attend to more tokens: an early and a late chunk give every rank equal work.
- Megatron's rotary positions and Transformer Engine's attention assume this order.
- A segment's length is a multiple of 2 · cp. Padding is last, and no token attends to padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from megatron_dppo.models.policy_head import HeadOutput


def compute_local_positions(lengths: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """Return the positions of a pack held by a rank, in the rank's order, [T / size] int64.

    Args:
        lengths: [S], tokens of each segment, T in all; multiples of 2 · size, unless ``size`` is 1.
        rank: context-parallel rank.
        size: number of context-parallel ranks.
    """
    positions = torch.arange(sum(lengths))
    if size == 1:
        return positions
    segments = positions.split(list(lengths))
    return torch.cat(
        [segment.view(2 * size, -1)[[rank, 2 * size - 1 - rank]].flatten() for segment in segments]
    )


@dataclass(frozen=True, slots=True)
class PackShare:
    """A rank's share, on the host, of a pack with R response tokens.

        PackShare(held=[0, 1, 6, 7], mine=[0, 2], predictors=[1, 2])

    is rank 0 of 2 with a segment of 8 tokens and the predictors [1, 5, 6]. (Lists replace tensors.)
    """

    held: torch.Tensor
    """[T / size] int64, positions in the pack."""
    mine: torch.Tensor
    """[r] int64, indices below R of the response tokens whose predictors this rank holds."""
    predictors: torch.Tensor
    """[r] int64, places of these predictors in ``held``."""

    def to(self, device: torch.device) -> PackShare:
        return PackShare(
            *(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self))
        )


def compute_share(
    lengths: Sequence[int],
    predictors: torch.Tensor,
    rank: int,
    size: int,
) -> PackShare:
    """Compute a rank's share of a pack; see :func:`compute_local_positions`.

    Args:
        predictors: [R] int64, on the host: positions whose next token is a response token.
    """
    held = compute_local_positions(lengths, rank, size)
    place = torch.full((sum(lengths),), -1)
    place[held] = torch.arange(len(held))
    places = place[predictors]
    (mine,) = (places >= 0).nonzero(as_tuple=True)
    return PackShare(held, mine, places[mine])


def gather_segments(
    local: torch.Tensor,
    lengths: Sequence[int],
    group: dist.ProcessGroup,
) -> list[torch.Tensor]:
    """Gather whole segments, each [length, …], from all ranks' shares, [T / size, …]. Collective.

    In the backward pass each rank gets the sum of all ranks' gradients for its share.
    """
    size = group.size()
    ranks = gather_from_sequence_parallel_region(local, group=group).unflatten(0, (size, -1))
    shares = ranks.split([length // size for length in lengths], dim=1)
    return [_restore_order(share.unflatten(1, (2, -1))) for share in shares]


def _restore_order(share: torch.Tensor) -> torch.Tensor:
    """Reorder [size, 2, chunk, …] by rank to [2 · size · chunk, …] by position."""
    # Rank r has chunks r and 2 · size − 1 − r: late chunks are in reverse order of ranks.
    early, late = share.unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def gather_responses(
    part: HeadOutput,
    indices: torch.Tensor,
    responses: int,
    group: dist.ProcessGroup,
) -> HeadOutput:
    """Gather outputs of all R = ``responses`` tokens on every rank. Collective.

    Every rank then computes the same loss of all R tokens.

    Args:
        part: outputs of the r tokens whose predictors this rank holds.
        indices: [r] int64, indices of these tokens, below R.
    """
    there = [name for name, field in part._asdict().items() if field is not None]
    rows = _GatherTokens.apply(indices, responses, group, *part.present)
    return HeadOutput(**dict(zip(there, rows, strict=True)))


class _GatherTokens(torch.autograd.Function):
    """Sum of the ranks' outputs, each [r], at their places of R tokens, by one collective."""

    @staticmethod
    def forward(
        ctx: Any,
        indices: torch.Tensor,
        responses: int,
        group: dist.ProcessGroup,
        *part: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(indices)
        # An output that the loss does not use passes None for the gradient. With zeros, the head
        # would compute the entropy's gradient in every run.
        ctx.set_materialize_grads(False)
        whole = part[0].new_zeros(len(part), responses).index_copy(1, indices, torch.stack(part))
        dist.all_reduce(whole, group=group)
        return whole.unbind()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Each rank gets the gradient of its r tokens only, so that the loss counts once.
        (indices,) = ctx.saved_tensors
        part: list[torch.Tensor | None] = []
        for whole in gradients:
            part.append(None if whole is None else whole[indices])
        return None, None, None, *part
