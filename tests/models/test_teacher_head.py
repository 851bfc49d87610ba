"""The divergence from a teacher against whole logits in fp64."""

from typing import Literal

import pytest
import torch

from megatron_dppo.models.teacher_head import TeacherHead, compute_teacher_divergence
from tests.models.test_policy_head import HIDDEN, MIB, LargestTensor

WIDTH = 10
"""The teacher's."""
Direction = Literal["reverse", "forward"]
DIRECTIONS: tuple[Direction, ...] = ("reverse", "forward")
Case = tuple[torch.Tensor, ...]


def case(positions: int, vocab: int, rows: int, *, dtype: torch.dtype = torch.float32) -> Case:
    """Return hidden states and weight of student and of teacher (rows past ``vocab`` are poison),
    and a gradient."""
    generator = torch.Generator().manual_seed(positions + vocab)
    both = []
    for width in (HIDDEN, WIDTH):
        weight = 0.5 * torch.randn(rows, width, generator=generator)
        weight[vocab:] = 1e4
        both += [torch.randn(positions, width, generator=generator).to(dtype), weight.to(dtype)]
    return *both, torch.randn(positions, generator=generator)


def ours(data: Case, vocab: int, direction: Direction, *, chunk_mib: int = 64) -> Case:
    """Return the divergence, and the gradients of the student's hidden states and weight."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in data[:2])
    teacher = TeacherHead(*data[2:4], direction)
    divergence = compute_teacher_divergence(
        teacher,
        hidden,
        weight,
        vocab_size=vocab,
        temperature=0.8,
        tp_group=None,
        chunk_mib=chunk_mib,
    )
    (divergence * data[4]).sum().backward()
    return divergence.detach(), hidden.grad, weight.grad


def naive(data: Case, vocab: int, direction: Direction) -> Case:
    hidden, weight = (tensor.double().requires_grad_() for tensor in data[:2])
    own = torch.log_softmax(hidden @ weight[:vocab].t() / 0.8, dim=-1)
    other = torch.log_softmax(data[2].double() @ data[3][:vocab].double().t() / 0.8, dim=-1)
    of, to = (own, other) if direction == "reverse" else (other, own)
    divergence = (of.exp() * (of - to)).sum(dim=1)
    (divergence * data[4]).sum().backward()
    return divergence.detach(), hidden.grad, weight.grad


def assert_equal(left: Case, right: Case, tolerance: float = 2e-5) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_divergence_and_gradients_equal_whole_logits(direction: Direction) -> None:
    data = case(positions=37, vocab=451, rows=512)
    assert_equal(ours(data, 451, direction), naive(data, 451, direction))
    many = case(positions=50, vocab=20_000, rows=20_096)
    assert_equal(
        ours(many, 20_000, direction, chunk_mib=1), ours(many, 20_000, direction, chunk_mib=256)
    )


def test_weights_in_bf16_are_compared_in_fp32() -> None:
    data = case(positions=37, vocab=451, rows=512, dtype=torch.bfloat16)
    (divergence, *gradients), (expected, *exact) = (
        ours(data, 451, "reverse"),
        naive(data, 451, "reverse"),
    )
    assert_equal((divergence,), (expected,))
    for gradient, reference in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), reference, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tensors_fit_a_chunk(direction: Direction) -> None:
    data = case(positions=1000, vocab=4000, rows=4096)
    with LargestTensor() as largest:
        ours(data, 4000, direction, chunk_mib=1)
    assert largest.elements <= max(MIB // 4, data[1].numel())
