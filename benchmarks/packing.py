"""Compare the packer's fill, balance and planning time with first-fit decreasing and
Karmarkar-Karp, on the same lengths.

    python benchmarks/packing.py [--json]

Lengths as in a DAPO step:

- Responses are log-normal, clipped so that a sequence has 64 to 8,192 tokens.
- Each data-parallel rank has 128 sequences, in groups of eight.
- Each step is packed whole, and pruned by half by the default rule (to some 80 sequences per rank).

All packers pack the same sequences for the same number of ranks:

    ours       as in a training step: capacity and number of packs are chosen for the step
    ffd        first-fit decreasing, at pack.max_tokens
    ffd_tight  first-fit decreasing, at the capacity chosen by ours
    kk         Karmarkar-Karp's largest differencing method, the balancing of verl and slime: a
               partition for each pack of ours, equal in tokens, without a limit on capacity

The packs of ffd, ffd_tight and kk are assigned to ranks like the packs of ours: the costliest
first, to the rank with the least work in FLOPs, an equal number to each rank.

The slots of a pack are the tokens of the fullest pack; for ffd_tight, the given capacity.
``imbalance`` is the FLOPs of the busiest rank / mean of all ranks, at the costs of Qwen3-4B.
``*_worst`` is the worst of all cases.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from statistics import median

import numpy as np
from harness import arguments, finish

from megatron_dppo.api import step_metadata
from megatron_dppo.config import Config
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.packing import compute_sequence_costs, pack_sequences
from megatron_dppo.rl.pruning.draw import prune_minibatch
from megatron_dppo.rl.types import Floats, Ints

SHORTEST = 64
LONGEST = 8192
MAX_TOKENS = 16384
GROUP = 8
GROUPS_PER_RANK = 16


@dataclass(frozen=True, slots=True)
class Packed:
    """Figures of one packer on one list of lengths."""

    fill: float
    """Fraction of slots with real tokens."""
    imbalance: float
    """FLOPs of the busiest rank / mean of the ranks."""
    seconds: float
    """Processor seconds to plan packs and assign ranks."""
    overflow: float
    """Tokens of the fullest pack / ``pack.max_tokens``; above 1, the limit on memory is exceeded.
    """


def step_lengths(ranks: int, seed: int) -> dict[str, Ints]:
    """Return tokens of a step's sequences, before and after pruning by the default rule."""
    rng = np.random.default_rng(seed)
    groups = ranks * GROUPS_PER_RANK
    prompts = rng.integers(32, 257, groups)
    lengths = np.clip(rng.lognormal(6.6, 1.0, (groups, GROUP)), SHORTEST, LONGEST).astype(np.int64)
    responses = np.maximum(lengths - prompts[:, None], 1)
    rewards = (rng.random((groups, GROUP)) < rng.random((groups, 1))).astype(float)
    norms = np.sqrt(responses * rng.uniform(0.1, 0.5, responses.shape))
    step = step_metadata(rewards, responses, prompts, score_norms=norms)
    config = Config()
    objective = resolve_objective(config.loss)
    share = config.pruning.completions.share
    draw = prune_minibatch(step, config, objective, keep=share, rng=rng)
    sequences = prompts[:, None] + responses
    return {"whole": sequences.ravel(), "pruned": sequences[draw.kept]}


def ours(lengths: Ints, ranks: int, max_tokens: int = MAX_TOKENS) -> tuple[Packed, int, int]:
    """Return the figures, the number of packs and the capacity."""
    start = time.process_time()
    packing = pack_sequences(lengths, ranks=ranks, max_tokens=max_tokens)
    seconds = time.process_time() - start
    packs = [list(pack) for rank in packing.packs for pack in rank]
    fullest = max(int(lengths[pack].sum()) for pack in packs)
    result = Packed(packing.fill, packing.imbalance, seconds, fullest / max_tokens)
    return result, len(packs), packing.capacity


def measured(
    packs: list[list[int]], lengths: Ints, ranks: int, start: float, capacity: int | None = None
) -> Packed:
    """Assign packs to ranks, and measure. ``capacity`` None: the tokens of the fullest pack."""
    packs = packs + [[] for _ in range(-len(packs) % ranks)]
    work = compute_sequence_costs(lengths)
    load = dealt([float(work[pack].sum()) for pack in packs], ranks)
    seconds = time.process_time() - start
    fullest = max(int(lengths[pack].sum()) for pack in packs)
    fill = float(lengths.sum() / ((capacity or fullest) * len(packs)))
    return Packed(fill, float(load.max() / load.mean()), seconds, fullest / MAX_TOKENS)


