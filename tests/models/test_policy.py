"""A pass over a pack: packs without responses, messages of stages, padding among experts."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_dppo.config import LayoutConfig, LossConfig, ModelConfig
from megatron_dppo.models.policy import transformer_config
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.parallel.without_cuda import install
from megatron_dppo.rl.pack import build_pack
from tests import steps
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.laws.test_parity import LENGTHS, build, pack
from tests.ranks import RankPool


def backward_without_responses(rank: int, size: int, path: Path, layout: LayoutConfig) -> bool:
    policy, _ = build(path, layout)
    ids, positions, packed = pack(LENGTHS, policy.shape.vocab_size)
    nothing = torch.zeros(0, dtype=torch.int64)
    logprobs, *_ = policy(ids, positions, packed, nothing, nothing)
    logprobs.sum().backward()
    return any(bool(parameter.grad.any()) for parameter in policy.parameters())


def test_pack_of_padding_has_a_gradient_of_zero(ranks: RankPool, policy: Path) -> None:
    layouts = [LayoutConfig(tp=2, sequence_parallel=parallel) for parallel in (False, True)]
    results = ranks.in_turn(
        2, *((backward_without_responses, policy, layout) for layout in layouts)
    )
    assert results == [[False, False], [False, False]]


@pytest.mark.parametrize(
    ("layout", "batched"),
    [
        (LayoutConfig(pp=2), True),
        (LayoutConfig(pp=4, vpp=2), True),
        (LayoutConfig(pp=2, vpp=2), False),
    ],
)
def test_two_interleaved_stages_do_not_send_in_batches(layout: LayoutConfig, batched: bool) -> None:
    """Each stage has the other before and after it: a batch would confuse the two messages in
    silence."""
    install()
    with mock.patch("torch.cuda.is_available", return_value=True):
        config = transformer_config(PUBLISHED["qwen3-4b"], ModelConfig(spec="torch"), layout)
    assert config.batch_p2p_comm is batched


def experts_of_padding(rank: int, size: int, path: Path) -> list[int]:
    """Return the number of experts of each layer that tokens of an empty pack go to."""
    config = steps.config_for(path, LayoutConfig(dp=1), LossConfig(), 64, distributed=True)
    _, _, parts = steps.build(config)
    chosen: list[int] = []
    (chunk,) = parts.actor.chunks
    for layer in chunk.decoder.layers:
        layer.mlp.router.register_forward_hook(
            lambda *given: chosen.append(int(given[2][1].any(dim=0).sum()))
        )
    parts.actor.log_probabilities([build_pack([], capacity=256, pad_id=parts.pad_id, align=1)])
    return chosen


def test_padding_does_not_crowd_at_a_few_experts(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path, Sizes(vocab_size=steps.VOCAB), experts=32)
    (chosen,) = ranks.run(1, experts_of_padding, tmp_path)
    assert len(chosen) == 2 and min(chosen) >= 4
