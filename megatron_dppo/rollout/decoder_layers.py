"""Layers of the local engine's decoder: Hugging Face's modules in few operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron_dppo.parallel.delta_rule import (
    chunk_gated_delta_rule,
    l2norm,
    recurrent_gated_delta_rule,
)


class Norm:
    """Weight of a norm. With zero-centred norms, the files hold the weight minus 1."""

    def __init__(self, norm: Any, zero_centred: bool) -> None:
        self._norm = norm
        self._zero_centred = zero_centred
        self.weight = norm.weight

    def refresh(self) -> None:
        self.weight = 1.0 + self._norm.weight.float() if self._zero_centred else self._norm.weight


class Layer:
    """Transformer layer without the attention."""

    _out: Any
    """Projection of the heads' outputs."""

    def __init__(self, layer: Any, config: Any, zero_centred: bool) -> None:
        self._eps = config.rms_norm_eps
        self._norms = [
            Norm(norm, zero_centred)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        self._before, self._before_mlp = self._norms
        self._experts = None if hasattr(layer.mlp, "gate_proj") else layer.mlp
        if self._experts is None:
            self._gate_up = fuse_projections(layer.mlp.gate_proj, layer.mlp.up_proj)
            self._down = layer.mlp.down_proj

    def refresh(self) -> None:
        for norm in self._norms:
            norm.refresh()

    def finish(self, hidden: torch.Tensor, attention_output: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, [tokens, hidden].

        Args:
            hidden: [tokens, hidden], input.
            attention_output: [tokens, heads · size], outputs of the heads.
        """
        hidden = self._out(attention_output).add_(hidden)
        normed = apply_rms_norm(hidden, self._before_mlp.weight, self._eps)
        if self._experts is not None:
            return self._experts(normed.unsqueeze(0)).squeeze(0) + hidden
        gate, up = F.linear(normed, *self._gate_up).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up)).add_(hidden)


class AttentionLayer(Layer):
    def __init__(self, layer: Any, config: Any, zero_centred: bool) -> None:
        super().__init__(layer, config, zero_centred)
        attention = layer.self_attn
        self.size = attention.head_dim
        self.kv_heads = config.num_key_value_heads
        self._heads = config.num_attention_heads
        # Gates, if any, are in the query projection.
        self._gated = attention.q_proj.out_features > self._heads * self.size
        self._qkv = fuse_projections(attention.q_proj, attention.k_proj, attention.v_proj)
        of_heads = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
        self._head_norms = [Norm(norm, zero_centred) for norm in of_heads]
        self._norms += self._head_norms
        self._head_weights = torch.empty(0)
        self._out = attention.o_proj

    def refresh(self) -> None:
        super().refresh()
        counts = (self._heads, self.kv_heads)
        parts = [
            norm.weight.expand(count, -1)
            for norm, count in zip(self._head_norms, counts, strict=False)
        ]
        self._head_weights = torch.cat(parts) if parts else torch.empty(0)

    def project(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Project ``hidden`` [tokens, hidden].

        Returns:
            Queries [tokens, heads, size], keys and values [tokens, kv_heads, size], and gates of
            the outputs [tokens, heads · size]; None: no gate.
        """
        projected = F.linear(apply_rms_norm(hidden, self._before.weight, self._eps), *self._qkv)
        gate = None
        heads = projected.view(len(hidden), -1, self.size)
        # The gate of a head follows the query.
        if self._gated:
            queries, rest = heads.tensor_split([2 * self._heads], dim=1)
            gate = queries[:, 1::2].flatten(1).sigmoid()
            heads = torch.cat([queries[:, ::2], rest], dim=1)
        both, values = heads.split([self._heads + self.kv_heads, self.kv_heads], dim=1)
        if self._head_norms:
            both = apply_rms_norm(both, self._head_weights, self._eps)
        queries, keys = rotate(both, *rotary).split([self._heads, self.kv_heads], dim=1)
        return queries, keys, values, gate


class DeltaLayer(Layer):
    """Gated delta network: see ``parallel/delta_rule.py``."""

    def __init__(self, layer: Any, config: Any, zero_centred: bool) -> None:
        super().__init__(layer, config, zero_centred)
        self._net = net = layer.linear_attn
        self._projections = fuse_projections(
            net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a
        )
        self._out = net.out_proj

    def make_states(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return initial states: the matrix of each head, and the convolution's last inputs."""
        net = self._net
        weight = net.conv1d.weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        matrices = weight.new_zeros(
            rows, net.num_v_heads, net.head_k_dim, net.head_v_dim, dtype=exact
        )
        return matrices, weight.new_zeros(rows, weight.shape[-1] - 1, len(weight))

    def run_delta_rule(
        self,
        hidden: torch.Tensor,
        state: torch.Tensor,
        tail: torch.Tensor,
        real: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [rows · n, value heads · size], and overwrite ``state`` and ``tail``.

        Args:
            hidden: [rows, n, hidden]
            state, tail: states of :meth:`make_states`.
            real: [rows], as in :meth:`Decoder.read`.
        """
        net = self._net
        rows, count, _ = hidden.shape
        mixed, z, beta, alpha = F.linear(
            apply_rms_norm(hidden, self._before.weight, self._eps), *self._projections
        ).split([net.conv_dim, net.value_dim, net.num_v_heads, net.num_v_heads], dim=-1)
        seen = torch.cat([tail, mixed], dim=1)
        kept = tail.shape[1]
        mixed = F.silu((seen.unfold(1, kept + 1, 1) * net.conv1d.weight[:, 0]).sum(-1))
        # The last inputs before the padding are read by the next call.
        ends = real if real is not None else torch.full((rows,), count, device=hidden.device)
        places = ends[:, None] + torch.arange(kept, device=hidden.device)
        tail.copy_(seen.gather(1, places.unsqueeze(-1).expand_as(tail)))
        sizes = [net.key_dim, net.key_dim, net.value_dim]
        queries, keys, values = (
            part.unflatten(-1, (-1, net.head_k_dim)) for part in mixed.split(sizes, dim=-1)
        )
        values = values.reshape(rows, count, -1, net.head_v_dim)
        repeats = net.num_v_heads // net.num_k_heads
        queries, keys = (l2norm(part).repeat_interleave(repeats, dim=2) for part in (queries, keys))
        decay = -net.A_log.float().exp() * F.softplus(alpha.float() + net.dt_bias)
        rate = beta.sigmoid()
        # Decay 0 (a factor of 1) and rate 0 leave the state unchanged at padding.
        if real is not None:
            padding = (torch.arange(count, device=hidden.device) >= real[:, None]).unsqueeze(-1)
            decay = decay.masked_fill(padding, 0.0)
            rate = rate.masked_fill(padding, 0.0)
        if count == 1:
            last = queries[:, 0], keys[:, 0], values[:, 0], decay[:, 0], rate[:, 0], state
            out, after = recurrent_gated_delta_rule(*last)
        else:
            packed = (x.flatten(0, 1)[None] for x in (queries, keys, values, decay, rate))
            starts = torch.arange(0, rows * count + 1, count)
            out, after = chunk_gated_delta_rule(*packed, initial_state=state, cu_seqlens=starts)
        state.copy_(after)
        normed = apply_rms_norm(
            out.reshape(rows * count, -1, net.head_v_dim).float(), net.norm.weight, self._eps
        )
        gated = normed * F.silu(z.reshape(normed.shape).float())
        return gated.to(hidden.dtype).flatten(1)


def fuse_projections(*projections: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Concatenate weights and biases of projections of the same input. The projections' parameters
    become views of the results."""
    parts = {}
    for name in ("weight", "bias"):
        own = [getattr(projection, name) for projection in projections]
        whole = None if own[0] is None else torch.cat([parameter.data for parameter in own])
        if whole is not None:
            # Views save memory, and a weight update of a projection changes the results.
            sizes = [len(parameter) for parameter in own]
            for parameter, part in zip(own, whole.split(sizes), strict=True):
                parameter.data = part
        parts[name] = whole
    assert parts["weight"] is not None
    return parts["weight"], parts["bias"]


def apply_rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply RMSNorm over the last dimension, in fp32. The product with ``weight`` has the type of
    ``weight``."""
    # Do not use torch's RMSNorm, because on a CPU the function takes twice the time for the few
    # rows of a step.
    size = hidden.shape[-1]
    exact = hidden.float()
    squares = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_()
    return (
        exact.mul(squares.div_(size).add_(eps).rsqrt_())
        .to(weight.dtype)
        .mul_(weight)
        .to(hidden.dtype)
    )


def rotate(vectors: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate vectors by rotary positions. The first and the second half of the rotated dimensions
    make the pairs.

    Args:
        vectors: [tokens, heads, size]; dimensions from ``turned`` on stay unchanged.
        cos, sin: [tokens, 1, turned], with two equal halves.
    """
    turned = cos.shape[-1]
    vectors, rest = vectors.tensor_split([turned], dim=-1)
    half = turned // 2
    rotated = vectors * cos
    sin = sin[..., :half]
    rotated[..., :half].addcmul_(vectors[..., half:], sin, value=-1)
    rotated[..., half:].addcmul_(vectors[..., :half], sin)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def compute_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Compute attention with grouped queries.

    Args:
        queries: [rows, n, heads, size]
        keys, values: [rows, kv_heads, width, size]
        mask: [rows, 1, n, width], added to the scores.

    Returns:
        [rows, n, heads, size], contiguous.
    """
    # On a CPU, treat heads with shared keys as queries of one head, because the keys are then read
    # once. With several queries per head, this would need a repeated mask.
    rows, count, heads, size = queries.shape
    kv_heads = keys.shape[1]
    grouped = count == 1 and keys.device.type == "cpu"
    of_heads = queries.view(rows, kv_heads, -1, size) if grouped else queries.transpose(1, 2)
    mask = mask.expand(-1, -1, of_heads.shape[2], -1)
    attended = F.scaled_dot_product_attention(of_heads, keys, values, mask, enable_gqa=not grouped)
    if grouped:
        return attended.reshape(rows, 1, heads, size)
    return attended.transpose(1, 2).contiguous()
