"""The gated delta rule over packs equals transformers' on each segment alone, backward pass
included."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from megatron_dppo.parallel.delta_rule import (
    CHUNK,
    causal_conv1d,
    chunk_gated_delta_rule,
    l2norm,
    recurrent_gated_delta_rule,
)

LENGTHS = (7, 1, 2 * CHUNK + 6, CHUNK, 3, CHUNK + 1)
HEADS, KEY, VALUE = 3, 8, 12
Function = Callable[..., torch.Tensor]


def draw(lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return queries, keys, values, decays and rates, which depend on the length of a segment
    alone."""
    segments = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        sizes = ((HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,))
        q, k, v, g, beta = (torch.randn(1, length, *size, generator=generator) for size in sizes)
        segments.append((l2norm(q), l2norm(k), v, -g.exp(), beta.sigmoid()))
    return [torch.cat(parts, dim=1) for parts in zip(*segments, strict=True)]


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


def on_each_segment(function: Function, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    bounds = itertools.pairwise(starts_of(LENGTHS).tolist())
    return torch.cat(
        [function(*(x[:, first:last] for x in inputs)) for first, last in bounds], dim=1
    )


def assert_equal_with_gradients(
    ours: Function, reference: Function, inputs: Sequence[torch.Tensor]
) -> None:
    def outputs_and_gradients(function: Function) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]

    for mine, expected in zip(
        outputs_and_gradients(ours), outputs_and_gradients(reference), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [CHUNK, 5])
def test_pack_equals_transformers_on_each_segment_alone(chunk):
    assert_equal_with_gradients(
        lambda *inputs: chunk_gated_delta_rule(*inputs, cu_seqlens=starts_of(LENGTHS), chunk=chunk)[
            0
        ],
        lambda *inputs: on_each_segment(
            lambda *parts: theirs.torch_chunk_gated_delta_rule(*parts)[0], inputs
        ),
        draw(LENGTHS),
    )


def test_states_are_in_the_order_of_the_segments():
    _, states = chunk_gated_delta_rule(*draw(LENGTHS), cu_seqlens=starts_of(LENGTHS))
    for state, length in zip(states, LENGTHS, strict=True):
        _, alone = chunk_gated_delta_rule(*draw((length,)), cu_seqlens=starts_of((length,)))
        torch.testing.assert_close(state, alone[0])


def test_segment_resumes_from_a_state_in_chunks_and_tokens():
    inputs, length, cut = draw((50,)), 50, 37
    whole, end = chunk_gated_delta_rule(*inputs, cu_seqlens=starts_of((length,)))
    _, state = chunk_gated_delta_rule(*(x[:, :cut] for x in inputs), cu_seqlens=starts_of((cut,)))
    rest = [x[:, cut:] for x in inputs]
    second, after = chunk_gated_delta_rule(
        *rest, initial_state=state, cu_seqlens=starts_of((length - cut,))
    )
    tokens = []
    for place in range(length - cut):
        token, state = recurrent_gated_delta_rule(*(x[:, place] for x in rest), state)
        tokens.append(token)
    for outputs, last in ((second, after), (torch.stack(tokens, dim=1), state)):
        torch.testing.assert_close(outputs, whole[:, cut:])
        torch.testing.assert_close(last, end)


def test_convolution_reads_its_own_segment_alone():
    generator = torch.Generator().manual_seed(1)
    x, weight = (
        torch.randn(1, sum(LENGTHS), 10, generator=generator),
        torch.randn(10, 4, generator=generator),
    )

    def transformers_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = theirs.causal_conv1d_fn(x.transpose(1, 2), weight, activation="silu")
        return out.transpose(1, 2)

    assert_equal_with_gradients(
        lambda x, weight: causal_conv1d(x, weight, cu_seqlens=starts_of(LENGTHS))[0],
        lambda x, weight: on_each_segment(lambda part: transformers_convolution(part, weight), [x]),
        [x, weight],
    )
