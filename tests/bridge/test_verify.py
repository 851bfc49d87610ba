"""``--verify`` finds what has changed since it was written, and models that are not each other's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from megatron_dppo.bridge import convert, convert_commands
from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS
from megatron_dppo.bridge.chunks import Chunk
from megatron_dppo.bridge.convert import compare_logits, compare_tensors, logits_dtype, stored_chunks
from megatron_dppo.bridge.mapping import entries, expected_tensors
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, read_shape
from tests.bridge.conversions import contents, printed_error, to_hf, to_megatron
from tests.bridge.directories import Sizes, write_qwen3
from tests.commands import Command
from tests.damage import flip

NAMES = ["model.embed_tokens.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"]


def parts_in_checkpoint(place: Path, shape: PolicyShape) -> dict[str, list[Chunk]]:
    policy = StoredPolicy(place, shape, "CKPT")
    return {name: parts for entry in entries(shape) for name, parts in policy.tensors(entry).items()}


def compare(source: Path, checkpoint: Path) -> str:
    shape = read_shape(source)
    policy = StoredPolicy(checkpoint, shape, "CKPT")
    return compare_tensors(policy, source, shape, written=policy.dtype, workers=2, advance=lambda size: None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("which", ["checkpoint", "checkpoint without checksums", "directory"])
def test_a_flipped_bit_in_either_form_is_found(tmp_path: Path, name: str, which: str) -> None:
    shape = write_qwen3(tmp_path / "source", Sizes(), shard_size="40KB")
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    checkpoint = tmp_path / "megatron" / "release"
    digest = compare(tmp_path / "source", checkpoint)
    found = f"--verify = {re.escape(name)}: differs between the two forms"
    if which == "checkpoint without checksums":
        (checkpoint / CHECKSUMS).unlink()
    if which == "checkpoint":
        found = r"CKPT = .*/release: __0_\d.distcp is damaged: bytes .* are not what was written"
    if which != "directory":
        part = parts_in_checkpoint(checkpoint, shape)[name][-1]
    else:
        part = stored_chunks(check_weights(tmp_path / "source", shape))[name]
    for byte in (0, part.rows * part.columns * part.dtype.itemsize - 1):
        flip(part.file, 8 * (part.start + byte))
        with pytest.raises(UserError, match=found):
            compare(tmp_path / "source", checkpoint)
        flip(part.file, 8 * (part.start + byte))
    assert compare(tmp_path / "source", checkpoint) == digest


def test_the_digest_is_the_policys_and_not_the_files(tmp_path: Path) -> None:
    digests = []
    for name, sizes, shard_size in (("one", Sizes(), "1GB"), ("more", Sizes(), "40KB"), ("tied", None, "1GB")):
        write_qwen3(tmp_path / name, sizes or Sizes(tie_word_embeddings=True), shard_size=shard_size)
        assert to_megatron(tmp_path / name, tmp_path / f"{name}.megatron") == 0
        digests.append(compare(tmp_path / name, tmp_path / f"{name}.megatron/release"))
    assert digests[0] == digests[1] != digests[2]


def flipping(write: Callable[..., None], tensor: str) -> Callable[..., None]:
    """The same, with one bit of what was written flipped afterwards, as a failing disk would."""

    def write_and_flip(*arguments: object, **options: object) -> None:
        write(*arguments, **options)
        out = arguments[3]
        shape = read_shape(out if (out / "config.json").exists() else out / "hf")
        if (out / "release").exists():
            part = parts_in_checkpoint(out / "release", shape)[tensor][0]
        else:
            part = stored_chunks(check_weights(out, shape))[tensor]
        flip(part.file, 8 * (part.start + 5))

    return write_and_flip


@pytest.mark.parametrize("direction", ["write_megatron", "write_hf"])
def test_what_was_written_wrongly_is_never_put_in_place(
    tmp_path: Path, direction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, checkpoint, out = tmp_path / "source", tmp_path / "checkpoint", tmp_path / "out"
    write_qwen3(source, Sizes())
    assert to_megatron(source, checkpoint) == 0
    convert, origin = (to_hf, checkpoint) if direction == "write_hf" else (to_megatron, source)
    for options in ([], ["--overwrite"]):
        before = contents(tmp_path)
        broken = flipping(getattr(convert_commands, direction), NAMES[1])
        with patch.object(convert_commands, direction, broken):
            assert convert(origin, out, "--verify", "tensors", *options) == 2
        found = {"write_megatron": "__0_0.distcp is damaged", "write_hf": f"{NAMES[1]} problem differs between the two"}
        assert found[direction] in printed_error(capsys)
        assert contents(tmp_path) == before
        assert convert(origin, out, "--verify", "tensors", *options) == 0


def test_logits_are_computed_in_what_fits_in_memory(tmp_path: Path) -> None:
    shape = write_qwen3(tmp_path, Sizes())
    count = sum(torch.Size(size).numel() for size in expected_tensors(shape).values())

    def chosen(stored: torch.dtype, free: float) -> torch.dtype:
        with patch.object(convert.psutil, "virtual_memory") as memory:
            memory.return_value.available = free * count
            return logits_dtype(shape, stored)

    assert chosen(torch.bfloat16, 8) is torch.float32
    assert chosen(torch.bfloat16, 5) is torch.bfloat16
    for stored, free in ((torch.bfloat16, 3), (torch.float16, 5)):
        with pytest.raises(UserError, match="Give --verify tensors") as caught:
            chosen(stored, free)
        assert caught.value.setting == "--verify"


TOOLS = Path(convert_commands.__file__).parents[2] / "tools/convert_ckpt"


def run(log: Path, *words: str) -> tuple[list[str], list[str]]:
    """The lines that a program writes to its two outputs, in a process of its own, which Megatron is changed for."""
    errors = log.with_suffix(".err")
    code = Command(["python", *words], log, before=partial(write_errors_to, errors)).exit_code()
    assert code == 0, errors.read_text()
    no_gpu = "No CUDA runtime is found"  # a torch with CUDA says so, to whoever has none
    return log.read_text().splitlines(), [line for line in errors.read_text().splitlines() if no_gpu not in line]


def write_errors_to(file: Path) -> None:
    with file.open("w") as errors:
        os.dup2(errors.fileno(), 2)


def test_the_tools_compare_logits_and_print_nothing_else(tmp_path: Path) -> None:
    """The first one casts as well, which the models may not be blamed for."""
    write_qwen3(tmp_path / "source", Sizes())
    runs = {
        "hf_to_megatron.py": (tmp_path / "source", tmp_path / "megatron", "--dtype", "bf16"),
        "megatron_to_hf.py": (tmp_path / "megatron", tmp_path / "back"),
    }
    for tool, words in runs.items():
        _, out, *_ = words
        said, errors = run(tmp_path / tool, str(TOOLS / tool), *map(str, words), "--verify")
        tensors, logits, written = said
        assert "every tensor is the same in both forms" in tensors
        assert float(re.search(r"differ by at most (\S+) of", logits)[1]) < 1e-4
        assert written == f"{out}: 0.02 million weights in bfloat16"
        assert [line.partition(":")[0] for line in errors][1:] == ["verifying"]


OTHER_MODELS = {"another base of rotary positions": {"rope_theta": 5e5}, "another epsilon": {"rms_eps": 1e-1}}


def main(folder: Path) -> None:
    shape, place = read_shape(folder / "source"), folder / "megatron/release"
    print(compare_logits(place, folder / "source", shape, torch.float32, written=torch.float32))
    for changes in OTHER_MODELS.values():
        try:
            compare_logits(place, folder / "source", replace(shape, **changes), torch.float32, written=torch.float32)
        except UserError as error:
            print(error.problem)


def test_models_that_are_not_each_others_are_told_apart(tmp_path: Path) -> None:
    write_qwen3(tmp_path / "source", Sizes())
    assert to_megatron(tmp_path / "source", tmp_path / "megatron") == 0
    program = f"from pathlib import Path; from tests.bridge.test_verify import main; main(Path({str(tmp_path)!r}))"
    (difference, *problems), _ = run(tmp_path / "log", "-c", program)
    assert float(difference) < 1e-4
    assert len(problems) == len(OTHER_MODELS)
    assert all(re.search("logits differ by .* of their deviation, over 0.001", problem) for problem in problems)
