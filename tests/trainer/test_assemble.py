"""Held-out problems are read by the names of their files and compared with the training data."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.evaluation.evaluator import EvalProblem
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import PolicyParts, load_pools
from tests.rollout.scripted import world_of


def load_held_out(tokenizer: Tokenizer, *overrides: str, rank: int = 0) -> list[EvalProblem]:
    config = load_config(None, ["data.chat_template=false", *overrides])
    shape = SimpleNamespace(max_positions=2048)
    return load_pools(PolicyParts(config, world_of(1, rank), shape, None, tokenizer, 0, ()))[1]


def write_sums(file: Path, *numbers: str) -> Path:
    file.write_text("".join(f'{{"prompt": "{number}+1=", "label": "2"}}\n' for number in numbers))
    return file


def test_files_are_held_out_by_their_names(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Each file gives at most ``eval.problems`` problems; a single file has no name."""
    one, two = write_sums(tmp_path / "one.jsonl", *"012"), write_sums(tmp_path / "two.jsonl", "0")

    def pools(*overrides: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for problem in load_held_out(tokenizer, f"data.train={one}", "eval.problems=2", *overrides):
            found[problem.name].append(problem.prompt.text)
        return found

    assert pools(f"data.eval={{b: {two}, a: {one}}}") == {"b": ["0+1="], "a": ["0+1=", "1+1="]}
    assert pools(f"data.eval={one}", f"eval.benchmarks=[b={two}]") == {
        "": ["0+1=", "1+1="],
        "b": ["0+1="],
    }
    assert len(pools(f"data.eval={one}", "eval.problems=null")[""]) == 3
    assert pools() == {} == pools(f"data.eval={one}", "eval.problems=0")


def test_held_out_problems_in_the_training_data_are_printed_once(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_sums(tmp_path / "train.jsonl", "1", "2")
    held_out, other = (
        write_sums(tmp_path / "held_out.jsonl", "3", " 2"),
        write_sums(tmp_path / "other.jsonl", "3"),
    )

    def load_and_print(file: Path, rank: int) -> str:
        load_held_out(tokenizer, f"data.train={train}", f"data.eval={file}", rank=rank)
        return capsys.readouterr().out

    of = (
        f"1 of 2 held-out problems are also in the training data: {held_out}, line 2 is "
        f"{train}, line 2"
    )
    assert load_and_print(held_out, 0).startswith(f"note  {of}; ")
    assert load_and_print(held_out, 1) == "" == load_and_print(other, 0)
