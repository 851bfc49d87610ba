"""``probe-tree`` on policies of random weights, whose rewards are decided at one place."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from megatron_dppo.config import Config
from megatron_dppo.probe_tree import probe_tree
from tests.ranks import RankPool
from tests.small_runs import small_run, write_run

REWARD = """
def first(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[:1] > "e")

def last(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[-1:] > "e")

def never(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""
AT = 5
"""Of six tokens: what the last one does is all that is left."""


def probed(rank: int, size: int, config: Config) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        probe_tree(config)
    return printed.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("probe"))
    (folder / "decided.py").write_text(REWARD)
    return folder


def settings(folder: Path, decided: str, *layout: str) -> Config:
    words = f"""
    rollout.samples_per_prompt=8 rollout.max_response_tokens=6 reward.function={folder}/decided.py:{decided}
    probe.at=[{AT / 6}] probe.prompts=8 probe.roots=3 probe.continuations=3
    """
    return small_run(folder, folder / "run", *words.split(), *layout)


def row(printed: str) -> list[float]:
    """The place, the tokens after it, the variance after it, with its interval."""
    (line,) = re.findall(rf"^ +{AT} .*$", printed, re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.?\d*", line)][:5]


def test_a_tree_is_named_where_the_end_decides(folder: Path, ranks: RankPool) -> None:
    (printed,) = ranks.run(1, probed, settings(folder, "last"))
    _, tokens, variance, low, _ = row(printed)
    assert tokens == pytest.approx(1 / 6, abs=0.02)
    assert variance > low > 2 * tokens
    assert re.search(rf"rollout\.tree\.branches=\[\{{at: {AT}, children: \d\}}\] with \d roots is worth", printed), (
        printed
    )


def test_flat_groups_are_named_where_the_beginning_decides(folder: Path, ranks: RankPool) -> None:
    (printed,) = ranks.run(1, probed, settings(folder, "first"))
    assert "flat: no tree" in printed
    assert not (folder / "run").exists(), "a probe leaves the run's folder alone"


@pytest.mark.parametrize("layout", ["layout.tp=2", "layout.dp=2", "layout.pp=2"])
def test_every_layout_finds_the_same(folder: Path, ranks: RankPool, layout: str) -> None:
    (alone,) = ranks.run(1, probed, settings(folder, "last"))
    first, second = ranks.run(2, probed, settings(folder, "last", layout))
    assert row(first) == pytest.approx(row(alone), abs=0.0101), "to the last digit that is printed"
    assert second == "", "one rank speaks"


def test_rewards_that_are_all_equal_are_refused(folder: Path, ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"equal rewards.*Raise probe\.prompts"):
        ranks.run(1, probed, settings(folder, "never"))
