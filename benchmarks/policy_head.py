"""Compare peak memory and time of the policy head with whole logits: loss, forward and backward.

    python benchmarks/policy_head.py [--json] [--tokens 8192] [--vocabulary 151936]
        [--hidden 1024] [--chunk-mib MIB]
    python benchmarks/policy_head.py --cuda [--tokens 12288] [--hidden 2560] …

- Each implementation runs in a separate process.
- A peak is the growth of memory from the start of the forward pass, when hidden states and weight
  exist, minus the weight's gradient, which every implementation returns.
- The naive implementation is ``log_softmax`` of the logits and a gather, some 15 GB at default
  sizes. If less is free, the tokens are reduced for all implementations; the report has both
  numbers.

On a CPU all tensors are in fp32, memory is resident memory, and each implementation runs once.

With ``--cuda``:

- Weights and hidden states are in bf16.
- The head adds the weight's gradient to an existing fp32 buffer, as in training.
- The head runs with Triton's kernels, and with torch's operators.
- Memory is torch's allocated memory.
- The time is the median of several runs after a first run, which compiles.
- Without a GPU, the exit code is 2.
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
"""fp32 tensors of [tokens, vocabulary] in the naive implementation at once, with a margin."""
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
    """Growth of memory, without the weight's gradient."""
    seconds: float
    """Seconds of forward and backward pass."""


class PeakAllocated:
    """Growth of the memory of tensors on the GPU within the ``with`` block, in bytes."""

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
    """Replace Triton's kernels by torch's operators on a GPU, in all of this process."""
    mock.patch.object(policy_head, "_select_kernels", lambda on_cuda: policy_head_torch).start()
    return chunked(sizes)


def measure(make_head: Callable[[Sizes], Head], sizes: Sizes) -> Measurement:
    """Measure one implementation in this process."""
    torch.manual_seed(0)
    head = make_head(sizes)
    kind = {"device": "cuda", "dtype": torch.bfloat16} if sizes.cuda else {}
    small = torch.randn(4, 8, requires_grad=True, **kind)
    # Warm up, because allocations that are made once are not counted.
    small_targets = torch.arange(4, device=small.device)
    head(small, small, small_targets).sum().backward()
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
    """Limit the tokens to the naive implementation's room in free memory."""
    fixed = 3 * 4 * sizes.vocabulary * sizes.hidden
    free = torch.cuda.mem_get_info()[0] if sizes.cuda else psutil.virtual_memory().available
    token_bytes = NAIVE_COPIES * 4 * sizes.vocabulary
    room = int(max(free - fixed, 0) / token_bytes)
    return replace(sizes, tokens=min(sizes.tokens, room))


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
