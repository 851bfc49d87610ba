"""Whole runs with real servers, by the command that a user types."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.init import write_model
from megatron_dppo.models.routing import REPLACED
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.rollout.teachers import TeacherQuery, TeacherServers
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.checkpoint import TRACKER
from tests.commands import Command
from tests.policies import SCALED
from tests.rollout.scripted import world_of
from tests.servers.conftest import SIZES
from tests.servers.real import (
    AGREES,
    FIRST_PORT,
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
    """One of two servers of the run's own, of one rank and of two, is killed after the first step."""
    run = train(served_policy, *launch_settings("sglang", (1, 2)), "run.steps=8")
    metrics = run.wait_for("metrics.jsonl")
    while len(metrics.read_text().splitlines()) < 2:
        time.sleep(0.05)
    servers = run.children(SGLANG_ON_CPU.name)
    assert servers
    ports = sorted({re.findall(r"--port (\d+)", " ".join(each.cmdline()))[0] for each in servers})
    assert len(ports) == 2
    next(each for each in servers if ports[0] in each.cmdline()).kill()
    first, *steps = run.finish()
    assert run.children() == []
    assert first["rollout/agreement_max_diff"] <= AGREES
    assert [step["step"] for step in steps] == list(range(1, 9))
    assert (steps[0]["rollout/servers"], min(step["rollout/servers"] for step in steps)) == (2, 1)
    for step in steps:
        check_agreement([step | {"rollout/sync_retries": 0.0}], step["rollout/servers"])
    check_trained(run, served_policy)


def write_experts(folder: Path, served: Path) -> None:
    write_model(folder, family="qwen3_moe", **SIZES, ffn=64, experts=4, tie=False)  # SGLang ties no such policy


def write_llama(folder: Path, served: Path) -> None:
    """With scaled rotary positions."""
    write_model(folder, family="llama", **SIZES, ffn=64, tie=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **SCALED}}
    (folder / "config.json").write_text(json.dumps(config))


def write_compressed(folder: Path, served: Path) -> None:
    sums = folder.with_suffix(".jsonl")
    sums.write_text("".join(json.dumps({"prompt": f"1+{i}=", "response": f"#{1 + i}"}) + "\n" for i in range(8)))
    words = ["megatron-dppo", "compress", str(served), str(folder), "--method", "width", "--keep", "0.75"]
    log = folder.with_suffix(".log")
    code = Command([*words, "--multiple", "8", "--calibrate", str(sums)], log).exit_code()
    assert code == 0, log.read_text()


EXPERTS = ("layout.tp=1", "layout.ep=2", "layout.dp=2", "layout.sequence_parallel=false")


@pytest.mark.parametrize(
    ("write", "kind", "tp", "layout"),
    [
        (write_experts, "sglang", 2, EXPERTS),
        (write_llama, "vllm", 1, ()),
        (write_compressed, "sglang", 1, ("layout.tp=1",)),
    ],
)
def test_other_policies_reach_servers(
    train: Train,
    served_policy: Path,
    tmp_path: Path,
    write: Callable[[Path, Path], None],
    kind: Kind,
    tp: int,
    layout: tuple[str, ...],
) -> None:
    write(policy := tmp_path / "policy", served_policy)
    first, *steps = train(policy, *launch_settings(kind, (tp,)), *layout, "run.steps=2").finish()
    assert first["rollout/agreement_max_diff"] <= AGREES
    check_agreement(steps, 1)


@pytest.fixture
def pair(real_servers: RealServers) -> tuple[RealServer, RealServer]:
    return real_servers.get("sglang", 1), real_servers.get("sglang", 2)


@pytest.mark.parametrize("settings", [("rollout.sync.transport=disk",), ("layout.tp=1", "layout.pp=2")])
def test_weights_arrive_by_disk_and_from_two_stages(
    train: Train, pair: tuple[RealServer, ...], served_policy: Path, settings: tuple[str, ...]
) -> None:
    run = train(served_policy, *settings, "run.steps=2", servers=pair)
    check_agreement(run.finish()[1:], 2)
    assert [*run.folder.glob("sync/*")] == []


