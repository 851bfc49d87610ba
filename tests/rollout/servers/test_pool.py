"""Which servers a run takes, and which silent or unfit ones it names."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers import pool
from megatron_dppo.rollout.servers.client import ServerInfo
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.pool import ServerPool
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.rollout.servers.script import answering, happens
from tests.servers import on_ranks

POLICY = partial(write_policy, layers=1)
URL = "http://127.0.0.1:1"


def pool_of(http: Http, *settings: str, say: Any = print) -> ServerPool:
    config = load_config(None, ["rollout.engine=sglang", f"rollout.servers=[{URL}]", *settings])
    return ServerPool(config, http, architecture="Qwen3ForCausalLM", secret=None, log=say)


class Described(SglangClient):
    """A server with these properties besides those of a fit one."""

    properties: dict[str, Any]

    async def get_info(self) -> ServerInfo:
        plain = {"model": "/m", "architecture": None, "dtype": None, "max_tokens": None}
        return ServerInfo(**plain | self.properties)


LORA = "model.lora.rank=4 model.lora.targets=[q_proj,v_proj] rollout.sync.adapter=true"


@pytest.mark.parametrize(
    ("properties", "settings", "problem"),
    [
        ({"architecture": "LlamaForCausalLM"}, "", "another model"),
        ({"max_tokens": 1536}, "rollout.max_response_tokens=1025", "1537"),
        ({"max_tokens": 1536}, "eval.max_response_tokens=1025", "1537"),
        ({"stages": 2}, "", "has 2 pipeline stages"),
        ({"dtype": "bfloat16"}, "", "in bfloat16"),
        ({}, "loss.replay_routing=rollout", "replays them"),
        ({}, "rollout.top_k=9", "rollout.top_k replays them"),
        ({}, LORA, "takes no adapters"),
        ({"lora_rank": 2, "lora_targets": {"all"}}, LORA, "up to rank 2 on all"),
        ({"lora_rank": 4, "lora_targets": {"q_proj"}}, LORA, "on q_proj"),
    ],
)
def test_an_unfit_server_is_refused(
    http: Http, properties: dict[str, Any], settings: str, problem: str
) -> None:
    client = Described(URL, http)
    client.properties = properties
    with pytest.raises(UserError) as refused:
        http.run(pool_of(http, *settings.split())._check(client))
    assert (refused.value.setting, refused.value.value) == ("rollout.servers", URL)
    assert problem in refused.value.problem


def test_a_fit_server_is_taken(http: Http) -> None:
    client = Described(URL, http)
    client.properties = {"architecture": "Qwen3ForCausalLM", "dtype": "float32", "max_tokens": 1536}
    client.properties |= {
        "routing": True,
        "sampling_mask": True,
        "lora_rank": 8,
        "lora_targets": {"all"},
    }
    http.run(pool_of(http, *LORA.split(), "eval.max_response_tokens=1024")._check(client))
    http.run(pool_of(http, "loss.replay_routing=rollout", "rollout.top_k=9")._check(client))
    client.properties = {"stages": 2, "dtype": "bfloat16"}
    http.run(pool_of(http, "rollout.sync.transport=disk", "model.dtype=bf16")._check(client))


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_started_server_that_never_listens_is_named(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SAY_AFTER_S", 0.4)
    settings = (
        f"run.dir={tmp_path} model.path={tmp_path} rollout.launch.wait_s=1 rollout.servers=[]"
    )
    sleeps = f"rollout.launch.command=[{sys.executable},-c,import time; time.sleep(60)]"
    said: list[str] = []
    opened = pool_of(http, *settings.split(), "rollout.launch.count=1", sleeps, say=said.append)
    with pytest.raises(UserError) as failed:
        http.run(opened.open())
    opened.close()
    assert failed.value.setting == "rollout.launch.wait_s"
    assert [f"{tmp_path}/servers/server-0.log" in text for text in said] == [True]


def test_a_silent_server_is_named_before_its_removal(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SAY_AFTER_S", 0.2)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SglangClient(url_of(silent), http)
        serving = pool_of(http, say=said.append)
        serving._serving.append(client)
        assert http.run(serving.check(0.5)) == {}, "one miss is no loss"
        (named,) = said
        assert client.url.removeprefix("http://") in named and "is silent" in named
        assert http.run(serving.check(0.5)) == {
            client.url: "did not answer /health_generate within 0.5 s"
        }


def test_a_lost_given_server_comes_back(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ASK_AGAIN_S", 0.05)
    said: list[str] = []
    with silent_server() as url:
        client = SglangClient(url, http)
        serving = pool_of(http, say=said.append)
        serving._serving.append(client)
        assert serving.remove_unhealthy({url: "broke off"}) == ()
        assert happens(lambda: [server.life for server in serving.admit_ready()] == [1])
    name = url.removeprefix("http://")
    assert said == [f"server {name} is removed: it broke off", f"server {name} is back"]


@contextmanager
def silent_server(*silent: str, then: tuple[str, ...] = ()) -> Iterator[str]:
    """Answer SGLang's requests, but for those of ``silent`` and, after one of a completion, of
    ``then``.

    The server has no weights and makes no token.
    """
    ignored, over, version = set(silent), threading.Event(), "0"

    def answer(path: str, content: dict[str, Any]) -> tuple[int, Any]:
        nonlocal version
        version = content.get("weight_version", content.get("new_version", version))
        if path == "/generate":
            ignored.update(then)
        if path in ignored:
            over.wait(60.0)
        answers = {"/model_info": {"model_path": "/m", "weight_version": version}, "/workers": None}
        answers |= {"/server_info": {"tp_size": 1}, "/openapi.json": {"paths": {}}}
        return 404 if path == "/workers" else 200, answers.get(path, {"success": True})

    with answering(answer) as url:
        yield url
        over.set()


def last_words(ranks: RankPool, policy: Path, folder: Path, url: str, *words: str) -> str:
    """Return the error with which a run of two ranks ends, the same on both."""
    settings = f"""
    run.dir={folder} model.path={policy} rollout.engine=sglang rollout.servers=[{url}] rollout.sync.transport=disk
    data.max_prompt_tokens=16 rollout.max_response_tokens=64 rollout.timeout_s=4
    """
    first, second = ranks.run(2, on_ranks.stop_with, [*settings.split(), *words], "")
    assert first == second
    return first


def test_a_run_names_a_server_that_never_answers(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = url_of(silent)
        said = last_words(ranks, policy, tmp_path, url, "rollout.launch.wait_s=1.5")
    assert said.startswith(
        f"rollout.servers = {url}: cannot generate after 1.5 s: it has given no answer"
    )


def test_a_run_names_a_well_server_without_completions(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    with silent_server("/generate") as url:
        said = last_words(ranks, policy, tmp_path, url)
    assert said.startswith(
        "rollout.timeout_s = 4: no prompt was answered for so long; unanswered: 12 of rank 0, 12 "
        f"of rank 1; requests under way: 24 at server {url}."
    )


def test_a_run_names_servers_that_became_silent(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    with silent_server("/generate", then=("/health_generate", "/continue_generation")) as url:
        said = last_words(ranks, policy, tmp_path, url, "rollout.health_timeout_s=0.5")
    assert said.startswith(
        "rollout.timeout_s = 4: no rollout server is left, and none recovered in time: "
        f"server {url} did not answer /health_generate within 0.5 s."
    )
