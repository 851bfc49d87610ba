"""What the pages say of a run's own words is what the code says."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from megatron_dppo.config.exclusions import exclusions
from megatron_dppo.observe.timers import PHASES
from tests.docs.documents import DOCUMENTS, ROOT, spans

PACKAGE = ROOT / "megatron_dppo"
METRIC = re.compile(r"(?:rollout|reward|prune|pack|train|perf|eval)/[a-z_\d]*[a-z](?:/[a-z]+)?")


def _strings() -> set[str]:
    """Every constant piece of text of the package; what an f-string puts in divides its pieces."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _described() -> set[str]:
    return {span for span in spans("docs/metrics.md") if "/" in span}


def test_every_file_of_the_checkout_that_is_named_is_there() -> None:
    place = re.compile(r"(?:benchmarks|configs|megatron_dppo|scripts|tests|tools)/[\w/.]*")
    named = {(document, span) for document in DOCUMENTS for span in spans(document) if place.fullmatch(span)}
    assert ("CONTRIBUTING.md", "tests/docs/ways.py") in named
    assert {(document, span) for document, span in named if not (ROOT / span).exists()} == set()


def test_every_metric_of_a_run_is_described(quickstart: Path) -> None:
    rows = map(json.loads, (quickstart / "metrics.jsonl").read_text().splitlines())
    assert {name for row in rows for name in row} - {"step"} - _described() == set()


def test_every_metric_that_the_code_can_write_is_described_and_no_other() -> None:
    known = {text for text in _strings() if METRIC.fullmatch(text)} | {f"perf/{phase}_time" for phase in PHASES}
    named = {name for name in _described() if METRIC.fullmatch(name)}
    without_a_timer, by_a_timer_alone = {"perf/reward_time"}, {"perf/save_time"}
    assert known - named <= without_a_timer
    assert named - known <= by_a_timer_alone


def test_what_troubleshooting_quotes_is_said_by_the_code() -> None:
    """Quoted words that stand in the first column of a table, piece by piece between what is only an example."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    firsts = re.findall(r"^\| (.*?) \|", page, re.MULTILINE)
    quoted = [span for cell in firsts for span in re.findall(r"`([^`]+)`", cell) if " " in span]
    said = "\0".join([*_strings(), *(row.because for row in exclusions())])
    pieces = [piece.strip() for span in quoted for piece in span.split("…")]
    assert len(quoted) > 20
    assert [piece for piece in pieces if piece and piece not in said] == []
