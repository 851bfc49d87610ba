"""``megatron-dppo rehearse``, on a published policy, and its roofline."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from megatron_dppo.cli import main
from megatron_dppo.config import LayoutConfig
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.kernels import tile_share
from megatron_dppo.estimate.memory import chunks_in_flight, shape_of
from megatron_dppo.estimate.workload import Setup, place
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.rehearse.booking import KernelLaunch
from megatron_dppo.rehearse.command import seconds
from megatron_dppo.rehearse.step import packs_to_play
from megatron_dppo.settings import load_config

CONFIG = "configs/qwen3_0.6b_math.yaml"
TWO_TRAIN = "rollout.launch.count=6"
ROOT = Path(__file__).parents[2]


LAYERS = 4


def write_shape(folder: Path, name: str) -> Path:
    """A directory without weights: a published policy's width with a few layers."""
    shape = dataclasses.replace(PUBLISHED[name], num_layers=LAYERS)
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size, "hidden_size": shape.hidden, "num_hidden_layers": LAYERS,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn, "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied,
    }  # fmt: skip
    if shape.experts:
        sizes |= {"moe_intermediate_size": shape.ffn, "num_experts": shape.experts, "norm_topk_prob": True}
        sizes |= {"num_experts_per_tok": shape.experts_per_token, "architectures": [shape.architecture]}
        Qwen3MoeConfig(**sizes).save_pretrained(folder)
    else:
        Qwen3Config(**sizes, architectures=[shape.architecture]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("policy"), "qwen3-1.7b")


def rehearse(policy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_dppo", "rehearse", CONFIG, TWO_TRAIN, f"model.path={policy}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture(scope="module")
def found(policy: Path) -> dict[str, Any]:
    done = rehearse(policy, "--json", "layout.pp=2", "--stage", "last")
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_memory_is_within_a_twentieth_of_the_plan(found: dict[str, Any]) -> None:
    assert 0.95 <= found["memory_over_plan"] <= 1.05
    passes = [sum(found["memory"][part][of] for part in ("activations", "head")) for of in ("rehearsed", "planned")]
    assert 0.95 <= passes[0] / passes[1] <= 1.02
    for part in ("weights", "gradients", "optimizer"):
        assert found["memory"][part]["rehearsed"] == pytest.approx(found["memory"][part]["planned"], rel=1e-3)


def test_it_plays_the_chosen_stage_and_carries_on_to_all_packs(found: dict[str, Any]) -> None:
    assert (found["rank"], found["stage"]) == (1, 1)
    assert found["packs_played"] == 4 < found["packs"]
    assert all(count == 1 for count in found["host_waits_per_update"].values())
    assert found["update"]["layers: attention"]["kernels"] == found["packs"] * LAYERS // 2 * 2
    busy = found["share_of_matrix_rate"]
    assert 0.1 < busy["and the pipeline's waits"] < busy["and collectives"] < busy["kernels"] < 0.72


def check_planned_seconds(found: dict[str, Any]) -> None:
    for part in ("kernel", "collective"):
        assert found[f"planned_{part}_seconds"] == pytest.approx(found[f"{part}_seconds"], rel=0.04), part


def test_planned_kernels_and_collectives_are_those_rehearsed(found: dict[str, Any]) -> None:
    check_planned_seconds(found)


@pytest.mark.skipif(os.environ.get("REHEARSAL_CASES") != "all", reason="with the whole matrix")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen3-8b", ("layout.tp=2", "layout.sequence_parallel=true", "model.recompute=selective")),
        ("qwen3-8b", ("layout.tp=2", "layout.cp=2", "rollout.launch.count=4")),
        ("qwen3-30b-a3b", ("layout.tp=2", "layout.ep=2", "layout.sequence_parallel=true", "rollout.launch.count=4")),
    ],
)
def test_other_layouts_seconds_are_planned_too(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    """With etp of tp in the last one."""
    done = rehearse(write_shape(tmp_path, name), "--json", "rollout.prompts_per_step=32", *words)
    assert done.returncode == 0, done.stderr
    check_planned_seconds(json.loads(done.stdout))


def test_what_does_not_fit_is_said_and_has_exit_code_2(policy: Path) -> None:
    done = rehearse(policy, "cluster.gpu=a100-40", "assume.reserved_gib=40")
    assert done.returncode == 2, done.stderr
    assert "it does NOT fit into 39.4 GiB" in done.stdout
    assert "host waits of an update:\n" in done.stdout
    assert "the largest costs, and what lowers them:\n  head: products: pruning.completions" in done.stdout


@pytest.mark.skipif(os.environ.get("REHEARSAL_CASES") != "all", reason="with the whole matrix")
def test_the_benchmark_names_each_configuration(policy: Path) -> None:
    """With so many packs that one is nearly full, which is what is planned for."""
    command = [sys.executable, "benchmarks/rehearsal.py", CONFIG, "--json", "--set", f"model.path={policy}"]
    command.append("pruning.completions.keep=0.5")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1]).values()
    assert 0.95 <= found["activations_over_plan"] <= 1.02


def test_a_rank_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", CONFIG, TWO_TRAIN, "--rank", "2"]) == 2
    assert "Give 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_as_many_packs_are_in_flight_as_in_the_whole_update(vpp: int) -> None:
    for pp in (2, 3, 4, 8):
        layout = LayoutConfig(pp=pp, vpp=vpp)
        for packs in range(pp, 65):
            few, many = packs_to_play(packs, layout)
            assert few == pp and min(2 * pp, packs) <= many <= packs
            for stage in range(pp):
                assert chunks_in_flight(stage, layout, many) == chunks_in_flight(stage, layout, packs)


@pytest.mark.parametrize(("rows", "columns", "share"), [(128 * 132, 256, 1.0), (128 * 133, 256, 0.9 * 266 / 396)])
def test_a_product_waits_for_its_last_round_of_tiles(rows: int, columns: int, share: float) -> None:
    assert tile_share(rows, columns, 132) == pytest.approx(share)


def test_seconds_are_the_larger_of_flops_and_bytes() -> None:
    config = load_config(CONFIG, [])
    shape = shape_of(config.model.path)
    setup = Setup(config, shape, place(config, shape), Assumptions())

    def kernel(name: str, flops: float, size: float) -> KernelLaunch:
        return KernelLaunch(name, flops, size, torch.bfloat16, torch.bfloat16, "megatron_dppo/x.py:f", None)

    assert seconds(kernel("aten::mm", 989e12 * 0.72, 1.0), setup) == pytest.approx(1.0)
    assert seconds(kernel("aten::add", 0.0, 3.35e12 * 0.85), setup) == pytest.approx(1.0)
    assert seconds(kernel("aten::add", 0.0, 1.0), setup) == 2e-6
    assert seconds(kernel("c10d::allreduce over 8", 0.0, 450e9 * 0.8), setup) == pytest.approx(2 * 7 / 8)
