"""What goes wrong in a conversation is held against whoever did wrong; the servers here are a few lines each."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dppo.config import Config, ModelConfig, RolloutConfig
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.custom import CustomGenerate
from megatron_dppo.rollout.servers.dispatch import Batch, Dispatcher, PromptFailedError
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.sglang import SglangClient

SAMPLES, PROMPTS = 4, 12
FUNCTIONS = """
from slime.utils.http_utils import post
from slime.utils.types import Sample

SEEN = {}

async def talk(args, sample, sampling_params):
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    if not sample.tokens:
        sample.tokens = [7, 8]
    answer = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params})
    made = answer["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(args, tokens=[t for _, t in made], log_probs=[p for p, _ in made],
                                  meta_info=answer["meta_info"])
    return sample

async def ask_a_judge(args, sample, sampling_params):
    await post(sample.metadata["other"] + "/judge", {})
    return await talk(args, sample, sampling_params)

async def fail_at_first(args, sample, sampling_params):
    SEEN[sample.index] = SEEN.get(sample.index, 0) + 1
    if SEEN[sample.index] == 1:
        sample.status = Sample.Status.FAILED
        return sample
    return await talk(args, sample, sampling_params)

async def write_on_metadata(args, sample, sampling_params):
    sample.metadata["turns"].append("hello")
    assert len(sample.metadata["turns"]) == 1
    return await talk(args, sample, sampling_params)
"""


class Policy(BaseHTTPRequestHandler):
    """Always says 5 6. As a judge it is a server of other weights."""

    version = "3"

    def do_GET(self) -> None:
        self._answer({"weight_version": self.version})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        meta = {
            "weight_version": "default" if self.path == "/judge" else self.version,
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 5], [-0.25, 6]],
        }
        self._answer({"meta_info": meta})

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def converse(function: str, url: str, folder: Path, *, other: str = "", attempts: int = 3) -> tuple[Batch, dict, list]:
    """Have a function answer; the batch, the servers that were lost, and what is left in the prompts."""
    (folder / "tools.py").write_text(FUNCTIONS)
    rollout = RolloutConfig(custom_generate=f"{folder / 'tools.py'}:{function}", request_timeout_s=20.0)
    custom = CustomGenerate(Config(model=ModelConfig(path=str(folder)), rollout=rollout))
    http = Http()
    dispatcher = Dispatcher(
        http,
        lambda told: int(told) if told.isdigit() else None,
        first=0,
        max_in_flight=64,
        request_timeout_s=20.0,
        attempts=attempts,
        custom=custom,
    )
    dispatcher.serve_from([SglangClient(url, http)])
    extra = [{"other": other, "turns": []} for _ in range(PROMPTS)]
    prompts = [Prompt(i, np.array([7, 8], np.int32), "7 8", "", extra=extra[i]) for i in range(PROMPTS)]
    sampling = Sampling(SAMPLES, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1)
    batch = dispatcher.begin(prompts, sampling, 3)
    batch.wait(60.0)
    lost = dispatcher.take_lost()
    custom.close()
    http.close()
    return batch, lost, extra


def test_a_judge_s_weights_are_not_the_policy_s(url: str, tmp_path: Path) -> None:
    batch, lost, _ = converse("ask_a_judge", url, tmp_path, other=url.replace("127.0.0.1", "localhost"))
    assert batch.error is None and lost == {}
    for group in batch.groups():
        assert [completion.token_ids.tolist() for completion in group] == [[5, 6]] * SAMPLES
        assert {span.version for completion in group for span in completion.versions} == {3}
        assert {completion.finish_reason for completion in group} == {"stop"}


def test_a_tool_that_is_down_costs_no_server(url: str, tmp_path: Path) -> None:
    batch, lost, _ = converse("ask_a_judge", url, tmp_path, other="http://127.0.0.1:9", attempts=2)
    assert lost == {}
    assert isinstance(batch.error, PromptFailedError) and "127.0.0.1:9 broke off at /judge" in str(batch.error)


def test_samples_that_are_given_up_are_asked_for_again_and_cost_no_server(url: str, tmp_path: Path) -> None:
    batch, lost, _ = converse("fail_at_first", url, tmp_path, attempts=SAMPLES + 1)
    assert batch.error is None and lost == {}
    assert batch.unfinished == 0


def test_what_a_conversation_writes_on_its_metadata_is_its_own(url: str, tmp_path: Path) -> None:
    batch, _, extra = converse("write_on_metadata", url, tmp_path)
    assert batch.error is None and batch.unfinished == 0
    assert [each["turns"] for each in extra] == [[]] * PROMPTS
