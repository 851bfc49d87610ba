"""Requests to servers that teach, and their answers; ``tests/servers`` asks real ones."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from megatron_dppo.config import Config
from megatron_dppo.data.offline import OfflineGroup
from megatron_dppo.data.tokenizer import end_token_id, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.rl.score import Score
from megatron_dppo.rl.types import Completion, Group, Prompt, Selection
from megatron_dppo.rollout import teachers
from megatron_dppo.rollout.collect import Collector
from megatron_dppo.rollout.step_rollouts import StepRollouts
from megatron_dppo.rollout.teachers import TeacherQuery, TeacherServers
from tests.rollout.scripted import (
    SAMPLES,
    ScriptedEngine,
    ScriptedWorkers,
    collect_config,
    completion_of,
    pool_of,
    said,
    world_of,
)
from tests.waiting import wait_until

Kind = Literal["sglang", "vllm"]


class Teaching(ThreadingHTTPServer):
    """Made-up log-probabilities behind the routes of SGLang or of vLLM, in the form of their
    answers."""

    def __init__(self, kind: Kind, policy: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.kind, self.folder, self.tokenizer = kind, str(policy), load_tokenizer(policy)
        self.most, self.asked, self.shift = 1024, 0, 0
        self.failures: list[int] = []
        """Statuses of the next answers to questions, the last one first; 0 breaks off."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def logprobs(self, tokens: list[int]) -> list[float | None]:
        """Return numbers, each of which depends on its token and all tokens before."""
        _, *sums = accumulate(tokens)
        return [None, *(-(total % 17) / 10 for total in sums)]

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/openapi.json":
            return {
                "paths": {"/generate": {}} if self.kind == "sglang" else {"/v1/completions": {}}
            }
        if path == "/v1/models":
            return {"data": [{"id": self.folder, "max_model_len": self.most}]}
        if path == "/detokenize":
            skips = body.get("skip_special_tokens", self.kind == "sglang")
            text = self.tokenizer.decode(body["tokens"], skip_special_tokens=skips)
            return {"text": text} if self.kind == "sglang" else {"prompt": text}
        self.asked += 1
        if path == "/generate":
            tokens, start = body["input_ids"], body["logprob_start_len"]
            assert (body["return_logprob"], body["sampling_params"]["max_new_tokens"]) == (True, 0)
            last = len(self.tokenizer) - 1  # which SGLang calls 0
            named = [0 if t == last else t + self.shift for t in tokens]
            told = [[p, t, None] for p, t in zip(self.logprobs(tokens), named, strict=True)][start:]
            return {"meta_info": {"input_token_logprobs": [[None, *told[0][1:]], *told[1:]]}}
        assert path == "/v1/completions" and (body["model"], body["max_tokens"]) == (self.folder, 1)
        _, *pairs = zip(self.logprobs(body["prompt"]), body["prompt"], strict=True)
        told = [{str(t + self.shift): {"logprob": p, "rank": 1}} for p, t in pairs]
        return {"choices": [{"prompt_logprobs": [None, *told]}]}


