"""Rows of a large file are stored once with their tokens, and equal the rows in memory."""

import datetime
import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dppo.config import DataConfig
from megatron_dppo.config.rollout import SourceConfig
from megatron_dppo.data import stored
from megatron_dppo.data.prompts import (
    LabelCheck,
    PromptPool,
    load_prompts,
    load_supervised_examples,
)
from megatron_dppo.data.tokenizer import Tokenizer
from tests.data.conftest import Load, Refuse

ROWS: list[dict[str, Any]] = [
    {"prompt": "How many clips?", "label": "48", "extra_info": {"index": 7}},
    {"prompt": [{"role": "user", "content": "And\u2028then?"}], "label": 3.0, "data_source": "ö"},
    {"prompt": "How many clips did they sell, all of them together? " * 4, "label": "too long"},
    {"prompt": "She?", "label": ["4", "8"], "metadata": {"a": [1, {"b": None}]}},
]
TYPED = [
    {
        "prompt": "a",
        "label": Decimal("4.50"),
        "day": datetime.date(2026, 11, 24),
        "kind": "x",
        "raw": b"\xff",
    },
    {"prompt": "b", "label": Decimal("5.00"), "day": None, "kind": "y", "raw": b""},
    {"prompt": "c", "label": Decimal("6.00"), "day": None, "kind": "x", "raw": None},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv(stored.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "prompts"


@pytest.fixture
def be_large(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Take every file for a large one, of more than one batch of rows, from the call on."""

    def take_for_large() -> None:
        monkeypatch.setattr(stored, "LARGE", 0)
        monkeypatch.setattr(stored, "BATCH", 2)

    return take_for_large


@pytest.fixture
def large(be_large: Callable[[], None]) -> None:
    be_large()


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    if file.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(list(rows))
        kinds = table["kind"].dictionary_encode()
        pyarrow.parquet.write_table(
            table.set_column(table.column_names.index("kind"), "kind", kinds), file
        )
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        file.write_text(
            "\n".join(["", *lines]) + "\n", encoding="utf-8"
        )  # the blank line counts in places
    return str(file)


def entries(cache: Path) -> list[Path]:
    return sorted(entry for entry in cache.iterdir() if entry.is_dir())


def fields(pool: PromptPool) -> list[tuple[object, ...]]:
    names = ("id", "text", "label", "data_source", "extra", "raw_prompt", "place")
    rows = [
        (*(getattr(p, name) for name in names), p.token_ids.dtype, p.token_ids.tolist())
        for p in pool
    ]
    return [*rows, (pool.dropped, [(len(source.items), source.weight) for source in pool.sources])]


def test_stored_prompts_equal_those_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path, be_large: Callable[[], None]
) -> None:
    """Of a file of lines, a parquet file, a folder, and two sources."""
    (folder := tmp_path / "rows").mkdir()
    for name, rows in (("b.parquet", TYPED), ("a.parquet", TYPED[:1])):
        write(folder / name, rows)
    files = [
        write(tmp_path / f"{name}.jsonl", [{"q": f"{name}{i}", "label": "1"} for i in range(3)])
        for name in "ab"
    ]
    sources = (
        SourceConfig(path=files[0], prompt_key="q"),
        SourceConfig(path=files[1], weight=2, prompt_key="q"),
    )
    cases = [
        DataConfig(
            train=write(tmp_path / "rows.jsonl", ROWS),
            max_prompt_tokens=64,
            overlong_prompts="drop",
        ),
        DataConfig(train=write(tmp_path / "rows.parquet", TYPED), system="Hi"),
        DataConfig(train=str(folder)),
        DataConfig(train=sources, chat_template=False),
    ]
    in_memory = [load_prompts(data, tokenizer, split="train") for data in cases]
    assert [(len(pool), pool.dropped) for pool in in_memory] == [(3, 1), (3, 0), (4, 0), (6, 0)]
    assert [prompt.id for prompt in in_memory[3]] == [*range(6)], "over both sources"
    assert not cache.exists()
    be_large()
    for _ in range(2):  # made, and read again
        for data, expected in zip(cases, in_memory, strict=True):
            pool = load_prompts(data, tokenizer, split="train")
            assert fields(pool) == fields(expected)
    assert [prompt.text for prompt in pool] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert len(entries(cache)) == 5


def test_stored_worked_answers_equal_those_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, be_large: Callable[[], None]
) -> None:
    rows = [
        {"prompt": "a", "label": "48"},
        {"prompt": "How many?", "label": "She sold 48 of them."},
    ]
    data = DataConfig(train=write(tmp_path / "rows.jsonl", rows))
    in_memory = load_supervised_examples(data, tokenizer)
    be_large()
    stored_answers = load_supervised_examples(data, tokenizer)
    for answers in (in_memory, stored_answers):
        assert answers.longest == len(answers[1].prompt_ids) + len(answers[1].response_ids)
    for ours, theirs in zip(in_memory, stored_answers, strict=True):
        assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()


@pytest.mark.usefixtures("large")
def test_an_entry_depends_on_file_tokenizer_and_settings(
    load: Load, tokenizer: Tokenizer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, looked = tmp_path / "rows.jsonl", []
    write(file, [{"prompt": "a", "label": "1", "other": "2", "question": "b"}])
    settings = {
        "system": "Be brief.",
        "chat_template": False,
        "date": "2026-01-31",
        "label_key": "other",
        "prompt_key": "question",
        "max_prompt_tokens": 99,
        "overlong_prompts": "drop",
    }
    load(file)
    for number, (name, value) in enumerate(settings.items(), 2):
        load(file, **{name: value})
        assert len(entries(cache)) == number, name
    file = file.rename(tmp_path / "other.jsonl")
    assert load(file)[0].place == f"{file}, line 2"
    assert len(entries(cache)) == number
    check = LabelCheck("other", lambda labels: looked.extend(place for place, _ in labels))
    for _ in range(2):
        load_prompts(DataConfig(train=str(file)), tokenizer, split="train", check=check)
    assert len(looked) == 1
    write(file, [{"prompt": "c", "label": "1"}])
    assert "c" in load(file)[0].text
    changed = tmp_path / "tokenizer_config.json"
    monkeypatch.setattr(stored, "list_tokenizer_files", lambda _: [changed])
    for content in ("{}", "{ }"):
        changed.write_text(content)
        load(file)
    assert len(entries(cache)) == number + 4


@pytest.mark.usefixtures("large")
def test_a_damaged_entry_is_made_again(load: Load, tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    before = fields(load(file, max_prompt_tokens=999))
    rows = entries(cache)[0] / stored.ROWS
    rows.write_bytes(rows.read_bytes().replace(b'"48"', b'"49"'))
    assert fields(load(file, max_prompt_tokens=999)) == before
    rows.unlink()
    assert fields(load(file, max_prompt_tokens=999)) == before


@pytest.mark.usefixtures("large")
def test_an_entry_waits_for_its_writer_and_replaces_a_killed_ones_draft(
    load: Load,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lock of a draft in the making is held, that of a killed process is free."""
    file = write(tmp_path / "rows.jsonl", ROWS[:2])
    before = fields(load(file))
    (entry,) = entries(cache)
    draft = cache / f".{entry.name}.writing"
    entry.rename(draft)
    held = os.open(draft, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    monkeypatch.setattr(stored.time, "sleep", lambda seconds: fcntl.flock(held, fcntl.LOCK_UN))
    assert fields(load(file)) == before
    assert "waiting for another process that tokenises" in capsys.readouterr().err
    assert entries(cache) == [entry]
    os.close(held)


@pytest.mark.usefixtures("large")
def test_an_unusable_cache_is_named(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS[:1])
    monkeypatch.setenv(stored.CACHE, file)
    assert refuse(file, "cannot keep what is made of").setting == stored.CACHE


@pytest.mark.parametrize("size", [stored.LARGE, 0], ids=["in memory", "stored"])
def test_held_out_problems_in_the_training_data_are_counted(
    size: int, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "LARGE", size)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How  many?\n"}]
    train, other, held_out = (
        write(
            tmp_path / f"{number}.jsonl", [{"prompt": prompt, "label": "1"} for prompt in prompts]
        )
        for number, prompts in enumerate(
            (["a", "b", "c d"], [chat], ["c", " How many? ", "c\n d", "A"])
        )
    )
    data = DataConfig(train=(SourceConfig(path=train), SourceConfig(path=other)), eval=held_out)
    pool, eval_pool = (load_prompts(data, tokenizer, split=split) for split in ("train", "eval"))
    assert pool.find_overlap(list(eval_pool)) == (2, f"{held_out}, line 3 is {other}, line 2")
