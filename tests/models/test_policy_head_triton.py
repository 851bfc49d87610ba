"""The Triton kernels of the policy head, run by Triton's interpreter, against torch's operators and against fp64."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dppo.models import policy_head, policy_head_torch
from tests.models.test_policy_head import assert_equal, case, naive, ours, score_in_parts
from tests.ranks import RankPool, in_turn_on_a_rank

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
Interpret = Callable[..., list[Any]]


def interpreted(rank: int, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result in a rank whose policy head takes the kernels, as it would on CUDA."""
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton while it is imported, which torch has done already
    for name in [*sys.modules]:
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    from megatron_dppo.models import policy_head_triton

    with mock.patch.object(policy_head, "_passes", lambda on_cuda: policy_head_triton):
        return function(rank, size, *arguments)


@pytest.fixture(scope="module")
def interpret(ranks: RankPool) -> Interpret:
    """As ``RankPool.in_turn``, by ranks: Triton is imported once for all calls."""
    return lambda size, *calls: ranks.run(size, interpreted, in_turn_on_a_rank, calls)


def logits_and_targets(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits from flat to sharp, and targets from the first column to the last, and on both sides beyond."""
    generator = torch.Generator().manual_seed(rows + columns)
    logits = torch.randn(rows, columns, generator=generator) * torch.linspace(0.1, 12.0, rows)[:, None]
    targets = torch.randint(0, columns, (rows,), generator=generator)
    targets[:4] = torch.tensor([0, columns - 1, -1, columns])
    targets[4] = logits[4].argmax()
    return logits, targets


def exact_summary(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    z = logits.double() / temperature
    own = torch.arange(logits.shape[1]) == targets[:, None]
    peak = z.amax(dim=1)
    e = (z - peak[:, None]).exp()
    terms = (e, e * (z - peak[:, None]), z.where(own, 0.0), (e * e).where(~own, 0.0))
    return peak, torch.stack([term.sum(dim=1) for term in terms])


def summaries(rank: int, size: int, rows: int, columns: int, temperature: float) -> list[torch.Tensor]:
    """Peak and sums, by torch and by the kernel, the sums a part of larger tensors; and those without squares."""
    from megatron_dppo.models import policy_head_triton

    logits, targets = logits_and_targets(rows, columns)
    found = []
    for passes, count in ((policy_head_torch, 4), (policy_head_triton, 4), (policy_head_triton, 3)):
        peak, sums = torch.zeros(rows + 9), torch.zeros(count, rows + 9)
        here = slice(5, 5 + rows)
        buffers = (logits.clone(), torch.empty_like(logits))[: passes.BUFFERS]
        passes.summarise(buffers, targets, temperature, peak[here], sums[:, here])
        assert not sums[:, :5].any() and not sums[:, 5 + rows :].any()
        found += [peak[here], sums[:, here]]
    return found


def test_the_summary_of_a_row_is_exact(interpret: Interpret) -> None:
    cases = [(9, columns, temperature) for columns in (1, 451, 4096, 9001) for temperature in (0.6, 1.0)]
    [results] = interpret(1, *((summaries, *case) for case in cases))
    for (rows, columns, temperature), result in zip(cases, results, strict=True):
        torch_peak, torch_sums, peak, sums, _, fewer = result
        exact_peak, exact = exact_summary(*logits_and_targets(rows, columns), temperature)
        torch.testing.assert_close(peak, torch_peak, rtol=2e-7, atol=0)
        torch.testing.assert_close(peak.double(), exact_peak, rtol=2e-7, atol=0)
        for found in (sums, torch_sums):
            torch.testing.assert_close(found[[0, 2, 3]].double(), exact[[0, 2, 3]], rtol=1e-5, atol=1e-30)
            # Where one token has all the probability, few digits of its logit are left in this sum.
            torch.testing.assert_close(found[1].double(), exact[1], rtol=3e-5, atol=1e-5)
        assert torch.equal(fewer, sums[:3])


def slopes(rank: int, size: int, rows: int, columns: int, temperature: float) -> list[torch.Tensor]:
    """By torch and by the kernel: in the place of the logits, and rounded into a tensor of its own."""
    from megatron_dppo.models import policy_head_triton

    found = []
    for passes in (policy_head_torch, policy_head_triton):
        logits, targets = logits_and_targets(rows, columns)
        normaliser, gradient = (logits / temperature).logsumexp(dim=1) + 0.1, torch.linspace(-2.0, 3.0, rows)
        rounded = torch.empty_like(logits, dtype=torch.bfloat16)
        passes.slope(logits.clone(), targets, temperature, normaliser, gradient, out=rounded)
        passes.slope(logits, targets, temperature, normaliser, gradient, out=logits)
        found += [logits, rounded]
    return found


def test_the_gradient_of_the_logits_is_that_of_torchs_operators(interpret: Interpret) -> None:
    cases = [(9, columns, temperature) for columns in (1, 451, 2048, 9001) for temperature in (0.6, 1.0)]
    [results] = interpret(1, *((slopes, *case) for case in cases))
    for expected, expected_rounded, found, rounded in results:
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6)
        assert rounded.dtype == torch.bfloat16
        # Triton's interpreter cuts bf16 off where a GPU rounds to the nearest.
        torch.testing.assert_close(rounded, expected_rounded, rtol=2**-7, atol=1e-6)


def head(rank: int, size: int, positions: int, vocab: int, rows: int, chunk_mib: int, dtype: torch.dtype) -> Any:
    return ours(case(positions, vocab, rows, dtype=dtype), vocab, 0.8, chunk_mib)


def test_the_head_on_kernels_equals_the_naive_one(interpret: Interpret) -> None:
    cases = [(positions, *of) for positions in (0, 1, 7) for of in ((451, 451), (451, 512), (5003, 5120))]
    [results] = interpret(1, *((head, *each, 64, torch.float32) for each in cases))
    for (positions, vocab, rows), found in zip(cases, results, strict=True):
        assert_equal(found, naive(case(positions, vocab, rows), vocab, 0.8))


def test_weights_in_bf16_are_scored_in_fp32_by_kernels_too_and_chunks_change_nothing(interpret: Interpret) -> None:
    calls = [(head, 7, 451, 512, 64, torch.bfloat16)]
    calls += [(head, 15, 40_000, 40_064, chunk_mib, torch.float32) for chunk_mib in (1, 64)]  # chunks of 6, and one
    [((scores, *_), (many, *many_gradients), (one, *gradients))] = interpret(1, *calls)
    expected, *_ = naive(case(7, 451, 512, dtype=torch.bfloat16), 451, 0.8)
    assert_equal((scores,), (expected,))
    assert_equal((many,), (one,), tolerance=1e-6)
    assert_equal((many, *many_gradients), (one, *gradients))


def products(rank: int, size: int, positions: int, chunk_mib: int) -> tuple[int, bool]:
    """How often logits are made in a forward and two backward passes; whether both give the same gradients."""
    hidden, weight, targets, gradient = case(positions, 40_000, 40_064)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with mock.patch.object(policy_head, "logits_of", side_effect=policy_head.logits_of) as made:
        scored = policy_head.score_responses(
            hidden, weight, targets, vocab_size=40_000, temperature=0.8, tp_group=None, chunk_mib=chunk_mib
        )
        first, second = (
            torch.autograd.grad(scored.logprobs, leaves, gradient, retain_graph=retained) for retained in (True, False)
        )
    return made.call_count, all(map(torch.equal, first, second))


def test_logits_that_fit_are_made_once_and_again_for_another_backward_pass(interpret: Interpret) -> None:
    [(kept, chunks, nothing)] = interpret(1, (products, 6, 1), (products, 7, 1), (products, 0, 1))
    assert kept == (2, True)
    assert chunks == (6, True)
    assert nothing == (0, True)


def test_kernels_over_two_ranks_equal_torchs_operators_on_one(interpret: Interpret) -> None:
    cases = [(128, 9), (101, 9), (50, 9), (101, 0)]
    parts_of_cases = zip(*interpret(2, *((score_in_parts, *each) for each in cases)), strict=True)
    for (vocab, positions), parts in zip(cases, parts_of_cases, strict=True):
        whole = ours(case(positions=positions, vocab=vocab, rows=128), vocab, 0.8)
        weight_grad = torch.cat([part[2] for part in parts])
        for scores, hidden_grad, _ in parts:
            assert_equal((scores, hidden_grad, weight_grad), whole)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_for_gpus(capability: int) -> None:
    """Which needs no GPU; the interpreter takes programs that the compiler refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_dppo.models import policy_head_triton as kernels

    types = dict.fromkeys(("logits", "peak", "sums", "normaliser", "gradient"), "*fp32")
    types |= {"targets": "*i64", "out": "*bf16", "inverse_temperature": "fp32"}
    for kernel, constants in (
        (kernels._summarise, {"SQUARES": True, "BLOCK": kernels.SUMMARY_BLOCK}),
        (kernels._slope, {"BLOCK": kernels.SLOPE_BLOCK}),
    ):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        constexprs = {(names.index(name),): value for name, value in constants.items()}
        compiled = triton.compile(ASTSource(kernel, signature, constexprs), target=GPUTarget("cuda", capability, 32))
        assert "cubin" in compiled.asm
