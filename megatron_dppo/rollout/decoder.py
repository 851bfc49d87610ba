"""The local engine's forward: what Hugging Face's modules compute, for rows of a key-value cache, in few operations.

A policy of a million parameters spends half of a decoding step between its matrix products. Here the projections to
queries, keys and values are one product, and those to gate and up are another. Hugging Face's modules hold the weights,
and run what is theirs alone: experts, whose routers are heard where a batch is to tell which it chose.

The cache is storage made once. Rows come and go in it, and a prompt's keys are copied for each of its samples. What all
prompts begin with, such as a system message, is there once, and read once by the queries of all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.bridge.mapping import exact_tensors
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.delta_rule import chunk_gated_delta_rule, l2norm, recurrent_gated_delta_rule
from megatron_dppo.rl.types import Routing, RoutingShape


def empty_model(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of undefined weights. It is laid out without memory first: no time goes into random weights, and torch's
    random state, which is the trainer's, stays as it is.

    Raises:
        UserError: as :func:`read_shape`.
    """
    shape = read_shape(path)
    config = AutoConfig.from_pretrained(path).get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
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
        self._norm, self._eps = _Norm(body.norm, zero_centred), config.rms_norm_eps
        self._head = model.lm_head
        kinds = [_DeltaLayer if hasattr(layer, "linear_attn") else _AttentionLayer for layer in body.layers]
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

    def new_cache(self, rows: int, capacity: int, common: RolloutCache | None = None) -> RolloutCache:
        """An empty cache for so many rows of ``capacity`` tokens, of which the first are those of ``common``'s row."""
        weight = self._embedding.weight
        attention = [layer for layer in self._layers if isinstance(layer, _AttentionLayer)]
        deltas = [layer for layer in self._layers if isinstance(layer, _DeltaLayer)]
        states = [torch.stack(each) for each in zip(*(layer.states(rows) for layer in deltas), strict=True)]
        if len(self._cos) < capacity:
            positions = torch.arange(capacity, device=weight.device)
            self._cos, self._sin = (table.transpose(0, 1) for table in self._rotary(weight, positions[None]))
        sizes = len(attention), rows, attention[0].kv_heads, capacity, attention[0].size
        return RolloutCache(*sizes, like=weight, common=common, states=states)

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
        later = torch.arange(cache.begin, width, device=tokens.device) > positions.unsqueeze(-1)
        mask = torch.zeros(later.shape, dtype=hidden.dtype, device=hidden.device).masked_fill_(later, float("-inf"))
        mask = mask.unsqueeze(1)
        row = torch.arange(rows, device=tokens.device).unsqueeze(-1)
        stored, own = positions - cache.begin, width - cache.begin
        attentions, deltas = itertools.count(), itertools.count()
        for layer in self._layers:
            if isinstance(layer, _DeltaLayer):
                states = cache.states_of(next(deltas), first, rows, begin=real is not None)
                hidden = layer.finish(hidden, layer.mix(hidden.view(rows, count, -1), *states, real))
                continue
            number = next(attentions)
            keys, values = cache.layer(number, first, rows)
            shape = rows, count, -1, layer.size
            *projected, gate = layer.project(hidden, rotary)
            queries, new_keys, new_values = (part.view(shape) for part in projected)
            keys[row, :, stored], values[row, :, stored] = new_keys, new_values
            common = cache.common.layer(number, 0, 1) if cache.common else None
            attended = attend(queries, keys[:, :, :own], values[:, :, :own], mask, common)
            attended = attended.view(rows * count, -1)
            hidden = layer.finish(hidden, attended if gate is None else attended * gate)
        return hidden.view(rows, count, -1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocabulary] of what follows tokens of these hidden states, [rows, hidden]."""
        logits: torch.Tensor = self._head(_rms(hidden, self._norm.weight, self._eps))
        return logits


class _Norm:
    """The weight of a norm; of a family with zero-centred norms the files have its distance from one."""

    def __init__(self, norm: Any, zero_centred: bool) -> None:
        self._norm, self._zero_centred, self.weight = norm, zero_centred, norm.weight

    def weights_changed(self) -> None:
        """Renew what is derived from weights."""
        self.weight = 1.0 + self._norm.weight.float() if self._zero_centred else self._norm.weight


class _Layer:
    """A transformer layer without its attention proper."""

    def __init__(self, layer: Any, config: Any, zero_centred: bool) -> None:
        self._eps = config.rms_norm_eps
        self._norms = [_Norm(norm, zero_centred) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._before, self._before_mlp = self._norms
        self._experts = None if hasattr(layer.mlp, "gate_proj") else layer.mlp
        if self._experts is None:
            self._gate_up, self._down = _fused(layer.mlp.gate_proj, layer.mlp.up_proj), layer.mlp.down_proj

    def weights_changed(self) -> None:
        """Renew what is derived from weights."""
        for norm in self._norms:
            norm.weights_changed()

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], of the layer's input and what its heads have attended to, [tokens, heads · size]."""
        hidden = self._out(attended).add_(hidden)
        normed = _rms(hidden, self._before_mlp.weight, self._eps)
        if self._experts is not None:
            return self._experts(normed.unsqueeze(0)).squeeze(0) + hidden
        gate, up = F.linear(normed, *self._gate_up).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up)).add_(hidden)


