"""What ``compress`` writes is what stock transformers loads, and computes what the larger policy does without some."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.cli import main
from megatron_dppo.compress.calibration import read_sequences
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.models.shape import read_shape
from tests.bridge.directories import Sizes, write_qwen2

TEXTS = [("1+2=", "3#3"), ("9+8=", "17#17"), ("5+5+5=", "10+5=15#15"), ("4+4=", "8#8")]


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("calibration") / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "response": text}) + "\n" for prompt, text in TEXTS))
    return file


def load(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None], use_cache=False).logits


def compressed(source: Path, out: Path, calibration: Path, *words: str) -> dict:
    command = ["compress", str(source), str(out), "--calibrate", str(calibration), "--sequences", "2", "--verify"]
    assert main([*command, *words]) == 0
    return json.loads((out / "config.json").read_text())


def test_layers_that_go_are_those_of_the_record(policy: Path, calibration: Path, tmp_path: Path) -> None:
    config = compressed(policy, tmp_path / "out", calibration, "--method", "depth", "--keep", "0.75")
    record = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == len(record["layers"]) == 3
    assert record["loss_after"] != record["loss_before"]
    whole = load(policy)
    whole.model.layers = torch.nn.ModuleList(whole.model.layers[layer] for layer in record["layers"])
    whole.config.num_hidden_layers = 3
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(whole))


@pytest.mark.parametrize("words", [("width", "--keep", "0.7"), ("2ssp", "--keep", "0.6", "--zero-attention")], ids=str)
def test_units_that_stay_are_those_with_the_most_activity(
    policy: Path, calibration: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    config = compressed(policy, tmp_path / "out", calibration, "--multiple", "8", "--method", *words)
    silenced = json.loads((tmp_path / "out" / "compress.json").read_text())["zero_attention"]
    assert bool(silenced) == (words[0] == "2ssp")
    small, large = load(tmp_path / "out"), load(policy)
    assert config["intermediate_size"] == small.model.layers[0].mlp.gate_proj.out_features < 80
    for layer, (ours, theirs) in enumerate(zip(small.model.layers, large.model.layers, strict=True)):
        rows = [theirs.mlp.gate_proj.weight.tolist().index(row) for row in ours.mlp.gate_proj.weight.tolist()]
        assert rows == sorted(rows)
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight[rows])
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight[:, rows])
        same = torch.equal(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
        assert same == (layer not in silenced)
        assert layer not in silenced or not ours.self_attn.o_proj.weight.any()


def test_another_family_becomes_smaller_too(calibration: Path, tmp_path: Path) -> None:
    write_qwen2(tmp_path / "qwen2", Sizes(), dtype=torch.bfloat16, shard_size="20KB")
    write_tokenizer(character_tokenizer(), tmp_path / "qwen2", max_tokens=128)
    words = "--method", "width", "--keep", "0.8", "--multiple", "4"
    assert compressed(tmp_path / "qwen2", tmp_path / "a", calibration, *words)["dtype"] == "bfloat16"
    load(tmp_path / "a")


def test_a_mixture_of_experts_loses_layers_too(mixture: Path, calibration: Path, tmp_path: Path) -> None:
    compressed(mixture, tmp_path / "out", calibration, "--method", "depth", "--keep", "0.5")
    assert read_shape(tmp_path / "out") == replace(read_shape(mixture), num_layers=1)
    load(tmp_path / "out")


def test_an_evaluation_s_own_answers_are_read_as_they_were_given(policy: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+2=", "answer": "3#3", "finish": "stop"},
        {"prompt": "9+8=", "answer": "17", "finish": "length"},
        {"prompt": "4+4=", "answer": "", "finish": "stop"},
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(policy)
    keys = {"prompt_key": "prompt", "response_key": "response", "chat_template": False}
    with pytest.raises(UserError, match="of no evaluation"):
        read_sequences(tmp_path, tokenizer, **keys)
    (tmp_path / "evaluation.json").write_text("{}")
    read = read_sequences(tmp_path, tokenizer, **keys)
    said = [(tokenizer.decode(a.prompt_ids), tokenizer.decode(a.response_ids)) for a in read]
    assert said == [("1+2=", "3#3<|im_end|>"), ("9+8=", "17")]


def test_a_dry_run_and_a_refusal_write_nothing(
    policy: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compress", str(policy), str(tmp_path / "out"), "--keep", "0.6", "--multiple", "8"]
    assert main([*command, "--calibrate", str(calibration), "--dry-run"]) == 0
    assert "nothing has been written" in capsys.readouterr().out
    assert main(command) == 2
    assert "--calibrate" in capsys.readouterr().err
    assert main([*command, "--calibrate", str(calibration), "--method", "2ssp"]) == 2
    assert "cannot say that a layer has none" in " ".join(capsys.readouterr().err.split())
    assert main([*command, "--calibrate", str(calibration), "--prompt-key", "question"]) == 2
    assert "--prompt-key" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and list(tmp_path.iterdir()) == []
