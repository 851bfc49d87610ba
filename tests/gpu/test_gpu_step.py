"""The benchmark of a step on a GPU: that it runs, as far as a machine without one can tell."""

from __future__ import annotations

import importlib
import json
import multiprocessing
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from megatron_dppo.config import HEAD_CHUNK_MIB, Config, LayoutConfig, ModelConfig, PackConfig
from megatron_dppo.estimate.assumptions import GIB, Assumptions
from megatron_dppo.estimate.memory import count_persistent_bytes, estimate_actor_memory
from megatron_dppo.estimate.workload import Placement, Setup
from megatron_dppo.models.shape import PolicyShape
from tests.commands import Command

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"
TINY = PolicyShape(2, 64, 4, 2, 16, 128, 512, True, 1e6, 1e-6, 4096)
"""The script's own."""


@pytest.fixture(autouse=True)
def beside_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


class Measure(Protocol):
    def __call__(self, *arguments: str, code: int = 0) -> list[str]: ...


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """Runs the script to an exit code, and gives the lines that it says."""

    def run(*arguments: str, code: int = 0) -> list[str]:
        log = tmp_path_factory.mktemp("step") / "log"
        words = ["python", str(SCRIPT), "--json", *arguments]
        ended = Command(words, log, SCRIPT.parents[1], before=fork_shapes).exit_code()
        assert ended == code, log.read_text()
        return log.read_text().splitlines()

    return run


def fork_shapes() -> None:
    """The process of a shape, where no GPU forbids it, is a fork of one that has imported
    everything as well."""
    if not torch.cuda.is_available():
        forks = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method: forks


def report_of(said: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The whole report, which is the last line, and its only shape."""
    report = json.loads(said[-1])
    (row,) = report["shapes"]
    return report, row


@pytest.fixture(scope="module")
def plain(measure: Measure) -> tuple[dict[str, Any], dict[str, Any]]:
    return report_of(measure("--tiny", "--sequences", "24"))


def test_a_tiny_shape_is_measured_anywhere(plain: tuple[dict[str, Any], dict[str, Any]]) -> None:
    report, row = plain
    assert (report["device"] == "cpu") == (not torch.cuda.is_available())
    for way in (row["packed"], row["padded"]):
        assert 0 < way["forward_backward_s"] < way["seconds"]
        assert way["tokens_per_second"] == pytest.approx(row["tokens"] / way["seconds"])
        assert way["fill"] == pytest.approx(row["tokens"] / (way["packs"] * way["pack_tokens"]))
        assert 0 < way["model_flops_share"] < 1
        assert (way["peak_gib"] is None) == (not torch.cuda.is_available())
    assert row["packed"]["fill"] > 0.95 > 0.6 > row["padded"]["fill"]
    assert row["head_chunk_mib"] == HEAD_CHUNK_MIB["cuda" if torch.cuda.is_available() else "cpu"]
    assert row["host_waits"] is None


def test_memory_stands_beside_what_a_plan_expects(
    plain: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, row = plain
    layout, width = LayoutConfig(dp=1), 4 if row["dtype"] == "fp32" else 2
    for way in (row["packed"], row["padded"]):
        config = Config(
            model=ModelConfig(dtype=row["dtype"]),
            layout=layout,
            pack=PackConfig(max_tokens=way["pack_tokens"]),
        )
        placement = Placement(layout, ranks=1, servers=(1,), shared=True, gpus=1)
        setup = Setup(config, TINY, placement, Assumptions())
        held = sum(count_persistent_bytes(setup, 0).values())
        assert held == (16 if width == 4 else 18) * row["parameters"], (
            "the plan counts every parameter that there is"
        )
        parts = estimate_actor_memory(setup).parts
        assert way["planned_peak_gib"] * GIB == pytest.approx(
            held + parts["activations"] + parts["head"]
        )


def test_what_a_run_can_set_is_measured_and_a_table_says_where_time_goes(
    plain: tuple[dict[str, Any], dict[str, Any]], measure: Measure, tmp_path: Path
) -> None:
    settings = ("--recompute", "full", "--head-chunk-mib", "1", "--offload")
    watching = ("--sync-debug", "--profile", str(tmp_path / "table"))
    said = measure("--tiny", "--sequences", "24", *settings, *watching)
    _, row = report_of(said)
    assert (row["recompute"], row["head_chunk_mib"], row["offload"]) == ("full", 1, True)
    assert row["packed"]["planned_peak_gib"] < 0.6 * plain[1]["packed"]["planned_peak_gib"]
    title, *table = (tmp_path / "table").read_text().splitlines()
    assert (
        title
        == f"A step of tiny over {row['packed']['packs']} packs of {row['packed']['pack_tokens']} "
        "tokens"
    )
    assert any("aten::mm" in line for line in table)
    if torch.cuda.is_available():
        for name in ("update", "log_probabilities"):
            assert row["host_waits"][name]["per_pack"] <= 1, said
    else:
        assert "without CUDA the host waits for no device" in "".join(said)
        assert row["host_waits"] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA")
def test_each_value_that_the_host_reads_is_counted_where_it_is_read() -> None:
    watch = importlib.import_module("gpu_watch")
    there = torch.ones(3, device="cuda")
    waits = watch.host_waits(lambda: [value.item() for value in there])
    assert [count for place, count in waits.items() if place.startswith(__file__)] == [3]
    assert not watch.host_waits(lambda: there + there)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_it_says_so(measure: Measure) -> None:
    assert "needs CUDA" in " ".join(measure(code=2))
