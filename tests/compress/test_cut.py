"""How much goes: the published numbers, and shares of weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dppo.bridge.mapping import parameters
from megatron_dppo.compress.choose import Recipe
from megatron_dppo.compress.cut import Cut, attentions_to_remove, highest, width_left
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PUBLISHED, PolicyShape

PUBLISHED_ATTENTIONS = {
    "qwen3-0.6b": (7, 11, 14),
    "qwen3-4b": (3, 6, 10),
    "qwen3-8b": (1, 3, 7),
    "qwen3-32b": (1, 4, 9),
}
SMALL = replace(PUBLISHED["qwen3-0.6b"], vocab_size=1)


def weights_of_layers(shape: PolicyShape) -> int:
    return parameters(shape) - parameters(replace(shape, num_layers=0))


@pytest.mark.parametrize("name", PUBLISHED_ATTENTIONS)
def test_2ssp_takes_the_attention_of_as_many_layers_as_published(name: str) -> None:
    found = tuple(attentions_to_remove(PUBLISHED[name], sparsity) for sparsity in (0.25, 0.375, 0.5))
    assert found == PUBLISHED_ATTENTIONS[name]


DENSE = ("qwen3-0.6b", "qwen3-4b", "qwen3-32b")


@pytest.mark.parametrize(("method", "name"), [(method, name) for method in ("width", "depth") for name in DENSE])
def test_the_share_of_weights_that_is_asked_for_is_kept(method: str, name: str) -> None:
    shape, keep = PUBLISHED[name], 0.75
    recipe = Recipe(method, "random", keep, multiple=16)
    recipe.check(shape)
    left = recipe.sizes(shape).shape(shape)
    tolerance = {"width": 0.001, "depth": 0.5 / shape.num_layers}
    assert weights_of_layers(left) / weights_of_layers(shape) == pytest.approx(keep, abs=tolerance[method])


def test_2ssp_keeps_the_share_where_attention_that_goes_counts_as_gone() -> None:
    shape = PUBLISHED["qwen3-0.6b"]
    cut = Recipe("2ssp", "activation", 0.75, zero_attention=True).sizes(shape)
    left = cut.shape(shape)
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    gone = weights_of_layers(shape) - weights_of_layers(left) + len(cut.silenced) * attention
    assert len(cut.silenced) == 7
    assert gone / weights_of_layers(shape) == pytest.approx(0.25, abs=0.01)


def test_the_number_that_is_left_is_a_multiple() -> None:
    shares = 0.5, 0.6, 0.7, 0.8
    assert all(width_left(PUBLISHED["qwen3-8b"], keep, 512) % 512 == 0 for keep in shares)


@pytest.mark.parametrize(
    ("recipe", "shape", "setting"),
    [
        (Recipe("width", "activation", 0.3), SMALL, "--keep"),  # less than attention alone
        (Recipe("width", "activation", 0.999), SMALL, "--multiple"),
        (Recipe("depth", "greedy", 0.99), SMALL, "--keep"),
        (Recipe("depth", "magnitude", 0.5), SMALL, "--score"),
        (Recipe("depth", "greedy", 1.5), SMALL, "--keep"),
        (Recipe("2ssp", "activation", 0.75), SMALL, "--method"),  # a layer without attention
        (Recipe("width", "activation", 0.75), PUBLISHED["qwen3-30b-a3b"], "--method"),
        (Recipe("width", "activation", 0.5, subnetworks=3), SMALL, "--subnetworks"),
    ],
    ids=lambda value: getattr(value, "method", None),
)
def test_what_cannot_be_done_or_written_is_refused(recipe: Recipe, shape: PolicyShape, setting: str) -> None:
    with pytest.raises(UserError) as error:
        recipe.check(shape)
        recipe.sizes(shape)
    assert error.value.setting == setting


def test_the_highest_are_kept_in_their_order_and_the_first_of_equals() -> None:
    assert highest([2.0, 5.0, 2.0, 7.0], 3) == (0, 1, 3)
    assert Cut((0, 2)).shape(SMALL).num_layers == 2
