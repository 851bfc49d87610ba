"""The Triton kernels of the policy head, run by Triton's interpreter, against torch's operators and
against fp64."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_dppo.models import policy_head
from tests.models.test_policy_head import (
    assert_equal,
    assert_parts_equal,
    case,
    naive,
    ours,
    score_in_parts,
)
from tests.ranks import RankPool, in_turn_on_a_rank

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
Interpret = Callable[..., list[Any]]


def interpreted(rank: int, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a rank whose policy head takes the kernels, as on CUDA."""
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read by Triton while it is imported, which torch has done already
    )
    for name in [*sys.modules]:
        if name.partition(".")[0] == "triton" and not name.startswith("triton._C"):
            del sys.modules[name]
    from megatron_dppo.models import policy_head_triton

    with mock.patch.object(policy_head, "_select_kernels", lambda on_cuda: policy_head_triton):
        return function(rank, size, *arguments)


@pytest.fixture(scope="module")
def interpret(ranks: RankPool) -> Interpret:
    """Return ``RankPool.in_turn`` with results by rank. Triton is imported once for all calls."""
    return lambda size, *calls: ranks.run(size, interpreted, in_turn_on_a_rank, calls)


def head(
    rank: int,
    size: int,
    positions: int,
    vocab: int,
    rows: int,
    chunk_mib: int,
    dtype: torch.dtype,
    bonus: float = 0.0,
    masked: bool = False,
) -> Any:
    data = case(positions, vocab, rows, dtype=dtype, sharpness=1.0)
    return ours(data, vocab, 0.8, chunk_mib, None, bonus, masked)


def test_head_on_kernels_equals_the_naive_head(interpret: Interpret) -> None:
    """With columns beyond a block of each kernel, without positions, and in chunks."""
    cases = [(0, 451, 512), (1, 451, 451), (7, 9001, 9088)]
    calls = [(head, *each, 64, torch.float32) for each in cases]
    calls += [(head, 7, 451, 512, 64, torch.bfloat16)]
    calls += [(head, 15, 40_000, 40_064, chunk_mib, torch.float32) for chunk_mib in (1, 64)]
    [(*results, (scores, *rounded), many, one)] = interpret(1, *calls)
    for (positions, vocab, rows), found in zip(cases, results, strict=True):
        assert_equal(found, naive(case(positions, vocab, rows, sharpness=1.0), vocab, 0.8))
    expected, *gradients = naive(case(7, 451, 512, dtype=torch.bfloat16, sharpness=1.0), 451, 0.8)
    assert_equal((scores,), (expected,))
    for found, reference in zip(rounded, gradients, strict=True):
        # Triton's interpreter cuts bf16 off where a GPU rounds to the nearest.
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), reference, rtol=2**-6, atol=1e-3)
    assert_equal(many[:1], one[:1], tolerance=1e-6)
    assert_equal(many, one)


def test_bonus_on_kernels_equals_the_naive_head(interpret: Interpret) -> None:
    """With one chunk, whose kept logits the gradient overwrites, and with several; with sampling
    masks too."""
    data = case(15, 9001, 9088, sharpness=1.0)
    cases = [(chunk_mib, masked) for chunk_mib in (1, 64) for masked in (False, True)]
    calls = [(head, 15, 9001, 9088, size, torch.float32, 0.7, masked) for size, masked in cases]
    [results] = interpret(1, *calls)
    for (_, masked), found in zip(cases, results, strict=True):
        assert_equal(found, naive(data, 9001, 0.8, 0.7, masked))


def test_kernels_over_two_ranks_equal_operators_on_one(interpret: Interpret) -> None:
    cases = [(128, 9), (101, 9), (50, 9), (101, 0), (101, 9, 0.7), (101, 9, 0.7, True)]
    results = interpret(2, *((score_in_parts, *each) for each in cases))
    assert_parts_equal(cases, zip(*results, strict=True))


def differentiate_twice(rank: int, size: int) -> list[torch.Tensor]:
    """Return the gradients of the hidden states from two backward passes over one graph."""
    hidden, weight, targets, grad = case(7, 451, 512)
    hidden.requires_grad_()
    settings = {"vocab_size": 451, "temperature": 0.8, "tp_group": None, "chunk_mib": 64}
    logprobs = policy_head.score_responses(hidden, weight, targets, **settings).logprobs
    return [torch.autograd.grad(logprobs, hidden, grad, retain_graph=True)[0] for _ in range(2)]


def test_second_backward_pass_gives_the_same_gradient(interpret: Interpret) -> None:
    """The first one overwrites the logits that the forward pass has kept."""
    [[[first, second]]] = interpret(1, (differentiate_twice,))
    torch.testing.assert_close(second, first)


VARIANTS = [
    ("_reduce_logits", {}),
    ("_compute_logit_gradient", {"out": "*bf16"}),
    ("_compute_logit_gradient", {"out": "*fp32"}),
    ("_compute_logit_gradient", {"out": "*bf16", "HAS_BONUS": True}),
]
REGISTERS = 128
"""Of a thread, at most: 65,536 registers then hold four programs of 128 threads, or two of 256."""


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_for_gpus(capability: int, tmp_path: Path) -> None:
    """Without a GPU. Arguments are aligned as those of a policy with a multiple of 16 columns on a
    rank."""
    import triton
    from triton.backends.compiler import GPUTarget

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for name, types in VARIANTS:
        compiled = compile_kernel(name, types, GPUTarget("cuda", capability, 32))
        cubin = tmp_path / "cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        dump = subprocess.run(
            [cuobjdump, "-res-usage", "-sass", cubin], capture_output=True, check=True, text=True
        )
        usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", dump.stdout))
        assert int(usage["REG"]) <= REGISTERS and usage["STACK"] == usage["LOCAL"] == "0"
        assert not re.search(r"\b(LDL|STL)\b", dump.stdout)
        assert dump.stdout.count("LDG.E.128") == 4  # 16 logits of each thread


def compile_kernel(name: str, variant: dict[str, object], target: Any) -> Any:
    import triton
    from triton.compiler import ASTSource

    from megatron_dppo.models import policy_head_triton as kernels

    kernel = getattr(kernels, name)
    constants: dict[str, object] = {"BLOCK": kernels.SUMMARY_BLOCK}
    if name == "_compute_logit_gradient":
        constants = {"BLOCK": kernels.GRADIENT_BLOCK, "HAS_BONUS": "HAS_BONUS" in variant}
    tensors = ("logits", "peak", "sums", "normaliser", "gradient", "entropy", "entropy_gradient")
    types = dict.fromkeys(tensors, "*fp32")
    types |= {
        "targets": "*i64",
        "inverse_temperature": "fp32",
        **variant,
        **dict.fromkeys(constants, "constexpr"),
    }
    signature = {each: types.get(each, "i32") for each in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if parameter.name not in ("inverse_temperature", *constants)
        and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    }
    source = ASTSource(kernel, signature, constexprs, aligned)
    return triton.compile(
        source, target=target, options={"num_warps": 8 if name == "_reduce_logits" else 4}
    )
