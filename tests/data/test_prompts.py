"""Prompts are what the file says, and what is wrong with a file is said once, with its place and its remedy."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_dppo.config import ArithmeticConfig, DataConfig
from megatron_dppo.data.prompts import load_prompts, load_worked_answers
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from tests.data.conftest import Write


def gsm8k(file: str, **settings: object) -> DataConfig:
    return DataConfig(train=file, prompt_key="question", label_key="answer", **settings)


def test_gsm8k_file_needs_two_settings(tokenizer: Tokenizer, write: Write) -> None:
    file = write([{"question": "How many?", "answer": "2+3=5\n#### 5"}, {"question": "And then?", "answer": "#### 6"}])
    pool = load_prompts(gsm8k(file), tokenizer, split="train")
    assert [prompt.id for prompt in pool] == [0, 1]
    assert pool[0].label == "2+3=5\n#### 5"
    assert pool[0].text == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(pool[0].token_ids) == pool[0].text
    assert pool[0].token_ids.dtype == np.int32


def test_prompt_tokens_equal_those_of_the_chat_template(tokenizer: Tokenizer, write: Write) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many clips?"}]
    pool = load_prompts(DataConfig(train=write([{"prompt": messages, "label": "1"}])), tokenizer, split="train")
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert pool[0].token_ids.tolist() == expected


def test_system_message_stands_before_prompts_that_are_strings(tokenizer: Tokenizer, write: Write) -> None:
    data = DataConfig(train=write([{"prompt": "Hi", "label": 1}]), system="Be brief.")
    text = load_prompts(data, tokenizer, split="train")[0].text
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


def test_system_message_stands_before_chats_that_have_none_of_their_own(tokenizer: Tokenizer, write: Write) -> None:
    question = {"role": "user", "content": "Hi"}
    rows = [[question], [{"role": "system", "content": "Be long."}, question], json.dumps([question])]
    data = DataConfig(train=write([{"prompt": chat, "label": 1} for chat in rows]), system="Be brief.")
    without, own, as_text = (prompt.text for prompt in load_prompts(data, tokenizer, split="train"))
    assert without.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert own.startswith("<|im_start|>system\nBe long.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert "Be brief" not in own and as_text == without


def test_switches_of_the_chat_template_are_handed_to_it(tokenizer: Tokenizer, write: Write) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template += "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    data = DataConfig(train=write([{"prompt": "Hi", "label": 1}]))
    plain, quick = data, data.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    without, thoughtless = (load_prompts(each, tokenizer, split="train")[0].text for each in (plain, quick))
    assert thoughtless == without + "<think>\n\n</think>\n\n"
    for name in ("enable_thought", "add_generation_prompt"):
        wrong = data.model_copy(update={"chat_template_kwargs": {name: False}})
        with pytest.raises(UserError, match=f"{name}: is no switch"):
            load_prompts(wrong, tokenizer, split="train")


def test_plain_prompts_are_left_as_they_stand(tokenizer: Tokenizer, write: Write) -> None:
    data = DataConfig(train=write([{"prompt": " 1+2=", "label": "3"}]), chat_template=False)
    prompt = load_prompts(data, tokenizer, split="train")[0]
    assert prompt.text == " 1+2=" and tokenizer.decode(prompt.token_ids) == " 1+2="


def test_parquet_in_verls_form_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "How many?"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": "a7"},
    }
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), file)
    pool = load_prompts(DataConfig(train=str(file), label_key="reward_model.ground_truth"), tokenizer, split="train")
    assert (pool[1].label, pool[1].data_source, pool[1].extra) == ("34", "math_dapo", {"index": "a7"})


def test_a_folder_is_read_file_by_file_in_the_order_of_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def rows(*prompts: str) -> list[dict[str, str]]:
        return [{"prompt": prompt, "label": "1"} for prompt in prompts]

    (folder := tmp_path / "rows").mkdir()
    for number in (2, 0):
        table = pyarrow.Table.from_pylist(rows(f"{number}a", f"{number}b"))
        pyarrow.parquet.write_table(table, folder / f"part-0000{number}.parquet")
    (folder / "part-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("1a")))
    for name in ("_SUCCESS", ".part-00000.parquet.crc", "README.md"):
        (folder / name).write_text("no data")
    (folder / "deeper.parquet").mkdir()
    for split in ("train", "eval"):
        pool = load_prompts(DataConfig(**{split: str(folder)}), tokenizer, split=split)
        assert [prompt.asked for prompt in pool] == ["0a", "0b", "1a", "2a", "2b"]
        assert pool[4].place == f"{folder}/part-00002.parquet, row 2"
    answers = load_worked_answers(DataConfig(train=str(folder)), tokenizer)
    assert len(answers) == 5


@pytest.mark.parametrize("setting", ["train", "eval"])
def test_a_folder_without_data_is_refused_by_its_name(tokenizer: Tokenizer, tmp_path: Path, setting: str) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UserError) as refused:
        load_prompts(DataConfig(**{setting: str(tmp_path)}), tokenizer, split=setting)
    assert (refused.value.setting, refused.value.value) == (f"data.{setting}", str(tmp_path))
    assert "is a folder without files of data" in refused.value.problem and ".parquet" in refused.value.remedy


def test_json_list_is_read_and_a_dot_in_a_columns_own_name_wins(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"prompt": "a", "x.y": "literal", "x": {"y": "nested"}}]))
    assert load_prompts(DataConfig(train=str(file), label_key="x.y"), tokenizer, split="train")[0].label == "literal"


def test_a_line_separator_inside_a_string_does_not_end_the_row(tokenizer: Tokenizer, write: Write) -> None:
    pool = load_prompts(DataConfig(train=write([{"prompt": "a\u2028b", "label": "1"}])), tokenizer, split="train")
    assert "a\u2028b" in pool[0].text


def test_overlong_prompts_are_dropped_and_counted(tokenizer: Tokenizer, write: Write) -> None:
    rows = [{"prompt": text, "label": "1"} for text in ("a", "word " * 50, "b")]
    data = DataConfig(train=write(rows), max_prompt_tokens=20, overlong_prompts="drop")
    pool = load_prompts(data, tokenizer, split="train")
    assert (len(pool), pool.dropped, [prompt.id for prompt in pool]) == (2, 1, [0, 1])


def test_a_prompt_at_the_limit_stays(tokenizer: Tokenizer, write: Write) -> None:
    file = write([{"prompt": "some words", "label": "1"}])
    tokens = len(load_prompts(DataConfig(train=file), tokenizer, split="train")[0].token_ids)
    assert len(load_prompts(DataConfig(train=file, max_prompt_tokens=tokens), tokenizer, split="train")) == 1
    with pytest.raises(UserError, match=f"{tokens} tokens, over data.max_prompt_tokens = {tokens - 1}"):
        load_prompts(DataConfig(train=file, max_prompt_tokens=tokens - 1), tokenizer, split="train")


GOOD = {"prompt": "a", "label": "1"}


@pytest.mark.parametrize(
    ("content", "settings", "words"),
    [
        ("", {}, ["data.train", "holds no rows"]),
        ('{"prompt": "a", "label": "1"}\n{"prompt": \n', {}, ["line 2", "is not JSON"]),
        ("[1]\n", {}, ["line 1", "is a list"]),
        ('{"question": "a", "label": "1"}\n', {}, ["line 1", "'prompt'", "question, label", "perhaps 'question'"]),
        (
            '{"prompt": "a", "reward_model": {"ground_truth": "1"}}\n',
            {},
            ["data.label_key", "'reward_model.ground_truth'"],
        ),
        ('{"prompt": "a", "lable": "1"}\n', {}, ["perhaps 'lable'"]),
        ('{"prompt": "a", "label": "1"}\n\n{"prompt": "a", "label": null}\n', {}, ["line 3", "null", "data.label_key"]),
        ('{"prompt": "", "label": "1"}\n', {}, ["line 1", "empty prompt"]),
        ('{"prompt": "", "label": "1"}\n', {"chat_template": False}, ["line 1", "empty prompt"]),
        ('{"prompt": 7, "label": "1"}\n', {}, ["line 1", "neither a string nor a list of messages"]),
        ('{"prompt": [{"role": "user"}], "label": "1"}\n', {}, ["line 1", "no content"]),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "label": "1"}\n',
            {"chat_template": False},
            ["chat_template=true"],
        ),
        ('{"prompt": "a", "label": "1"}\n', {"chat_template": False, "system": "s"}, ["data.system"]),
        (
            json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "prompt": "b " * 99}),
            {"max_prompt_tokens": 20},
            ["line 2", "drop"],
        ),
        (json.dumps(GOOD), {"max_prompt_tokens": 2, "overlong_prompts": "drop"}, ["all 1 prompts", "the shortest has"]),
    ],
)
def test_bad_file_names_its_place_and_the_remedy(
    tokenizer: Tokenizer, tmp_path: Path, content: str, settings: dict[str, object], words: list[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        load_prompts(DataConfig(train=str(file), **settings), tokenizer, split="train")
    message = str(caught.value)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("no.jsonl", None, "no file"),
        ("x.csv", "a", "no known kind"),
        ("x.parquet", "a", "parquet"),
        ("x.json", "{}", "list"),
    ],
)
def test_file_of_the_wrong_kind_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, name: str, content: str | None, word: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=word):
        load_prompts(DataConfig(train=str(tmp_path / name)), tokenizer, split="train")


def test_held_out_prompts_are_the_eval_files_or_the_generators(tokenizer: Tokenizer, write: Write) -> None:
    file = write([GOOD])
    assert len(load_prompts(DataConfig(train=file), tokenizer, split="eval")) == 0
    assert len(load_prompts(DataConfig(eval=file), tokenizer, split="eval")) == 1
    generated = DataConfig(arithmetic=ArithmeticConfig(problems=9, eval_problems=4))
    train, held_out = (load_prompts(generated, tokenizer, split=split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (9, 4)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}


def test_a_bad_eval_file_is_named_by_its_own_setting(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"data\.eval = nowhere\.jsonl"):
        load_prompts(DataConfig(eval="nowhere.jsonl"), tokenizer, split="eval")


def test_worked_answers_end_with_the_end_of_the_turn(tokenizer: Tokenizer, write: Write) -> None:
    file = write([{"question": "How many?", "answer": "2+3=5\n#### 5"}])
    (worked,) = load_worked_answers(gsm8k(file), tokenizer)
    prompt = load_prompts(gsm8k(file), tokenizer, split="train")[0]
    assert worked.prompt_ids.tolist() == prompt.token_ids.tolist()
    assert worked.response_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(worked.response_ids) == "2+3=5\n#### 5<|im_end|>"


def test_worked_answers_of_sums_are_written_out(tokenizer: Tokenizer) -> None:
    data = DataConfig(chat_template=False, arithmetic=ArithmeticConfig(problems=5, eval_problems=1, min_terms=3))
    for worked in load_worked_answers(data, tokenizer):
        question, answer = tokenizer.decode(worked.prompt_ids), tokenizer.decode(worked.response_ids[:-1])
        terms = [int(term) for term in question.removesuffix("=").split("+")]
        *lines, last = answer.split("\n")
        assert last == f"#{sum(terms)}" and len(lines) == len(terms) - 1
        assert all(eval(line.split("=")[0]) == int(line.split("=")[1]) for line in lines)


def test_response_column_may_differ_from_the_label(tokenizer: Tokenizer, write: Write) -> None:
    file = write([{"prompt": "a", "label": "1", "worked": "it is 1"}])
    (worked,) = load_worked_answers(DataConfig(train=file, response_key="worked"), tokenizer)
    assert tokenizer.decode(worked.response_ids[:-1]) == "it is 1"
    with pytest.raises(UserError, match=r"data\.response_key"):
        load_worked_answers(DataConfig(train=file, response_key="workings"), tokenizer)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.path = .*nowhere: is no directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)
