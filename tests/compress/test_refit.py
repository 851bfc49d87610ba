"""A refit is the least-squares fit of the stream's error, and what is written computes with it."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.cli import main
from megatron_dppo.compress.calibration import Batch, batches, draw, read_sequences
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.reader import Whole
from megatron_dppo.compress.refit import RIDGE, Refit, layers_to_fit
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.data.tokenizer import load_tokenizer
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


def fitted_by_hand(features: torch.Tensor, target: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The map, and the share that it explains. Rows that ask each coefficient to be zero stand for the ridge."""
    scale = 1 / target.norm(dim=1, keepdim=True)
    features, error = features * scale, (target - given) * scale
    rows = (RIDGE * features.square().sum(0).mean()).sqrt() * torch.eye(features.shape[1], dtype=torch.float64)
    zeros = torch.zeros(features.shape[1], error.shape[1], dtype=torch.float64)
    change = torch.linalg.lstsq(torch.cat([features, rows]), torch.cat([error, zeros])).solution
    return change.T, 1 - float((error - features @ change).square().sum() / error.square().sum())


@torch.no_grad()
def test_each_layer_is_fitted_to_what_those_before_it_have_left(
    model: Any, policy: Path, answers: list[WorkedAnswer], read: list[Batch]
) -> None:
    whole, said, counts, cut = copy.deepcopy(model.state_dict()), list[str](), list[float](), Cut((0, 2))
    refit = Refit(Whole(model, read_shape(policy), read), torch.float64)
    refit.fit(cut, say=said.append, advance=lambda count, said="", *, to_do=0: counts.append(count))
    assert sum(counts) == refit.reads(cut) == 2 * 2 * len(answers)
    assert all(torch.equal(weight, whole[name]) for name, weight in model.state_dict().items()), "as it was"

    small = copy.deepcopy(model)
    small.model.layers = torch.nn.ModuleList([small.model.layers[0], small.model.layers[2]])
    small.config.num_hidden_layers = 2
    for place, (layer, behind) in enumerate([(0, 1), (2, 3)]):
        target, _ = streams(model, answers, behind, units=True)
        given, inputs = streams(small, answers, place, units=True)
        change, share = fitted_by_hand(inputs, target, given)
        small.model.layers[place].mlp.down_proj.weight += change
        fitted = small.model.layers[place].mlp.down_proj.weight
        torch.testing.assert_close(refit.weights[layer], fitted, rtol=1e-6, atol=1e-6)
        assert refit.shares[layer] == pytest.approx(share, abs=1e-6) and 0.1 < share < 1
        assert f"layer {layer} explains {share:.0%} of the error behind layer {behind}" in said[place]


@torch.no_grad()
def test_a_fit_is_of_the_units_and_channels_that_stay(
    model: Any, policy: Path, answers: list[WorkedAnswer], read: list[Batch]
) -> None:
    units, channels = tuple(range(0, 80, 2)), tuple(range(1, 48, 3))
    cut = Cut((0, 1, 2, 3), neurons=(units,) * 4, channels=channels)
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    refit = Refit(Whole(model, read_shape(policy), read), torch.float64)
    refit.fit_layer(cut, 0, 0)
    target, _ = streams(model, answers, 0, units=True)
    with Whole(model, read_shape(policy), read).as_cut(cut):
        given, inputs = streams(model, answers, 0, units=True)
    change, share = fitted_by_hand(inputs[:, units], target[:, channels], given[:, channels])
    before[np.ix_(channels, units)] += change
    torch.testing.assert_close(refit.weights[0], before, rtol=1e-6, atol=1e-6)
    assert refit.shares[0] == pytest.approx(share, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("zeros", ["up_proj.weight", "no error"])
def test_where_nothing_can_be_fitted_a_layer_stays_as_it_was(
    model: Any, policy: Path, read: list[Batch], zeros: str
) -> None:
    """Without activations the sums have no inverse, and without an error a share of it is no number."""
    if zeros == "up_proj.weight":
        model.model.layers[1].mlp.up_proj.weight.zero_()
    else:
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].mlp.down_proj.weight.zero_()
    refit = Refit(Whole(model, read_shape(policy), read), torch.float64)
    refit.fit(Cut((0, 1, 3)), say=str)
    assert refit.shares[1] == 0 and 1 not in refit.weights


