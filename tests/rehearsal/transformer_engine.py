"""Import Transformer Engine's own Python, 2.14 or 2.20, on top of the stand-ins of its compiled
module."""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch

from tests.rehearsal.dispatch import RehearsalMode
from tests.rehearsal.te_kernels import STAND_INS, StandInState


def _numbered(prefix: str, names: str) -> dict[str, int]:
    return {prefix + name: number for number, name in enumerate(names.split())}


_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D "
    "BSHD_BSHD_BSHD T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD "
    "THD_BSHD_BSHD THD_SBHD_SBHD Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD "
    "Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD "
    "BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)
_OVERLAPS = (
    "BULK_OVERLAP_AG BULK_OVERLAP_RS SPLIT_PIPELINED_AG_P2P SPLIT_PIPELINED_RS "
    "SPLIT_PIPELINED_RS_P2P ATOMIC_GEMM_RS"
    " ATOMIC_GEMM_AG_P2P ATOMIC_GEMM_RS_P2P EXTERNAL_BULK_OVERLAP_AG"
)
_FP8_BACKWARD = [
    f"{kind}{i}" for i, kind in itertools.product((1, 2, 3), ("GRAD_OUTPUT", "GRAD_INPUT"))
]
_FP8_FORWARD = [
    f"GEMM{i}_{kind}" for i, kind in itertools.product((1, 2, 3), ("INPUT", "WEIGHT", "OUTPUT"))
]
_DTYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6}
_DTYPES |= {"kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10}

ENUMERATIONS: dict[str, dict[str, int]] = {
    "CommOverlapAlgo": _numbered("", _OVERLAPS),
    "CommOverlapType": _numbered("", "RS AG"),
    "DType": _DTYPES,
    "FP8BwdTensors": _numbered("", " ".join(_FP8_BACKWARD)),
    "FP8FwdTensors": _numbered("", " ".join(_FP8_FORWARD)),
    "Float8BlockScaleTensorFormat": _numbered("", "GEMM_READY COMPACT INVALID"),
    "NVTEScalingMode": _numbered("NVTE_", "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING"),
    "NVTEQBHistogramMode": _numbered("", "TWO_KERNEL FUSED_ATOMIC"),
    "NVTERoutingMapFormat": _numbered("", "BYTEMAP BITMAP_U8"),
    "NVTE_Bias_Type": _numbered("NVTE_", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI"),
    "NVTE_Fused_Attn_Backend": {
        **_numbered("NVTE_", "F16_max512_seqlen F16_arbitrary_seqlen FP8"),
        "NVTE_No_Backend": -1,
    },
    "NVTE_Mask_Type": _numbered(
        "NVTE_",
        "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK"
        " PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
    "NVTE_QKV_Format": _numbered(
        "NVTE_", "SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET"
    ),
    "NVTE_QKV_Layout": _numbered("NVTE_", _LAYOUTS),
    "NVTE_Softmax_Type": _numbered("NVTE_", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX"),
}
"""Names and values from ``transformer_engine_torch``; a member that only 2.20 has comes last."""
CLASSES = (
    "CommOverlap", "CommOverlapBase", "CommOverlapCore", "CommOverlapHelper", "CommOverlapP2P",
    "CommOverlapP2PBase",
    "FP8TensorMeta",
)  # fmt: skip


def constants(source: str) -> dict[str, Any]:
    """The enumerations and classes by name. The classes are empty: no setting of a rehearsal uses
    them.

    Args:
        source: Transformer Engine's Python code, which from 2.20 on rejects enumeration members
            that it does not name.
    """
    constants_by_name: dict[str, Any] = {name: type(name, (), {}) for name in CLASSES}
    for name, members in ENUMERATIONS.items():
        if name == "NVTE_Fused_Attn_Backend":
            members = {
                member: number
                for member, number in members.items()
                if member.removeprefix("NVTE_") in source
            }
        constants_by_name[name] = enum.IntEnum(name, members)
    return constants_by_name


COMPILED = "transformer_engine_torch"
OPTIONAL = ("onnxscript", "onnx", "onnx.defs", "einops")
"""Packages that Transformer Engine imports and does not use in a rehearsal."""


class CompiledModule(ModuleType):
    """The compiled module. A function without a stand-in can be imported, and raises
    NotImplementedError if called."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **kwargs: object) -> NoReturn:
            raise NotImplementedError(
                f"{COMPILED}.{name} has no stand-in in tests/rehearsal/te_kernels.py"
            )

        setattr(self, name, missing)
        return missing


def import_transformer_engine(folder: Path, mode: RehearsalMode) -> None:
    """Import ``transformer_engine`` from a folder, for the rest of the process."""
    StandInState.mode = mode
    sys.path.insert(0, str(folder))
    for name in OPTIONAL:
        if (
            name.partition(".")[0] in sys.modules
            or importlib.util.find_spec(name.partition(".")[0]) is None
        ):
            sys.modules.setdefault(name, mock.MagicMock(name=name))
    sys.modules[COMPILED] = _compiled_module(folder / "transformer_engine")
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine.common then loads no library
    os.environ.pop("NVTE_RELEASE_BUILD", None)
    _import_without_library(folder / "transformer_engine")
    import transformer_engine.pytorch  # noqa: F401
    from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention

    utils: Any = dot_product_attention.dpa_utils
    choose = utils.get_attention_backend

    def choose_for_plain_tensors(
        parameters: Any,
    ) -> Any:  # fused attention requires the very type torch.Tensor
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
    """Import the package, whose ``__init__`` otherwise loads the compiled library of the
    framework."""
    outer = importlib.util.spec_from_file_location("transformer_engine", package / "__init__.py")
    inner = importlib.util.spec_from_file_location(
        "transformer_engine.common", package / "common" / "__init__.py"
    )
    assert (
        outer is not None
        and outer.loader is not None
        and inner is not None
        and inner.loader is not None
    )
    top, common = importlib.util.module_from_spec(outer), importlib.util.module_from_spec(inner)
    sys.modules |= {"transformer_engine": top, "transformer_engine.common": common}
    top.common = common  # type: ignore[attr-defined]
    inner.loader.exec_module(common)
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    outer.loader.exec_module(top)
