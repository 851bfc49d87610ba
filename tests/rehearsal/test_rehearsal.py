"""The GPU path, rehearsed on a device that computes nothing: settings that run, and exact bounds on their work.

One process plays all cases: a rehearsal patches torch and cannot run within pytest. The main suite plays
``cases.SHARE``; with ``REHEARSAL_CASES=all`` every case. The kernel counts in ``kernels.json`` change only on purpose:

    REHEARSAL_CASES=all REHEARSAL_RECORD=1 python -m pytest tests/rehearsal
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.cases import CASES, SHARE

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("kernels.json")
ALL = os.environ.get("REHEARSAL_CASES") == "all"
NAMES = tuple(CASES) if ALL else SHARE
MEMORY = ("dense", "tp2 sp", "overlap dp2", "pp2 last", "moe ep2")
FAULTY = tuple(f"{fault}: dense" for fault in ("item in the loss", "float32 product", "host tensor", "kept activation"))
GROWTH = 1.02
Found = dict[str, dict[str, Any]]

SUMS = "copy to the host in megatron_dppo/models/actor.py:Actor._total"
NORM = "item in megatron/core/optimizer/clip_grads.py:get_grad_norm_fp32"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    out = tmp_path_factory.mktemp("rehearsal") / "found.jsonl"
    names = [*NAMES, *(f"memory: {name}" for name in MEMORY), *FAULTY]
    command = [sys.executable, "-m", "tests.rehearsal.play", str(out), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["name"]: each for each in map(json.loads, out.read_text().splitlines())}


def check_runs(played: dict[str, Any]) -> None:
    assert "error" not in played, played["traceback"]


def check_waits(name: str, played: dict[str, Any]) -> None:
    assert played["waits"] == expected_waits(name, played)


def check_products(name: str, played: dict[str, Any]) -> None:
    """Products multiply bf16; main gradients are fp32. The fp32 router of experts is the exception."""
    wrong = [each for each in played["products"] if not each.startswith("torch.bfloat16") and "moe" not in each]
    assert not wrong
    assert played["main_grads"] == ["torch.float32"]


def check_kept(played: dict[str, Any]) -> None:
    """A step leaves no activation behind."""
    assert played["kept"] == 0


def kernels_per_pack(played: dict[str, Any]) -> float:
    return float(played["kernels"] / (played["packs"] * played["updates"]))


def expected_waits(name: str, played: dict[str, Any]) -> dict[str, int]:
    """Waits of a step: the sums and the gradient's norm once an update; all else is named by its case."""
    case, updates = CASES[name], played["updates"]
    waits = {NORM: updates}
    return waits


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_runs(found: Found, name: str) -> None:
    check_runs(found[name])


@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_only_in_known_places(found: Found, name: str) -> None:
    check_waits(name, found[name])


@pytest.mark.parametrize("name", NAMES)
def test_products_multiply_bf16_and_main_gradients_are_fp32(found: Found, name: str) -> None:
    check_products(name, found[name])


@pytest.mark.parametrize("name", NAMES)
def test_a_step_keeps_no_memory(found: Found, name: str) -> None:
    check_kept(found[name])
