"""The judge of ``configs/judge_reward.py`` with a local HTTP server of the OpenAI protocol, and the
recipe's run as the page shows it."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError

import pytest

from megatron_dppo.plugins import Sample
from tests.docs.documents import ROOT, commands
from tests.docs.sandbox import Sandbox, write_quickstart
from tests.docs.ways import SMALL
from tests.small_runs import rows

Request = dict[str, Any]


class Judge(ThreadingHTTPServer):
    """Ranks shorter answers first, and keeps the requests. ``reply`` replaces the text."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str, Request]] = []
        self.reply: Callable[[int], tuple[int, str]] | None = None
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that has given up."""

    def answer(self, request: Request) -> tuple[int, str]:
        if self.reply is not None:
            return self.reply(len(self.requests))
        answers = answers_of(request)
        numbers = sorted(range(1, len(answers) + 1), key=lambda number: len(answers[number - 1]))
        return 200, f"<think>Perhaps [1, 2]?</think> The ranking is {numbers}."


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, self.headers.get("Authorization", ""), request))
        status, text = self.server.answer(request)
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = json.dumps({"choices": [choice], "usage": {"total_tokens": 120}}).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


def answers_of(request: Request) -> list[str]:
    text = request["messages"][1]["content"]
    return re.split(r"\n\nAnswer \d+:\n", text)[1:]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    with Judge() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", server.url)
        monkeypatch.setenv("JUDGE_MODEL", "wise")
        monkeypatch.setenv("JUDGE_CACHE", str(tmp_path / "cache"))
        yield server
        server.shutdown()


@pytest.fixture
def reward(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge", ROOT / "configs/judge_reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    return module


def group_of(*responses: str) -> list[Sample]:
    return [Sample(prompt="7+8=", response=response, label="15") for response in responses]


def scores_of(scored: list[dict[str, float]]) -> list[float]:
    return [each["score"] for each in scored]


def test_one_request_ranks_a_group(judge: Judge, reward: ModuleType) -> None:
    group = group_of("fifteen", "15", "it is 15", "15", "sixteen!!")
    scored = reward.rank(None, group)
    assert scores_of(scored) == pytest.approx([2 / 3, 1.0, 1 / 3, 1.0, 0.0])
    assert [each["judge_tokens"] for each in scored] == [120 / 5] * 5
    [(path, key, request)] = judge.requests
    assert (path, key, request["model"]) == ("/v1/chat/completions", "", "wise")
    assert sorted(answers_of(request)) == ["15", "fifteen", "it is 15", "sixteen!!"]
    for part in ("7+8=", "Reference:\n15"):
        assert part in request["messages"][1]["content"]


def test_a_request_is_sent_once(judge: Judge, reward: ModuleType) -> None:
    """For the group in any order. Other answers, or another rubric, need another request."""
    first = reward.rank(None, group_of("15", "fifteen"))
    again = reward.rank(None, group_of("fifteen", "15", "15"))
    assert (scores_of(first), scores_of(again)) == ([1.0, 0.0], [0.0, 1.0, 1.0])
    assert {(each["judge_tokens"], each["judge_cached"]) for each in again} == {(0.0, 1.0)}
    assert len(judge.requests) == 1
    reward.RUBRIC += " Be strict."
    reward.rank(None, group_of("15", "fifteen"))
    reward.rank(None, group_of("15", "sixteen"))
    assert len(judge.requests) == 3


def test_equal_answers_need_no_judge(judge: Judge, reward: ModuleType) -> None:
    assert scores_of(reward.rank(None, group_of("15", "15"))) == [0.5, 0.5]
    assert judge.requests == []


@pytest.mark.parametrize("text", ["I like them all.", "[1, 1]", "[1]", "[0, 1]", "[1, 2, 3]"])
def test_an_answer_without_a_ranking_is_no_score(
    judge: Judge, reward: ModuleType, text: str
) -> None:
    """The cache stores no such answer, so that the next request is sent."""
    judge.reply = lambda number: (200, text)
    with pytest.raises(ValueError, match=r"did not rank 2 answers: .*" + re.escape(text[:4])):
        reward.rank(None, group_of("a", "b"))
    judge.reply = None
    reward.rank(None, group_of("a", "b"))
    assert len(judge.requests) == 2


def test_failures_that_may_pass_are_tried_again(
    judge: Judge, reward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    judge.reply = lambda number: (200, "[1, 2]") if number == 3 else (503, "busy")
    reward.rank(None, group_of("a", "b"))
    assert [key for _, key, _ in judge.requests] == ["Bearer secret"] * 3
    for status, requests in ((429, 3), (400, 1)):
        judge.requests.clear()
        judge.reply = lambda number, status=status: (status, "")
        with pytest.raises(HTTPError):
            reward.rank(None, group_of("a", "c"))
        assert len(judge.requests) == requests


def test_a_silent_judge_is_a_timeout(
    judge: Judge, reward: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TIMEOUT_S", "0.2")
    release = threading.Event()

    def wait(number: int) -> tuple[int, str]:
        release.wait(20.0)
        return 200, "[1, 2]"

    judge.reply = wait
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        reward.rank(None, group_of("a", "b"))
    release.set()
    assert time.monotonic() - started < 10.0


def test_the_recipe_trains_as_its_page_shows(
    judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: the second run finds every ranking in the cache."""
    page = "docs/recipes/judge.md"
    quickstart = write_quickstart(tmp_path, trained=False)
    (place := tmp_path / "place").mkdir()
    sandbox = Sandbox(place, page, quickstart)
    [command] = [each.text for each in commands(page) if "megatron-dppo" in each.text]
    address = "http://127.0.0.1:8000/v1"
    assert address in command
    monkeypatch.delenv("JUDGE_CACHE")
    for folder in ("first", "second"):
        options = f"{SMALL} run.dir={folder} rollout.samples_per_prompt=4 reward.workers=2"
        sandbox.type(f"{command.replace(address, judge.url)} {options}")
        asked = len(judge.requests)
        if folder == "first":
            expected = asked
    first, second = (rows(place / folder)[-1] for folder in ("first", "second"))
    assert asked == expected > 0 and (place / "runs/judge/cache").is_dir()
    assert first["reward/judge_tokens"] > 0.0 == first["reward/judge_cached"]
    assert second["reward/judge_tokens"] == 0.0 < second["reward/judge_cached"]
    assert first["rollout/raw_reward"] == second["rollout/raw_reward"]
