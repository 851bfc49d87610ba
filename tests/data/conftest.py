"""A small tokenizer with a chat template, made once."""

from __future__ import annotations

import json
import shutil
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


TOOLS_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\n# Tools\n\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}{{- '\n</tools>\n\nCall them as ' }}
{{- '<tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen3's: tools in a message of the system, and what they answered, one after the other, in one of the user."""


@pytest.fixture
def calling(model: Path, tmp_path: Path) -> Tokenizer:
    """With a template that knows tools."""
    folder = tmp_path / "calling"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return load_tokenizer(folder)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows as JSONL, return the path."""

    def write_rows(rows: Sequence[Mapping[str, Any]]) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    return write_rows
