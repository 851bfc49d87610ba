"""What a layout asks of packs."""

from __future__ import annotations

import pytest

from megatron_dppo.config import LayoutConfig
from megatron_dppo.parallel.layout import capacity_multiple


@pytest.mark.parametrize(
    ("layout", "max_tokens", "cuda", "multiple"),
    [
        (LayoutConfig(), 4096, False, 1),
        (LayoutConfig(), 4096, True, 128),
        (LayoutConfig(tp=8, sequence_parallel=True), 4096, True, 128),
        (LayoutConfig(cp=3), 4096, False, 6),
        (LayoutConfig(cp=3), 3840, True, 384),
        (LayoutConfig(cp=3), 4096, True, 6),  # 4,096 is no multiple of 384, and 3,840 might not hold the longest
        (LayoutConfig(), 4000, True, 1),
    ],
)
def test_gpus_get_packs_of_whole_tiles_where_the_limit_allows(
    layout: LayoutConfig, max_tokens: int, cuda: bool, multiple: int
) -> None:
    assert capacity_multiple(layout, max_tokens, cuda=cuda) == multiple
