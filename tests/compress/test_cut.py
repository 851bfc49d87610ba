"""Numbers of kept parts: 2SSP's published numbers, and fractions of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.compress.cut import (
    PARTS,
    Part,
    Recipe,
    count_attention_weights,
    count_feed_forward_weights,
    count_removed_attentions,
    select_highest,
)
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PUBLISHED, PolicyShape

PUBLISHED_ATTENTIONS = {
    "qwen3-0.6b": (7, 11, 14),
    "qwen3-4b": (3, 6, 10),
    "qwen3-8b": (1, 3, 7),
    "qwen3-32b": (1, 4, 9),
}
SMALL = PUBLISHED["qwen3-0.6b"]
MIXTURE = PUBLISHED["qwen3-30b-a3b"]


def layer_weights(shape: PolicyShape) -> int:
    return count_parameters(shape) - count_parameters(replace(shape, num_layers=0))


def kept_fraction(recipe: Recipe, shape: PolicyShape) -> float:
    """Return the fraction of the layers' weights that a cut keeps. Zeroed parts count as
    removed."""
    recipe.check(shape)
    cut = recipe.plan_cut(shape)
    zeros = len(cut.zero_attention) * count_attention_weights(shape)
    zeros += len(cut.zero_feed_forward) * count_feed_forward_weights(shape)
    return (layer_weights(cut.compute_shape(shape)) - zeros) / layer_weights(shape)


@pytest.mark.parametrize("name", PUBLISHED_ATTENTIONS)
def test_2ssp_removes_the_published_number_of_attentions(name: str) -> None:
    found = tuple(
        count_removed_attentions(PUBLISHED[name], sparsity) for sparsity in (0.25, 0.375, 0.5)
    )
    assert found == PUBLISHED_ATTENTIONS[name]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-4b", "qwen3-32b"])
def test_kept_fraction_is_the_requested_one(name: str) -> None:
    shape = PUBLISHED[name]
    assert kept_fraction(Recipe("width", "random", 0.75, multiple=16), shape) == pytest.approx(
        0.75, abs=0.001
    )
    assert kept_fraction(
        Recipe("2ssp", "random", 0.75, zero_attention=True), shape
    ) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shape", [SMALL, MIXTURE], ids=["dense", "mixture"])
def test_depth_keeps_the_requested_fraction(part: Part, shape: PolicyShape) -> None:
    keep = 0.98 if part == "attention" else 0.75
    recipe = Recipe("depth", "random", keep, part)
    assert kept_fraction(recipe, shape) == pytest.approx(keep, abs=0.5 / shape.num_layers)


def test_kept_units_are_a_multiple() -> None:
    cuts = [
        Recipe("width", "random", keep, multiple=512).plan_cut(PUBLISHED["qwen3-8b"])
        for keep in (0.5, 0.6, 0.7)
    ]
    assert [cut.compute_shape(PUBLISHED["qwen3-8b"]).ffn % 512 for cut in cuts] == [0, 0, 0]


@pytest.mark.parametrize(
    ("recipe", "shape", "setting"),
    [
        (Recipe("width", "activation", 0.3), SMALL, "--keep"),  # less than attention alone
        (Recipe("width", "activation", 0.999), SMALL, "--multiple"),
        (Recipe("width", "activation", 0.75), MIXTURE, "--method"),
        (Recipe("width", "activation", 0.75, "attention"), SMALL, "--part"),
        (Recipe("width", "activation", 0.5, subnetworks=3), SMALL, "--subnetworks"),
        (Recipe("depth", "greedy", 0.99), SMALL, "--keep"),
        (Recipe("depth", "greedy", 0.5, "attention"), SMALL, "--keep"),  # more than all attention
        (Recipe("depth", "greedy", 1.5), SMALL, "--keep"),
        (Recipe("depth", "magnitude", 0.5), SMALL, "--score"),
        (Recipe("2ssp", "activation", 0.75), SMALL, "--method"),  # a layer without attention
    ],
    ids=lambda value: getattr(value, "method", None),
)
def test_impossible_recipe_is_refused(recipe: Recipe, shape: PolicyShape, setting: str) -> None:
    with pytest.raises(UserError) as error:
        recipe.check(shape)
        recipe.plan_cut(shape)
    assert error.value.setting == setting


def test_fraction_named_by_a_refusal_is_possible() -> None:
    with pytest.raises(UserError) as error:
        Recipe("depth", "greedy", 0.5, "attention").plan_cut(SMALL)
    least = float(error.value.remedy.split()[4])
    assert (
        len(Recipe("depth", "greedy", least + 0.001, "attention").plan_cut(SMALL).zero_attention)
        == 27
    )


def test_highest_scores_are_kept_in_order_and_the_first_of_equals() -> None:
    assert select_highest([2.0, 5.0, 2.0, 7.0], 3) == (0, 1, 3)
