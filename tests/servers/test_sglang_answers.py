"""What is asked of an SGLang server for completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatron_dppo.rollout.servers.client import GenerateRequest
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sglang import SglangClient
from tests.servers.real import RealServer


class Hears(SglangClient):
    """A server that keeps what it is asked, and answers as SGLang would with as many samples."""

    async def get(self, path: str, **named: Any) -> Any:
        return {"enable_deterministic_inference": True}

    async def post(self, path: str, body: Mapping[str, Any], **named: Any) -> Any:
        self.body = body
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 7]], "weight_version": "1"}
        return [{"output_ids": [7], "meta_info": meta}] * len(body["input_ids"])


def test_where_inference_is_deterministic_each_sample_has_a_seed_of_its_own(http: Http) -> None:
    api = Hears("http://127.0.0.1:1", http)
    pieces = http.run(api.generate(GenerateRequest([3, 4], 5, 8, 1.0, (), seed=2**31), timeout_s=1.0))
    assert len(pieces) == 5
    assert api.body["input_ids"] == [[3, 4]] * 5
    assert len({sampling["sampling_seed"] for sampling in api.body["sampling_params"]}) == 5
    assert not any("n" in sampling for sampling in api.body["sampling_params"])


@pytest.mark.servers
def test_a_real_server_says_whether_its_inference_is_deterministic_and_takes_one_request_a_sample(
    sglang_tp1: RealServer, http: Http
) -> None:
    """With deterministic kernels, which there are for GPUs only, the seeds would count as well."""
    assert http.run(sglang_tp1.api.get("/server_info"))["enable_deterministic_inference"] is False
    api = SglangClient(sglang_tp1.api.url, http, secret=sglang_tp1.secret)
    api._known_deterministic = True
    ask = GenerateRequest([3, 4, 5], samples=3, max_tokens=8, temperature=1.0, stop_token_ids=[], seed=5)
    pieces = http.run(api.generate(ask, timeout_s=60.0))
    assert len(pieces) == 3 and all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
