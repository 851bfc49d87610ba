"""A refit is the least-squares fit of what layers that go have added, and what is written computes it."""

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
from megatron_dppo.compress.refit import RIDGE, Refit
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


def fitted_by_hand(features: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """By rows that ask each coefficient to be zero, in place of a ridge."""
    width = features.shape[1]
    rows = (RIDGE * features.square().sum(0).mean()).sqrt() * torch.eye(width, dtype=torch.float64)
    zeros = torch.zeros(width, missing.shape[1], dtype=torch.float64)
    return torch.linalg.lstsq(torch.cat([features, rows]), torch.cat([missing, zeros])).solution.T


@torch.no_grad()
def test_each_refit_is_the_fit_of_what_those_before_it_leave(
    model: Any, policy: Path, answers: list[WorkedAnswer], read: list[Batch]
) -> None:
    weights, said = copy.deepcopy(model.state_dict()), list[str]()
    refit = Refit(model, read_shape(policy), read, torch.float64)
    refit.fit(Cut((0, 2)), say=said.append)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items()), "as it was"

    small = copy.deepcopy(model)
    small.model.layers = torch.nn.ModuleList([small.model.layers[0], small.model.layers[2]])
    small.config.num_hidden_layers = 2
    for place, (layer, last) in enumerate([(0, 1), (2, 3)]):
        target, _ = streams(model, answers, last, units=True)
        before, inputs = streams(small, answers, place, units=True)
        change = fitted_by_hand(inputs, target - before)
        small.model.layers[place].mlp.down_proj.weight += change
        torch.testing.assert_close(
            refit.weights[layer], small.model.layers[place].mlp.down_proj.weight, rtol=1e-6, atol=1e-6
        )
        left = (target - before - inputs @ change.T).square().sum() / (target - before).square().sum()
        assert refit.shares[layer] == pytest.approx(1 - float(left), abs=1e-6) and 0.1 < refit.shares[layer] < 1
    assert [text.partition(":")[0] for text in said] == ["layer 1", "layer 3"]


@torch.no_grad()
def test_experts_are_refitted_by_their_output(mixture: Path, answers: list[WorkedAnswer], read: list[Batch]) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    refit = Refit(model, read_shape(mixture), read, torch.float32)
    refit.fit(Cut((0,)), say=str)
    target, _ = streams(model, answers, 1, units=False)
    before, output = streams(model, answers, 0, units=False)
    experts = model.model.layers[0].mlp.experts.down_proj.double()
    expected = experts + torch.stack([fitted_by_hand(output, target - before) @ each for each in experts])
    torch.testing.assert_close(refit.weights[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_nothing_stands_in_for_layers_behind_the_embedding(model: Any, policy: Path, read: list[Batch]) -> None:
    refit, said = Refit(model, read_shape(policy), read, torch.float64), list[str]()
    refit.fit(Cut((2,)), say=said.append)
    assert refit.weights.keys() == {2}
    assert said[0].startswith("layers 0 to 1: nothing stands in") and said[1].startswith("layer 3: the down projection")


@pytest.mark.parametrize("experts", [False, True])
def test_what_is_written_has_the_refit(
    experts: bool, policy: Path, mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--verify`` compares with the larger policy, without these layers and with the fitted weights."""
    sums = [{"prompt": f"{n}+{n + 1}=", "response": f"{2 * n + 1}#{2 * n + 1}"} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    source, out = (mixture if experts else policy), tmp_path / "out"
    words = ["--method", "depth", "--keep", "0.5", "--score", "in-a-row", "--sequences", "20", "--refit", "--verify"]
    assert main(["compress", str(source), str(out), "--calibrate", str(tmp_path / "sums.jsonl"), *words]) == 0
    record = json.loads((out / "compress.json").read_text())
    after, without = record["loss_after"], record["loss_without_refit"]
    assert after != without and ("does not lower the loss" in capsys.readouterr().out) == (after > without)
    assert [*record["refitted"]] == [str(min(set(range(4)) - set(record["layers"])) - 1)]
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(model.model.layers) == len(record["layers"])
