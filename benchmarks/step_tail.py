"""What the end of a step's rollouts waits for: in which order prompts are asked, and when their answers are scored.

    python benchmarks/step_tail.py [--json] [--prompts 128] [--samples 8] [--seeds 50]

**Order**, simulated. Servers hold so many prompts each, and give the next one to whoever has room first, as the
dispatcher does; a prompt takes as many decode steps as its longest completion, whatever else is decoded. Lengths are
lognormal, cut at the limit: a part of their variance (in logs) is the prompt's own, the rest each completion's. The
makespan is compared for the order given, longest first by the mean length of an earlier visit's completions (what a run
knows), and longest first by what the prompts will turn out to take (what nobody knows). ``bound`` is the larger of the
work per place and of the longest prompt: no order is faster.

**Scoring**, measured. Groups are complete at the times of such a simulation, scaled to seconds; a verifier that takes
its time scores them in one real worker process, as they come and after the last one.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.workers import RewardWorkers

LIMIT = 16384
MEDIAN = 2000.0
SPREAD = 0.9
"""Standard deviation of log lengths: DAPO-like, a mean of about 1.5 medians."""
IN_FLIGHT = (2, 4, 8, 16, 32)
SERVERS = 4
OWN = (0.3, 0.6)
"""Shares of the variance of log lengths that are the prompt's own."""
VERIFIER = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    return 1.0
"""


@dataclass(frozen=True, slots=True)
class Lengths:
    """One step's prompts, with the visit before it."""

    before: np.ndarray
    """[Q, G], tokens of the earlier visit's completions."""
    now: np.ndarray
    """[Q, G], of this step's."""


def drawn(rng: np.random.Generator, prompts: int, samples: int, own: float) -> Lengths:
    of_prompt = rng.normal(0.0, SPREAD * own**0.5, (prompts, 1))
    before, now = (
        np.minimum(MEDIAN * np.exp(of_prompt + rng.normal(0.0, SPREAD * (1 - own) ** 0.5, (prompts, samples))), LIMIT)
        for _ in range(2)
    )
    return Lengths(before, now)


def completions(takes: Iterable[float], places: int) -> list[float]:
    """When each prompt is complete, if they are asked in this order of so many places."""
    free, found = [0.0] * places, []
    for each in takes:
        found.append(free[0] + each)
        heapq.heapreplace(free, found[-1])
    return found


def orders(prompts: int, samples: int, seeds: int) -> list[dict[str, float]]:
    rows = []
    for own in OWN:
        for in_flight in IN_FLIGHT:
            places, found = in_flight * SERVERS, []
            for seed in range(seeds):
                lengths = drawn(np.random.default_rng(seed), prompts, samples, own)
                takes = lengths.now.max(axis=1)
                longest_first = np.argsort(-lengths.before.mean(axis=1), kind="stable")
                given = max(completions(takes, places))
                known = max(completions(takes[longest_first], places))
                foreseen = max(completions(np.sort(takes)[::-1], places))
                found.append((given / known, given / foreseen, given / max(takes.sum() / places, takes.max())))
            ratios = np.array(found)
            mean, error = ratios.mean(axis=0), ratios.std(axis=0, ddof=1) / seeds**0.5
            names = ("given_over_longest_first", "given_over_foreseen", "given_over_bound")
            rows.append(
                {"own_variance": own, "in_flight": in_flight}
                | {name: round(float(value), 3) for name, value in zip(names, mean, strict=True)}
                | {"standard_error": round(float(error[0]), 3)}
            )
    return rows


def scoring(prompts: int, samples: int, generation_s: float, verifier_s: float) -> dict[str, float]:
    """Seconds from the first request to the last score, with scores as groups come and after the last one."""
    lengths = drawn(np.random.default_rng(0), prompts, samples, OWN[0])
    done = np.array(completions(lengths.now.max(axis=1), 2 * SERVERS))
    done *= generation_s / done.max()
    items = [ScoreItem("here", "x", "1")] * samples
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "verifier.py")
        file.write_text(VERIFIER.format(seconds=verifier_s), encoding="utf-8")
        workers = RewardWorkers(f"{file}:compute_score", workers=1, timeout_s=5.0)
        workers.wait_ready()
        for name, early in (("as_they_come", True), ("after_the_last", False)):
            left, began = sorted(done.tolist()), time.monotonic()
            under_way = workers.begin(0)
            while left:
                while left and time.monotonic() - began >= left[0]:
                    left.pop(0)
                    under_way.add(items)
                if early:
                    under_way.advance()
                time.sleep(0.05)
            under_way.finish()
            seconds[name] = round(time.monotonic() - began, 2)
        workers.close()
    return {"generation_s": generation_s, "verifier_s": verifier_s * prompts * samples, **seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=50)
    chosen = parser.parse_args()
    result = {
        "orders": orders(chosen.prompts, chosen.samples, chosen.seeds),
        "scoring": [scoring(32, 8, generation_s=8.0, verifier_s=each) for each in (0.002, 0.01, 0.02)],
    }
    print(json.dumps(result) if chosen.json else json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
