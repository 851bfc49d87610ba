"""The tokenizer, its stop tokens and its chat template are those of the policy's own files."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_dppo.data import tokenizer as module
from megatron_dppo.data.tokenizer import (
    Tokenizer,
    check_template,
    load_tokenizer,
    pad_token_id,
    stop_note,
    stop_token_ids,
)
from megatron_dppo.errors import UserError


def test_stops_are_those_of_the_files_and_the_end_of_turn(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    end = tokenizer.eos_token_id
    assert stop_token_ids(tmp_path, tokenizer) == (end,)
    for file, content, stops in (
        ("config.json", {"eos_token_id": 7}, (7, end)),
        ("generation_config.json", {"pad_token_id": 3}, (7, end)),
        ("generation_config.json", {"eos_token_id": [8, 9], "pad_token_id": 3}, (8, 9, end)),
    ):
        (tmp_path / file).write_text(json.dumps(content))
        assert stop_token_ids(tmp_path, tokenizer) == stops
        own, theirs = tokenizer.decode([end]), tokenizer.decode([stops[0]])
        note = stop_note(tmp_path, tokenizer)
        assert (
            f"at {own} (the tokenizer's eos_token) and at {theirs}" in note
            and note.count(".json") == 1
        )
    (tmp_path / file).write_text(json.dumps({"eos_token_id": [8, end]}))
    assert stop_token_ids(tmp_path, tokenizer) == (8, end)
    assert stop_note(tmp_path, tokenizer) == ""


@pytest.mark.parametrize("content", ["[]", "[" * 100_000, '{"eos_token_id": [null]}'])
def test_a_malformed_stop_names_the_file(
    tmp_path: Path, tokenizer: Tokenizer, content: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(UserError, match=r"generation_config\.json"):
        stop_token_ids(tmp_path, tokenizer)


@pytest.mark.parametrize(
    ("file", "settings", "problem"),
    [
        (
            "config.json",
            {"vocab_size": 100},
            "its tokenizer has the token id 100, and the embedding has 100 rows",
        ),
        ("tokenizer_config.json", {"pad_token": "<pad>"}, "its tokenizer has the token id "),
    ],
)
def test_a_token_without_a_row_in_the_embedding_is_refused(
    tmp_path: Path, model: Path, file: str, settings: dict[str, object], problem: str
) -> None:
    """The tokenizer has as many tokens as there are rows. Transformers adds a padding token that it
    does not know."""
    folder = shutil.copytree(model, tmp_path / "policy")
    (folder / "generation_config.json").unlink(missing_ok=True)
    vocabulary = {"vocab_size": len(load_tokenizer(folder))}
    for name, changes in (("config.json", vocabulary), (file, settings)):
        stop_token_ids(folder, load_tokenizer(folder))
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    with pytest.raises(UserError) as caught:
        stop_token_ids(folder, load_tokenizer(folder))
    assert caught.value.setting == "model.path" and problem in caught.value.problem


def test_padding_stops_no_fresh_policy_and_text_survives(model: Path, tokenizer: Tokenizer) -> None:
    assert pad_token_id(tokenizer) == tokenizer.pad_token_id
    assert pad_token_id(tokenizer) not in stop_token_ids(model, tokenizer)
    text = "  two  spaces\n\n\ttab ½ naïve e\u0301 日本\u2028 🙂 ####"
    assert tokenizer.decode(tokenizer([text], add_special_tokens=False)["input_ids"][0]) == text


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    for folder, words in (
        (tmp_path / "nowhere", r"nowhere: is no directory"),
        (tmp_path, "holds no tokenizer"),
    ):
        with pytest.raises(UserError, match=rf"model\.path = .*{words}"):
            load_tokenizer(folder)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path)


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LOOPS, "does not end within 1 s"),
        (
            "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}",
            "makes more than 1,000,000 characters",
        ),
        ("{{ 'a' * 10**10 }}", "takes more than 1024 MiB"),
    ],
)
def test_a_template_without_measure_is_refused(template: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with patch.object(module, "CPU_S", 1), pytest.raises(UserError) as caught:
        check_template(tmp_path)
    assert caught.value.setting == "model.path" and problem in caught.value.problem


@pytest.mark.parametrize(
    "template", ["{{ messages[0]['content'] }}", "{% generation %}", "{{ 1/0 }}"]
)
def test_other_faults_of_a_template_are_left_to_the_tokenizer(
    template: str, tmp_path: Path
) -> None:
    for content in (template, [{"name": "default", "template": template}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": content}))
        check_template(tmp_path)
