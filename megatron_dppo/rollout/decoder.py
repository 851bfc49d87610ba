"""Forward pass of Hugging Face's modules in few operations, for rows of a key-value cache.

A policy of a million parameters spends half of a decoding step between matrix products. Here one
product computes queries, keys and values, and another product gate and up. Hugging Face's modules
hold the weights and run the experts. Routers are recorded if a batch requests its routing.

The cache is allocated once. Rows are added and removed, and a prompt's keys are copied for each
sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.bridge.mapping import exact_tensors
from megatron_dppo.errors import UserError
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.shape import read_shape
from megatron_dppo.rl.types import Routing, RoutingShape
from megatron_dppo.rollout.decoder_layers import (
    AttentionLayer,
    DeltaLayer,
    Norm,
    apply_rms_norm,
    compute_attention,
)


def empty_model(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with undefined weights.

    Raises:
        UserError: config.json is rejected by :func:`read_shape` or by transformers.
    """
    shape = read_shape(path)
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
        # On the meta device, because random weights would cost time, and would change torch's
        # random state, which belongs to the trainer.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # Any exception, because the validators of transformers have no common type of error.
    except Exception as error:
        problem = f"transformers rejects its config.json: {' '.join(str(error).split())}"
        raise UserError("model.path", path, problem, "fetch the model again") from error
    model.to_empty(device=device)
    for name in exact_tensors(shape):
        exact = model.get_parameter(name.replace(shape.family.body, ""))
        exact.data = exact.data.float()
    # Create the rotary embedding again, because ``to_empty`` leaves the buffers undefined.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    return model.requires_grad_(False).eval()


