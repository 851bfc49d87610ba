"""Where a completion ends is what the policy's own files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer, pad_token_id, stop_token_ids, without_chat_marks
from megatron_dppo.errors import UserError


def test_generation_config_names_the_stops_before_config(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert stop_token_ids(tmp_path, tokenizer) == (tokenizer.eos_token_id,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert stop_token_ids(tmp_path, tokenizer) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 3}))
    assert stop_token_ids(tmp_path, tokenizer) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9], "pad_token_id": 3}))
    assert stop_token_ids(tmp_path, tokenizer) == (8, 9)


@pytest.mark.parametrize(
    ("file", "settings", "problem"),
    [
        ("config.json", {"vocab_size": 100}, "its tokenizer has the token id 100, and the embedding has 100 rows"),
        ("tokenizer_config.json", {"pad_token": "<pad>"}, "its tokenizer has the token id "),
        ("generation_config.json", {"eos_token_id": [2, 10**6]}, "has the token id 1000000, and"),
        ("config.json", {"eos_token_id": -1}, "eos_token_id in config.json has the token id -1, and"),
    ],
)
def test_a_token_without_a_row_in_the_embedding_is_refused(
    tmp_path: Path, model: Path, file: str, settings: dict[str, object], problem: str
) -> None:
    """The tokenizer has as many tokens as there are rows; transformers adds a padding token that it does not know."""
    folder = tmp_path / "policy"
    shutil.copytree(model, folder)
    stop_token_ids(folder, tokenizer := load_tokenizer(folder))
    written = json.loads((folder / "config.json").read_text()) | {"vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "generation_config.json").unlink(missing_ok=True)
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | settings))
    with pytest.raises(UserError) as caught:
        stop_token_ids(folder, load_tokenizer(folder))
    assert caught.value.setting == "model.path" and problem in caught.value.problem


def test_people_are_shown_a_prompt_without_the_marks_of_its_template() -> None:
    rendered = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 <|x|> 3?<|im_end|>\n"
    assert without_chat_marks(rendered + "<|im_start|>assistant\n<think>\n\n</think>\n\n") == (
        "Be brief.\nWhat is 2 <|x|> 3?"
    )
    assert without_chat_marks("<think>\nso\n</think>\n5 <|im_end|>") == "<think>\nso\n</think>\n5"
    assert without_chat_marks(" 2+3=\n") == "2+3="


@pytest.mark.parametrize(
    "content", ["[]", "3", "[" * 100_000, "{", '{"eos_token_id": "a"}', '{"eos_token_id": [null]}']
)
def test_stop_that_is_no_token_names_its_file(tmp_path: Path, tokenizer: Tokenizer, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        stop_token_ids(tmp_path, tokenizer)


def test_padding_is_no_stop_of_a_fresh_policy(model: Path, tokenizer: Tokenizer) -> None:
    assert pad_token_id(tokenizer) == tokenizer.pad_token_id
    assert pad_token_id(tokenizer) not in stop_token_ids(model, tokenizer)


@pytest.mark.parametrize("text", ["2+3=5\n#### 5", "  two  spaces\n\n\ttab ", "½ naïve e\u0301 日本\u2028 🙂"])
def test_any_text_survives_the_byte_level_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer([text], add_special_tokens=False)["input_ids"][0]) == text
