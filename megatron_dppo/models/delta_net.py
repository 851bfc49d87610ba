"""Megatron's gated delta network: over packs, without host waits, with fp32 parameters where every
policy has fp32.

Requires Megatron-Core 0.19. ``parallel/without_cuda.py`` replaces flash-linear-attention on a CPU.
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
    """Copy a layer, with a gated delta network instead of attention."""
    delta_layer = deepcopy(layer)
    parts = delta_layer.submodules
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
    return delta_layer


class OutputNorm(torch.nn.Module):
    """Root-mean-square norm of each head, in fp32.

    Gradients are summed over ranks, because a rank's gradients cover only its own heads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        # Returns the CPU without CUDA, see parallel/without_cuda.py.
        here = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=torch.float32, device=here))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight)
        return functional.rms_norm(heads.to(weight.dtype), weight.shape, weight, self.eps)


class DeltaNet(GatedDeltaNet):  # type: ignore[misc, unused-ignore]
    """Megatron's network, without its refusal of packs in deterministic mode and without its
    host-side comparison of segment starts."""

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
        # The actual starts are the padded starts here, and are checked on the host.
        return cu_seqlens_actual

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DeltaNet:
        """Move or cast the module; parameters that are fp32 in every policy never get a shorter
        type."""
        before = self.A_log.data, self.out_norm.weight.data
        super()._apply(fn, recurse)
        for parameter, data in zip((self.A_log, self.out_norm.weight), before, strict=True):
            if parameter.dtype.itemsize < data.dtype.itemsize:
                parameter.data = data.to(parameter.device)
        return self
