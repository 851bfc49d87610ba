"""Every prompt of a rank is answered exactly once, whatever servers do; the servers here are scripts."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dppo.rl.types import Completion, Prompt, RoutingShape, VersionSpan
from megatron_dppo.rollout.engine import PartialRollout, Sampling
from megatron_dppo.rollout.servers.batch import RequestBatch, wait
from megatron_dppo.rollout.servers.client import GenerateRequest, GenerateResult
from megatron_dppo.rollout.servers.dispatch import Dispatcher, PromptFailedError
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sglang import SglangClient

SAMPLES = 3
SHAPE = RoutingShape(layers=2, per_token=2, experts=4)
SAMPLING = Sampling(SAMPLES, max_tokens=8, temperature=1.0, stop_token_ids=(0,), seed=1)


class Script(SglangClient):
    """A server that answers as a function of what it is asked and of how often it was asked before."""

    def __init__(
        self,
        url: str,
        http: Http,
        answer: Callable[[Script, GenerateRequest], list[GenerateResult]],
        *,
        delay_s: float = 0.0,
    ):
        super().__init__(url, http)
        self._answer, self._delay_s = answer, delay_s
        self.asks: list[GenerateRequest] = []
        self.alive = True

    async def generate(self, ask: GenerateRequest, *, timeout_s: float) -> list[GenerateResult]:
        self.asks.append(ask)
        await asyncio.sleep(self._delay_s)
        return self._answer(self, ask)

    async def version(self) -> str:
        if not self.alive:
            raise ServerError(self.url, "is gone", alive=False)
        return "5"


def _piece(tokens: Sequence[int], *, version: str = "5", reason: str = "stop") -> GenerateResult:
    ids = np.array(tokens, np.int32)
    versions = ((version, len(tokens)),) if tokens else ()
    return GenerateResult(ids, -ids.astype(np.float32), versions, reason)


def _answers(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
    """The prompt's first token, twice, and the end."""
    return [_piece([ask.token_ids[0], ask.token_ids[0], 0]) for _ in range(ask.samples)]


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


def _dispatcher(http: Http, *servers: Script, attempts: int = 3, max_in_flight: int = 64) -> Dispatcher:
    dispatcher = Dispatcher(
        http,
        lambda told: int(told) if told.isdigit() else None,
        first=0,
        max_in_flight=max_in_flight,
        request_timeout_s=10.0,
        attempts=attempts,
    )
    dispatcher.serve_from(servers)
    return dispatcher


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(i, np.array([i + 1, 7], np.int32), "", "") for i in range(count)]


def _ask(dispatcher: Dispatcher, count: int) -> RequestBatch:
    batch = dispatcher.begin(_prompts(count), SAMPLING, 5)
    batch.wait(20.0)
    return batch


def _assert_answered(batch: RequestBatch, count: int) -> None:
    assert batch.error is None and batch.unfinished == 0
    for prompt, group in enumerate(batch.groups()):
        assert [c.token_ids.tolist() for c in group] == [[prompt + 1, prompt + 1, 0]] * SAMPLES
        assert all(c.logprobs.tolist() == [-prompt - 1, -prompt - 1, 0] for c in group)
        assert all(c.versions == (VersionSpan(5, 3),) and c.finish_reason == "stop" for c in group)
    assert len(batch.groups()) == count


def test_prompts_are_shared_out_and_come_back_in_their_order(http: Http) -> None:
    servers = [Script(f"http://{name}:1", http, _answers, delay_s=0.01) for name in "ab"]
    _assert_answered(_ask(_dispatcher(http, *servers), 9), 9)
    assert sorted(len(server.asks) for server in servers) == [4, 5]


def test_requests_have_the_stops_and_the_sampling_of_the_batch(http: Http) -> None:
    server = Script("http://a:1", http, _answers)
    sampling = replace(SAMPLING, temperature=0.6, stop_token_ids=(0, 3), top_p=0.9, top_k=20)
    _dispatcher(http, server).begin(_prompts(1), sampling, 5).wait(20.0)
    (ask,) = server.asks
    assert (ask.temperature, ask.top_p, ask.top_k, ask.stop_token_ids) == (0.6, 0.9, 20, (0, 3))


