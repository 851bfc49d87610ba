"""Rows of any file render as they stand, or a single message names file and row.

A prompt or label that its author did not write never comes out of a file, and no other exception.
"""

import datetime
import decimal
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dppo.data import stored
from megatron_dppo.data.rows import DEEPEST
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from tests.data.conftest import Load, Refuse, Write, write_parquet

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "4"}
GOOD = {"prompt": "Hi", "label": "1"}
PLAIN = {"chat_template": False}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"label": math.nan}, ["nan (no number)", "'label'"]),
        ({"label": None}, ["null", "data.label_key"]),
        ({"prompt": "\u200b\ufeff\u00a0"}, ["empty prompt"]),
        ({"prompt": "a\ud83d"}, ["half a character (\\ud83d", "'prompt'"]),
        ({"data_source": "\ud800"}, ["half a character", "'data_source'"]),
        ({"prompt": [USER, ANSWER]}, ["ends with an answer"]),
        (
            {"prompt": [{"role": "system", "content": "Be brief."}]},
            ["without a message of the user"],
        ),
        ({"prompt": [{"role": "human", "content": "Hi"}]}, ["role 'human'", "user"]),
        ({"prompt": [USER | {"content": " "}]}, ["an empty message of the user"]),
        ({"prompt": [USER | {"content": [{"image": "cat.png"}]}]}, ["an image or a video"]),
        (
            {"prompt": [USER, {"role": "assistant", "content": None}, USER]},
            ["the assistant that has no content"],
        ),
        ({"prompt": '[{"role": "user", "content": "Hi"'}, ["text that is no plain JSON list"]),
    ],
)
def test_a_bad_row_is_named(refuse: Refuse, row: dict[str, Any], words: list[str]) -> None:
    refuse(
        [json.dumps(GOOD), "", json.dumps(GOOD | row)],
        "data.train = ",
        "rows.jsonl, line 3",
        *words,
    )


@pytest.mark.parametrize(
    ("line", "data", "words"),
    [
        ('{"prompt": \n', {}, ["line 1", "is not JSON"]),
        (
            '{"question": "a", "label": "1"}',
            {},
            ["line 1", "'prompt'", "question, label", "perhaps 'question'"],
        ),
        (
            '{"prompt": "a", "reward_model": {"ground_truth": "1"}}',
            {},
            ["label_key", "'reward_model.ground_truth'"],
        ),
        (
            json.dumps(GOOD | {"prompt": json.dumps([USER])}),
            PLAIN,
            ["has a list as prompt", "chat_template=true"],
        ),
        (json.dumps(GOOD), PLAIN | {"system": "s"}, ["data.system"]),
        ("", {}, ["holds no rows"]),
    ],
)
def test_a_bad_line_or_setting_is_named(
    refuse: Refuse, line: str, data: dict[str, Any], words: list[str]
) -> None:
    refuse([line], *words, **data)


def test_no_column_is_guessed_below_a_similarity(refuse: Refuse) -> None:
    row = {"Q text": "Convert 7 h to min.", "gold.val": 420, "unit": "min"}
    error = refuse([json.dumps(row)], "has no column 'question'", prompt_key="question")
    assert error.remedy == "Set data.prompt_key to the right column"
    near = refuse([json.dumps(row | {"questions": "?"})], prompt_key="question")
    assert near.remedy.endswith("perhaps 'questions'")
    assert refuse(["{}"], prompt_key="question").remedy == "Remove the row"


@pytest.mark.parametrize(
    ("name", "word"), [("x.csv", "no known kind"), ("x.parquet", "parquet"), ("x.json", "list")]
)
def test_a_source_of_the_wrong_kind_is_refused(
    refuse: Refuse, tmp_path: Path, name: str, word: str
) -> None:
    refuse(tmp_path / name, "no file")
    refuse(tmp_path, "is a folder without files of data", split="eval")
    (tmp_path / name).write_text("{}")
    error = refuse(tmp_path / name, word)
    assert (error.setting, str(error.value)) == ("data.train", str(tmp_path / name))


@pytest.mark.parametrize("prompt", ["[1, 2] and [3]: which?", '{"a": 3}?', '["a", "b"]'])
def test_text_like_json_is_asked_as_text(load: Load, prompt: str) -> None:
    (asked,) = load([GOOD | {"prompt": prompt}])
    assert f"user\n{prompt}<|im_end|>" in asked.text and asked.raw_prompt == prompt


@pytest.mark.parametrize("depth", [DEEPEST + 1, 200_000])
def test_deep_nesting_is_refused_in_any_column(refuse: Refuse, tmp_path: Path, depth: int) -> None:
    for where in ("label", "prompt", "elsewhere"):
        line = json.dumps(GOOD)[:-1] + f', "{where}": {"[" * depth + "]" * depth}}}'
        refuse([line], f"line 1: nests deeper than {DEEPEST} values")
        (tmp_path / "rows.json").write_text(f"[{line}]")
        refuse(tmp_path / "rows.json", "nests deeper")