class _AttentionLayer(_Layer):
    def __init__(self, layer: Any, config: Any, zero_centred: bool) -> None:
        super().__init__(layer, config, zero_centred)
        attention = layer.self_attn
        self.size, self.kv_heads = attention.head_dim, config.num_key_value_heads
        self._heads = config.num_attention_heads
        self._gated = attention.q_proj.out_features > self._heads * self.size
        self._qkv = _fused(attention.q_proj, attention.k_proj, attention.v_proj)
        of_heads = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        self._head_norms = [_Norm(norm, zero_centred) for norm in of_heads]
        self._norms += self._head_norms
        self._head_weights = torch.empty(0)
        self._out = attention.o_proj

    def weights_changed(self) -> None:
        super().weights_changed()
        counts = (self._heads, self.kv_heads)
        parts = [norm.weight.expand(count, -1) for norm, count in zip(self._head_norms, counts, strict=False)]
        self._head_weights = torch.cat(parts) if parts else torch.empty(0)

    def project(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries [tokens, heads, size], keys and values [tokens, kv_heads, size] of ``hidden`` [tokens, hidden], and
        what the outputs are multiplied by, [tokens, heads · size]."""
        projected, gate = F.linear(_rms(hidden, self._before.weight, self._eps), *self._qkv), None
        heads = projected.view(len(hidden), -1, self.size)
        if self._gated:  # a head's gate is behind its query
            queries, rest = heads.tensor_split([2 * self._heads], dim=1)
            gate = queries[:, 1::2].flatten(1).sigmoid()
            heads = torch.cat([queries[:, ::2], rest], dim=1)
        both, values = heads.split([self._heads + self.kv_heads, self.kv_heads], dim=1)
        if self._head_norms:
            both = _rms(both, self._head_weights, self._eps)
        queries, keys = rotate(both, *rotary).split([self._heads, self.kv_heads], dim=1)
        return queries, keys, values, gate


class _DeltaLayer(_Layer):
    """A gated delta network: see ``parallel/delta_rule.py``."""

    def __init__(self, layer: Any, config: Any, zero_centred: bool) -> None:
        super().__init__(layer, config, zero_centred)
        self._net = net = layer.linear_attn
        self._projections = _fused(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
        self._out = net.out_proj

    def states(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At the beginning of so many rows: the matrix of each head, and what the convolution still sees."""
        net, weight = self._net, self._net.conv1d.weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        matrices = weight.new_zeros(rows, net.num_v_heads, net.head_k_dim, net.head_v_dim, dtype=exact)
        return matrices, weight.new_zeros(rows, weight.shape[-1] - 1, len(weight))

    def mix(
        self, hidden: torch.Tensor, state: torch.Tensor, tail: torch.Tensor, real: torch.Tensor | None
    ) -> torch.Tensor:
        """[rows · n, value heads · size] of ``hidden`` [rows, n, hidden]. The states, as of :meth:`states`, are
        overwritten.

        Args:
            real: [rows], as of :meth:`Decoder.read`.
        """
        net, (rows, count, _) = self._net, hidden.shape
        mixed, z, beta, alpha = F.linear(_rms(hidden, self._before.weight, self._eps), *self._projections).split(
            [net.conv_dim, net.value_dim, net.num_v_heads, net.num_v_heads], dim=-1
        )
        seen, kept = torch.cat([tail, mixed], dim=1), tail.shape[1]
        mixed = F.silu((seen.unfold(1, kept + 1, 1) * net.conv1d.weight[:, 0]).sum(-1))
        ends = real if real is not None else torch.full((rows,), count, device=hidden.device)
        places = ends[:, None] + torch.arange(kept, device=hidden.device)
        tail.copy_(seen.gather(1, places.unsqueeze(-1).expand_as(tail)))
        sizes = [net.key_dim, net.key_dim, net.value_dim]
        queries, keys, values = (part.unflatten(-1, (-1, net.head_k_dim)) for part in mixed.split(sizes, dim=-1))
        values = values.reshape(rows, count, -1, net.head_v_dim)
        each = net.num_v_heads // net.num_k_heads
        queries, keys = (l2norm(part).repeat_interleave(each, dim=2) for part in (queries, keys))
        decay, rate = -net.A_log.float().exp() * F.softplus(alpha.float() + net.dt_bias), beta.sigmoid()
        if real is not None:  # padding leaves the state as it is
            padding = (torch.arange(count, device=hidden.device) >= real[:, None]).unsqueeze(-1)
            decay, rate = decay.masked_fill(padding, 0.0), rate.masked_fill(padding, 0.0)
        if count == 1:
            out, after = recurrent_gated_delta_rule(*(x[:, 0] for x in (queries, keys, values, decay, rate)), state)
        else:
            packed = (x.flatten(0, 1)[None] for x in (queries, keys, values, decay, rate))
            starts = torch.arange(0, rows * count + 1, count)
            out, after = chunk_gated_delta_rule(*packed, initial_state=state, cu_seqlens=starts)
        state.copy_(after)
        normed = _rms(out.reshape(rows * count, -1, net.head_v_dim).float(), net.norm.weight, self._eps)
        gated = normed * F.silu(z.reshape(normed.shape).float())
        return gated.to(hidden.dtype).flatten(1)


def _fused(*projections: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of several projections of the same input as one, of which theirs become parts."""
    parts = {}
    for name in ("weight", "bias"):
        own = [getattr(projection, name) for projection in projections]
        whole = None if own[0] is None else torch.cat([parameter.data for parameter in own])
        if whole is not None:
            for parameter, part in zip(own, whole.split([len(parameter) for parameter in own]), strict=True):
                parameter.data = part
        parts[name] = whole
    assert parts["weight"] is not None
    return parts["weight"], parts["bias"]


def _rms(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, in fp32 but for the product with its weight, which is of that one's type.

    On a CPU torch's own takes twice as long for a step's few rows.
    """
    size, exact = hidden.shape[-1], hidden.float()
    squares = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_()
    return exact.mul(squares.div_(size).add_(eps).rsqrt_()).to(weight.dtype).mul_(weight).to(hidden.dtype)


def rotate(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: of [tokens, heads, size] the first half of what is turned and its second half make the pairs.

    Args:
        vectors: to be rotated.
        cos, sin: [tokens, 1, turned], of which both halves are the same; what is behind ``turned`` stays.
    """
    turned = cos.shape[-1]
    vectors, rest = vectors.tensor_split([turned], dim=-1)
    half = turned // 2
    rotated, sin = vectors * cos, sin[..., :half]
    rotated[..., :half].addcmul_(vectors[..., half:], sin, value=-1)
    rotated[..., half:].addcmul_(vectors[..., :half], sin)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    common: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attention of grouped queries.

    Args:
        queries: [rows, n, heads, size]
        keys, values: [rows, kv_heads, width, size]
        mask: [rows, 1, n, width], to be added to the scores.
        common: keys and values [1, kv_heads, c, size] that all queries see besides; on CPU only.

    Returns:
        [rows, n, heads, size], contiguous.
    """
    # On a CPU heads that share keys can be queries of one head, which reads the keys once for all of them. Where they
    # have several queries each, the mask would have to be repeated.
    rows, count, heads, size = queries.shape
    kv_heads, grouped = keys.shape[1], count == 1 and keys.device.type == "cpu"
    of_heads = queries.view(rows, kv_heads, -1, size) if grouped else queries.transpose(1, 2)
    mask = mask.expand(-1, -1, of_heads.shape[2], -1)
    if common is None:
        attended = F.scaled_dot_product_attention(of_heads, keys, values, mask, enable_gqa=not grouped)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        of_all_rows = of_heads.reshape(rows, kv_heads, -1, size).transpose(0, 1).reshape(1, kv_heads, -1, size)
        # ``total`` and ``more`` are the logarithms of the weights' sums.
        (own, total), (also, more) = flash(of_heads, keys, values, attn_mask=mask), flash(of_all_rows, *common)
        also = also.reshape(kv_heads, rows, -1, size).transpose(0, 1).reshape(own.shape)
        more = more.reshape(kv_heads, rows, -1).transpose(0, 1).reshape(total.shape)
        share = torch.sigmoid(more - total).unsqueeze(-1)
        attended = torch.lerp(own.to(share.dtype), also.to(share.dtype), share).to(queries.dtype)
    return attended.reshape(rows, 1, heads, size) if grouped else attended.transpose(1, 2).contiguous()


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
        common: a cache of one row, which is full: all rows begin with it, and are stored from its end on.
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
        common: RolloutCache | None = None,
    ) -> None:
        self.capacity, self._states = capacity, states
        self.common, self.begin = common, common.capacity if common else 0
        # Zeros: what a row has not read is masked, and a mask does not hide what is no number.
        self._stored = like.new_zeros(layers, 2, rows, heads, capacity - self.begin, size)

    def layer(self, index: int, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer for ``rows`` rows from ``first`` on: views, [rows, heads, stored, size]."""
        keys, values = self._stored[index, :, first : first + rows]
        return keys, values

    def states_of(self, index: int, first: int, rows: int, *, begin: bool) -> list[torch.Tensor]:
        """States of a layer for these rows: views. If they ``begin``, they are those at the end of the common row."""
        views = [each[index, first : first + rows] for each in self._states]
        if begin:
            for number, view in enumerate(views):
                view.copy_(self.common._states[number][index]) if self.common else view.zero_()
        return views

    def copy(self, sources: torch.Tensor, first: int, width: int) -> None:
        """Let the rows from ``first`` on begin with the first ``width`` positions of the rows ``sources`` ([rows])."""
        span, stored = slice(first, first + len(sources)), slice(width - self.begin)
        self._stored[:, :, span, :, stored] = self._stored[:, :, sources, :, stored]
        for each in self._states:
            each[:, span] = each[:, sources]

    def depart(self, departure: RowCompaction, width: int) -> None:
        """Let rows leave, of which none has read more than ``width`` positions."""
        if len(departure.vacant):
            stored = slice(width - self.begin)
            self._stored[:, :, departure.vacant, :, stored] = self._stored[:, :, departure.movers, :, stored]
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
        self._stems: list[np.ndarray] = [np.zeros((0, shape.layers, shape.per_token), np.int16)] * count
        self._read: torch.Tensor | None = None
        self._size = count, width

    def prefilled(self, lengths: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """The model has read stems of these lengths, padded to the longest; each has some of the continuations."""
        heard = self._routers.take()
        if self._read is None:
            self._read = heard.new_zeros(*self._size, self._shape.layers, self._shape.per_token)
        of_stems = heard.unflatten(0, (len(lengths), -1)).cpu().numpy()
        for stem, length, own in zip(of_stems, lengths, continuations, strict=True):
            for continuation in own:
                self._stems[continuation] = stem[:length]

    def read(self, continuations: torch.Tensor, tokens: torch.Tensor) -> None:
        """The model has read n ``tokens`` ([rows, n], their numbers) of each of these continuations ([rows, 1])."""
        assert self._read is not None
        self._read[continuations, tokens] = self._routers.take().unflatten(0, tokens.shape)

    def of_rows(self, lengths: Sequence[int]) -> list[Routing]:
        """Routing of each stem and continuation, without a continuation's last token, which is never read."""
        assert self._read is not None
        read = self._read.cpu().numpy()
        return [
            np.concatenate([stem, read[row, : length - 1]]).astype(self._shape.dtype)
            for row, (stem, length) in enumerate(zip(self._stems, lengths, strict=True))
        ]
