"""Low-rank adapters (LoRA, arXiv:2106.09685) on Megatron's linear layers: y = W x + alpha/rank · B
A x, with W frozen.

Megatron fuses queries, keys and values into one layer, and gate and up projection into another.
Each of Hugging Face's matrices in it has an adapter of its own, so that what is trained is what
PEFT trains, and is written as PEFT reads it.

Of a column-parallel layer B is cut as the weight's rows are, and every rank has A whole. Of a
row-parallel layer A is cut as the weight's columns are, and every rank has B whole. Ranks exchange
the ``rank`` numbers of a token between A and B, not its hidden state.

What every rank has whole gets its gradient in parts where ranks see different tokens (sequence
parallelism) or have different features of an expert. Megatron adds the former up over the
tensor-parallel ranks where a parameter is marked so. It adds nothing up over the ranks of one
expert, and does not know them when it takes the gradient's norm: marks and
:func:`add_expert_gradients` see to both.
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
"""Name of the adapters' module in a linear layer."""


class Adapter(torch.nn.Module):
    """A rank's part of one matrix's adapter: ``a`` [rank, inputs] and ``b`` [outputs, rank]."""

    def __init__(self, rank: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        here = (
            torch.cuda.current_device()
        )  # the CPU where there is no CUDA: see parallel/without_cuda.py
        kind: Any = {"dtype": config.params_dtype, "device": here}
        self.a = torch.nn.Parameter(torch.zeros(rank, inputs, **kind))
        self.b = torch.nn.Parameter(torch.zeros(outputs, rank, **kind))


class LayerAdapters(torch.nn.ModuleDict):
    """The adapters in one of Megatron's linear layers, by Hugging Face's names.

    Args:
        row: the layer's weight.
        expert: whether the layer is an expert's.
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
        self._gated = shape.head_dim if row.split is Split.GATED_QKV else 0
        """Runs of the layer's outputs: in each, all its matrices have an equal share."""
        self._outputs: list[tuple[str, int]] = []
        """Each matrix of the layer, with adapters or without: its name and its outputs on this
        rank."""
        for name, tensor in zip(row.modules, row.tensors, strict=True):
            dimensions = tensor_dimensions(tensor, shape.family.dimensions)
            outputs, inputs = (shape.extents[dimension] for dimension in dimensions)
            inputs, outputs = (
                (inputs // ranks, outputs) if self._row_parallel else (inputs, outputs // ranks)
            )
            self._outputs.append((name, outputs))
            if name in lora.targets:
                self[name] = Adapter(lora.rank, inputs, outputs, config)
                self._mark(self[name])

    def _mark(self, adapter: Any) -> None:
        """Say to Megatron how the matrices are cut, and which gradients it has to add up, and over
        which ranks."""
        whole, cut = (adapter.b, adapter.a) if self._row_parallel else (adapter.a, adapter.b)
        for parameter in (whole, cut):
            parameter.partition_dim = 1 if parameter is adapter.a else 0
            parameter.partition_stride = 1
            parameter.tensor_model_parallel = self._expert or parameter is cut
            parameter.allreduce = not self._expert
        if self._expert:
            whole.added_over_expert = self._group.size() > 1
            whole.shared = self._group.rank() > 0  # counted once in the norm
        else:
            whole.sequence_parallel = self._sequence_parallel

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The adapters' part of the layer's outputs on this rank.

        Args:
            inputs: [..., inputs], as the layer gets them.

        Returns:
            [..., outputs], cut over tokens and features as the layer's own outputs are.
        """
        # torch would multiply slices of [T, 1, h] as T matrices of one row.
        rows = inputs.flatten(0, -2)
        low = functional.linear(rows, torch.cat([adapter.a for adapter in self._adapters]))
        low = self._exchange(low) * self._scale
        parts = dict(zip(self, low.split(self._rank, dim=-1), strict=True))
        outputs = [
            functional.linear(parts[name], self[name].b)  # type: ignore[arg-type]
            if name in self
            else low.new_zeros(len(low), size)
            for name, size in self._outputs
        ]
        if self._gated:  # of each group the queries, then their gates
            gated = outputs[0].unflatten(1, (self._blocks, -1, 2, self._gated)).transpose(2, 3)
            outputs[0] = gated.flatten(1)
        if len(outputs) > 1:
            outputs = [
                torch.cat(
                    [each.unflatten(1, (self._blocks, -1)) for each in outputs], dim=2
                ).flatten(1)
            ]
        return outputs[0].view(-1, *inputs.shape[1:-1], outputs[0].shape[1])

    @property
    def _adapters(self) -> list[Any]:
        return list(self.values())

    def _exchange(self, low: torch.Tensor) -> torch.Tensor:
        """Between A and B. What experts get is gathered, and what they return summed, by Megatron's
        dispatcher."""
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
    """The adapters of a layer that holds the weights of several experts, in the experts' order."""

    enabled = True

    def forward(self, inputs: torch.Tensor, tokens_per_expert: Sequence[int]) -> torch.Tensor:
        """
        Args:
            inputs: [tokens, inputs], the first expert's tokens first.
            tokens_per_expert: on the host.
        """
        parts = inputs.split([int(tokens) for tokens in tokens_per_expert])
        return torch.cat([adapters(part) for adapters, part in zip(self, parts, strict=True)])


def add_adapters(
    chunk: torch.nn.Module, shape: PolicyShape, settings: LoraConfig, config: TransformerConfig
) -> None:
    """Freeze a chunk's weights, and put adapters, zero until they are filled, into its linear
    layers.

    Nothing before the first adapter needs a gradient. Megatron recomputes in its backward pass only
    what was made of something that does: where it recomputes, the embedding's outputs are said to
    need one.

    The policy head gives back the gradient of [1, T, h], transposed. Torch multiplies what has such
    strides with a frozen matrix token by token, which is several times as slow: it gets the strides
    of a tensor of its own shape.
    """
    for parameter in chunk.parameters():
        parameter.requires_grad_(False)
    rows = shape.family.linear_layers
    for name, layer in list(chunk.named_modules()):
        row = rows.get(re.sub(r"\.\d+", "", name))
        if row is None or not set(row.modules) & set(settings.targets):
            continue
        expert = ".experts." in name
        count = (
            getattr(layer, "num_gemms", 1) if expert else 1
        )  # of Transformer Engine's grouped layers
        grouped = expert and ".local_experts." not in name
        made = [LayerAdapters(row, shape, settings, config, expert=expert) for _ in range(count)]
        layer.add_module(NAME, GroupedAdapters(made) if grouped else made[0])
        layer.register_forward_hook(_add)
    embedding = getattr(chunk, "embedding", None)
    decoder = chunk.get_submodule("decoder")
    if embedding is not None and config.recompute_granularity is not None:
        embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    if chunk.post_process:
        decoder.register_forward_hook(
            lambda module, inputs, output: output.flatten().view(output.shape)
        )


def _add(
    layer: torch.nn.Module, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any]:
    adapters: Any = layer.get_submodule(NAME)
    return (output[0] + adapters(*inputs), output[1]) if adapters.enabled else output


@contextmanager
def disable_adapters(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """The policy that the frozen weights are by themselves."""
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
    """Add up, over the tensor-parallel ranks of each expert, the gradients that each of them has a
    part of.

    Called once the gradients are summed over replicas. Where the distributed optimizer then has a
    shard of them, the ranks of an expert have the same shard.
    """
    parameters: Iterator[Any] = chain.from_iterable(chunk.parameters() for chunk in chunks)
    gradients = [p.main_grad for p in parameters if getattr(p, "added_over_expert", False)]
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=parallel_state.get_expert_tensor_parallel_group())
        for gradient, total in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(total.view_as(gradient))
