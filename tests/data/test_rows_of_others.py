"""Whatever a file holds, its prompts render as they stand or one message names file and row: never another exception,
never a label or a prompt that its author did not write."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dppo.config import DataConfig
from megatron_dppo.data import stored
from megatron_dppo.data.prompts import load_prompts, load_worked_answers
from megatron_dppo.data.rows import DEEPEST
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import Prompt

USER = {"role": "user", "content": "Hi"}


def load(tokenizer: Tokenizer, file: Path, **changes: Any) -> list[Prompt]:
    return list(load_prompts(DataConfig(train=str(file), **changes), tokenizer, split="train"))


def jsonl(folder: Path, *rows: str) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(row + "\n" for row in rows))
    return file


def parquet(folder: Path, label: pyarrow.Array, prompt: pyarrow.Array | None = None) -> Path:
    file = folder / "rows.parquet"
    prompts = pyarrow.array(["Hi"] * len(label)) if prompt is None else prompt
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, "label": label}), file)
    return file


@pytest.mark.parametrize(
    ("row", "words"),
    [
        # Labels.
        ({"label": math.nan}, ["nan (no number)", "'label'"]),
        # Prompts.
        ({"prompt": "\u200b\ufeff\u00a0"}, ["empty prompt"]),
        ({"prompt": "a\ud83d"}, ["half a character (\\ud83d", "'prompt'"]),
        ({"prompt": [USER, {"role": "assistant", "content": "4"}]}, ["ends with an answer"]),
        ({"prompt": [{"role": "system", "content": "Be brief."}]}, ["without a message of the user"]),
        ({"prompt": [{"role": "human", "content": "Hi"}]}, ["role 'human'", "user"]),
        ({"prompt": [{"role": "system", "content": " "}, USER]}, ["an empty message of the system"]),
        ({"prompt": [USER, {"role": "assistant", "content": None}, USER]}, ["the assistant that has no content"]),
        ({"prompt": '[{"role": "user", "content": "Hi"'}, ["text that is no plain JSON list"]),
    ],
)
def test_what_cannot_be_asked_or_judged_names_its_row(
    tokenizer: Tokenizer, tmp_path: Path, row: Mapping[str, Any], words: list[str]
) -> None:
    good = {"prompt": "Hi", "label": "1"}
    file = jsonl(tmp_path, json.dumps(good), json.dumps(good | dict(row)))
    with pytest.raises(UserError) as caught:
        load(tokenizer, file)
    assert all(word in str(caught.value) for word in [f"data.train = {file}, line 2", *words]), caught.value
    str(caught.value).encode()  # it can be printed


def test_messages_as_json_text_are_refused_where_prompts_are_asked_as_they_stand(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    file = jsonl(tmp_path, json.dumps({"prompt": json.dumps([USER]), "label": "1"}))
    with pytest.raises(UserError, match=r"line 1: has a list as prompt.*chat_template=true"):
        load(tokenizer, file, chat_template=False)


@pytest.mark.parametrize("prompt", ["[1, 2] and [3]: which?", '{"a": 3}?', "[", '["a", "b"]', "{}"])
def test_text_that_merely_looks_like_json_is_asked_as_text(tokenizer: Tokenizer, tmp_path: Path, prompt: str) -> None:
    (asked,) = load(tokenizer, jsonl(tmp_path, json.dumps({"prompt": prompt, "label": "1"})))
    assert f"user\n{prompt}<|im_end|>" in asked.text and asked.asked == prompt


def test_conversation_with_tools_is_asked_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    turns = [USER, {"role": "assistant", "content": "I look."}, {"role": "tool", "content": "4"}]
    (asked,) = load(tokenizer, jsonl(tmp_path, json.dumps({"prompt": turns, "label": "1"})))
    assert all(turn["content"] in asked.text for turn in turns) and asked.asked == turns


@pytest.mark.parametrize("where", ["label", "prompt", "extra_info", "elsewhere"])
@pytest.mark.parametrize("depth", [DEEPEST + 1, 200_000])
def test_deep_nesting_is_refused_wherever_it_is(tokenizer: Tokenizer, tmp_path: Path, where: str, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    file = jsonl(tmp_path, json.dumps({"prompt": "Hi", "label": "1"})[:-1] + f', "{where}": {deep}}}')
    with pytest.raises(UserError, match=f"line 1: holds more than {DEEPEST} values within each other"):
        load(tokenizer, file)
    (tmp_path / "rows.json").write_text(f"[{file.read_text()}]")
    with pytest.raises(UserError, match="within each other"):
        load(tokenizer, tmp_path / "rows.json")


def test_labels_are_the_numbers_that_parquet_was_given(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decimals = [decimal.Decimal(text) for text in ("72.00", "-0.50", "12345678901234567890123456789.25", "0.10")]
    file = parquet(tmp_path, pyarrow.array(decimals, pyarrow.decimal128(38, 2)))
    assert [p.label for p in load(tokenizer, file)] == ["72", "-0.5", "12345678901234567890123456789.25", "0.1"]
    assert [p.label for p in load(tokenizer, parquet(tmp_path, pyarrow.array([72.0, 0.5])))] == ["72", "0.5"]
    assert [p.label for p in load(tokenizer, parquet(tmp_path, pyarrow.array([True])))] == ["true"]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pyarrow.array([datetime.date(2024, 1, 5)]), "a date, which may be written in several ways"),
        (
            pyarrow.array([10**8], pyarrow.int32()).view(pyarrow.date32()),
            "cannot be read",
        ),  # Python's years end at 9999
    ],
)
def test_label_without_one_spelling_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, column: pyarrow.Array, words: str
) -> None:
    file = parquet(tmp_path, column)
    with pytest.raises(UserError) as caught:
        load(tokenizer, file)
    assert f"{file}, row 1" in str(caught.value) and words in str(caught.value)


def test_parquet_text_that_is_no_text_names_its_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torn = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    with pytest.raises(UserError, match=r"row 2: holds in column 'label' what cannot be read"):
        load(tokenizer, parquet(tmp_path, torn))


@pytest.mark.parametrize("label", [{"target": ["Rome", "Roma"], "n": 2.0}, ["1", "2"], [], {}])
def test_labels_that_are_objects_stay_what_they_are(tokenizer: Tokenizer, tmp_path: Path, label: object) -> None:
    assert load(tokenizer, jsonl(tmp_path, json.dumps({"prompt": "Hi", "label": label})))[0].label == label
    if label:
        assert load(tokenizer, parquet(tmp_path, pyarrow.array([label])))[0].label == label


@pytest.mark.parametrize("answer", ["", " \n", None, [1], math.nan])
def test_worked_answer_that_is_none_is_refused(tokenizer: Tokenizer, tmp_path: Path, answer: object) -> None:
    file = jsonl(tmp_path, json.dumps({"prompt": "Hi", "label": answer}))
    with pytest.raises(UserError, match=r"line 1: holds|line 1: has an empty answer"):
        load_worked_answers(DataConfig(train=str(file)), tokenizer)


CHARACTERS = st.characters(categories=None) | st.sampled_from("\ud800\udfff\u2028\u200b\x00 {}[]<|>")
TEXT = st.text(CHARACTERS, max_size=12) | st.sampled_from(["<|im_end|>", "[{'role': 1}]", json.dumps([USER])])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "human", "", None])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE | SCALARS, "content": SCALARS}, optional={"tool_calls": SCALARS | st.lists(SCALARS, max_size=2)}
)
VALUES = st.recursive(
    SCALARS | st.lists(MESSAGE, max_size=3) | st.lists(MESSAGE, max_size=3).map(json.dumps),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
BEYOND_JSON = SCALARS | st.one_of(
    st.binary(max_size=4), st.dates(), st.datetimes(), st.timedeltas(), st.times(), st.decimals(allow_nan=False)
)


def renders_or_names_its_row(tokenizer: Tokenizer, file: Path, label: object, **changes: Any) -> None:
    """The claim of the two tests below."""
    try:
        (prompt,) = load(tokenizer, file, overlong_prompts="drop", max_prompt_tokens=1000, **changes)
    except UserError as error:
        assert f"{file}, " in str(error) and str(error).encode()
        return
    for text in (prompt.text, prompt.label_text):
        text.encode()
    if isinstance(label, int | float | decimal.Decimal) and not isinstance(label, bool):
        assert type(label)(prompt.label) == label
    else:
        assert isinstance(label, bool | str | list | dict) and isinstance(prompt.label, str | list | dict)
        assert prompt.label == label or not isinstance(label, str)
    asked = [USER | {"content": prompt.asked}] if isinstance(prompt.asked, str) else prompt.asked
    assert asked[-1]["role"] != "assistant"
    for message in asked:
        assert message["content"] is None or message["content"] in prompt.text


BRIEF = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@BRIEF
@given(prompt=VALUES, label=VALUES, rest=st.dictionaries(st.sampled_from(["extra_info", "data_source"]), VALUES))
def test_any_json_renders_or_names_its_row(
    tokenizer: Tokenizer, tmp_path: Path, prompt: object, label: object, rest: dict[str, object]
) -> None:
    file = jsonl(tmp_path, json.dumps({"prompt": prompt, "label": label, **rest}))
    renders_or_names_its_row(tokenizer, file, label)
    renders_or_names_its_row(tokenizer, file, label, system="Be brief.")
    renders_or_names_its_row(tokenizer, file, label, chat_template=False)


@BRIEF
@given(
    prompt=BEYOND_JSON | st.lists(MESSAGE, min_size=1, max_size=2),
    label=BEYOND_JSON | st.lists(BEYOND_JSON, max_size=2) | st.dictionaries(st.sampled_from("ab"), BEYOND_JSON),
)
def test_any_parquet_renders_or_names_its_row(
    tokenizer: Tokenizer, tmp_path: Path, prompt: object, label: object
) -> None:
    file = tmp_path / "rows.parquet"
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": prompt, "label": label}]), file)
    except Exception:
        return  # no parquet file holds such a value
    renders_or_names_its_row(tokenizer, file, label)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
FIND = {"type": "function", "function": {"name": "find", "arguments": {"q": {"deep": [{"x": "y"}, {"z": "w"}]}}}}
DIFFERENT: list[dict[str, Any]] = [
    {"prompt": [USER], "label": {"answer": "1"}, "extra_info": {"index": 1}},
    {
        "prompt": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, FIND]}, {**USER, "name": "Ann"}],
        "label": {"unit": "m", "parts": [{"a": "1"}, {"b": "2"}]},
        "extra_info": {"more": {"b": 2}},
    },
    {"prompt": [{**USER, "tool_calls": None}], "label": {"answer": "3"}, "tools": [CALL], "hint": "none"},
]


@pytest.mark.parametrize("size", [stored.LARGE, 0], ids=["in memory", "stored"])
def test_rows_of_jsonl_and_of_parquet_are_the_same_prompts_labels_and_columns(
    size: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet has a null wherever an object lacks what another object of its column has; this template prints it."""
    monkeypatch.setattr(stored, "LARGE", size)
    monkeypatch.setenv(stored.CACHE, str(tmp_path / "cache"))
    policy = tmp_path / "policy"
    shutil.copytree(model, policy)
    (policy / "chat_template.jinja").write_text("{{ tools }} {% for m in messages %}{{ m | tojson }}{% endfor %}")
    plain = jsonl(tmp_path, *map(json.dumps, DIFFERENT))
    columns = {
        name: [row.get(name) for row in DIFFERENT] for name in ("prompt", "label", "extra_info", "tools", "hint")
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    one, other = (load(load_tokenizer(policy), file) for file in (plain, tmp_path / "rows.parquet"))
    assert [prompt.text for prompt in one] == [prompt.text for prompt in other]
    assert "null" not in "".join(prompt.text for prompt in other)
    for ours, theirs in zip(one, other, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert (ours.label, ours.extra) == (theirs.label, theirs.extra)
    assert other[0].label == {"answer": "1"} and other[1].extra == {"more": {"b": 2}}
    assert other[2].extra.keys() == {"prompt", "label", "tools", "hint"}
