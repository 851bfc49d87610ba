"""A policy that reads calibration sequences, whole or without some of its parts, and the activity of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from megatron_dppo.compress.calibration import Accumulator, Batch, Sums, count_sequences
from megatron_dppo.compress.cut import Cut
from megatron_dppo.models.shape import PolicyShape

Part = Literal["block", "attention"]
Measure = Literal["loss", "logits"]
"""Measures of the absence of layers."""


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

    @classmethod
    def of(cls, sums: Sums, sequences: int, tokens: int) -> Activity:
        """Means over so many sequences and tokens; ``sums`` are of the names and sizes of :class:`_Sums`."""
        return cls(
            neurons=sums["norms"] / sequences,
            inputs=sums["squares"].sqrt(),
            groups=sums["groups"] / tokens,
            experts=sums["experts"],
            choices=sums["choices"],
            channels=sums["channels"].sqrt().sum((0, 1)),
            cosines=sums["cosines"] / tokens,
            last_cosines=sums["last"] / sequences,
            relative_l1=sums["relative"][0] / tokens,
            relative_l2=sums["relative"][1] / tokens,
        )


class Reader(Protocol):
    """Source of scores."""

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
        """Cost of the policy without each set of blocks: its mean loss, or the mean ‖logits − logits of the whole
        policy‖₂ over places before response tokens."""
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
                hooks.callback(layer.self_attn.o_proj.register_forward_pre_hook(watch.attention(number)).remove)
                for place, norm in enumerate((layer.input_layernorm, layer.post_attention_layernorm)):
                    hooks.callback(norm.register_forward_hook(watch.norm(place, number)).remove)
                if self.shape.experts:
                    hooks.callback(layer.mlp.gate.register_forward_hook(watch.router(number)).remove)
                else:
                    hooks.callback(layer.mlp.down_proj.register_forward_pre_hook(watch.feed_forward(number)).remove)
            hooks.callback(model.model.norm.register_forward_pre_hook(watch.residual, with_kwargs=True).remove)
            for batch in self.passes.over(self.batches, sequences=sequences):
                watch.begin(batch.valid)
                model.model(batch.tokens, use_cache=False)
                watch.end()
        return Activity.of(watch.sums, sequences, sum(int(batch.valid.sum()) for batch in self.batches))

    def weights_of_neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        mlps = [layer.mlp for layer in self.model.model.layers]
        return stacked([(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight) for mlp in mlps])

    def loss(self) -> float:
        return self.costs("loss", [()])[0]

    def costs(self, measure: Measure, absent: Sequence[Collection[int]]) -> list[float]:
        sums: Sums = {"costs": torch.zeros(len(absent), dtype=torch.float64)}
        times = len(absent) + (measure == "logits" and () not in absent)  # that a sequence is read
        for batch in self.passes.over(self.batches, sequences=times * count_sequences(self.batches)):
            whole = self._response_logits(batch)[0] if measure == "logits" else None
            for number, blocks in enumerate(absent):
                if whole is not None and not blocks:
                    continue  # the whole policy is not apart from itself
                with self.without(blocks=blocks):
                    logits, tokens = self._response_logits(batch)
                if whole is None:
                    cost = torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
                else:
                    cost = (logits - whole).norm(dim=-1).sum()
                sums["costs"][number] += float(cost)
        return (sums["costs"] / sum(int(batch.response[:, 1:].sum()) for batch in self.batches)).tolist()

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
                    hooks.callback(_keeping(layer.mlp.down_proj, cut.neurons[number], 1))
                if cut.groups is not None:
                    width = layer.self_attn.o_proj.in_features // self.shape.kv_heads
                    hooks.callback(_keeping(layer.self_attn.o_proj, cut.groups[number], width))
                if cut.experts is not None:
                    hooks.callback(_choosing_of(layer.mlp.gate, cut.experts[number]))
            if cut.channels is not None:
                norms = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
                for norm in (*norms, self.model.model.norm):
                    hooks.callback(narrowed(norm, cut.channels, self.shape.hidden))
            yield


class _Sums:
    """Hooks that add to the sums of an activity. They are in fp64, activations as the policy has them."""

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


def _precise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


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
