"""A file and overrides become a configuration, or one message that names the setting."""

from __future__ import annotations

import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from megatron_dppo.config import BranchConfig, Config, LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.settings import as_yaml, load_config, nearest, settings


def _write(folder: Path, text: str) -> str:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def _refused(overrides: list[str], file: str | None = None) -> UserError:
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    return caught.value


def test_nothing_given_is_the_defaults() -> None:
    assert load_config(None, []) == Config()


def test_an_empty_file_and_a_section_of_comments_are_the_defaults(tmp_path: Path) -> None:
    assert load_config(_write(tmp_path, ""), []) == Config()
    assert load_config(_write(tmp_path, "run:\n  # steps: 3\npruning:\n  prompts:\n"), []) == Config()


def test_overrides_win_over_the_file_and_leave_its_other_settings(tmp_path: Path) -> None:
    file = _write(tmp_path, "pruning:\n  prompts: {keep: 0.4, floor: 0.1}\nrun: {steps: 7}\n")
    config = load_config(file, ["pruning.prompts.keep=0.9", "layout.tp=2"])
    assert (config.pruning.prompts.keep, config.pruning.prompts.floor) == (0.9, 0.1)
    assert (config.run.steps, config.layout.tp) == (7, 2)


CORE = [12, 31, 15, "1_0", 3, "1:30", True, 0.5, math.inf, None]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.lr=1e-6", 1e-6),  # YAML 1.1 reads this as a string
        (
            "data.reasoning_gym.tasks={a: {p: 1e-3, on: yes, day: 2024-01-01}}",
            {"a": {"p": 1e-3, "on": "yes", "day": "2024-01-01"}},
        ),
        ("data.reasoning_gym.tasks={a: {n: [012, 0x1f, 0o17, 1_0, +3, 1:30, TRUE, .5, .inf, ~]}}", {"a": {"n": CORE}}),
        ("run.steps=012", 12),
        ("run.profile=[010, 3]", (10, 3)),
        ("rollout.launch.count=0o10", 8),
        ("run.export=True", True),
        ("layout.dp=null", None),
        ("data.eval=", None),
        ("rollout.stop_token_ids=[3, 4]", (3, 4)),
        ("run.export=false", False),
        ("run.dir=2024", "2024"),  # words stay words, whatever YAML makes of them
        ("data.label_key=yes", "yes"),
        ("data.system='a: b # c'", "a: b # c"),
        ("model.path=a=b", "a=b"),
        ("rollout.servers=slurm", "slurm"),
        ("rollout.servers=[http://a:1,http://b:2]", ("http://a:1", "http://b:2")),
        ("rollout.servers=http://a:1", ("http://a:1",)),  # without brackets
        ("eval.benchmarks=gsm8k, math500", ("gsm8k", "math500")),
        ("probe.at=0.3", (0.3,)),
        ("rollout.launch.flags=--speculative={'a': 1, 'b': 2}", ("--speculative={'a': 1, 'b': 2}",)),
        ("rollout.launch.command=[/x/python,server.py]", ("/x/python", "server.py")),
        ("rollout.launch.command=null", None),
        ("rollout.launch.flags=[--tp-size, 2, --yes, yes]", ("--tp-size", "2", "--yes", "yes")),
        ("rollout.launch.env=[A=1,BIND=0|1,C=]", ("A=1", "BIND=0|1", "C=")),
        ('rollout.launch.flags=[\'{"a": 1, "b": 2}\']', ('{"a": 1, "b": 2}',)),
        ("rollout.ahead=1", 1),
        ("rollout.launch.tp=2", 2),
        ("rollout.tree.branches=[{entropy: 2}]", (BranchConfig(entropy=2.0),)),
        ("rollout.launch.tp=[1,2]", (1, 2)),
        ("data.eval=held_out.jsonl", "held_out.jsonl"),
        ("data.eval={aime24: a.jsonl, amc23: 2023.jsonl}", {"aime24": "a.jsonl", "amc23": "2023.jsonl"}),
    ],
)
def test_an_override_has_the_type_of_its_setting(override: str, value: object) -> None:
    *sections, name = override.split("=")[0].split(".")
    held = load_config(None, [override])
    for section in sections:
        held = getattr(held, section)
    assert getattr(held, name) == value


def test_everything_printed_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(
        None,
        [
            "optimizer.lr=3e-7",
            "rollout.stop_token_ids=[1, 2]",
            "pruning.completions.schedule.shape=cosine",
            "run.dir=2024",
            "data.system=line one: {x}\n\n  line 'two' # no comment ",
            "rollout.servers=[http://a:1,http://b:2]",
            "rollout.launch.flags=[--seed, 8, 'a, {b}']",
            "rollout.launch.tp=[1, 2]",
            "data.eval={aime24: 'a, {b}.jsonl', math500: m.jsonl}",
            "rollout.tree.branches=[{at: 9}, {entropy: 2.5, children: 3}]",
        ],
    )
    assert load_config(_write(tmp_path, as_yaml(config)), []) == config
    assert load_config(_write(tmp_path, as_yaml(Config())), []) == Config()


