"""Rows of a large file are stored once with their tokens, and are then what they would be in memory."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import threading
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_dppo.config import DataConfig
from megatron_dppo.config.rollout import SourceConfig
from megatron_dppo.data import prompts, stored
from megatron_dppo.data.examples import sources_of
from megatron_dppo.data.prompts import LabelCheck, PromptPool, load_prompts, load_worked_answers
from megatron_dppo.data.rows import Row
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"prompt": "How many clips?", "label": "48", "extra_info": {"index": 7}},
    {"prompt": [{"role": "user", "content": "And\u2028then?"}], "label": 3.0, "data_source": "ö"},
    {"prompt": "How many clips did they sell, all of them together? " * 4, "label": "too long"},
    {"prompt": "She?", "label": ["4", "8"], "metadata": {"a": [1, {"b": None}]}},
]
TYPED = [
    {"prompt": "a", "label": Decimal("4.50"), "day": datetime.date(2026, 11, 24), "kind": "x", "raw": b"\xff"},
    {"prompt": "b", "label": Decimal("5.00"), "day": None, "kind": "y", "raw": b""},
    {"prompt": "c", "label": Decimal("6.00"), "day": None, "kind": "x", "raw": None},
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv(stored.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "prompts"


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a large one, and more than one batch of rows."""
    monkeypatch.setattr(stored, "LARGE", 0)
    monkeypatch.setattr(stored, "BATCH", 2)


def write(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    if file.suffix == ".parquet":
        table = pyarrow.Table.from_pylist(list(rows))
        kinds = table["kind"].dictionary_encode()
        pyarrow.parquet.write_table(table.set_column(table.column_names.index("kind"), "kind", kinds), file)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        file.write_text("\n".join(["", *lines]) + "\n", encoding="utf-8")  # the blank line counts in places
    return str(file)


def entries(cache: Path) -> list[Path]:
    return sorted(entry for entry in cache.iterdir() if entry.is_dir())


def fields(pool: PromptPool) -> list[tuple[object, ...]]:
    of = ("id", "text", "label", "data_source", "extra", "asked", "place")
    return [(*(getattr(p, name) for name in of), p.token_ids.dtype, p.token_ids.tolist()) for p in pool]


@pytest.mark.parametrize(("name", "rows"), [("rows.jsonl", ROWS), ("rows.parquet", TYPED)])
def test_stored_prompts_are_those_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: list[Any]
) -> None:
    data = DataConfig(train=write(tmp_path / name, rows), max_prompt_tokens=64, overlong_prompts="drop", system="Hi")
    in_memory = load_prompts(data, tokenizer, split="train")
    assert not cache.exists()
    monkeypatch.setattr(stored, "LARGE", 0)
    monkeypatch.setattr(stored, "BATCH", 2)
    for _ in range(2):  # made, and read again
        pool = load_prompts(data, tokenizer, split="train")
        assert fields(pool) == fields(in_memory) and pool.dropped == in_memory.dropped
    assert len(entries(cache)) == 1
    assert (name, pool.dropped, len(pool)) in (("rows.jsonl", 1, 3), ("rows.parquet", 0, 3))


def test_stored_prompts_of_a_folder_are_those_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "rows").mkdir()
    for name, rows in (("b.parquet", TYPED), ("a.parquet", TYPED[:1])):
        write(folder / name, rows)
    data = DataConfig(train=str(folder))
    in_memory = load_prompts(data, tokenizer, split="train")
    monkeypatch.setattr(stored, "LARGE", 0)
    pool = load_prompts(data, tokenizer, split="train")
    assert fields(pool) == fields(in_memory) and len(pool) == 4 and len(entries(cache)) == 1
    for name, rows in (("c.jsonl", ROWS[:2]), ("c.parquet", [{"prompt": "a", "label": "b", "kind": 1}])):
        write(folder / name, rows)
        with pytest.raises(UserError, match=f"{folder / name}: is of another kind than {folder / 'a.parquet'}, or has"):
            load_prompts(data, tokenizer, split="train")
        (folder / name).unlink()


@pytest.mark.usefixtures("large")
def test_the_tokenizer_is_loaded_once_for_all_batches(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(train=write(tmp_path / "rows.jsonl", ROWS[:2] * 4), chat_template=True)
    loaded: list[Tokenizer] = []

    def load(path: Path) -> Tokenizer:
        loaded.append(load_tokenizer(path))
        return loaded[-1]

    monkeypatch.setattr(prompts, "load_tokenizer", load)
    for _ in range(2):
        (source,) = sources_of(data, "train")
        prompts.prepare(source, data, Path(tokenizer.name_or_path), responses=False)
        assert len(loaded) == 1, "what is stored needs none"


def test_stored_worked_answers_are_those_in_memory(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "a", "label": "48"}, {"prompt": "How many?", "label": "She sold 48 of them."}]
    data = DataConfig(train=write(tmp_path / "rows.jsonl", rows))
    one = load_worked_answers(data, tokenizer)
    monkeypatch.setattr(stored, "LARGE", 0)
    other = load_worked_answers(data, tokenizer)
    for ours, theirs in zip(one, other, strict=True):
        assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
    assert one.longest == other.longest == len(one[1].prompt_ids) + len(one[1].response_ids)