ENDS, LONGEST = 0.12, 24
"""How likely each token ends a completion, and where it is cut off."""


class Tokens:
    """Time that is counted in tokens: it moves on once everybody has done what there was to do. So it does not matter
    how busy the machine is."""

    def __init__(self) -> None:
        self.now = 0
        self._sleeping: list[tuple[int, int, asyncio.Event]] = []
        self._driver: asyncio.Task[None] | None = None

    async def sleep(self, tokens: int) -> None:
        awake = asyncio.Event()
        heapq.heappush(self._sleeping, (self.now + tokens, id(awake), awake))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        await awake.wait()

    async def _drive(self) -> None:
        while self._sleeping:
            for _ in range(100):  # turns of the event loop
                await asyncio.sleep(0)
            self.now, _, awake = heapq.heappop(self._sleeping)
            awake.set()


class Gradual(Script):
    """Takes a while for each token."""

    time: Tokens

    async def generate(self, ask: GenerateRequest, *, timeout_s: float) -> list[GenerateResult]:
        pieces = await super().generate(ask, timeout_s=timeout_s)
        await self.time.sleep(max(len(piece.token_ids) for piece in pieces))
        return pieces


class Breakable(Script):
    """Takes a while for each token, and can be broken off."""

    aborts: asyncio.Event
    token_s = 0.01

    async def generate(self, ask: GenerateRequest, *, timeout_s: float) -> list[GenerateResult]:
        pieces, clock = await super().generate(ask, timeout_s=timeout_s), asyncio.get_running_loop().time
        began = clock()
        try:
            await asyncio.wait_for(self.aborts.wait(), self.token_s * max(len(piece.token_ids) for piece in pieces))
        except TimeoutError:
            return pieces
        made = int((clock() - began) / self.token_s)
        return [p if len(p.token_ids) <= made else _piece(p.token_ids[:made].tolist(), reason="abort") for p in pieces]

    async def abort(self) -> None:
        self.aborts.set()


def _broken_off(
    http: Http, dispatcher: Dispatcher, servers: Sequence[Breakable], batches: Sequence[RequestBatch], after_s: float
) -> list[list[PartialRollout]]:
    """After a while, as an engine does it."""
    time.sleep(after_s)
    dispatcher.ask_no_more(batches)
    for server in servers:
        http.run(server.abort())
    return dispatcher.progress(batches, 10.0)


def _breakable(http: Http, answer: Callable[[Script, GenerateRequest], list[GenerateResult]]) -> Breakable:
    server = Breakable("http://a:1", http, answer)
    server.aborts = asyncio.Event()
    return server