WORDS = [
    "a\nb", "é", "'", "\"", "\\", "\\n", "\t", " a ", "a\r\nb\n", "\u2028", "\x85", "\x07", "\U0001f600", "a: b",
    "# c", "", "yes", "on", "null", "~", "true", "1e-3", "012", "0o17", "1:30", "1_0", "2024-01-01", ".inf", "<<",
    "=", "-", "[]", "{a}", "@", "%", "a,b", "a=b",
]  # fmt: skip


@pytest.mark.parametrize("word", WORDS, ids=ascii)
def test_a_value_from_python_is_what_it_is_and_reads_back_the_same(word: str, tmp_path: Path) -> None:
    given = {
        "data": {
            "system": word,
            "prompt_key": word,
            "eval": {"x" + word: word},
            "verifiers": {"arguments": {"a": word}},
        },
        "rollout": {"launch": {"flags": [word, "--b"]}},
    }
    config = load_config(None, [], given)
    assert (config.data.system, config.data.prompt_key, config.data.eval) == (word, word, {"x" + word: word})
    assert config.data.verifiers.arguments == {"a": word}
    assert config.rollout.launch.flags == (word, "--b")
    assert load_config(_write(tmp_path, as_yaml(config)), []) == config


def test_numbers_of_python_and_numpy_are_taken_as_they_are() -> None:
    config = load_config(
        None, [], {"optimizer": {"lr": np.float32(0.5)}, "run": {"steps": np.int64(3), "dir": Path("a")}}
    )
    assert (config.optimizer.lr, config.run.steps, config.run.dir) == (0.5, 3, "a")
    for given, setting in (
        ({"run": {"dir": "\0"}}, "run.dir"),
        ({"run": 3}, "run"),
        ({"run": {"export": 1}}, "run.export"),
    ):
        with pytest.raises(UserError) as caught:
            load_config(None, [], given)
        assert caught.value.setting == setting


def test_every_setting_is_printed_under_its_meaning() -> None:
    text = as_yaml(Config())
    for setting in settings().values():
        assert f"{setting.key.rpartition('.')[2]}:" in text
    assert "# Tensor-parallel ranks.\n  tp: 1\n" in text
    assert "[constant, linear, cosine]" in text.replace("\n      #", "")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("run.stpes", ["run.steps"]),
        ("rollout.temprature", ["rollout.temperature"]),
        ("train.steps", ["run.steps", "sft.steps"]),  # the right name under a wrong section
        ("pruning.keep", ["pruning.prompts.keep", "pruning.completions.keep"]),
        ("optimizer.learning_rate_schedule", ["optimizer.schedule"]),
        ("kl_coef", ["loss.kl_coef"]),
        ("prunning", ["pruning"]),
        ("zzz", []),
        ("pruning.completion.keep", ["pruning.completions.keep"]),
        ("optimizer.learning_rate", ["optimizer.lr"]),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong: str, meant: list[str]) -> None:
    assert nearest(wrong) == meant
    error = _refused([f"{wrong}=1"])
    assert error.setting == wrong
    assert all(key in error.remedy for key in meant)


