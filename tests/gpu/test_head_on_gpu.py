"""The policy head on one GPU, in bf16: Triton's kernels and torch's operators, their memory, and
who waits for whom."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_dppo.config import HEAD_CHUNK_MIB
from megatron_dppo.models import policy_head, policy_head_torch
from megatron_dppo.models.policy_head import HeadOutput, score_responses
from tests.commands import Command
from tests.models.test_policy_head import MIB, Case, distance, naive

VOCABULARY, HIDDEN, TEMPERATURE = 151936, 1024, 0.7
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "policy_head.py"


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs CUDA."""
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")(test)
    )


@pytest.fixture(params=["kernels", "operators"])
def passes(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "operators":
        with mock.patch.object(policy_head, "_select_kernels", lambda on_cuda: policy_head_torch):
            yield request.param
    else:
        assert importlib.util.find_spec("triton") is not None, "torch for CUDA brings it"
        yield request.param


def case(positions: int) -> Case:
    """Hidden states, a weight with 64 rows of padding, targets, gradients."""
    generator = torch.Generator("cuda").manual_seed(positions)
    kind = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    hidden = torch.randn(positions, HIDDEN, **kind)
    weight = torch.randn(VOCABULARY + 64, HIDDEN, **kind) * 0.1
    weight[VOCABULARY:] = 1e4
    targets = torch.randint(0, VOCABULARY, (positions,), device="cuda", generator=generator)
    targets[::2] = (hidden[::2] @ weight[:VOCABULARY].t()).argmax(
        dim=1
    )  # some that the policy finds likely
    return hidden, weight, targets, torch.randn(positions, device="cuda", generator=generator)


def score(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_mib: int
) -> HeadOutput:
    settings = {"vocab_size": VOCABULARY, "temperature": TEMPERATURE, "tp_group": None}
    return score_responses(hidden, weight, targets, chunk_mib=chunk_mib, **settings)


def learnable(data: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states, and the weight as Megatron's DDP has it."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in data[:2])
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    return hidden, weight


@on_a_gpu
def test_scores_and_gradients_equal_those_in_fp64(passes: str) -> None:
    data = case(400)
    hidden, weight = learnable(data)
    output = score(hidden, weight, data[2], chunk_mib=64)  # several chunks
    (output.logprobs * data[3]).sum().backward()
    expected, exact_hidden, exact_weight = naive(data, VOCABULARY, TEMPERATURE)
    for ours, reference in zip(output.present, expected.present, strict=True):
        torch.testing.assert_close(ours.detach().double(), reference, rtol=2e-5, atol=5e-5)
    assert distance(hidden.grad, exact_hidden) < 2**-7
    assert distance(weight.main_grad, exact_weight) < 2**-8, (
        "the slope is rounded to bf16, and no sum is"
    )
    assert not weight.main_grad[VOCABULARY:].any()


@on_a_gpu
def test_chunks_change_nothing(passes: str) -> None:
    hidden, weight, targets, _ = case(400)
    with torch.no_grad():
        many, one = (score(hidden, weight, targets, chunk_mib) for chunk_mib in (32, 1024))
    for a, b in zip(many, one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=5e-6)


@on_a_gpu
def test_the_host_never_waits_for_the_gpu(passes: str) -> None:
    data = case(400)
    hidden, weight = learnable(data)

    def step() -> None:
        (score(hidden, weight, data[2], chunk_mib=64).logprobs * data[3]).sum().backward()

    step()  # libraries allocate and compile
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        with pytest.raises(RuntimeError, match="synchroniz"):
            data[3].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_a_gpu
@pytest.mark.parametrize("chunk_mib", [64, HEAD_CHUNK_MIB["cuda"]])
def test_the_head_never_holds_the_logits(passes: str, chunk_mib: int) -> None:
    data = case(8192)
    hidden, weight = learnable(data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    score(hidden, weight, data[2], chunk_mib).logprobs.sum().backward()
    handed_over, workspace = 2 * weight.numel(), 128 * MIB
    allowed = max(chunk_mib * MIB, handed_over) + 2 * hidden.numel() + workspace
    assert torch.cuda.max_memory_allocated() - before < allowed < 4 * 8192 * VOCABULARY


@on_a_gpu
def test_kernels_are_faster_than_operators(tmp_path: Path) -> None:
    report = benchmark(tmp_path / "log", "--cuda", "--tokens", "4096", "--hidden", "1024")
    assert report["seconds"] < report["operators_seconds"]


def benchmark(log: Path, *arguments: str) -> dict[str, float]:
    code = Command(
        ["python", str(SCRIPT), "--json", *arguments], log, SCRIPT.parents[1]
    ).exit_code()
    assert code == 0, log.read_text()
    return json.loads(log.read_text().splitlines()[-1])


def test_the_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    report = benchmark(
        tmp_path / "log", "--tokens", "1024", "--vocabulary", "32768", "--hidden", "64"
    )
    assert report["device"] == "cpu"
    assert 0 < report["peak_mib"] < 0.5 * report["naive_peak_mib"]
