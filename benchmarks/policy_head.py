"""Peak memory and time of the policy head with its loss, forward and backward, against whole
logits.

    python benchmarks/policy_head.py [--json] [--tokens 8192] [--vocabulary 151936] [--hidden 1024]
    [--chunk-mib MIB] python benchmarks/policy_head.py --cuda [--tokens 12288] [--hidden 2560] …

Each way runs in a process of its own. Its peak is the most memory above what it held before the
forward pass, when hidden states and weight existed, less the weight's gradient, which all ways hand
over at the end. The naive way is ``log_softmax`` of the logits and a gather; with the default sizes
it needs some 15 GB, so that fewer tokens are taken where less is free, for all ways, and the report
says so.

On a CPU everything is in fp32, memory is what is resident, and a way runs once. With ``--cuda``
weights and hidden states are in bf16, the head adds the weight's gradient to an fp32 buffer that
exists before, as in training, and it is measured with Triton's kernels and with torch's operators;
memory is what torch has allocated, and the time is the median of several runs after a first one,
which compiles. Without a GPU ``--cuda`` ends with exit code 2.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from unittest import mock

import psutil
import torch
from harness import MIB, PeakMemory, arguments, finish, in_own_process, timed

from megatron_dppo.config import HEAD_CHUNK_MIB
from megatron_dppo.models import policy_head, policy_head_torch
from megatron_dppo.models.policy_head import score_responses

NAIVE_COPIES = 3.2
"""Tensors of [tokens, vocabulary] in fp32 that the naive way may hold at a time, with room to
spare."""
TEMPERATURE = 0.7
REPEATS = 5
"""Timed runs on a GPU."""
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: int
    vocabulary: int
    hidden: int
    chunk_mib: int
    cuda: bool


@dataclass(frozen=True, slots=True)
class Measurement:
    peak_mib: float
    """Above what was resident before, the weight's gradient left out."""
    seconds: float
    """Forward and backward."""


class PeakAllocated:
    """How far the memory of tensors on the GPU grew within the ``with`` block, in bytes."""

    def __enter__(self) -> PeakAllocated:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.grown = torch.cuda.max_memory_allocated() - self._before


def naive(sizes: Sizes) -> Head:
    def head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = (hidden @ weight.t()).float() / TEMPERATURE
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]

    return head


def chunked(sizes: Sizes) -> Head:
    def head(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return score_responses(
            hidden,
            weight,
            targets,
            vocab_size=sizes.vocabulary,
            temperature=TEMPERATURE,
            tp_group=None,
            chunk_mib=sizes.chunk_mib,
        ).logprobs

    return head


def with_operators(sizes: Sizes) -> Head:
    """On a GPU, without the kernels, in all of this process."""
    mock.patch.object(policy_head, "_select_kernels", lambda on_cuda: policy_head_torch).start()
    return chunked(sizes)


def measure(make_head: Callable[[Sizes], Head], sizes: Sizes) -> Measurement:
    """Run one way in this process."""
    torch.manual_seed(0)
    head = make_head(sizes)
    kind = {"device": "cuda", "dtype": torch.bfloat16} if sizes.cuda else {}
    small = torch.randn(4, 8, requires_grad=True, **kind)
    head(
        small, small, torch.arange(4, device=small.device)
    ).sum().backward()  # what is allocated once is not counted
    hidden = torch.randn(sizes.tokens, sizes.hidden, **kind).requires_grad_()
    weight = torch.randn(sizes.vocabulary, sizes.hidden, **kind).mul_(0.02).requires_grad_()
    if sizes.cuda and make_head is not naive:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    targets = torch.randint(0, sizes.vocabulary, (sizes.tokens,), device=hidden.device)
    advantage = torch.randn(sizes.tokens, device=hidden.device)

    def passes() -> None:
        loss = -(head(hidden, weight, targets) * advantage).sum()
        loss.backward()
        if sizes.cuda:
            torch.cuda.synchronize()

    def run() -> float:
        hidden.grad = weight.grad = None
        return timed(passes)[0]

    if sizes.cuda:
        run()
        hidden.grad = weight.grad = None
    gc.collect()
    with PeakAllocated() if sizes.cuda else PeakMemory("VmRSS") as memory:
        seconds = run()
    if sizes.cuda:
        seconds = statistics.median(run() for _ in range(REPEATS))
    gradient = weight.grad.numel() * weight.grad.element_size()
    return Measurement((memory.grown - gradient) / MIB, seconds)


def fit(sizes: Sizes) -> Sizes:
    """As many tokens as the naive way has room for, at most those asked for."""
    fixed = 3 * 4 * sizes.vocabulary * sizes.hidden
    free = torch.cuda.mem_get_info()[0] if sizes.cuda else psutil.virtual_memory().available
    return replace(
        sizes,
        tokens=min(sizes.tokens, int(max(free - fixed, 0) / (NAIVE_COPIES * 4 * sizes.vocabulary))),
    )


def main() -> None:
    options = arguments(
        __doc__,
        tokens=8192,
        vocabulary=151936,
        hidden=1024,
        chunk_mib=(int, "as model.head_chunk_mib"),
        cuda=(False, "on a GPU, with Triton's kernels and with torch's operators"),
    ).parse_args()
    if options.cuda and not torch.cuda.is_available():
        print("policy_head.py --cuda needs CUDA, and torch sees none", file=sys.stderr)
        raise SystemExit(2)
    chunk_mib = options.chunk_mib or HEAD_CHUNK_MIB["cuda" if options.cuda else "cpu"]
    asked = Sizes(options.tokens, options.vocabulary, options.hidden, chunk_mib, options.cuda)
    sizes = fit(asked)
    ways: dict[str, Callable[[Sizes], Head]] = {"": chunked, "naive_": naive}
    if options.cuda:
        ways["operators_"] = with_operators
    found = {name: in_own_process(measure, way, sizes) for name, way in ways.items()}
    report = {
        **asdict(sizes),
        "tokens_asked": asked.tokens,
        "device": torch.cuda.get_device_name() if options.cuda else "cpu",
        "threads": int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())),
        "peak_over_naive": round(found[""].peak_mib / found["naive_"].peak_mib, 4),
        "seconds_over_naive": round(found[""].seconds / found["naive_"].seconds, 4),
    }
    for name, one in found.items():
        report |= {
            f"{name}peak_mib": round(one.peak_mib, 1),
            f"{name}seconds": round(one.seconds, 4),
        }
    finish(report, options)


if __name__ == "__main__":
    main()