@pytest.mark.usefixtures("large")
def test_what_is_stored_depends_on_the_file_the_tokenizer_and_the_settings(
    tokenizer: Tokenizer, model: Path, tmp_path: Path, cache: Path
) -> None:
    rows = [{"prompt": "a", "label": "1", "other": "2", "question": "b"}]
    file = tmp_path / "rows.jsonl"
    data = DataConfig(train=write(file, rows))
    settings: list[dict[str, Any]] = [
        {},
        {"system": "Be brief."},
        {"chat_template": False},
        {"label_key": "other"},
        {"prompt_key": "question"},
        {"max_prompt_tokens": 99},
        {"overlong_prompts": "drop"},
    ]
    for number, changed in enumerate(settings, 1):
        load_prompts(DataConfig(train=str(file), **changed), tokenizer, split="train")
        assert len(entries(cache)) == number, changed
    (tmp_path / "moved").mkdir()
    moved = file.rename(tmp_path / "moved" / "other.jsonl")
    pool = load_prompts(DataConfig(train=str(moved)), tokenizer, split="train")
    assert len(entries(cache)) == number and pool[0].place == f"{moved}, line 2"
    looked: list[str] = []
    check = LabelCheck("other", lambda labels: looked.extend(place for place, _ in labels))
    for _ in range(2):
        load_prompts(DataConfig(train=str(moved)), tokenizer, split="train", check=check)
    assert len(entries(cache)) == number + 1 and len(looked) == 1
    write(file, [{**rows[0], "prompt": "c"}])
    assert "c" in load_prompts(data, tokenizer, split="train")[0].text
    assert len(entries(cache)) == number + 2
    before = (model / "tokenizer_config.json").read_text()
    try:
        (model / "tokenizer_config.json").write_text(before + "\n")
        load_prompts(data, tokenizer, split="train")
    finally:
        (model / "tokenizer_config.json").write_text(before)
    assert len(entries(cache)) == number + 3


@pytest.mark.usefixtures("large")
def test_a_bad_row_is_named_as_in_memory_and_leaves_nothing_behind(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"prompt": "a", "label": "1"}
    bad: list[tuple[str, dict[str, Any]]] = [
        ("holds null in column 'label'", {"prompt": "a", "label": None}),
        ("has an empty prompt", {"prompt": " ", "label": "1"}),
        ("over data.max_prompt_tokens", {"prompt": "How many? " * 99, "label": "1"}),
        ("half a character", {"prompt": "\ud800", "label": "1"}),
    ]
    for words, row in bad:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in [good, good, good, row]))
        for size in (0, 2**30):
            monkeypatch.setattr(stored, "LARGE", size)
            with pytest.raises(UserError, match=words) as caught:
                load_prompts(DataConfig(train=str(file), max_prompt_tokens=99), tokenizer, split="train")
            assert caught.value.value == f"{file}, line 4"
    assert not entries(cache)


@pytest.mark.usefixtures("large")
def test_one_process_makes_what_another_waits_for(
    model: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, begun, go_on = Path(write(tmp_path / "rows.jsonl", ROWS[:1])), threading.Event(), threading.Event()
    made: list[str] = []

    def encode(rows: list[Row]) -> list[tuple[list[int], ...] | None]:
        begun.set()
        assert go_on.wait(60)
        made.append(threading.current_thread().name)
        return [([5],) for _ in rows]

    found: dict[str, list[int]] = {}

    def read() -> None:
        rows = stored.store([file], "data.train", {}, model, encode, lambda row: 0)
        found[threading.current_thread().name] = rows.tokens(0)

    first, second = threading.Thread(target=read, name="first"), threading.Thread(target=read, name="second")
    first.start()
    assert begun.wait(60)
    second.start()
    second.join(0.5)
    assert second.is_alive() and not entries_whole(cache)
    go_on.set()
    for thread in (first, second):
        thread.join(60)
    assert found == {"first": [5], "second": [5]} and made == ["first"]
    assert f"waiting for another process that tokenises {file}" in capsys.readouterr().err


def entries_whole(cache: Path) -> list[Path]:
    return [entry for entry in entries(cache) if "." not in entry.name]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def empty(file: Path) -> None:
    file.write_text("{}")


def miscount(file: Path) -> None:
    file.write_text(file.read_text().replace('"dropped": 0', '"dropped": 3'))


def exchange(file: Path) -> None:
    """By whole rows of another file."""
    other = file.with_name("other.arrow")
    with pyarrow.memory_map(str(file)) as mapped:
        table = pyarrow.ipc.open_file(mapped).read_all()
    with pyarrow.ipc.new_file(str(other), table.schema) as writer:
        writer.write_table(table.slice(1))
    other.replace(file)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("damage", "name"),
    [(cut, stored.ROWS), (exchange, stored.ROWS), (Path.unlink, stored.ROWS), (cut, stored.SUMMARY),
     (empty, stored.SUMMARY), (miscount, stored.SUMMARY)],
)  # fmt: skip
def test_what_is_damaged_is_made_again(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], damage: Any, name: str
) -> None:
    data = DataConfig(train=write(tmp_path / "rows.jsonl", ROWS), max_prompt_tokens=999)
    before = fields(pool := load_prompts(data, tokenizer, split="train"))
    (folder,) = entries(cache)
    damage(folder / name)
    assert fields(again := load_prompts(data, tokenizer, split="train")) == before and again.dropped == pool.dropped
    assert f"note: {folder} is damaged, and is made again" in capsys.readouterr().err
    load_prompts(data, tokenizer, split="train")
    assert "damaged" not in capsys.readouterr().err


