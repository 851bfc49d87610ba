"""The weight stream of a TP 2 x PP 2 policy to one consumer, against a bare gloo gather and broadcast of its bytes.

    python benchmarks/weight_stream.py [--json] [--layers 16] [--experts 64] [--vocabulary 32768] [--bucket-mib 64]

Four ranks of one thread each hold a bf16 policy of Qwen3-0.6B's widths. With ``--experts`` it has Qwen3-30B-A3B's, and
the two ranks of a stage share its experts (EP 2, ETP 1). The first rank takes every bucket and does nothing with it, so
that what is timed is the stream.

The yardstick knows nothing of tensors. In pieces of a bucket's size, each stage gathers its ranks' halves on its first
rank (``dist.gather``, both stages at once), and the second broadcasts the whole to the consumer (``dist.broadcast``).
Its buffers are made and touched before the clock starts. The two alternate, after a pass of each that is not timed, and
medians count. Bytes are those of the tensors that ranks send, taken from the operations that torch dispatches in one
pass of each; the least is what the consumer does not hold itself. Extra memory is a rank's peak anonymous memory above
what it held before its first pass; the worst rank's counts, and two buckets are the goal. (An embedding larger than a
bucket comes on top: ``--vocabulary 151936``.)
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from harness import MIB, PeakMemory, arguments, finish, in_turn, timed
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.bridge.mapping import entries
from megatron_dppo.bridge.stream import Consumers, weight_stream
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.models.policy import build_policy
from megatron_dppo.models.shape import PUBLISHED, PolicyShape
from megatron_dppo.parallel.world import World, initialize, shut_down

RANKS = 4
GB = 1e9


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    experts: int
    vocabulary: int
    bucket_mib: int
    repeats: int

    @property
    def layout(self) -> LayoutConfig:
        experts = {"ep": 2, "etp": 1, "sequence_parallel": True} if self.experts else {}
        return LayoutConfig(tp=2, pp=2, **experts)


class BytesSent(TorchDispatchMode):
    """Bytes that leave this rank within the ``with`` block, whatever of torch.distributed sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            match func.__name__.split(".")[0]:
                case "send":
                    self.total += args[0][0].nbytes
                case "gather_":
                    tensor, group, root = args[1][0], dist.ProcessGroup.unbox(args[2]), args[3]
                    self.total += tensor.nbytes * (group.rank() != root)
                case "broadcast_":
                    tensor, group, root = args[0][0], dist.ProcessGroup.unbox(args[1]), args[2]
                    self.total += tensor.nbytes * (group.size() - 1) * (group.rank() == root)
                case "recv_" | "barrier":
                    pass
                case other:
                    raise NotImplementedError(f"how many bytes {other} sends")
        return func(*args, **(kwargs or {}))


def bare(model_bytes: int, world: World, sizes: Sizes) -> Callable[[], None]:
    bucket = sizes.bucket_mib * MIB
    of_stage = model_bytes // world.layout.pp
    pieces = [bucket] * (of_stage // bucket) + [of_stage % bucket // 2 * 2]
    half, whole, received = (torch.ones(size, dtype=torch.uint8) for size in (bucket // 2, bucket, bucket))
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()

    def run() -> None:
        for piece in pieces:
            halves = list(whole[:piece].chunk(2)) if world.tp_rank == 0 else None
            dist.gather(half[: piece // 2], halves, group=tp_group, group_dst=0)
            if world.tp_rank == 0:
                dist.broadcast((whole if world.pp_rank else received)[:piece], group=pp_group, group_src=1)

    return run


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's measurements."""

    seconds: list[float]
    bare_seconds: list[float]
    sent: int
    bare_sent: int
    held: int
    """Bytes of the policy in this rank's parameters."""
    extra: int


def measure(rank: int, sizes: Sizes, rendezvous: str, reports: multiprocessing.Queue[tuple[int, Report]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    world = initialize(sizes.layout, seed=1, timeout_s=600.0)
    shape = policy_shape(sizes)
    chunks = build_policy(shape, ModelConfig(dtype="bf16"), sizes.layout, temperature=1.0)
    for chunk in chunks:
        chunk.bfloat16()
    held = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())

    def stream() -> None:
        for _ in weight_stream(chunks, world, to=Consumers.LEADER, bucket_mib=sizes.bucket_mib):
            pass

    dist.barrier()
    gc.collect()
    with PeakMemory("RssAnon") as memory:
        stream()
        dist.barrier()
    yardstick = bare(policy_bytes(shape), world, sizes)
    sent = []
    for run in (stream, yardstick):
        with BytesSent() as counter:
            run()
        sent.append(counter.total)
    runs = {"stream": stream, "bare": yardstick}
    turns = {name: lambda _, run=run: timed(run, dist.barrier)[0] for name, run in runs.items()}
    seconds = in_turn(turns, sizes.repeats, warm_up=0)
    reports.put((rank, Report(seconds["stream"], seconds["bare"], *sent, held, memory.grown)))
    shut_down()


def policy_shape(sizes: Sizes) -> PolicyShape:
    """Qwen3-0.6B's widths, or Qwen3-30B-A3B's."""
    published = PUBLISHED["qwen3-30b-a3b" if sizes.experts else "qwen3-0.6b"]
    return replace(published, num_layers=sizes.layers, vocab_size=sizes.vocabulary, experts=sizes.experts, tied=True)


def policy_bytes(shape: PolicyShape) -> int:
    return sum(entry.elements for entry in entries(shape)) * torch.bfloat16.itemsize


def on_ranks(sizes: Sizes) -> list[Report]:
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        shared = (sizes, str(Path(folder, "rendezvous")), reports)
        processes = [context.Process(target=measure, args=(rank, *shared)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"the ranks ended with exit codes {[process.exitcode for process in processes]}")
    return [report for _, report in sorted(reports.get(timeout=10) for _ in processes)]


def main() -> None:
    options = arguments(
        __doc__, layers=(int, "default: 16, or 4 with experts"), experts=0, vocabulary=32768, bucket_mib=64, repeats=7
    ).parse_args()
    layers = options.layers or (4 if options.experts else 16)
    sizes = Sizes(layers, options.experts, options.vocabulary, options.bucket_mib, options.repeats)
    ranks = on_ranks(sizes)
    seconds, bare_seconds = median(ranks[0].seconds), median(ranks[0].bare_seconds)
    sent, bare_sent = (sum(getattr(rank, name) for rank in ranks) for name in ("sent", "bare_sent"))
    shape = policy_shape(sizes)
    largest = max(entry.elements for entry in entries(shape)) * torch.bfloat16.itemsize
    result = {
        **asdict(sizes),
        "model_gb": round(policy_bytes(shape) / GB, 3),
        "seconds_over_bare": round(seconds / bare_seconds, 3),
        "seconds": round(seconds, 3),
        "bare_seconds": round(bare_seconds, 3),
        "bytes_over_bare": round(sent / bare_sent, 4),
        "bytes_over_least": round(sent / (policy_bytes(shape) - ranks[0].held), 4),
        "sent_gb": round(sent / GB, 4),
        "extra_gb": round(max(rank.extra for rank in ranks) / GB, 4),
        "extra_gb_by_rank": [round(rank.extra / GB, 4) for rank in ranks],
        "two_buckets_gb": round(2 * sizes.bucket_mib * MIB / GB, 4),
        "largest_tensor_gb": round(largest / GB, 4),
    }
    finish(result, options)


if __name__ == "__main__":
    main()