class Answer(BaseHTTPRequestHandler):
    server: Teaching

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        fails = self.path in ("/generate", "/v1/completions") and bool(self.server.failures)
        status = self.server.failures.pop() if fails else 200
        if status == 0:
            self.connection.close()
            return
        content = json.dumps({} if fails else self.server.answer(self.path, body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def teaching(kind: Kind, policy: Path) -> Iterator[Teaching]:
    with Teaching(kind, policy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@contextmanager
def opened(config: Config, tokens: Path) -> Iterator[TeacherServers]:
    with closing(TeacherServers(config, world_of(1, 0), load_tokenizer(tokens))) as servers:
        yield servers


def config_of(url: str, *settings: str, teachers: str = "") -> Config:
    """Return the settings of a run that the server teaches, all of it or the sources in
    ``teachers`` (``a: URL``)."""
    named = f"s={{{teachers.replace('URL', repr(url))}}}" if teachers else f"={url}"
    return collect_config(
        "rollout.max_response_tokens=16",
        "rollout.timeout_s=20",
        f"loss.distillation.teacher{named}",
        *settings,
    )


def groups_of(sources: str) -> tuple[list[Prompt], list[tuple[Completion, ...]]]:
    """Return a prompt of each source, with a response of the last token of the vocabulary and one
    of seven tokens, which are two sequences for the first prompt."""
    rng = np.random.default_rng(0)
    prompts, groups = [], []
    for number, source in enumerate(sources):
        ids = rng.integers(4, 40, 3 + number).astype(np.int32)
        prompts.append(Prompt(number, ids, "", "", data_source=source))
        responses = np.array([47], np.int32), rng.integers(4, 40, 7).astype(np.int32)
        last, longer = map(completion_of, responses)
        groups.append((last, dataclasses.replace(longer, starts=(3,) * (number == 0))))
    return prompts, groups


def assert_taught(server: Teaching, prompt: Prompt, completion: Completion) -> None:
    """Each sequence is read by itself; the first token of a further one was not sampled."""
    tokens, (end, *_) = completion.token_ids.tolist(), (*completion.starts, None)
    expected = server.logprobs([*prompt.token_ids.tolist(), *tokens[:end]])[len(prompt.token_ids) :]
    if end:
        expected += [0.0, *server.logprobs(tokens[end:])[1:]]
    np.testing.assert_allclose(
        completion.teacher_logprobs, np.array(expected, np.float32), atol=1e-6
    )


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_servers_read_their_completions_at_once(
    kind: Kind, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a server that breaks off and is busy at first."""
    monkeypatch.setattr(teachers, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr("megatron_dppo.rollout.servers.http.AGAIN_S", 0.05)
    prompts, groups = groups_of("aba")
    with (
        teaching(kind, policy) as server,
        opened(config_of(server.url, teachers="a: URL, b: null"), policy) as servers,
    ):
        server.failures = [429, 503, 0]
        reading = TeacherQuery(servers, prompts)
        reading.submit_groups([(2, groups[2])])
        wait_until(lambda: server.asked == 2, 20.0)  # and wait() has not been called
        assert server.failures == []
        reading.wait(groups, world_of(1, 0))
        read = reading.add_logprobs(groups)
        assert server.asked == 5
        assert read[1] == groups[1], "nobody teaches source b"
        for place in (0, 2):
            for completion in read[place]:
                assert_taught(server, prompts[place], completion)


def test_rollouts_have_the_log_ratios_of_their_teacher(policy: Path) -> None:
    """Generated rollouts and offline rollouts."""
    tokenizer, world = load_tokenizer(policy), world_of(1, 0)
    engine = ScriptedEngine(tokenizer, {4: said("score 1", "score 0", "score 0")})

    def collect(**offline: Any) -> Group:
        teachers = TeacherServers(config, world, tokenizer)
        stops = (end_token_id(tokenizer),)
        parts = config, world, engine, ScriptedWorkers(), tokenizer, stops
        with closing(Collector(*parts, teachers=teachers, **offline)) as collector:
            selection = Selection(np.array([4]), np.ones(1), 1)
            begun = collector.request(pool_of(10), StepRollouts(selection, step=0))
            rollouts = collector.merge([collector.finish(begun)])
        for completion, known in zip(
            rollouts.held[0].completions, rollouts.metadata.log_ratios[0], strict=True
        ):
            assert_taught(server, rollouts.held[0].prompt, completion)
            ratio = completion.teacher_logprobs - np.log(0.5)  # and each token weighs the same
            np.testing.assert_allclose(known, [ratio.mean(), ratio.std()], rtol=1e-4, atol=1e-6)
        return rollouts.held[0]

    with teaching("sglang", policy) as server:
        config = config_of(server.url, teachers="here: URL")
        unread = tuple(
            dataclasses.replace(each, teacher_logprobs=None) for each in collect().completions
        )
        collect(offline={4: OfflineGroup(unread, (Score(1.0, True),) * SAMPLES)})
    assert engine.finished == 1


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("last", "shift", "words"), [(0.7, 0, "above 0"), (-1.0, 1, "other tokens")]
)
def test_unusable_answers_stop_the_run(
    kind: Kind, last: float, shift: int, words: str, policy: Path
) -> None:
    prompts, groups = groups_of("a")
    with teaching(kind, policy) as server, opened(config_of(server.url), policy) as servers:
        right, server.shift = server.logprobs, shift
        server.logprobs = lambda tokens: [*right(tokens)[:-1], last]  # type: ignore[method-assign]
        query = TeacherQuery(servers, prompts)
        query.wait(groups, world_of(1, 0))
        with pytest.raises(UserError, match=words) as error:
            query.add_logprobs(groups)
    assert (error.value.setting, error.value.value) == ("loss.distillation.teacher", server.url)


def test_server_that_cannot_teach_is_refused_before_the_first_step(
    policy: Path, tmp_path: Path
) -> None:
    def problem_of(config: Config, tokens: Path = policy) -> str:
        with pytest.raises(UserError) as error, opened(config, tokens):
            pass
        assert error.value.setting == "loss.distillation.teachers"
        return str(error.value.problem)

    with teaching("vllm", policy) as server:
        config = config_of(server.url, "rollout.timeout_s=1", teachers="a: URL")
        server.most = config.data.max_prompt_tokens + 16
        assert f"takes {server.most} tokens" in problem_of(config)
        server.most += 1
        with opened(config, policy):
            pass
        for file in policy.glob("*token*"):
            (tmp_path / file.name).write_text(file.read_text().replace('"7"', '"seven"'))
        (tmp_path / "config.json").write_text((policy / "config.json").read_text())
        assert "another vocabulary: its text has '7" in problem_of(config, tmp_path)
    assert "broke off" in problem_of(config)