class Decoder:
    """Decoder with a cache of keys and values.

    Args:
        model: model of a supported family. Its fused projections become views of one tensor.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body = model.model
        config = model.config
        zero_centred = bool(
            FAMILIES[type(model).__name__].megatron.get("layernorm_zero_centered_gamma")
        )
        self._embedding = body.embed_tokens
        self._rotary = body.rotary_emb
        self._norm = Norm(body.norm, zero_centred)
        self._eps = config.rms_norm_eps
        self._head = model.lm_head
        self._layers: list[DeltaLayer | AttentionLayer] = []
        for layer in body.layers:
            kind = DeltaLayer if hasattr(layer, "linear_attn") else AttentionLayer
            self._layers.append(kind(layer, config, zero_centred))
        self._cos = self._sin = self._embedding.weight.new_empty(0, 1, 0)

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    def refresh(self) -> None:
        """Update all tensors derived from weights. Required after every change of weights."""
        self._norm.refresh()
        for layer in self._layers:
            layer.refresh()

    def new_cache(self, rows: int, capacity: int) -> RolloutCache:
        """Return an empty cache for rows of ``capacity`` tokens."""
        weight = self._embedding.weight
        attention = [layer for layer in self._layers if isinstance(layer, AttentionLayer)]
        deltas = [layer for layer in self._layers if isinstance(layer, DeltaLayer)]
        layer_states = [layer.make_states(rows) for layer in deltas]
        states = [torch.stack(each) for each in zip(*layer_states, strict=True)]
        if len(self._cos) < capacity:
            positions = torch.arange(capacity, device=weight.device)
            self._cos, self._sin = (
                table.transpose(0, 1) for table in self._rotary(weight, positions[None])
            )
        sizes = len(attention), rows, attention[0].kv_heads, capacity, attention[0].size
        return RolloutCache(*sizes, like=weight, states=states)

    def read(
        self,
        cache: RolloutCache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        *,
        first: int,
        width: int,
        real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read tokens into rows of a cache. A token attends to itself and to earlier tokens.

        Padding is written past the end of a row, and overwritten by the next real tokens.

        Args:
            cache: cache from :meth:`new_cache`.
            tokens: [rows, n], token ids; padding last.
            positions: [rows, n], positions in the rows.
            first: index of the first row in the cache.
            width: exclusive upper bound of all positions.
            real: [rows], tokens without padding, for new rows; None for continued rows, which have
                no padding.

        Returns:
            [rows, n, hidden], hidden states for :meth:`compute_logits`.
        """
        rows, count = tokens.shape
        hidden = self._embedding(tokens.reshape(-1))
        here = positions.reshape(-1)
        rotary = self._cos[here], self._sin[here]
        later = torch.arange(width, device=tokens.device) > positions.unsqueeze(-1)
        mask = torch.zeros(later.shape, dtype=hidden.dtype, device=hidden.device).masked_fill_(
            later, float("-inf")
        )
        mask = mask.unsqueeze(1)
        row = torch.arange(rows, device=tokens.device).unsqueeze(-1)
        # Two counters, because the cache stores both kinds of layers separately.
        attentions = itertools.count()
        deltas = itertools.count()
        for layer in self._layers:
            if isinstance(layer, DeltaLayer):
                state, tail = cache.get_states(next(deltas), first, rows, begin=real is not None)
                hidden = layer.finish(
                    hidden, layer.run_delta_rule(hidden.view(rows, count, -1), state, tail, real)
                )
                continue
            number = next(attentions)
            keys, values = cache.get_layer(number, first, rows)
            shape = rows, count, -1, layer.size
            *projected, gate = layer.project(hidden, rotary)
            queries, new_keys, new_values = (part.view(shape) for part in projected)
            keys[row, :, positions] = new_keys
            values[row, :, positions] = new_values
            attended = compute_attention(queries, keys[:, :, :width], values[:, :, :width], mask)
            attended = attended.view(rows * count, -1)
            hidden = layer.finish(hidden, attended if gate is None else attended * gate)
        return hidden.view(rows, count, -1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next tokens' logits, [rows, vocabulary], for hidden states, [rows, hidden]."""
        logits: torch.Tensor = self._head(apply_rms_norm(hidden, self._norm.weight, self._eps))
        return logits


def copy_async(array: np.ndarray, device: torch.device) -> torch.Tensor:
    # CUDA copies asynchronously only from pinned memory.
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class RowCompaction:
    """Removal of rows from a batch: remaining rows of the tail fill the vacant places.

    Pays off even for a single removed row, because at most one row is copied per removed row.
    """

    vacant: torch.Tensor
    """[moves], removed rows, below ``remaining``."""
    movers: torch.Tensor
    """[moves], remaining rows, at ``remaining`` or later."""
    remaining: int

    @classmethod
    def from_mask(cls, mask: NDArray[np.bool_], device: torch.device) -> RowCompaction:
        """Return the compaction that removes the rows with true ``mask``, [rows] on the host."""
        remaining = len(mask) - int(mask.sum())
        moves = np.stack(
            [np.flatnonzero(mask[:remaining]), np.flatnonzero(~mask[remaining:]) + remaining]
        )
        vacant, movers = copy_async(moves, device)
        return cls(vacant, movers, remaining)

    def apply(self, rows: torch.Tensor) -> None:
        """Compact [rows, …] in place; the first ``remaining`` rows are valid afterwards."""
        if len(self.vacant):
            rows[self.vacant] = rows[self.movers]


class RolloutCache:
    """Keys and values of the rows of a batch, from position 0 of each row.

    Args:
        layers: number of attention layers.
        rows: maximum number of rows at a time.
        heads: number of key-value heads.
        capacity: positions of a row.
        size: dimension of a head.
        like: tensor with the device and dtype of keys and values.
        states: [layers, rows, …] per tensor, states of layers without keys.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        capacity: int,
        size: int,
        *,
        like: torch.Tensor,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        self._states = states
        # Zeros, because the mask of unread positions does not hide NaN.
        self._stored = like.new_zeros(layers, 2, rows, heads, capacity, size)

    def get_layer(self, index: int, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's keys and values, [rows, heads, capacity, size]."""
        keys, values = self._stored[index, :, first : first + rows]
        return keys, values

    def get_states(self, index: int, first: int, rows: int, *, begin: bool) -> list[torch.Tensor]:
        """Return views of a layer's states, set to zero if the rows ``begin``."""
        views = [each[index, first : first + rows] for each in self._states]
        if begin:
            for view in views:
                view.zero_()
        return views

    def copy(self, sources: torch.Tensor, first: int, width: int) -> None:
        """Copy ``sources`` ([rows]) to rows from ``first`` on: states and the first ``width``
        positions."""
        span = slice(first, first + len(sources))
        self._stored[:, :, span, :, :width] = self._stored[:, :, sources, :, :width]
        for each in self._states:
            each[:, span] = each[:, sources]

    def remove_rows(self, compaction: RowCompaction, width: int) -> None:
        """Remove rows. No row has read more than ``width`` positions."""
        if len(compaction.vacant):
            self._stored[:, :, compaction.vacant, :, :width] = self._stored[
                :, :, compaction.movers, :, :width
            ]
            for each in self._states:
                each[:, compaction.vacant] = each[:, compaction.movers]


class Routers:
    """Recorder for a model's routers, in the order of layers; idle unless routing is requested."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._choices: list[torch.Tensor] | None = None
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._record_routing)

    def _record_routing(
        self,
        router: torch.nn.Module,
        inputs: object,
        output: tuple[torch.Tensor, ...],
    ) -> None:
        if self._choices is not None:
            self._choices.append(output[2])

    def start_recording(
        self,
        shape: RoutingShape | None,
        count: int,
        width: int,
    ) -> RoutingRecord | None:
        """Start a record of the next decoding.

        Args:
            shape: shape of the requested routing; None: no record, and None is returned.
            count: number of continuations.
            width: maximum number of tokens of a continuation.
        """
        self._choices = None if shape is None else []
        return None if shape is None else RoutingRecord(self, shape, count, width)

    def take(self) -> torch.Tensor:
        """Return the routing since the last call, [tokens, layers, k] int16."""
        assert self._choices is not None
        table = torch.stack(self._choices, dim=1).to(torch.int16)
        self._choices.clear()
        return table


class RoutingRecord:
    """Routing of continuations, [continuations, tokens], and of their prefixes."""

    def __init__(self, routers: Routers, shape: RoutingShape, count: int, width: int) -> None:
        self._routers = routers
        self._shape = shape
        self._prefixes: list[np.ndarray] = [
            np.zeros((0, shape.layers, shape.per_token), np.int16)
        ] * count
        self._read: torch.Tensor | None = None
        self._size = count, width

    def record_prefixes(
        self,
        lengths: Sequence[int],
        continuations: Sequence[Sequence[int]],
    ) -> None:
        """Record the routing of prefixes that the model has just read, padded to the longest.

        Args:
            lengths: tokens of each prefix.
            continuations: indices of the continuations of each prefix.
        """
        choices = self._routers.take()
        if self._read is None:
            self._read = choices.new_zeros(*self._size, self._shape.layers, self._shape.per_token)
        of_prefixes = choices.unflatten(0, (len(lengths), -1)).cpu().numpy()
        for prefix, length, own in zip(of_prefixes, lengths, continuations, strict=True):
            for continuation in own:
                self._prefixes[continuation] = prefix[:length]

    def record_tokens(self, continuations: torch.Tensor, tokens: torch.Tensor) -> None:
        """Record the routing of tokens that the model has just read.

        Args:
            continuations: [rows, 1], indices of the continuations.
            tokens: [rows, n], indices of the tokens in the continuations.
        """
        assert self._read is not None
        self._read[continuations, tokens] = self._routers.take().unflatten(0, tokens.shape)

    def get_rows(self, lengths: Sequence[int]) -> list[Routing]:
        """Return the routing of each prefix and continuation, without the last token.

        Args:
            lengths: tokens of each continuation.
        """
        assert self._read is not None
        read = self._read.cpu().numpy()
        # The model never reads the last token, which therefore has no routing.
        return [
            np.concatenate([prefix, read[row, : length - 1]]).astype(self._shape.dtype)
            for row, (prefix, length) in enumerate(zip(self._prefixes, lengths, strict=True))
        ]
