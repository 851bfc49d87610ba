"""Transformer Engine's Adam on a CPU: its own Python, and torch in the place of its one compiled kernel.

The Python comes from the registry's wheel, which is laid out beside the environment's packages and not among them:
Megatron-Core would try to import all of Transformer Engine.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

VERSION = "2.14.1"
PACKAGE = "transformer_engine.pytorch.optimizers"


def lay_out_wheel() -> Path:
    """Fetch the wheel, once for an environment; the folder where it lies."""
    place = Path(sys.prefix, "share", f"transformer-engine-{VERSION}")
    if not place.exists():
        place.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as draft:
            install = ["install", "-q", "--disable-pip-version-check", "--no-deps", "--target", f"{draft}/whole"]
            subprocess.run([sys.executable, "-m", "pip", *install, f"transformer-engine=={VERSION}"], check=True)
            Path(draft, "whole").rename(place)
    return place


def fused_adam(wheel: Path) -> type[torch.optim.Optimizer]:
    """The class, from the wheel's own source."""
    folder = wheel / PACKAGE.replace(".", "/")
    stand_ins = {
        "transformer_engine_torch": _kernels(),
        "transformer_engine.pytorch.tensor.float8_tensor": _module(Float8Tensor=_Absent, Float8Quantizer=_Absent),
        "transformer_engine.pytorch.quantized_tensor": _module(QuantizedTensor=_Absent),
    }
    sys.modules.update(stand_ins)
    try:
        _load(folder / "multi_tensor_apply.py")
        return _load(folder / "fused_adam.py").FusedAdam
    finally:
        for name in stand_ins:
            del sys.modules[name]  # or others would take Transformer Engine for installed


def use_in_megatron(wheel: Path) -> None:
    """Have Megatron-Core, in this process, take it for what it found when it was imported. Before anything is made."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    adam: Any = fused_adam(wheel)
    optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = adam, False
    distrib_optimizer.Adam, distrib_optimizer.HAVE_APEX_OR_TE = adam, True
    distrib_optimizer.USING_TE_OPTIMIZER = True


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the relative import of the other file looks
    spec.loader.exec_module(module)
    return module


class _Absent:
    """Of 8-bit training, of which nothing is used."""


def _module(**content: Any) -> ModuleType:
    module = ModuleType("stand_in")
    vars(module).update(content)
    return module


def _kernels() -> ModuleType:
    unused = ("param_remainder", "fp8", "capturable", "capturable_master")
    return _module(
        multi_tensor_adam=_adam,
        DType=_module(kFloat32=0),
        **{f"multi_tensor_adam_{name}": None for name in unused},
    )


@torch.no_grad()
def _adam(
    chunk: int,
    skip: torch.Tensor,
    tensors: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    correct: int,
    decay: float,
) -> None:
    """AdamW (arXiv:1711.05101, algorithm 2), which is all that is asked of the kernel here."""
    assert decoupled and correct
    for gradient, parameter, mean, square in zip(*tensors, strict=True):
        mean.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        root = (square / (1.0 - beta2**step)).sqrt_().add_(eps)
        parameter.sub_(lr * (mean / (1.0 - beta1**step) / root + decay * parameter))
