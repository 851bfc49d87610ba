"""Requests to SGLang and vLLM servers and their answers, as both clients translate them; no server
runs."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config.rollout import BranchConfig
from megatron_dppo.rl.types import RoutingShape
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.client import (
    ROUTING_FLAG,
    Manifest,
    ServerClient,
    compute_entropy_bounds,
)
from megatron_dppo.rollout.servers.conversations import to_completion
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.rollout.servers.vllm import EXTENSION, GIVEN_BY, LOAD_ADAPTER, VllmClient

PROMPT = [3, 4]
SAMPLING = Sampling(samples=1, max_tokens=8, temperature=1.0, stop_token_ids=(5, 6), seed=7)
MASKED = replace(SAMPLING, top_k=3, sampling_mask=True)
KEPT = [[7, 1], [8], [2, 9, 3]]
ROUTED = replace(SAMPLING, routing=RoutingShape(layers=3, per_token=2, experts=6))
EXPERTS = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 6
"""Of two tokens of the prompt and three of the answer, but for its last."""


class Recorded(ServerClient):
    """Answers by path, and keeps the last request's body.

    ``settings`` and ``completion`` are parts of the answers, for tests to change.
    """

    answers: dict[str, Any]
    settings: dict[str, Any]
    completion: dict[str, Any]

    def __init__(self, http: Http) -> None:
        super().__init__("http://127.0.0.1:1", http)
        spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}]
        self.completion = {"weight_versions": spans}
        self.describe()

    async def get(self, path: str, **named: Any) -> Any:
        return self.answers[path]

    async def post(self, path: str, body: Mapping[str, Any], **named: Any) -> Any:
        self.body, self.sampling = body, body.get("sampling_params")
        return self.answers[path]


class Sglang(Recorded, SglangClient):
    def describe(self) -> None:
        logprobs = [[-0.5, 7], [-1.5, 8], [-2.5, 9]]
        self.completion |= {"output_token_logprobs": logprobs, "weight_version": "2"}
        self.end("abort")
        self.settings = {"tp_size": 2, "dtype": "float32", "context_length": 64}
        self.answers = {
            "/model_info": {"model_path": "/m", "weight_version": "4"},
            "/server_info": self.settings,
            "/openapi.json": {"paths": {}},
            "/generate": {"output_ids": [7, 8, 9], "meta_info": self.completion},
        }

    def end(self, reason: str) -> None:
        self.completion["finish_reason"] = {"type": reason}

    def route(self, table: np.ndarray) -> None:
        self.completion["routed_experts"] = base64.b64encode(
            table.astype(np.int32).tobytes()
        ).decode()

    def keep(self, kept: list[list[int]]) -> None:
        self.completion["output_token_sampling_mask"] = kept
        self.completion["output_token_sampling_logprobs"] = [-0.25, 0.0, -1.0]

    def offer_masks(self) -> None:
        self.settings["sampling_mask_max_tokens"] = 4096

    def offer_all(self, targets: list[str] | None) -> None:
        self.settings |= {"enable_return_routed_experts": True}
        self.settings |= {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}


class Vllm(Recorded, VllmClient):
    def describe(self) -> None:
        logprobs = {"content": [{"logprob": -0.5}, {"logprob": -1.5}, {"logprob": -2.5}]}
        self.completion |= {"token_ids": [7, 8, 9], "logprobs": logprobs}
        self.end("abort")
        model = {"model": "/m", "dtype": "torch.float32", "max_model_len": 64}
        self.settings = {
            "model_config": model | {"logprobs_mode": "processed_logprobs"},
            "parallel_config": {"worker_extension_cls": EXTENSION},
            "device_config": {"device": "cuda"},
        }
        self.answers = {
            "/openapi.json": {
                "paths": {route: {} for route in (*GIVEN_BY, LOAD_ADAPTER, "/weight_checker")}
            },
            "/server_info": {"vllm_config": self.settings},
            "/weight_info": {"weight_version": "4"},
            "/get_world_size": {"world_size": 2},
            "/collective_rpc": {"results": [None, {"problem": "ValueError: no"}]},
            "/inference/v1/generate": {"choices": [self.completion]},
        }

    def end(self, reason: str) -> None:
        self.completion["finish_reason"] = reason

    def route(self, table: np.ndarray) -> None:
        np.save(file := io.BytesIO(), np.uint8(table))
        self.completion["routed_experts"] = base64.b64encode(file.getvalue()).decode()

    def keep(self, kept: list[list[int]]) -> None:
        self.completion["sampling_mask"] = kept
        self.completion["logprobs"] = {
            "content": [{"logprob": -0.25}, {"logprob": 0.0}, {"logprob": -1.0}]
        }

    def offer_masks(self) -> None:
        self.settings["model_config"]["return_sampling_mask"] = True

    def offer_all(self, targets: list[str] | None) -> None:
        self.settings["aux_output_config"] = {"enable_return_routed_experts": True}
        self.settings["lora_config"] = {"max_lora_rank": 8, "target_modules": targets}


@pytest.fixture(params=[Sglang, Vllm])
def client(request: pytest.FixtureRequest, http: Http) -> Any:
    return request.param(http)


@pytest.fixture
def vllm(http: Http) -> Vllm:
    return Vllm(http)


def generate(client: ServerClient, sampling: Sampling = SAMPLING) -> Any:
    (result,) = client.http.run(client.generate(PROMPT, sampling, timeout_s=1.0))
    return result


def test_an_answer_becomes_a_result(client: Any) -> None:
    result = generate(client)
    np.testing.assert_array_equal(result.token_ids, [7, 8, 9])
    np.testing.assert_array_equal(result.logprobs, np.float32([-0.5, -1.5, -2.5]))
    assert (result.versions, result.reason) == ((("1", 2), ("2", 1)), "abort")
    assert (result.routing, result.entropies) == (None, None)


@pytest.mark.parametrize(
    ("kind", "changed", "problem"),
    [
        (Sglang, {"finish_reason": {"type": "error"}}, "cannot be used"),
        (Sglang, {"output_token_logprobs": [[-0.5, 7]]}, "cannot be used"),
        (Vllm, {"finish_reason": "error"}, "cannot be used"),
        (Vllm, {"token_ids": [7, 8]}, "cannot be used"),
        (Vllm, {"weight_versions": None}, "cannot be used"),
        (Vllm, {"weight_versions": [{"version": "1", "start": 0, "end": 2}]}, "cannot be used"),
        (
            Vllm,
            {"logprobs": {"content": [{"logprob": p} for p in (-0.5, -9999.0, -1.0)]}},
            "for token 1",
        ),
    ],
)
def test_an_inconsistent_answer_is_refused(
    http: Http, kind: Any, changed: dict[str, Any], problem: str
) -> None:
    client = kind(http)
    client.completion |= changed
    with pytest.raises(ServerError, match=problem):
        generate(client)


def test_a_server_samples_as_requested_and_by_no_default(client: Any) -> None:
    for sampling, expected in (
        (SAMPLING, (1.0, -1)),
        (replace(SAMPLING, top_p=0.9, top_k=20), (0.9, 20)),
    ):
        generate(client, sampling)
        assert (client.sampling["top_p"], client.sampling["top_k"], client.sampling["min_p"]) == (
            *expected,
            0.0,
        )
        assert client.sampling["stop_token_ids"] == [5, 6]


def test_properties_are_those_reported(client: Any) -> None:
    info = client.http.run(client.get_info())
    assert (info.model, client.ranks, info.dtype, info.max_tokens) == ("/m", 2, "float32", 64)
    assert client.ranks == 2
    assert (info.routing, info.lora_rank, info.lora_targets) == (False, 0, set())
    for targets in (["q_proj"], None):
        client.offer_all(targets)
        info = client.http.run(client.get_info())
        everything = {"all"} if isinstance(client, Vllm) else set()
        assert (info.routing, info.lora_rank, info.lora_targets) == (
            True,
            8,
            set(targets or everything),
        )


def test_answers_bring_the_experts_of_all_tokens_but_the_last(client: Any) -> None:
    assert generate(client, ROUTED).routing is None, (
        "an aborted request's experts come with its continuation"
    )
    client.end("stop")
    with pytest.raises(ServerError, match=f"start it with {ROUTING_FLAG}"):
        generate(client, ROUTED)
    client.route(EXPERTS)
    result = generate(client, ROUTED)
    assert result.routing.dtype == np.uint8
    np.testing.assert_array_equal(result.routing, EXPERTS)
    assert generate(client).routing is None, "not requested"
    for table, problem in (
        (EXPERTS[1:], "not 3 x 2 of 6 for 4 tokens"),
        (EXPERTS + 1, "up to number 6, not"),
    ):
        client.route(table)
        with pytest.raises(ServerError, match=problem):
            generate(client, ROUTED)


def test_answers_bring_the_kept_ids_of_each_token(client: Any) -> None:
    """With log-probabilities of the kept ids; SGLang reports these separately."""
    assert generate(client).sampling_mask is None
    assert "return_sampling_mask" not in client.body
    for problem in ("0 tokens, and generated 3|0 log-prob", "2 tokens, and generated 3"):
        with pytest.raises(ServerError, match=problem):
            generate(client, MASKED)
        client.keep(KEPT[:2])
    client.keep(KEPT)
    result = generate(client, MASKED)
    np.testing.assert_array_equal(result.logprobs, np.float32([-0.25, 0.0, -1.0]))
    np.testing.assert_array_equal(result.sampling_mask.counts, [2, 1, 3])
    np.testing.assert_array_equal(result.sampling_mask.token_ids, np.concatenate(KEPT))
    mask = to_completion(result, np.zeros(3, np.int32)).sampling_mask
    assert mask is result.sampling_mask
    sampling = client.sampling
    if isinstance(client, Sglang):
        assert client.body["return_sampling_mask"]
        (sampling,) = sampling  # a list: SGLang has no kept ids for n > 1
        assert "n" not in sampling
    assert sampling["top_k"] == 3


def test_a_server_says_whether_it_reports_kept_ids(client: Any) -> None:
    assert not client.http.run(client.get_info()).sampling_mask
    client.offer_masks()
    assert client.http.run(client.get_info()).sampling_mask


def test_greedy_requests_suit_a_server_with_sampling_masks(vllm: Vllm) -> None:
    """vLLM then refuses a temperature of 0."""
    greedy = replace(SAMPLING, temperature=0.0)
    vllm.offer_masks()
    for temperature, top_k in ((0.0, -1), (1.0, 1)):
        generate(vllm, greedy)
        assert (vllm.sampling["temperature"], vllm.sampling["top_k"]) == (temperature, top_k)
        vllm.http.run(vllm.get_info())


SHARES = np.array([0.4 * 0.6**rank for rank in range(30)])
"""Probabilities of thirty tokens, the likeliest first."""


def test_entropies_depend_on_no_drawn_token(vllm: Vllm) -> None:
    """vLLM reports the drawn token and then the likeliest ones, twenty in all."""
    likeliest = np.log(SHARES[:19])
    for drawn in (0, 7, 19, 20, 29):
        reported = list(dict.fromkeys([drawn, *range(20)]))[:20]
        top = [{"token_id": token, "logprob": float(np.log(SHARES[token]))} for token in reported]
        vllm.completion["logprobs"] = {"content": [{"logprob": -1.0, "top_logprobs": top}] * 3}
        result = generate(vllm, replace(SAMPLING, branches=(BranchConfig(entropy=1.0),)))
        assert result.entropies == pytest.approx(compute_entropy_bounds([likeliest] * 3), abs=1e-12)


def test_entropies_come_from_the_likeliest_tokens(http: Http) -> None:
    client, sampling = Sglang(http), replace(SAMPLING, branches=(BranchConfig(entropy=1.0),))
    with pytest.raises(ServerError, match="3 tokens, and the likeliest ones of 0"):
        generate(client, sampling)
    client.completion["output_top_logprobs"] = [
        [[float(np.log(share)), 1] for share in (0.5, 0.25)]
    ] * 3
    assert generate(client, sampling).entropies == pytest.approx([1.5 * np.log(2)] * 3), (
        "all others count as one"
    )
    assert client.body["top_logprobs_num"] == 20
    assert compute_entropy_bounds([[0.0, -np.inf]]) == [0.0]


def test_deterministic_sglang_samples_have_distinct_seeds(http: Http) -> None:
    client = Sglang(http)
    client.settings["enable_deterministic_inference"] = True
    client.answers["/generate"] = [client.answers["/generate"]] * 5
    sampling = replace(SAMPLING, samples=5, seed=2**31)
    assert len(http.run(client.generate(PROMPT, sampling, timeout_s=1.0))) == 5
    assert client.body["input_ids"] == [[3, 4]] * 5
    assert len({sampling["sampling_seed"] for sampling in client.sampling}) == 5
    assert not any("n" in sampling for sampling in client.sampling)


@pytest.mark.parametrize(("device", "seed"), [("cuda", 2**62 - 1), ("cpu", None)])
def test_vllm_has_seeds_on_gpus_alone(vllm: Vllm, device: str, seed: int | None) -> None:
    """On a CPU, a seed ends vLLM's engine as soon as a prompt is computed in parts."""
    vllm.settings["device_config"]["device"] = device
    vllm.http.run(vllm.get_info())
    generate(vllm, replace(SAMPLING, seed=2**64 - 1))
    assert vllm.sampling.get("seed") == seed


