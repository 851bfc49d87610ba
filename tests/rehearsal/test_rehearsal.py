"""The GPU path, rehearsed on a device that computes nothing: settings that run, and exact bounds on
their work.

One process plays all cases: a rehearsal patches torch and cannot run within pytest. The second tier
plays ``cases.SHARE``; with ``REHEARSAL_CASES=all`` every case. ``kernels.json`` has kernel counts
for each release of Megatron-Core, and those that are others with a later Transformer Engine. They
change only on purpose:

    REHEARSAL_CASES=all REHEARSAL_RECORD=1 python -m pytest tests/rehearsal
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.rehearsal.cases import CASES, SHARE
from tests.rehearsal.device import VERSIONS

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("kernels.json")
ALL = os.environ.get("REHEARSAL_CASES") == "all"
NAMES = tuple(CASES) if ALL else SHARE
PINNED = {
    "kl reference on host": {"bf16": 1},
    "offload": {"fp32": 2},
    "checkpoint": {},
    "checkpoint offload": {"fp32": 2},
    "checkpoint moe": {},
}
"""Cases that pin memory of the model's size, and how many tensors of each type they pin for each
weight. Of the optimizer's state it is only the moments: fake tensors have no address by which to
tell master weights from weights."""
GROWTH = 1.02
Found = dict[str, dict[str, Any]]

MEGATRON = version("megatron-core").rpartition(".")[0]
UPDATED = "copy to the host in megatron_dppo/models/actor.py:Actor._read"
MEASURED = "copy to the host in megatron_dppo/models/actor.py:Policy.log_probabilities"
OFFLOADED = "stream.synchronize in megatron_dppo/models/optimizer.py:OffloadedState.offload"
ROTARY = "in megatron/core/models/common/embeddings/rope_utils.py:_apply_rotary_pos_emb_thd"
SEGMENTS = "copy to the host in megatron_dppo/models/layer_specs.py:SegmentAttention.forward"
DISPATCHED = (
    "event.synchronize in megatron/core/transformer/moe/token_dispatcher.py:"
    "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"
)
PINNED_BY = "megatron_dppo/models/pinned.py:allocate_pinned_buffer"
OF_A_PACK = (
    "megatron_dppo/models/responses.py:to_device",
    "megatron/core/transformer/moe/moe_utils.py:maybe_move_tensor_to_cpu",
    ".preload_tensors",
)
ROUTER = (
    "torch.float32 to torch.float32 in "
    "transformer_engine/pytorch/cpp_extensions/gemm.py:general_gemm"
)
LEFT = (
    ":RotaryEmbedding.get_emb", ":get_cublas_workspace", ":get_dummy_wgrad",
    ":MoEAlltoAllTokenDispatcher.preprocess",
    ":P2PCommunicator._communicate.<locals>.create_tensor_recv_prev", ":forward_step_calc_loss",
    "elsewhere",
    ":_compute_loss_scale", ":ExpertLoad.take",
    ":_gather_along_first_dim", ":RouterReplay.get_replay_topk", ":RoutingReplay._to_device",
    ":_build_head_perm_for_split_sections",
)  # fmt: skip
"""Functions whose memory may stay after a step: workspaces, counts, the last pack's input of a
stage, its routing."""
LAYERS, HIDDEN, BF16 = 4, 64, 2
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("test_rehearsal")]
"""All tests wait for one fixture."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    if shutil.which("g++") is None and not ALL:
        pytest.skip("a rehearsal compiles a small C++ file: install g++")
    out = tmp_path_factory.mktemp("rehearsal") / "found.jsonl"
    names = [*NAMES, *(f"{work}: dense" for work in ("host tensor", "engine"))]
    command = [sys.executable, "-m", "tests.rehearsal.play", str(out), *names]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {each["name"]: each for each in map(json.loads, out.read_text().splitlines())}


def check_runs(played: dict[str, Any]) -> None:
    assert "error" not in played, played["traceback"]


