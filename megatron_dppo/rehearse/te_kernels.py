"""Stand-ins for functions of ``transformer_engine_torch``: outputs of the right shape and type, and booked work.

Shapes, types and argument order follow the C++ sources of Transformer Engine 2.14.1 and 2.20. If the two pass
different numbers among the tensors, a stand-in reads only the tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_dppo.rehearse.booking import tensor_bytes
from megatron_dppo.rehearse.dispatch import RehearsalMode, check_on_device

Tensor = torch.Tensor
DTYPES = {0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
"""Torch types by the compiled module's numbers."""
CUDNN, CUBLAS = 91900, 130100
STAND_INS: dict[str, Callable[..., Any]] = {}
"""All stand-ins by name."""


class WrongCallError(RuntimeError):
    """A kernel received shapes or types that the real kernel rejects."""


class _Work:
    """The mode that stand-ins book into, and the attention pairs of a pack."""

    mode: RehearsalMode
    pairs = 0.0


def begin(mode: RehearsalMode) -> None:
    """Book all later calls into ``mode``."""
    _Work.mode = mode


def set_attention_pairs(pairs: float) -> None:
    """Set Σ n² over the sequences of a pack, divided by cp²: each rank calls attention cp times. Attention FLOPs depend
    on it, and device tensors do not hold it."""
    _Work.pairs = pairs


def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    STAND_INS[function.__name__] = function
    return function


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _Work.mode.empty(shape, dtype, "te")


def _like(*tensors: Tensor) -> list[Tensor]:
    return [_empty(tensor.shape, tensor.dtype) for tensor in tensors]


