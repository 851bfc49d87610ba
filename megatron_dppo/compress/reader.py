"""A policy that reads calibration sequences, whole or without some of its parts.

All of it is in this process, or (:mod:`live`) its shards are on many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from megatron_dppo.compress.activity import Activity, measure_activity
from megatron_dppo.compress.calibration import Batch, count_sequences
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.passes import Accumulator, Sums
from megatron_dppo.models.shape import PolicyShape

Part = Literal["block", "attention"]
Measure = Literal["loss", "logits", "reward"]
"""Measures of the absence of layers."""


class Reader(Protocol):
    """Source of scores. Under a layout every method is collective, and gives every rank the same."""

    @property
    def shape(self) -> PolicyShape: ...

    def activity(self) -> Activity: ...

    def weights_of_neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, feed-forward width] fp64 each, of every unit: the sum of squares of its two rows and its column, and the
        sum of absolute values of its column."""
        ...

    def loss(self) -> float:
        """Mean negative log-likelihood of response tokens."""
        ...

    def costs(self, measure: Measure, absent: Sequence[Collection[int]]) -> list[float]:
        """Cost of the policy without each set of blocks: its mean loss, the mean ‖logits − logits of the whole policy‖₂
        over places before response tokens, or the mean reward of its own answers, negated."""
        ...

    def without(
        self, *, blocks: Collection[int] = (), attention: Collection[int] = ()
    ) -> AbstractContextManager[None]: ...

    def as_cut(self, cut: Cut) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Transformers' model in this process."""

    model: Any
    shape: PolicyShape
    batches: Sequence[Batch]
    passes: Accumulator = field(default_factory=Accumulator)

    def activity(self) -> Activity:
        return measure_activity(self.model, self.shape, self.batches, self.passes)

    def weights_of_neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        mlps = [layer.mlp for layer in self.model.model.layers]
        return stacked([(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight) for mlp in mlps])

    def loss(self) -> float:
        return mean_loss(self.model, self.batches, self.passes)

    def costs(self, measure: Measure, absent: Sequence[Collection[int]]) -> list[float]:
        assert measure != "reward"  # the command has ranks answer, for which there are engines
        return mean_costs(self.model, self.batches, measure, absent, self.passes)

    def without(self, *, blocks: Collection[int] = (), attention: Collection[int] = ()) -> AbstractContextManager[None]:
        return without(self.model, blocks=blocks, attention=attention)

    def as_cut(self, cut: Cut) -> AbstractContextManager[None]:
        return as_cut(self.model, cut)


