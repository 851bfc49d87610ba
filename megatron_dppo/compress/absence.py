"""A policy without some of its parts, and what the absence of each of its layers costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from megatron_dppo.compress.calibration import Batch, count_sequences
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.passes import Passes, Sums

Part = Literal["block", "attention"]
Distance = Literal["loss", "logits"]


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
        yield


def _keeping(module: Any, kept: Sequence[int], width: int) -> Callable[[], None]:
    """Let a linear layer see these runs of ``width`` inputs alone. Returns what undoes that."""
    mask = torch.zeros(module.in_features, dtype=module.weight.dtype, device=module.weight.device)
    mask.unflatten(0, (-1, width))[list(kept)] = 1
    remove: Callable[[], None] = module.register_forward_pre_hook(lambda _, arguments: (arguments[0] * mask,)).remove
    return remove


@torch.no_grad()
def response_logits(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, vocabulary] at the places before the R response tokens of a batch, and [R] those tokens."""
    states = model.model(batch.tokens, use_cache=False).last_hidden_state[:, :-1]
    logits = model.lm_head(states[batch.response[:, 1:]])
    return logits if logits.dtype == torch.float64 else logits.float(), batch.tokens[:, 1:][batch.response[:, 1:]]


def mean_loss(model: Any, batches: Sequence[Batch], passes: Passes | None = None) -> float:
    """Mean negative log-likelihood of the response tokens of all batches, in nats."""
    sums: Sums = {"loss": torch.zeros((), dtype=torch.float64)}
    for batch in (passes or Passes()).over(batches, sums, sequences=count_sequences(batches)):
        sums["loss"] += _loss(*response_logits(model, batch))
    return float(sums["loss"]) / _response_tokens(batches)


def _response_tokens(batches: Sequence[Batch]) -> int:
    return sum(int(batch.response[:, 1:].sum()) for batch in batches)


def _loss(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Summed over the tokens, in nats."""
    return float(torch.nn.functional.cross_entropy(logits, tokens, reduction="sum"))


def leave_one_out(
    model: Any, batches: Sequence[Batch], distance: Distance, passes: Passes | None = None
) -> list[float]:
    """E[m | block l absent] − E[m | all present] for each block l, the first term of its Shapley value (2407.16286).

    m is the mean loss of response tokens, or the mean over their places of ‖logits − logits of the whole policy‖₂.
    """
    layers = len(model.model.layers)
    sums: Sums = {"apart": torch.zeros(layers, dtype=torch.float64)}
    times = 1 + layers  # that a sequence is read
    for batch in (passes or Passes()).over(batches, sums, sequences=times * count_sequences(batches)):
        whole, tokens = response_logits(model, batch)
        present = _loss(whole, tokens)
        for block in range(layers):
            with without(model, blocks=[block]):
                absent, _ = response_logits(model, batch)
            if distance == "loss":
                sums["apart"][block] += _loss(absent, tokens) - present
            else:
                sums["apart"][block] += float((absent - whole).norm(dim=-1).sum())
    return (sums["apart"] / _response_tokens(batches)).tolist()
