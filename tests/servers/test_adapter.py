"""Adapters alone reach servers that hold the rest of the policy: every update, in flight, and after a server died."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dppo.init import write_model
from tests.ranks import RankPool
from tests.servers import adapters_on_ranks, on_ranks
from tests.servers.in_flight_on_ranks import LONG, in_flight
from tests.servers.on_ranks import PROMPTS, SAMPLES
from tests.servers.real import Kind, RealServers, launch_settings
from tests.servers.test_training import AGREES, Start, agrees, finish, start

__all__ = ["start"]  # a fixture
pytestmark = pytest.mark.servers

ADAPTERS = ("model.lora.rank=4", "rollout.sync.adapter=true")


def _settings(folder: Path, policy: Path, kind: Kind, *tp: int) -> list[str]:
    return [
        f"run.dir={folder}",
        f"model.path={policy}",
        "layout.tp=2",
        "data.max_prompt_tokens=16",
        f"rollout.max_response_tokens={LONG}",
        "rollout.timeout_s=300",
        "rollout.health_timeout_s=5",
        "rollout.sync.timeout_s=30",
        *launch_settings(kind, tp),
        *ADAPTERS,
    ]


@pytest.mark.parametrize(("kind", "sizes"), [("sglang", (1, 2)), ("vllm", (1,))])
def test_servers_of_every_size_generate_with_each_updates_adapters_and_get_nothing_else(
    start: Start, served_policy: Path, tmp_path: Path, kind: Kind, sizes: tuple[int, ...]
) -> None:
    run = tmp_path / "run"
    settings = [*launch_settings(kind, sizes), *ADAPTERS, "optimizer.lr=1e-2", "run.steps=3"]
    first, *steps = finish(start(run, served_policy, *settings), run)
    assert first["rollout/agreement_max_diff"] <= AGREES
    assert [step["step"] for step in steps] == [1, 2, 3]
    agrees(steps, len(sizes))
    adapters = sum(tensor.nbytes for tensor in load_file(run / "adapter" / "adapter_model.safetensors").values())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["perf/sync_bytes"] for line in lines[1:]} == {adapters}
    trained, fresh = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (run / "hf", served_policy)
    )
    tokens = torch.arange(3, 11)[None]
    assert not torch.allclose(trained(tokens).logits, fresh(tokens).logits, atol=1e-2), "nothing was there to be sent"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_that_was_killed_comes_back_with_the_adapters_of_now(
    ranks: RankPool, served_policy: Path, tmp_path: Path, canary: Path, kind: Kind
) -> None:
    settings = _settings(tmp_path, served_policy, kind, 1, 1)
    before, killed, after = ranks.run(2, adapters_on_ranks.killed, settings, timeout=600.0)[0]
    assert [seen.servers for seen in (before, killed, after)] == [2, 1, 2]
    for seen, version in ((before, 0), (killed, 0), (after, 1)):
        assert seen.answered == list(range(PROMPTS)) and seen.samples == [SAMPLES] * PROMPTS
        assert seen.versions == {version}
    assert before.difference <= AGREES
    assert after.difference <= AGREES


@pytest.mark.parametrize(("kind", "tp"), [("sglang", 2), ("vllm", 1)])
def test_what_an_update_finds_in_flight_goes_on_with_the_new_adapters_and_says_so(
    ranks: RankPool, served_policy: Path, tmp_path: Path, canary: Path, kind: Kind, tp: int
) -> None:
    settings = [*_settings(tmp_path, served_policy, kind, tp), "rollout.ahead=1", "rollout.sync.in_flight=abort"]
    seen = ranks.run(2, in_flight, settings, "", timeout=600.0)[0]
    assert seen["samples"] == [SAMPLES] * PROMPTS
    assert (0, 1) in seen["versions"], "the update found nothing in flight"
    assert set(seen["versions"]) <= {(0,), (0, 1), (1,)}
    assert seen["difference"] <= AGREES


def test_adapters_of_the_attention_reach_servers_of_a_mixture(start: Start, tmp_path: Path) -> None:
    run, policy = tmp_path / "run", tmp_path / "policy"
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 64, "experts": 4, "experts_per_token": 2}
    write_model(policy, **sizes, std=0.2, tie=False)
    settings = [*launch_settings("sglang", (1,)), *ADAPTERS, "model.lora.targets=[q_proj,v_proj,o_proj]"]
    settings += ["layout.tp=1", "layout.dp=2", "layout.sequence_parallel=false"]
    agrees(finish(start(run, policy, *settings, "optimizer.lr=1e-2", "run.steps=2"), run)[1:], 1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sglang", "--enable-lora --max-loras-per-batch 2 --max-lora-rank 4 --lora-target-modules q_proj"),
        ("vllm", "--enable-lora --max-lora-rank 8 and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"),
    ],
)
def test_a_given_server_that_takes_no_adapters_is_refused_by_name(
    real_servers: RealServers, ranks: RankPool, served_policy: Path, tmp_path: Path, kind: Kind, words: str
) -> None:
    server = real_servers.get(kind, 1)
    settings = [f"run.dir={tmp_path}", f"model.path={served_policy}", *ADAPTERS, f"rollout.engine={kind}"]
    settings += [f"rollout.servers=[{server.api.url}]", "data.max_prompt_tokens=16", "layout.tp=1"]
    settings += ["rollout.max_response_tokens=64", "rollout.timeout_s=300"]
    said = ranks.run(1, on_ranks.stop_with, settings, server.secret)[0]
    assert f"rollout.servers = {server.api.url}" in said and "takes no adapters" in said
    assert words in said
