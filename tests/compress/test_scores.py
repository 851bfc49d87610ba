"""Scores equal those of loops written out on transformers' model, and find what is useless."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.compress.calibration import Accumulator, Batch
from megatron_dppo.compress.choose import SCORES, Recipe, choose, halves, passes_of, shapley_values
from megatron_dppo.compress.reader import Whole, remove_greedily
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.models.shape import read_shape

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def ids(answer: WorkedAnswer) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([answer.prompt_ids, answer.response_ids])).long()[None]


def written_out_loss(model: Any, answers: list[WorkedAnswer]) -> float:
    losses = []
    for answer in answers:
        logprobs = model(ids(answer), use_cache=False).logits[0].log_softmax(-1)
        first = len(answer.prompt_ids)
        losses += [-logprobs[place - 1, ids(answer)[0, place]] for place in range(first, ids(answer).shape[1])]
    return float(torch.stack(losses).mean())


def whole(model: Any, policy: Path, read: list[Batch]) -> Whole:
    return Whole(model, read_shape(policy), read)


def shortened(model: Any, *layers: int) -> Any:
    """A copy that lacks layers."""
    short = copy.deepcopy(model)
    kept = [layer for number, layer in enumerate(short.model.layers) if number not in layers]
    short.model.layers, short.config.num_hidden_layers = torch.nn.ModuleList(kept), len(kept)
    short.config.layer_types = short.config.layer_types[: len(kept)]
    return short


@torch.no_grad()
def test_activity_is_that_of_loops_over_sequences_and_tokens(
    model: Any, policy: Path, answers: list[WorkedAnswer], read: list[Batch]
) -> None:
    found = whole(model, policy, read).activity()
    inputs: dict[tuple[str, int], list[torch.Tensor]] = {}
    watched = [("before", len(model.model.layers), model.model.norm)]
    for number, layer in enumerate(model.model.layers):
        watched += [("before", number, layer.input_layernorm), ("ffn", number, layer.mlp.down_proj)]
    hooks = [
        module.register_forward_pre_hook(lambda _, args, key=(kind, i): inputs.setdefault(key, []).append(args[0][0]))
        for kind, i, module in watched
    ]
    for answer in answers:
        model(ids(answer))
    for hook in hooks:
        hook.remove()
    for layer in range(4):
        expected = torch.stack([a.square().sum(0).sqrt() for a in inputs["ffn", layer]]).mean(0)
        torch.testing.assert_close(found.neurons[layer], expected, **CLOSE)
        both = torch.cat(inputs["before", layer]), torch.cat(inputs["before", layer + 1])
        torch.testing.assert_close(found.cosines[layer], torch.cosine_similarity(*both).mean(), **CLOSE)


@torch.no_grad()
def test_a_left_out_layer_costs_what_the_shortened_model_loses(
    model: Any, policy: Path, answers: list[WorkedAnswer], read: list[Batch]
) -> None:
    present = written_out_loss(model, answers)
    assert whole(model, policy, read).loss() == pytest.approx(present, rel=1e-9)
    short, reader = [shortened(model, layer) for layer in range(4)], whole(model, policy, read)
    expected = [written_out_loss(each, answers) - present for each in short]
    assert shapley_values(reader, 0, seed=1) == pytest.approx(expected, rel=1e-7)
    assert whole(model, policy, read).loss() == pytest.approx(present, rel=1e-12), "the policy is as it was"


@torch.no_grad()
def test_over_random_halves_a_layer_is_worth_the_difference_of_two_means(
    model: Any, policy: Path, answers: list[WorkedAnswer], read: list[Batch]
) -> None:
    """E[loss | absent] − E[loss | present], of models that were shortened one by one."""
    absent = halves(4, 3, seed=5)
    short = [shortened(model, *layers) for layers in absent]
    costs = [written_out_loss(each, answers) for each in short]
    expected = []
    for layer in range(4):
        without_it = [cost for cost, layers in zip(costs, absent, strict=True) if layer in layers]
        with_it = [cost for cost, layers in zip(costs, absent, strict=True) if layer not in layers]
        expected.append(np.mean(without_it) - np.mean(with_it))
    passes = Accumulator()
    reader = Whole(model, read_shape(policy), read, passes)
    assert shapley_values(reader, 3, seed=5) == pytest.approx(expected, rel=1e-9)
    assert passes.read == passes_of(4, 3) * len(answers), "the progress counts what is read"


@pytest.mark.parametrize("layers", [4, 7])
def test_each_pair_of_halves_lacks_every_layer_once(layers: int) -> None:
    found = halves(layers, 20, seed=1)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert sorted([*one, *other]) == list(range(layers))
        assert len(one) == layers // 2
    assert len(set(found)) > 5 and found == halves(layers, 20, seed=1) != halves(layers, 20, seed=2)


@torch.no_grad()
def test_greedy_removal_takes_what_costs_least_each_time(model: Any, policy: Path, read: list[Batch]) -> None:
    said: list[str] = []
    removed = remove_greedily(whole(model, policy, read), 3, "attention", say=said.append)
    with whole(model, policy, read).without(attention=removed):
        assert said[-1].endswith(f"3 of 3: loss {whole(model, policy, read).loss():.4f}"), "all three are gone together"
    kept_out: list[int] = []
    for layer in removed:
        losses = []
        for other in sorted(set(range(4)) - set(kept_out)):
            with whole(model, policy, read).without(attention=[*kept_out, other]):
                losses.append((whole(model, policy, read).loss(), other))
        assert min(losses)[1] == layer
        kept_out.append(layer)


@torch.no_grad()
def test_without_attention_is_a_zero_output_projection(model: Any, policy: Path, read: list[Batch]) -> None:
    with whole(model, policy, read).without(attention=[2]):
        silenced = whole(model, policy, read).loss()
    model.model.layers[2].self_attn.o_proj.weight.zero_()
    assert whole(model, policy, read).loss() == pytest.approx(silenced, rel=1e-12)


@pytest.mark.parametrize("score", [score for score in SCORES["width"] if score != "random"])
@torch.no_grad()
def test_a_useless_neuron_is_found(model: Any, policy: Path, read: list[Batch], score: str) -> None:
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight[17] = 1e-6
        layer.mlp.down_proj.weight[:, 17] = 1e-6
    cut = choose(whole(model, policy, read), read_shape(policy), Recipe("width", score, 0.99, multiple=1), say=str)
    assert cut.neurons is not None and all(17 not in kept for kept in cut.neurons)


def make_useless(model: Any, layer: int, others: float = 1.0) -> None:
    """Let a layer write next to nothing to the residual stream, and the others so much of what they wrote."""
    for number, each in enumerate(model.model.layers):
        for module in (each.self_attn.o_proj, each.mlp.down_proj):
            module.weight *= 1e-6 if number == layer else others


@pytest.mark.parametrize("score", [score for score in SCORES["depth"] if score != "random"])
@torch.no_grad()
def test_a_useless_layer_is_found(model: Any, policy: Path, read: list[Batch], score: str) -> None:
    make_useless(model, 1)
    cut = choose(whole(model, policy, read), read_shape(policy), Recipe("depth", score, 0.75), say=str)
    assert cut.layers == (0, 2, 3)


def test_2ssp_by_chance_takes_as_much_from_anywhere(model: Any, policy: Path, read: list[Batch]) -> None:
    """What 2SSP is to be compared with: attention by chance, too, and not units alone."""
    shape, reader = read_shape(policy), whole(model, policy, read)
    recipes = [Recipe("2ssp", "random", 0.6, multiple=8, zero_attention=True, seed=seed) for seed in range(8)]
    cuts = [choose(reader, shape, recipe, say=str) for recipe in recipes]
    assert {len(cut.silenced) for cut in cuts} == {len(recipes[0].sizes(shape).silenced)}
    assert len({cut.silenced for cut in cuts}) > 2
    assert len({cut.neurons for cut in cuts}) == len(cuts)
