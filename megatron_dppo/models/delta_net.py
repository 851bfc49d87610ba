"""Megatron's gated delta network in a policy: over packs, without host waits, and with what is fp32
in every policy.

Megatron-Core has it from 0.19 on. It computes with the functions of flash-linear-attention, for
which ``parallel/without_cuda.py`` has others.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional


def with_delta_net(layer: Any) -> ModuleSpec:
    """A layer with attention, with a gated delta network in its place."""
    made = deepcopy(layer)
    parts = made.submodules
    linear = layer.submodules.self_attention.submodules
    parts.self_attention = ModuleSpec(
        module=DeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=linear.linear_qkv, out_norm=OutputNorm, out_proj=linear.linear_proj
        ),
    )
    names = parts.sharded_state_dict_keys_map
    parts.sharded_state_dict_keys_map = {
        key: name.replace("linear_qkv", "in_proj") for key, name in names.items()
    }
    return made


class OutputNorm(torch.nn.Module):
    """Root-mean-square norm of each head, in fp32. A rank's gradients are of its own heads: they
    are summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        here = (
            torch.cuda.current_device()
        )  # the CPU where there is no CUDA: see parallel/without_cuda.py
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=torch.float32, device=here))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight)
        return functional.rms_norm(heads.to(weight.dtype), weight.shape, weight, self.eps)


class DeltaNet(GatedDeltaNet):  # type: ignore[misc, unused-ignore]
    """Megatron's refuses packs in its deterministic mode, and has the host compare where their
    segments start."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **settings: Any) -> None:
        of_layer = copy(config)
        of_layer.deterministic_mode = False
        super().__init__(of_layer, *arguments, **settings)
        self.A_log.data = self.A_log.data.float()

    def _resolve_cu_seqlens(
        self,
        cu_seqlens_padded: torch.Tensor | None,
        cu_seqlens_actual: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        return cu_seqlens_actual  # which are the padded ones, and are checked on the host

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DeltaNet:
        """Move or cast the module; what is fp32 in every policy gets no shorter type."""
        before = self.A_log.data, self.out_norm.weight.data
        super()._apply(fn, recurse)
        for parameter, data in zip((self.A_log, self.out_norm.weight), before, strict=True):
            if parameter.dtype.itemsize < data.dtype.itemsize:
                parameter.data = data.to(parameter.device)
        return self
