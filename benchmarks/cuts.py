"""Efficiency of cuts inside completions, beside pruning of whole completions.

A cut completion is trained on up to a random token. Here a completion has ``PIECES`` pieces of
equal length, and piece j is kept with probability π_j, where π_1 ≥ π_2 ≥ …; its weight is 1/π_j.
Without a later piece, the estimate of a kept piece does not change, so that the weighted gradient
is unbiased.

- At each stage of a training run whole windows are rolled out, and the gradient of each piece is
  computed. ``efficiency.py`` defines variance, seconds and E.
- **cuts**: Neyman's probabilities for pieces of norm |A|·c·√Σ(1−p_t)², with the prompt's tokens as
  a cost of the first piece. Pieces that would be kept with a larger probability than an earlier
  piece are pooled with the earlier piece.
- **whole**: the same with all pieces of a completion pooled, which is ``neyman``.
- Both draws are systematic, with weights of at most 10. Prompts are not pruned.
- **auto**: the fraction of tokens with the least estimated variance × tokens, as
  ``pruning.completions.keep=auto``. **best**: the best fraction of ``SHARES`` on the other windows.
- ``ratio``: E of cuts over E of whole. Intervals are 95%, by leaving out each window in turn
  (jackknife).

    python benchmarks/cuts.py [--task sums] [--windows 10] [--json]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from efficiency import Costs, Step, costs_of, timed_steps, variance, with_interval
from estimator import Window
from harness import finish
from real_gradients import count_piece_tokens, norm
from training_stages import (
    TASKS,
    Stage,
    compute_unit_gram,
    draw_windows,
    roll_out_window,
    stage_arguments,
    visit_stages,
)

from megatron_dppo.rl.pruning.sampling import GRID, allocate_proportional
from megatron_dppo.rl.types import Bools, Floats, Ints
from megatron_dppo.train import Trainer

PIECES = 6
SHARES = (1.0, 0.85, 0.7, 0.5, 0.35, 0.25, 0.18)
"""Kept fractions of the tokens of completions with an advantage."""
MAX_WEIGHT = 10.0


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of a window's m completions with an advantage, in order of (prompt, A)."""

    full: Floats
    """[m, P], the scale of each piece's gradient, unpruned."""
    gram: Floats
    """[m·P, m·P], inner products of gradients."""
    score: Floats
    """[m, P], proxy of the norm of each piece's term."""
    cost: Floats
    """[m, P], tokens."""
    generated: float
    """Tokens of the whole window."""
    sampling: float
    """V₀"""

    def allocate(self, share: float, is_cut: bool) -> Floats:
        """Return inclusion probabilities [m, P] at a kept fraction of tokens."""
        blocks = [
            pool_pieces(score, cost) if is_cut else [len(cost)]
            for score, cost in zip(self.score**2, self.cost, strict=True)
        ]
        lengths = np.concatenate(blocks)
        starts = np.cumsum([0, *lengths[:-1]])
        squares = np.add.reduceat(self.score.ravel() ** 2, starts)
        costs = np.add.reduceat(self.cost.ravel(), starts)
        budget = share * costs.sum()
        # The last block of a short response may have no tokens, and the cost must be positive.
        allocated = allocate_proportional(
            np.sqrt(squares), np.maximum(costs, 1e-9), budget, 1.0 / MAX_WEIGHT
        )
        return np.repeat(allocated, lengths).reshape(self.cost.shape)

    def find_efficient_share(self, is_cut: bool) -> float:
        """Return the share of ``auto``, see :func:`find_efficient_keep`."""

        def compute_product(share: float) -> float:
            inclusion = self.allocate(share, is_cut)
            cost = self.generated + float((inclusion * self.cost).sum())
            return float((self.score**2 / inclusion).sum()) * cost

        return min(np.linspace(1.0, 1.0 / MAX_WEIGHT, 32).tolist(), key=compute_product)

    def step(self, share: float, is_cut: bool, draws: int) -> Step:
        """Return means over draws at a kept fraction of tokens."""
        inclusion = self.allocate(share, is_cut)
        rng = np.random.default_rng(0)
        errors = []
        trained = []
        for _ in range(draws):
            kept = draw_cuts(inclusion, rng.random())
            weight = np.where(kept, 1.0 / inclusion, 0.0)
            errors.append((self.full * (weight - 1.0)).ravel())
            trained.append(float(self.cost[kept].sum()))
        noise = float(np.mean(norm(self.gram, np.array(errors)) ** 2))
        return Step(noise, self.sampling, self.generated, statistics.fmean(trained), 0.0)


def pool_pieces(squares: Floats, costs: Floats) -> list[int]:
    """Return numbers of successive pieces with one probability. Σs²/Σcost falls from one pool to
    the next (pool adjacent violators)."""
    pools: list[tuple[int, float, float]] = []
    for square, cost in zip(squares, costs, strict=True):
        pool = (1, float(square), float(cost))
        while pools and (pool[2] == 0.0 or pools[-1][1] * pool[2] <= pool[1] * pools[-1][2]):
            last = pools.pop()
            pool = (last[0] + pool[0], last[1] + pool[1], last[2] + pool[2])
        pools.append(pool)
    return [pool[0] for pool in pools]


