"""Peak memory and time of the policy head with its loss, forward and backward, against whole logits.

    python benchmarks/policy_head.py [--json] [--tokens 8192] [--vocabulary 151936] [--hidden 1024] [--chunk-mib MIB]
    python benchmarks/policy_head.py --cuda [--tokens 12288] [--hidden 2560] …

Each way runs in a process of its own. Its peak is the most memory above what it held before the forward pass, when
hidden states and weight existed, less the weight's gradient, which all ways hand over at the end. The naive way is
``log_softmax`` of the logits and a gather; with the default sizes it needs some 15 GB, so that fewer tokens are taken
where less is free, for all ways, and the report says so.

On a CPU everything is in fp32, memory is what is resident, and a way runs once. With ``--cuda`` weights and hidden
states are in bf16, the head adds the weight's gradient to an fp32 buffer that exists before, as in training, and it is
measured with Triton's kernels and with torch's operators; memory is what torch has allocated, and the time is the
median of several runs after a first one, which compiles. Without a GPU ``--cuda`` ends with exit code 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from unittest import mock

import psutil
import torch

from megatron_dppo.config import HEAD_CHUNK_MIB
from megatron_dppo.models import policy_head, policy_head_torch
from megatron_dppo.models.policy_head import score_responses

MIB = 1 << 20
NAIVE_COPIES = 3.2
"""Tensors of [tokens, vocabulary] in fp32 that the naive way may hold at a time, with room to spare."""
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


class PeakResident:
    """The most resident memory of this process within the ``with`` block, sampled every two milliseconds, in bytes."""

    def __enter__(self) -> PeakResident:
        self._process = psutil.Process()
        self.before = self.peak = self._process.memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self.peak = max(self.peak, self._process.memory_info().rss)
        self._stop.set()
        self._thread.join()


class PeakAllocated:
    """The most memory that tensors on the GPU had within the ``with`` block, in bytes."""

    def __enter__(self) -> PeakAllocated:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = self.peak = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.peak = torch.cuda.max_memory_allocated()


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
    mock.patch.object(policy_head, "_passes", lambda on_cuda: policy_head_torch).start()
    return chunked(sizes)


def measure(make_head: Callable[[Sizes], Head], sizes: Sizes, results: multiprocessing.Queue[Measurement]) -> None:
    """Run one way in this process and report it."""
    torch.manual_seed(0)
    head = make_head(sizes)
    kind = {"device": "cuda", "dtype": torch.bfloat16} if sizes.cuda else {}
    small = torch.randn(4, 8, requires_grad=True, **kind)
    head(small, small, torch.arange(4, device=small.device)).sum().backward()  # what is allocated once is not counted
    hidden = torch.randn(sizes.tokens, sizes.hidden, **kind).requires_grad_()
    weight = torch.randn(sizes.vocabulary, sizes.hidden, **kind).mul_(0.02).requires_grad_()
    if sizes.cuda and make_head is not naive:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    targets = torch.randint(0, sizes.vocabulary, (sizes.tokens,), device=hidden.device)
    advantage = torch.randn(sizes.tokens, device=hidden.device)

    def run() -> float:
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        loss = -(head(hidden, weight, targets) * advantage).sum()
        loss.backward()
        if sizes.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    if sizes.cuda:
        run()
        hidden.grad = weight.grad = None
    gc.collect()
    with PeakAllocated() if sizes.cuda else PeakResident() as memory:
        seconds = run()
    if sizes.cuda:
        seconds = statistics.median(run() for _ in range(REPEATS))
    gradient = weight.grad.numel() * weight.grad.element_size()
    results.put(Measurement((memory.peak - memory.before - gradient) / MIB, seconds))


def in_own_process(make_head: Callable[[Sizes], Head], sizes: Sizes) -> Measurement:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=measure, args=(make_head, sizes, results))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"{make_head.__name__}: the process ended with exit code {process.exitcode}")
    return results.get(timeout=10)


def fit(sizes: Sizes) -> Sizes:
    """As many tokens as the naive way has room for, at most those asked for."""
    fixed = 3 * 4 * sizes.vocabulary * sizes.hidden
    free = torch.cuda.mem_get_info()[0] if sizes.cuda else psutil.virtual_memory().available
    return replace(sizes, tokens=min(sizes.tokens, int(max(free - fixed, 0) / (NAIVE_COPIES * 4 * sizes.vocabulary))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk-mib", type=int, help="as model.head_chunk_mib")
    parser.add_argument(
        "--cuda", action="store_true", help="on a GPU, with Triton's kernels and with torch's operators"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    arguments = parser.parse_args()
    if arguments.cuda and not torch.cuda.is_available():
        print("policy_head.py --cuda needs CUDA, and torch sees none", file=sys.stderr)
        raise SystemExit(2)
    device = "cuda" if arguments.cuda else "cpu"
    chunk_mib = arguments.chunk_mib or HEAD_CHUNK_MIB[device]
    asked = Sizes(arguments.tokens, arguments.vocabulary, arguments.hidden, chunk_mib, arguments.cuda)
    sizes = fit(asked)
    ways: dict[str, Callable[[Sizes], Head]] = {"": chunked, "naive_": naive}
    if arguments.cuda:
        ways["operators_"] = with_operators
    found = {name: in_own_process(way, sizes) for name, way in ways.items()}
    report = {
        **asdict(sizes),
        "tokens_asked": asked.tokens,
        "device": torch.cuda.get_device_name() if arguments.cuda else "cpu",
        "threads": int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())),
        "peak_over_naive": round(found[""].peak_mib / found["naive_"].peak_mib, 4),
    }
    for name, one in found.items():
        report |= {f"{name}peak_mib": round(one.peak_mib, 1), f"{name}seconds": round(one.seconds, 4)}
    if not arguments.json:
        if sizes != asked:
            print(f"{sizes.tokens} tokens instead of {asked.tokens}: the naive way has no room for more")
        for name, title in {"": "policy head", "operators_": "in torch", "naive_": "whole logits"}.items():
            if name in found:
                print(f"{title:12} {found[name].peak_mib:9.0f} MiB  {found[name].seconds:9.3f} s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
