"""``python -m tests.rehearsal``, on a published policy, and its roofline."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import resolve_shape
from megatron_dppo.estimate.workload import Setup, assign_gpus
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.settings import load_config
from tests.policies import trains
from tests.rehearsal.__main__ import main
from tests.rehearsal.command import as_text

pytestmark = pytest.mark.xdist_group("rehearsal/test_command")

CONFIG = "configs/qwen3_0.6b_math.yaml"
TWO_TRAIN = "rollout.launch.count=6"
ROOT = Path(__file__).parents[2]
LAYERS = 2
whole_matrix = pytest.mark.skipif(
    os.environ.get("REHEARSAL_CASES") != "all", reason="with the whole matrix"
)


def write_shape(folder: Path, name: str, layers: int = 4) -> Path:
    """Write a config.json with a published policy's width and a few layers."""
    shape = dataclasses.replace(PUBLISHED[name], num_layers=layers)
    (folder / "config.json").write_text(json.dumps(shape.as_config()))
    return folder


def run_in_root(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )


def rehearse(policy: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """Return the findings of the command, which ends with an exit code."""
    command = ["-m", "tests.rehearsal", CONFIG, TWO_TRAIN, f"model.path={policy}", "--json", *words]
    done = run_in_root(*command)
    assert done.returncode == code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


SMALL_GPU = ("layout.pp=2", "cluster.gpu=a100-40")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("policy"), "qwen3-0.6b", LAYERS)


@pytest.fixture(scope="module")
def found(policy: Path) -> dict[str, Any]:
    """Findings of the last of two stages on a GPU that is too small."""
    return rehearse(policy, *SMALL_GPU, "assume.reserved_gib=40", "--stage", "last", code=2)


@pytest.mark.quick
def test_memory_is_the_planned_memory(found: dict[str, Any]) -> None:
    memory = found["memory"]
    passes = [
        sum(memory[part][of] for part in ("activations", "head")) for of in ("rehearsed", "planned")
    ]
    assert 0.95 <= passes[0] / passes[1] <= 1.02
    for part in ("weights", "gradients", "optimizer"):
        assert memory[part]["rehearsed"] == pytest.approx(memory[part]["planned"], rel=1e-3)


def test_chosen_stage_is_played_and_extended_to_all_packs(found: dict[str, Any]) -> None:
    assert (found["rank"], found["stage"]) == (1, 1)
    assert found["packs_played"] == 4 < found["packs"]
    assert all(count == 1 for count in found["host_waits_per_update"].values())
    assert found["update"]["layers: attention"]["kernels"] == found["packs"] * LAYERS // 2 * 2
    busy = found["share_of_matrix_rate"]
    assert 0.1 < busy["and the pipeline's waits"] < busy["and collectives"] < busy["kernels"] < 0.72


def test_report_names_a_policy_that_does_not_fit(found: dict[str, Any], policy: Path) -> None:
    config = load_config(CONFIG, [TWO_TRAIN, f"model.path={policy}", *SMALL_GPU])
    shape = resolve_shape(config.model.path)
    report = "\n".join(
        as_text(Setup(config, shape, assign_gpus(config, shape), Assumptions()), found)
    )
    assert "it does NOT fit into 39.4 GiB" in report


def check_planned_seconds(found: dict[str, Any]) -> None:
    for part in ("kernel", "collective"):
        assert found[f"planned_{part}_seconds"] == pytest.approx(
            found[f"{part}_seconds"], rel=0.04
        ), part


def test_planned_kernels_and_collectives_are_the_rehearsed(found: dict[str, Any]) -> None:
    check_planned_seconds(found)


@whole_matrix
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-8b", ("layout.tp=2", "layout.sequence_parallel=true", "model.recompute=selective")),
        ("qwen3-8b", ("layout.tp=2", "layout.cp=2", "rollout.launch.count=4")),
        (
            "qwen3-30b-a3b",
            (
                "layout.tp=2",
                "layout.ep=2",
                "layout.sequence_parallel=true",
                "rollout.launch.count=4",
            ),
        ),
    ],
)
def test_seconds_of_other_layouts_are_planned(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """In the last layout etp is tp."""
    check_planned_seconds(
        rehearse(write_shape(tmp_path, name), "rollout.prompts_per_step=32", *words)
    )


@whole_matrix
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-8b", ("layout.tp=2", "layout.sequence_parallel=true")),
        ("qwen3-8b", ("layout.cp=2",)),
        ("qwen3-30b-a3b", ("layout.ep=2",)),
        ("qwen3.5-4b", ()),
    ],
)
def test_layer_keeps_the_planned_activations(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """The peaks of a few layers and of twice as many differ by layers alone; Qwen3.5 repeats every
    four."""
    if not trains(write_shape(tmp_path, name)):
        pytest.skip("this Megatron-Core cannot train it")
    few, many = (4, 8) if name.startswith("qwen3.5") else (3, 5)
    words += ("model.recompute=none", "pack.max_tokens=4096", "rollout.max_response_tokens=3000")
    one, other = (
        rehearse(write_shape(tmp_path, name, n), *words)["memory"]["activations"]
        for n in (few, many)
    )
    planned = other["planned"] - one["planned"]
    assert 0.95 * planned <= other["rehearsed"] - one["rehearsed"] <= 1.02 * planned


def test_rank_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([CONFIG, TWO_TRAIN, "--rank", "2"]) == 2
    assert "Give 0 to 1" in capsys.readouterr().err
