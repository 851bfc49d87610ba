"""How long servers take for a step's completions: what decode steps read and multiply, until the longest is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_dppo.config import WEIGHT_BYTES, Config
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.hardware import Gpu
from megatron_dppo.estimate.memory import cache_bytes
from megatron_dppo.estimate.parameters import parameters_of
from megatron_dppo.estimate.work import Lengths, Work, lengths_of, prompt_tokens
from megatron_dppo.models.shape import PolicyShape

BINS = 64
"""Stretches of a response in which the number of those still decoding is taken as constant."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A step's rollouts."""

    seconds: float
    prefill: float
    """Seconds of them for prompts, each once: the cache shares them among a prompt's completions."""
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """By how much completions of unequal length take longer than as many of the mean length would."""


def generation(
    config: Config, shape: PolicyShape, gpu: Gpu, assume: Assumptions, work: Work, *, sizes: tuple[int, ...], most: int
) -> Generation:
    """The time of the rollouts, prompts shared equally by the servers' GPUs.

    Args:
        config, shape, gpu, assume, work: of the run.
        sizes: tensor-parallel ranks of each server; the smallest one is the model for all.
        most: completions that a server holds at once.
    """
    tp, gpus = min(sizes), sum(sizes)
    each = work.completions * tp / gpus
    lengths, prompt = lengths_of(config, assume), prompt_tokens(config, assume)
    samples, ranks = config.rollout.samples_per_prompt, config.rollout.max_in_flight
    batch = max(min(each, most, samples * ranks * gpus), 1.0)

    def step(active: float, context: float) -> float:
        return _decode_step(config, shape, gpu, assume, tp=tp, active=active, context=context)

    decode = _until_done(each, batch, lengths, prompt, step)
    alike = each * lengths.mean / batch * step(batch, prompt + lengths.mean / 2)
    tokens = work.prompts * prompt * tp / gpus
    prefill = (
        2.0 * parameters_of(shape).active * tokens / (tp * gpu.rate(config.model.dtype) * assume.decode_flops_share)
    )
    return Generation(decode + prefill, prefill, batch, max(decode / alike, 1.0))


def _until_done(
    completions: float, batch: float, lengths: Lengths, prompt: float, step: Callable[[float, float], float]
) -> float:
    """Seconds: first with a full batch, as long as others wait; then with what is left of it, to the last token."""
    waiting = max(completions - batch, 0.0)
    seconds = waiting * lengths.mean / batch * step(batch, prompt + lengths.typical / 2)
    width = lengths.limit / BINS
    for i in range(BINS):
        middle = (i + 0.5) * width
        active = batch * lengths.longer_than(middle)
        if active < 0.5:  # the longest of them is done
            break
        seconds += width * step(max(active, 1.0), prompt + middle)
    return seconds


def _decode_step(
    config: Config, shape: PolicyShape, gpu: Gpu, assume: Assumptions, *, tp: int, active: float, context: float
) -> float:
    """Seconds of one decode step of ``active`` completions at a mean context: reading or multiplying, and the rest."""
    width, weights = WEIGHT_BYTES[config.model.dtype], parameters_of(shape)
    unread = 0.0
    if shape.experts:  # those that no token of the batch goes to
        unread = (weights.total - weights.active) * (1 - shape.experts_per_token / shape.experts) ** (active - 1)
    read = (weights.total - unread) * width / tp + active * context * cache_bytes(shape, tp, width)
    products = 2.0 * weights.active * active / tp
    moved = read / (gpu.bandwidth * assume.decode_bandwidth_share)
    multiplied = products / (gpu.rate(config.model.dtype) * assume.decode_flops_share)
    reduced = 2e-6 * shape.num_layers * assume.all_reduce_us if tp > 1 else 0.0
    return max(moved, multiplied) + reduced + assume.decode_step_ms / 1e3
