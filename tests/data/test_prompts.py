"""Prompts and worked answers are those of the file, in the policy's chat template."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.config import DataConfig
from megatron_dppo.data import stored
from megatron_dppo.data.prompts import load_prompts, load_supervised_examples
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.init import CHAT_TEMPLATE
from tests.data.conftest import TOOLS_TEMPLATE, Load, Refuse, Write, write_parquet

GSM8K = {"prompt_key": "question", "label_key": "answer"}
HI = {"role": "user", "content": "Hi"}


def test_a_gsm8k_file_needs_two_settings(load: Load, tokenizer: Tokenizer) -> None:
    rows = [
        {"question": "How many?", "answer": "2+3=5\n#### 5"},
        {"question": "And then?", "answer": "#### 6"},
    ]
    pool = load(rows, **GSM8K)
    assert [prompt.id for prompt in pool] == [0, 1]
    assert pool[0].label == "2+3=5\n#### 5"
    assert pool[0].text == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(pool[0].token_ids) == pool[0].text
    assert pool[0].token_ids.dtype == np.int32


def test_the_system_message_stands_before_prompts_without(load: Load) -> None:
    rows = ["Hi", [HI], [{"role": "system", "content": "Be long."}, HI], json.dumps([HI])]
    pool = load([{"prompt": prompt, "label": 1} for prompt in rows], system="Be brief.")
    text, chat, own, as_json = (prompt.text for prompt in pool)
    assert text.startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>"
    )
    assert text == chat == as_json
    assert own == text.replace("brief", "long")
    (without,) = load(
        [{"prompt": [{"role": "system", "content": ""}, HI], "label": 1}], system="Be brief."
    )
    assert without.text == text.replace("Be brief.", "")


def test_switches_are_handed_to_the_chat_template(
    load: Load, refuse: Refuse, tokenizer: Tokenizer
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template += "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    rows, quick = [{"prompt": "Hi", "label": 1}], {"enable_thinking": False}
    thoughtless = load(rows, tokenizer, chat_template_kwargs=quick)[0].text
    assert thoughtless == load(rows, tokenizer)[0].text + "<think>\n\n</think>\n\n"
    for name in ("enable_thought", "add_generation_prompt"):
        refuse(rows, f"{name}: is no switch", by=tokenizer, chat_template_kwargs={name: False})


def test_parquet_in_verls_form_is_read(load: Load, tmp_path: Path) -> None:
    columns = {"data_source": "math_dapo", "prompt": [HI], "extra_info": {"index": "a7"}}
    columns["reward_model"] = {"ground_truth": "34", "style": "rule"}
    file = write_parquet(
        tmp_path / "rows.parquet", **{name: [value] for name, value in columns.items()}
    )
    (prompt,) = load(file, label_key="reward_model.ground_truth")
    assert (prompt.label, prompt.data_source, prompt.extra) == ("34", "math_dapo", {"index": "a7"})


def test_a_folder_is_read_in_the_order_of_names(
    load: Load, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (folder := tmp_path / "rows").mkdir()
    for number in (2, 0):
        write_parquet(
            folder / f"part-{number}.parquet", prompt=[f"{number}a", f"{number}b"], label=["1", "1"]
        )
    (folder / "part-1.jsonl").write_text('{"prompt": "1a", "label": "1"}')
    for name in ("_SUCCESS", ".part-0.parquet.crc", "README.md"):
        (folder / name).write_text("no data")
    (folder / "deeper.parquet").mkdir()
    pool = load(folder)
    assert [prompt.raw_prompt for prompt in pool] == ["0a", "0b", "1a", "2a", "2b"]
    assert pool[4].place == f"{folder}/part-2.parquet, row 2"
    assert len(load_supervised_examples(DataConfig(train=str(folder)), tokenizer)) == 5


def test_overlong_prompts_are_dropped_and_counted(load: Load, refuse: Refuse) -> None:
    rows = [{"prompt": text, "label": "1"} for text in ("a", "word " * 50, "b")]
    tokens = len(load(rows)[1].token_ids)
    for limit, kept in ((tokens, 3), (tokens - 1, 2)):
        pool = load(rows, max_prompt_tokens=limit, overlong_prompts="drop")
        assert (len(pool), pool.dropped, [prompt.id for prompt in pool]) == (
            kept,
            3 - kept,
            list(range(kept)),
        )
    refuse(
        rows,
        "line 2",
        f"{tokens} tokens, over data.max_prompt_tokens = {limit}",
        max_prompt_tokens=limit,
    )
    refuse(rows[1:2], "all 1 prompts", max_prompt_tokens=20, overlong_prompts="drop")


def test_held_out_prompts_are_the_eval_files_or_the_generators(
    load: Load, write: Write, tokenizer: Tokenizer
) -> None:
    file = write([{"prompt": "a", "label": "1"}])
    assert len(load_prompts(DataConfig(train=file), tokenizer, split="eval")) == 0
    assert len(load(file, split="eval")) == 1
    generated = DataConfig(arithmetic={"problems": 9, "eval_problems": 4})
    assert [
        len(load_prompts(generated, tokenizer, split=split)) for split in ("train", "eval")
    ] == [9, 4]


def test_worked_answers_end_with_the_end_of_the_turn(
    load: Load, write: Write, tokenizer: Tokenizer
) -> None:
    file = write([{"question": "How many?", "answer": "2+3=5\n#### 5", "worked": "5"}])
    for key, text in ((None, "2+3=5\n#### 5"), ("worked", "5")):
        (worked,) = load_supervised_examples(
            DataConfig(train=file, response_key=key, **GSM8K), tokenizer
        )
        assert worked.prompt_ids.tolist() == load(file, **GSM8K)[0].token_ids.tolist()
        assert worked.response_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(worked.response_ids) == text + "<|im_end|>"
    with pytest.raises(UserError, match=r"data\.response_key"):
        load_supervised_examples(
            DataConfig(train=file, response_key="workings", **GSM8K), tokenizer
        )


@pytest.mark.parametrize("size", [stored.LARGE, 0], ids=["in memory", "stored"])
def test_plain_prompts_begin_as_the_tokenizer_begins_text(
    size: int,
    load: Load,
    write: Write,
    framed: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "LARGE", size)
    monkeypatch.setenv(stored.CACHE, str(tmp_path / "cache"))
    file = write([{"prompt": "Hi", "label": "48"}, {"prompt": "<|endoftext|>Hi", "label": "48"}])
    first, hi, answer = (
        framed([t], add_special_tokens=False)["input_ids"][0] for t in ("<|endoftext|>", "Hi", "48")
    )
    for prompt in load(file, framed, chat_template=False):
        assert (prompt.token_ids.tolist(), prompt.text) == ([*first, *hi], "<|endoftext|>Hi")
    for worked in load_supervised_examples(DataConfig(train=file, chat_template=False), framed):
        assert worked.prompt_ids.tolist() == [*first, *hi]
        assert worked.response_ids.tolist() == [*answer, framed.eos_token_id]
    assert load(file, framed)[0].token_ids.tolist() == load(file)[0].token_ids.tolist()


def test_named_templates_are_those_that_transformers_takes(
    load: Load, refuse: Refuse, tokenizer: Tokenizer
) -> None:
    default, tool_use = CHAT_TEMPLATE, TOOLS_TEMPLATE + "{{ enable_thinking }}"
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = {"default": default, "tool_use": tool_use}
    tools = [{"type": "function", "function": {"name": "add", "description": "Add."}}]
    rows, switch = [{"prompt": "Hi", "label": 1, "tools": tools}], {"enable_thinking": False}
    told, plain = load([*rows, {"prompt": "Hi", "label": 1}], tokenizer)
    assert '"name": "add"' in told.text and "# Tools" not in plain.text
    assert load(rows, tokenizer, chat_template_kwargs=switch)[0].text.endswith("assistant\nFalse")
    refuse(
        [{"prompt": "Hi", "label": 1}], "is no switch", by=tokenizer, chat_template_kwargs=switch
    )
    tokenizer.chat_template = {"rag": default}
    refuse(rows, "has the chat templates rag, and no default", by=tokenizer)


@pytest.mark.parametrize("answer", [" \n", None, [1]])
def test_a_worked_answer_without_text_is_refused(
    write: Write, tokenizer: Tokenizer, answer: object
) -> None:
    with pytest.raises(UserError, match=r"line 1: holds|line 1: has an empty answer"):
        load_supervised_examples(
            DataConfig(train=write([{"prompt": "Hi", "label": answer}])), tokenizer
        )
