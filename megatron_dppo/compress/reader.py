"""A policy that reads calibration sequences, whole or without some of its parts, and the activity of its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from megatron_dppo.compress.calibration import Accumulator, Batch, Sums, count_sequences
from megatron_dppo.compress.cut import Cut
from megatron_dppo.models.shape import PolicyShape

Part = Literal["block", "attention"]


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of L layers. x_l is the residual stream before layer l, x_L after the last. All fp64, on the CPU."""

    neurons: torch.Tensor
    """[L, feed-forward width] mean over sequences of ‖activation over the sequence's tokens‖₂ at the input of the down
    projection: 2SSP's score (2501.17771). Of experts [L, 0]."""
    cosines: torch.Tensor
    """[L] mean over tokens of cos(x_l, x_{l + 1})."""

    @classmethod
    def of(cls, sums: Sums, sequences: int, tokens: int) -> Activity:
        """Means over so many sequences and tokens; ``sums`` are of the names and sizes of :class:`_Sums`."""
        return cls(neurons=sums["norms"] / sequences, cosines=sums["cosines"] / tokens)


class Reader(Protocol):
    """Source of scores."""

    @property
    def shape(self) -> PolicyShape: ...

    def activity(self) -> Activity: ...

    def weights_of_neurons(self) -> torch.Tensor:
        """[L, feed-forward width] fp64, of every unit: the sum of squares of its two rows and its column."""
        ...

    def loss(self) -> float:
        """Mean negative log-likelihood of response tokens."""
        ...

    def costs(self, absent: Sequence[Collection[int]]) -> list[float]:
        """Mean loss of the policy without each set of blocks."""
        ...

    def without(
        self, *, blocks: Collection[int] = (), attention: Collection[int] = ()
    ) -> AbstractContextManager[None]: ...

    def as_cut(self, cut: Cut) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Whole:
    """Transformers' causal language model in this process. The memory beside it is that of one batch's streams."""

    model: Any
    shape: PolicyShape
    batches: Sequence[Batch]
    passes: Accumulator = field(default_factory=Accumulator)

    @torch.no_grad()
    def activity(self) -> Activity:
        model, watch, sequences = self.model, _Sums(self.shape), count_sequences(self.batches)
        with ExitStack() as hooks:
            for number, layer in enumerate(model.model.layers):
                hooks.callback(layer.register_forward_pre_hook(watch.residual, with_kwargs=True).remove)
                if not self.shape.experts:
                    hooks.callback(layer.mlp.down_proj.register_forward_pre_hook(watch.feed_forward(number)).remove)
            hooks.callback(model.model.norm.register_forward_pre_hook(watch.residual, with_kwargs=True).remove)
            for batch in self.passes.over(self.batches, sequences=sequences):
                watch.begin(batch.valid)
                model.model(batch.tokens, use_cache=False)
                watch.end()
        return Activity.of(watch.sums, sequences, sum(int(batch.valid.sum()) for batch in self.batches))

    def weights_of_neurons(self) -> torch.Tensor:
        mlps = [layer.mlp for layer in self.model.model.layers]
        return stacked([(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight) for mlp in mlps])

    def loss(self) -> float:
        return self.costs([()])[0]

    def costs(self, absent: Sequence[Collection[int]]) -> list[float]:
        sums = torch.zeros(len(absent), dtype=torch.float64)
        for batch in self.passes.over(self.batches, sequences=len(absent) * count_sequences(self.batches)):
            for number, blocks in enumerate(absent):
                with self.without(blocks=blocks):
                    logits, tokens = self._response_logits(batch)
                sums[number] += float(torch.nn.functional.cross_entropy(logits, tokens, reduction="sum"))
        return (sums / sum(int(batch.response[:, 1:].sum()) for batch in self.batches)).tolist()

    @torch.no_grad()
    def _response_logits(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """[R, vocabulary] at the places before the R response tokens of a batch, and [R] those tokens."""
        states = self.model.model(batch.tokens, use_cache=False).last_hidden_state[:, :-1]
        return _precise(self.model.lm_head(states[batch.response[:, 1:]])), batch.tokens[:, 1:][batch.response[:, 1:]]

    @contextmanager
    def without(self, *, blocks: Collection[int] = (), attention: Collection[int] = ()) -> Iterator[None]:
        """Within the block, the output of these layers, or of their attention, is what they were given, or nothing."""
        layers = self.model.model.layers
        with ExitStack() as hooks:
            for number in blocks:
                hooks.callback(layers[number].register_forward_hook(lambda _, arguments, __: arguments[0]).remove)
            for number in attention:
                layer = layers[number].self_attn
                hook = layer.register_forward_hook(lambda _, __, out: (torch.zeros_like(out[0]), *out[1:]))
                hooks.callback(hook.remove)
            yield

    @contextmanager
    def as_cut(self, cut: Cut) -> Iterator[None]:
        """Within the block, the policy computes what the smaller one will, in its own size."""
        layers = self.model.model.layers
        with ExitStack() as hooks:
            hooks.enter_context(self.without(blocks=set(range(len(layers))) - set(cut.layers), attention=cut.silenced))
            for number, layer in enumerate(layers):
                if cut.neurons is not None:
                    hooks.callback(_keeping(layer.mlp.down_proj, cut.neurons[number]))
            yield


class _Sums:
    """Hooks that add to the sums of an activity. They are in fp64, activations as the policy has them."""

    def __init__(self, shape: PolicyShape) -> None:
        layers, width = shape.num_layers, 0 if shape.experts else shape.ffn
        sizes: dict[str, tuple[int, ...]] = {"norms": (layers, width), "cosines": (layers,)}
        self.sums: Sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}

    def begin(self, valid: torch.Tensor) -> None:
        self._valid, self._streams = valid, list[torch.Tensor]()

    def residual(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._streams.append(arguments[0] if arguments else keywords["hidden_states"])

    def feed_forward(self, layer: int) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor]) -> None:
            squares = (_precise(arguments[0]) * self._valid[..., None]).square().sum(1).double()
            self.sums["norms"][layer] += squares.sqrt().sum(0).cpu()

        return hook

    def end(self) -> None:
        streams = torch.stack([_precise(stream[self._valid]) for stream in self._streams])  # [L + 1, tokens, hidden]
        unit = torch.nn.functional.normalize(streams, dim=-1, eps=0.0)
        self.sums["cosines"] += (unit[:-1] * unit[1:]).sum((1, 2)).double().cpu()


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@torch.no_grad()
def stacked(layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """:meth:`Reader.weights_of_neurons` of each layer's gate, up and down projections."""
    squares = [
        sum((w.double().square().sum(1) for w in (gate, up, down.T)), start=torch.zeros(())).cpu()
        for gate, up, down in layers
    ]
    return torch.stack(squares)


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


def _keeping(module: Any, kept: Sequence[int]) -> Callable[[], None]:
    """Let a linear layer see these inputs alone. Returns what undoes that."""
    mask = torch.zeros(module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    mask[list(kept)] = 1
    remove: Callable[[], None] = module.register_forward_pre_hook(lambda _, arguments: (arguments[0] * mask,)).remove
    return remove
