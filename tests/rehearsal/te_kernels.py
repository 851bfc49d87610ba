"""Stand-ins for functions of ``transformer_engine_torch``: outputs of the right shape and type, and
booked work.

Shapes, types and argument order follow the C++ sources of Transformer Engine 2.14.1 and 2.20. If
the two pass different numbers among the tensors, a stand-in reads only the tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.rehearsal.booking import tensor_bytes
from tests.rehearsal.dispatch import RehearsalMode, check_on_device

Tensor = torch.Tensor
TE_DTYPES = {0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
"""Torch types by the compiled module's numbers."""
STAND_INS: dict[str, Callable[..., Any]] = {}
"""All stand-ins by name."""


class WrongCallError(RuntimeError):
    """A kernel received shapes or types that the real kernel rejects."""


class StandInState:
    """The mode that stand-ins book into, and the attention pairs of a pack."""

    mode: RehearsalMode
    pairs = 0.0


def set_attention_pairs(pairs: float) -> None:
    """Set Σ n² over the sequences of a pack, divided by cp²: each rank calls attention cp times.
    Attention FLOPs depend on it, and device tensors do not hold it."""
    StandInState.pairs = pairs


def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    STAND_INS[function.__name__] = function
    return function


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return StandInState.mode.empty(shape, dtype)


def _like(*tensors: Tensor) -> list[Tensor]:
    return [_empty(tensor.shape, tensor.dtype) for tensor in tensors]


