"""Peak memory and time of the policy head with its loss, forward and backward, against whole logits.

    python benchmarks/policy_head.py [--json] [--tokens 8192] [--vocabulary 151936] [--hidden 1024] [--chunk-mib 64]

Each way runs in a process of its own. Its peak is the most resident memory above what it held before the forward
pass, when hidden states and weight (fp32) existed, less the weight's gradient, which both ways hand over at the end.
The naive way is ``log_softmax`` of the logits and a gather; with the default sizes it needs some 15 GB, so that fewer
tokens are taken where less is free, for both ways, and the report says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import psutil
import torch

from megatron_dppo.models.policy_head import score_responses

MIB = 1 << 20
NAIVE_COPIES = 3.2
"""Tensors of [tokens, vocabulary] in fp32 that the naive way may hold at a time, with room to spare."""
TEMPERATURE = 0.7
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: int
    vocabulary: int
    hidden: int
    chunk_mib: int


@dataclass(frozen=True, slots=True)
class Measurement:
    peak_mib: float
    """Above what was resident before, the weight's gradient left out."""
    seconds: float
    """Forward and backward."""


class PeakMemory:
    """The most resident memory of this process within the ``with`` block, sampled every two milliseconds, in bytes."""

    def __enter__(self) -> PeakMemory:
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


def measure(make_head: Callable[[Sizes], Head], sizes: Sizes, results: multiprocessing.Queue[Measurement]) -> None:
    """Run one way in this process and report it."""
    torch.manual_seed(0)
    head = make_head(sizes)
    small = torch.randn(4, 8, requires_grad=True)
    head(small, small, torch.arange(4)).sum().backward()  # whatever libraries allocate once is not counted
    hidden = torch.randn(sizes.tokens, sizes.hidden).requires_grad_()
    weight = torch.randn(sizes.vocabulary, sizes.hidden).mul_(0.02).requires_grad_()
    targets = torch.randint(0, sizes.vocabulary, (sizes.tokens,))
    advantage = torch.randn(sizes.tokens)
    gc.collect()
    with PeakMemory() as memory:
        start = time.perf_counter()
        loss = -(head(hidden, weight, targets) * advantage).sum()
        loss.backward()
        seconds = time.perf_counter() - start
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
    free = max(psutil.virtual_memory().available - fixed, 0)
    return replace(sizes, tokens=min(sizes.tokens, int(free / (NAIVE_COPIES * 4 * sizes.vocabulary))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--chunk-mib", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    arguments = parser.parse_args()
    asked = Sizes(arguments.tokens, arguments.vocabulary, arguments.hidden, arguments.chunk_mib)
    sizes = fit(asked)
    ours, theirs = in_own_process(chunked, sizes), in_own_process(naive, sizes)
    report = {
        **asdict(sizes),
        "tokens_asked": asked.tokens,
        "threads": int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())),
        "peak_mib": round(ours.peak_mib, 1),
        "naive_peak_mib": round(theirs.peak_mib, 1),
        "peak_over_naive": round(ours.peak_mib / theirs.peak_mib, 4),
        "seconds": round(ours.seconds, 2),
        "naive_seconds": round(theirs.seconds, 2),
    }
    if not arguments.json:
        if sizes != asked:
            print(f"{sizes.tokens} tokens instead of {asked.tokens}: the naive way has no room for more")
        print(f"policy head  {ours.peak_mib:9.0f} MiB  {ours.seconds:7.1f} s")
        print(f"whole logits {theirs.peak_mib:9.0f} MiB  {theirs.seconds:7.1f} s")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
