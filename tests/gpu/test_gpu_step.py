"""The benchmark of a step on a GPU: that it runs, as far as a machine without one can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_step.py"


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=SCRIPT.parents[1])


def test_a_tiny_shape_is_measured_anywhere() -> None:
    done = start("--tiny", "--sequences", "24")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["device"] == "cpu") == (not torch.cuda.is_available())
    (row,) = report["shapes"]
    for way in (row["packed"], row["padded"]):
        assert 0 < way["forward_backward_s"] < way["seconds"]
        assert way["tokens_per_second"] == pytest.approx(row["tokens"] / way["seconds"])
        assert way["fill"] == pytest.approx(row["tokens"] / (way["packs"] * way["pack_tokens"]))
    assert row["packed"]["fill"] > 0.95 > 0.6 > row["padded"]["fill"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_it_says_so() -> None:
    done = start()
    assert done.returncode == 2
    assert "needs CUDA" in done.stderr
