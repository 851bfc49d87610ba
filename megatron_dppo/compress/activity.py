"""Activity of a policy's parts on calibration sequences: sums from one forward pass.

The policy is transformers' own. Sums are in fp64, activations as the policy has them; the memory beside the policy is
that of one batch's residual streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dppo.compress.calibration import Batch, count_sequences
from megatron_dppo.compress.passes import Accumulator, Sums
from megatron_dppo.models.shape import PolicyShape


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of L layers. x_l is the residual stream before layer l, x_L after the last. All fp64, on the CPU."""

    neurons: torch.Tensor
    """[L, feed-forward width] mean over sequences of ‖activation over the sequence's tokens‖₂ at the input of the down
    projection: 2SSP's score (2501.17771). Of experts [L, 0]."""
    inputs: torch.Tensor
    """The same norm over all tokens of all sequences, as Wanda (2306.11695) takes it."""
    groups: torch.Tensor
    """[L, key-value heads] mean over tokens of ‖output of the query heads that share one‖₂, as Minitron (2407.14679)
    scores heads."""
    experts: torch.Tensor
    """[L, experts] sum over tokens of the weight that the router gives an expert: what its output is multiplied by, and
    0 where the token goes to others."""
    choices: torch.Tensor
    """[L, experts] how many tokens an expert is given."""
    channels: torch.Tensor
    """[width of the residual stream] sum over the two norms of every layer of ‖mean over a sequence's tokens of |the
    norm's output|‖₂ over all sequences, as Minitron scores channels (2407.14679)."""
    cosines: torch.Tensor
    """[L + 1, L + 1] mean over tokens of cos(x_i, x_j)."""
    last_cosines: torch.Tensor
    """[L] mean over sequences of cos(x_l, x_{l + 1}) at the last token."""
    relative_l1: torch.Tensor
    """[L] mean over tokens of ‖x_{l + 1} − x_l‖₁ / ‖x_{l + 1}‖₁."""
    relative_l2: torch.Tensor
    """[L] the same of ‖·‖₂."""


@torch.no_grad()
def measure_activity(
    model: Any, shape: PolicyShape, batches: Sequence[Batch], passes: Accumulator | None = None
) -> Activity:
    """Run a policy over batches.

    Args:
        model: transformers' causal language model of ``shape``.
    """
    sums, sequences = _Sums(shape), count_sequences(batches)
    with ExitStack() as hooks:
        for number, layer in enumerate(model.model.layers):
            hooks.callback(layer.register_forward_pre_hook(sums.residual, with_kwargs=True).remove)
            hooks.callback(layer.self_attn.o_proj.register_forward_pre_hook(sums.attention(number)).remove)
            for place, norm in enumerate((layer.input_layernorm, layer.post_attention_layernorm)):
                hooks.callback(norm.register_forward_hook(sums.norm(place, number)).remove)
            if shape.experts:
                hooks.callback(layer.mlp.gate.register_forward_hook(sums.router(number)).remove)
            else:
                hooks.callback(layer.mlp.down_proj.register_forward_pre_hook(sums.feed_forward(number)).remove)
        hooks.callback(model.model.norm.register_forward_pre_hook(sums.residual, with_kwargs=True).remove)
        for batch in (passes or Accumulator()).over(batches, sums.sums, sequences=sequences):
            sums.begin(batch.valid)
            model.model(batch.tokens, use_cache=False)
            sums.end()
    return sums.means(sequences, sum(int(batch.valid.sum()) for batch in batches))


class _Sums:
    def __init__(self, shape: PolicyShape) -> None:
        layers, width = shape.num_layers, 0 if shape.experts else shape.ffn
        self._groups_per_layer = shape.kv_heads
        sizes: dict[str, tuple[int, ...]] = {
            "norms": (layers, width),
            "squares": (layers, width),
            "groups": (layers, shape.kv_heads),
            "experts": (layers, shape.experts),
            "choices": (layers, shape.experts),
            "channels": (2, layers, shape.hidden),
            "cosines": (layers + 1, layers + 1),
            "last": (layers,),
            "relative": (2, layers),
        }
        self.sums: Sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}

    def begin(self, valid: torch.Tensor) -> None:
        self._valid, self._streams = valid, list[torch.Tensor]()

    def residual(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._streams.append(arguments[0] if arguments else keywords["hidden_states"])

    def attention(self, layer: int) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor]) -> None:
            outputs = _precise(arguments[0][self._valid]).unflatten(-1, (self._groups_per_layer, -1))
            self.sums["groups"][layer] += outputs.norm(dim=-1).double().sum(0).cpu()

        return hook

    def feed_forward(self, layer: int) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor]) -> None:
            squares = (_precise(arguments[0]) * self._valid[..., None]).square().sum(1).double()
            self.sums["norms"][layer] += squares.sqrt().sum(0).cpu()
            self.sums["squares"][layer] += squares.sum(0).cpu()

        return hook

    def norm(self, place: int, layer: int) -> Any:
        def hook(_: Any, __: Any, output: torch.Tensor) -> None:
            means = (_precise(output).abs() * self._valid[..., None]).sum(1) / self._valid.sum(1, keepdim=True)
            self.sums["channels"][place, layer] += means.double().square().sum(0).cpu()

        return hook

    def router(self, layer: int) -> Any:
        def hook(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            weights, experts = (each[self._valid.flatten()].flatten().cpu() for each in output[1:])
            self.sums["experts"][layer].index_add_(0, experts, weights.double())
            self.sums["choices"][layer] += torch.bincount(experts, minlength=len(self.sums["choices"][layer]))

        return hook

    def end(self) -> None:
        streams = torch.stack([_precise(stream[self._valid]) for stream in self._streams])  # [L + 1, tokens, hidden]
        for row, order in enumerate((1, 2)):
            updates = (streams[1:] - streams[:-1]).norm(order, dim=-1) / streams[1:].norm(order, dim=-1)
            self.sums["relative"][row] += updates.double().sum(-1).cpu()
        unit = torch.nn.functional.normalize(streams, dim=-1, eps=0.0)
        self.sums["cosines"] += torch.einsum("ith,jth->ij", unit, unit).double().cpu()
        last = self._valid.sum(1).cumsum(0) - 1  # sequences lie one after the other
        self.sums["last"] += (unit[:-1, last] * unit[1:, last]).sum(-1).double().sum(-1).cpu()

    def means(self, sequences: int, tokens: int) -> Activity:
        return Activity(
            neurons=self.sums["norms"] / sequences,
            inputs=self.sums["squares"].sqrt(),
            groups=self.sums["groups"] / tokens,
            experts=self.sums["experts"],
            choices=self.sums["choices"],
            channels=self.sums["channels"].sqrt().sum((0, 1)),
            cosines=self.sums["cosines"] / tokens,
            last_cosines=self.sums["last"] / sequences,
            relative_l1=self.sums["relative"][0] / tokens,
            relative_l2=self.sums["relative"][1] / tokens,
        )


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
