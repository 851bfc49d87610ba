"""Stock servers load what ``compress`` has written, compute what transformers does, and a run goes on from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.rollout.servers.client import GenerateRequest
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import SECRET
from tests.commands import Command
from tests.compress.test_asking import rewards
from tests.ranks import RankPool
from tests.servers.real import FIRST_PORT, Kind, RealServers
from tests.servers.test_training import AGREES, QUICKSTART, REWARD, SETTINGS
from tests.small_runs import rows

pytestmark = pytest.mark.servers

PROMPTS = ([3, 4, 5], [11, 6, 12, 9, 10])


@pytest.mark.parametrize(("kind", "how"), [("sglang", ("width", "0.75")), ("vllm", ("depth", "0.5", "--refit"))])
def test_a_smaller_policy_is_served_and_trained_as_any_other(
    kind: Kind, how: tuple[str, ...], served_policy: Path, http: Http, tmp_path: Path
) -> None:
    policy, sums, run = tmp_path / "policy", tmp_path / "sums.jsonl", tmp_path / "run"
    sums.write_text("".join(json.dumps({"prompt": f"1+{i}=", "response": f"#{1 + i}"}) + "\n" for i in range(8)))
    method, keep, *more = how
    words = ["compress", str(served_policy), str(policy), "--method", method, "--keep", keep, "--multiple", "8", *more]
    command(tmp_path / "compress.log", *words, "--calibrate", str(sums))
    servers = RealServers(policy, tmp_path, http, first_port=FIRST_PORT + 34)
    try:
        server = servers.get(kind, 1)
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
        for prompt in PROMPTS:
            ask = GenerateRequest(prompt, samples=2, max_tokens=12, temperature=1.0, stop_token_ids=[], seed=None)
            for piece in http.run(server.api.generate(ask, timeout_s=60.0)):
                tokens = torch.tensor([[*prompt, *piece.token_ids]])
                with torch.no_grad():
                    logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                expected = logprobs.gather(1, torch.tensor(piece.token_ids)[:, None])[:, 0].numpy()
                np.testing.assert_allclose(piece.logprobs, expected, atol=AGREES)
        run.mkdir()
        (run / "reward.py").write_text(REWARD)
        settings = [f"run.dir={run}", f"model.path={policy}", f"reward.function={run}/reward.py:compute_score"]
        given = [f"rollout.engine={kind}", f"rollout.servers=[{server.api.url}]", "layout.tp=1", "run.steps=2"]
        command(tmp_path / "train.log", "train", str(QUICKSTART), *settings, *SETTINGS, *given, secret=server.secret)
    finally:
        servers.stop()
    first, *steps = rows(run)
    assert first["rollout/agreement_max_diff"] <= AGREES
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
    assert all(step["train/rollout_logprob_abs_diff"] <= AGREES for step in steps)


def rewards_with_secret(rank: int, size: int, secret: str, *arguments: Any) -> list[float]:
    os.environ[SECRET] = secret
    return rewards(rank, size, *arguments)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_servers_answer_without_the_layers_that_are_absent(
    kind: Kind, real_servers: RealServers, ranks: RankPool, served_policy: Path
) -> None:
    """Greedily, as the local engine does."""
    server, absent = real_servers.get(kind, 1), [(), (0,), (1,)]
    greedy = "layout.tp=1", "eval.samples=1"
    given = f"rollout.engine={kind}", f"rollout.servers=[{server.api.url}]"
    asked = server.secret, served_policy, absent, None
    calls = [(rewards_with_secret, *asked, *greedy, *settings) for settings in ((), given)]
    (local,), (found,) = ranks.in_turn(1, *calls)
    assert len(set(local)) == 3, "each policy has answers of its own"
    assert found == pytest.approx(local, abs=0.01)


def command(log: Path, *words: str, secret: str = "") -> None:
    assert Command(["megatron-dppo", *words], log, environ={SECRET: secret}).exit_code() == 0, log.read_text()
