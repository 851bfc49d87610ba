"""Tokenizers of a small policy, and files of rows that are loaded with them."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from megatron_dppo.config import DataConfig
from megatron_dppo.data.prompts import PromptPool, load_prompts
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.init import write_model

Write = Callable[[Sequence[Mapping[str, Any] | str]], str]
Load = Callable[..., PromptPool]
Refuse = Callable[..., UserError]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        json.dumps(
            {"text": "How many clips did they sell? She sold 48 of them. user assistant system"}
        )
    )
    out = folder / "policy"
    write_model(
        out,
        hidden=16,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        ffn=16,
        tokenizer="bpe",
        corpus=corpus,
    )
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
"""As Qwen3's: tools in a message of the system, and all their consecutive answers in a message of
the user."""


@pytest.fixture
def calling(model: Path, tmp_path: Path) -> Tokenizer:
    """A tokenizer whose template knows tools."""
    folder = tmp_path / "calling"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return load_tokenizer(folder)


@pytest.fixture
def framed(model: Path, tmp_path: Path) -> Tokenizer:
    """A tokenizer that puts tokens before and behind text, as Llama's and T5's do."""
    folder = shutil.copytree(model, tmp_path / "framed")
    file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = [(mark, file.token_to_id(mark)) for mark in ("<|endoftext|>", "<|im_end|>")]
    frame = "<|endoftext|> $A <|im_end|>"
    file.post_processor = tokenizers.processors.TemplateProcessing(
        single=frame, special_tokens=marks
    )
    file.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows, or lines as they are, to a JSONL file. Returns its path."""

    def write_rows(rows: Sequence[Mapping[str, Any] | str]) -> str:
        file = tmp_path / "rows.jsonl"
        lines = [
            row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows
        ]
        file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(file)

    return write_rows


def write_parquet(file: Path, **columns: Any) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file


@pytest.fixture
def load(tokenizer: Tokenizer, write: Write) -> Load:
    """Load the prompts of a file, or of rows that are written to a file first."""

    def load_file(
        source: str | Path | Sequence[Mapping[str, Any] | str],
        by: Tokenizer = tokenizer,
        split: Any = "train",
        **data: Any,
    ) -> PromptPool:
        file = str(source) if isinstance(source, str | Path) else write(source)
        return load_prompts(DataConfig(**{split: file} | data), by, split=split)

    return load_file


@pytest.fixture
def refuse(load: Load) -> Refuse:
    """Load what has to be refused with all these words. Returns the error."""

    def refuse_file(source: Any, *words: str, **data: Any) -> UserError:
        with pytest.raises(UserError) as caught:
            load(source, **data)
        assert all(word in str(caught.value) for word in words), caught.value
        str(caught.value).encode()  # as a terminal would print the error
        return caught.value

    return refuse_file
