"""Measure rates of one GPU that plans assume: matrix products, attention over packs, memory, and
copies to and from the host.

    python benchmarks/gpu_rates.py [--json] [--only attention] [--tokens 8192]
    python benchmarks/gpu_rates.py --tiny

Tensors are in bf16 unless noted. A time is the median of several calls, gaps between kernels
included.

- ``products``: TFLOP/s of each matrix of a layer of Qwen3-8B, and of Qwen3-32B in eight
  tensor-parallel ranks.
- ``attention``: TFLOP/s of Transformer Engine's attention over a pack (THD) of 12 causal segments,
  32 heads and 8 key-value heads of 128, forward and backward. Only pairs of tokens within a
  segment's triangle are counted.
- ``memory``: GB/s of an addition in float32, three bytes moved for each byte of the result.
- ``host``: GB/s of copies of 8 GiB from pinned memory and back.

``megatron-dppo plan`` assumes fractions of the data sheet's rates: 0.72 for products, 0.40 and 0.30
for attention, 0.85 for memory.

``--tiny`` tests the script in small sizes, on a CPU without attention. Without CUDA, the exit code
is 2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from harness import arguments, finish, median_seconds

from megatron_dppo.models.shape import PUBLISHED, PolicyShape

PARTS = ("products", "attention", "memory", "host")
SPLITS = {"qwen3-8b": 1, "qwen3-32b": 8}
"""Tensor-parallel ranks of each policy."""
HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
SEGMENTS = 12


def seconds_on(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        return median_seconds(work, torch.cuda.synchronize)
    return median_seconds(work)


def matrices(shape: PolicyShape, tp: int) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of a layer's products on one of ``tp`` ranks."""
    heads = shape.heads * shape.head_dim // tp
    kv = shape.kv_heads * shape.head_dim // tp
    ffn = shape.ffn // tp
    return {
        "qkv": (shape.hidden, heads + 2 * kv),
        "out": (heads, shape.hidden),
        "up": (shape.hidden, 2 * ffn),
        "down": (ffn, shape.hidden),
    }


def measure_products(tokens: int, device: torch.device, scale: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, tp in SPLITS.items():
        for matrix, (inputs, outputs) in matrices(PUBLISHED[name], tp).items():
            rows = inputs // scale
            columns = outputs // scale
            a = torch.randn(tokens, rows, device=device, dtype=torch.bfloat16)
            b = torch.randn(rows, columns, device=device, dtype=torch.bfloat16)
            seconds = seconds_on(device, partial(torch.matmul, a, b))
            tflops = 2e-12 * tokens * rows * columns / seconds
            found.setdefault(f"{name}-tp{tp}", {})[matrix] = tflops
    return found


def measure_attention(tokens: int, device: torch.device) -> dict[str, float]:
    from transformer_engine.pytorch import DotProductAttention

    attention = DotProductAttention(
        HEADS, HEAD_DIM, num_gqa_groups=KV_HEADS, qkv_format="thd", attn_mask_type="padding_causal"
    )
    ends = torch.linspace(0, tokens, SEGMENTS + 1, device=device).to(torch.int32)
    longest = int((ends[1:] - ends[:-1]).max())

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(
            tokens, heads, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True
        )

    given = {
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    q, k, v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    forward = partial(attention, q, k, v, **given)
    with torch.no_grad():
        forward_s = seconds_on(device, forward)
    both_s = seconds_on(device, lambda: forward().sum().backward())
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in (q, k, v))
    pairs = float(((ends[1:] - ends[:-1]).double() ** 2).sum()) / 2
    flops = 4e-12 * HEADS * HEAD_DIM * pairs
    return {"forward": flops / forward_s, "backward": 2.5 * flops / (both_s - forward_s)}


def measure_memory(device: torch.device, scale: int) -> dict[str, float]:
    a, b = (torch.ones(2**28 // scale, device=device) for _ in range(2))
    seconds = seconds_on(device, partial(torch.add, a, b, out=a))
    return {"add": 3e-9 * a.nbytes / seconds}


def measure_host(device: torch.device, scale: int) -> dict[str, float]:
    host = torch.empty(2**33 // scale, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    copies = {"to_gpu": partial(there.copy_, host), "from_gpu": partial(host.copy_, there)}
    return {name: 1e-9 * host.nbytes / seconds_on(device, copy) for name, copy in copies.items()}


def main() -> None:
    parser = arguments(
        __doc__, tokens=(8192, "of a pack"), tiny=(False, "small sizes, on a CPU too")
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        print(
            "gpu_rates.py needs CUDA, and torch sees none; --tiny shows on a CPU that it works",
            file=sys.stderr,
        )
        raise SystemExit(2)
    device = torch.device("cuda" if cuda else "cpu")
    scale = 64 if options.tiny else 1
    tokens = options.tokens // scale
    parts: dict[str, Callable[[], object]] = {
        "products": partial(measure_products, tokens, device, scale),
        "attention": partial(measure_attention, tokens, device),
        "memory": partial(measure_memory, device, scale),
        "host": partial(measure_host, device, scale),
    }
    wanted = [part for part in PARTS if cuda or part != "attention"]
    if options.only:
        wanted = [options.only]
    figures = {part: parts[part]() for part in wanted}
    device_name = torch.cuda.get_device_name() if cuda else "cpu"
    finish({"device": device_name, "torch": torch.__version__, **figures}, options)


if __name__ == "__main__":
    main()