@torch.no_grad()
def test_experts_are_fitted_by_their_output(mixture: Path, answers: list[WorkedAnswer], read: list[Batch]) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    refit = Refit(Whole(model, read_shape(mixture), read), torch.float32)
    refit.fit(Cut((0,)), say=str)
    target, _ = streams(model, answers, 1, units=False)
    given, output = streams(model, answers, 0, units=False)
    change, _ = fitted_by_hand(output, target, given)
    experts = model.model.layers[0].mlp.experts.down_proj.double()
    torch.testing.assert_close(refit.weights[0].double(), experts + change @ experts, rtol=1e-4, atol=1e-4)


def test_layers_are_fitted_from_the_first_change_on(policy: Path) -> None:
    shape = read_shape(policy)
    assert layers_to_fit(Cut((0, 1, 3)), shape) == [1, 3]
    assert layers_to_fit(Cut((1, 2)), shape) == [1, 2], "the next ones make up for the first, before which is none"
    assert layers_to_fit(Cut((0, 1, 2)), shape) == [2]
    assert layers_to_fit(Cut((0, 1, 2, 3), silenced=(2,)), shape) == [2, 3]
    assert layers_to_fit(Cut((0, 1, 2, 3), channels=(0, 1)), shape) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": f"{n}+{n + 1}=", "response": f"{2 * n + 1}#{2 * n + 1}"} for n in range(40)]
    file = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def compressed(source: Path, out: Path, sums: Path, method: str, *words: str) -> dict[str, Any]:
    options = ["--method", method, "--keep", "0.65", "--multiple", "8" if method == "hidden" else "4"]
    options += ["--zero-attention", "--sequences", "20", "--calibrate", str(sums)]
    assert main(["compress", str(source), str(out), *options, *words]) == 0
    record: dict[str, Any] = json.loads((out / "compress.json").read_text())
    return record


@pytest.mark.parametrize(
    "kind", ["depth", "width in bf16", "2ssp", "minitron", "depth of experts", "experts", "hidden of experts"]
)
def test_what_is_written_computes_with_the_refit(
    kind: str, policy: Path, mixture: Path, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--verify`` compares with the larger policy, without these parts and with the fitted weights."""
    method, out, source = kind.split()[0], tmp_path / "out", mixture if "experts" in kind else policy
    if "bf16" in kind:
        source = shutil.copytree(policy, tmp_path / "policy")
        AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16).save_pretrained(source)
    record = compressed(source, out, sums, method, "--refit", "--verify")
    assert set(map(int, record["refitted"])) <= set(record["layers"]) and record["refitted"]
    after, without, (said, err) = record["loss_after"], record["loss_without_refit"], capsys.readouterr()
    assert after != without and ("does not lower the loss" in said) == (after > without)
    apart = re.search(r"without these parts and with the fitted weights, up to (\S+) of", said)
    assert apart and float(apart[1]) < 1e-4, "what is compared has the written weights, as they are rounded"
    if kind == "depth":  # each layer's loss and the whole one, the fits, the losses at the end
        assert f"\nsequences: {20 * (5 + 2 * len(record['refitted']) + 3)} in" in err and len(record["refitted"]) == 3
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_losses_are_those_of_the_policies_with_and_without_the_refit(
    policy: Path, sums: Path, tmp_path: Path
) -> None:
    refitted = compressed(policy, tmp_path / "out", sums, "width", "--refit")
    plain = compressed(policy, tmp_path / "plain", sums, "width")
    assert refitted["loss_without_refit"] == plain["loss_after"]
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    columns: Any = {"prompt_key": "prompt", "response_key": "response", "chat_template": False}
    _, others = draw(read_sequences(sums, load_tokenizer(policy), **columns), 20, seed=1)
    unseen = list(batches(others, max_tokens=512, device=torch.device("cpu")))
    assert refitted["loss_after"] == pytest.approx(
        Whole(written, read_shape(tmp_path / "out"), unseen).loss(), rel=1e-5
    )