@pytest.mark.usefixtures("large")
def test_stored_data_is_shared_with_whom_the_umask_lets_in(tokenizer: Tokenizer, tmp_path: Path, cache: Path) -> None:
    before = os.umask(0o002)
    try:
        load_prompts(DataConfig(train=write(tmp_path / "rows.jsonl", ROWS)), tokenizer, split="train")
    finally:
        os.umask(before)
    (folder,) = entries(cache)
    assert folder.stat().st_mode & 0o777 == 0o775
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o664}


@pytest.mark.usefixtures("large")
def test_drafts_of_killed_processes_are_removed_and_those_of_others_stay(
    tokenizer: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    left, written = cache / "a.draft", cache / "b.draft"
    for draft in (left, written):
        draft.mkdir(parents=True)
        (draft / stored.ROWS).touch()
    with (cache / "b.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load_prompts(DataConfig(train=write(tmp_path / "rows.jsonl", ROWS[:2])), tokenizer, split="train")
    assert not left.exists() and written.exists()


def test_a_file_that_has_gone_is_named_and_not_the_cache(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="cannot be read") as caught:
        stored.store(
            [tmp_path / "gone.jsonl"], "data.train", {}, model, lambda rows: [None for _ in rows], lambda row: 0
        )
    assert (caught.value.setting, caught.value.value) == ("data.train", str(tmp_path / "gone.jsonl"))


@pytest.mark.usefixtures("large")
def test_a_cache_that_cannot_be_written_to_is_named(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(train=write(tmp_path / "rows.jsonl", ROWS[:1]))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(stored.CACHE, str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot keep what is made of") as caught:
        load_prompts(data, tokenizer, split="train")
    assert caught.value.setting == stored.CACHE and stored.CACHE in caught.value.remedy


@pytest.mark.parametrize("size", [stored.LARGE, 0], ids=["in memory", "stored"])
def test_held_out_problems_that_stand_in_the_training_data_are_counted(
    size: int, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "LARGE", size)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How  many?\n"}]
    train = write(tmp_path / "train.jsonl", [{"prompt": each, "label": "1"} for each in ("a", "b", "c d")])
    other = write(tmp_path / "other.jsonl", [{"prompt": chat, "label": "1"}])
    asked = ["c", " How many? ", "c\n d", "A"]
    held_out = write(tmp_path / "eval.jsonl", [{"prompt": each, "label": "1"} for each in asked])
    data = DataConfig(train=(SourceConfig(path=train), SourceConfig(path=other)), eval=held_out)
    pools = [load_prompts(data, tokenizer, split=split) for split in ("train", "eval")]
    assert pools[0].repeats(list(pools[1])) == (2, f"{held_out}, line 3 is {other}, line 2")
    assert pools[0].repeats(list(pools[1])[:1]) == (0, "")


def test_several_sources_follow_one_another_in_the_pool(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [{"q": f"{name}{i}", "label": "1"} for i in range(3)]) for name in "ab"]
    sources = (SourceConfig(path=files[0], prompt_key="q"), SourceConfig(path=files[1], weight=2, prompt_key="q"))
    data = DataConfig(train=sources, chat_template=False)
    pools = [load_prompts(data, tokenizer, split="train")]
    monkeypatch.setattr(stored, "LARGE", 0)
    pools.append(load_prompts(data, tokenizer, split="train"))
    for pool in pools:
        assert [prompt.text for prompt in pool] == ["a0", "a1", "a2", "b0", "b1", "b2"]
        assert [prompt.id for prompt in pool] == list(range(6)) and pool[-1].place == f"{files[1]}, line 4"
        assert [(len(source.items), source.weight) for source in pool.sources] == [(3, 1.0), (3, 2.0)]