def test_sglang_stages_multiply_its_ranks(http: Http) -> None:
    client = Sglang(http)
    client.settings["pp_size"] = 2
    info = http.run(client.get_info())
    assert (client.ranks, info.stages) == (4, 2)


def test_vllm_with_other_flags_is_refused(vllm: Vllm) -> None:
    vllm.settings["model_config"]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
        vllm.http.run(vllm.get_info())
    del vllm.answers["/openapi.json"]["paths"]["/inference/v1/generate"]
    with pytest.raises(
        ServerError, match="has no /inference/v1/generate: start it with --enable-scale-out"
    ):
        vllm.http.run(vllm.get_info())


def test_a_vllm_update_fails_in_words(vllm: Vllm) -> None:
    with pytest.raises(ServerError, match="failed to end at its rank 1: ValueError: no"):
        vllm.http.run(vllm.end_update("5"))
    vllm.settings["parallel_config"]["worker_extension_cls"] = ""
    vllm.http.run(vllm.update_from_disk(Path("/weights"), "5"))
    with pytest.raises(ServerError, match=EXTENSION):
        vllm.http.run(vllm.update_from_distributed(Manifest([], [], []), "weights", None))


def test_vllm_checksums_leave_out_prepacked_weights(vllm: Vllm) -> None:
    norm, nothing = (hashlib.sha256(content).hexdigest() for content in (b"norm", b""))
    rank = "dp0:pp0:pcp0:tp1"
    vllm.answers["/weight_checker"] = {
        "checksums": {f"{rank}:model.norm.weight": norm, f"{rank}:a.weight": nothing}
    }
    assert vllm.http.run(vllm.get_checksums()) == {f"model.norm.weight@{rank}": norm}
