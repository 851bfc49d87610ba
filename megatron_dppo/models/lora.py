"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's linear layers: y = W x + alpha/rank · B
A x, with W frozen.

Megatron fuses queries, keys and values into one layer, and gate and up projection into another.
Each Hugging Face matrix in a fused layer has a separate adapter, so that training and files match
PEFT.

- Column-parallel layer: B is cut like the weight's rows, and every rank has the whole A.
- Row-parallel layer: A is cut like the weight's columns, and every rank has the whole B.
- Between A and B, ranks exchange ``rank`` numbers per token, not the hidden state.

A rank computes only a part of a whole matrix's gradient if ranks see different tokens (sequence
parallelism) or hold different features of an expert:

- Sequence parallelism: Megatron sums the gradients of marked parameters over tensor-parallel ranks.
- Experts: Megatron does not sum over the ranks of one expert, and ignores these ranks in the
  gradient norm. Hence :func:`add_expert_gradients`, and further marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from megatron_dppo.config import LoraConfig
from megatron_dppo.models.family import ParameterMapping, Split, tensor_dimensions
from megatron_dppo.models.shape import PolicyShape

NAME = "lora"
"""Name of the adapter module in a linear layer."""


class Adapter(torch.nn.Module):
    """Part of one matrix's adapter on this rank: ``a`` [rank, inputs] and ``b`` [outputs, rank]."""

    def __init__(self, rank: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        # Returns the CPU without CUDA, see parallel/without_cuda.py.
        here = torch.cuda.current_device()
        kind: Any = {"dtype": config.params_dtype, "device": here}
        self.a = torch.nn.Parameter(torch.zeros(rank, inputs, **kind))
        self.b = torch.nn.Parameter(torch.zeros(outputs, rank, **kind))


class LayerAdapters(torch.nn.ModuleDict):
    """Adapters of one Megatron linear layer, by Hugging Face name.

    Args:
        row: mapping of the layer's weight.
        expert: whether the layer belongs to an expert.
    """

    enabled = True

    def __init__(
        self,
        row: ParameterMapping,
        shape: PolicyShape,
        lora: LoraConfig,
        config: TransformerConfig,
        *,
        expert: bool,
    ) -> None:
        super().__init__()
        self._row_parallel = row.split is Split.ROW
        self._expert = expert
        self._group = (
            parallel_state.get_expert_tensor_parallel_group()
            if expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        self._sequence_parallel = config.sequence_parallel
        self._rank = lora.rank
        self._scale = lora.scale
        ranks = self._group.size()
        self._blocks = shape.kv_heads // ranks if row.split in (Split.QKV, Split.GATED_QKV) else 1
        """Blocks of the layer's outputs, with an equal part of every matrix."""
        self._gated = shape.head_dim if row.split is Split.GATED_QKV else 0
        self._outputs: list[tuple[str, int]] = []
        """Name and local outputs of each matrix of the layer, with or without adapter."""
        for name, tensor in zip(row.modules, row.tensors, strict=True):
            dimensions = tensor_dimensions(tensor, shape.family.dimensions)
            outputs, inputs = (shape.extents[dimension] for dimension in dimensions)
            if self._row_parallel:
                inputs //= ranks
            else:
                outputs //= ranks
            self._outputs.append((name, outputs))
            if name in lora.targets:
                self[name] = Adapter(lora.rank, inputs, outputs, config)
                self._mark(self[name])

    def _mark(self, adapter: Any) -> None:
        """Mark each matrix for Megatron: its cut, and the ranks to sum its gradient over."""
        whole, cut = (adapter.b, adapter.a) if self._row_parallel else (adapter.a, adapter.b)
        for parameter in (whole, cut):
            parameter.partition_dim = 1 if parameter is adapter.a else 0
            parameter.partition_stride = 1
            parameter.tensor_model_parallel = self._expert or parameter is cut
            parameter.allreduce = not self._expert
        if self._expert:
            whole.added_over_expert = self._group.size() > 1
            # Only one rank counts the matrix in the gradient norm.
            whole.shared = self._group.rank() > 0
        else:
            whole.sequence_parallel = self._sequence_parallel

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the adapters' part of the layer's outputs, [..., outputs], cut like the outputs
        over tokens and features. Inputs of the layer: [..., inputs]."""
        # Flattened, because torch would multiply slices of [T, 1, h] as T matrices of one row.
        rows = inputs.flatten(0, -2)
        low = functional.linear(rows, torch.cat([adapter.a for adapter in self._adapters]))
        low = self._exchange(low) * self._scale
        parts = dict(zip(self, low.split(self._rank, dim=-1), strict=True))
        outputs: list[torch.Tensor] = []
        for name, size in self._outputs:
            if name in self:
                outputs.append(functional.linear(parts[name], self[name].b))  # type: ignore[arg-type]
            else:
                outputs.append(low.new_zeros(len(low), size))
        if self._gated:
            # Hugging Face has each query before its gate; Megatron has the queries of a group
            # first, then their gates.
            gated = outputs[0].unflatten(1, (self._blocks, -1, 2, self._gated)).transpose(2, 3)
            outputs[0] = gated.flatten(1)
        if len(outputs) > 1:
            blocks = [each.unflatten(1, (self._blocks, -1)) for each in outputs]
            outputs = [torch.cat(blocks, dim=2).flatten(1)]
        return outputs[0].view(-1, *inputs.shape[1:-1], outputs[0].shape[1])

    @property
    def _adapters(self) -> list[Any]:
        return list(self.values())

    def _exchange(self, low: torch.Tensor) -> torch.Tensor:
        # Megatron's dispatcher gathers the inputs of experts and sums their outputs.
        if self._expert:
            return low
        if self._row_parallel:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            return reduce(low, group=self._group)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(low, group=self._group)
        return copy_to_tensor_model_parallel_region(low, group=self._group)


class GroupedAdapters(torch.nn.ModuleList):
    """Adapters of a layer that holds several experts, in order."""

    enabled = True

    def forward(self, inputs: torch.Tensor, tokens_per_expert: Sequence[int]) -> torch.Tensor:
        """Return the adapters' part of all outputs, [tokens, outputs].

        Args:
            inputs: [tokens, inputs], tokens of the first expert first.
            tokens_per_expert: on the host.
        """
        parts = inputs.split([int(tokens) for tokens in tokens_per_expert])
        return torch.cat([adapters(part) for adapters, part in zip(self, parts, strict=True)])


def add_adapters(
    chunk: torch.nn.Module,
    shape: PolicyShape,
    settings: LoraConfig,
    config: TransformerConfig,
) -> None:
    """Freeze a chunk's weights and add adapters of zeros, to be loaded or initialized later."""
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    rows = shape.family.linear_layers
    for name, layer in list(chunk.named_modules()):
        row = rows.get(re.sub(r"\.\d+", "", name))
        if row is None or not set(row.modules) & set(settings.targets):
            continue
        expert = ".experts." in name
        # Only Transformer Engine's grouped layers have num_gemms.
        count = getattr(layer, "num_gemms", 1) if expert else 1
        grouped = expert and ".local_experts." not in name
        made = [LayerAdapters(row, shape, settings, config, expert=expert) for _ in range(count)]
        layer.add_module(NAME, GroupedAdapters(made) if grouped else made[0])
        layer.register_forward_hook(_add)
    embedding = getattr(chunk, "embedding", None)
    decoder = chunk.get_submodule("decoder")
    if embedding is not None and config.recompute_granularity is not None:
        # No layer before the first adapter needs a gradient, but Megatron recomputes in the
        # backward pass only if an input of the layer needs a gradient.
        embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    if chunk.post_process:
        # The policy head returns a transposed gradient of [1, T, h]. Torch multiplies such strides
        # with a frozen matrix token by token, several times slower; this view restores the strides
        # of a contiguous tensor.
        decoder.register_forward_hook(
            lambda module, inputs, output: output.flatten().view(output.shape)
        )


def _add(
    layer: torch.nn.Module,
    inputs: tuple[Any, ...],
    output: tuple[torch.Tensor, Any],
) -> tuple[torch.Tensor, Any]:
    adapters: Any = layer.get_submodule(NAME)
    return (output[0] + adapters(*inputs), output[1]) if adapters.enabled else output


@contextmanager
def disable_adapters(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Disable all adapters: the policy is then the frozen weights' policy."""
    modules: Iterator[Any] = chain.from_iterable(chunk.modules() for chunk in chunks)
    found = [module for module in modules if isinstance(module, LayerAdapters | GroupedAdapters)]
    for adapters in found:
        adapters.enabled = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.enabled = True


def add_expert_gradients(chunks: Iterable[torch.nn.Module]) -> None:
    """Sum partial gradients of adapters over the tensor-parallel ranks of each expert, after the
    sum over replicas."""
    # Also right for shards of the distributed optimizer, because all ranks of an expert have the
    # same shard.
    parameters: Iterator[Any] = chain.from_iterable(chunk.parameters() for chunk in chunks)
    gradients = [p.main_grad for p in parameters if getattr(p, "added_over_expert", False)]
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=parallel_state.get_expert_tensor_parallel_group())
        totals = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, totals, strict=True):
            gradient.copy_(total.view_as(gradient))
