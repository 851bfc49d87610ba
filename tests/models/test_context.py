"""How context-parallel ranks share a pack: the chunks that each holds, and what comes of gathering them."""

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
RESPONSES = 5


def test_each_rank_holds_an_early_chunk_and_the_late_one_that_mirrors_it() -> None:
    assert held_positions([8, 4], 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert held_positions([8, 4], 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_position_is_held_once_and_attention_is_shared_equally(size: int) -> None:
    lengths = [2 * size * n for n in (1, 5, 3)]
    held = [held_positions(lengths, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(lengths)))
    assert len({int(positions.sum()) for positions in held}) == 1, "as many keys for the queries of every rank"


def test_one_rank_holds_segments_of_any_length() -> None:
    assert held_positions([3, 1], 0, 1).tolist() == [0, 1, 2, 3]


def gathered(rank: int, size: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The segments that a rank gets, and the gradient of what it held: of Σ (rank + 1) · position · segment."""
    initialize(LayoutConfig(cp=size), seed=1, timeout_s=60.0)
    held = held_positions(LENGTHS, rank, size).double()[:, None].requires_grad_()
    segments = gather_segments(held, LENGTHS, parallel_state.get_context_parallel_group())
    weight = (rank + 1) * torch.arange(sum(LENGTHS)).double()
    (torch.cat(segments)[:, 0] * weight).sum().backward()
    return [segment.detach()[:, 0] for segment in segments], held.grad[:, 0]


def test_gathered_segments_are_in_order_and_gradients_go_back_to_their_rank(ranks: RankPool) -> None:
    for rank, (segments, gradient) in enumerate(ranks.run(2, gathered)):
        assert [len(segment) for segment in segments] == list(LENGTHS)
        assert torch.equal(torch.cat(segments), torch.arange(sum(LENGTHS)).double())
        assert torch.equal(gradient, 3.0 * held_positions(LENGTHS, rank, 2)), "the sum of both ranks' gradients"


def put_together(rank: int, size: int) -> tuple[HeadOutput, torch.Tensor, tuple[bool, ...]]:
    initialize(LayoutConfig(cp=size), seed=1, timeout_s=60.0)
    mine = torch.tensor([[0, 3, 4], [1, 2]][rank])
    part = (mine + 1.0).requires_grad_()
    whole = gather_responses(
        HeadOutput(part, 10 * part, 100 * part, 1000 * part),
        mine,
        RESPONSES,
        parallel_state.get_context_parallel_group(),
    )
    (whole.logprobs * torch.arange(1.0, RESPONSES + 1)).sum().backward()
    return HeadOutput(*(t.detach() for t in whole)), part.grad, tuple(t.requires_grad for t in whole)


def test_every_rank_has_all_responses_and_the_gradient_of_its_own(ranks: RankPool) -> None:
    for (whole, gradient, differentiable), own in zip(ranks.run(2, put_together), ([1, 4, 5], [2, 3]), strict=True):
        for tensor, factor in zip(whole, (1, 10, 100, 1000), strict=True):
            assert tensor.tolist() == [factor * n for n in (1, 2, 3, 4, 5)]
        assert gradient.tolist() == own, "not twice, though two ranks have the loss"
        assert differentiable == (True, False, False, True)
