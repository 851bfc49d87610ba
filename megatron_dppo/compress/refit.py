"""Down projections fitted anew, so that a smaller policy's residual stream is again close to the larger one's.

The target x is the larger policy's stream behind a layer that stays, or behind the layers that go next to it. The
smaller policy has x̂ there, and the error is x − x̂. The layer's down projection W multiplies the activations h of its
units. W becomes W + C, where C h predicts the error:

    C = argmin Σ ‖x − x̂ − C h‖² / ‖x‖² + λ ‖C‖²   over all tokens, λ = RIDGE · mean of the diagonal of Σ h hᵀ / ‖x‖²

x, x̂, h and the norms are of the channels and units that stay. The next norm divides by the length of the stream, and so
does the fit. Layers are fitted from the first to the last, each on what the smaller policy computes with the fits
before it, so that a fit makes up for the error that those leave, too. Channel pruning of convolutions is repaired so
(1707.06168, with the shortcut's error in the target). ReplaceMe (2505.02819) fits the layer in front of those that go,
by a map T of the output of its feed-forward, C = T W. That is done here where a layer has experts, each of which then
has W_e + T W_e.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dppo.compress.calibration import Batch, count_sequences
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.reader import Whole
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.streams import Advance

RIDGE = 1e-3
"""Its loss is within 1% of the best of 1e-4, 1e-3, 1e-2 and 1e-1 on ten thousand tokens for 256 units, and within 5% on
a thousand (docs/compress.md#refits)."""


@dataclass(slots=True)
class Refit:
    """The down projections that are fitted anew to what is left of a policy."""

    whole: Whole
    """The larger policy, and the sequences to fit on."""
    dtype: torch.dtype
    """In which the smaller policy is written; fitted weights are rounded to it."""
    ridge: float = RIDGE
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    """[hidden, feed-forward width], of experts [experts, hidden, width], by layer of the larger policy, in its sizes:
    rows of channels that go, and columns of units that go, are as they were."""
    shares: dict[int, float] = field(default_factory=dict)
    """Fraction of the error on the batches that a layer's fit explains: 1 − Σ ‖x − x̂ − C h‖² / ‖x‖² over Σ ‖x − x̂‖² /
    ‖x‖². 0 if the layer stays as it was: there is no error, or all of h is zero."""

    @property
    def of_output(self) -> bool:
        """Whether the fit is linear in the output of the feed-forward, which has fewer coefficients than one for each
        expert's units."""
        return self.whole.shape.experts > 0

    def reads(self, cut: Cut) -> int:
        """Sequences that all fits read, each as often as it is read: twice for each fit, up to that layer."""
        return 2 * len(layers_to_fit(cut, self.whole.shape)) * count_sequences(self.whole.batches)

    def fit(self, cut: Cut, *, say: Callable[[str], None], advance: Advance | None = None) -> None:
        """Fit every layer that stays from the first change on.

        Args:
            say: is told what each fit explains.
            advance: is told of the :meth:`reads`.
        """
        layers = layers_to_fit(cut, self.whole.shape)
        for number, layer in enumerate(layers):
            behind = min((kept for kept in cut.layers if kept > layer), default=self.whole.shape.num_layers) - 1
            self.fit_layer(cut, layer, behind, advance)
            share = f"{self.shares[layer]:.0%} of the error behind layer {behind}"
            say(f"refit {number + 1} of {len(layers)}: the down projection of layer {layer} explains {share}")

    @torch.no_grad()
    def fit_layer(self, cut: Cut, layer: int, behind: int, advance: Advance | None = None) -> None:
        """Fit a layer's down projection to the larger policy's stream behind another layer."""
        layers, weight = self.whole.model.model.layers, self._parameter(layer)
        channels = _numbers(cut.channels, self.whole.shape.hidden, weight)
        units = _numbers(cut.neurons[layer] if cut.neurons else None, self.whole.shape.ffn, weight)
        columns = channels if self.of_output else units
        sums: Any = {"dtype": torch.float64, "device": weight.device}
        gram, squares = torch.zeros(len(columns), len(columns), **sums), torch.zeros((), **sums)
        cross = torch.zeros(len(columns), len(channels), **sums)
        for batch in self.whole.batches:
            with watched(layers[behind]) as larger:
                self._read(batch, behind)
            mlp = layers[layer].mlp
            features = watched(mlp) if self.of_output else watched(mlp.down_proj, inputs=True)
            with self.whole.as_cut(cut), self.applied(), watched(layers[layer]) as smaller, features as given:
                self._read(batch, layer)
            target, stream, inputs = (
                seen[0][batch.valid][:, kept].double()
                for seen, kept in ((larger, channels), (smaller, channels), (given, columns))
            )
            scale = 1 / target.norm(dim=-1, keepdim=True)
            error, inputs = (target - stream) * scale, inputs.mul_(scale)
            gram.addmm_(inputs.T, inputs)
            cross.addmm_(inputs.T, error)
            squares += error.square().sum()
            if advance:
                advance(2 * len(batch.tokens))
        if not (gram.diagonal().sum() > 0 and squares > 0):
            self.shares[layer] = 0.0
            return
        penalty = self.ridge * gram.diagonal().mean()
        gram.diagonal().add_(penalty)
        factor = torch.linalg.cholesky(gram)
        del gram  # before the solver copies the factor
        change = torch.cholesky_solve(cross, factor).T  # [channels, columns]
        explained = (change.T * cross).sum() + penalty * change.square().sum()
        self.shares[layer] = float(explained / squares)
        fitted = weight.detach().to(torch.float64, copy=True)
        if self.of_output:
            fitted[..., channels, :] += change @ fitted[..., channels, :]
        else:
            fitted[channels[:, None], units] += change
        self.weights[layer] = fitted.to(self.dtype).to(weight)

    def _read(self, batch: Batch, layer: int) -> None:
        """Run the policy up to a layer, and no further."""

        def stop(*_: Any) -> None:
            raise _ReachedError

        handle = self.whole.model.model.layers[layer].register_forward_hook(stop)
        try:
            with suppress(_ReachedError):
                self.whole.model.model(batch.tokens, use_cache=False)
        finally:
            handle.remove()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, the model has the fitted weights."""
        with ExitStack() as undo:
            for layer, fitted in self.weights.items():
                weight = self._parameter(layer)
                undo.callback(setattr, weight, "data", weight.data)
                weight.data = fitted
            yield

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in the larger policy, in its sizes."""
        found: dict[str, torch.Tensor] = {}
        for layer, weight in self.weights.items():
            mlp = f"model.layers.{layer}.mlp"
            if self.whole.shape.experts:
                found |= {f"{mlp}.experts.{number}.down_proj.weight": of for number, of in enumerate(weight)}
            else:
                found[f"{mlp}.down_proj.weight"] = weight
        return found

    def _parameter(self, layer: int) -> torch.nn.Parameter:
        mlp = self.whole.model.model.layers[layer].mlp
        weight: torch.nn.Parameter = mlp.experts.down_proj if self.whole.shape.experts else mlp.down_proj.weight
        return weight


def _numbers(kept: Sequence[int] | None, count: int, like: torch.Tensor) -> torch.Tensor:
    """[parts that stay] int64, on the same device; None: all."""
    return torch.tensor(range(count) if kept is None else kept, device=like.device)


class _ReachedError(Exception):
    """A layer has been reached."""


def layers_to_fit(cut: Cut, shape: PolicyShape) -> list[int]:
    """The layers that stay from the one on behind which the stream is another: where layers go, that before them."""
    if any(part is not None for part in (cut.neurons, cut.groups, cut.experts, cut.channels)):
        return list(cut.layers)
    gone = set(range(shape.num_layers)) - set(cut.layers)
    first = min(*(layer - 1 for layer in gone), *cut.silenced, shape.num_layers)
    return [layer for layer in cut.layers if layer >= first]


@contextmanager
def watched(module: Any, *, inputs: bool = False) -> Iterator[list[torch.Tensor]]:
    """Outputs of a module, or its inputs, within the block: one entry for each time that it runs."""
    seen: list[torch.Tensor] = []

    def hook(_: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append(arguments[0] if inputs else output)

    handle = module.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()
