"""A file and overrides become a configuration, or one message that names the setting."""

import math
from pathlib import Path

import numpy as np
import pytest
import yaml
from pydantic import ValidationError

from megatron_dppo.config import BranchConfig, Config, replace
from megatron_dppo.errors import UserError
from megatron_dppo.settings import as_yaml, find_nearest_settings, get_settings, load_config

REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())
CORE = [12, 31, 15, "1_0", 3, "1:30", True, 0.5, math.inf, None]
VALUES = {
    "optimizer.lr=1e-6": 1e-6,  # YAML 1.1 reads a string
    "data.reasoning_gym.tasks={a: {p: 1e-3, on: yes, day: 2024-01-01}}": {
        "a": {"p": 1e-3, "on": "yes", "day": "2024-01-01"}
    },
    "data.reasoning_gym.tasks={a: {n: [012, 0x1f, 0o17, 1_0, +3, 1:30, TRUE, .5, .inf, ~]}}": {
        "a": {"n": CORE}
    },
    "run.steps=012": 12,
    "run.profile=[010, 3]": (10, 3),
    "run.export=True": True,
    "layout.dp=null": None,
    "data.label_key=yes": "yes",
    "data.system='a: b # c'": "a: b # c",
    "rollout.servers=[http://a:1,http://b:2]": ("http://a:1", "http://b:2"),
    "eval.benchmarks=gsm8k, math500": ("gsm8k", "math500"),
    "rollout.launch.flags=--speculative={'a': 1, 'b': 2}": ("--speculative={'a': 1, 'b': 2}",),
    "rollout.launch.flags=[--tp-size, 2, --yes, yes]": ("--tp-size", "2", "--yes", "yes"),
    "rollout.launch.env=[A=1,BIND=0|1,C=]": ("A=1", "BIND=0|1", "C="),
    "rollout.tree.branches=[{entropy: 2}]": (BranchConfig(entropy=2.0),),
    "data.eval={aime24: a.jsonl, amc23: 2023.jsonl}": {"aime24": "a.jsonl", "amc23": "2023.jsonl"},
}
WORDS = [
    "a\nb", "é", "'", "\"", "\\n", "\t", " a ", "a\r\nb\n", "\u2028", "\x85", "\x07", "\U0001f600",
    "a: b",
    "# c", "", "yes", "null", "~", "1e-3", "012", "1:30", "2024-01-01", ".inf", "<<", "-", "[]",
    "{a}", "%", "a,b",
]  # fmt: skip


def write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_empty_files_and_sections_are_the_defaults(tmp_path: Path) -> None:
    assert load_config(None, []) == Config()
    for text in ("", "run:\n  # steps: 3\npruning:\n  prompts:\n"):
        assert load_config(write(tmp_path, text), []) == Config()


def test_overrides_win_over_the_file_alone(tmp_path: Path) -> None:
    file = write(
        tmp_path, "pruning:\n  prompts: {keep: 0.4, floor: 0.1}\nrollout: {stop_token_ids: 5}\n"
    )
    config = load_config(file, ["pruning.prompts.keep=0.9", "layout.tp=2"])
    assert (config.pruning.prompts.keep, config.pruning.prompts.floor) == (0.9, 0.1)
    assert (config.layout.tp, config.rollout.stop_token_ids) == (2, (5,))


@pytest.mark.parametrize("override", VALUES)
def test_an_override_has_the_type_of_its_setting(override: str) -> None:
    assert (
        dict(load_config(None, [override]).iter_settings())[override.partition("=")[0]]
        == VALUES[override]
    )


def test_printed_settings_read_back_the_same(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=3e-7", "pruning.completions.schedule.shape=cosine", "run.dir=2024"]
    overrides += [
        "rollout.tree.branches=[{at: 9}, {entropy: 2.5, children: 3}]",
        "rollout.launch.tp=[1, 2]",
    ]
    for config in (Config(), load_config(None, overrides)):
        assert load_config(write(tmp_path, as_yaml(config)), []) == config


@pytest.mark.parametrize("word", WORDS, ids=ascii)
def test_python_values_are_kept_and_read_back_the_same(word: str, tmp_path: Path) -> None:
    data = {"system": word, "eval": {"x" + word: word}, "verifiers": {"arguments": {"a": word}}}
    config = load_config(None, [], {"data": data, "rollout": {"launch": {"flags": [word, "--b"]}}})
    assert (config.data.system, config.data.eval) == (word, {"x" + word: word})
    assert config.data.verifiers.arguments == {"a": word}
    assert config.rollout.launch.flags == (word, "--b")
    assert load_config(write(tmp_path, as_yaml(config)), []) == config


def test_numpy_numbers_and_paths_are_taken() -> None:
    given = {"optimizer": {"lr": np.float32(0.5)}, "run": {"steps": np.int64(3), "dir": Path("a")}}
    config = load_config(None, [], given)
    assert (config.optimizer.lr, config.run.steps, config.run.dir) == (0.5, 3, "a")


def test_every_setting_is_printed_with_its_meaning() -> None:
    text = as_yaml(Config())
    assert list(get_settings()) == [key for key, _ in Config().iter_settings()]
    for key in get_settings():
        assert f"{key.rpartition('.')[2]}:" in text
    assert "# Tensor-parallel ranks.\n  tp: 1\n" in text


@pytest.mark.parametrize("key", REFUSALS["unknown"])
def test_an_unknown_key_names_the_nearest(key: str) -> None:
    meant = REFUSALS["unknown"][key]
    assert find_nearest_settings(key) == meant
    with pytest.raises(UserError) as caught:
        load_config(None, [f"{key}=1"])
    assert caught.value.setting == key
    assert all(each in caught.value.remedy for each in meant)


@pytest.mark.parametrize("row", REFUSALS["settings"], ids=lambda row: ascii(row[0]))
def test_a_wrong_value_names_its_setting(row: list[str]) -> None:
    override, fragment, *named = row
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    assert caught.value.setting == (named or [override.partition("=")[0]])[0]
    assert fragment in str(caught.value)


@pytest.mark.parametrize("row", REFUSALS["files"], ids=lambda row: ascii(row[0]))
def test_a_wrong_file_names_the_place(row: list[str], tmp_path: Path) -> None:
    text, fragment, setting = row
    with pytest.raises(UserError) as caught:
        load_config(write(tmp_path, text), [])
    assert caught.value.setting == setting
    assert fragment in str(caught.value)


def test_a_copy_is_checked_and_leaves_its_original() -> None:
    config = Config()
    copy = replace(config, run=replace(config.run, steps=3))
    assert (copy.run.steps, copy.model) == (3, config.model) and config == Config()
    for wrong in ({"steps": 0}, {"stpes": 3}):
        with pytest.raises(ValidationError):
            replace(config.run, **wrong)