def check_products(name: str, played: dict[str, Any]) -> None:
    """Products multiply bf16; main gradients are fp32. Torch's layers are exempt, and the router's
    two gradients."""
    others = {
        each: count
        for each, count in played["products"].items()
        if not each.startswith("torch.bfloat16 to")
    }
    case, passes = CASES[name], played["packs"] * played["updates"]
    of_router = (
        {ROUTER: 2 * case.expert_layers // case.config.layout.pp * passes}
        if case.expert_layers
        else {}
    )
    assert case.config.model.spec == "torch" or others == of_router
    assert played["main_grads"] == ["torch.float32"]


def check_loading(name: str, played: dict[str, Any]) -> None:
    """Loading asks the device once whether all weights are finite, of the policy and of a
    reference."""
    config = CASES[name].config
    loaded = 1 + (config.loss.kl_coef > 0 and not config.model.lora.rank)
    waits = {
        place: count for place, count in played["loading"].items() if place.endswith(":load_policy")
    }
    assert waits == {"copy to the host in megatron_dppo/bridge/load.py:load_policy": loaded}


def check_pinned(name: str, played: dict[str, Any]) -> None:
    """Pinned memory has the bytes that are copied to it, in blocks of 512 bytes. Megatron copies
    checkpoints itself."""
    needed = {part: times * played["room"][part] for part, times in PINNED[name].items()}
    of_size = {
        place: size for place, size in played["pinned"].items() if not place.endswith(OF_A_PACK)
    }
    assert of_size == ({PINNED_BY: sum(needed.values())} if needed else {})
    if (written := played.get("written")) is not None:  # each tensor alone
        assert written < 1.2 * (played["room"]["bf16"] + 3 * played["room"]["fp32"])


def check_kernels(name: str, played: dict[str, Any]) -> None:
    tables = json.loads(TABLE.read_text())
    te = os.environ.get("REHEARSAL_TRANSFORMER_ENGINE", VERSIONS[0])
    table = tables.setdefault(
        MEGATRON if te == VERSIONS[0] else f"{MEGATRON}, Transformer Engine {te}", {}
    )
    kernels_per_pack = played["kernels"] / (played["packs"] * played["updates"])
    if os.environ.get("REHEARSAL_RECORD"):
        table[name] = round(kernels_per_pack, 1)
        TABLE.write_text(json.dumps(tables, indent=1) + "\n")
    assert kernels_per_pack <= {**tables[MEGATRON], **table}[name] * GROWTH


def expected_waits(name: str, played: dict[str, Any]) -> dict[str, int]:
    """Return the waits of a step by place."""
    case, updates = CASES[name], played["updates"]
    config, layout = case.config, case.config.layout
    packs, last = played["packs"] * updates, layout.pp == 1 or (case.rank > 0 and layout.vpp == 1)
    again = config.loss.updates_per_rollout > 1
    waits = {UPDATED: updates}  # sums of all packs, gradient norm, expert load, replayed routings
    if last and (config.loss.kl_coef or again):
        waits[MEASURED] = updates  # all packs of an update
    if config.optimizer.offload:
        waits[OFFLOADED] = updates
    if (
        config.model.spec == "torch" and config.pack.share_prefixes == "off"
    ):  # torch's layers are no path of speed
        waits |= {
            f"copy to the host {ROTARY}": 2 * LAYERS * packs,
            f"item {ROTARY}": 2 * LAYERS * packs,
        }
        waits[SEGMENTS] = LAYERS * packs
    if case.expert_layers:
        passes = 1 + (config.model.recompute == "selective") + again
        waits[DISPATCHED] = case.expert_layers // layout.pp * packs * passes
    return waits


@pytest.mark.parametrize("name", NAMES)
def test_setting_stays_within_its_bounds(name: str, found: Found) -> None:
    played = found[name]
    check_runs(played)
    assert played["waits"] == expected_waits(name, played)
    assert played["kept"] == 0
    # Only what is made once or read from the last pack.
    assert not [place for place in played["left"] if not place.endswith(LEFT)]
    for check in (check_products, check_loading, check_kernels):
        check(name, played)
    if name in PINNED:
        check_pinned(name, played)


def test_local_engine_waits_once_for_each_look(found: Found) -> None:
    """And three times for the results of a batch: stops, tokens, log-probabilities."""
    check_runs(found["engine: dense"])
    decoding = "copy to the host in megatron_dppo/rollout/decoding.py:Decoding"
    assert found["engine: dense"]["waits"] == {
        f"{decoding}._remove_ended": 6,
        f"{decoding}.build_paths": 3,
    }


def test_sequence_parallel_collectives_have_the_layouts_bytes(found: Found) -> None:
    """Each layer gathers 6 times (2 forward, 4 backward) and scatters 4 times; embedding and head
    once more each."""
    played = found["tp2 sp"]
    tensor = played["capacity"] * HIDDEN * BF16 * played["packs"]
    moved = played["collective_bytes"]
    assert moved["_allgather_base over 2"] == (6 * LAYERS + 2) * tensor
    assert moved["_reduce_scatter_base over 2"] == (4 * LAYERS + 2) * tensor


def test_tensor_left_on_the_host_is_named_by_its_operator(found: Found) -> None:
    with pytest.raises(AssertionError, match=r"HostTensorError: aten::mul\.Tensor"):
        check_runs(found["host tensor: dense"])
