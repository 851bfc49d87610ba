"""What is asked of an SGLang server for completions."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rl.types import RoutingShape
from megatron_dppo.rollout.servers.client import GenerateRequest
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.pool import ServerPool
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config


class Hears(SglangClient):
    """A server that keeps what it is asked, and answers as SGLang would with as many samples."""

    routed: np.ndarray | None = None
    """int32, what it says of its experts."""
    likeliest: list[list[list[Any]]] | None = None

    async def get(self, path: str, **named: Any) -> Any:
        facts = {"enable_deterministic_inference": True, "model_path": "/m", "weight_version": "1", "tp_size": 1}
        return facts | {"enable_return_routed_experts": self.routed is not None, "paths": {}}

    async def post(self, path: str, body: Mapping[str, Any], **named: Any) -> Any:
        self.body = body
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 7]], "weight_version": "1"}
        if self.routed is not None:
            meta["routed_experts"] = base64.b64encode(self.routed.tobytes()).decode()
        if self.likeliest is not None:
            meta["output_top_logprobs"] = self.likeliest
        return [{"output_ids": [7], "meta_info": meta}] * len(body["input_ids"])


def test_where_inference_is_deterministic_each_sample_has_a_seed_of_its_own(http: Http) -> None:
    api = Hears("http://127.0.0.1:1", http)
    pieces = http.run(api.generate(GenerateRequest([3, 4], 5, 8, 1.0, (), seed=2**31), timeout_s=1.0))
    assert len(pieces) == 5
    assert api.body["input_ids"] == [[3, 4]] * 5
    assert len({sampling["sampling_seed"] for sampling in api.body["sampling_params"]}) == 5
    assert not any("n" in sampling for sampling in api.body["sampling_params"])


def test_a_server_samples_from_all_tokens_unless_it_is_asked_otherwise(http: Http) -> None:
    api, request = Hears("http://127.0.0.1:1", http), GenerateRequest([3, 4], 1, 8, 1.0, (5, 6), seed=1)
    for asked, said in ((request, (1.0, -1)), (replace(request, top_p=0.9, top_k=20), (0.9, 20))):
        http.run(api.generate(asked, timeout_s=1.0))
        (sampling,) = api.body["sampling_params"]
        assert (sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (*said, 0.0)
        assert sampling["stop_token_ids"] == [5, 6]


def test_a_server_says_how_many_ranks_and_stages_it_has(http: Http) -> None:
    class Staged(Hears):
        async def get(self, path: str, **named: Any) -> Any:
            return await super().get(path, **named) | {"tp_size": 2, "pp_size": 2}

    for kind, ranks, stages in ((Hears, 1, 1), (Staged, 4, 2)):
        info = http.run(kind("http://127.0.0.1:1", http).info())
        assert (info.ranks, info.stages) == (ranks, stages)


def test_the_experts_of_all_tokens_but_the_last_come_with_an_answer(http: Http) -> None:
    api, shape = Hears("http://127.0.0.1:1", http), RoutingShape(layers=3, per_token=2, experts=300)
    request = GenerateRequest([3, 4], 1, 8, 1.0, (), seed=1, routing=shape)
    with pytest.raises(ServerError, match="start it with --enable-return-routed-experts"):
        http.run(api.generate(request, timeout_s=1.0))
    api.routed = np.arange(2 * 3 * 2, dtype=np.int32).reshape(2, 3, 2) + 280
    (piece,) = http.run(api.generate(request, timeout_s=1.0))
    assert api.body["return_routed_experts"] is True
    assert piece.routing is not None and piece.routing.dtype == np.uint16
    np.testing.assert_array_equal(piece.routing, api.routed)
    http.run(api.generate(replace(request, routing=None), timeout_s=1.0))
    assert "return_routed_experts" not in api.body


def test_entropies_are_made_of_the_likeliest_tokens_that_are_asked_for(http: Http) -> None:
    api, request = Hears("http://127.0.0.1:1", http), GenerateRequest([3, 4], 1, 8, 1.0, (), seed=1, entropies=True)
    with pytest.raises(ServerError, match="1 tokens, and the likeliest ones of 0"):
        http.run(api.generate(request, timeout_s=1.0))
    api.likeliest = [[[float(np.log(share)), token, None] for token, share in enumerate((0.5, 0.25))]]
    (piece,) = http.run(api.generate(request, timeout_s=1.0))
    assert api.body["top_logprobs_num"] == 20
    assert piece.entropies == pytest.approx([1.5 * np.log(2)])
    http.run(api.generate(replace(request, entropies=False), timeout_s=1.0))
    assert "top_logprobs_num" not in api.body


def test_a_server_that_does_not_tell_its_experts_is_refused_by_name(http: Http) -> None:
    api = Hears("http://127.0.0.1:1", http)
    settings = ["rollout.engine=sglang", "rollout.servers=[http://127.0.0.1:1]", "loss.replay_routing=rollout"]
    pool = ServerPool(load_config(None, settings), http, architecture="", secret=None, say=print)
    with pytest.raises(UserError, match=r"loss\.replay_routing = rollout replays them") as raised:
        http.run(pool._check(api))
    assert (raised.value.setting, raised.value.value) == ("rollout.servers", "http://127.0.0.1:1")
    assert "--enable-return-routed-experts" in raised.value.remedy
    api.routed = np.zeros(0, np.int32)
    http.run(pool._check(api))


def test_a_server_must_have_room_for_the_answers_of_evaluations_too(http: Http) -> None:
    class Short(Hears):
        async def get(self, path: str, **named: Any) -> Any:
            return await super().get(path, **named) | {"context_length": 1536}

    def check(*words: str) -> None:
        settings = ["rollout.engine=sglang", "rollout.servers=[http://127.0.0.1:1]", *words]
        pool = ServerPool(load_config(None, settings), http, architecture="", secret=None, say=print)
        http.run(pool._check(Short("http://127.0.0.1:1", http)))

    check("eval.max_response_tokens=1024")
    for limit in ("rollout", "eval"):
        with pytest.raises(UserError, match=r"takes 1536 tokens, and the longest prompt .* has 1537") as raised:
            check(f"{limit}.max_response_tokens=1025")
        assert f"data.max_prompt_tokens or {limit}.max_response_tokens" in raised.value.remedy
