"""Law 4 from file to file: Hugging Face → Megatron's distributed format → Hugging Face is the identity."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron_dppo.bridge import chunks, torch_dist
from megatron_dppo.bridge.checkpoint_folder import TRACKER
from megatron_dppo.bridge.safetensors_files import INDEX, check_weights
from tests.bridge.conversions import contents, same, to_hf, to_megatron, weights
from tests.bridge.directories import FAMILIES, Sizes, write_qwen3


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    groups, queries = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Sizes(
        vocab_size=draw(st.integers(20, 300)),
        hidden_size=groups * queries * draw(st.integers(1, 5)),
        intermediate_size=draw(st.integers(1, 30)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=groups * queries,
        num_key_value_heads=groups,
        head_dim=2 * draw(st.integers(1, 4)),
        tie_word_embeddings=draw(st.booleans()),
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(
    sizes=sizes(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shard_kb=st.sampled_from([2, 20, 10**6]),
    file_bytes=st.sampled_from([1, 20_000, torch_dist.FILE_BYTES]),
    buffer_bytes=st.sampled_from([1, 100, chunks.BUFFER_BYTES]),
    workers=st.integers(1, 3),
)
def test_there_and_back_is_the_identity(
    family: str, sizes: Sizes, dtype: torch.dtype, shard_kb: int, file_bytes: int, buffer_bytes: int, workers: int
) -> None:
    with (
        TemporaryDirectory() as folder,
        patch.object(torch_dist, "FILE_BYTES", file_bytes),
        patch.object(chunks, "BUFFER_BYTES", buffer_bytes),
    ):
        there, back, source = (Path(folder, name) for name in ("megatron", "back", "source"))
        shape = FAMILIES[family](source, sizes, dtype=dtype, shard_size=f"{shard_kb}KB")
        options = ["--workers", str(workers), "--verify", "tensors"]
        assert to_megatron(source, there, *options) == 0
        assert to_hf(there, back, "--shard-gb", str(shard_kb * 1e-6), *options) == 0
        assert same(weights(back), weights(source))
        check_weights(back, shape)
        shards = sorted(back.glob("*.safetensors"))
        assert (len(shards) > 1) == (back / INDEX).exists()
        assert all(
            sum(t.nbytes for t in load_file(s).values()) <= shard_kb * 1000 or len(load_file(s)) == 1 for s in shards
        )


def test_weights_may_be_cast_on_either_way(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    assert to_megatron(tmp_path / "source", tmp_path / "megatron", "--dtype", "bf16", "--verify", "tensors") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "bf16") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "fp32", "--dtype", "fp32", "--verify", "tensors") == 0
    cast = {name: tensor.bfloat16() for name, tensor in weights(tmp_path / "source").items()}
    assert same(weights(tmp_path / "bf16"), cast)
    assert same(weights(tmp_path / "fp32"), {name: tensor.float() for name, tensor in cast.items()})
    for name, dtype in {"bf16": "bfloat16", "fp32": "float32", "megatron/hf": "bfloat16"}.items():
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize(("other", "both"), [(torch.float64, torch.float64), (torch.float16, torch.float32)])
def test_mixed_types_become_one_that_holds_them_all(tmp_path: Path, other: torch.dtype, both: torch.dtype) -> None:
    write_qwen3(tmp_path / "source", Sizes(), dtype=torch.bfloat16)
    tensors = weights(tmp_path / "source")
    changed = "model.layers.1.self_attn.k_proj.weight"
    tensors[changed] = torch.randn(tensors[changed].shape).to(other)
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    assert to_megatron(tmp_path / "source", tmp_path / "megatron", "--verify", "tensors") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--verify", "tensors") == 0
    assert same(weights(tmp_path / "back"), {name: tensor.to(both) for name, tensor in tensors.items()})


def test_an_output_layer_that_is_tied_is_not_carried_along(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes(tie_word_embeddings=True), dtype=torch.bfloat16)
    tensors = weights(tmp_path / "source")
    copy = {"lm_head.weight": tensors["model.embed_tokens.weight"].float()}
    save_file(tensors | copy, tmp_path / "source" / "model.safetensors")
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back") == 0
    assert same(weights(tmp_path / "back"), tensors)


def test_a_checkpoint_may_be_named_itself_and_its_configuration_elsewhere(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    assert (tmp_path / "megatron" / TRACKER).read_text() == "release\n"
    (tmp_path / "megatron" / "release").rename(tmp_path / "alone")
    assert to_hf(tmp_path / "alone", tmp_path / "back", "--hf", str(tmp_path / "source")) == 0
    assert same(weights(tmp_path / "back"), weights(tmp_path / "source"))


def test_a_dry_run_prints_the_plan_and_its_memory_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    before = contents(tmp_path)
    assert to_megatron(tmp_path / "source", tmp_path / "megatron", "--dry-run", "--workers", "3") == 0
    printed = capsys.readouterr().out
    assert "__0_0.distcp" in printed
    assert "memory: at most 3.8 MiB of weights at a time, in 3 workers" in printed
    assert contents(tmp_path) == before
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    before = contents(tmp_path)
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--dry-run", "--verify", "--shard-gb", "4e-5") == 0
    printed = capsys.readouterr().out
    assert "model-00002-of-00002.safetensors" in printed
    assert "then the whole model for its logits, 0.02 million weights in float32" in printed
    assert contents(tmp_path) == before


def test_the_same_files_are_written_however_many_work(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    for name, workers in {"one": "1", "four": "4"}.items():
        assert to_megatron(tmp_path / "source", tmp_path / name, "--workers", workers) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "four")


@pytest.mark.parametrize(
    "option", [["--workers", "0"], ["--shard-gb", "nan"], ["--shard-gb", "-1"], ["--dtype", "int8"]]
)
def test_an_option_of_no_meaning_is_refused(option: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        to_hf(tmp_path, tmp_path, *option)
    assert caught.value.code == 2


def test_a_conversion_needs_neither_megatron_nor_transformers(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", replace(Sizes(), num_hidden_layers=1))
    program = (
        "import sys; from pathlib import Path; from tests.bridge.conversions import to_hf, to_megatron\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "assert to_megatron(folder / 'source', folder / 'megatron', '--verify', 'tensors') == 0\n"
        "assert to_hf(folder / 'megatron', folder / 'back', '--verify', 'tensors') == 0\n"
        "assert not {'megatron', 'transformers'} & {module.partition('.')[0] for module in sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
