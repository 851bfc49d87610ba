"""Log-probabilities from hidden states without full logits: in chunks, vocabulary-parallel,
recomputed for gradients.

An fp32 ``[tokens, vocabulary]`` tensor takes 5 GB for 8,192 tokens of Qwen3's vocabulary, and a
training step would hold several. Instead, a buffer of fixed size holds one chunk's logits, in the
forward pass and again in the backward pass. If one chunk has all positions, Triton's kernels keep
the logits for the backward pass.

With logits z over the whole vocabulary, temperature τ, p = softmax(z/τ) and target t:

* log-probability ``log p_t``, under the sampled distribution, like rollout log-probabilities;
* entropy ``H = −Σ_v p_v log p_v``, with gradient ``−p_v (log p_v + H)`` by z/τ.

With a sampling mask (``rl/sampling_mask.py``), p is the softmax over a token's kept ids.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_dppo.models import policy_head_torch

LOWEST = torch.finfo(torch.float32).min
"""Largest logit of a rank without tokens of the vocabulary. Finite, so that 0 · LOWEST is 0."""
MASKED = -1e20
"""Logit of a token outside the sampling mask. Its exponential is 0, and a vocabulary of MASKED
has a finite sum."""


class HeadOutput(NamedTuple):
    """Output of the policy head for R response tokens, in fp32.

        HeadOutput(logprobs=[-0.69], entropy=[0.69])

    is one token: two tokens of the vocabulary have probability 0.5 each. (Lists replace tensors.)
    """

    logprobs: torch.Tensor
    """[R]"""
    entropy: torch.Tensor
    """[R], nats."""
    divergence: torch.Tensor | None = None
    """[R], divergence from a teacher, see :mod:`teacher_head`; None without a teacher."""

    @property
    def present(self) -> tuple[torch.Tensor, ...]:
        """Fields that are not None, in order."""
        return tuple(field for field in self if field is not None)


def score_responses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    kept_ids: torch.Tensor | None = None,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    chunk_mib: int,
) -> HeadOutput:
    """Score target tokens under the policy's head.

    - Collective over ``tp_group``, whose ranks pass the same positions: one maximum and one sum in
      the forward pass, no exchange in the backward pass.
    - The gradient of ``hidden`` is this rank's part of a sum. The caller adds up the parts
      (``copy_to_tensor_model_parallel_region``, or the gather of a sequence-parallel region).
    - No value is read on the host: on CUDA the host would have to wait.
    - The gradient of ``weight`` is added to ``weight.main_grad``, in fp32, if Megatron's DDP keeps
      that tensor; otherwise autograd gets a gradient of the weight's type.

    Args:
        hidden: [R, h], final hidden states at the positions that predict the targets. R may be 0.
        weight: [V_local, h], this rank's rows of the output layer: equal parts by rank, the padding
            last.
        targets: [R] int64, token ids below ``vocab_size``.
        kept_ids: [R, K] int64, ids in the sampling mask of each target, the target included;
            repeated ids count once. None: the whole vocabulary.
        vocab_size: tokens without padding; later rows of the weight are ignored and get no
            gradient.
        temperature: τ.
        tp_group: tensor-parallel ranks; None for a single rank.
        chunk_mib: size of a chunk's buffers in MiB. Large chunks read the weight less often; a
            chunk of all positions saves a product.
    """
    group, first, rows = get_local_rows(weight, vocab_size, tp_group)
    columns = None if kept_ids is None else kept_ids - first
    return HeadOutput(
        *_Score.apply(hidden, weight, targets - first, columns, rows, temperature, group, chunk_mib)
    )


def get_local_rows(
    weight: torch.Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return the group to exchange with (None for a single rank), the token of this rank's first
    row, and the number of this rank's rows without padding."""
    group = tp_group if tp_group is not None and dist.get_world_size(tp_group) > 1 else None
    first = 0 if group is None else dist.get_rank(group) * len(weight)
    return group, first, min(max(vocab_size - first, 0), len(weight))


