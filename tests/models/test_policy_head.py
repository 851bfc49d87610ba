"""The policy head against whole logits in fp64, and where Megatron's DDP gets its gradient: in an
fp32 buffer."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.config import LayoutConfig, LossConfig, replace
from megatron_dppo.models import policy as policy_module
from megatron_dppo.models.actor import Responses, Sums
from megatron_dppo.models.policy_head import HeadOutput, score_responses
from tests.ranks import RankPool
from tests.steps import build, config_for, held_by, plan_for, step_of_groups

MIB = 1 << 20
HIDDEN = 24
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def case(
    positions: int,
    vocab: int,
    rows: int,
    *,
    dtype: torch.dtype = torch.float32,
    sharpness: float = 0.5,
) -> Case:
    """Return hidden states, a weight of ``rows`` rows (rows past ``vocab`` are poison),
    targets, gradients."""
    generator = torch.Generator().manual_seed(positions + vocab)
    hidden = torch.randn(positions, HIDDEN, generator=generator).to(dtype)
    weight = sharpness * torch.randn(rows, HIDDEN, generator=generator)
    weight[vocab:] = 1e4
    targets = torch.randint(0, vocab, (positions,), generator=generator)
    targets[: min(2, positions)] = torch.tensor([0, vocab - 1])[:positions]
    return hidden, weight.to(dtype), targets, torch.randn(positions, generator=generator)


def kept_of(targets: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the targets and up to five ids of the vocabulary each; the first alone, and some
    repeated."""
    generator = torch.Generator().manual_seed(7)
    kept = torch.randint(0, vocab, (len(targets), 6), generator=generator)
    kept[:, 2] = targets
    kept[::3, 3:] = targets[::3, None]
    kept[:1] = targets[:1, None]
    return kept


def naive(
    data: Case, vocab: int, temperature: float, bonus: float = 0.0, masked: bool = False
) -> tuple[HeadOutput, torch.Tensor, torch.Tensor]:
    """Return scores, and the gradients of hidden states and weight; ``bonus``: factor of the
    entropies in the loss; ``masked``: by ``kept_of``."""
    hidden, weight = (tensor.double().requires_grad_() for tensor in data[:2])
    _, _, targets, grad = data
    logits = hidden @ weight[:vocab].t() / temperature
    if masked:
        dropped = torch.ones_like(logits, dtype=torch.bool)
        logits = logits.masked_fill(dropped.scatter(1, kept_of(targets, vocab), False), -torch.inf)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    entropy = torch.special.entr(logprobs.exp()).sum(dim=1)
    if masked:
        # ``entr`` has no gradient at 0.
        entropy = torch.stack([torch.special.entr(row[row > 0]).sum() for row in logprobs.exp()])
    (chosen * grad + bonus * entropy * grad.flip(0)).sum().backward()
    return HeadOutput(chosen.detach(), entropy.detach()), hidden.grad, weight.grad


def ours(
    data: Case,
    vocab: int,
    temperature: float,
    chunk_mib: int = 64,
    group: Any = None,
    bonus: float = 0.0,
    masked: bool = False,
) -> tuple[HeadOutput, torch.Tensor, torch.Tensor]:
    hidden, weight = (tensor.clone().requires_grad_() for tensor in data[:2])
    _, _, targets, grad = data
    output = score_responses(
        hidden,
        weight,
        targets,
        kept_ids=kept_of(targets, vocab) if masked else None,
        vocab_size=vocab,
        temperature=temperature,
        tp_group=group,
        chunk_mib=chunk_mib,
    )
    total = (output.logprobs * grad).sum()
    if bonus:
        total = total + bonus * (output.entropy * grad.flip(0)).sum()
    total.backward()
    return HeadOutput(*(field.detach() for field in output.present)), hidden.grad, weight.grad


