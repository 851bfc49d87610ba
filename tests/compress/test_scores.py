"""Scores equal loops over transformers' model, and find useless parts."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.compress.calibration import Batch
from megatron_dppo.compress.cut import PARTS, SCORES, Cut, Part, Recipe
from megatron_dppo.compress.scores import Scorer, choose_cut, draw_halves
from megatron_dppo.data.prompts import SupervisedExample
from megatron_dppo.models.shape import read_shape

WHOLE = Cut((0, 1, 2, 3))
CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def token_ids(answer: SupervisedExample) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([answer.prompt_ids, answer.response_ids])).long()[None]


@torch.no_grad()
def mean_loss(model: Any, answers: list[SupervisedExample]) -> float:
    losses = []
    for answer in answers:
        tokens = token_ids(answer)
        logprobs = model(tokens, use_cache=False).logits[0].log_softmax(-1)
        responses = range(len(answer.prompt_ids), tokens.shape[1])
        losses += [-logprobs[place - 1, tokens[0, place]] for place in responses]
    return float(torch.stack(losses).mean())


def ablated(model: Any, part: Part, layers: Collection[int]) -> Any:
    """Return a copy of the model without a part of some layers."""
    short = copy.deepcopy(model)
    for number in layers:
        layer = short.model.layers[number]
        if part != "feed-forward":
            layer.self_attn.o_proj.weight.data.zero_()
        if part != "attention":
            layer.mlp.down_proj.weight.data.zero_()
    return short


@torch.no_grad()
def test_activations_and_influence_equal_loops_over_tokens(
    model: Any, answers: list[SupervisedExample], batches: list[Batch]
) -> None:
    seen: dict[tuple[str, int], list[torch.Tensor]] = defaultdict(list)

    def watch(module: Any, key: tuple[str, int]) -> Any:
        return module.register_forward_hook(
            lambda _, inputs, output: seen[key].append((inputs, output))
        )

    hooks = [watch(model.model.embed_tokens, ("embedding", 0))]
    for number, layer in enumerate(model.model.layers):
        modules = {
            "attention": layer.self_attn,
            "feed-forward": layer.mlp,
            "down": layer.mlp.down_proj,
        }
        hooks += [watch(module, (name, number)) for name, module in modules.items()]
    for answer in answers:
        model(token_ids(answer))
    for hook in hooks:
        hook.remove()
    scorer = Scorer(model, batches)
    activations = scorer.measure_activations()
    streams = [torch.cat([output[0] for _, output in seen["embedding", 0]])]
    for number in range(4):
        norms = [inputs[0][0].norm(dim=0) for inputs, _ in seen["down", number]]
        torch.testing.assert_close(activations[number], torch.stack(norms).mean(0), **CLOSE)
        attention = torch.cat([output[0][0] for _, output in seen["attention", number]])
        streams.append(streams[-1] + attention)
        streams.append(
            streams[-1] + torch.cat([output[0] for _, output in seen["feed-forward", number]])
        )
    for part, first, last in (("block", 0, 2), ("attention", 0, 1), ("feed-forward", 1, 2)):
        pairs = [(streams[2 * layer + first], streams[2 * layer + last]) for layer in range(4)]
        expected = [1 - torch.cosine_similarity(*pair).mean() for pair in pairs]
        torch.testing.assert_close(scorer.measure_influence(part), torch.stack(expected), **CLOSE)


@pytest.mark.parametrize("part", PARTS)
def test_a_left_out_part_costs_the_loss_of_the_smaller_model(
    model: Any, answers: list[SupervisedExample], batches: list[Batch], part: Part
) -> None:
    present = mean_loss(model, answers)
    scorer = Scorer(model, batches)
    expected = [mean_loss(ablated(model, part, [layer]), answers) - present for layer in range(4)]
    assert scorer.measure_shapley_values(part, None, seed=1) == pytest.approx(expected, abs=1e-5)
    assert scorer.measure_loss(WHOLE) == pytest.approx(present, rel=1e-6), "the policy is as before"


def test_shapley_value_over_halves_is_a_difference_of_two_means(
    model: Any, answers: list[SupervisedExample], batches: list[Batch]
) -> None:
    """φ = E[loss | absent] − E[loss | present], over models without a half each."""
    halves = draw_halves(4, 3, seed=5)
    losses = [mean_loss(ablated(model, "block", half), answers) for half in halves]
    expected = []
    for layer in range(4):
        absent = [loss for loss, half in zip(losses, halves, strict=True) if layer in half]
        present = [loss for loss, half in zip(losses, halves, strict=True) if layer not in half]
        expected.append(np.mean(absent) - np.mean(present))
    found = Scorer(model, batches).measure_shapley_values("block", 3, seed=5)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("layers", [4, 7])
def test_each_pair_of_halves_lacks_every_layer_once(layers: int) -> None:
    found = draw_halves(layers, 20, seed=1)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert sorted([*one, *other]) == list(range(layers))
        assert len(one) == layers // 2
    assert len({*map(tuple, found)}) > 5
    assert found == draw_halves(layers, 20, seed=1) != draw_halves(layers, 20, seed=2)


def test_greedy_removal_takes_the_least_loss_each_time(
    model: Any,
    answers: list[SupervisedExample],
    batches: list[Batch],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cut = Scorer(model, batches).remove_greedily(WHOLE, "attention", 3)
    removed: list[int] = []
    for _ in range(3):
        candidates = {*range(4)} - {*removed}
        losses = {
            layer: mean_loss(ablated(model, "attention", [*removed, layer]), answers)
            for layer in candidates
        }
        removed.append(min(losses, key=losses.__getitem__))
    assert cut == Cut(WHOLE.layers, zero_attention=tuple(sorted(removed)))
    assert f"3 of 3: loss {losses[removed[-1]]:.4f}" in capsys.readouterr().err


@pytest.mark.parametrize("score", ["activation", "magnitude"])
@torch.no_grad()
def test_a_useless_unit_is_found(
    model: Any, policy: Path, batches: list[Batch], score: str
) -> None:
    for layer in model.model.layers:
        for rows in (
            layer.mlp.gate_proj.weight,
            layer.mlp.up_proj.weight,
            layer.mlp.down_proj.weight.T,
        ):
            rows[17] = 1e-6
    cut = choose_cut(
        Scorer(model, batches), read_shape(policy), Recipe("width", score, 0.99, multiple=1)
    )
    assert cut.units is not None
    assert all(17 not in kept for kept in cut.units)


@pytest.mark.parametrize(
    ("score", "part"),
    [
        ("shapley-loss", "block"),
        ("shapley-loss", "attention"),
        ("greedy", "block"),
        *(("influence", p) for p in PARTS),
    ],
)
@torch.no_grad()
def test_a_useless_part_is_found(
    model: Any, policy: Path, batches: list[Batch], score: str, part: Part
) -> None:
    for weight in (
        model.model.layers[1].self_attn.o_proj.weight,
        model.model.layers[1].mlp.down_proj.weight,
    ):
        weight *= 1e-6
    shape = read_shape(policy)
    keep = {"block": 0.75, "attention": 0.88, "feed-forward": 0.87}[part]
    assert choose_cut(
        Scorer(model, batches), shape, Recipe("depth", score, keep, part)
    ) == WHOLE.remove(part, [1])


def test_random_2ssp_removes_units_and_attention(policy: Path) -> None:
    shape, scorer = read_shape(policy), Scorer(None, [])
    recipes = [Recipe("2ssp", "random", 0.6, multiple=8, seed=seed) for seed in range(8)]
    cuts = [choose_cut(scorer, shape, recipe) for recipe in recipes]
    assert {len(cut.zero_attention) for cut in cuts} == {
        len(recipes[0].plan_cut(shape).zero_attention)
    }
    assert len({cut.zero_attention for cut in cuts}) > 2
    assert len({cut.units for cut in cuts}) == len(cuts)


def test_progress_counts_every_read(model: Any, policy: Path, batches: list[Batch]) -> None:
    shape = read_shape(policy)
    recipes = [
        Recipe(method, score, 0.5, multiple=8) for method in SCORES for score in SCORES[method]
    ]
    for recipe in (*recipes, Recipe("depth", "shapley-loss", 0.5, subnetworks=3)):
        read: list[int] = []
        choose_cut(Scorer(model, batches, read.append), shape, recipe)
        assert sum(read) == 4 * recipe.count_reads(shape), recipe