def dealt(work: Sequence[float], ranks: int) -> Floats:
    """Return the work of each rank: the longest processing time first, to the least loaded rank,
    an equal number of packs to each."""
    room = len(work) // ranks
    load = np.zeros(ranks)
    count = [0] * ranks
    queue = [(0.0, rank) for rank in range(ranks)]
    heapify(queue)
    for cost in sorted(work, reverse=True):
        _, rank = heappop(queue)
        load[rank] += cost
        count[rank] += 1
        if count[rank] < room:
            heappush(queue, (float(load[rank]), rank))
    return load


def first_fit_decreasing(lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack the longest sequence first, into the first pack with room."""
    packs: list[list[int]] = []
    room = np.full(len(lengths), capacity)
    for row in np.argsort(-lengths, kind="stable").tolist():
        pack = int(np.argmax(room[: len(packs) + 1] >= lengths[row]))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(row)
        room[pack] -= lengths[row]
    return packs


def karmarkar_karp(lengths: Ints, partitions: int) -> list[list[int]]:
    """Partition by the largest differencing method: merge the two partial solutions of the greatest
    spread, the lightest parts with the heaviest, until a single solution is left."""
    solutions = []
    for row, length in enumerate(lengths.tolist()):
        # Parts stay sorted, the heaviest first.
        parts = [(length, [row])] + [(0, [])] * (partitions - 1)
        solutions.append((-length, row, parts))
    heapify(solutions)
    while len(solutions) > 1:
        _, _, one = heappop(solutions)
        _, tie, other = solutions[0]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapreplace(solutions, (merged[-1][0] - merged[0][0], tie, merged))
    return [rows for _, rows in solutions[0][2]]


def compared(lengths: Ints, ranks: int) -> dict[str, Packed]:
    mine, packs, capacity = ours(lengths, ranks)
    results = {"ours": mine}
    start = time.process_time()
    results["ffd"] = measured(first_fit_decreasing(lengths, MAX_TOKENS), lengths, ranks, start)
    start = time.process_time()
    tight = first_fit_decreasing(lengths, capacity)
    results["ffd_tight"] = measured(tight, lengths, ranks, start, capacity)
    start = time.process_time()
    results["kk"] = measured(karmarkar_karp(lengths, packs), lengths, ranks, start)
    return results


def summary(cases: Sequence[Packed]) -> dict[str, float]:
    """Return median and worst figures of cases."""
    return {
        "fill": median(case.fill for case in cases),
        "fill_worst": min(case.fill for case in cases),
        "imbalance": median(case.imbalance for case in cases),
        "imbalance_worst": max(case.imbalance for case in cases),
        "seconds": median(case.seconds for case in cases),
        "seconds_worst": max(case.seconds for case in cases),
        "overflow_worst": max(case.overflow for case in cases),
    }


def main() -> None:
    options = arguments(__doc__, ranks=[2, 8, 32], seeds=10).parse_args()
    everything: dict[str, list[Packed]] = defaultdict(list)
    details: dict[str, dict[str, dict[str, float]]] = {}
    for ranks in options.ranks:
        stages: dict[str, dict[str, list[Packed]]] = {
            stage: defaultdict(list) for stage in ("whole", "pruned")
        }
        for seed in range(options.seeds):
            for stage, lengths in step_lengths(ranks, seed).items():
                for packer, result in compared(lengths, ranks).items():
                    stages[stage][packer].append(result)
                    everything[packer].append(result)
        for stage, packers in stages.items():
            details[f"{ranks}_ranks_{stage}"] = {
                name: summary(cases) for name, cases in packers.items()
            }

    total = {packer: summary(cases) for packer, cases in everything.items()}
    worst: dict[str, float] = {}
    for packer, cases in everything.items():
        pairs = zip(everything["ours"], cases, strict=True)
        worst[packer] = min(mine.fill / other.fill for mine, other in pairs)
    result = {
        **total["ours"],
        "fill_over_ffd_worst": worst["ffd"],
        "fill_over_ffd_tight_worst": worst["ffd_tight"],
        "kk_seconds_over_ours": total["kk"]["seconds"] / total["ours"]["seconds"],
        "max_tokens": MAX_TOKENS,
        "packers": total,
        "cases": details,
    }
    finish(result, options)


if __name__ == "__main__":
    main()