def draw_cuts(inclusion: Floats, offset: float) -> Bools:
    """Draw pieces systematically: [m, P], True for kept pieces.

    The first pieces' probabilities lie end to end. A completion with an offset, offset + 1, … in
    its interval is kept, up to the last piece whose probability exceeds the distance from the
    interval's start. The distance is uniform, so that each piece is kept with its probability.
    """
    first = np.rint(inclusion[:, 0] * GRID).astype(np.int64)
    starts = np.array([0, *accumulate(first.tolist())][:-1])
    distance = (int(offset * GRID) - starts) % GRID / GRID
    kept: Bools = distance[:, None] < inclusion
    return kept


def measure_pieces(
    trainer: Trainer, name: str, prompt_ids: Ints, seeds: int, stride: int
) -> Pieces:
    """Roll out a window, and compute the gradient of each piece; see :func:`measure`."""
    rollouts = roll_out_window(trainer, prompt_ids, seeds)
    metadata = rollouts.metadata
    count = metadata.rewards.size
    products = compute_unit_gram(trainer, rollouts, stride, PIECES)
    whole = products.reshape(count, PIECES, count, PIECES).sum(axis=(1, 3))
    window = Window(Stage(name, trainer.step, metadata, whole), trainer.config.loss.name)
    advantage = window.advantage.ravel()
    squares = []
    for row in range(len(metadata.prompt_ids)):
        for completion in rollouts.held[row].completions:
            ends = np.cumsum(count_piece_tokens(np.array(len(completion.token_ids)), PIECES))
            terms = np.where(completion.loss_mask, (1.0 - np.exp(completion.logprobs)) ** 2, 0.0)
            squares.append(np.diff(np.array([0.0, *np.cumsum(terms)])[[0, *ends]]))
    prompt = np.repeat(np.arange(len(metadata.prompt_ids)), metadata.rewards.shape[1])
    order = np.lexsort((advantage, prompt))
    order = order[advantage[order] != 0.0]
    scale = window.full[order] * advantage[order]
    cost = count_piece_tokens(metadata.response_lengths.ravel()[order], PIECES).astype(np.float64)
    cost[:, 0] += metadata.prompt_lengths[prompt[order]]
    rows = (order[:, None] * PIECES + np.arange(PIECES)).ravel()
    return Pieces(
        full=np.repeat(scale[:, None], PIECES, axis=1),
        gram=products[np.ix_(rows, rows)],
        score=np.abs(scale)[:, None] * np.sqrt(np.array(squares)[order]),
        cost=cost,
        generated=float(metadata.response_lengths.sum()),
        sampling=window.sampling_noise * window.length**2,
    )


def visited(trainer: Trainer, name: str, options: Any) -> dict[str, Any]:
    """Measure both ways at a stage."""
    steps: dict[str, list[Step]] = {}
    for number, prompt_ids in enumerate(draw_windows(trainer, options.windows)):
        pieces = measure_pieces(trainer, name, prompt_ids, 1 + number, TASKS[options.task].stride)
        for way, is_cut in (("whole", False), ("cuts", True)):
            auto = pieces.find_efficient_share(is_cut)
            shares = {"auto": auto} | {str(share): share for share in SHARES}
            for key, share in shares.items():
                steps.setdefault(f"{way} {key}", []).append(
                    pieces.step(share, is_cut, options.draws)
                )
        print(f"{name}: window {number + 1} of {options.windows}", file=sys.stderr, flush=True)
    at = trainer.step
    return {"stage": name, "step": at, "steps": steps, "timed": timed_steps(trainer, 8)}


def judge(steps: Mapping[str, Sequence[Step]], costs: Costs) -> dict[str, Any]:
    """Return E of both ways, by share, and their ratios."""
    base = steps["whole 1.0"]
    windows = len(base)

    def worth(name: str, chosen: Sequence[int]) -> float:
        own = [steps[name][i] for i in chosen]
        unpruned = [base[i] for i in chosen]
        return costs.of(unpruned) * variance(unpruned) / (costs.of(own) * variance(own))

    def find_best(way: str, chosen: Sequence[int]) -> str:
        return max((f"{way} {share}" for share in SHARES), key=lambda name: worth(name, chosen))

    def compare_autos(chosen: Sequence[int]) -> float:
        return worth("cuts auto", chosen) / worth("whole auto", chosen)

    best: dict[str, list[Step]] = {"whole": [], "cuts": []}
    for window in range(windows):
        others = [i for i in range(windows) if i != window]
        for way, own in best.items():
            own.append(steps[find_best(way, others)][window])

    def compare_bests(chosen: Sequence[int]) -> float:
        products = []
        for own in best.values():
            these = [own[i] for i in chosen]
            products.append(costs.of(these) * variance(these))
        return products[0] / products[1]

    everything = range(windows)
    return {
        "efficiency": {name: worth(name, everything) for name in steps},
        "trained": {
            name: sum(s.trained for s in own) / sum(s.trained for s in base)
            for name, own in steps.items()
        },
        "ratio_auto": with_interval(compare_autos, windows),
        "ratio_best": with_interval(compare_bests, windows),
    }


def main() -> None:
    options = stage_arguments(__doc__).parse_args()
    visits = visit_stages(options, partial(visited, options=options))
    costs = costs_of([row for each in visits for row in each["timed"]])
    stages = [
        {"stage": each["stage"], "step": each["step"], **judge(each["steps"], costs)}
        for each in visits
    ]
    found = {"task": options.task, "seconds": asdict(costs), "stages": stages}
    finish(found, options)


if __name__ == "__main__":
    main()
