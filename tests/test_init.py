"""A fresh policy is loaded by stock transformers, and is whole or absent."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dppo.errors import UserError
from megatron_dppo.init import SUM_CHARACTERS, write_model

TINY = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}


POLICY = partial(write_model, **TINY, std=0.05)


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("options", [{}, {"tie": False}, {"experts": 4}], ids=str)
def test_transformers_loads_every_tensor(tmp_path: Path, options: dict) -> None:
    parameters = write_model(tmp_path / "policy", **TINY, **options)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "policy", output_loading_info=True
    )
    assert type(model).__name__ == (
        "Qwen3MoeForCausalLM" if "experts" in options else "Qwen3ForCausalLM"
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert parameters == model.num_parameters()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == options.get("tie", True)
    assert model(torch.tensor([[4, 5, 6]])).logits.shape == (1, 3, 48)


def test_weights_have_the_requested_deviation(policy: Path) -> None:
    written = tensors(policy)
    norms = {name for name in written if "norm" in name}
    assert len(norms) == 2 * 4 + 1 and all((written[name] == 1).all() for name in norms)
    for name in written.keys() - norms:
        assert (
            abs(written[name].std().item() - 0.05) < 0.01
            and abs(written[name].mean().item()) < 0.01
        )
    assert read(policy, "config.json")["initializer_range"] == 0.05


def test_shards_are_indexed_and_hold_the_seed_s_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "whole", **TINY, seed=3, dtype="bf16")
    write_model(tmp_path / "other", **TINY, seed=4, dtype="bf16")
    out = tmp_path / "sharded"
    parameters = write_model(out, **TINY, seed=3, dtype="bf16", max_shard_bytes=8_000)
    whole, sharded, other = (tensors(tmp_path / name) for name in ("whole", "sharded", "other"))
    assert whole.keys() == sharded.keys() and all(
        torch.equal(whole[name], sharded[name]) for name in whole
    )
    assert not torch.equal(whole["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    index = read(out, "model.safetensors.index.json")
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(names) > 2 and sorted(set(index["weight_map"].values())) == names
    assert index["metadata"]["total_size"] == 2 * parameters
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and (model.model.norm.weight == 1).all()


def test_every_character_of_a_sum_is_one_token(policy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for text in (SUM_CHARACTERS, "12+7+55=12+7=19\n19+55=74\n#74", "\n\n 1  2 \n"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert len(tokenizer) == 48 == read(policy, "config.json")["vocab_size"]
    assert read(policy, "generation_config.json")["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("1é")["input_ids"]) == "1" + 2 * "<|unknown|>", (
        "never dropped in silence"
    )


def test_bpe_is_trained_on_the_corpus_to_its_size(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        json.dumps({"a": "clips clips clips", "nested": [{"b": "altogether altogether"}], "n": 3})
        + "\n"
    )
    write_model(tmp_path / "policy", **TINY, tokenizer="bpe", corpus=corpus, vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert read(tmp_path / "policy", "config.json")["vocab_size"] == 300 >= len(tokenizer)
    assert [len(tokenizer(text)["input_ids"]) for text in (" clips", " altogether", "1234")] == [
        1,
        1,
        4,
    ]
    assert len(tensors(tmp_path / "policy")["model.embed_tokens.weight"]) == 300


def test_only_models_are_replaced_and_only_on_demand(tmp_path: Path) -> None:
    out = tmp_path / "policy"
    write_model(out, **TINY, seed=1)
    before = tensors(out)["model.embed_tokens.weight"]
    with pytest.raises(UserError, match="is there already"):
        write_model(out, **TINY, seed=2)
    assert torch.equal(tensors(out)["model.embed_tokens.weight"], before)
    write_model(out, **TINY, seed=2, overwrite=True)
    assert not torch.equal(tensors(out)["model.embed_tokens.weight"], before)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is no model directory"):
        write_model(tmp_path / "papers", **TINY, overwrite=True)
