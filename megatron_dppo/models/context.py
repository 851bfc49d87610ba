"""How context-parallel ranks share a pack: every segment is cut into 2 · cp chunks, and rank r
holds chunks r and 2 · cp − 1 − r of each.

Late tokens attend to more tokens than early ones do. A rank that holds an early and a late chunk
has as much attention to compute as any other. Megatron's rotary positions and Transformer Engine's
attention assume this order of packs. A segment's length is a multiple of 2 · cp. The padding comes
after its tokens, which never attend to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)

from megatron_dppo.models.policy_head import LEARNED, HeadOutput


def compute_local_positions(lengths: Sequence[int], rank: int, size: int) -> torch.Tensor:
    """[T / size] int64: the positions of a pack that a rank holds, in the order in which it does.

    Args:
        lengths: [S], of the segments, T in all; each a multiple of 2 · size, unless the rank is the
            only one.
        rank: among the context-parallel ranks.
        size: how many there are.
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
    """A rank's share of a pack with R response tokens, made on the host from the pack's arrays
    there.

        Share(held=[0, 1, 6, 7], mine=[0, 2], predictors=[1, 2])

    is rank 0 of 2 with a segment of 8 tokens and the predictors [1, 5, 6]. The lists stand for
    tensors.
    """

    held: torch.Tensor
    """[T / size] int64, positions in the pack."""
    mine: torch.Tensor
    """[r] int64, which of the R response tokens it holds the predictors of."""
    predictors: torch.Tensor
    """[r] int64, where it does: places in ``held``."""

    def to(self, device: torch.device) -> PackShare:
        return PackShare(
            *(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self))
        )


def compute_share(
    lengths: Sequence[int], predictors: torch.Tensor, rank: int, size: int
) -> PackShare:
    """A rank's share of a pack.

    Args:
        lengths: [S], of the segments.
        predictors: [R] int64, on the host: positions whose next token is a response token.
        rank, size: as for :func:`compute_local_positions`.
    """
    held = compute_local_positions(lengths, rank, size)
    place = torch.full((sum(lengths),), -1)
    place[held] = torch.arange(len(held))
    places = place[predictors]
    (mine,) = (places >= 0).nonzero(as_tuple=True)
    return PackShare(held, mine, places[mine])


def gather_segments(
    local: torch.Tensor, lengths: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """The whole segments, each [length, …], from what every rank holds of them, [T / size, …].
    Collective.

    On the way back each rank gets the sum of all ranks' gradients for what it holds.
    """
    size = group.size()
    ranks = gather_from_sequence_parallel_region(local, group=group).unflatten(0, (size, -1))
    shares = ranks.split([length // size for length in lengths], dim=1)
    return [_restore_order(share.unflatten(1, (2, -1))) for share in shares]


def _restore_order(share: torch.Tensor) -> torch.Tensor:
    """[size, 2, chunk, …] by rank, to [2 · size · chunk, …] by position."""
    early, late = share.unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def gather_responses(
    part: HeadOutput, indices: torch.Tensor, responses: int, group: dist.ProcessGroup
) -> HeadOutput:
    """Outputs of all R = ``responses`` tokens on every rank, from each rank's own. Collective.

    Every rank then computes the same loss of all R. On the way back each takes the gradient of its
    own tokens and of no others, so that the loss counts once.

    Args:
        part: of the r tokens that this rank holds the predictors of.
        indices: [r] int64, which of the R tokens these are.
    """
    there = [name for name, field in part._asdict().items() if field is not None]
    whole = part.logprobs.new_zeros(len(there), responses).index_copy(
        1, indices, torch.stack(part.present)
    )
    fields = dict(
        zip(there, reduce_from_tensor_model_parallel_region(whole, group=group), strict=True)
    )
    return HeadOutput(
        **{name: field if name in LEARNED else field.detach() for name, field in fields.items()}
    )