def test_what_is_broken_off_goes_on_from_the_tokens_that_it_has(http: Http) -> None:
    """As another run has read it. What had ended is not asked for again, and what had not begun is asked whole."""

    def long_for_some(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        first, made = ask.token_ids[0], len(ask.token_ids) - 2
        whole = [first] * (7 if first > 1 else 2) + [0]
        return [_piece(whole[made:]) for _ in range(ask.samples)]

    server = _breakable(http, long_for_some)
    server.token_s = 0.05
    dispatcher = _dispatcher(http, server, max_in_flight=2)
    batch = dispatcher.begin(_prompts(4), SAMPLING, 5)
    while len(server.asks) < 3:
        time.sleep(0.01)
    (so_far,) = _broken_off(http, dispatcher, [server], [batch], after_s=0.06)
    assert len(server.asks) == 3 and not any(one.prompt == 3 for one in so_far)
    assert [one.ended for one in so_far if one.prompt == 0] == [True] * SAMPLES
    made = [one.completion.token_ids.tolist() for one in so_far if one.prompt == 1]
    assert made and all(1 <= len(tokens) < 8 for tokens in made)
    assert not any(one.ended for one in so_far if one.prompt == 1)

    other = Script("http://b:1", http, long_for_some)
    batch = _dispatcher(http, other).begin(_prompts(4), SAMPLING, 5, so_far)
    batch.wait(20.0)
    lengths = {0: 3, 1: 8, 2: 8, 3: 8}
    for prompt, group in enumerate(batch.groups()):
        whole = [prompt + 1] * (lengths[prompt] - 1) + [0]
        assert [c.token_ids.tolist() for c in group] == [whole] * SAMPLES
        assert all(c.logprobs.tolist() == [-token for token in whole] for c in group)
    asked = sorted((list(ask.token_ids), ask.samples, ask.max_tokens) for ask in other.asks)
    unfinished = [([2, 7, *tokens], 1, 8 - len(tokens)) for tokens in made]
    assert [ask for ask in asked if ask[0][0] == 2] == sorted(unfinished)
    assert not any(tokens[0] == 1 for tokens, _, _ in asked) and asked[-1] == ([4, 7], SAMPLES, 8)


def test_what_is_broken_off_is_as_long_in_the_end_as_what_is_sampled(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless what was unfinished is begun anew."""

    def lengths() -> np.ndarray:
        server, sampling = _breakable(http, _abort_now_and_then), replace(SAMPLING, max_tokens=LONGEST)
        server.token_s = 0.05  # so that a busy machine breaks off nearly as much
        dispatcher = _dispatcher(http, server, max_in_flight=192)
        batches = [dispatcher.begin(_prompts(64), replace(sampling, seed=seed), 5) for seed in range(3)]
        known = _broken_off(http, dispatcher, [server], batches, after_s=0.3)
        others = _dispatcher(http, Script("http://b:1", http, _abort_now_and_then), max_in_flight=192)
        made = []
        for seed, so_far in enumerate(known):
            batch = others.begin(_prompts(64), replace(sampling, seed=10 + seed), 5, so_far)
            batch.wait(20.0)
            assert batch.is_over and batch.error is None
            made += [len(c.token_ids) for group in batch.groups() for c in group]
        return np.array(made)

    assert _p_of_lengths(lengths()) > 1e-4
    kept = RequestBatch.progress
    monkeypatch.setattr(
        RequestBatch,
        "progress",
        lambda batch: [one for one in kept(batch) if one.ended],
    )
    assert any(_p_of_lengths(lengths()) < 1e-4 for _ in range(5)), "a busy machine may break off too little"


def _abort_now_and_then(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
    """Any token ends a sample with the same chance; an update of the weights aborts them after some tokens."""
    draw = np.random.default_rng([ask.seed or 0, ask.samples])
    until = int(draw.integers(1, 16))
    pieces = []
    for length in np.minimum(draw.geometric(ENDS, ask.samples), ask.max_tokens).tolist():
        tokens = [1] * (length - 1) + [0]
        pieces.append(_piece(tokens) if length <= until else _piece(tokens[:until], reason="abort"))
    return pieces


def _lengths_of_batches_ahead(http: Http) -> np.ndarray:
    """Of completions that would be trained on: three batches, asked for at once and taken in their order."""
    servers, Gradual.time = [Gradual(f"http://{name}:1", http, _abort_now_and_then) for name in "ab"], Tokens()
    dispatcher = _dispatcher(http, *servers, max_in_flight=192)
    sampling = replace(SAMPLING, max_tokens=LONGEST)
    batches = [dispatcher.begin(_prompts(64), replace(sampling, seed=seed), 5) for seed in range(3)]
    lengths = []
    for batch in batches:
        batch.wait(60.0)
        assert batch.is_over and batch.error is None
        lengths += [len(c.token_ids) for group in batch.groups() for c in group]
    return np.array(lengths)


def _p_of_lengths(lengths: np.ndarray) -> float:
    """Of χ² against the law by which completions end, in bins of three tokens and the cut off."""
    chances = ENDS * (1.0 - ENDS) ** np.arange(LONGEST)
    chances[-1] = (1.0 - ENDS) ** (LONGEST - 1)
    seen = np.bincount(lengths, minlength=LONGEST + 1)[1:].reshape(-1, 3).sum(axis=1)
    expected = len(lengths) * chances.reshape(-1, 3).sum(axis=1)
    chi2 = torch.tensor(((seen - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2.0), chi2 / 2.0))


def test_what_is_trained_on_is_as_long_as_what_is_sampled(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is. A batch that is closed once three quarters of it are there is not."""
    lengths = _lengths_of_batches_ahead(http)
    assert len(lengths) == 3 * 64 * SAMPLES
    assert _p_of_lengths(lengths) > 0.01

    async def first_come(self: Dispatcher, batch: RequestBatch) -> None:
        prompts = [asyncio.create_task(self._prompt(batch, index)) for index in range(len(batch.prompts))]
        for prompt in itertools.islice(asyncio.as_completed(prompts), 3 * len(prompts) // 4):
            await prompt
        for prompt in prompts:
            prompt.cancel()

    monkeypatch.setattr(Dispatcher, "_run", first_come)
    assert _p_of_lengths(_lengths_of_batches_ahead(http)) < 0.01


def test_what_a_dead_server_had_is_asked_again_whole_of_another(http: Http) -> None:
    def dies(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        server.alive = False
        raise ServerError(server.url, "broke off", alive=False)

    dying, living = Script("http://a:1", http, dies), Script("http://b:1", http, _answers)
    dispatcher = _dispatcher(http, dying, living)
    _assert_answered(_ask(dispatcher, 6), 6)
    assert dispatcher.take_lost() == {"http://a:1": "broke off"}
    assert dispatcher.take_lost() == {}
    assert dispatcher.resubmitted == len(dying.asks)
    assert all(ask.samples == SAMPLES for ask in living.asks)


def test_a_server_whose_connection_breaks_but_which_lives_is_not_lost(http: Http) -> None:
    breaks = ["once"]

    def breaks_once(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if breaks:
            raise ServerError(server.url, f"broke off {breaks.pop()}", alive=False)
        return _answers(server, ask)

    dispatcher = _dispatcher(http, Script("http://a:1", http, breaks_once))
    _assert_answered(_ask(dispatcher, 2), 2)
    assert dispatcher.take_lost() == {}


def test_an_aborted_completion_goes_on_from_the_tokens_that_it_has(http: Http) -> None:
    def aborts_first(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if len(server.asks) == 1:
            first = ask.token_ids[0]
            return [_piece([first], reason="abort"), _piece([first, first], reason="abort"), _piece([], reason="abort")]
        made = list(ask.token_ids[2:])
        whole = [ask.token_ids[0], ask.token_ids[0], 0]
        return [_piece(whole[len(made) :]) for _ in range(ask.samples)]

    server = Script("http://a:1", http, aborts_first)
    _assert_answered(_ask(_dispatcher(http, server), 1), 1)
    assert sorted((list(ask.token_ids), ask.samples, ask.max_tokens) for ask in server.asks[1:]) == [
        ([1, 7], 1, 8), ([1, 7, 1], 1, 7), ([1, 7, 1, 1], 1, 6)]  # fmt: skip
    assert len({ask.seed for ask in server.asks}) == 4


def test_tokens_keep_the_experts_of_the_request_that_first_read_them(http: Http) -> None:
    """Each request says the number of requests before it for every token that it has read, which the last is not."""

    def aborts_first(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        assert ask.routing == SHAPE
        before = len(server.asks) - 1
        piece = _piece([3, 4] if before == 0 else [5, 0], reason="stop" if before else "abort")
        table = np.full((len(ask.token_ids) + 1, SHAPE.layers, SHAPE.per_token), before, SHAPE.dtype)
        return [replace(piece, routing=table)]

    dispatcher = _dispatcher(http, Script("http://a:1", http, aborts_first))
    batch = dispatcher.begin(_prompts(1), replace(SAMPLING, samples=1, routing=SHAPE), 5)
    batch.wait(20.0)
    [[completion]] = batch.groups()
    assert completion.token_ids.tolist() == [3, 4, 5, 0]
    assert completion.routing is not None and completion.routing[:, 0, 0].tolist() == [0, 0, 0, 1, 1]


def test_tokens_of_two_versions_keep_their_own(http: Http) -> None:
    def aborts_first(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        version, reason = ("5", "abort") if len(server.asks) == 1 else ("6", "stop")
        return [_piece([3, 3], version=version, reason=reason) for _ in range(ask.samples)]

    batch = _ask(_dispatcher(http, Script("http://a:1", http, aborts_first)), 1)
    assert {c.versions for c in batch.groups()[0]} == {(VersionSpan(5, 2), VersionSpan(6, 2))}


@pytest.mark.parametrize("told", ["4", "default"])
def test_a_server_with_other_weights_is_lost_and_its_answers_are_not_taken(http: Http, told: str) -> None:
    def stale(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        return [_piece([9, 9, 9], version=told) for _ in range(ask.samples)]

    dispatcher = _dispatcher(http, Script("http://a:1", http, stale), Script("http://b:1", http, _answers))
    _assert_answered(_ask(dispatcher, 4), 4)
    assert f"{told!r}" in dispatcher.take_lost()["http://a:1"]


def test_a_prompt_that_every_server_refuses_ends_the_batch_and_says_why(http: Http) -> None:
    def refuses(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if ask.token_ids[0] == 2:
            raise ServerError(server.url, "refused: too long", alive=True)
        return _answers(server, ask)

    batch = _ask(_dispatcher(http, Script("http://a:1", http, refuses), attempts=3), 3)
    assert isinstance(batch.error, PromptFailedError)
    assert "prompt 1 was asked 3 times" in str(batch.error) and "too long" in str(batch.error)


def test_too_few_samples_are_no_answer(http: Http) -> None:
    def one_short_first(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        return _answers(server, ask)[len(server.asks) == 1 :]

    dispatcher = _dispatcher(http, Script("http://a:1", http, one_short_first))
    _assert_answered(_ask(dispatcher, 1), 1)
    assert dispatcher.resubmitted == 1


def test_prompts_wait_for_a_server_and_for_room(http: Http) -> None:
    most, now = 0, 0

    class Counting(Script):
        async def generate(self, ask: GenerateRequest, *, timeout_s: float) -> list[GenerateResult]:
            nonlocal most, now
            now += 1
            most = max(most, now)
            pieces = await super().generate(ask, timeout_s=timeout_s)
            now -= 1
            return pieces

    dispatcher = _dispatcher(http, max_in_flight=2)
    batch = dispatcher.begin(_prompts(7), SAMPLING, 5)
    batch.wait(0.2)
    assert batch.unfinished == 7
    server = Counting("http://a:1", http, _answers, delay_s=0.01)
    dispatcher.serve_from([server])
    batch.wait(20.0)
    _assert_answered(batch, 7)
    assert most == 2


def test_what_hangs_at_a_server_is_asked_of_another_once_it_is_taken_out(http: Http) -> None:
    hung, living = Script("http://a:1", http, _answers, delay_s=60.0), Script("http://b:1", http, _answers)
    dispatcher = _dispatcher(http, hung, living)
    batch = dispatcher.begin(_prompts(4), SAMPLING, 5)
    batch.wait(0.3)
    assert batch.unfinished == 2
    dispatcher.serve_from([living])
    batch.wait(20.0)
    _assert_answered(batch, 4)


def test_asking_again_asks_for_other_luck(http: Http) -> None:
    def refuses_first(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if len(server.asks) == 1:
            raise ServerError(server.url, "refused", alive=True)
        return _answers(server, ask)

    server = Script("http://a:1", http, refuses_first)
    _ask(_dispatcher(http, server), 1)
    assert server.asks[0].seed != server.asks[1].seed


def test_a_server_that_refuses_at_once_does_not_swallow_what_others_would_answer(http: Http) -> None:
    def refuses(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        raise ServerError(server.url, "refused with status 500", alive=True)

    broken, living = Script("http://a:1", http, refuses), Script("http://b:1", http, _answers, delay_s=0.05)
    dispatcher = _dispatcher(http, broken, living, attempts=2)
    _assert_answered(_ask(dispatcher, 20), 20)
    assert "failed 8 requests in a row" in dispatcher.take_lost()["http://a:1"]


def test_an_answer_that_makes_no_sense_is_asked_again_elsewhere(http: Http) -> None:
    def senseless(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        raise KeyError("output_ids")

    servers = [Script("http://a:1", http, senseless), Script("http://b:1", http, _answers)]
    _assert_answered(_ask(_dispatcher(http, *servers, attempts=2), 4), 4)


def test_a_paused_server_that_aborts_all_is_not_asked_in_a_rush(http: Http) -> None:
    until = time.monotonic() + 1.0

    def paused(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if time.monotonic() < until:
            return [_piece([], reason="abort") for _ in range(ask.samples)]
        return _answers(server, ask)

    server = Script("http://a:1", http, paused)
    dispatcher = _dispatcher(http, server, attempts=1)
    _assert_answered(_ask(dispatcher, 1), 1)
    assert len(server.asks) < 8
    assert dispatcher.resubmitted == 0


def test_a_server_that_is_served_from_again_is_not_held_to_what_it_did_before(http: Http) -> None:
    def dies(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        server.alive = False
        raise ServerError(server.url, "broke off", alive=False)

    dispatcher = _dispatcher(http, Script("http://a:1", http, dies), Script("http://b:1", http, _answers))
    _assert_answered(_ask(dispatcher, 3), 3)
    dispatcher.serve_from([Script("http://a:1", http, _answers)])
    assert dispatcher.take_lost() == {}


TakesS = Callable[[GenerateRequest], float]


class Slow(Script):
    """A server that takes longer over some requests."""

    def __init__(self, http: Http, answer: Callable[[Script, GenerateRequest], list[GenerateResult]], takes_s: TakesS):
        super().__init__("http://a:1", http, answer)
        self._takes_s = takes_s
        self.ended: list[tuple[int, ...]] = []

    async def generate(self, ask: GenerateRequest, *, timeout_s: float) -> list[GenerateResult]:
        self._delay_s = self._takes_s(ask)
        pieces = await super().generate(ask, timeout_s=timeout_s)
        self.ended.append(tuple(ask.token_ids))
        return pieces


def test_an_aborted_completion_does_not_wait_for_the_others_of_its_prompt(http: Http) -> None:
    """The first has a token after the abort, and is aborted once more, while the second takes its time."""

    def aborts(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        made = list(ask.token_ids[2:])
        if len(server.asks) == 1:
            return [_piece([3], reason="abort"), _piece([4], reason="abort")]
        return [_piece([3], reason="abort") if made == [3] else _piece([0])]

    server = Slow(http, aborts, lambda ask: 0.5 if 4 in ask.token_ids else 0.0)
    batch = _dispatcher(http, server).begin(_prompts(1), replace(SAMPLING, samples=2), 5)
    batch.wait(20.0)
    assert [c.token_ids.tolist() for c in batch.groups()[0]] == [[3, 3, 0], [4, 0]]
    assert server.ended.index((1, 7, 3, 3)) < server.ended.index((1, 7, 4))


def test_a_prompt_that_goes_on_is_asked_before_those_that_were_not_begun(http: Http) -> None:
    def aborts_once(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        first = ask.token_ids[0]
        if len(ask.token_ids) == 2:
            return [_piece([first], reason="abort") for _ in range(ask.samples)]
        return [_piece([first, 0])]

    server = Script("http://a:1", http, aborts_once)
    _assert_answered(_ask(_dispatcher(http, server, max_in_flight=1), 4), 4)
    prompts = [ask.token_ids[0] for ask in server.asks]
    assert prompts == sorted(prompts) and len(prompts) == 4 * (1 + SAMPLES)


def test_prompts_are_asked_in_the_order_in_which_they_were_given(http: Http) -> None:
    server = Script("http://a:1", http, _answers, delay_s=0.001)
    _assert_answered(_ask(_dispatcher(http, server, max_in_flight=2), 9), 9)
    assert [ask.token_ids[0] for ask in server.asks] == list(range(1, 10))


def test_groups_can_be_taken_while_others_are_waited_for(http: Http) -> None:
    server = Slow(http, _answers, lambda ask: 1.0 if ask.token_ids[0] == 1 else 0.0)
    batch = _dispatcher(http, server).begin(_prompts(3), SAMPLING, 5)
    taken: dict[int, bool] = {}

    def look(groups: Iterable[tuple[int, tuple[Completion, ...]]]) -> bool:
        for place, group in groups:
            assert place not in taken and len(group) == SAMPLES
            taken[place] = batch.is_over
        return False

    wait(batch, 20.0, look)
    assert batch.is_over and not taken[1] and not taken[2]
    _assert_answered(batch, 3)


def test_a_wait_goes_on_while_groups_are_worked_on_and_no_longer_than_it_may(http: Http) -> None:
    batch = _ask(_dispatcher(http, Script("http://a:1", http, _answers)), 2)
    looks = iter([True, True, False])
    began = time.monotonic()
    wait(batch, 20.0, lambda groups: next(looks))
    assert next(looks, None) is None and time.monotonic() - began < 10.0
    wait(batch, 0.2, lambda groups: True)
