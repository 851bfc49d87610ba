"""``megatron-dppo init``: a new policy of any family and size, as a Hugging Face directory.

Both tokenizers, characters of sums or a byte-level BPE, have the byte-level alphabet of Qwen's, so
that all loaders of Qwen3 read them.
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_dppo.bridge.chunks import TYPES, FilePlan, create_files, tensor_bytes
from megatron_dppo.bridge.hf_directory import MAX_SHARD_BYTES, MODEL, plan_files, write_index
from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.config import DTYPES, ModelConfig
from megatron_dppo.data.rows import iter_strings, read_rows
from megatron_dppo.errors import UserError
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.shape import PUBLISHED, PolicyShape
from megatron_dppo.process.files import check_replaceable, write_directory, write_json

DEFAULT_BPE_VOCABULARY = 4096
MAX_POSITIONS = 40960
ROPE_THETA = 1_000_000.0
RMS_EPS = 1e-6
ARCHITECTURES = {
    family.model_type.removesuffix("_text"): name
    for name, family in FAMILIES.items()
    if not family.text_config
}


def write_model(
    out: Path,
    *,
    family: str | None = None,
    hidden: int = 192,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 48,
    ffn: int = 640,
    experts: int = 0,
    experts_per_token: int = 2,
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
    """Write a randomly initialised policy: configuration, weights, tokenizer, chat template.

    The directory is written atomically, with one tensor in memory at a time.

    Args:
        out: directory to make.
        family: ``model_type``; None: ``qwen3``, with experts ``qwen3_moe``.
        hidden, layers, heads, kv_heads, head_dim, ffn, tie: size, unless ``shape``.
        experts, experts_per_token: numbers of experts, each of width ``ffn``; 0: dense.
        vocab_size: rows of the embedding, and size of a trained ``bpe``; None: the tokenizer's (for
            a published shape, the shape's).
        tokenizer, corpus: characters for sums, or a byte-level BPE trained on the strings of a
            JSONL or parquet file.
        dtype, std: dtype of stored weights; deviation of initial matrices.
        seed: random seed. Seed and sizes determine the weights.
        shape: published model (``qwen3-4b`` or ``4b``).
        overwrite: replace an existing model directory.

    Returns:
        Number of parameters.

    Raises:
        UserError: if the sizes make no model, the corpus is missing, the target exists, or the disk
            is full.
    """
    family = family or ("qwen3_moe" if experts else "qwen3")
    if family not in ARCHITECTURES:
        raise UserError(
            "--family", family, "is no supported family", f"Give one of {', '.join(ARCHITECTURES)}"
        )
    sizes = (
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn,
        0,
        tie,
        ROPE_THETA,
        RMS_EPS,
        MAX_POSITIONS,
    )
    size = PolicyShape(*sizes, ARCHITECTURES[family], experts, experts_per_token if experts else 0)
    # Ratios of the published hybrid models, with linear attention in three of four layers.
    if "attention_interval" in size.family.keys:
        size = replace(
            size,
            attention_interval=min(4, layers),
            rotary_fraction=0.25,
            delta_keys=heads,
            delta_values=2 * heads,
            delta_key_dim=head_dim // 2,
            delta_value_dim=head_dim // 2,
            delta_taps=4,
        )
    if "shared_ffn" in size.family.keys:
        size = replace(size, shared_ffn=ffn)
    if shape:
        size = _get_published_shape(shape)
    _check(size, std)
    # Check the folder before the tokenizer is trained, and the room on the disk when the size is
    # known.
    check_replaceable(out, 0, "out", MODEL, overwrite=overwrite)
    vocabulary = (
        build_character_tokenizer()
        if tokenizer == "arithmetic"
        else _train_tokenizer(corpus, vocab_size)
    )
    size = replace(
        size, vocab_size=_resolve_rows(vocab_size or size.vocab_size, vocabulary.get_vocab_size())
    )
    plan = plan_files(size, ModelConfig(dtype=dtype).torch_dtype, max_shard_bytes)
    check_replaceable(out, plan.total_bytes, "out", MODEL)
    with write_directory(out, "out") as folder:
        write_tokenizer(vocabulary, folder, max_tokens=MAX_POSITIONS)
        _write_config(folder, size, plan.dtype, std, vocabulary)
        _write_weights(folder, plan, size, seed=seed, std=std)
    return count_parameters(size)


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="directory to make")
    parser.add_argument("--shape", help=f"a published model's sizes: {', '.join(PUBLISHED)}")
    parser.add_argument(
        "--family",
        help=f"one of {', '.join(ARCHITECTURES)}; default: qwen3, with --experts qwen3_moe",
    )
    sizes = parser.add_argument_group(
        "sizes, where no --shape is given (by default a million parameters)"
    )
    sizes.add_argument("--hidden", type=int, default=192, help="hidden size (default: %(default)s)")
    sizes.add_argument("--layers", type=int, default=2, help="(default: %(default)s)")
    sizes.add_argument("--heads", type=int, default=4, help="query heads (default: %(default)s)")
    sizes.add_argument(
        "--kv-heads", type=int, default=2, help="key and value heads (default: %(default)s)"
    )
    sizes.add_argument(
        "--head-dim", type=int, default=48, help="size of each head (default: %(default)s)"
    )
    sizes.add_argument(
        "--ffn",
        type=int,
        default=640,
        help="width of the feed-forward layer (default: %(default)s)",
    )
    sizes.add_argument(
        "--experts", type=int, default=0, help="in every layer, of a family with experts"
    )
    sizes.add_argument("--experts-per-token", type=int, default=2)
    sizes.add_argument(
        "--untied", action="store_true", help="give the output layer a separate matrix"
    )
    parser.add_argument(
        "--vocab-size", type=int, help="rows of the embedding; default: what the tokenizer needs"
    )
    parser.add_argument("--tokenizer", choices=["arithmetic", "bpe"], default="arithmetic")
    parser.add_argument(
        "--corpus", type=Path, help="JSONL or parquet file whose strings train the BPE tokenizer"
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument(
        "--init-std", dest="std", type=float, default=0.02, help="deviation of the initial matrices"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing model directory"
    )


def init_from_arguments(arguments: argparse.Namespace) -> None:
    """Make the model, and print the size."""
    options = dict(vars(arguments))
    chosen = {
        name: options[name] for name in inspect.signature(write_model).parameters if name in options
    }
    parameters = write_model(**chosen, tie=not options["untied"])
    print(f"{options['out']}: a fresh policy of {parameters / 1e6:.2f} million parameters")


def _get_published_shape(shape: str) -> PolicyShape:
    name = shape.lower() if shape.lower() in PUBLISHED else f"qwen3-{shape.lower()}"
    if name not in PUBLISHED:
        raise UserError(
            "--shape", shape, "is no published model", f"Give one of {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


def _resolve_rows(requested: int, tokens: int) -> int:
    """Return the rows of the embedding for ``tokens`` tokens; 0 means ``tokens``."""
    if requested and requested < tokens:
        problem = f"is less than the tokenizer's {tokens} tokens"
        raise UserError("--vocab-size", requested, problem, f"Give {tokens} or more")
    return requested or tokens


def _check(size: PolicyShape, std: float) -> None:
    for name in ("hidden", "num_layers", "heads", "kv_heads", "head_dim", "ffn"):
        if (value := getattr(size, name)) < 1:
            option = f"--{name.removeprefix('num_').replace('_', '-')}"
            raise UserError(option, value, "is no size", "Give a positive number")
    if size.heads % size.kv_heads:
        raise UserError(
            "--kv-heads",
            size.kv_heads,
            f"does not divide the {size.heads} query heads",
            "Give a divisor",
        )
    # A quarter of the head must be a whole number of pairs.
    if size.rotary_fraction < 1 and (size.head_dim % 8 or size.num_layers < 2):
        problem = (
            f"{size.family.model_type} turns a quarter of each head, and has attention in "
            "its last layer alone"
        )
        raise UserError(
            "--head-dim", size.head_dim, problem, "Give a multiple of 8, and two --layers or more"
        )
    if size.head_dim % 2:
        raise UserError(
            "--head-dim",
            size.head_dim,
            "is odd, and rotary positions turn pairs",
            "Give an even number",
        )
    if bool(size.experts) != ("experts" in size.family.keys):
        kind = "without experts" if size.experts else "with experts"
        problem = f"and {size.family.model_type} is a family {kind}"
        remedy = "Give 4, for instance"
        if size.experts:
            remedy = "Give another --family, or leave it out"
        raise UserError("--experts", size.experts, problem, remedy)
    if size.experts and not 0 < size.experts_per_token <= size.experts:
        problem = f"a token cannot go to so many of {size.experts} experts"
        raise UserError(
            "--experts-per-token", size.experts_per_token, problem, f"Give 1 to {size.experts}"
        )
    if not std > 0:
        raise UserError(
            "--init-std", std, "is not positive", "Give 0.02, or a little more for a tiny model"
        )


def _train_tokenizer(corpus: Path | None, vocab_size: int | None) -> Any:
    if corpus is None:
        raise UserError(
            "--corpus",
            None,
            "a BPE tokenizer needs text to be trained on",
            "Give a JSONL or parquet file",
        )
    return train_bpe(corpus, vocab_size or DEFAULT_BPE_VOCABULARY)


def _write_config(
    folder: Path,
    size: PolicyShape,
    dtype: torch.dtype,
    std: float,
    vocabulary: Tokenizer,
) -> None:
    ends = {
        "eos_token_id": vocabulary.token_to_id(TURN_END),
        "pad_token_id": vocabulary.token_to_id(END_OF_TEXT),
    }
    config = {
        **size.as_config(),
        "attention_dropout": 0.0,
        "initializer_range": std,
        "sliding_window": None,
        "use_cache": True,
        **ends,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ends)


def _write_weights(
    folder: Path,
    plan: FilePlan[str],
    shape: PolicyShape,
    *,
    seed: int,
    std: float,
) -> None:
    """Write weights as Hugging Face initialises: norms one, biases zero, matrices normal.

    In gated delta networks, decays are Hugging Face's and taps torch's.
    """
    generator = torch.Generator().manual_seed(seed)
    # A norm centred at zero stores its weight minus one.
    zeros = (
        ("norm.weight", ".bias")
        if shape.family.megatron.get("layernorm_zero_centered_gamma")
        else (".bias",)
    )
    with create_files(plan, folder) as write:
        for name, place in plan.places.items():
            size = place.shape
            tensor = torch.full(
                size, 0.0 if name.endswith(zeros) and "linear_attn" not in name else 1.0
            )
            if name.endswith("A_log"):
                tensor.uniform_(0.01, 16.0, generator=generator).log_()
            elif name.endswith("conv1d.weight"):
                bound = size[-1] ** -0.5
                tensor.uniform_(-bound, bound, generator=generator)
            elif len(size) > 1:
                tensor.normal_(0.0, std, generator=generator)
            write(name, [tensor_bytes(tensor.to(TYPES[place.dtype]))])
    write_index(folder, plan)


END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
UNKNOWN = "<|unknown|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)
# With specials 48 tokens, divisible by 16 ranks.
SUM_CHARACTERS = "0123456789+-*/=#\n abcdefghijklmnopqrstuvwxyz"
"""Characters of sums and of a chat template's roles."""

