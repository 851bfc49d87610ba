"""The local engine's forward: what Hugging Face's modules compute, for rows of a key-value cache, in few operations.

A policy of a million parameters spends half of a decoding step between its matrix products. Here the projections to
queries, keys and values are one product, and those to gate and up are another. Hugging Face's modules hold the weights,
and run what is theirs alone: experts, whose routers are heard where a batch is to tell which it chose.

The cache is storage made once. Rows come and go in it, and a prompt's keys are copied for each of its samples.
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
from megatron_dppo.rollout.decoder_layers import AttentionLayer, DeltaLayer, Norm, attend, rms


def empty_model(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of undefined weights. It is laid out without memory first: no time goes into random weights, and torch's
    random state, which is the trainer's, stays as it is.

    Raises:
        UserError: as :func:`read_shape`, or where transformers rejects config.json.
    """
    shape = read_shape(path)
    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # its validators have no type of error in common
        problem = f"transformers rejects its config.json: {' '.join(str(error).split())}"
        raise UserError("model.path", path, problem, "fetch the model again") from error
    model.to_empty(device=device)
    for name in exact_tensors(shape):
        exact = model.get_parameter(name.replace(shape.family.body, ""))
        exact.data = exact.data.float()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    return model.requires_grad_(False).eval()


class Decoder:
    """Reads tokens into a cache, and says what comes next.

    Args:
        model: of a supported family. Parameters of projections that are one product here become views.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body, config = model.model, model.config
        zero_centred = bool(FAMILIES[type(model).__name__].megatron.get("layernorm_zero_centered_gamma"))
        self._embedding, self._rotary = body.embed_tokens, body.rotary_emb
        self._norm, self._eps = Norm(body.norm, zero_centred), config.rms_norm_eps
        self._head = model.lm_head
        kinds = [DeltaLayer if hasattr(layer, "linear_attn") else AttentionLayer for layer in body.layers]
        self._layers = [kind(layer, config, zero_centred) for kind, layer in zip(kinds, body.layers, strict=True)]
        self._cos = self._sin = self._embedding.weight.new_empty(0, 1, 0)

    @property
    def device(self) -> torch.device:
        return self._embedding.weight.device

    def weights_changed(self) -> None:
        """To be called once new weights stand in the model."""
        self._norm.weights_changed()
        for layer in self._layers:
            layer.weights_changed()

    def new_cache(self, rows: int, capacity: int) -> RolloutCache:
        """Return an empty cache for rows of ``capacity`` tokens."""
        weight = self._embedding.weight
        attention = [layer for layer in self._layers if isinstance(layer, AttentionLayer)]
        deltas = [layer for layer in self._layers if isinstance(layer, DeltaLayer)]
        states = [torch.stack(each) for each in zip(*(layer.states(rows) for layer in deltas), strict=True)]
        if len(self._cos) < capacity:
            positions = torch.arange(capacity, device=weight.device)
            self._cos, self._sin = (table.transpose(0, 1) for table in self._rotary(weight, positions[None]))
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
        """Read tokens into rows of a cache. Each attends to itself and to its row before it.

        Padding follows a row's last real token. It is written past the row's end, where the next real tokens are
        written over it.

        Args:
            cache: of :meth:`new_cache`.
            tokens: [rows, n]
            positions: [rows, n], of the tokens in their rows.
            first: the first of the rows.
            width: all positions are below it.
            real: [rows], how many of the tokens are no padding, of rows that begin here; None: all, of rows that go on.

        Returns:
            [rows, n, hidden], for :meth:`logits`.
        """
        rows, count = tokens.shape
        hidden = self._embedding(tokens.reshape(-1))
        here = positions.reshape(-1)
        rotary = self._cos[here], self._sin[here]
        later = torch.arange(width, device=tokens.device) > positions.unsqueeze(-1)
        mask = torch.zeros(later.shape, dtype=hidden.dtype, device=hidden.device).masked_fill_(later, float("-inf"))
        mask = mask.unsqueeze(1)
        row = torch.arange(rows, device=tokens.device).unsqueeze(-1)
        attentions, deltas = itertools.count(), itertools.count()
        for layer in self._layers:
            if isinstance(layer, DeltaLayer):
                state, tail = cache.states_of(next(deltas), first, rows, begin=real is not None)
                hidden = layer.finish(hidden, layer.mix(hidden.view(rows, count, -1), state, tail, real))
                continue
            number = next(attentions)
            keys, values = cache.layer(number, first, rows)
            shape = rows, count, -1, layer.size
            *projected, gate = layer.project(hidden, rotary)
            queries, new_keys, new_values = (part.view(shape) for part in projected)
            keys[row, :, positions], values[row, :, positions] = new_keys, new_values
            attended = attend(queries, keys[:, :, :width], values[:, :, :width], mask)
            attended = attended.view(rows * count, -1)
            hidden = layer.finish(hidden, attended if gate is None else attended * gate)
        return hidden.view(rows, count, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of what follows tokens of these hidden states, [rows, hidden]."""
        logits: torch.Tensor = self._head(rms(hidden, self._norm.weight, self._eps))
        return logits


