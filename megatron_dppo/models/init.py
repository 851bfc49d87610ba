"""``megatron-dppo init``: a fresh Qwen3 policy of any size, as a Hugging Face directory."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_dppo.data.vocabulary import END_OF_TEXT, TURN_END, character_tokenizer, train_bpe, write_tokenizer
from megatron_dppo.errors import UserError

DTYPES = {"fp32": (torch.float32, "float32"), "bf16": (torch.bfloat16, "bfloat16")}
MAX_SHARD_BYTES = 4 * 10**9
PUBLISHED_VOCABULARY = 151936
DEFAULT_BPE_VOCABULARY = 4096
MAX_POSITIONS = 40960
ROPE_THETA = 1_000_000.0
RMS_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers that make a Qwen3."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    tie: bool


SIZES = {
    "qwen3-0.6b": Size(1024, 28, 16, 8, 128, 3072, True),
    "qwen3-1.7b": Size(2048, 28, 16, 8, 128, 6144, True),
    "qwen3-4b": Size(2560, 36, 32, 8, 128, 9728, True),
    "qwen3-8b": Size(4096, 36, 32, 8, 128, 12288, False),
    "qwen3-14b": Size(5120, 40, 40, 8, 128, 17408, False),
    "qwen3-32b": Size(5120, 64, 64, 8, 128, 25600, False),
}
"""The published dense models."""


def write_model(
    out: Path,
    *,
    hidden: int = 192,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 48,
    ffn: int = 640,
    vocab_size: int | None = None,
    tie: bool = True,
    tokenizer: Literal["arithmetic", "bpe"] = "arithmetic",
    corpus: Path | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
    seed: int = 1,
    std: float = 0.02,
    shape: str | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> int:
    """Write a randomly initialised Qwen3: configuration, weights, tokenizer, chat template.

    The directory appears whole or not at all, and one shard of weights is in memory at a time. Weights are a function
    of the seed and the sizes, whatever the shards.

    Args:
        out: the directory to make.
        hidden, layers, heads, kv_heads, head_dim, ffn, tie: the model's size; ``shape`` takes their place.
        vocab_size: rows of the embedding; None: as many as the tokenizer needs (a published shape: its own).
            With the ``bpe`` tokenizer, also the size that is trained.
        tokenizer: characters for sums, or a byte-level BPE trained on ``corpus``.
        corpus: JSONL or parquet file whose strings train the BPE.
        dtype: type of the weights in the files.
        std: standard deviation of the initial matrices.
        shape: a published model's name (``qwen3-4b``; ``4b`` will do).
        overwrite: replace a model directory that stands there.

    Returns:
        The number of parameters.

    Raises:
        UserError: for sizes that make no model, a corpus that is missing, a target that exists, a full disk.
    """
    size = _size(shape) if shape else Size(hidden, layers, heads, kv_heads, head_dim, ffn, tie)
    _check(size, std)
    _check_target(out, overwrite)
    vocabulary = character_tokenizer() if tokenizer == "arithmetic" else _train(corpus, vocab_size)
    tokens = vocabulary.get_vocab_size()
    rows = vocab_size or (PUBLISHED_VOCABULARY if shape else tokens)
    if rows < tokens:
        raise UserError("--vocab-size", rows, f"is less than the tokenizer's {tokens} tokens", f"Give {tokens} or more")
    tensors = list(_tensors(size, rows))
    parameters = sum(math.prod(dims) for _, dims in tensors)
    _check_room(out, parameters * DTYPES[dtype][0].itemsize)
    ends = vocabulary.token_to_id(TURN_END), vocabulary.token_to_id(END_OF_TEXT)
    with _whole_or_not_at_all(out) as folder:
        write_tokenizer(vocabulary, folder, max_tokens=MAX_POSITIONS)
        _write_json(folder / "config.json", _config(size, rows, dtype, std, ends))
        _write_json(folder / "generation_config.json", {"eos_token_id": ends[0], "pad_token_id": ends[1]})
        _write_weights(folder, tensors, dtype=DTYPES[dtype][0], seed=seed, std=std, max_shard_bytes=max_shard_bytes)
    return parameters


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo init``."""
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--shape", help=f"a published model's sizes: {', '.join(SIZES)}")
    sizes = parser.add_argument_group("sizes, where no --shape is given (by default a million parameters)")
    sizes.add_argument("--hidden", type=int, default=192)
    sizes.add_argument("--layers", type=int, default=2)
    sizes.add_argument("--heads", type=int, default=4, help="query heads")
    sizes.add_argument("--kv-heads", type=int, default=2, help="key and value heads")
    sizes.add_argument("--head-dim", type=int, default=48)
    sizes.add_argument("--ffn", type=int, default=640, help="width of the feed-forward layer")
    sizes.add_argument("--untied", action="store_true", help="give the output layer a matrix of its own")
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding; default: what the tokenizer needs")
    parser.add_argument("--tokenizer", choices=["arithmetic", "bpe"], default="arithmetic")
    parser.add_argument("--corpus", type=Path, help="JSONL or parquet file whose strings train the BPE tokenizer")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--init-std", dest="std", type=float, default=0.02, help="deviation of the initial matrices")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory that stands there")


