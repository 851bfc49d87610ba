"""What is made of a vLLM server's words, and what it is told to be started with; none is started here."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import Config, ModelConfig
from megatron_dppo.rl.types import RoutingShape
from megatron_dppo.rollout.servers.client import GenerateRequest, Manifest
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.vllm import (
    EXTENSION,
    GIVEN_BY,
    LOAD_ADAPTER,
    LOCK,
    PLUGIN,
    SPEC,
    VllmClient,
)

CHOICE = {
    "index": 0,
    "finish_reason": "abort",
    "token_ids": [7, 8, 9],
    "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}, {"logprob": -2.5}]},
}

REQUEST = GenerateRequest([3, 4], samples=1, max_tokens=8, temperature=1.0, stop_token_ids=(), seed=None)
ROUTED = replace(REQUEST, routing=RoutingShape(layers=3, per_token=2, experts=6))


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


@pytest.fixture
def said() -> dict[str, Any]:
    """By path, what a server says that has everything; a test changes it."""
    model = {"model": "/m", "dtype": "torch.float32", "max_model_len": 64, "logprobs_mode": "processed_logprobs"}
    config = {
        "model_config": model | {"enable_sleep_mode": False},
        "parallel_config": {"worker_extension_cls": EXTENSION},
        "device_config": {"device": "cuda"},
    }
    return {
        "/openapi.json": {"paths": {route: {} for route in GIVEN_BY}},
        "/server_info": {"vllm_config": config},
        "/weight_info": {"weight_version": "4"},
        "/get_world_size": {"world_size": 2},
        "/collective_rpc": {"results": [None, {"problem": "ValueError: no"}]},
    }


@pytest.fixture
def api(http: Http, said: dict[str, Any]) -> Iterator[VllmClient]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps(said[self.path.partition("?")[0]]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield VllmClient(f"http://127.0.0.1:{server.server_port}", http)
    server.shutdown()
    server.server_close()


def test_an_answer_becomes_a_piece(api: VllmClient) -> None:
    piece = api._result(CHOICE, REQUEST)
    np.testing.assert_array_equal(piece.token_ids, [7, 8, 9])
    np.testing.assert_array_equal(piece.logprobs, np.float32([-0.5, -1.5, -2.5]))
    assert piece.versions == (("1", 2), ("2", 1))
    assert piece.reason == "abort"


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"weight_versions": None}, "cannot be used"),
        ({"weight_versions": CHOICE["weight_versions"][:1]}, "cannot be used"),
        ({"token_ids": [7, 8]}, "cannot be used"),
        ({"finish_reason": "error"}, "cannot be used"),
        ({"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -9999.0}, {"logprob": -1.0}]}}, "for token 1"),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(api: VllmClient, changed: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ServerError, match=complaint):
        api._result(CHOICE | changed, REQUEST)


def as_npy(table: np.ndarray) -> str:
    """As vLLM sends arrays."""
    file = io.BytesIO()
    np.save(file, table)
    return base64.b64encode(file.getvalue()).decode()


def test_the_experts_of_all_tokens_but_the_last_come_with_an_answer(api: VllmClient) -> None:
    table = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2) % 6
    piece = api._result(CHOICE | {"routed_experts": as_npy(table)}, ROUTED)
    assert piece.routing is not None and piece.routing.dtype == np.uint8
    np.testing.assert_array_equal(piece.routing, table)
    assert api._result(CHOICE | {"routed_experts": as_npy(table)}, REQUEST).routing is None, "it was not asked for"
    for told, complaint in (
        (None, "start it with --enable-return-routed-experts"),
        (as_npy(table[1:]), "not 3 x 2 of 6 for 4 tokens"),
        (as_npy(table + 1), "up to number 6, not"),
    ):
        with pytest.raises(ServerError, match=complaint):
            api._result(CHOICE | {"routed_experts": told, "finish_reason": "stop"}, ROUTED)
    assert api._result(CHOICE, ROUTED).routing is None, "its continuation will say it"


def test_entropies_do_not_depend_on_the_token_that_was_drawn(api: VllmClient) -> None:
    """vLLM names twenty tokens: the drawn one, and all of the likeliest but the last where the drawn one is not one."""
    shares = np.array([0.4 * 0.6**rank for rank in range(30)])
    pieces = []
    for drawn in (0, 7, 19, 20, 29):
        named = list(dict.fromkeys([drawn, *range(20)]))[:20]
        top = [{"token_id": token, "logprob": float(np.log(shares[token]))} for token in named]
        entry = {"logprob": float(np.log(shares[drawn])), "top_logprobs": top}
        pieces.append(api._result(CHOICE | {"logprobs": {"content": [entry] * 3}}, replace(REQUEST, entropies=True)))
    known = np.append(shares[:19], 1.0 - shares[:19].sum())
    for piece in pieces:
        assert piece.entropies == pytest.approx([-np.sum(known * np.log(known))] * 3, abs=1e-12)
    assert api._result(CHOICE, REQUEST).entropies is None


@pytest.mark.parametrize(
    ("lora", "route", "rank", "targets"),
    [
        (None, LOAD_ADAPTER, 0, set()),
        ({"max_lora_rank": 16, "target_modules": None}, LOAD_ADAPTER, 16, {"all"}),
        ({"max_lora_rank": 8, "target_modules": ["q_proj"]}, LOAD_ADAPTER, 8, {"q_proj"}),
        ({"max_lora_rank": 8, "target_modules": None}, "/v1/models", 0, set()),
    ],
)
def test_a_server_says_which_adapters_it_takes(
    http: Http,
    api: VllmClient,
    said: dict[str, Any],
    lora: dict[str, Any] | None,
    route: str,
    rank: int,
    targets: set[str],
) -> None:
    said["/openapi.json"]["paths"][route] = {}
    said["/server_info"]["vllm_config"]["lora_config"] = lora
    said["/collective_rpc"]["results"] = [{}]
    info = http.run(api.info())
    assert (info.lora_rank, info.lora_targets) == (rank, targets)


def test_facts_are_what_the_server_says(http: Http, api: VllmClient) -> None:
    info = http.run(api.info())
    assert (info.model, info.ranks, info.version, info.dtype, info.max_tokens) == ("/m", 2, "4", "float32", 64)
    assert api.ranks == 2


@pytest.mark.parametrize(
    ("extension", "answer", "version"),
    [
        (EXTENSION, {"nccl": "2.29.7"}, "2.29.7"),
        (EXTENSION, {}, None),
        (
            EXTENSION,
            {"problem": "ValueError: no such order"},
            None,
        ),  # an extension of an earlier version of this package
        (None, {"nccl": "not asked"}, None),
    ],
)
def test_the_version_of_nccl_is_what_the_extension_says(
    http: Http,
    api: VllmClient,
    said: dict[str, Any],
    extension: str | None,
    answer: dict[str, str],
    version: str | None,
) -> None:
    said["/collective_rpc"] = {"results": [answer, answer]}
    said["/server_info"]["vllm_config"]["parallel_config"]["worker_extension_cls"] = extension
    assert http.run(api.info()).nccl == version


@pytest.mark.parametrize(
    ("route", "remedy"), [("/inference/v1/generate", "--enable-scale-out"), ("/pause", "VLLM_SERVER_DEV_MODE=1")]
)
def test_a_server_without_a_route_is_told_what_to_be_started_with(
    http: Http, api: VllmClient, said: dict[str, Any], route: str, remedy: str
) -> None:
    del said["/openapi.json"]["paths"][route]
    with pytest.raises(ServerError, match=f"has no {route}: start it with .*{remedy}"):
        http.run(api.info())


def test_a_server_with_raw_logprobs_is_refused(http: Http, api: VllmClient, said: dict[str, Any]) -> None:
    said["/server_info"]["vllm_config"]["model_config"]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
        http.run(api.info())


@pytest.mark.parametrize(("device", "seed"), [("cuda", 7), ("cpu", None)])
def test_only_a_server_that_survives_a_seed_is_given_one(
    http: Http, api: VllmClient, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: str, seed: int | None
) -> None:
    asked: dict[str, Any] = {}

    async def post(path: str, body: dict[str, Any], **_: Any) -> Any:
        asked.update(body["sampling_params"])
        return {"choices": [CHOICE]}

    said["/server_info"]["vllm_config"]["device_config"]["device"] = device
    http.run(api.info())
    monkeypatch.setattr(api, "post", post)
    http.run(api.generate(GenerateRequest([3], 1, 3, 1.0, (), seed=7), timeout_s=5.0))
    assert asked.get("seed") == seed


def test_a_server_samples_from_all_tokens_unless_it_is_asked_otherwise(
    http: Http, api: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    async def post(path: str, body: dict[str, Any], **_: Any) -> Any:
        asked.update(body["sampling_params"])
        return {"choices": [CHOICE]}

    monkeypatch.setattr(api, "post", post)
    request = replace(REQUEST, stop_token_ids=(5, 6))
    for each, said in ((request, (1.0, -1)), (replace(request, top_p=0.9, top_k=20), (0.9, 20))):
        http.run(api.generate(each, timeout_s=5.0))
        assert (asked["top_p"], asked["top_k"], asked["min_p"]) == (*said, 0.0)
        assert asked["stop_token_ids"] == [5, 6]


def test_a_server_without_our_extension_loads_from_disk_only(http: Http, api: VllmClient, said: dict[str, Any]) -> None:
    said["/server_info"]["vllm_config"]["parallel_config"]["worker_extension_cls"] = ""
    http.run(api.update_from_disk(Path("/weights"), "5"))
    with pytest.raises(ServerError, match=EXTENSION):
        http.run(api.update_from_distributed(Manifest([], [], []), "weights", None))


def test_a_gpu_server_that_cannot_sleep_is_told_how(http: Http, api: VllmClient) -> None:
    with pytest.raises(ServerError, match="--enable-sleep-mode"):
        http.run(api.release_memory())


def test_a_refusal_of_any_rank_is_a_refusal(http: Http, api: VllmClient) -> None:
    with pytest.raises(ServerError, match="failed to end at its rank 1: ValueError: no"):
        http.run(api.end_update("5"))


def test_what_servers_are_started_with_exists() -> None:
    for name in (EXTENSION, LOCK):
        module, _, what = name.rpartition(".")
        assert f"class {what}" in (PLUGIN / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert str(PLUGIN) in SPEC.environment("secret")["PYTHONPATH"].split(":")
    assert {EXTENSION, LOCK} <= set(SPEC.flags(Config(model=ModelConfig(path=".")), Path()))


def test_checksums_have_the_actors_names_and_none_of_what_is_prepacked(
    http: Http, api: VllmClient, said: dict[str, Any]
) -> None:
    norm, nothing = (hashlib.sha256(content).hexdigest() for content in (b"norm", b""))
    said["/openapi.json"]["paths"]["/weight_checker"] = {}
    of_rank = "dp0:pp0:pcp0:tp1"
    said["/weight_checker"] = {"checksums": {f"{of_rank}:model.norm.weight": norm, f"{of_rank}:a.weight": nothing}}
    assert http.run(api.checksums()) == {f"model.norm.weight@{of_rank}": norm}
