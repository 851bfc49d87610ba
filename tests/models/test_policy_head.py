"""The policy head against the same numbers computed the naive way, in fp64 from whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.models.policy_head import HeadOutput, score_responses
from tests.ranks import RankPool

MIB = 1 << 20
HIDDEN = 24
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(positions: int, vocab: int, rows: int, *, dtype: torch.dtype = torch.float32, sharpness: float = 0.5) -> Case:
    """Hidden states, a weight with ``rows`` rows (those past ``vocab`` are padding, and poison), targets, gradients."""
    generator = torch.Generator().manual_seed(positions + vocab)
    hidden = torch.randn(positions, HIDDEN, generator=generator).to(dtype)
    weight = sharpness * torch.randn(rows, HIDDEN, generator=generator)
    weight[vocab:] = 1e4
    targets = torch.randint(0, vocab, (positions,), generator=generator)
    targets[: min(2, positions)] = torch.tensor([0, vocab - 1])[:positions]
    return hidden, weight.to(dtype), targets, torch.randn(positions, generator=generator)


def naive(data: Case, vocab: int, temperature: float) -> tuple[HeadOutput, torch.Tensor, torch.Tensor]:
    """Scores, and the gradients of hidden states and weight."""
    hidden, weight = (tensor.double().requires_grad_() for tensor in data[:2])
    _, _, targets, grad = data
    logprobs = torch.log_softmax(hidden @ weight[:vocab].t() / temperature, dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    probabilities = logprobs.exp()
    error = torch.nn.functional.one_hot(targets, vocab) - probabilities
    (chosen * grad).sum().backward()
    entropy = -(probabilities * logprobs).sum(dim=1)
    return HeadOutput(chosen.detach(), entropy.detach(), error.norm(dim=1).detach()), hidden.grad, weight.grad


def ours(
    data: Case, vocab: int, temperature: float, chunk_mib: int = 64, group: Any = None, score_norm: bool = True
) -> tuple[HeadOutput, torch.Tensor, torch.Tensor]:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in data[:2])
    _, _, targets, grad = data
    output = score_responses(
        hidden,
        weight,
        targets,
        vocab_size=vocab,
        temperature=temperature,
        tp_group=group,
        chunk_mib=chunk_mib,
        score_norm=score_norm,
    )
    (output.logprobs * grad).sum().backward()
    return HeadOutput(*(field.detach() for field in output.present)), hidden.grad, weight.grad


def assert_equal(left: tuple[Any, ...], right: tuple[Any, ...], tolerance: float = 2e-5) -> None:
    for a, b in zip((*left[0].present, *left[1:]), (*right[0].present, *right[1:]), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("padding", [0, 61])
def test_scores_and_gradients_equal_the_naive_ones(temperature: float, padding: int) -> None:
    data = case(positions=37, vocab=451, rows=451 + padding)
    assert_equal(ours(data, 451, temperature), naive(data, 451, temperature))


def test_chunks_change_nothing() -> None:
    data = case(positions=50, vocab=40_000, rows=40_064)  # chunks of 3 forward and 6 backward, or one of all
    assert_equal(ours(data, 40_000, 0.8, chunk_mib=1), ours(data, 40_000, 0.8, chunk_mib=256))


def test_score_norm_and_entropy_keep_their_digits_where_the_policy_is_certain() -> None:
    data = case(positions=400, vocab=101, rows=128, sharpness=4.0)
    data[2].copy_((data[0] @ data[1][:101].t()).argmax(dim=1))
    expected, _, _ = naive(data, 101, 1.0)
    certain = expected.score_norm < 1e-3
    assert certain.sum() > 20
    scores, _, _ = ours(data, 101, 1.0)
    torch.testing.assert_close(scores.score_norm[certain].double(), expected.score_norm[certain], rtol=0, atol=5e-6)
    torch.testing.assert_close(scores.entropy[certain].double(), expected.entropy[certain], rtol=0, atol=1e-5)


def test_weights_in_bf16_are_scored_in_fp32() -> None:
    data = case(positions=37, vocab=451, rows=512, dtype=torch.bfloat16)
    scores, *gradients = ours(data, 451, 0.8)
    expected, *expected_gradients = naive(data, 451, 0.8)
    assert_equal((scores,), (expected,))  # products of bf16 numbers, summed in fp32: no rounding of logits to bf16
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), reference, rtol=2**-8, atol=1e-4)


def test_entropy_and_score_norm_carry_no_gradient() -> None:
    hidden, weight, targets, _ = case(positions=5, vocab=40, rows=64)
    output = score_responses(
        hidden.requires_grad_(),
        weight,
        targets,
        vocab_size=40,
        temperature=1.0,
        tp_group=None,
        chunk_mib=1,
        score_norm=True,
    )
    assert [field.requires_grad for field in output.present] == [True, False, False]


def test_a_score_norm_that_nobody_asks_for_is_not_computed() -> None:
    data = case(positions=37, vocab=451, rows=512)
    with_norm, *gradients = ours(data, 451, 0.8)
    without, *same = ours(data, 451, 0.8, score_norm=False)
    assert without.score_norm is None
    assert all(torch.equal(a, b) for a, b in zip((*without[:2], *same), (*with_norm[:2], *gradients), strict=True))


def test_no_positions_give_zero_gradients() -> None:
    scores, hidden_grad, weight_grad = ours(case(positions=0, vocab=40, rows=64), 40, 1.0)
    assert all(len(field) == 0 for field in scores.present)
    assert hidden_grad.shape == (0, HIDDEN)
    assert weight_grad.shape == (64, HIDDEN) and not weight_grad.any()


@pytest.mark.parametrize("score_norm", [False, True])
def test_no_value_is_read_on_the_host(score_norm: bool) -> None:
    """On the meta device there are no values, and every operation that needs one for what it returns fails."""
    data = case(positions=1000, vocab=4000, rows=4096)
    scores, *gradients = ours(
        tuple(tensor.to("meta") for tensor in data), 4000, 0.8, chunk_mib=1, score_norm=score_norm
    )
    assert scores.logprobs.shape == (1000,) and [g.shape for g in gradients] == [data[0].shape, data[1].shape]


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_forward_or_backward() -> None:
    data = case(positions=1000, vocab=4000, rows=4096)
    with LargestTensor() as largest:
        ours(data, 4000, 0.8, chunk_mib=1)
    assert largest.elements <= max(MIB // 4, data[1].numel())
    with LargestTensor() as largest:
        naive(data, 4000, 0.8)
    assert largest.elements >= 1000 * 4000, "the measurement sees what it is meant to rule out"


def score_in_parts(rank: int, size: int, vocab: int, positions: int) -> tuple[Any, ...]:
    """This rank's scores and weight gradient, and the sum over ranks of the gradient of the hidden states."""
    data = case(positions=positions, vocab=vocab, rows=128)
    hidden, weight, targets, grad = data
    part = weight.chunk(size)[rank]
    scores, hidden_grad, weight_grad = ours((hidden, part, targets, grad), vocab, 0.8, 1, dist.group.WORLD)
    dist.all_reduce(hidden_grad)
    return scores, hidden_grad, weight_grad


@pytest.mark.parametrize(
    ("vocab", "positions"),
    [(128, 30), (101, 30), (50, 30), (101, 0)],
    ids=["no padding", "padding", "a rank without tokens", "no positions"],
)
def test_vocabulary_over_two_ranks_equals_one(ranks: RankPool, vocab: int, positions: int) -> None:
    parts = ranks.run(2, score_in_parts, vocab, positions)
    whole = ours(case(positions=positions, vocab=vocab, rows=128), vocab, 0.8)
    weight_grad = torch.cat([part[2] for part in parts])
    for scores, hidden_grad, _ in parts:
        assert_equal((scores, hidden_grad, weight_grad), whole)


@pytest.mark.gpu
def test_cuda_products_of_bf16_keep_fp32_sums() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA: its kernels return the fp32 sums of bf16 products")
    data = case(positions=37, vocab=451, rows=512, dtype=torch.bfloat16)
    on_cuda = ours(tuple(tensor.cuda() for tensor in data), 451, 0.8)
    on_cpu = ours(data, 451, 0.8)
    for a, b in zip((*on_cuda[0],), (*on_cpu[0],), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-5, atol=2e-5)
    for a, b in zip(on_cuda[1:], on_cpu[1:], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2**-7, atol=1e-3)