def test_a_killed_run_resumes_its_pending_batches(
    train: Train, pair: tuple[RealServer, ...], served_policy: Path
) -> None:
    settings = ["rollout.ahead=2", "run.steps=4", "run.checkpoint_every=2"]
    settings += ["pack.max_tokens=48"]  # one completion at a time: no update comes before the servers have begun
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
    for step in (first, *others):
        assert step["train/grad_norm"] > 0
        assert step["rollout/agreement_max_diff"] <= AGREES
        assert step["rollout/servers"] == 2


LORA = ("model.lora.rank=4", "rollout.sync.adapter=true", "model.lora.targets=[q_proj,v_proj,o_proj]")


@pytest.mark.parametrize(("kind", "tp", "experts"), [("sglang", 2, False), ("sglang", 1, True), ("vllm", 1, False)])
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
    adapters = sum(tensor.nbytes for tensor in load_file(run.folder / "adapter" / "adapter_model.safetensors").values())
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["perf/sync_bytes"] for line in lines[1:]} == {adapters}
    check_trained(run, policy)


def test_replayed_routing_brings_rollouts_nearer(train: Train, real_servers: RealServers, tmp_path: Path) -> None:
    write_model(policy := tmp_path / "policy", **SIZES, ffn=64, layers=4, experts=16, experts_per_token=2, tie=False,
                dtype="bf16")  # fmt: skip
    bf16 = "model.dtype=bf16"
    server = real_servers.get("sglang", 1, bf16, "loss.replay_routing=rollout", policy=policy)
    limits = ["rollout.max_logprob_diff=10", "rollout.max_prob_error=1e9", "run.export=false", "run.steps=2"]
    found = []
    for mode in ("none", "rollout"):
        settings = [bf16, "layout.tp=1", *limits, f"loss.replay_routing={mode}"]
        found.append(train(policy, *settings, servers=(server,), name=mode).finish()[1:])
    for without, replayed in zip(*found, strict=True):
        assert 0.0 < replayed[REPLACED] < 0.1
        for metric, least in (
            ("train/rollout_logprob_abs_diff", 0.6),
            ("train/token_mult_prob_error", 1.0),
            ("rollout/agreement_mean_diff", 1.0),
        ):
            assert replayed[metric] < least * without[metric]


FILE = Path(__file__).parent / "calculator.py"
TOOL, FIRST_TURN = "=7\n", 6


@pytest.mark.parametrize(
    ("kind", "setting"),
    [("sglang", f"custom_generate={FILE}:generate"), ("vllm", f"conversation={FILE}:rollout_in_roles")],
)
def test_conversations_with_a_tool_are_trained_on(
    train: Train, real_servers: RealServers, served_policy: Path, kind: Kind, setting: str
) -> None:
    settings = [f"rollout.{setting}", "pruning.prompts.rule=none", "run.steps=2", "eval.show=4"]
    if in_roles := setting.endswith("in_roles"):
        settings += ["rollout.roles=[asker,answerer]", f"reward.function={FILE}:reward_of_roles"]
    run = train(served_policy, *settings, servers=(real_servers.get(kind),))
    for step in run.finish()[1:]:
        check_agreement([step], 1)
        assert step["train/token_mult_prob_error"] <= 1 + AGREES
        of_roles = [step.get(f"rollout/role_reward/{role}") for role in ("asker", "answerer")]
        if in_roles:
            assert of_roles[0] == pytest.approx(step["rollout/reward"]) and of_roles[1] < 0.0
        else:
            assert of_roles == [None, None]
        told = step["rollout/response_len/mean"] * 64 - step["rollout/generated_tokens"]
        assert told == pytest.approx(len(TOOL) * 64), "a second turn follows every first one"
    answers = (run.folder / "answers.jsonl").read_text()
    assert re.search(rf'"answer": ".{{0,{FIRST_TURN}}}=7', answers), "the reward and the log have the tool's words"


GAME = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(content="more" if len(messages[-1]["content"]) % 2 else "less")]

async def odd(completion):
    return float(sum(len(message["content"]) for message in completion) % 3)

def load_environment():
    rows = [{"question": f"guess {i}", "answer": str(i)} for i in range(64)]
    return Guess(max_turns=2, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[odd]))
