"""Real SGLang and vLLM servers grow trees of completions, and one that is killed between two levels costs no prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.config import BranchConfig
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.batch import RequestBatch
from megatron_dppo.rollout.servers.client import (
    TOP_LOGPROBS,
    ServerClient,
    least_entropies,
)
from megatron_dppo.rollout.servers.dispatch import Dispatcher
from megatron_dppo.rollout.servers.http import Http
from tests.rollout.local import forks_of
from tests.servers.real import Kind, RealServer, RealServers

pytestmark = pytest.mark.servers

AGREES = 1e-4
"""Greatest difference of server and forward that is rounding."""
TOKENS, PROMPT_TOKENS = 32, 20
TEMPERATURE = 0.9
FIXED = (BranchConfig(at=6, children=2), BranchConfig(at=12, children=2))


@pytest.fixture(scope="module")
def reference(served_policy: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(served_policy, dtype=torch.float32).eval()


def _with_its_weights(http: Http, server: RealServer, policy: Path) -> RealServer:
    """The server with the weights that it was started with, at version 1."""
    api = server.api
    http.run(api.pause("abort"))
    http.run(api.begin_update())
    http.run(api.update_from_disk(policy, "1"))
    http.run(api.end_update("1"))
    http.run(api.flush())
    http.run(api.resume())
    return server


def _grow(
    http: Http, clients: list[ServerClient], branches: tuple[BranchConfig, ...], count: int = 4
) -> tuple[RequestBatch, Dispatcher]:
    rng = np.random.default_rng(3)
    prompts = [Prompt(i, rng.integers(5, 45, PROMPT_TOKENS).astype(np.int32), "", "") for i in range(count)]
    dispatcher = Dispatcher(
        http,
        lambda told: int(told) if told.isdigit() else None,
        first=0,
        max_in_flight=16,
        request_timeout_s=120.0,
        attempts=3,
    )
    dispatcher.serve_from(clients)
    batch = dispatcher.begin(prompts, Sampling(8, TOKENS, TEMPERATURE, (), seed=3, branches=branches), 1)
    batch.wait(180.0)
    assert batch.error is None and batch.unfinished == 0
    return batch, dispatcher


@torch.no_grad()
def _distributions(policy: PreTrainedModel, prompt: Prompt, token_ids: np.ndarray) -> torch.Tensor:
    """[L, vocabulary], log-probabilities before each token of a response."""
    ids = torch.from_numpy(np.concatenate([prompt.token_ids, token_ids]).astype(np.int64))
    logits = policy(input_ids=ids[None]).logits[0, len(prompt.token_ids) - 1 : -1].float()
    return torch.log_softmax(logits / TEMPERATURE, dim=-1)


def _assert_of_the_policy(batch: RequestBatch, policy: PreTrainedModel) -> None:
    for prompt, group in zip(batch.prompts, batch.groups(), strict=True):
        assert len(group) == 8
        for leaf in group:
            chosen = torch.from_numpy(leaf.token_ids.astype(np.int64))[:, None]
            expected = _distributions(policy, prompt, leaf.token_ids).gather(1, chosen)[:, 0].numpy()
            np.testing.assert_allclose(leaf.logprobs, expected, atol=AGREES, rtol=0)
            assert {span.version for span in leaf.versions} == {1}
        for one, other in zip(group[::2], group[1::2], strict=True):
            assert forks_of(one) == forks_of(other)
            np.testing.assert_array_equal(one.token_ids[: forks_of(one)[1]], other.token_ids[: forks_of(one)[1]])


@pytest.mark.parametrize(("kind", "likeliest"), [("sglang", TOP_LOGPROBS), ("vllm", TOP_LOGPROBS - 1)])
def test_a_real_servers_trees_are_the_policys_and_fork_by_its_entropy(
    kind: Kind,
    likeliest: int,
    real_servers: RealServers,
    http: Http,
    served_policy: Path,
    reference: PreTrainedModel,
) -> None:
    server = _with_its_weights(http, real_servers.get(kind, 1), served_policy)

    def entropies(prompt: Prompt, token_ids: np.ndarray) -> np.ndarray:
        top = _distributions(reference, prompt, token_ids).topk(likeliest, dim=-1).values
        return least_entropies(top.tolist())

    some = np.random.default_rng(4).integers(5, 45, 200).astype(np.int32)
    limit = float(np.quantile(entropies(Prompt(9, some[:4], "", ""), some), 0.8))
    batch, _ = _grow(http, [server.api], (BranchConfig(entropy=limit), BranchConfig(at=14)), count=24)
    _assert_of_the_policy(batch, reference)
    forked = set()
    for prompt, group in zip(batch.prompts, batch.groups(), strict=True):
        for leaf in group:
            told, position = entropies(prompt, leaf.token_ids), forks_of(leaf)[0]
            assert np.all(told[1:position] <= limit + AGREES)
            if position < len(leaf.token_ids):
                assert told[position] > limit - AGREES
                forked.add(position)
    assert len(forked) > 2  # of so many, since servers cannot seed their sampling on a CPU
