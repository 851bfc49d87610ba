"""Scores of a policy's parts, and the choice of the parts to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_dppo.compress.calibration import Batch
from megatron_dppo.compress.cut import Cut, Part, Recipe, count_kept_layers, select_highest
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.streams import print_message


@dataclass(frozen=True, slots=True)
class Scorer:
    """A causal language model of transformers, with calibration sequences."""

    model: Any
    batches: Sequence[Batch]
    advance: Callable[[int], None] = lambda sequences: None
    """Called with the number of sequences read."""

    def read(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield batch
            self.advance(len(batch.tokens))

    @torch.no_grad()
    def measure_loss(self, cut: Cut) -> float:
        """Return the mean negative log-likelihood of response tokens under a cut."""
        total = 0.0
        count = 0
        with apply_cut(self.model, cut):
            for batch in self.read():
                states = self.model.model(batch.tokens, use_cache=False).last_hidden_state
                targets = batch.response[:, 1:]
                logits = self.model.lm_head(states[:, :-1][targets]).float()
                tokens = batch.tokens[:, 1:][targets]
                total += float(torch.nn.functional.cross_entropy(logits, tokens, reduction="sum"))
                count += len(tokens)
        return total / count

    @torch.no_grad()
    def measure_activations(self) -> torch.Tensor:
        """Return 2SSP's score (arXiv:2501.17771), [layers, units] fp64.

        Mean over sequences of ‖activations over the sequence's tokens‖₂ at the down projection.
        """
        layers = self.model.model.layers
        sums = torch.zeros(len(layers), layers[0].mlp.down_proj.in_features, dtype=torch.float64)

        def add_norms(layer: int, valid: torch.Tensor, _: Any, inputs: tuple[torch.Tensor]) -> None:
            squares = (inputs[0].float() * valid[..., None]).square().sum(1)
            sums[layer] += squares.double().sqrt().sum(0).cpu()

        sequences = 0
        for batch in self.read():
            sequences += len(batch.tokens)
            with ExitStack() as hooks:
                for number, layer in enumerate(layers):
                    hook = partial(add_norms, number, batch.valid)
                    hooks.callback(layer.mlp.down_proj.register_forward_pre_hook(hook).remove)
                self.model.model(batch.tokens, use_cache=False)
        return sums / sequences

    @torch.no_grad()
    def measure_influence(self, part: Part) -> torch.Tensor:
        """Return ShortGPT's block influence (arXiv:2403.03853) of a part of each layer, [layers]
        fp64.

        1 − mean over tokens of the cosine of the residual stream before and after the part.
        """
        layers = self.model.model.layers
        # The norms' inputs are the residual stream before and after each part.
        first = [layer.input_layernorm for layer in layers]
        second = [layer.post_attention_layernorm for layer in layers]
        last = [*first[1:], self.model.model.norm]
        starts = second if part == "feed-forward" else first
        ends = second if part == "attention" else last
        streams: dict[int, torch.Tensor] = {}
        cosines = torch.zeros(len(layers), dtype=torch.float64)

        def keep_stream(
            layer: int,
            valid: torch.Tensor,
            _: Any,
            inputs: tuple[torch.Tensor],
        ) -> None:
            streams[layer] = inputs[0][valid].float()

        def add_cosines(
            layer: int,
            valid: torch.Tensor,
            _: Any,
            inputs: tuple[torch.Tensor],
        ) -> None:
            after = inputs[0][valid].float()
            cosines[layer] += (
                torch.cosine_similarity(streams.pop(layer), after, dim=-1).double().sum().cpu()
            )

        tokens = 0
        for batch in self.read():
            tokens += int(batch.valid.sum())
            with ExitStack() as hooks:
                for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
                    hook = partial(keep_stream, number, batch.valid)
                    hooks.callback(start.register_forward_pre_hook(hook).remove)
                    hook = partial(add_cosines, number, batch.valid)
                    hooks.callback(end.register_forward_pre_hook(hook).remove)
                self.model.model(batch.tokens, use_cache=False)
        return 1 - cosines / tokens

    @torch.no_grad()
    def measure_magnitudes(self) -> torch.Tensor:
        """Return the norm of each unit's rows of gate and up and column of down, [layers, units]
        fp64."""
        norms = []
        for layer in self.model.model.layers:
            mlp = layer.mlp
            weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T
            squares = torch.stack([weight.double().square().sum(1) for weight in weights])
            norms.append(squares.sum(0).sqrt().cpu())
        return torch.stack(norms)

    def measure_shapley_values(self, part: Part, pairs: int | None, seed: int) -> list[float]:
        """Return φ = E[loss | part absent] − E[loss | part present] (arXiv:2407.16286), [layers].

        Args:
            pairs: pairs of :func:`draw_halves`. None: each mean is a single loss, without the
                layer's part and with all parts.
            seed: random seed of the halves.
        """
        layers = len(self.model.model.layers)
        whole = Cut(tuple(range(layers)))
        if pairs is None:
            present = self.measure_loss(whole)
            return [
                self.measure_loss(whole.remove(part, [layer])) - present for layer in range(layers)
            ]
        values = np.zeros(layers)
        # A pair's halves remove each layer once: every mean has ``pairs`` losses.
        for half in draw_halves(layers, pairs, seed):
            loss = self.measure_loss(whole.remove(part, half))
            absent = np.isin(np.arange(layers), half)
            values += np.where(absent, loss, -loss)
        return (values / pairs).tolist()

    def remove_greedily(self, cut: Cut, part: Part, count: int) -> Cut:
        """Remove a part of ``count`` layers, one by one, with the least loss after each:
        for attention, 2SSP's second stage (arXiv:2501.17771).
        """
        candidates = set(range(len(self.model.model.layers)))
        for turn in range(count):
            losses = {
                layer: self.measure_loss(cut.remove(part, [layer])) for layer in sorted(candidates)
            }
            best = min(losses, key=lambda layer: (losses[layer], layer))
            candidates.remove(best)
            cut = cut.remove(part, [best])
            print_message(
                f"{part} of layer {best} removed, {turn + 1} of {count}: loss {losses[best]:.4f}"
            )
        return cut


@contextmanager
def apply_cut(model: Any, cut: Cut) -> Iterator[None]:
    """Make the larger policy compute the smaller policy's outputs within the block."""

    def skip(_: Any, inputs: tuple[torch.Tensor, ...], __: Any) -> torch.Tensor:
        return inputs[0]

    def zero_attention(
        _: Any,
        __: Any,
        outputs: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        return torch.zeros_like(outputs[0]), *outputs[1:]

    def zero_feed_forward(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output)

    def mask_units(mask: torch.Tensor, _: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0] * mask,)

    with ExitStack() as hooks:
        for number, layer in enumerate(model.model.layers):
            if number not in cut.layers:
                hooks.callback(layer.register_forward_hook(skip).remove)
            if number in cut.zero_attention:
                hooks.callback(layer.self_attn.register_forward_hook(zero_attention).remove)
            if number in cut.zero_feed_forward:
                hooks.callback(layer.mlp.register_forward_hook(zero_feed_forward).remove)
            # Zeros before the down projection remove a unit's output.
            if cut.units:
                mask = torch.zeros_like(layer.mlp.down_proj.weight[0])
                mask[list(cut.units[number])] = 1
                hook = partial(mask_units, mask)
                hooks.callback(layer.mlp.down_proj.register_forward_pre_hook(hook).remove)
        yield


