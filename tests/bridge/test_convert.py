"""Weights between both forms: casts, and ``--verify``, which finds changed bits and models of other
logits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from megatron_dppo.bridge import convert_commands
from megatron_dppo.bridge.checkpoint_folder import TRACKER
from megatron_dppo.bridge.convert import compare_logits
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from tests.bridge.conversions import contents, printed_error, same, to_hf, to_megatron, weights
from tests.bridge.directories import Sizes, assert_same_for_transformers, write_qwen3
from tests.commands import run_script
from tests.damage import flip


def test_weights_may_be_cast_on_either_way(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    assert (
        to_megatron(
            tmp_path / "source", tmp_path / "megatron", "--dtype", "bf16", "--verify", "tensors"
        )
        == 0
    )
    assert to_hf(tmp_path / "megatron", tmp_path / "bf16") == 0
    assert (
        to_hf(tmp_path / "megatron", tmp_path / "fp32", "--dtype", "fp32", "--verify", "tensors")
        == 0
    )
    cast = {name: tensor.bfloat16() for name, tensor in weights(tmp_path / "source").items()}
    assert same(weights(tmp_path / "bf16"), cast)
    assert same(weights(tmp_path / "fp32"), {name: tensor.float() for name, tensor in cast.items()})
    for name, dtype in {"bf16": "bfloat16", "fp32": "float32", "megatron/hf": "bfloat16"}.items():
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype


def test_mixed_types_become_the_common_type(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes(), dtype=torch.bfloat16)
    tensors = weights(tmp_path / "source")
    changed = "model.layers.1.self_attn.k_proj.weight"
    tensors[changed] = torch.randn(tensors[changed].shape).half()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    assert to_megatron(tmp_path / "source", tmp_path / "megatron", "--verify", "tensors") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--verify", "tensors") == 0
    assert same(
        weights(tmp_path / "back"), {name: tensor.float() for name, tensor in tensors.items()}
    )


def test_transformers_loads_a_checkpoint_named_by_itself(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_qwen3(source, Sizes())
    for name, workers in {"megatron": "1", "again": "4"}.items():
        assert to_megatron(source, tmp_path / name, "--workers", workers) == 0
    assert contents(tmp_path / "megatron") == contents(tmp_path / "again"), (
        "the same files from any workers"
    )
    assert (tmp_path / "megatron" / TRACKER).read_text() == "release\n"
    (tmp_path / "megatron" / "release").rename(tmp_path / "alone")
    assert (
        to_hf(tmp_path / "alone", tmp_path / "back", "--hf", str(source), "--shard-gb", "4e-5") == 0
    )
    assert_same_for_transformers(tmp_path / "back", source)


def flipping(write: Callable[..., None]) -> Callable[..., None]:
    """Flip the last bit of the weights that ``write`` has written, as a failing disk would."""

    def write_and_flip(*arguments: Any) -> None:
        write(*arguments)
        out = next(place for place in reversed(arguments) if isinstance(place, Path))
        (file,) = (file for file in out.rglob("*") if file.suffix in (".distcp", ".safetensors"))
        flip(file, 8 * file.stat().st_size - 1)

    return write_and_flip


@pytest.mark.parametrize(
    ("convert", "write", "problem"),
    [
        (to_megatron, "write_megatron", "__0_0.distcp is damaged"),
        (to_hf, "write_weights", "weight problem differs between the two"),
    ],
)
def test_wrongly_written_weights_are_never_put_in_place(
    tmp_path: Path,
    convert: Callable[..., int],
    write: str,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, checkpoint, out = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "out"
    write_qwen3(source, Sizes())
    assert to_megatron(source, checkpoint) == 0
    origin = source if convert is to_megatron else checkpoint
    for options in ([], ["--overwrite"]):
        before = contents(tmp_path)
        with patch.object(convert_commands, write, flipping(getattr(convert_commands, write))):
            assert convert(origin, out, "--verify", "tensors", *options) == 2
        assert problem in printed_error(capsys)
        assert contents(tmp_path) == before
        assert convert(origin, out, "--verify", "tensors", *options) == 0


def tell_models_apart(source: Path, checkpoint: Path) -> None:
    shape = read_shape(source)
    types = {"dtype": torch.float32, "output_dtype": torch.float32}
    assert compare_logits(checkpoint, source, shape, **types) < 1e-4
    for changes in ({"rope_theta": 5e5}, {"rms_eps": 1e-1}):
        with pytest.raises(
            UserError, match=r"logits differ by .* of their standard deviation, more than 0.001"
        ):
            compare_logits(checkpoint, source, replace(shape, **changes), **types)


def test_models_of_other_logits_are_told_apart(tmp_path: Path) -> None:
    source, log = tmp_path / "source", tmp_path / "log"
    write_qwen3(source, Sizes())
    assert to_megatron(source, tmp_path / "megatron") == 0
    run_script(
        tell_models_apart, source, tmp_path / "megatron/release", log=log
    )  # a process group of its own