def assert_equal(left: tuple[Any, ...], right: tuple[Any, ...], tolerance: float = 2e-5) -> None:
    for a, b in zip((*left[0].present, *left[1:]), (*right[0].present, *right[1:]), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bonus", [0.0, 0.7])
@pytest.mark.parametrize(("temperature", "padding"), [(0.6, 61), (1.7, 0)])
def test_scores_and_gradients_equal_the_naive_head(
    temperature: float, padding: int, bonus: float, masked: bool
) -> None:
    data = case(positions=37, vocab=451, rows=451 + padding)
    assert_equal(
        ours(data, 451, temperature, bonus=bonus, masked=masked),
        naive(data, 451, temperature, bonus, masked),
    )


def test_token_that_is_kept_alone_is_certain() -> None:
    scores, *_ = ours(case(positions=37, vocab=451, rows=512), 451, 0.01, masked=True)
    assert scores.logprobs[0] == scores.entropy[0] == 0.0


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bonus", [0.0, 0.7])
def test_chunks_change_nothing(bonus: float, masked: bool) -> None:
    data = case(
        positions=50, vocab=40_000, rows=40_064
    )  # chunks of 3 forward and 6 backward, or one of all
    few, many = (
        ours(data, 40_000, 0.8, chunk_mib, bonus=bonus, masked=masked) for chunk_mib in (256, 1)
    )
    assert_equal(few, many)


def test_entropy_alone_has_a_gradient() -> None:
    """By finite differences, without the log-probabilities."""
    hidden, weight, targets, _ = (each.double() for each in case(3, 451, 512))
    settings = {"vocab_size": 451, "temperature": 0.8, "tp_group": None, "chunk_mib": 64}

    def total(states: torch.Tensor) -> torch.Tensor:
        return score_responses(states.float(), weight.float(), targets.long(), **settings).entropy

    hidden.requires_grad_()
    (found,) = torch.autograd.grad(total(hidden).sum(), hidden)
    with torch.no_grad():
        for place in ((0, 0), (1, 5), (2, 23)):
            step = torch.zeros_like(hidden)
            step[place] = 0.05
            slope = (total(hidden + step) - total(hidden - step)).double().sum() / 0.1
            torch.testing.assert_close(slope, found[place].double(), rtol=5e-3, atol=1e-3)


def test_entropy_of_certain_tokens_is_exact() -> None:
    data = case(positions=400, vocab=101, rows=128, sharpness=4.0)
    data[2].copy_((data[0] @ data[1][:101].t()).argmax(dim=1))
    expected, _, _ = naive(data, 101, 1.0)
    certain = expected.logprobs > -1e-3
    assert certain.sum() > 20
    scores, _, _ = ours(data, 101, 1.0)
    torch.testing.assert_close(
        scores.entropy[certain].double(), expected.entropy[certain], rtol=0, atol=1e-5
    )


def test_weights_in_bf16_are_scored_in_fp32() -> None:
    data = case(positions=37, vocab=451, rows=512, dtype=torch.bfloat16)
    scores, *gradients = ours(data, 451, 0.8)
    expected, *expected_gradients = naive(data, 451, 0.8)
    assert_equal(
        (scores,), (expected,)
    )  # products of bf16 numbers, summed in fp32: no rounding of logits to bf16
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.double(), reference, rtol=2**-8, atol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
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


def score_in_parts(
    rank: int, size: int, vocab: int, positions: int, bonus: float = 0.0, masked: bool = False
) -> tuple[Any, ...]:
    """Return this rank's scores, the sum over ranks of the hidden states' gradient, and the
    weight's gradient."""
    data = case(positions=positions, vocab=vocab, rows=128)
    hidden, weight, targets, grad = data
    part = weight.chunk(size)[rank]
    scores, hidden_grad, weight_grad = ours(
        (hidden, part, targets, grad), vocab, 0.8, 1, dist.group.WORLD, bonus, masked
    )
    dist.all_reduce(hidden_grad)
    return scores, hidden_grad, weight_grad


def test_vocabulary_over_two_ranks_equals_one(ranks: RankPool) -> None:
    """Without padding, with padding, with a rank without tokens, and without positions."""
    cases = ((128, 30), (101, 30), (50, 30), (101, 0), (101, 30, 0.7), (50, 30, 0.7))
    cases += ((101, 30, 0.7, True), (50, 30, 0.7, True), (101, 0, 0.0, True))
    assert_parts_equal(cases, ranks.in_turn(2, *((score_in_parts, *each) for each in cases)))


def assert_parts_equal(cases: Sequence[tuple[Any, ...]], results: Iterable[Sequence[Any]]) -> None:
    """Compare results of ``score_in_parts`` with one rank's."""
    for (vocab, positions, *options), parts in zip(cases, results, strict=True):
        data = case(positions=positions, vocab=vocab, rows=128)
        whole = ours(data, vocab, 0.8, 64, None, *options)
        weight_grad = torch.cat([part[2] for part in parts])
        for scores, hidden_grad, _ in parts:
            assert_equal((scores, hidden_grad, weight_grad), whole)


def loss(responses: Responses) -> tuple[torch.Tensor, Sums]:
    return -(
        responses.logprobs * responses.columns["advantage"] * responses.columns["scale"]
    ).sum(), {}


def accumulated(rank: int, size: int, path: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return DDP's gradient of the output weight after several packs, and each pack's by autograd,
    in fp64."""
    config = config_for(path, LayoutConfig(dp=1), LossConfig(), 32, distributed=True)
    config = replace(config, model=replace(config.model, dtype="bf16"))
    world, learner, parts = build(config)
    metadata, groups = step_of_groups(1)
    (minibatch,) = plan_for(world, config, metadata).minibatches
    packs = learner._build_packs(minibatch, held_by(0, metadata, groups))
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def score(
        hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, **settings: Any
    ) -> Any:
        scores = score_responses(hidden, weight, targets, **settings)
        scores.logprobs.register_hook(
            lambda grad: seen.append((hidden.detach(), targets, grad.double()))
        )
        return scores

    with mock.patch.object(policy_module, "score_responses", score):
        parts.actor.accumulate(packs, loss)
    weight = parts.actor.chunks[0].output_layer.weight
    exact = [
        naive((hidden, weight.detach(), *rest), 131, config.rollout.temperature)[2]
        for hidden, *rest in seen
    ]
    return weight.main_grad.double().clone(), exact


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    return float((found - reference).norm() / reference.norm())


def test_packs_of_a_policy_in_bf16_are_summed_in_fp32(ranks: RankPool, policy: Path) -> None:
    [(sums, packs)] = ranks.run(1, accumulated, policy)
    assert len(packs) > 5
    exact = torch.stack(packs).sum(dim=0)
    rounded = torch.stack([pack.bfloat16().double() for pack in packs]).sum(dim=0)
    assert distance(rounded, exact) > 5e-4, "the comparison can fail"
    assert distance(sums, exact) < 5e-6
