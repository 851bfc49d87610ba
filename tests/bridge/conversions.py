"""The conversion commands as tests call them, and readers of what they write."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.cli import main
from megatron_dppo.models.shape import PolicyShape, read_shape


def to_megatron(source: Path, out: Path, *options: str) -> int:
    """Return the exit code of ``hf_to_megatron.py``."""
    return main(["convert", "from-hf", str(source), str(out), *options])


def to_hf(checkpoint: Path, out: Path, *options: str) -> int:
    """Return the exit code of ``megatron_to_hf.py``."""
    return main(["convert", "to-hf", str(checkpoint), str(out), *options])


def printed_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the single error on stderr, in one line."""
    text = capsys.readouterr().err
    text = text[text.index("error: ") :]
    assert text.count("error: ") == text.count("problem") == text.count("remedy") == 1
    assert "Traceback" not in text
    return " ".join(text.split())


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a Hugging Face directory, read with safetensors alone."""
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def policy_tensors(path: Path, shape: PolicyShape | None = None) -> dict[str, torch.Tensor]:
    """Return the policy's tensors in the form of streams: each expert apart, in whatever form the
    files have them."""
    found = check_weights(path, shape or read_shape(path))
    values = {name: torch.from_numpy(tensor.map_values().copy()) for name, tensor in found.items()}
    return {
        name: each.view(torch.bfloat16) if found[name].dtype == "BF16" else each
        for name, each in values.items()
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Compare bit by bit, names and types included."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))
        for name in left
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
