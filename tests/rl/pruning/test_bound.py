"""What is said of ``pruning.max_weight`` where it changes the paper's rule, and only there."""

import numpy as np
import pytest

from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pruning.draw import describe_bound, prune_minibatch
from megatron_dppo.settings import load_config
from tests.rl.plans import step_metadata

PAPER = ("pruning.prompts.rule=threshold", "pruning.completions.rule=threshold")


def words(prompts: float, completions: float, *more: str) -> list[str]:
    keeps = [f"pruning.prompts.keep={prompts}", f"pruning.completions.keep={completions}"]
    return [*PAPER, *keeps, *more]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            words(0.1, 0.1),
            "completions of prompts kept with 0.10 are kept with probability 1.00 instead of 0.10. Set it to 100",
        ),
        (
            words(0.3, 0.3),
            "completions of prompts kept with 0.30 are kept with probability 0.33 instead of 0.30. Set it to 11.12",
        ),
        (
            words(0.3, 0.1, "pruning.prompts.rule=none", "pruning.max_weight=5"),
            "completions are kept with probability 0.20 instead of 0.10. Set it to 10 ",
        ),
        (
            words(0.85, 0.3, "pruning.prompts.rule=neyman"),
            "completions of prompts kept with 0.20 are kept with probability 0.50 instead of 0.30. Set it to 16.67",
        ),
        (words(0.1, 0.1, "pruning.max_weight=100"), None),
        (words(0.3, 0.3, "pruning.max_weight=11.2"), None),
        (words(0.5, 0.5), None),
        ([], None),
        (words(0.1, 0.1, "pruning.completions.rule=threshold_deterministic"), None),
    ],
)
def test_the_bound_is_told_where_it_changes_the_rule(words: list[str], said: str | None) -> None:
    note = describe_bound(load_config(None, words).pruning)
    assert note is None if said is None else said in str(note)
    if note:
        advice = note.partition("Set it to ")[2].split()[0]
        assert (
            describe_bound(load_config(None, [*words, f"pruning.max_weight={advice}"]).pruning)
            is None
        )


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("max_weight", [10.0, 100.0])
def test_the_bound_is_told_exactly_where_a_draw_has_it(ratio: float, max_weight: float) -> None:
    keep = round(1.0 - ratio, 9)
    config = load_config(None, words(keep, keep, f"pruning.max_weight={max_weight}"))
    part = step_metadata(
        1, 4, rewards=np.array([[1.0, 0.0, 0.0, 0.0]]), prompt_inclusion=np.array([keep])
    )
    drawn = prune_minibatch(
        part,
        config,
        resolve_objective(config.loss),
        keep=keep,
        rng=np.random.default_rng(0),
    )
    changed = not np.allclose(drawn.inclusion[0, 1:], keep)
    assert changed == (describe_bound(config.pruning) is not None)
