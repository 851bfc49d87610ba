"""Where a completion ends is what the policy's own files say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dppo.data.tokenizer import Tokenizer, pad_token_id, stop_token_ids
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