def _run(
    name: str, reads: Sequence[Tensor], writes: Sequence[Tensor] = (),
    checked: Sequence[Tensor | None] = (),
    flops: float = 0.0, product: tuple[int, int] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Book a kernel that reads and writes these tensors once, and return those that it writes.

    Args:
        checked: further tensors that must be on the device, and are too small to count.

    Raises:
        HostTensorError: a tensor is on the host.
    """
    check_on_device(name, *reads, *writes, *checked)
    types, size = reads[0].dtype, tensor_bytes(*reads) + tensor_bytes(*writes)
    StandInState.mode.book.launch(
        f"te::{name}", flops, size, types, writes[0].dtype if writes else types, product
    )
    return list(writes)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise WrongCallError(problem)


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    return [each for each in arguments if isinstance(each, Tensor)]


ANSWERS = {
    "get_cudnn_version": 91900, "get_cublasLt_version": 130100, "get_num_cublas_streams": 4,
    "get_stream_priority_range": (0, -5), "device_supports_multicast": True,
}  # fmt: skip
STAND_INS |= {name: lambda *args, value=value: value for name, value in ANSWERS.items()}


# Products


def _sizes(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> tuple[int, int, int]:
    """Rows, columns and inner size of op(b) @ op(a): cuBLAS is column-major."""
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    inner, columns = tuple(a.shape)[::-1] if transpose_a else tuple(a.shape)
    inner_b, rows = tuple(b.shape) if transpose_b else tuple(b.shape)[::-1]
    _require(
        inner == inner_b,
        f"product of {tuple(a.shape)} and {tuple(b.shape)}: inner sizes {inner} and {inner_b}",
    )
    _require(a.dtype == b.dtype, f"product of {a.dtype} and {b.dtype}")
    return rows, columns, inner


@stand_in
def generic_gemm(
    A: Tensor, transA: bool, B: Tensor, transB: bool, D: Tensor | None, quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Tensor,
    workspace_size: int,
    accumulate: bool, use_split_accumulator: bool, **rest: Any,
) -> list[Tensor | None]:  # fmt: skip
    rows, columns, inner = _sizes(A, transA, B, transB)
    dtype = A.dtype if output_dtype is None else TE_DTYPES[int(output_dtype)]
    out = _empty((rows, columns) if transB else (*B.shape[:-1], columns), dtype) if D is None else D
    _require(
        out.numel() == rows * columns, f"product of {rows} x {columns} into {tuple(out.shape)}"
    )
    _require(out.dtype == dtype, f"product of type {dtype} into {out.dtype}")
    reads, flops = (A, B, out) if accumulate else (A, B), 2.0 * rows * columns * inner
    _run("gemm", reads, (out,), (bias, workspace), flops, (rows, columns))
    return [out, _empty((columns,), dtype) if grad and bias is not None else None, None, None]


@stand_in
def te_general_grouped_gemm(
    A: list[Tensor], transA: bool, B: list[Tensor], transB: bool, D: list[Tensor], D_type: Any,
    m_splits: Any, bias: Any, bias_type: Any, single_output: bool, pre_gelu_out: Any, grad: bool,
    workspace: Any,
    workspace_size: int, accumulate: bool, *rest: Any,
) -> Any:  # fmt: skip
    first = 0
    for number, (a, b) in enumerate(zip(A, B, strict=True)):
        rows, columns, inner = _sizes(a, transA, b, transB)
        out = D[0][first : first + rows] if single_output else D[number]
        first += rows
        if rows and columns and inner:
            _run(
                "grouped_gemm",
                (a, b, out) if accumulate else (a, b),
                (out,),
                flops=2.0 * rows * columns * inner,
            )
    return bias


# Norms and rotary embedding


@stand_in
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Tensor | None,
    quantizer: Any,
    otype: Any,
    *rest: Any,
) -> list[Tensor | None]:
    out = _empty(input.shape, TE_DTYPES[int(otype)]) if ln_out is None else ln_out
    deviations = _empty((input.numel() // input.shape[-1],), torch.float32)
    _run("rmsnorm_fwd", (input, weight), (out, deviations))
    return [out, None, deviations]


@stand_in
def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any) -> list[Tensor]:
    return _run("rmsnorm_bwd", (dz, x, rsigma, gamma), _like(x, gamma))


@stand_in
def fused_rope_forward(input: Tensor, freqs: Tensor, starts: Any, layout: Any, interleaved: bool,
cu_seqlens: Any,
                       *rest: Any) -> Tensor:  # fmt: skip
    _require(freqs.dtype is torch.float32, f"rotary frequencies of {freqs.dtype}")
    return _run("rope_fwd", (input,), _like(input), (freqs, cu_seqlens))[0]


@stand_in
def fused_rope_backward(grad: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    return _run("rope_bwd", (grad,), _like(grad), (freqs,))[0]


# Attention by cuDNN


@stand_in
def get_fused_attn_backend(asked: Any, q_dtype: Any = None, *rest: Any) -> Any:
    compiled: Any = sys.modules["transformer_engine_torch"]
    backends = compiled.NVTE_Fused_Attn_Backend
    number = int(asked.qkv_dtype if q_dtype is None else q_dtype)
    half = TE_DTYPES.get(number) in (torch.float16, torch.bfloat16)
    chosen = backends.NVTE_F16_arbitrary_seqlen if half else backends.NVTE_No_Backend
    return (chosen, "") if q_dtype is None else chosen


@stand_in
def fused_attn_fwd(
    max_q: int, max_kv: int, is_training: bool, scale: float, dropout: float, set_zero: bool,
    layout: Any, *rest: Any
) -> list[Tensor]:  # fmt: skip
    cu_q, cu_kv, q, k, v, *padded = _tensors(rest)
    _require(
        cu_q.dtype is torch.int32 and cu_kv.dtype is torch.int32,
        f"starts of {cu_q.dtype}, {cu_kv.dtype}",
    )
    _require(
        isinstance(max_q, int) and isinstance(max_kv, int),
        "the longest sequence is not a number on the host",
    )
    tokens, heads, width = q.shape
    out, stats = (
        _empty((tokens, heads, v.shape[-1]), q.dtype),
        _empty((tokens, heads, 1), torch.float32),
    )
    if set_zero:
        _run("zeros", (out,))
    _run(
        "attention_fwd",
        (q, k, v),
        (out, stats),
        (cu_q, cu_kv, *padded),
        2.0 * heads * width * StandInState.pairs,
    )
    return [out, stats, _empty((2,), torch.int64)]


@stand_in
def fused_attn_bwd(
    max_q: int, max_kv: int, scale: float, dropout: float, set_zero: bool, layout: Any, *rest: Any
) -> list[Tensor | None]:  # fmt: skip
    cu_q, cu_kv, q, k, v, out, d_out, *padded = _tensors(rest)
    (aux,) = (each for each in rest if isinstance(each, list))
    made = _like(q, k, v)
    if set_zero:
        _run("zeros", made)
    workspace = _empty(
        q.shape, torch.float32
    )  # an estimate: cuDNN accumulates the gradient of q in fp32
    flops, checked = (
        5.0 * q.shape[1] * q.shape[2] * StandInState.pairs,
        (cu_q, cu_kv, *aux, *padded),
    )
    _run("attention_bwd", (q, k, v, out, d_out), (*made, workspace), checked, flops)
    return [*made, None, None]


# Context parallelism


@stand_in
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    shape = list(tensor.shape)
    shape[-3] //= 2
    out = _empty(shape, tensor.dtype)
    return _run("thd_read_half", (out,), (out,), (tensor, cu_seqlens))[0]


@stand_in
def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    out = _empty(
        (lse.shape[0], lse.shape[1] // 2) if packed else (*lse.shape[:-1], length), lse.dtype
    )
    return _run("thd_read_second_half_lse", (out,), (out,), (lse, cu_seqlens))[0]


for _name in ("thd_second_half_lse_correction", "thd_out_correction", "thd_grad_correction"):
    STAND_INS[_name] = lambda sums, step, *rest, name=_name: _run(name, (sums, step), (sums,))


@stand_in
def thd_get_partitioned_indices(cu_seqlens: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    return _empty((tokens // size,), torch.int32)


# Experts


@stand_in
def fused_topk_with_score_function_fwd(logits: Tensor, *rest: Any) -> list[Tensor]:
    made = [_empty(logits.shape, dtype) for dtype in (logits.dtype, torch.bool, torch.float32)]
    return _run("topk_fwd", (logits,), made)  # probabilities, routing, scores


@stand_in
def fused_topk_with_score_function_bwd(*arguments: Any) -> None:
    routing, scores, grad, grad_logits = _tensors(arguments)
    _run("topk_bwd", (grad, routing, scores), (grad_logits,))


# The optimizer


@stand_in
def multi_tensor_l2norm(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, Tensor]:
    (tensors,) = lists
    _run("multi_tensor_l2norm", tensors, checked=(noop,))
    return _empty((1,), torch.float32), _empty((len(tensors) if per_tensor else 0,), torch.float32)


@stand_in
def multi_tensor_scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    sources, targets = lists
    for source, target in zip(sources, targets, strict=True):
        _require(
            source.shape == target.shape,
            f"scaling {tuple(source.shape)} into {tuple(target.shape)}",
        )
    _run("multi_tensor_scale", sources, targets, (noop,))


@stand_in
def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float,
    eps: float, step: int,
    *rest: Any,
) -> None:  # fmt: skip
    gradients, parameters, means, squares = lists
    _require(
        isinstance(step, int) and isinstance(lr, float), f"Adam's step {step!r} or rate {lr!r}"
    )
    for four in zip(gradients, parameters, means, squares, strict=True):
        _require(
            len({tensor.numel() for tensor in four}) == 1, "Adam's tensors have different sizes"
        )
        _require(four[0].dtype is torch.float32, f"Adam's gradient of {four[0].dtype}")
    updated = (*parameters, *means, *squares)
    _run("multi_tensor_adam", (*gradients, *updated), updated, (noop,))
