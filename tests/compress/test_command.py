"""The written policy is loaded by stock transformers, and computes the larger policy's outputs
without some parts."""

from __future__ import annotations

import json
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.cli import main
from megatron_dppo.compress import command
from megatron_dppo.compress.calibration import read_sequences
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.init import build_character_tokenizer, write_tokenizer
from tests.bridge.directories import Sizes, write_qwen2

TEXTS = [("1+2=", "3#3"), ("9+8=", "17#17"), ("5+5+5=", "10+5=15#15"), ("4+4=", "8#8")]
WIDTH = ("--method", "width", "--keep", "0.7", "--multiple", "8")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("calibration") / "sums.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": prompt, "response": text}) + "\n" for prompt, text in TEXTS)
    )
    return file


def load(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@torch.no_grad()
def compute_logits(model: Any) -> torch.Tensor:
    return model(torch.arange(3, 40)[None], use_cache=False).logits


def words(source: Path, out: Path, calibration: Path, *more: str) -> list[str]:
    return [
        "compress",
        str(source),
        str(out),
        "--calibrate",
        str(calibration),
        "--sequences",
        "2",
        *more,
    ]


def compress(source: Path, out: Path, calibration: Path, *more: str) -> dict[str, Any]:
    """Run the command with ``--verify``, and return the record."""
    assert main(words(source, out, calibration, "--verify", *more)) == 0
    return json.loads((out / "compress.json").read_text())


@pytest.mark.quick
def test_depth_removes_the_layers_that_the_record_leaves_out(
    policy: Path, calibration: Path, tmp_path: Path
) -> None:
    record = compress(policy, tmp_path / "out", calibration, "--method", "depth", "--keep", "0.75")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == len(record["layers"]) == 3
    assert record["loss_after"] != record["loss_before"]
    larger = load(policy)
    larger.model.layers = torch.nn.ModuleList(
        larger.model.layers[layer] for layer in record["layers"]
    )
    larger.config.num_hidden_layers = 3
    torch.testing.assert_close(compute_logits(load(tmp_path / "out")), compute_logits(larger))


@pytest.mark.parametrize(
    "more", [WIDTH, ("--method", "2ssp", "--keep", "0.6", "--multiple", "8", "--zero-attention")]
)
def test_kept_units_are_the_larger_policys(
    policy: Path, calibration: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    zeroed = compress(policy, tmp_path / "out", calibration, *more)["zero_attention"]
    assert bool(zeroed) == ("2ssp" in more)
    smaller, larger = load(tmp_path / "out").model.layers, load(policy).model.layers
    assert smaller[0].mlp.gate_proj.out_features < 80
    for number, (ours, theirs) in enumerate(zip(smaller, larger, strict=True)):
        rows = [
            theirs.mlp.gate_proj.weight.tolist().index(row)
            for row in ours.mlp.gate_proj.weight.tolist()
        ]
        assert rows == sorted(rows)
        assert torch.equal(ours.mlp.up_proj.weight, theirs.mlp.up_proj.weight[rows])
        assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight[:, rows])
        expected = theirs.self_attn.o_proj.weight * (number not in zeroed)
        assert torch.equal(ours.self_attn.o_proj.weight, expected)


@pytest.mark.parametrize("part", ["block", "attention", "feed-forward"])
def test_a_mixture_of_experts_loses_parts(
    mixture: Path, calibration: Path, tmp_path: Path, part: str
) -> None:
    keep = {"block": "0.5", "attention": "0.9", "feed-forward": "0.6"}[part]
    more = ("--method", "depth", "--keep", keep, "--part", part, "--score", "influence")
    record = compress(mixture, tmp_path / "out", calibration, *more)
    removed = (
        2 - len(record["layers"]),
        len(record["zero_attention"]),
        len(record["zero_feed_forward"]),
    )
    assert removed == tuple(int(part == each) for each in ("block", "attention", "feed-forward"))
    load(tmp_path / "out")


def test_another_family_keeps_its_type(calibration: Path, tmp_path: Path) -> None:
    write_qwen2(tmp_path / "qwen2", Sizes(), dtype=torch.bfloat16, shard_size="20KB")
    write_tokenizer(build_character_tokenizer(), tmp_path / "qwen2", max_tokens=128)
    compress(tmp_path / "qwen2", tmp_path / "out", calibration, "--keep", "0.8", "--multiple", "4")
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    load(tmp_path / "out")


def test_verify_finds_a_difference(
    policy: Path,
    calibration: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "apply_cut", lambda model, cut: nullcontext())
    assert main(words(policy, tmp_path / "out", calibration, "--verify", *WIDTH)) == 2
    assert "--verify" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_one_model_is_in_memory_at_a_time(
    policy: Path, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model, loaded = command._load_model, list[weakref.ref[Any]]()

    def load_alone(folder: Path, dtype: torch.dtype) -> Any:
        assert [ref for ref in loaded if ref() is not None] == []
        model = load_model(folder, dtype)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(command, "_load_model", load_alone)
    compress(policy, tmp_path / "out", calibration, *WIDTH)
    assert len(loaded) == 2


def test_answers_of_an_evaluation_are_read_unchanged(policy: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "1+2=", "answer": "3#3", "finish": "stop"},
        {"prompt": "9+8=", "answer": "17", "finish": "length"},
        {"prompt": "4+4=", "answer": "", "finish": "stop"},
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(policy)
    keys = {"prompt_key": "prompt", "response_key": "response", "chat_template": False}
    with pytest.raises(UserError, match="without an evaluation"):
        read_sequences(tmp_path, tokenizer, **keys)
    (tmp_path / "evaluation.json").write_text("{}")
    answers = read_sequences(tmp_path, tokenizer, **keys)
    texts = [
        (tokenizer.decode(answer.prompt_ids), tokenizer.decode(answer.response_ids))
        for answer in answers
    ]
    assert texts == [("1+2=", "3#3<|im_end|>"), ("9+8=", "17")]


def test_a_dry_run_and_a_refusal_write_nothing(
    policy: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(words(policy, out, calibration, "--dry-run", *WIDTH)) == 0
    assert "nothing has been written" in capsys.readouterr().out
    refusals = {
        "--calibrate = (not given)": ["compress", str(policy), str(out), *WIDTH],
        "--method = 2ssp": words(
            policy, out, calibration, "--method", "2ssp", "--keep", "0.6", "--multiple", "8"
        ),
        "Set --prompt-key to the right column": words(
            policy, out, calibration, *WIDTH, "--prompt-key", "question"
        ),
        "--max-tokens = 2": words(policy, out, calibration, *WIDTH, "--max-tokens", "2"),
    }
    for text, typed in refusals.items():
        assert main(typed) == 2
        assert text in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