def _book(
    name: str, size: float, operand: Tensor, output: torch.dtype | None = None, flops: float = 0.0,
    product: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    _Work.mode.book.launch(f"te::{name}", flops, size, operand.dtype, output or operand.dtype, product)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise WrongCallError(problem)


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    return [each for each in arguments if isinstance(each, Tensor)]


def _answer(name: str, value: object) -> None:
    STAND_INS[name] = lambda *args, **kwargs: value


_answer("get_cudnn_version", CUDNN)
_answer("get_cublasLt_version", CUBLAS)
_answer("get_num_cublas_streams", 4)
_answer("get_stream_priority_range", (0, -5))
_answer("device_supports_multicast", True)


# Products


def _sizes(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> tuple[int, int, int]:
    """Rows, columns and inner size of op(b) @ op(a): cuBLAS is column-major."""
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    inner, columns = tuple(a.shape)[::-1] if transpose_a else tuple(a.shape)
    inner_b, rows = tuple(b.shape) if transpose_b else tuple(b.shape)[::-1]
    _require(inner == inner_b, f"product of {tuple(a.shape)} and {tuple(b.shape)}: inner sizes {inner} and {inner_b}")
    _require(a.dtype == b.dtype, f"product of {a.dtype} and {b.dtype}")
    return rows, columns, inner


@stand_in
def generic_gemm(
    A: Tensor, transA: bool, B: Tensor, transB: bool, D: Tensor | None, quantizer: Any, output_dtype: Any,  # noqa: N803
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool, workspace: Tensor, workspace_size: int,
    accumulate: bool, use_split_accumulator: bool, **rest: Any,
) -> list[Tensor | None]:  # fmt: skip
    check_on_device("generic_gemm", A, B, D, bias, workspace)
    rows, columns, inner = _sizes(A, transA, B, transB)
    dtype = A.dtype if output_dtype is None else DTYPES[int(output_dtype)]
    out = _empty((rows, columns) if transB else (*B.shape[:-1], columns), dtype) if D is None else D
    _require(out.numel() == rows * columns, f"product of {rows} x {columns} into {tuple(out.shape)}")
    _require(out.dtype == dtype, f"product of type {dtype} into {out.dtype}")
    size = tensor_bytes(A, B, out) + accumulate * tensor_bytes(out)
    _book("gemm", size, A, dtype, flops=2.0 * rows * columns * inner, product=(rows, columns))
    return [out, _empty((columns,), dtype) if grad and bias is not None else None, None, None]


@stand_in
def te_general_grouped_gemm(
    A: list[Tensor], transA: bool, B: list[Tensor], transB: bool, D: list[Tensor], D_type: Any,  # noqa: N803
    m_splits: Any, bias: Any, bias_type: Any, single_output: bool, pre_gelu_out: Any, grad: bool, workspace: Any,
    workspace_size: int, accumulate: bool, *rest: Any,
) -> Any:  # fmt: skip
    for number, (a, b) in enumerate(zip(A, B, strict=True)):
        out = D[0] if single_output else D[number]
        check_on_device("te_general_grouped_gemm", a, b, out)
        rows, columns, inner = _sizes(a, transA, b, transB)
        if rows and columns and inner:
            written = rows * columns * out.element_size() * (1 + accumulate)
            _book("grouped_gemm", tensor_bytes(a, b) + written, a, out.dtype, flops=2.0 * rows * columns * inner)
    return bias


# Norms and rotary embedding


@stand_in
def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Tensor | None, quantizer: Any, otype: Any, *rest: Any
) -> list[Tensor | None]:
    check_on_device("rmsnorm_fwd", input, weight)
    out = _empty(input.shape, DTYPES[int(otype)]) if ln_out is None else ln_out
    deviations = _empty((input.numel() // input.shape[-1],), torch.float32)
    _book("rmsnorm_fwd", tensor_bytes(input, weight, out, deviations), input)
    return [out, None, deviations]


@stand_in
def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any) -> list[Tensor]:
    check_on_device("rmsnorm_bwd", dz, x, rsigma, gamma)
    made = _like(x, gamma)
    _book("rmsnorm_bwd", tensor_bytes(dz, x, rsigma, gamma, *made), x)
    return made


@stand_in
def rmsnorm_bwd_add(dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any) -> list[Tensor]:
    check_on_device("rmsnorm_bwd_add", dz, x, add, rsigma, gamma)
    made = _like(x, gamma)
    _book("rmsnorm_bwd_add", tensor_bytes(dz, x, add, rsigma, gamma, *made), x)
    return made


@stand_in
def fused_rope_forward(input: Tensor, freqs: Tensor, starts: Any, layout: Any, interleaved: bool, cu_seqlens: Any,
                       *rest: Any) -> Tensor:  # fmt: skip
    check_on_device("fused_rope_forward", input, freqs, cu_seqlens)
    _require(freqs.dtype is torch.float32, f"rotary frequencies of {freqs.dtype}")
    (out,) = _like(input)
    _book("rope_fwd", tensor_bytes(input, out), input)
    return out


@stand_in
def fused_rope_backward(grad: Tensor, freqs: Tensor, *rest: Any) -> Tensor:
    check_on_device("fused_rope_backward", grad, freqs)
    (out,) = _like(grad)
    _book("rope_bwd", tensor_bytes(grad, out), grad)
    return out


# Attention by cuDNN


@stand_in
def get_fused_attn_backend(asked: Any, q_dtype: Any = None, *rest: Any) -> Any:
    compiled: Any = sys.modules["transformer_engine_torch"]
    backends = compiled.NVTE_Fused_Attn_Backend
    number = int(asked.qkv_dtype if q_dtype is None else q_dtype)
    half = DTYPES.get(number) in (torch.float16, torch.bfloat16)
    chosen = backends.NVTE_F16_arbitrary_seqlen if half else backends.NVTE_No_Backend
    return (chosen, "") if q_dtype is None else chosen


@stand_in
def fused_attn_fwd(
    max_q: int, max_kv: int, is_training: bool, scale: float, dropout: float, set_zero: bool, layout: Any, *rest: Any
) -> list[Tensor]:  # fmt: skip
    cu_q, cu_kv, q, k, v, *padded = _tensors(rest)
    check_on_device("fused_attn_fwd", cu_q, cu_kv, q, k, v, *padded)
    _require(cu_q.dtype is torch.int32 and cu_kv.dtype is torch.int32, f"starts of {cu_q.dtype}, {cu_kv.dtype}")
    _require(isinstance(max_q, int) and isinstance(max_kv, int), "the longest sequence is not a number on the host")
    tokens, heads, width = q.shape
    out, stats = _empty((tokens, heads, v.shape[-1]), q.dtype), _empty((tokens, heads, 1), torch.float32)
    if set_zero:
        _book("zeros", tensor_bytes(out), q)
    _book("attention_fwd", tensor_bytes(q, k, v, out, stats), q, flops=2.0 * heads * width * _Work.pairs)
    return [out, stats, _empty((2,), torch.int64)]


@stand_in
def fused_attn_bwd(
    max_q: int, max_kv: int, scale: float, dropout: float, set_zero: bool, layout: Any, *rest: Any
) -> list[Tensor | None]:  # fmt: skip
    cu_q, cu_kv, q, k, v, out, d_out, *padded = _tensors(rest)
    (aux,) = (each for each in rest if isinstance(each, list))
    check_on_device("fused_attn_bwd", cu_q, cu_kv, q, k, v, out, d_out, *aux, *padded)
    made = _like(q, k, v)
    if set_zero:
        _book("zeros", tensor_bytes(*made), q)
    workspace = _empty(q.shape, torch.float32)  # an estimate: cuDNN accumulates the gradient of q in fp32
    size = tensor_bytes(q, k, v, out, d_out, *made, workspace)
    _book("attention_bwd", size, q, flops=5.0 * q.shape[1] * q.shape[2] * _Work.pairs)
    return [*made, None, None]


# Context parallelism


@stand_in
def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half: int) -> Tensor:
    check_on_device("thd_read_half_tensor", tensor, cu_seqlens)
    shape = list(tensor.shape)
    shape[-3] //= 2
    out = _empty(shape, tensor.dtype)
    _book("thd_read_half", 2 * tensor_bytes(out), tensor)
    return out


@stand_in
def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, packed: bool, length: int) -> Tensor:
    shape = (lse.shape[0], lse.shape[1] // 2) if packed else (*lse.shape[:-1], length)
    out = _empty(shape, lse.dtype)
    _book("thd_read_second_half_lse", 2 * tensor_bytes(out), lse)
    return out


@stand_in
def thd_second_half_lse_correction(lse: Tensor, step: Tensor, *rest: Any) -> None:
    _book("thd_lse_correction", tensor_bytes(lse, step), lse)


@stand_in
def thd_out_correction(out: Tensor, step: Tensor, *rest: Any) -> None:
    _book("thd_out_correction", 2 * tensor_bytes(out) + tensor_bytes(step), out)


@stand_in
def thd_grad_correction(grad: Tensor, step: Tensor, *rest: Any) -> None:
    _book("thd_grad_correction", 2 * tensor_bytes(grad) + tensor_bytes(step), grad)


@stand_in
def thd_get_partitioned_indices(cu_seqlens: Tensor, tokens: int, size: int, rank: int) -> Tensor:
    return _empty((tokens // size,), torch.int32)


# Experts


@stand_in
def fused_topk_with_score_function_fwd(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_on_device("fused_topk_with_score_function_fwd", logits)
    probabilities, routing, inner = (_empty(logits.shape, t) for t in (logits.dtype, torch.bool, torch.float32))
    _book("topk_fwd", tensor_bytes(logits, probabilities, routing, inner), logits)
    return probabilities, routing, inner


@stand_in
def fused_topk_with_score_function_bwd(*arguments: Any) -> None:
    routing, inner, grad, grad_logits = _tensors(arguments)
    _book("topk_bwd", tensor_bytes(routing, inner, grad, grad_logits), grad)


# The optimizer


@stand_in
def multi_tensor_l2norm(chunk: int, noop: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, Tensor]:
    (tensors,) = lists
    check_on_device("multi_tensor_l2norm", noop, *tensors)
    _book("multi_tensor_l2norm", tensor_bytes(*tensors), tensors[0])
    return _empty((1,), torch.float32), _empty((len(tensors) if per_tensor else 0,), torch.float32)


@stand_in
def multi_tensor_scale(chunk: int, noop: Tensor, lists: list[list[Tensor]], scale: Any) -> None:
    sources, targets = lists
    check_on_device("multi_tensor_scale", noop, *sources, *targets)
    for source, target in zip(sources, targets, strict=True):
        _require(source.shape == target.shape, f"scaling {tuple(source.shape)} into {tuple(target.shape)}")
    _book("multi_tensor_scale", tensor_bytes(*sources) + tensor_bytes(*targets), sources[0])


@stand_in
def multi_tensor_adam(
    chunk: int, noop: Tensor, lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, eps: float, step: int,
    *rest: Any,
) -> None:  # fmt: skip
    gradients, parameters, means, squares = lists
    check_on_device("multi_tensor_adam", noop, *gradients, *parameters, *means, *squares)
    _require(isinstance(step, int) and isinstance(lr, float), f"Adam's step {step!r} or rate {lr!r}")
    for four in zip(gradients, parameters, means, squares, strict=True):
        _require(len({tensor.numel() for tensor in four}) == 1, "Adam's tensors have different sizes")
        _require(four[0].dtype is torch.float32, f"Adam's gradient of {four[0].dtype}")
    size = tensor_bytes(*gradients) + 2 * tensor_bytes(*parameters, *means, *squares)
    _book("multi_tensor_adam", size, gradients[0])