def test_a_file_may_leave_out_the_brackets_of_a_list_too(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("eval: {benchmarks: gsm8k}\nrollout: {stop_token_ids: 5, launch: {tp: 2}}")
    config = load_config(str(tmp_path / "a.yaml"), [])
    assert config.eval.benchmarks == ("gsm8k",) and config.rollout.stop_token_ids == (5,)
    assert config.rollout.launch.tp == 2


def test_an_unknown_key_in_a_file_is_named_in_full(tmp_path: Path) -> None:
    error = _refused([], _write(tmp_path, "pruning:\n  prompts:\n    keeep: 0.3\n"))
    assert error.setting == "pruning.prompts.keeep"
    assert "pruning.prompts.keep" in error.remedy


@pytest.mark.parametrize(
    ("override", "setting", "remedy"),
    [
        ("run.steps=0", "run.steps", "at least 1"),
        ("run.steps=2.5", "run.steps", "a whole number"),
        ("run.steps=true", "run.steps", "a whole number"),
        ("run.steps=1:30", "run.steps", "a whole number"),
        ("run.steps=yes", "run.steps", "a whole number"),
        ("run.export=yes", "run.export", "true or false"),
        ("run.export=on", "run.export", "true or false"),
        ("run.export=1", "run.export", "true or false"),
        ("data.system=a\0b", "data.system", "take it out"),
        ("rollout.launch.flags=[--a, '\ud800']", "rollout.launch.flags", "take it out"),
        ("optimizer.lr=0", "optimizer.lr", "above 0"),
        ("optimizer.lr=.nan", "optimizer.lr", "above 0"),
        ("optimizer.beta1=1", "optimizer.beta1", "at least 0 and below 1"),
        ("loss.name=ppo", "loss.name", "grpo or dapo"),
        ("layout.dp=0", "layout.dp", "at least 1 or null"),
        ("rollout.stop_token_ids=[1, x]", "rollout.stop_token_ids", "a list"),
        ("pruning.prompts=3", "pruning.prompts", "pruning.prompts.rule"),
        ("rollout.servers={a: b}", "rollout.servers", "slurm or a list, each element text (its default is [])"),
        ("rollout.launch.tp=[1,0]", "rollout.launch.tp", "each element a whole number at least 1"),
        ("rollout.tree.branches=[{at: 0}]", "rollout.tree.branches", "each element any of at, entropy, children, keep"),
        (
            "rollout.tree.branches=[{after: 9}]",
            "rollout.tree.branches",
            "each element any of at, entropy, children, keep",
        ),
        ("run.steps", "override", "section.setting=value"),
    ],
)
def test_a_wrong_value_names_the_setting_and_what_is_allowed(override: str, setting: str, remedy: str) -> None:
    error = _refused([override])
    assert error.setting == setting
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("reward.thinking_tags=</think>", "is not two different tags"),
        ("reward.thinking_tags=|,|", "is not two different tags"),
        ("reward.thinking_tags=['<think>','']", "is not two different tags"),
        ("rollout.roles=[solver,solver]", "names solver more than once"),
        ("rollout.roles=[solver,'']", "has an empty name"),
        ("model.lora.targets=[q_proj,q_proj]", "names q_proj more than once"),
        ("run.loggers=[mlflow,mlflow]", "names mlflow more than once"),
        ("rollout.tree.branches=[{at: 9, entropy: 1}]", "is to have either at"),
        ("rollout.tree.branches=[{at: 9}, {}]", "is to have either at"),
        ("rollout.tree.branches=[{at: 9}, {at: 9}]", "is to have earlier forks first"),
        ("run.late_s=.inf", "should be a finite number"),
    ],
)
def test_a_value_that_no_run_could_use_names_the_setting_and_the_problem(override: str, problem: str) -> None:
    error = _refused([override])
    assert error.setting == override.partition("=")[0]
    assert error.problem.startswith(problem)


@pytest.mark.parametrize(
    ("text", "setting", "problem"),
    [
        ("run:\n  steps: 1\n  steps: 2\n", "CONFIG", "steps stands twice, line 3"),
        ("run: [", "CONFIG", "line 1"),
        ("- run\n", "CONFIG", "no sections"),
        ("run: 3\n", "run", "is a section"),
        ("run: {steps: true}\n", "run.steps", "true or false"),
        ("run: {steps: 1:30}\n", "run.steps", "integer"),
        ("run: {export: yes}\n", "run.export", "neither true nor false"),
        ("run: {seed: !!int a}\n", "CONFIG", "invalid literal"),
        ('data: {system: "a\\0b"}\n', "data.system", "null"),
        ("1: 2\n", "1", "no such setting"),
    ],
)
def test_a_file_that_is_no_configuration_says_where(tmp_path: Path, text: str, setting: str, problem: str) -> None:
    error = _refused([], _write(tmp_path, text))
    assert error.setting == setting
    assert problem in error.problem


def test_a_file_that_is_absent_is_named() -> None:
    assert _refused([], "nowhere.yaml").value == "nowhere.yaml"


def test_settings_lists_every_leaf_of_the_configuration() -> None:
    assert list(settings()) == [key for key, _ in Config().leaves()]


def test_a_copy_is_checked_as_a_file_is_and_leaves_its_original() -> None:
    config = Config()
    copy = replace(config, run=replace(config.run, steps=3))
    assert (copy.run.steps, copy.run.seed, copy.model) == (3, config.run.seed, config.model)
    assert config == Config() != copy
    for wrong in ({"steps": 0}, {"stpes": 3}):
        with pytest.raises(ValidationError):
            replace(config.run, **wrong)


def test_a_configuration_is_frozen_and_the_same_after_a_pickle() -> None:
    config = load_config(None, ["rollout.servers=[http://a:1]", "layout.dp=2"])
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config.layout) == hash(LayoutConfig(dp=2))
    with pytest.raises(ValidationError):
        config.layout.dp = 3


def test_a_mistake_in_one_of_several_sources_is_named() -> None:
    listed = load_config(None, ["data.train=[{path: a.jsonl, weight: 3, prompt_key: null}, {path: 2024}]"]).data.train
    assert [(source.path, source.weight, source.prompt_key) for source in listed if not isinstance(source, str)] == [
        ("a.jsonl", 3.0, None),
        ("2024", 1.0, None),
    ]
    for source, words in (("weight: 0", r"= 0: weight: should be greater than 0"), ("wight: 3", "= 3: wight: extra")):
        with pytest.raises(UserError, match=rf"data\.train {words}"):
            load_config(None, [f"data.train=[{{path: a.jsonl, {source}}}]"])