class _Score(torch.autograd.Function):
    """Score with the first ``rows`` of the weight; ``targets`` and ``kept`` count from this rank's
    first row, and other ranks' ids lie outside the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        kept: torch.Tensor | None,
        rows: int,
        temperature: float,
        group: dist.ProcessGroup | None,
        chunk_mib: int,
    ) -> tuple[torch.Tensor, ...]:
        peak = torch.full((len(targets),), LOWEST, device=hidden.device)
        sums = torch.zeros((3, len(targets)), device=hidden.device)
        kernels = _select_kernels(hidden.is_cuda)
        types = [torch.float32] * kernels.BUFFERS
        logits = None
        for chunk, buffers in split_positions(len(targets), rows, types, chunk_mib, hidden.device):
            logits = buffers[0]
            compute_logits(hidden[chunk], weight[:rows], out=logits)
            if kept is not None:
                _mask_logits(logits, kept[chunk])
            kernels.reduce_logits(buffers, targets[chunk], temperature, peak[chunk], sums[:, chunk])
        # Every rank has the same positions, and all ranks skip the exchange of an empty pack.
        if group is not None and len(targets):
            _combine(peak, sums, group)
        total, cross, at_target = sums
        logprobs = (at_target - peak) - total.log()
        entropy = total.log() - cross / total
        # Save the normaliser log Σ exp(z/τ) of each position instead of the logits.
        ctx.save_for_backward(hidden, weight, targets, peak + total.log(), entropy, kept)
        ctx.rows = rows
        ctx.temperature = temperature
        ctx.chunk_mib = chunk_mib
        # With two buffers ``reduce_logits`` overwrites the logits.
        keeps = kernels.BUFFERS == 1 and ctx.needs_input_grad[0]
        fits = len(targets) <= _compute_chunk_size(rows, gradient_types(weight), chunk_mib)
        ctx.logits = logits if keeps and fits else None
        # A loss without the entropy passes None for the gradient.
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, entropy_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, _, _, entropy, _ = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = get_main_grad(ctx, weight)
        grad = torch.zeros_like(entropy) if grad is None else grad.contiguous()
        if entropy_grad is not None:
            entropy_grad = entropy_grad.contiguous()
        _add_gradients(ctx, grad, entropy_grad, hidden_grad, weight_grad)
        return hidden_grad, get_autograd_gradient(weight, weight_grad), *[None] * 6


def _add_gradients(
    ctx: Any,
    grad: torch.Tensor,
    entropy_grad: torch.Tensor | None,
    hidden_grad: torch.Tensor,
    weight_grad: torch.Tensor | None,
) -> None:
    hidden, weight, targets, normaliser, entropy, kept_ids = ctx.saved_tensors
    kernels = _select_kernels(hidden.is_cuda)
    vocabulary = weight[: ctx.rows]
    types = gradient_types(weight)
    # Release the kept logits, because the gradient may overwrite them.
    kept = () if ctx.logits is None else (ctx.logits,)
    ctx.logits = None
    for chunk, allocated in split_positions(
        len(targets), ctx.rows, types[len(kept) :], ctx.chunk_mib, hidden.device
    ):
        buffers = kept + allocated
        logits = buffers[0]
        gradient = buffers[-1]
        if not kept:
            compute_logits(hidden[chunk], vocabulary, out=logits)
            if kept_ids is not None:
                _mask_logits(logits, kept_ids[chunk])
        bonus = None if entropy_grad is None else (entropy[chunk], entropy_grad[chunk])
        kernels.compute_logit_gradient(
            logits,
            targets[chunk],
            ctx.temperature,
            normaliser[chunk],
            grad[chunk],
            out=gradient,
            bonus=bonus,
        )
        compute_hidden_gradient(gradient, vocabulary, out=hidden_grad[chunk])
        if weight_grad is not None:
            add_weight_gradient(weight_grad[: ctx.rows], gradient, hidden[chunk])


def _mask_logits(logits: torch.Tensor, kept: torch.Tensor) -> None:
    """Set logits [c, v] to ``MASKED``, except in the columns ``kept`` [c, K]; columns of other
    ranks are out of range."""
    columns = logits.shape[1]
    column = kept.clamp(0, columns - 1)
    held = (kept >= 0) & (kept < columns)
    values = torch.where(held, logits.gather(1, column), MASKED)
    # The maximum, because columns of other ranks are clamped to columns that may be kept.
    logits.fill_(MASKED).scatter_reduce_(1, column, values, "amax")


def gradient_types(weight: torch.Tensor) -> list[torch.dtype]:
    """Return the types of the backward pass's buffers: of the logits and, if different, of their
    gradient."""
    return [torch.float32, weight.dtype] if _supports_fp32_output(weight) else [torch.float32]


def get_main_grad(ctx: Any, weight: Any) -> torch.Tensor | None:
    """Return the fp32 tensor that accumulates the gradient of ``weight``, the function's second
    input; None if no gradient is needed."""
    if not ctx.needs_input_grad[1]:
        return None
    if hasattr(weight, "main_grad"):
        return weight.main_grad
    return torch.zeros_like(weight, dtype=torch.float32)


def get_autograd_gradient(weight: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient that autograd gets for ``weight``, given the fp32 ``gradient``."""
    if gradient is not None and not hasattr(weight, "main_grad"):
        return gradient.to(weight.dtype)
    # Megatron marks a weight that is also this stage's embedding with ``zero_out_wgrad``. Autograd
    # delivers the embedding's gradient for DDP to add: set no mark.
    if gradient is None or getattr(weight, "zero_out_wgrad", False):
        return None
    # DDP waits for a gradient from autograd, and ignores the values if this mark is set.
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