def draw_halves(layers: int, pairs: int, seed: int) -> list[list[int]]:
    """Draw pairs of complementary halves of the layers, the smaller first."""
    generator = np.random.default_rng(seed)
    halves = []
    for _ in range(pairs):
        order = generator.permutation(layers)
        halves += [sorted(order[: layers // 2].tolist()), sorted(order[layers // 2 :].tolist())]
    return halves


def draw_scores(size: Sequence[int], seed: int) -> torch.Tensor:
    """Draw uniform fp64 scores."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tuple(size), generator=generator, dtype=torch.float64)


def choose_cut(scorer: Scorer, shape: PolicyShape, recipe: Recipe) -> Cut:
    """Keep the parts with the highest scores."""
    layers = range(shape.num_layers)
    whole = Cut(tuple(layers))
    if recipe.method == "depth":
        kept = count_kept_layers(shape, recipe.keep, recipe.part)
        if recipe.score == "greedy":
            return scorer.remove_greedily(whole, recipe.part, len(layers) - kept)
        if recipe.score == "shapley-loss":
            scores = scorer.measure_shapley_values(recipe.part, recipe.subnetworks, recipe.seed)
        elif recipe.score == "influence":
            scores = scorer.measure_influence(recipe.part).tolist()
        else:
            scores = draw_scores((len(layers),), recipe.seed).tolist()
        return whole.remove(recipe.part, set(layers) - set(select_highest(scores, kept)))
    planned = recipe.plan_cut(shape)
    width = planned.compute_shape(shape).ffn
    if recipe.score == "random":
        unit_scores = draw_scores((len(layers), shape.ffn), recipe.seed)
    elif recipe.score == "magnitude":
        unit_scores = scorer.measure_magnitudes()
    else:
        unit_scores = scorer.measure_activations()
    cut = replace(whole, units=tuple(select_highest(row, width) for row in unit_scores.tolist()))
    zeroed = len(planned.zero_attention)
    if recipe.score != "random":
        # 2SSP's second stage measures the first stage's policy.
        return scorer.remove_greedily(cut, "attention", zeroed)
    scores = draw_scores((len(layers),), recipe.seed).tolist()
    return cut.remove("attention", select_highest(scores, zeroed))
