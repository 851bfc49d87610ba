"""Stock servers teach: what they say of tokens is what transformers' model says, and a run learns of it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.config import Config, DistillationConfig, LossConfig, RolloutConfig
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.rollout.teachers import TeacherQuery, TeacherServers
from tests.commands import Command
from tests.rollout.scripted import world_of
from tests.servers.real import FIRST_PORT, PYTHONS, SGLANG_ON_CPU, WAIT_S, RealServers
from tests.servers.test_training import QUICKSTART, REWARD, SETTINGS
from tests.small_runs import rows

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def sglang_teacher(served_policy: Path, tmp_path_factory: pytest.TempPathFactory, http: Http) -> Iterator[str]:
    """With its tokenizer, which rollout servers are started without."""
    if PYTHONS["sglang"] not in os.environ:
        pytest.skip("needs sglang: scripts/test.sh --servers")
    url = f"http://127.0.0.1:{FIRST_PORT + 9}"
    words = [os.environ[PYTHONS["sglang"]], str(SGLANG_ON_CPU), "--model-path", str(served_policy)]
    words += ["--port", str(FIRST_PORT + 9), "--dtype", "float32"]
    with (tmp_path_factory.mktemp("teacher") / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        until = time.monotonic() + WAIT_S
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


def check(url: str, policy: Path) -> None:
    rng = np.random.default_rng(0)
    rollout = RolloutConfig(max_response_tokens=300, timeout_s=WAIT_S)
    config = Config(loss=LossConfig(distillation=DistillationConfig(teacher=url)), rollout=rollout)
    prompt = Prompt(0, rng.integers(4, 40, 9).astype(np.int32), "", "")
    given = [rng.integers(4, 48, length).astype(np.int32) for length in (1, 2, 300)]
    group = tuple(
        Completion(ids, np.zeros(len(ids), np.float32), np.ones(len(ids), bool), (VersionSpan(0, len(ids)),), "stop")
        for ids in given
    )
    with closing(TeacherServers(config, world_of(1, 0), load_tokenizer(policy))) as servers:
        (read,) = TeacherQuery(servers, [prompt]).finish([group], world_of(1, 0))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for completion in read:
        tokens = torch.from_numpy(np.concatenate([prompt.token_ids, completion.token_ids])).long()
        with torch.no_grad():
            whole = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1).gather(1, tokens[1:, None])[:, 0]
        expected = whole[len(prompt.token_ids) - 1 :].numpy()
        np.testing.assert_allclose(completion.teacher_logprobs, expected, atol=1e-4)


def test_sglang_says_what_transformers_says(sglang_teacher: str, served_policy: Path) -> None:
    check(sglang_teacher, served_policy)


def test_vllm_says_what_transformers_says(
    real_servers: RealServers, served_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = real_servers.get("vllm", 1)
    monkeypatch.setenv(SECRET, server.secret)
    check(server.api.url, served_policy)


def test_a_run_learns_of_a_server_that_teaches(sglang_teacher: str, served_policy: Path, tmp_path: Path) -> None:
    """Taught by itself a policy has nothing to learn, until its rewards have moved it."""
    (tmp_path / "reward.py").write_text(REWARD)
    words = ["megatron-dppo", "train", str(QUICKSTART), f"run.dir={tmp_path}/run", *SETTINGS]
    words += [f"model.path={served_policy}", f"reward.function={tmp_path}/reward.py:compute_score", "run.steps=3"]
    words += [f"loss.distillation.teacher={sglang_teacher}", "layout.tp=1", "layout.dp=2", "rollout.ahead=1"]
    log = tmp_path / "log"
    assert Command(words, log, tmp_path).exit_code() == 0, log.read_text()
    _, *steps = rows(tmp_path / "run")
    assert abs(steps[0]["train/distillation_kl"]) < 1e-4 < abs(steps[2]["train/distillation_kl"])
