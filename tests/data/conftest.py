"""A small tokenizer with a chat template, made once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.init import write_model

Write = Callable[[Sequence[Mapping[str, Any]]], str]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "How many clips did they sell? She sold 48 of them. user assistant system"}))
    out = folder / "policy"
    write_model(out, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16, tokenizer="bpe", corpus=corpus)
    return out


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows as JSONL, return the path."""

    def write_rows(rows: Sequence[Mapping[str, Any]]) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    return write_rows
