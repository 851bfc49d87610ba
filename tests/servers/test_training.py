"""Whole runs with real servers, by the command that a user types."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.trainer.checkpoint import TRACKER
from tests.policies import SCALED
from tests.servers.conftest import SIZES
from tests.servers.real import (
    AGREES,
    FIRST_PORT,
    LORA,
    PYTHONS,
    SGLANG_ON_CPU,
    WAIT_S,
    Kind,
    RealServer,
    RealServers,
    Run,
    check_agreement,
    launch_settings,
)

pytestmark = pytest.mark.servers
Train = Callable[..., Run]


def check_trained(run: Run, policy: Path) -> None:
    tokens = torch.arange(3, 11)[None]
    trained, fresh = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (run.folder / "hf", policy)
    )
    assert not torch.allclose(trained, fresh, atol=1e-2)


@pytest.mark.smoke
def test_a_run_trains_with_its_own_vllm(train: Train, served_policy: Path) -> None:
    run = train(served_policy, *launch_settings("vllm", (1,)), "run.steps=3")
    run.wait_for("metrics.jsonl")
    assert run.children("vllm.entrypoints")
    first, *steps = run.finish()
    assert run.children() == []
    assert first["rollout/agreement_max_diff"] <= AGREES
    assert [step["step"] for step in steps] == [1, 2, 3]
    check_agreement(steps, 1)
    check_trained(run, served_policy)


@pytest.mark.smoke
def test_a_run_survives_the_death_of_a_sglang_server(train: Train, served_policy: Path) -> None:
    """One of two servers of the run's own, of one rank and of two, is killed after the first
    step."""
    run = train(served_policy, *launch_settings("sglang", (1, 2)), "run.steps=8")
    metrics = run.wait_for("metrics.jsonl")
    while len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.05)
    run.children(SGLANG_ON_CPU.name)[0].kill()
    first, *steps = run.finish()
    assert run.children() == []
    assert first["rollout/agreement_max_diff"] <= AGREES
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert (steps[0]["rollout/servers"], min(step["rollout/servers"] for step in steps)) == (2, 1)
    for step in steps:
        check_agreement([step | {"rollout/sync_retries": 0.0}], step["rollout/servers"])
    check_trained(run, served_policy)


def write_llama(folder: Path) -> None:
    """With scaled rotary positions."""
    write_model(folder, family="llama", **SIZES, ffn=64, tie=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **SCALED}}
    (folder / "config.json").write_text(json.dumps(config))


EXPERTS = ("layout.tp=1", "layout.ep=2", "layout.dp=2", "layout.sequence_parallel=false")


@pytest.mark.parametrize(
    ("kind", "tp", "layout"), [("sglang", 2, EXPERTS), ("vllm", 1, ())], ids=["experts", "Llama"]
)
def test_other_policies_reach_servers(
    train: Train, mixture: Path, tmp_path: Path, kind: Kind, tp: int, layout: tuple[str, ...]
) -> None:
    policy = mixture
    if kind == "vllm":
        write_llama(policy := tmp_path / "policy")
    first, *steps = train(policy, *launch_settings(kind, (tp,)), *layout, "run.steps=2").finish()
    assert first["rollout/agreement_max_diff"] <= AGREES
    check_agreement(steps, 1)


@pytest.fixture
def pair(real_servers: RealServers) -> tuple[RealServer, RealServer]:
    return real_servers.get("sglang", 1), real_servers.get("sglang", 2)


@pytest.mark.parametrize(
    "settings", [("rollout.sync.transport=disk",), ("layout.tp=1", "layout.pp=2")]
)
def test_weights_arrive_by_disk_and_from_two_stages(
    train: Train, pair: tuple[RealServer, ...], served_policy: Path, settings: tuple[str, ...]
) -> None:
    run = train(served_policy, *settings, "run.steps=2", servers=pair)
    check_agreement(run.finish()[1:], 2)
    assert [*run.folder.glob("sync/*")] == []


def test_kept_ids_of_a_server_are_replayed(
    train: Train, pair: tuple[RealServer, ...], served_policy: Path
) -> None:
    run = train(served_policy, "rollout.top_k=12", "rollout.top_p=0.5", "run.steps=2", servers=pair)
    check_agreement(run.finish()[1:], 2)


def test_a_killed_run_resumes_its_pending_batches(
    train: Train, pair: tuple[RealServer, ...], served_policy: Path
) -> None:
    settings = ["rollout.ahead=2", "run.steps=4", "run.checkpoint_every=2"]
    settings += [
        "pack.max_tokens=48"
    ]  # one completion at a time: no update comes before the servers have begun
    run = train(served_policy, *settings, servers=pair)
    tracker = run.wait_for(f"checkpoints/{TRACKER}")
    run.kill()
    assert tracker.read_text().strip() == "2"
    batches = sorted(run.folder.glob("checkpoints/iter_0000002/rollouts*/step.npz"))
    assert len(batches) == 2 and all("broken_off_by_ranks" in np.load(batch) for batch in batches)

    run = train(served_policy, *settings, servers=pair)
    _, first, *others = run.finish()
    assert "resuming after step 2" in run.log.read_text()
    assert [step["step"] for step in (first, *others)] == [1, 2, 3, 4]
    assert (first["rollout/stale_tokens"], first["staleness/mean"]) == (0.0, 0.0)
    assert first["train/rollout_logprob_abs_diff"] <= AGREES
    for step in others:  # also the third and the fourth, whose batches were in the checkpoint
        assert 0.0 < step["rollout/stale_tokens"] <= 1.0
        assert 0.0 < step["staleness/mean"] <= step["staleness/max"] <= 2.0


@pytest.mark.parametrize(
    ("kind", "tp", "experts"), [("sglang", 2, False), ("sglang", 1, True), ("vllm", 1, False)]
)
def test_updates_bring_adapters_alone(
    train: Train,
    real_servers: RealServers,
    served_policy: Path,
    mixture: Path,
    kind: Kind,
    tp: int,
    experts: bool,
) -> None:
    policy = mixture if experts else served_policy
    server = real_servers.get(kind, tp, *LORA, policy=mixture if experts else None)
    layout = EXPERTS[:1] + EXPERTS[2:] if experts else ()
    run = train(policy, *LORA, *layout, "optimizer.lr=1e-2", "run.steps=3", servers=(server,))
    first, *steps = run.finish()
    assert first["rollout/agreement_max_diff"] <= AGREES
    check_agreement(steps, 1)
    adapters = sum(
        tensor.nbytes
        for tensor in load_file(run.folder / "adapter" / "adapter_model.safetensors").values()
    )
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["perf/sync_bytes"] for line in lines[1:]} == {adapters}
    check_trained(run, policy)


def test_replayed_routing_brings_rollouts_nearer(
    train: Train, real_servers: RealServers, tmp_path: Path
) -> None:
    write_model(policy := tmp_path / "policy", **SIZES, ffn=64, layers=4, experts=16,
    experts_per_token=2, tie=False,
                dtype="bf16")  # fmt: skip
    bf16 = "model.dtype=bf16"
    server = real_servers.get("sglang", 1, bf16, "loss.replay_routing=rollout", policy=policy)
    limits = [
        "rollout.max_logprob_diff=10",
        "rollout.max_prob_error=1e9",
        "run.export=false",
        "run.steps=2",
    ]
    found = []
    for mode in ("none", "rollout"):
        settings = [bf16, "layout.tp=1", *limits, f"loss.replay_routing={mode}"]
        found.append(train(policy, *settings, servers=(server,), name=mode).finish()[1:])
    for without, replayed in zip(*found, strict=True):
        assert (
            replayed["train/rollout_logprob_abs_diff"]
            < 0.6 * without["train/rollout_logprob_abs_diff"]
        )


FILE = Path(__file__).parent / "calculator.py"
TOOL, FIRST_TURN = "=7\n", 6


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_conversations_with_a_tool_are_trained_on(
    train: Train, real_servers: RealServers, served_policy: Path, kind: Kind
) -> None:
    settings = [
        f"rollout.conversation={FILE}:rollout",
        "pruning.prompts.rule=none",
        "run.steps=2",
        "eval.show=4",
    ]
    run = train(served_policy, *settings, servers=(real_servers.get(kind),))
    for step in run.finish()[1:]:
        check_agreement([step], 1)
        assert step["train/token_mult_prob_error"] <= 1 + AGREES
        told = step["rollout/response_len/mean"] * 64 - step["rollout/generated_tokens"]
        assert told == pytest.approx(len(TOOL) * 64), "a second turn follows every first one"
    answers = (run.folder / "answers.jsonl").read_text()
    assert re.search(rf'"answer": ".{{0,{FIRST_TURN}}}=7', answers), (
        "the reward and the log have the tool's words"
    )


@pytest.fixture(scope="module")
def sglang_teacher(served_policy: Path, http: Http) -> Iterator[str]:
    """The URL of a server with its tokenizer, which rollout servers are started without."""
    if PYTHONS["sglang"] not in os.environ:
        pytest.skip("needs sglang: scripts/test.sh --servers")
    port = str(FIRST_PORT + 38)
    words = [
        os.environ[PYTHONS["sglang"]],
        str(SGLANG_ON_CPU),
        "--model-path",
        str(served_policy),
        "--port",
        port,
    ]
    process = subprocess.Popen([*words, "--dtype", "float32"])
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
    try:
        while True:
            try:
                http.run(http.call("GET", url, "/health_generate", timeout_s=20.0))
                break
            except ServerError:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def test_a_run_is_distilled_from_a_server(
    train: Train, sglang_teacher: str, served_policy: Path
) -> None:
    """Taught by itself, a policy has nothing to learn until its rewards have moved it."""
    teacher = f"loss.distillation.teacher={sglang_teacher}"
    run = train(
        served_policy, teacher, "layout.tp=1", "layout.dp=2", "rollout.ahead=1", "run.steps=3"
    )
    _, *steps = run.finish()
    assert abs(steps[0]["train/distillation_kl"]) < 1e-4 < abs(steps[2]["train/distillation_kl"])
