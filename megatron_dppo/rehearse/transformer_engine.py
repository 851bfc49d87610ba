"""Import Transformer Engine's own Python on top of the stand-ins of its compiled module."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch

from megatron_dppo.rehearse.dispatch import RehearsalMode
from megatron_dppo.rehearse.te_constants import constants
from megatron_dppo.rehearse.te_kernels import STAND_INS, StandInState

COMPILED = "transformer_engine_torch"
OPTIONAL = ("onnxscript", "onnx", "onnx.defs", "einops")
"""Packages that Transformer Engine imports and does not use in a rehearsal."""


class CompiledModule(ModuleType):
    """The compiled module. A function without a stand-in can be imported, and raises NotImplementedError if called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(f"{COMPILED}.{name} has no stand-in in megatron_dppo/rehearse/te_kernels.py")

        setattr(self, name, missing)
        return missing


def install(folder: Path, mode: RehearsalMode) -> None:
    """Import ``transformer_engine`` from a folder, for the rest of the process."""
    StandInState.mode = mode
    sys.path.insert(0, str(folder))
    for name in OPTIONAL:
        if name.partition(".")[0] in sys.modules or importlib.util.find_spec(name.partition(".")[0]) is None:
            sys.modules.setdefault(name, mock.MagicMock(name=name))
    sys.modules[COMPILED] = _compiled_module(folder / "transformer_engine")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine.common then loads no library
    os.environ.pop("NVTE_RELEASE_BUILD", None)
    _import_without_library(folder / "transformer_engine")
    import transformer_engine.pytorch  # noqa: F401
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    utils: Any = dot_product_attention.dpa_utils
    choose = utils.get_attention_backend

    def choose_for_plain_tensors(parameters: Any) -> Any:  # fused attention requires the very type torch.Tensor
        parameters.qkv_type = torch.Tensor
        return choose(parameters)

    utils.get_attention_backend = choose_for_plain_tensors


def _compiled_module(package: Path) -> ModuleType:
    module = CompiledModule(COMPILED)
    python = "\n".join(path.read_text() for path in sorted((package / "pytorch").rglob("*.py")))
    known = {**constants(python), **STAND_INS}
    module.__dict__.update(known)
    module.__all__ = sorted({*known, *re.findall(r"\btex\.([A-Za-z]\w*)", python)})  # type: ignore[attr-defined]
    module.__spec__ = importlib.machinery.ModuleSpec(COMPILED, None)
    return module


def _import_without_library(package: Path) -> None:
    """Import the package, whose ``__init__`` otherwise loads the compiled library of the framework."""
    outer = importlib.util.spec_from_file_location("transformer_engine", package / "__init__.py")
    inner = importlib.util.spec_from_file_location("transformer_engine.common", package / "common" / "__init__.py")
    assert outer is not None and outer.loader is not None and inner is not None and inner.loader is not None
    top, common = importlib.util.module_from_spec(outer), importlib.util.module_from_spec(inner)
    sys.modules |= {"transformer_engine": top, "transformer_engine.common": common}
    top.common = common  # type: ignore[attr-defined]
    inner.loader.exec_module(common)
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    outer.loader.exec_module(top)
