"""A pack over context-parallel ranks: the chunks of each rank, gathered segments, and gathered responses."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from megatron_dppo.config import LayoutConfig
from megatron_dppo.models.context import gather_responses, gather_segments, held_positions
from megatron_dppo.models.policy_head import HeadOutput
from megatron_dppo.parallel.world import initialize
from tests.ranks import RankPool

LENGTHS = (8, 16, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_position_is_held_once_and_attention_is_even(size: int) -> None:
    """One rank holds segments of any length."""
    multiple = 2 * size if size > 1 else 1
    lengths = [multiple * n for n in (1, 5, 3)]
    held = [held_positions(lengths, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(lengths)))
    assert len({int(positions.sum()) for positions in held}) == 1, "equally many keys for the queries of every rank"


def gathered(rank: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the gathered segments, and the gradient of Σ (rank + 1) · position · segment for the held positions."""
    initialize(LayoutConfig(cp=size), seed=1, timeout_s=60.0)
    held = held_positions(LENGTHS, rank, size).double()[:, None].requires_grad_()
    segments = gather_segments(held, LENGTHS, parallel_state.get_context_parallel_group())
    weight = (rank + 1) * torch.arange(sum(LENGTHS)).double()
    (torch.cat(segments)[:, 0] * weight).sum().backward()
    return [segment.detach()[:, 0] for segment in segments], held.grad[:, 0]


def test_gathered_segments_return_gradients_to_their_rank(ranks: RankPool) -> None:
    for rank, (segments, gradient) in enumerate(ranks.run(2, gathered)):
        assert [len(segment) for segment in segments] == list(LENGTHS)
        assert torch.equal(torch.cat(segments), torch.arange(sum(LENGTHS)).double())
        assert torch.equal(gradient, 3.0 * held_positions(LENGTHS, rank, 2)), "the sum of both ranks' gradients"


def put_together(rank: int, size: int) -> tuple[HeadOutput, torch.Tensor, tuple[bool, ...]]:
    initialize(LayoutConfig(cp=size), seed=1, timeout_s=60.0)
    mine = torch.tensor([[0, 3, 4], [1, 2]][rank])
    part = (mine + 1.0).requires_grad_()
    group = parallel_state.get_context_parallel_group()
    whole = gather_responses(HeadOutput(part, 10 * part, 100 * part, 1000 * part), mine, 5, group)
    (whole.logprobs * torch.arange(1.0, 6.0)).sum().backward()
    return HeadOutput(*(t.detach() for t in whole)), part.grad, tuple(t.requires_grad for t in whole)


def test_gathered_responses_return_gradients_once(ranks: RankPool) -> None:
    for (whole, gradient, differentiable), own in zip(ranks.run(2, put_together), ([1, 4, 5], [2, 3]), strict=True):
        for tensor, factor in zip(whole, (1, 10, 100, 1000), strict=True):
            assert tensor.tolist() == [factor * n for n in (1, 2, 3, 4, 5)]
        assert gradient.tolist() == own, "not twice, though two ranks have the loss"
        assert differentiable == (True, False, False, True)