"""
ENVIRONMENT = """
data.train=verifiers data.verifiers.environment=guess_game data.verifiers.eval_problems=8 reward.function=verifiers
rollout.max_response_tokens=64 data.max_prompt_tokens=64 data.chat_template=true
"""


@pytest.mark.parametrize(("kind", "conversation"), [("sglang", "verifiers"), ("vllm", f"{FILE}:rollout_in_sequences")])
def test_environments_and_sequences_are_trained_on_after_a_resume(
    train: Train, real_servers: RealServers, served_policy: Path, tmp_path: Path, kind: Kind, conversation: str
) -> None:
    settings = [f"rollout.conversation={conversation}", "pruning.prompts.rule=none", "run.checkpoint_every=1"]
    settings += ["eval.problems=0", "rollout.prompts_per_step=8"]
    if of_environment := conversation == "verifiers":
        pytest.importorskip("verifiers")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "guess_game.py").write_text(GAME)
        settings += ENVIRONMENT.split()
    for steps in (1, 2):
        found = train(served_policy, *settings, f"run.steps={steps}", servers=(real_servers.get(kind),)).finish()
    assert [step["step"] for step in found] == [1, 2]
    for step in found:
        assert step["train/grad_norm"] > 0
        assert step["train/rollout_logprob_abs_diff"] <= AGREES
        told = step["rollout/response_len/mean"] * 32 - step["rollout/generated_tokens"]
        assert told > 32 * (1 if of_environment else len(TOOL)), "other words came between"


@pytest.fixture(scope="module")
def sglang_teacher(served_policy: Path, tmp_path_factory: pytest.TempPathFactory, http: Http) -> Iterator[str]:
    """The URL of a server with its tokenizer, which rollout servers are started without."""
    if PYTHONS["sglang"] not in os.environ:
        pytest.skip("needs sglang: scripts/test.sh --servers")
    port = str(FIRST_PORT + 38)
    words = [os.environ[PYTHONS["sglang"]], str(SGLANG_ON_CPU), "--model-path", str(served_policy), "--port", port]
    with (tmp_path_factory.mktemp("teacher") / "log").open("wb") as log:
        process = subprocess.Popen([*words, "--dtype", "float32"], stdout=log, stderr=log)
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


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_teacher_scores_as_transformers_does(
    request: pytest.FixtureRequest,
    real_servers: RealServers,
    served_policy: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Kind,
) -> None:
    if kind == "vllm":
        server = real_servers.get(kind).restore()
        url = server.api.url
        monkeypatch.setenv(SECRET, server.secret)
    else:
        url = request.getfixturevalue("sglang_teacher")
    teacher = f"loss.distillation.teacher={url}"
    config = load_config(None, [teacher, "rollout.max_response_tokens=300", f"rollout.timeout_s={WAIT_S}"])
    rng = np.random.default_rng(0)
    prompt = Prompt(0, rng.integers(4, 40, 9).astype(np.int32), "", "")
    answers = [rng.integers(4, 48, length).astype(np.int32) for length in (1, 2, 300)]
    group = tuple(
        Completion(ids, np.zeros(len(ids), np.float32), np.ones(len(ids), bool), (VersionSpan(0, len(ids)),), "stop")
        for ids in answers
    )
    with closing(TeacherServers(config, world_of(1, 0), load_tokenizer(served_policy))) as servers:
        (scored,) = TeacherQuery(servers, [prompt]).finish([group], world_of(1, 0))
    model = AutoModelForCausalLM.from_pretrained(served_policy, dtype=torch.float32)
    for completion in scored:
        tokens = torch.from_numpy(np.concatenate([prompt.token_ids, completion.token_ids])).long()
        with torch.no_grad():
            whole = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(completion.teacher_logprobs, whole[len(prompt.token_ids) - 1 :].numpy(), atol=AGREES)


def test_a_run_is_distilled_from_a_server(train: Train, sglang_teacher: str, served_policy: Path) -> None:
    """Taught by itself, a policy has nothing to learn until its rewards have moved it."""
    teacher = f"loss.distillation.teacher={sglang_teacher}"
    run = train(served_policy, teacher, "layout.tp=1", "layout.dp=2", "rollout.ahead=1", "run.steps=3")
    _, *steps = run.finish()
    assert abs(steps[0]["train/distillation_kl"]) < 1e-4 < abs(steps[2]["train/distillation_kl"])