@functools.cache
def _select_kernels(on_cuda: bool) -> ModuleType:
    # Triton is optional, and needs a GPU.
    if not on_cuda or importlib.util.find_spec("triton") is None:
        return policy_head_torch
    from megatron_dppo.models import policy_head_triton

    return policy_head_triton


def split_positions(
    positions: int,
    rows: int,
    types: Sequence[torch.dtype],
    chunk_mib: int,
    device: torch.device,
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Yield slices of c positions, each with reused buffers [c, rows] of ``types`` that together
    take at most ``chunk_mib``."""
    if rows == 0:
        return
    size = max(1, min(positions, _compute_chunk_size(rows, types, chunk_mib)))
    storage = [torch.empty((size, rows), dtype=kind, device=device) for kind in types]
    for start in range(0, positions, size):
        stop = min(start + size, positions)
        yield slice(start, stop), tuple(buffer[: stop - start] for buffer in storage)


def _compute_chunk_size(rows: int, types: Sequence[torch.dtype], chunk_mib: int) -> int:
    return (chunk_mib << 20) // max(rows * sum(kind.itemsize for kind in types), 1)


def _combine(peak: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Reduce the ranks' sums in place, from each rank's own peak to the common peak."""
    shift = -peak
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    shift = -(shift + peak)
    factor = shift.exp()
    # Σ e·(z − common peak) has a term from the shift of z, in addition to the factor of e.
    total, cross = sums[:2]
    cross.add_(shift * total).mul_(factor)
    total.mul_(factor)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)


# Three products with fp32 results, for weights of any type, without an fp32 copy of the weights. As
# bf16 a logit of 20, and hence the log-probability, would be off by up to 0.06. CUDA's kernels can
# return their fp32 sums. On other devices a few rows of the weights at a time are converted.

CONVERTED = 1 << 22
"""Weights converted at a time: 16 MiB of fp32."""


def compute_logits(hidden: torch.Tensor, vocabulary: torch.Tensor, out: torch.Tensor) -> None:
    """Compute ``out = hidden · vocabularyᵀ``: [c, h] and [v, h] of one type, to [c, v] fp32."""
    if _supports_fp32_output(vocabulary):
        torch.mm(hidden, vocabulary.t(), out_dtype=torch.float32, out=out)
        return
    wide = hidden.float()
    size = _count_converted_rows(vocabulary)
    for part, block in zip(out.split(size, dim=1), vocabulary.split(size), strict=True):
        torch.mm(wide, block.float().t(), out=part)


def compute_hidden_gradient(
    logit_gradient: torch.Tensor,
    vocabulary: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute ``out = logit_gradient · vocabulary``: [c, v] and [v, h], to [c, h] of the
    vocabulary's type."""
    if _supports_fp32_output(vocabulary):
        torch.mm(logit_gradient, vocabulary, out=out)
        return
    total = logit_gradient.new_zeros((len(logit_gradient), vocabulary.shape[1]))
    size = _count_converted_rows(vocabulary)
    for part, block in zip(logit_gradient.split(size, dim=1), vocabulary.split(size), strict=True):
        total.addmm_(part, block.float())
    out.copy_(total)


def add_weight_gradient(
    total: torch.Tensor,
    logit_gradient: torch.Tensor,
    hidden: torch.Tensor,
) -> None:
    """Add ``logit_gradientᵀ · hidden`` to ``total`` in place: [c, v] and [c, h] to [v, h] fp32."""
    if _supports_fp32_output(hidden):
        torch.addmm(total, logit_gradient.t(), hidden, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(logit_gradient.t(), hidden.float())


def _supports_fp32_output(operand: torch.Tensor) -> bool:
    return operand.is_cuda and operand.dtype != torch.float32


def _count_converted_rows(vocabulary: torch.Tensor) -> int:
    if vocabulary.dtype == torch.float32:
        return len(vocabulary)
    return max(1, CONVERTED // vocabulary.shape[1])
