"""Tokenizers for fresh policies, in Hugging Face's files: characters for sums, or a byte-level BPE trained on a corpus.

Both stand on the byte-level alphabet of Qwen's own tokenizer, so that every loader that knows Qwen3 reads them alike.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_dppo.data.rows import read_rows, strings
from megatron_dppo.errors import UserError

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
UNKNOWN = "<|unknown|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)
SUM_CHARACTERS = "0123456789+-*/=#\n abcdefghijklmnopqrstuvwxyz"
"""Characters of sums, and the letters of a chat template's roles: 48 tokens with the specials, which 16 ranks
divide."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's pre-tokenizer. Every digit is a token of its own, which is what makes arithmetic learnable."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML, as Qwen writes it."""


def character_tokenizer() -> Tokenizer:
    """One token for each character that sums are written in; any other is one visible ``<|unknown|>`` for each byte."""
    to_byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [to_byte_level.pre_tokenize_str(character)[0][0] for character in SUM_CHARACTERS]
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, UNKNOWN, *characters])}
    return _dressed(Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN)), specials=(*SPECIALS, UNKNOWN))


def train_bpe(corpus: Path, vocab_size: int) -> Tokenizer:
    """A byte-level BPE of up to ``vocab_size`` tokens, from every string in a JSONL or parquet file.

    Raises:
        UserError: if the corpus cannot be read, or the vocabulary cannot hold the 256 bytes and the special tokens.
    """
    least = 256 + len(SPECIALS)
    if vocab_size < least:
        raise UserError("--vocab-size", vocab_size, "is too small for byte-level BPE", f"Give {least} or more")
    tokenizer = _dressed(Tokenizer(models.BPE()), specials=())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rows = read_rows(str(corpus), "--corpus")
    for row in rows:
        for column, value in row.values.items():
            row.check_strings(value, column)
    tokenizer.train_from_iterator((text for row in rows for text in strings(row.values)), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    Args:
        tokenizer: one of the above.
        folder: an existing directory.
        max_tokens: longest sequence of the model, in tokens.
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
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _dressed(tokenizer: Tokenizer, *, specials: tuple[str, ...]) -> Tokenizer:
    # No normaliser: with one, decoding would not give back the text that was encoded.
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer
