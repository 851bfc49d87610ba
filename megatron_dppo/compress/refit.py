"""Down projections that stand in for layers that go: a least-squares fit, in weights that stay.

Without layers a … b the residual stream lacks u = x_{b+1} − x̂, where x_{b+1} is the stream behind them in the larger
policy and x̂ that in the smaller one. The last weight in front of the gap is the down projection W of layer a − 1,
which multiplies the activations h of its units. W + C gives what of u is linear in h:

    C = argmin Σ ‖u − C h‖² + λ ‖C‖²   over all tokens, λ = RIDGE · mean of the diagonal of Σ h hᵀ

This is ReplaceMe's fit (2505.02819), but for what it is linear in. There it is the output W h, so that C = T W. That
is done here where the layer has experts, of which each then has C_e = T W_e. Runs of layers are fitted from the first
to the last, each on what the smaller policy computes with those before: a fit makes up for what they have left, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dppo.compress.absence import as_cut
from megatron_dppo.compress.calibration import Batch
from megatron_dppo.compress.cut import Cut
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.progress import Advance

RIDGE = 1e-3
"""Of 1e-4 to 1e-1, the best on a thousand tokens for 256 units; on ten thousand, within 3% of the best."""


@dataclass(slots=True)
class Refit:
    """The down projections of a policy's layers in front of those that go."""

    model: Any
    """Transformers' model of ``shape``, whole."""
    shape: PolicyShape
    batches: Sequence[Batch]
    dtype: torch.dtype
    """In which the smaller policy is written; the fitted weights are rounded to it."""
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    """[hidden, feed-forward width], of experts [experts, hidden, width], by layer of the larger policy."""
    shares: dict[int, float] = field(default_factory=dict)
    """Σ‖C h‖² explains this share of Σ‖u‖² on the batches: 1 − Σ‖u − C h‖² / Σ‖u‖²."""

    @property
    def of_output(self) -> bool:
        """Whether the fit is linear in the output of the feed-forward, which has fewer coefficients than one for each
        expert's units."""
        return self.shape.experts > 0

    @torch.no_grad()
    def fit(self, cut: Cut, *, say: Callable[[str], None], advance: Advance | None = None) -> None:
        """Fit all that can be fitted, reading every sequence twice for each run of layers that goes.

        Args:
            cut: of layers alone.
            say: is told of each run what has become of it.
            advance: is told what is under way.
        """
        for first, last in runs_that_go(cut, self.shape):
            run = f"layer {first}" if first == last else f"layers {first} to {last}"
            if first == 0:
                say(f"{run}: nothing stands in for what lies behind the embedding, since no down projection is before")
                continue
            self._fit(cut, first - 1, last, advance)
            share = f"{self.shares[first - 1]:.0%} of what is missing, by squares"
            say(f"{run}: the down projection of layer {first - 1} is refitted, and gives {share}")

    def _fit(self, cut: Cut, layer: int, last: int, advance: Advance | None) -> None:
        layers = self.model.model.layers
        weight = self._parameter(layer)
        width = self.shape.hidden if self.of_output else self.shape.ffn
        gram, cross, squares = (
            torch.zeros(size, dtype=torch.float64, device=weight.device)
            for size in ((width, width), (width, self.shape.hidden), ())
        )
        for batch in self.batches:
            with watched(layers[last]) as behind:
                self.model.model(batch.tokens, use_cache=False)
            mlp = layers[layer].mlp
            features = watched(mlp) if self.of_output else watched(mlp.down_proj, inputs=True)
            with as_cut(self.model, cut), self.applied(), watched(layers[layer]) as before, features as linear_in:
                self.model.model(batch.tokens, use_cache=False)
            missing = (behind[0] - before[0])[batch.valid].double()
            activations = linear_in[0][batch.valid].double()
            gram += activations.T @ activations
            cross += activations.T @ missing
            squares += missing.square().sum()
            if advance:
                advance(0, f"refits layer {layer}")
        damped = gram.clone()
        damped.diagonal().add_(RIDGE * gram.diagonal().mean())
        change = torch.cholesky_solve(cross, torch.linalg.cholesky(damped)).T  # [hidden, width]
        explained = 2 * (change.T * cross).sum() - ((change @ gram) * change).sum()
        self.shares[layer] = float(explained / squares)
        old = weight.double()
        self.weights[layer] = (old + (change @ old if self.of_output else change)).to("cpu", self.dtype)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block, the model has the fitted weights."""
        with ExitStack() as undo:
            for layer, fitted in self.weights.items():
                weight = self._parameter(layer)
                undo.callback(setattr, weight, "data", weight.data)
                weight.data = fitted.to(weight)
            yield

    def tensors(self, cut: Cut) -> dict[str, torch.Tensor]:
        """By their names in the smaller policy."""
        found: dict[str, torch.Tensor] = {}
        for layer, weight in self.weights.items():
            mlp = f"model.layers.{cut.layers.index(layer)}.mlp"
            if self.shape.experts:
                found |= {f"{mlp}.experts.{number}.down_proj.weight": of for number, of in enumerate(weight)}
            else:
                found[f"{mlp}.down_proj.weight"] = weight
        return found

    def _parameter(self, layer: int) -> torch.nn.Parameter:
        mlp = self.model.model.layers[layer].mlp
        weight: torch.nn.Parameter = mlp.experts.down_proj if self.shape.experts else mlp.down_proj.weight
        return weight


def runs_that_go(cut: Cut, shape: PolicyShape) -> list[tuple[int, int]]:
    """The first and the last layer of each run of neighbours that go."""
    gone = sorted(set(range(shape.num_layers)) - set(cut.layers))
    starts = [layer for layer in gone if layer - 1 not in gone]
    ends = [layer for layer in gone if layer + 1 not in gone]
    return list(zip(starts, ends, strict=True))


@contextmanager
def watched(module: Any, *, inputs: bool = False) -> Iterator[list[torch.Tensor]]:
    """What a module gives, or is given, within the block: one entry for each time that it runs."""
    seen: list[torch.Tensor] = []

    def hook(_: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append(arguments[0] if inputs else output)

    handle = module.register_forward_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()
