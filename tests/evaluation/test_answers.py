"""Whole batches of a killed evaluation stay, and the rest is answered again."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.answers import ANSWERS, AnswerLog, read_finished, write_scores

SETTINGS = {"eval.samples": 2, "eval.temperature": 0.5, "rollout.stop_token_ids": (1, 2)}
BATCHES = [[("sums", 0), ("sums", 1)], [("sums", 2), ("sums", 3)], [("products", 0)]]


def rows(batch: list[tuple[str, int]]) -> list[dict[str, Any]]:
    return [
        {
            "benchmark": name,
            "problem": problem,
            "sample": sample,
            "extracted": f"line\u2028 {sample}\n",
        }
        for name, problem in batch
        for sample in range(2)
    ]


def opened(
    folder: Path, batches: list[list[tuple[str, int]]] = BATCHES, **changed: object
) -> AnswerLog:
    problems = {name: "some problems" for batch in batches for name, _ in batch}
    return AnswerLog(folder, SETTINGS | {"problems": problems} | changed, batches, samples=2)


def test_a_cut_file_keeps_its_whole_batches(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as log:
        ends = []
        for batch in BATCHES:
            log.append(rows(batch))
            ends.append((tmp_path / ANSWERS).stat().st_size)
    whole = (tmp_path / ANSWERS).read_bytes()
    near_ends = {end + beside for end in ends for beside in (-1, 0, 1)}
    for cut in sorted(near_ends | {*range(0, len(whole), 13)}):
        (tmp_path / ANSWERS).write_bytes(whole[:cut])
        with closing(opened(tmp_path)) as log:
            assert log.whole == [end <= cut for end in ends]
            for batch, there in zip(BATCHES, log.whole, strict=True):
                if not there:
                    log.append(rows(batch))
            assert log.read_rows() == [row for batch in BATCHES for row in rows(batch)]
        assert (tmp_path / ANSWERS).read_bytes() == whole


def test_benchmarks_alternate_in_one_folder(tmp_path: Path) -> None:
    """A kill has left one batch and half of the next of the first benchmark."""
    sums, products = BATCHES[:2], BATCHES[2:]
    with closing(opened(tmp_path, sums)) as log:
        log.append(rows(sums[0]))
        log.append(rows(sums[1])[:3])
    with closing(opened(tmp_path, products)) as log:
        assert log.whole == [False]
        log.append(rows(products[0]))
    with closing(opened(tmp_path, sums)) as log:
        assert log.whole == [True, False]
        log.append(rows(sums[1]))
        assert log.read_rows() == [
            row for batch in (sums[0], products[0], sums[1]) for row in rows(batch)
        ]
    with pytest.raises(
        UserError, match=r"begun with the problems of sums = \"some problems\" \(now \"others\"\)"
    ):
        opened(tmp_path, sums, problems={"sums": "others"})
    with closing(opened(tmp_path, products)) as log:
        assert log.whole == [True]


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    opened(tmp_path).close()
    opened(tmp_path, **{"eval.top_k": None}).close()  # a setting of a later version
    with pytest.raises(UserError) as caught:
        opened(tmp_path, **{"eval.samples": 4, "run.seed": 2})  # type: ignore[arg-type]
    assert caught.value.setting == "eval.out"
    assert (
        caught.value.problem == "was begun with eval.samples = 2 (now 4); run.seed = null (now 2)"
    )


def test_a_folder_has_one_evaluation_at_a_time(tmp_path: Path) -> None:
    with closing(opened(tmp_path)), pytest.raises(UserError, match="is held by process"):
        opened(tmp_path)
    opened(tmp_path).close()


def test_only_finished_evaluations_are_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no evaluation"):
        read_finished(tmp_path, "--baseline")
    with closing(opened(tmp_path)) as log:
        log.append(rows(BATCHES[0]))
    with pytest.raises(UserError, match="not finished"):
        read_finished(tmp_path, "--baseline")
    write_scores(tmp_path, {"model": "m"})
    assert read_finished(tmp_path, "--baseline") == rows(BATCHES[0])
    assert json.loads((tmp_path / "scores.json").read_text()) == {"model": "m"}
    names = {".lock", "answers.jsonl", "evaluation.json", "scores.json"}
    assert {file.name for file in tmp_path.iterdir()} == names
