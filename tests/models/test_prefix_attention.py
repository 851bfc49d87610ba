"""Attention along paths, against one softmax under the mask of the whole tree."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from megatron_dppo.models import prefix_attention
from megatron_dppo.models.context import compute_local_positions
from megatron_dppo.models.prefix_attention import build_rounds
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.types import Pack

HEADS, KV_HEADS, WIDTH, TOKENS = 4, 2, 16, 200


def pack_of_trees(align: int) -> Pack:
    """A prompt whose second response goes on from within the first, a second family, a sample by
    itself, padding."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, 97, count).astype(np.int32)

    def sample(prompt: np.ndarray, response: np.ndarray, shared: int) -> TrainingSample:
        logprobs, sampled = np.zeros(len(response), np.float32), np.ones(len(response), bool)
        return TrainingSample(
            prompt, response, logprobs, sampled, 1.0, 1.0, version=0, shared=shared
        )

    prompt, other, trunk = tokens(7), tokens(3), tokens(20)
    samples = [
        sample(prompt, trunk, 0),
        sample(prompt, np.concatenate([trunk[:17], tokens(5)]), 24),
        sample(prompt, tokens(9), 7),
        sample(other, tokens(4), 0),
        sample(other, tokens(6), 3),
        sample(tokens(1), tokens(11), 0),
    ]
    return build_pack(samples, TOKENS, pad_id=0, align=align)


def mask_of(pack: Pack) -> torch.Tensor:
    """[T, T], which token sees which."""
    assert pack.parents is not None
    starts, mask = pack.cu_seqlens.tolist(), torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for segment, (start, end) in enumerate(pairwise(starts)):
        mask[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        ancestor = int(pack.parents[segment])
        while ancestor >= 0:
            mask[start:end, starts[ancestor] : starts[ancestor] + int(pack.tokens[ancestor])] = True
            ancestor = int(pack.parents[ancestor])
    return mask


@pytest.mark.parametrize(("align", "size"), [(1, 1), (4, 2), (8, 4)])
def test_stretches_together_are_one_softmax_and_so_are_their_gradients(
    align: int, size: int
) -> None:
    """Each context-parallel rank has its own queries, and the keys of all."""
    pack = pack_of_trees(align)
    assert pack.parents is not None
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(TOKENS, heads, WIDTH, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    batched = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    expected = functional.scaled_dot_product_attention(
        *batched, attn_mask=mask_of(pack), enable_gqa=True
    )
    expected = expected[0].transpose(0, 1)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (query, key, value), upstream)

    starts, total = (
        pack.cu_seqlens.astype(np.int64),
        [torch.zeros_like(tensor) for tensor in (query, key, value)],
    )
    for rank in range(size):
        held = compute_local_positions(np.diff(starts).tolist(), rank, size)
        mine = query.detach()[held].requires_grad_()
        rounds = build_rounds(pack, rank, size)
        attended = prefix_attention._TreeAttention.apply(mine, key, value, rounds, WIDTH**-0.5)
        torch.testing.assert_close(attended, expected[held], rtol=0, atol=1e-12)
        of_query, *of_keys = torch.autograd.grad(attended, (mine, key, value), upstream[held])
        total[0][held] = of_query
        for whole, part in zip(total[1:], of_keys, strict=True):
            whole += part
    for ours, theirs in zip(total, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
