"""A pack over context-parallel ranks: the chunks of each rank."""

import pytest
import torch

from megatron_dppo.models.context import compute_local_positions


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
