"""A pack over context-parallel ranks: the chunks of each rank."""

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.models.context import compute_local_positions, gather_responses
from megatron_dppo.models.policy_head import HeadOutput
from tests.ranks import RankPool


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_position_is_held_once_and_attention_is_even(size: int) -> None:
    """One rank holds segments of any length."""
    multiple = 2 * size if size > 1 else 1
    lengths = [multiple * n for n in (1, 5, 3)]
    held = [compute_local_positions(lengths, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(sum(lengths)))
    assert len({int(positions.sum()) for positions in held}) == 1, (
        "equally many keys for the queries of every rank"
    )


def gather_with_gradients(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor, object]:
    """Return the gathered log-probabilities and the gradients of this rank's outputs, for a loss
    without the entropy."""
    logprobs = torch.tensor([1.0 + rank, 3.0 + rank], requires_grad=True)
    entropy = torch.ones(2, requires_grad=True)
    indices = torch.arange(rank, 2 * size, size)
    whole = gather_responses(HeadOutput(logprobs, entropy), indices, 2 * size, dist.group.WORLD)
    (whole.logprobs * torch.arange(2.0 * size)).sum().backward()
    return whole.logprobs.detach(), logprobs.grad, entropy.grad


def test_an_unused_output_has_no_gradient_and_each_rank_has_that_of_its_tokens(
    ranks: RankPool,
) -> None:
    for rank, (whole, gradient, unused) in enumerate(ranks.run(2, gather_with_gradients)):
        assert whole.tolist() == [1.0, 2.0, 3.0, 4.0]
        assert gradient.tolist() == [rank, rank + 2.0]
        assert unused is None, "zeros would make the head compute the entropy's gradient"
