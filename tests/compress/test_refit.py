"""A refit is the least-squares fit of what the stream lacks, and what is written computes with it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.cli import main
from megatron_dppo.compress.calibration import Batch
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.refit import RIDGE, Refit, layers_to_fit
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.models.shape import read_shape


def streams(model: Any, answers: list[WorkedAnswer], layer: int, *, units: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, …] what a layer gives, and the inputs of its down projection or the output of its feed-forward, from
    each sequence alone."""
    behind, features = [], []
    mlp = model.model.layers[layer].mlp
    hooks = [model.model.layers[layer].register_forward_hook(lambda _, __, out: behind.append(out[0]))]
    if units:
        hooks.append(mlp.down_proj.register_forward_pre_hook(lambda _, given: features.append(given[0][0])))
    else:
        hooks.append(mlp.register_forward_hook(lambda _, __, out: features.append(out[0])))
    for answer in answers:
        ids = np.concatenate([answer.prompt_ids, answer.response_ids])
        model(torch.from_numpy(ids).long()[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(behind).double(), torch.cat(features).double()


def fitted_by_hand(features: torch.Tensor, wanted: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The map, and the share that it explains. Rows that ask each coefficient to be zero stand for the ridge."""
    scale = 1 / wanted.norm(dim=1, keepdim=True)
    features, lacking = features * scale, (wanted - given) * scale
    rows = (RIDGE * features.square().sum(0).mean()).sqrt() * torch.eye(features.shape[1], dtype=torch.float64)
    zeros = torch.zeros(features.shape[1], lacking.shape[1], dtype=torch.float64)
    change = torch.linalg.lstsq(torch.cat([features, rows]), torch.cat([lacking, zeros])).solution
    return change.T, 1 - float((lacking - features @ change).square().sum() / lacking.square().sum())


@torch.no_grad()
def test_each_layer_is_fitted_to_what_those_before_it_have_left(
    model: Any, policy: Path, answers: list[WorkedAnswer], read: list[Batch]
) -> None:
    whole, said = copy.deepcopy(model.state_dict()), list[str]()
    refit = Refit(model, read_shape(policy), read, torch.float64)
    refit.fit(Cut((0, 2)), say=said.append)
    assert all(torch.equal(weight, whole[name]) for name, weight in model.state_dict().items()), "as it was"

    small = copy.deepcopy(model)
    small.model.layers = torch.nn.ModuleList([small.model.layers[0], small.model.layers[2]])
    small.config.num_hidden_layers = 2
    for place, (layer, behind) in enumerate([(0, 1), (2, 3)]):
        wanted, _ = streams(model, answers, behind, units=True)
        given, inputs = streams(small, answers, place, units=True)
        change, share = fitted_by_hand(inputs, wanted, given)
        small.model.layers[place].mlp.down_proj.weight += change
        fitted = small.model.layers[place].mlp.down_proj.weight
        torch.testing.assert_close(refit.weights[layer], fitted, rtol=1e-6, atol=1e-6)
        assert refit.shares[layer] == pytest.approx(share, abs=1e-6) and 0.1 < share < 1
        assert f"layer {layer} gives {share:.0%} of what the stream lacks behind layer {behind}" in said[place]


@torch.no_grad()
def test_experts_are_fitted_by_their_output(mixture: Path, answers: list[WorkedAnswer], read: list[Batch]) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    refit = Refit(model, read_shape(mixture), read, torch.float32)
    refit.fit(Cut((0,)), say=str)
    wanted, _ = streams(model, answers, 1, units=False)
    given, output = streams(model, answers, 0, units=False)
    change, _ = fitted_by_hand(output, wanted, given)
    experts = model.model.layers[0].mlp.experts.down_proj.double()
    torch.testing.assert_close(refit.weights[0].double(), experts + change @ experts, rtol=1e-4, atol=1e-4)


def test_layers_are_fitted_from_the_first_change_on(policy: Path) -> None:
    shape = read_shape(policy)
    assert layers_to_fit(Cut((0, 1, 3)), shape) == [1, 3]
    assert layers_to_fit(Cut((1, 2)), shape) == [1, 2], "the next ones make up for the first, before which is none"
    assert layers_to_fit(Cut((0, 1, 2)), shape) == [2]
    assert layers_to_fit(Cut((0, 1, 2, 3), silenced=(2,)), shape) == [2, 3]
    assert layers_to_fit(Cut((0, 1, 2, 3), channels=(0, 1)), shape) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "kind", ["depth", "width", "2ssp", "minitron", "depth of experts", "experts", "hidden of experts"]
)
def test_what_is_written_computes_with_the_refit(
    kind: str, policy: Path, mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--verify`` compares with the larger policy, without these parts and with the fitted weights."""
    sums = [{"prompt": f"{n}+{n + 1}=", "response": f"{2 * n + 1}#{2 * n + 1}"} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    method, out = kind.split()[0], tmp_path / "out"
    source = mixture if "experts" in kind else policy
    words = ["--method", method, "--keep", "0.65", "--multiple", "8" if method == "hidden" else "4"]
    words += ["--zero-attention", "--sequences", "20", "--refit", "--verify"]
    assert main(["compress", str(source), str(out), "--calibrate", str(tmp_path / "sums.jsonl"), *words]) == 0
    record = json.loads((out / "compress.json").read_text())
    assert set(map(int, record["refitted"])) <= set(record["layers"]) and record["refitted"]
    after, without = record["loss_after"], record["loss_without_refit"]
    assert after != without and ("does not lower the loss" in capsys.readouterr().out) == (after > without)
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