@torch.no_grad()
def stacked(layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """:meth:`Reader.weights_of_neurons` of each layer's gate, up and down projections."""
    squares = [
        sum((w.double().square().sum(1) for w in (gate, up, down.T)), start=torch.zeros(())).cpu()
        for gate, up, down in layers
    ]
    return torch.stack(squares), torch.stack([down.double().abs().sum(0).cpu() for *_, down in layers])


def remove_greedily(reader: Reader, count: int, part: Part, *, say: Callable[[str], None]) -> list[int]:
    """The layers whose block or attention is removed, one after the other, each time that which leaves the least
    perplexity: 2SSP's second stage (2501.17771) where ``part`` is attention."""
    removed: list[int] = []
    for turn in range(count):
        losses = {}
        for layer in sorted(set(range(reader.shape.num_layers)) - set(removed)):
            gone = [*removed, layer]
            with reader.without(blocks=gone) if part == "block" else reader.without(attention=gone):
                losses[layer] = reader.loss()
        removed.append(min(losses, key=lambda layer: (losses[layer], layer)))
        say(f"{part} {removed[-1]} removed, {turn + 1} of {count}: loss {losses[removed[-1]]:.4f}")
    return removed


@contextmanager
def without(model: Any, *, blocks: Collection[int] = (), attention: Collection[int] = ()) -> Iterator[None]:
    """Within the block, the output of these layers, or of their attention, is what they were given, or nothing."""
    with ExitStack() as hooks:
        for number in blocks:
            layer = model.model.layers[number]
            hooks.callback(layer.register_forward_hook(lambda _, arguments, __: arguments[0]).remove)
        for number in attention:
            layer = model.model.layers[number].self_attn
            hooks.callback(layer.register_forward_hook(lambda _, __, out: (torch.zeros_like(out[0]), *out[1:])).remove)
        yield


@contextmanager
def as_cut(model: Any, cut: Cut) -> Iterator[None]:
    """Within the block, the policy computes what the smaller one will, in its own size."""
    layers = model.model.layers
    with ExitStack() as hooks:
        hooks.enter_context(without(model, blocks=set(range(len(layers))) - set(cut.layers), attention=cut.silenced))
        for number, layer in enumerate(layers):
            if cut.neurons is not None:
                hooks.callback(_keeping(layer.mlp.down_proj, cut.neurons[number], 1))
            if cut.groups is not None:
                width = layer.self_attn.o_proj.in_features // model.config.num_key_value_heads
                hooks.callback(_keeping(layer.self_attn.o_proj, cut.groups[number], width))
            if cut.experts is not None:
                hooks.callback(_choosing_of(layer.mlp.gate, cut.experts[number]))
        if cut.channels is not None:
            norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
            for norm in (*norms, model.model.norm):
                hooks.callback(narrowed(norm, cut.channels, model.config.hidden_size))
        yield


def _keeping(module: Any, kept: Sequence[int], width: int) -> Callable[[], None]:
    """Let a linear layer see these runs of ``width`` inputs alone. Returns what undoes that."""
    mask = torch.zeros(module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    mask.unflatten(0, (-1, width))[list(kept)] = 1
    remove: Callable[[], None] = module.register_forward_pre_hook(lambda _, arguments: (arguments[0] * mask,)).remove
    return remove


def _choosing_of(router: Any, kept: Sequence[int]) -> Callable[[], None]:
    """Let a router choose of these experts alone. Returns what undoes that."""
    whole, numbers = router.weight, torch.tensor(kept, device=router.weight.device)
    router.weight = torch.nn.Parameter(whole[numbers], requires_grad=False)
    hook = router.register_forward_hook(lambda _, __, out: (*out[:-1], numbers[out[-1]]))

    def undo() -> None:
        hook.remove()
        router.weight = whole

    return undo


def narrowed(module: Any, kept: Sequence[int], whole: int) -> Callable[[], None]:
    """Let an RMSNorm, or a linear layer with one before it, see these channels of its inputs alone.

    The norm's mean is to run over the kept channels, and runs over all: inputs are multiplied by c = √(all / kept), so
    that both means are the same, and outputs divided by it.

    Args:
        whole: how many channels there are.

    Returns:
        What undoes that.
    """
    scale = math.sqrt(whole / len(kept))
    mask = torch.zeros(whole, dtype=torch.float64)
    mask[list(kept)] = scale

    def select(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (arguments[0] * mask.to(arguments[0]), *arguments[1:])

    def rescale(_: Any, __: Any, output: Any) -> Any:
        return output / scale if isinstance(output, torch.Tensor) else (output[0] / scale, *output[1:])

    hooks = module.register_forward_pre_hook(select), module.register_forward_hook(rescale)

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


@torch.no_grad()
def response_logits(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, vocabulary] at the places before the R response tokens of a batch, and [R] those tokens."""
    states = model.model(batch.tokens, use_cache=False).last_hidden_state[:, :-1]
    logits = model.lm_head(states[batch.response[:, 1:]])
    return logits if logits.dtype == torch.float64 else logits.float(), batch.tokens[:, 1:][batch.response[:, 1:]]


def mean_loss(model: Any, batches: Sequence[Batch], passes: Accumulator | None = None) -> float:
    """Mean negative log-likelihood of the response tokens of all batches, in nats."""
    sums: Sums = {"loss": torch.zeros((), dtype=torch.float64)}
    for batch in (passes or Accumulator()).over(batches, sums, sequences=count_sequences(batches)):
        sums["loss"] += _loss(*response_logits(model, batch))
    return float(sums["loss"]) / _response_tokens(batches)


def _response_tokens(batches: Sequence[Batch]) -> int:
    return sum(int(batch.response[:, 1:].sum()) for batch in batches)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Summed over the tokens, in nats."""
    return float(torch.nn.functional.cross_entropy(logits, tokens, reduction="sum"))


def mean_costs(
    model: Any,
    batches: Sequence[Batch],
    measure: Literal["loss", "logits"],
    absent: Sequence[Collection[int]],
    passes: Accumulator | None = None,
) -> list[float]:
    """Cost of the policy without each set of blocks: the mean loss of response tokens, in nats, or the mean over their
    places of ‖logits − logits of the whole policy‖₂."""
    sums: Sums = {"costs": torch.zeros(len(absent), dtype=torch.float64)}
    times = len(absent) + (measure == "logits" and () not in absent)  # that a sequence is read
    for batch in (passes or Accumulator()).over(batches, sums, sequences=times * count_sequences(batches)):
        whole = response_logits(model, batch)[0] if measure == "logits" else None
        for number, blocks in enumerate(absent):
            if whole is not None and not blocks:
                continue  # the whole policy is not apart from itself
            with without(model, blocks=blocks):
                logits, tokens = response_logits(model, batch)
            cost = _loss(logits, tokens) if whole is None else float((logits - whole).norm(dim=-1).sum())
            sums["costs"][number] += cost
    return (sums["costs"] / _response_tokens(batches)).tolist()