def without_waiting(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device. On CUDA it leaves from pinned memory, and the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class RowCompaction:
    """Rows leave a batch: surviving tail rows fill the freed places.

    Only as many rows are copied as leave, so that it pays at once, even for a single row.
    """

    vacant: torch.Tensor
    """[moves], places below ``remaining`` whose rows leave."""
    movers: torch.Tensor
    """[moves], places from ``remaining`` on whose rows stay."""
    remaining: int

    @classmethod
    def of(cls, leaves: NDArray[np.bool_], device: torch.device) -> RowCompaction:
        """The departure of the rows where ``leaves`` ([rows], on the host) is true; rows are on the device."""
        remaining = len(leaves) - int(leaves.sum())
        moves = np.stack([np.flatnonzero(leaves[:remaining]), np.flatnonzero(~leaves[remaining:]) + remaining])
        vacant, movers = without_waiting(moves, device)
        return cls(vacant, movers, remaining)

    def apply(self, rows: torch.Tensor) -> None:
        """Move rows of ``rows`` ([rows, …], overwritten), of which the first ``remaining`` are left."""
        if len(self.vacant):
            rows[self.vacant] = rows[self.movers]


class RolloutCache:
    """Keys and values that a batch's rows have read, from position 0 of each row.

    Args:
        layers: of the model.
        rows: most rows at a time.
        heads: of keys and values.
        capacity: positions of a row.
        size: of a head.
        like: a tensor of the device and type of keys and values.
        states: [layers, rows, …] each, of layers that keep no keys.
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
        # Zeros: what a row has not read is masked, and a mask does not hide what is no number.
        self._stored = like.new_zeros(layers, 2, rows, heads, capacity, size)

    def layer(self, index: int, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer for ``rows`` rows from ``first`` on: views, [rows, heads, stored, size]."""
        keys, values = self._stored[index, :, first : first + rows]
        return keys, values

    def states_of(self, index: int, first: int, rows: int, *, begin: bool) -> list[torch.Tensor]:
        """Return views of a layer's states for these rows; zeros if the rows ``begin``."""
        views = [each[index, first : first + rows] for each in self._states]
        if begin:
            for view in views:
                view.zero_()
        return views

    def copy(self, sources: torch.Tensor, first: int, width: int) -> None:
        """Let the rows from ``first`` on begin with the first ``width`` positions of the rows ``sources`` ([rows])."""
        span = slice(first, first + len(sources))
        self._stored[:, :, span, :, :width] = self._stored[:, :, sources, :, :width]
        for each in self._states:
            each[:, span] = each[:, sources]

    def depart(self, departure: RowCompaction, width: int) -> None:
        """Let rows leave, of which none has read more than ``width`` positions."""
        if len(departure.vacant):
            self._stored[:, :, departure.vacant, :, :width] = self._stored[:, :, departure.movers, :, :width]
            for each in self._states:
                each[:, departure.vacant] = each[:, departure.movers]


class Routers:
    """Hears the routers of a model, in the order of their layers, for as long as somebody records."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._heard: list[torch.Tensor] | None = None
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._hear)

    def _hear(self, router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        if self._heard is not None:
            self._heard.append(output[2])

    def listen(self, shape: RoutingShape | None, count: int, width: int) -> RoutingRecord | None:
        """Begin to record what is decoded next; None if its routing is not asked for.

        Args:
            shape: of the routing that is asked for.
            count: continuations that are decoded.
            width: most tokens of one of them.
        """
        self._heard = None if shape is None else []
        return None if shape is None else RoutingRecord(self, shape, count, width)

    def take(self) -> torch.Tensor:
        """[tokens, layers, k] int16, of the forward since the last call."""
        assert self._heard is not None
        table = torch.stack(self._heard, dim=1).to(torch.int16)
        self._heard.clear()
        return table


class RoutingRecord:
    """The routing of what is decoded, [continuations, tokens], and of what they go on from."""

    def __init__(self, routers: Routers, shape: RoutingShape, count: int, width: int) -> None:
        self._routers, self._shape = routers, shape
        self._prefixes: list[np.ndarray] = [np.zeros((0, shape.layers, shape.per_token), np.int16)] * count
        self._read: torch.Tensor | None = None
        self._size = count, width

    def prefilled(self, lengths: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """The model has read prefixes of these lengths, padded to the longest; each has some of the continuations."""
        heard = self._routers.take()
        if self._read is None:
            self._read = heard.new_zeros(*self._size, self._shape.layers, self._shape.per_token)
        of_prefixes = heard.unflatten(0, (len(lengths), -1)).cpu().numpy()
        for prefix, length, own in zip(of_prefixes, lengths, continuations, strict=True):
            for continuation in own:
                self._prefixes[continuation] = prefix[:length]

    def read(self, continuations: torch.Tensor, tokens: torch.Tensor) -> None:
        """The model has read n ``tokens`` ([rows, n], their numbers) of each of these continuations ([rows, 1])."""
        assert self._read is not None
        self._read[continuations, tokens] = self._routers.take().unflatten(0, tokens.shape)

    def of_rows(self, lengths: Sequence[int]) -> list[Routing]:
        """Routing of each prefix and continuation, without a continuation's last token, which is never read."""
        assert self._read is not None
        read = self._read.cpu().numpy()
        return [
            np.concatenate([prefix, read[row, : length - 1]]).astype(self._shape.dtype)
            for row, (prefix, length) in enumerate(zip(self._prefixes, lengths, strict=True))
        ]
