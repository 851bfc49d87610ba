"""Prompts and worked answers are those of the file, in the policy's chat template."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron_dppo.config import DataConfig
from megatron_dppo.data.prompts import load_prompts, load_worked_answers
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from tests.data.conftest import Load, Refuse, Write

GSM8K = {"prompt_key": "question", "label_key": "answer"}
HI = {"role": "user", "content": "Hi"}


def test_a_gsm8k_file_needs_two_settings(load: Load, tokenizer: Tokenizer) -> None:
    rows = [{"question": "How many?", "answer": "2+3=5\n#### 5"}, {"question": "And then?", "answer": "#### 6"}]
    pool = load(rows, **GSM8K)
    assert [prompt.id for prompt in pool] == [0, 1]
    assert pool[0].label == "2+3=5\n#### 5"
    assert pool[0].text == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(pool[0].token_ids) == pool[0].text
    assert pool[0].token_ids.dtype == np.int32


def test_tokens_are_those_of_the_chat_template(load: Load, tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, HI]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
    assert load([{"prompt": messages, "label": "1"}])[0].token_ids.tolist() == expected


def test_the_system_message_stands_before_prompts_without(load: Load) -> None:
    rows = ["Hi", [HI], [{"role": "system", "content": "Be long."}, HI], json.dumps([HI])]
    pool = load([{"prompt": prompt, "label": 1} for prompt in rows], system="Be brief.")
    text, chat, own, as_json = (prompt.text for prompt in pool)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert text == chat == as_json
    assert own == text.replace("brief", "long")


def test_switches_are_handed_to_the_chat_template(load: Load, refuse: Refuse, tokenizer: Tokenizer) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template += "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    rows, quick = [{"prompt": "Hi", "label": 1}], {"enable_thinking": False}
    thoughtless = load(rows, tokenizer, chat_template_kwargs=quick)[0].text
    assert thoughtless == load(rows, tokenizer)[0].text + "<think>\n\n</think>\n\n"
    for name in ("enable_thought", "add_generation_prompt"):
        refuse(rows, f"{name}: is no switch", by=tokenizer, chat_template_kwargs={name: False})


def test_parquet_in_verls_form_is_read(load: Load, tmp_path: Path) -> None:
    row = {
        "data_source": "math_dapo",
        "prompt": [HI],
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": "a7"},
    }
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), file)
    prompt = load(file, label_key="reward_model.ground_truth")[1]
    assert (prompt.label, prompt.data_source, prompt.extra) == ("34", "math_dapo", {"index": "a7"})


def test_a_folder_is_read_in_the_order_of_names(load: Load, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def rows(*prompts: str) -> list[dict[str, str]]:
        return [{"prompt": prompt, "label": "1"} for prompt in prompts]

    (folder := tmp_path / "rows").mkdir()
    for number in (2, 0):
        table = pyarrow.Table.from_pylist(rows(f"{number}a", f"{number}b"))
        pyarrow.parquet.write_table(table, folder / f"part-0000{number}.parquet")
    (folder / "part-00001.jsonl").write_text(json.dumps(rows("1a")[0]))
    for name in ("_SUCCESS", ".part-00000.parquet.crc", "README.md"):
        (folder / name).write_text("no data")
    (folder / "deeper.parquet").mkdir()
    pool = load(folder)
    assert [prompt.asked for prompt in pool] == ["0a", "0b", "1a", "2a", "2b"]
    assert pool[4].place == f"{folder}/part-00002.parquet, row 2"
    assert len(load_worked_answers(DataConfig(train=str(folder)), tokenizer)) == 5


def test_overlong_prompts_are_dropped_and_counted(load: Load, refuse: Refuse) -> None:
    rows = [{"prompt": text, "label": "1"} for text in ("a", "word " * 50, "b")]
    pool = load(rows, max_prompt_tokens=20, overlong_prompts="drop")
    assert (len(pool), pool.dropped, [prompt.id for prompt in pool]) == (2, 1, [0, 1])
    tokens = len(load(rows)[1].token_ids)
    assert len(load(rows, max_prompt_tokens=tokens)) == 3
    refuse(rows, "line 2", f"{tokens} tokens, over data.max_prompt_tokens = {tokens - 1}", max_prompt_tokens=tokens - 1)
    refuse(rows[1:2], "all 1 prompts", "the shortest has", max_prompt_tokens=20, overlong_prompts="drop")


def test_held_out_prompts_are_the_eval_files_or_the_generators(load: Load, write: Write, tokenizer: Tokenizer) -> None:
    file = write([{"prompt": "a", "label": "1"}])
    assert len(load_prompts(DataConfig(train=file), tokenizer, split="eval")) == 0
    assert len(load(file, split="eval")) == 1
    generated = {"arithmetic": {"problems": 9, "eval_problems": 4}}
    train, held_out = (load_prompts(DataConfig(**generated), tokenizer, split=split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (9, 4)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in held_out}


def test_worked_answers_end_with_the_end_of_the_turn(load: Load, write: Write, tokenizer: Tokenizer) -> None:
    file = write([{"question": "How many?", "answer": "2+3=5\n#### 5", "worked": "5"}])
    (worked,) = load_worked_answers(DataConfig(train=file, **GSM8K), tokenizer)
    assert worked.prompt_ids.tolist() == load(file, **GSM8K)[0].token_ids.tolist()
    assert worked.response_ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(worked.response_ids) == "2+3=5\n#### 5<|im_end|>"
    (worked,) = load_worked_answers(DataConfig(train=file, response_key="worked", **GSM8K), tokenizer)
    assert tokenizer.decode(worked.response_ids[:-1]) == "5"
    with pytest.raises(UserError, match=r"data\.response_key"):
        load_worked_answers(DataConfig(train=file, response_key="workings", **GSM8K), tokenizer)


@pytest.mark.parametrize("answer", [" \n", None, [1]])
def test_a_worked_answer_without_text_is_refused(write: Write, tokenizer: Tokenizer, answer: object) -> None:
    with pytest.raises(UserError, match=r"line 1: holds|line 1: has an empty answer"):
        load_worked_answers(DataConfig(train=write([{"prompt": "Hi", "label": answer}])), tokenizer)