def init_from_arguments(arguments: argparse.Namespace) -> None:
    """Make the model that the options describe, and say what was made."""
    options = dict(vars(arguments))
    chosen = {name: options[name] for name in write_model.__kwdefaults__ if name in options}
    parameters = write_model(options["out"], tie=not options["untied"], **chosen)
    print(f"{options['out']}: a fresh Qwen3 of {parameters / 1e6:.2f} million parameters")


def _size(shape: str) -> Size:
    name = shape.lower() if shape.lower().startswith("qwen3-") else f"qwen3-{shape.lower()}"
    if name not in SIZES:
        raise UserError("--shape", shape, "is no dense Qwen3", f"Give one of {', '.join(SIZES)}")
    return SIZES[name]


def _check(size: Size, std: float) -> None:
    for option, value in asdict(size).items():
        if option != "tie" and value < 1:
            raise UserError(f"--{option.replace('_', '-')}", value, "is no size", "Give a positive number")
    if size.heads % size.kv_heads:
        raise UserError("--kv-heads", size.kv_heads, f"does not divide the {size.heads} query heads", "Give a divisor")
    if size.head_dim % 2:
        raise UserError("--head-dim", size.head_dim, "is odd, and rotary positions turn pairs", "Give an even number")
    if not std > 0:
        raise UserError("--init-std", std, "is not positive", "Give 0.02, or a little more for a tiny model")


def _check_target(out: Path, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise UserError("out", out, "exists", "Give another directory, or --overwrite")
    if not (out / "config.json").is_file():
        raise UserError("out", out, "is not a model directory, and is left alone", "Give another directory")


def _check_room(out: Path, needed: int) -> None:
    existing = next(folder for folder in (out.absolute().parent, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed * 1.01 + 2**24:
        raise UserError(
            "out",
            out,
            f"its disk has {free / 1e9:.1f} GB free, and the weights take {needed / 1e9:.1f} GB",
            "Make room, or give a directory on another disk",
        )


@contextlib.contextmanager
def _whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that takes its place once it is complete, and vanishes if it never is."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as made:
            folder = Path(made) / out.name
            folder.mkdir()
            yield folder
            if out.exists():
                shutil.rmtree(out)
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        raise UserError("out", out, f"cannot be written ({error})", "Mend that, or give another directory") from error


def _train(corpus: Path | None, vocab_size: int | None) -> Any:
    if corpus is None:
        raise UserError("--corpus", None, "a BPE tokenizer needs text to be trained on", "Give a JSONL or parquet file")
    return train_bpe(corpus, vocab_size or DEFAULT_BPE_VOCABULARY)


def _config(size: Size, rows: int, dtype: str, std: float, ends: tuple[int, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": rows,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.ffn,
        "tie_word_embeddings": size.tie,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": std,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": RMS_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "use_cache": True,
        "eos_token_id": ends[0],
        "pad_token_id": ends[1],
        "torch_dtype": DTYPES[dtype][1],
    }


def _tensors(size: Size, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of the files."""
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    yield "model.embed_tokens.weight", (rows, size.hidden)
    for layer in range(size.layers):
        for name, dims in (
            ("input_layernorm", (size.hidden,)),
            ("self_attn.q_proj", (queries, size.hidden)),
            ("self_attn.k_proj", (keys, size.hidden)),
            ("self_attn.v_proj", (keys, size.hidden)),
            ("self_attn.o_proj", (size.hidden, queries)),
            ("self_attn.q_norm", (size.head_dim,)),
            ("self_attn.k_norm", (size.head_dim,)),
            ("post_attention_layernorm", (size.hidden,)),
            ("mlp.gate_proj", (size.ffn, size.hidden)),
            ("mlp.up_proj", (size.ffn, size.hidden)),
            ("mlp.down_proj", (size.hidden, size.ffn)),
        ):
            yield f"model.layers.{layer}.{name}.weight", dims
    yield "model.norm.weight", (size.hidden,)
    if not size.tie:
        yield "lm_head.weight", (rows, size.hidden)


def _write_weights(
    folder: Path,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    *,
    dtype: torch.dtype,
    seed: int,
    std: float,
    max_shard_bytes: int,
) -> None:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    held = total = 0
    for name, dims in tensors:
        taken = math.prod(dims) * dtype.itemsize
        if shards[-1] and held + taken > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append((name, dims))
        held += taken
        total += taken
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        made = {name: _fresh(dims, std, generator).to(dtype) for name, dims in shard}
        save_file(made, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(made, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        _write_json(folder / "model.safetensors.index.json", index)


def _fresh(dims: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    """Norms start at one, matrices are normal: Hugging Face's own initialisation of Qwen3."""
    return torch.ones(dims) if len(dims) == 1 else torch.empty(dims).normal_(0.0, std, generator=generator)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
