"""The gated delta rule over packs equals transformers' on each segment alone, backward pass included."""

from __future__ import annotations

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
Tensors = list[torch.Tensor]


def drawn(lengths: Sequence[int], heads: int = 3, key: int = 8, value: int = 12) -> Tensors:
    """Queries, keys, values, decays, rates and a cotangent of the outputs: the same for a segment wherever it is."""
    of_segments = []
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        sizes = ((heads, key), (heads, key), (heads, value), (heads,), (heads,), (heads, value))
        q, k, v, g, beta, cotangent = (torch.randn(1, length, *size, generator=generator) for size in sizes)
        of_segments.append((l2norm(q), l2norm(k), v, -g.exp(), beta.sigmoid(), cotangent))
    return [torch.cat(parts, dim=1) for parts in zip(*of_segments, strict=True)]


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


def apart(function: Callable[[Tensors], torch.Tensor], inputs: Tensors, lengths: Sequence[int]) -> torch.Tensor:
    bounds = itertools.pairwise(starts_of(lengths).tolist())
    return torch.cat([function([x[:, first:last] for x in inputs]) for first, last in bounds], dim=1)


def outputs_and_gradients(function: Callable[[Tensors], torch.Tensor], drawn: Tensors) -> Tensors:
    inputs = [x.clone().requires_grad_() for x in drawn[:-1]]
    out = function(inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, drawn[-1])]


def of_transformers(inputs: Tensors) -> torch.Tensor:
    out: torch.Tensor
    out, _ = theirs.torch_chunk_gated_delta_rule(*inputs)
    return out


@pytest.mark.parametrize("chunk", [CHUNK, 5, 64])
def test_a_pack_is_transformers_on_each_segment_alone(chunk: int) -> None:
    tensors = drawn(LENGTHS)
    ours = outputs_and_gradients(
        lambda inputs: chunk_gated_delta_rule(*inputs, cu_seqlens=starts_of(LENGTHS), chunk=chunk)[0], tensors
    )
    reference = outputs_and_gradients(lambda inputs: apart(of_transformers, inputs, LENGTHS), tensors)
    for mine, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_no_state_leaks_into_the_next_segment() -> None:
    """Outputs of a segment are the same bits behind whatever stands before it, and others if it goes on from there."""
    before, after = (40, 9), (9,)
    whole, alone = drawn(before), drawn(after)
    inputs = [torch.cat([x[:, :40] * 3, y], dim=1) for x, y in zip(whole[:-1], alone[:-1], strict=True)]
    packed, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=starts_of(before))
    expected, _ = chunk_gated_delta_rule(*alone[:-1], cu_seqlens=starts_of(after))
    leaking, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=starts_of((49,)))
    assert torch.equal(packed[:, 40:], expected)
    assert not torch.allclose(leaking[:, 40:], expected, atol=1e-3)


def test_the_order_of_segments_changes_nothing() -> None:
    order = (3, 0, 5, 1, 4, 2)
    lengths = [LENGTHS[place] for place in order]
    one, _ = chunk_gated_delta_rule(*drawn(LENGTHS)[:-1], cu_seqlens=starts_of(LENGTHS))
    other, states = chunk_gated_delta_rule(*drawn(lengths)[:-1], cu_seqlens=starts_of(lengths))
    segments = one.split(LENGTHS, dim=1)
    torch.testing.assert_close(torch.cat([segments[place] for place in order], dim=1), other)
    _, of_first = chunk_gated_delta_rule(*drawn(lengths[:1])[:-1], cu_seqlens=starts_of(lengths[:1]))
    torch.testing.assert_close(states[:1], of_first)


def test_a_segment_goes_on_from_a_state_token_by_token() -> None:
    """Its second part from the state after the first, in chunks and one token at a time."""
    inputs, length, cut = drawn((50,))[:-1], 50, 37
    whole, end = chunk_gated_delta_rule(*inputs, cu_seqlens=starts_of((length,)))
    _, state = chunk_gated_delta_rule(*(x[:, :cut] for x in inputs), cu_seqlens=starts_of((cut,)))
    rest = [x[:, cut:] for x in inputs]
    second, after = chunk_gated_delta_rule(*rest, initial_state=state, cu_seqlens=starts_of((length - cut,)))
    torch.testing.assert_close(second, whole[:, cut:])
    torch.testing.assert_close(after, end)
    tokens = []
    for place in range(length - cut):
        token, state = recurrent_gated_delta_rule(*(x[:, place] for x in rest), state)
        tokens.append(token)
    torch.testing.assert_close(torch.stack(tokens, dim=1), whole[:, cut:])
    torch.testing.assert_close(state, end)


def test_a_convolution_sees_its_own_segment_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, sum(LENGTHS), 10, generator=generator)
    weight, cotangent = torch.randn(10, 4, generator=generator), torch.randn(x.shape, generator=generator)

    def of_transformers(inputs: Tensors, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = theirs.causal_conv1d_fn(inputs[0].transpose(1, 2), weight, activation="silu")
        return out.transpose(1, 2)

    def results(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Tensors:
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, cotangent)]

    ours = results(lambda x, w: causal_conv1d(x, w, cu_seqlens=starts_of(LENGTHS))[0])
    reference = results(lambda x, w: apart(lambda inputs: of_transformers(inputs, w), [x], LENGTHS))
    for mine, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
