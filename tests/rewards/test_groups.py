"""A reward function of slime's ``group_rm`` form sees all completions of a prompt, and no other's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import resolve
from megatron_dppo.rewards.workers import RewardWorkers, Scored
from tests.rewards.test_adapters import THEIRS

LIMIT_S = 0.5


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "theirs.py"
    path.write_text(THEIRS)
    yield path


def said(*solutions: str, label: str = "7") -> list[ScoreItem]:
    return [ScoreItem("here", text, label, token_ids=range(len(text)), place="row 3") for text in solutions]


def scored(spec: str, *groups: list[ScoreItem], workers: int = 1, most_failures: int = 99) -> Scored:
    with closing(RewardWorkers(spec, workers=workers, timeout_s=LIMIT_S)) as pool:
        scoring = pool.begin(most_failures)
        for group in groups:
            scoring.add(group)
        return scoring.finish()


def test_a_group_is_scored_whole_and_each_prompt_by_itself(file: Path) -> None:
    """Of the right answers the shortest is worth something; the second group's is longer than all of the first."""
    groups = said("it is 7", "7", "8"), said("it is 7!", "it is 8"), said("8")
    found = scored(f"{file}:group_rm", *groups, workers=2)
    rewards = [score and score.reward for score in found.scores]
    assert rewards == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0] and found.errors == 0, found.tracebacks


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one_too_few", "returned 2 scores for a group of 3 completions"),
        ("one_for_all", "returned a float, not a list of scores for a group of 3 completions"),
        ("one_is_none", "a NoneType for a score"),
    ],
)
def test_whoever_does_not_score_every_completion_has_failed_with_all_of_them(file: Path, name: str, words: str) -> None:
    found = scored(f"{file}:{name}", said("a", "b", "c"), said("a", "b", "c"))
    assert (found.scores, found.errors, found.timeouts) == ([None] * 6, 6, 0)
    assert len(found.tracebacks) == 1 and words in found.tracebacks[0] and "for row 3" in found.tracebacks[0]


def test_a_group_has_the_time_of_all_its_completions(file: Path) -> None:
    """Twice the limit of one completion, for groups of four and of one."""
    found = scored(f"{file}:slow", said(f"{2 * LIMIT_S}", "b", "c", "d"), said(f"{2 * LIMIT_S}"), said("0"))
    assert [score is not None for score in found.scores] == [True] * 4 + [False, True]
    assert (found.timeouts, found.errors) == (1, 0)


def test_a_group_that_ends_its_process_is_counted_whole_and_costs_no_other(file: Path) -> None:
    found = scored(f"{file}:dies", said("die", "b"), said("live", "b", "c"))
    assert [score is not None for score in found.scores] == [False] * 2 + [True] * 3
    assert found.errors == 2 and "ended with exit code 5" in found.tracebacks[0]


def test_a_function_of_groups_that_slime_could_not_call_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("def three(args, samples, more): return [1.0]")
    with pytest.raises(UserError, match=r"cannot be called with \(args, samples\), as slime does"):
        resolve(f"{tmp_path}/theirs.py:three")
