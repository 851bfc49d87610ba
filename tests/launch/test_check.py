"""``--check`` finds what is wrong with a run for so many ranks, and says how far the run is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dppo import cli
from megatron_dppo.init import character_tokenizer, write_model, write_tokenizer

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    write_model(tmp_path / "policy", hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96)
    return ["train", str(QUICKSTART), f"model.path={tmp_path}/policy", f"run.dir={tmp_path}/run", "run.steps=7"]


def test_a_run_that_can_start_is_checked_in_a_line_and_leaves_no_trace(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in (["--check"], ["--check", "4"]):
        assert cli.main([*words, *asked]) == 0
        assert capsys.readouterr().out == f"{tmp_path}/run: 0 of 7 steps are done\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("first", [["--check"], ["--check", "2"], ["--check=2"]])
def test_the_word_after_check_is_not_swallowed(
    first: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *settings = words
    assert cli.main([command, *first, *settings]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run: 0 of 7 steps are done\n"


MINE = """
print("hello")

def trl(completions, level): ...
def with_default(completions, level=1, **columns): ...
def of_two(solution, truth): ...
def objective(tokens): return tokens.ratio
async def converse(client): ...
def one_for_all(candidates, keep): return keep
"""


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["reward.function=mine.py:nothing"], "reward.function = mine.py:nothing mine.py has no function 'nothing'"),
        (["reward.function=mine.py:of_two"], "reward.function = mine.py:of_two cannot be called with (data_source"),
        (["reward.function=mine.py:trl"], "is called with the column 'level', which d.jsonl, line 1 does not have"),
        (["data.label_key=solution"], "data.train = d.jsonl, line 1 has no column 'solution'"),
        (
            ["pruning.completions.function=mine.py:rule"],
            "pruning.completions.function = mine.py:rule mine.py has no function 'rule'",
        ),
        (["rollout.engine_function=mine.py:Engine"], "mine.py has no function 'Engine'"),
        (
            ["rollout.engine_function=mine.py:trl"],
            "rollout.engine_function = mine.py:trl cannot be called with (path, *, device, dtype, world)",
        ),
        (
            ["pruning.prompts.function=mine.py:rule"],
            "pruning.prompts.function = mine.py:rule mine.py has no function 'rule'",
        ),
        (
            ["pruning.completions.function=mine.py:one_for_all"],
            "pruning.completions.function = mine.py:one_for_all returned array(0.5) for candidates of shape (2, 4)",
        ),
        (["loss.objective=mine.py:objective"], "has a gradient where the advantage is 0"),
        (
            ["rollout.engine=sglang", "rollout.servers=[http://a:1]", "rollout.conversation=mine.py:converse"],
            "rollout.conversation = mine.py:converse cannot be called with 2 arguments",
        ),
    ],
)
def test_functions_and_columns_that_do_not_fit_are_found_without_a_rank(
    overrides: list[str],
    problem: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(character_tokenizer(), tmp_path / "policy", max_tokens=128)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    own = [*words, "data.train=d.jsonl", "eval.problems=0", "--check"]
    assert cli.main([*own, "reward.function=mine.py:with_default"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path}/run: 0 of 7 steps are done\n"
    heard, passed = said.err.removesuffix("no mistake was found\n"), said.err.endswith("no mistake was found\n")
    assert passed and set(heard.split()) == {"hello"}, "what is imported may print, but not among the results"
    assert cli.main([*own, *overrides]) == 2
    said = capsys.readouterr()
    heard = " ".join(said.err.replace("problem", "").split())
    assert problem in heard and said.out == ""


def _named(text: str) -> list[str]:
    """What the errors of a text are about."""
    return re.findall(r"^error: (\S+)(?: =| is empty)", text, re.MULTILINE)


def test_all_mistakes_are_found_at_once(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "layout.tpp=2", "run.seed=often", "run.steps=0", "layout=2", "--check"]) == 2
    named = ["layout.tpp", "layout", "run.seed", "run.steps"]
    assert _named(capsys.readouterr().err) == named
    assert cli.main([*words, "layout.tpp=2", "run.seed=often", "run.steps=0", "layout=2"]) == 2
    assert _named(capsys.readouterr().err) == named, "without --check, too"
    apart = ["layout.tp=3", f"data.train={tmp_path}/d.jsonl", "reward.function=nowhere:score", "optimizer.min_lr=2"]
    clash = ["rollout.engine=vllm", "pack.max_tokens=16", "loss.objective=nowhere:objective"]
    assert cli.main([*words, *apart, *clash, "--check", "4"]) == 2
    assert _named(capsys.readouterr().err) == [
        "optimizer.min_lr",
        "pack.max_tokens",
        "rollout.engine",
        "layout.tp",
        "data.train",
        "reward.function",
        "loss.objective",
        "layout",
    ]


def test_what_stumbles_over_a_mistake_that_was_found_hides_none(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    clash = ["rollout.engine=sglang", "rollout.launch.count=1", "rollout.launch.env=[FOO]", "reward.function=nowhere:f"]
    assert cli.main([*words, *clash, "--check"]) == 2
    assert _named(capsys.readouterr().err) == ["rollout.launch.env", "reward.function"]