def test_labels_are_the_numbers_of_parquet(load: Load, tmp_path: Path) -> None:
    def labels(column: pyarrow.Array) -> list[object]:
        return [
            p.label
            for p in load(
                write_parquet(tmp_path / "rows.parquet", prompt=["Hi"] * len(column), label=column)
            )
        ]

    decimals = [
        decimal.Decimal(text)
        for text in ("72.00", "-0.50", "12345678901234567890123456789.25", "0.10")
    ]
    exact = ["72", "-0.5", "12345678901234567890123456789.25", "0.1"]
    assert labels(pyarrow.array(decimals, pyarrow.decimal128(38, 2))) == exact
    assert labels(pyarrow.array([72.0, 0.5])) == ["72", "0.5"]
    for value in (datetime.date(2024, 1, 5), datetime.time(9), datetime.timedelta(1), b"72"):
        with pytest.raises(UserError, match=r"rows.parquet, row 1"):
            labels(pyarrow.array([value]))
    label = {"target": ["Rome", "Roma"], "n": 2.0}
    assert labels(pyarrow.array([label])) == [label]


CHARACTERS = st.characters(categories=None) | st.sampled_from(
    "\ud800\udfff\u2028\u200b\x00 {}[]<|>"
)
TEXT = st.text(CHARACTERS, max_size=12) | st.sampled_from(
    ["<|im_end|>", "[{'role': 1}]", json.dumps([USER])]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
ROLE = st.sampled_from(["system", "user", "assistant", "tool", "human", "", None])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE | SCALARS, "content": SCALARS},
    optional={"tool_calls": SCALARS | st.lists(SCALARS, max_size=2)},
)
VALUES = st.recursive(
    SCALARS | st.lists(MESSAGE, max_size=3) | st.lists(MESSAGE, max_size=3).map(json.dumps),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def assert_renders_or_names_the_row(
    load: Load, file: str | Path, label: object, **data: Any
) -> None:
    try:
        (prompt,) = load(file, overlong_prompts="drop", max_prompt_tokens=1000, **data)
    except UserError as error:
        assert f"{file}, " in str(error) and str(error).encode()
        return
    for text in (prompt.text, prompt.label_text):
        text.encode()
    if isinstance(label, int | float) and not isinstance(label, bool):
        assert type(label)(prompt.label) == label
    else:
        assert isinstance(label, bool | str | list | dict) and isinstance(
            prompt.label, str | list | dict
        )
        assert prompt.label == label or not isinstance(label, str)
    asked = (
        [USER | {"content": prompt.raw_prompt}]
        if isinstance(prompt.raw_prompt, str)
        else prompt.raw_prompt
    )
    assert asked[-1]["role"] != "assistant"
    for message in asked:
        assert message["content"] is None or message["content"] in prompt.text


SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=150, suppress_health_check=SLOW)
@given(
    prompt=VALUES,
    label=VALUES,
    rest=st.dictionaries(st.sampled_from(["extra_info", "data_source"]), VALUES),
)
def test_any_json_renders_or_names_the_row(
    load: Load, write: Write, prompt: object, label: object, rest: dict[str, object]
) -> None:
    file = write([json.dumps({"prompt": prompt, "label": label, **rest})])
    for data in ({}, {"system": "Be brief."}, PLAIN):
        assert_renders_or_names_the_row(load, file, label, **data)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
FIND = {
    "type": "function",
    "function": {"name": "find", "arguments": {"q": {"deep": [{"x": "y"}, {"z": "w"}]}}},
}
DIFFERENT: list[dict[str, Any]] = [
    {"prompt": [USER], "label": {"answer": "1"}, "extra_info": {"index": 1}},
    {
        "prompt": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL, FIND]},
            {**USER, "name": "Ann"},
        ],
        "label": {"unit": "m", "parts": [{"a": "1"}, {"b": "2"}]},
        "extra_info": {"more": {"b": 2}},
    },
    {
        "prompt": [{**USER, "tool_calls": None}],
        "label": {"answer": "3"},
        "tools": [CALL],
        "hint": "none",
    },
]


@pytest.mark.parametrize("size", [stored.LARGE, 0], ids=["in memory", "stored"])
def test_parquet_has_the_prompts_labels_and_columns_of_jsonl(
    size: int, model: Path, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet has null for every field that only other objects of a column have, and this template
    prints null."""
    monkeypatch.setattr(stored, "LARGE", size)
    monkeypatch.setenv(stored.CACHE, str(tmp_path / "cache"))
    shutil.copytree(model, tmp_path / "policy")
    template = "{{ tools }} {% for m in messages %}{{ m | tojson }}{% endfor %}"
    (tmp_path / "policy" / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path / "policy")
    names = ("prompt", "label", "extra_info", "tools", "hint")
    file = write_parquet(
        tmp_path / "rows.parquet", **{name: [row.get(name) for row in DIFFERENT] for name in names}
    )
    plain, pool = load(DIFFERENT, tokenizer), load(file, tokenizer)
    assert "null" not in "".join(prompt.text for prompt in pool)
    for ours, theirs in zip(plain, pool, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert (ours.text, ours.label, ours.extra) == (theirs.text, theirs.label, theirs.extra)
    assert pool[0].label == {"answer": "1"} and pool[1].extra == {"more": {"b": 2}}
    assert pool[2].extra.keys() == {"prompt", "label", "tools", "hint"}
