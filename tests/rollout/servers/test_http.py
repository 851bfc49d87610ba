"""A busy server is asked again in time, and a full one is named."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dppo.rollout.servers.http import BusyError, Http
from megatron_dppo.rollout.servers.sglang import SglangClient
from tests.rollout.servers.script import answering


def test_a_busy_server_is_asked_again_within_the_time_limit(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has no room for the first two requests of a completion, nor for any other
    request."""
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.AGAIN_S", 0.1)
    asked: list[str] = []

    def answer(path: str, content: object) -> tuple[int, Any]:
        asked.append(path)
        return {1: 429, 2: 503}.get(len(asked), 200) if path == "/generate" else 503, {}

    with answering(answer) as url:
        client = SglangClient(url, http)
        assert http.run(client.post("/generate", {}, timeout_s=20.0)) == {} and len(asked) == 3
        with pytest.raises(BusyError, match="status 503"):
            http.run(client.post("/never", {}, timeout_s=0.5))
        assert len(asked) > 4, "patiently"
        asked.clear()
        with pytest.raises(BusyError):
            http.run(client.post("/never", {}))
        assert asked == ["/never"], "an order without a time limit is given once"
