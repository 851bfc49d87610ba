"""How much variance unequal groups take away at equal tokens, simulated for rewards of 0 and 1.

Prompts have accuracies from a Beta distribution, as an early, a middle and a late policy leave them, and responses of
one length. The scores ∇ log π of completions are taken for orthogonal vectors of one norm, as they nearly are where a
response is long, so that a prompt's part of the gradient has the variance E[(1/n²) Σ A²]. Rewards are drawn, and
advantages, predictions and numbers of completions come from the package. ``predicted`` knows of each prompt ``past``
rollouts of the same policy; ``true`` knows its accuracy.

    python benchmarks/allocation.py [--prompts 512] [--draws 40] [--json]

Each figure is Σ variance over that of equal groups of 8 with the same expected gradient, by as many tokens. In the rows
``by pruning`` it is that of 6 completions of each prompt in the mean: given to all of them by what is predicted, over
8 of each of three quarters of the prompts, which ``pruning.prompts.rule=neyman`` draws.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

import numpy as np

from megatron_dppo.rl.group_sizes import allocate, group_advantages
from megatron_dppo.rl.objectives import advantages
from megatron_dppo.rl.pruning.history import PromptHistory
from megatron_dppo.rl.pruning.prompt_rules import PROMPT_RULES, PromptCandidates
from megatron_dppo.rl.types import Floats, Ints

POLICIES = {"early": (0.3, 1.0), "middle": (1.0, 1.0), "late": (1.0, 0.3)}
"""Beta distributions of accuracies."""
BOUNDS = ((4, 16), (2, 32))
PAST = (8, 32, 0)
"""Earlier rollouts of each prompt; 0: its accuracy itself is known."""
MEAN, FEWER, KEEP = 8, 6, 0.75


def rewards_of(accuracy: Floats, samples: Ints, rng: np.random.Generator) -> Floats:
    """[Q, most], 0 or 1; 0 in padding."""
    drawn = rng.random((len(accuracy), int(samples.max()))) < accuracy[:, None]
    return (drawn & (np.arange(drawn.shape[1]) < samples[:, None])).astype(float)


def variances(accuracy: Floats, samples: Ints, least: int, normalised: bool, seed: int, draws: int) -> Floats:
    """[Q], E[(1/n²) Σ A²] of each prompt, by ``draws`` of its group."""
    rng, total = np.random.default_rng(seed), np.zeros(len(accuracy))
    as_of = least if normalised else MEAN
    for _ in range(draws):
        values = group_advantages(rewards_of(accuracy, samples, rng), samples, normalise=normalised, as_of=as_of)
        total += (values**2).sum(axis=1) / samples**2
    return total / draws


def expected_square(accuracy: Floats, past: int, least: int, normalised: bool, rng: np.random.Generator) -> Floats:
    """[Q], what a prompt's groups promise, of which ``past`` rollouts are known; of an accuracy if it is 0."""
    if past == 0:
        mixed = 1.0 - accuracy**least - (1.0 - accuracy) ** least
        return mixed if normalised else accuracy * (1.0 - accuracy)
    history, ids = PromptHistory(1.0), np.arange(len(accuracy))
    rewards = rewards_of(accuracy, np.full(len(ids), past), rng)
    history.update(ids, rewards, advantages(rewards, normalise=normalised))
    return history.expected_square(ids, group_size=least, normalised=normalised)


def ratios(prompts: int, draws: int, policy: str, bounds: tuple[int, int], normalised: bool, past: int) -> Floats:
    """The variance of unequal groups over that of equal ones, and over that of pruned prompts."""
    seed = [*policy.encode(), *bounds, normalised, past]
    rng, (least, most) = np.random.default_rng(seed), bounds
    accuracy = rng.beta(*POLICIES[policy], prompts)
    square = expected_square(accuracy, past, least, normalised, rng)

    def left(samples: Ints) -> Floats:
        return variances(accuracy, samples, least, normalised, 1, draws)

    ones = np.ones(prompts)
    some, fewer = (allocate(square, ones, mean=mean, least=least, most=most) for mean in (MEAN, FEWER))
    equal = left(np.full(prompts, MEAN))
    nothing = np.zeros(prompts)
    inclusion = PROMPT_RULES["neyman"].inclusion(
        PromptCandidates(nothing, square, nothing.astype(np.int64), nothing, floor=0.2), KEEP
    )
    return np.array([left(some).sum() / equal.sum(), left(fewer).sum() / (equal / inclusion).sum()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    rows = []
    for normalised in (True, False):
        for bounds in BOUNDS:
            for policy in POLICIES:
                found = [ratios(chosen.prompts, chosen.draws, policy, bounds, normalised, past) for past in PAST]
                about = {"advantages": "(r-mean)/std" if normalised else "r-mean", "bounds": bounds, "policy": policy}
                names = ["true" if past == 0 else f"predicted from {past}" for past in PAST]
                for column, against in enumerate(("equal groups", "by pruning")):
                    values = {name: round(float(each[column]), 3) for name, each in zip(names, found, strict=True)}
                    rows.append(about | {"against": against} | values)
    gains = [row["predicted from 8"] for row in rows if row["against"] == "equal groups"]
    whole = {"rows": rows, "unequal_over_equal": round(math.exp(float(np.mean(np.log(gains)))), 3)}
    if chosen.json:
        print(json.dumps(whole))
        return
    for row in rows:
        print("  ".join(f"{value!s:>14}" for value in row.values()))
    print(f"unequal over equal, predicted from 8 rollouts, geometric mean: {whole['unequal_over_equal']}")


if __name__ == "__main__":
    main()