# Every digit is a token, which makes arithmetic learnable.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build_character_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token per character, and ``<|unknown|>`` per other byte."""
    to_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [to_byte_level.pre_tokenize_str(character)[0][0] for character in SUM_CHARACTERS]
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, UNKNOWN, *characters])}
    return _configure_tokenizer(
        Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN)), specials=(*SPECIALS, UNKNOWN)
    )


def train_bpe(corpus: Path, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of at most ``vocab_size`` tokens on a file's strings.

    Raises:
        UserError: if the corpus cannot be read, or ``vocab_size`` is less than the 256 bytes and
            the special tokens.
    """
    least = 256 + len(SPECIALS)
    if vocab_size < least:
        raise UserError(
            "--vocab-size", vocab_size, "is too small for byte-level BPE", f"Give {least} or more"
        )
    tokenizer = _configure_tokenizer(Tokenizer(models.BPE()), specials=())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = read_rows(str(corpus), "--corpus")
    # The trainer's error on half a character would name no row.
    for row in rows:
        for column, value in row.values.items():
            row.check_strings(value, column)
    tokenizer.train_from_iterator(
        (text for row in rows for text in iter_strings(row.values)), trainer
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    ``max_tokens`` is the length of the model's longest sequence.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": UNKNOWN if tokenizer.token_to_id(UNKNOWN) is not None else None,
        "additional_special_tokens": list(SPECIALS),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _configure_tokenizer(tokenizer: Tokenizer, *, specials: tuple[str, ...]) -> Tokenizer:
    # No normaliser: with a normaliser, decoding would not restore the encoded text.
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    return tokenizer
