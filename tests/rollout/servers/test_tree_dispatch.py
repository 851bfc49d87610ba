"""Trees of completions by servers that are scripts: what is asked of whom, and what becomes of trees in trouble."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from megatron_dppo.config import BranchConfig
from megatron_dppo.rl.types import Completion, Prompt, RoutingShape, VersionSpan
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.batch import RequestBatch
from megatron_dppo.rollout.servers.client import GenerateRequest, GenerateResult, least_entropies
from megatron_dppo.rollout.servers.dispatch import PromptFailedError
from megatron_dppo.rollout.servers.http import Http, ServerError
from tests.rollout.leaves import forks_of
from tests.rollout.servers.test_dispatch import Script, _dispatcher

LENGTH = 8
TREE = (BranchConfig(at=2, children=3), BranchConfig(at=5, children=2))
SAMPLING = Sampling(12, max_tokens=LENGTH, temperature=1.0, stop_token_ids=(0,), seed=1, branches=TREE)
SHAPE = RoutingShape(layers=1, per_token=1, experts=200)


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(i, np.array([i + 1, 7], np.int32), "", "") for i in range(count)]


class Counting:
    """Answers with tokens that nobody had before, until a response is full."""

    def __init__(self) -> None:
        self.last = 99

    def __call__(self, server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        return [self.piece(ask.max_tokens) for _ in range(ask.samples)]

    def piece(self, length: int, version: str = "5", reason: str = "length") -> GenerateResult:
        ids = np.arange(self.last + 1, self.last + 1 + length, dtype=np.int32)
        self.last += length
        return GenerateResult(ids, -ids.astype(np.float32), ((version, length),) if length else (), reason)


def _ask(
    http: Http, *servers: Script, count: int = 1, sampling: Sampling = SAMPLING, attempts: int = 3
) -> RequestBatch:
    batch = _dispatcher(http, *servers, attempts=attempts).begin(_prompts(count), sampling, 5)
    batch.wait(20.0)
    return batch


def _assert_tree(group: Sequence[Completion]) -> None:
    """Two roots, each with three continuations after two tokens, each of which has two after five."""
    assert len(group) == 12
    tokens = [leaf.token_ids.tolist() for leaf in group]
    for leaf, ids in zip(group, tokens, strict=True):
        assert forks_of(leaf) == (2, 5) and len(ids) == LENGTH
        assert leaf.logprobs.tolist() == [-token for token in ids]
        assert sum(span.count for span in leaf.versions) == LENGTH and leaf.finish_reason == "length"
    for one, first in enumerate(tokens):
        for other, second in enumerate(tokens):
            shared = 0 if one // 6 != other // 6 else 2 if one // 2 != other // 2 else 5 if one != other else LENGTH
            assert [a == b for a, b in zip(first, second, strict=True)] == [True] * shared + [False] * (LENGTH - shared)


def test_every_fork_is_a_request_that_continues_from_the_tokens_before_it(http: Http) -> None:
    server = Script("http://a:1", http, Counting())
    batch = _ask(http, server)
    (group,) = batch.groups()
    _assert_tree(group)
    asked = sorted((len(ask.token_ids) - 2, ask.samples, ask.max_tokens) for ask in server.asks)
    # Both roots in one request; two children of each at its first fork; one of each of six branches at the second.
    assert asked == [(0, 2, 8)] + [(2, 2, 6)] * 2 + [(5, 1, 3)] * 6
    assert len({ask.seed for ask in server.asks}) == 9, "each has luck of its own"
    for ask in server.asks[1:]:
        assert ask.token_ids[:2] == [1, 7]
        assert ask.token_ids[2:] in [leaf.token_ids[: len(ask.token_ids) - 2].tolist() for leaf in group]


def test_a_fork_is_continued_by_the_server_that_has_its_tokens(http: Http) -> None:
    servers = [Script(f"http://{name}:1", http, Counting(), delay_s=0.01) for name in "ab"]
    batch = _ask(http, *servers, count=6)
    assert batch.error is None
    for server in servers:
        begun = {ask.token_ids[0] for ask in server.asks if len(ask.token_ids) == 2}
        assert len(begun) == 3 and {ask.token_ids[0] for ask in server.asks} == begun


def test_a_path_that_ended_before_its_fork_stands_for_the_leaves_that_it_would_have_had(http: Http) -> None:
    tokens = Counting()

    def ends_early(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if len(ask.token_ids) > 2:
            return tokens(server, ask)
        return [tokens.piece(2, reason="stop"), tokens.piece(5, reason="stop")]

    server = Script("http://a:1", http, ends_early)
    (group,) = _ask(http, server).groups()
    assert [forks_of(leaf) for leaf in group] == [(2, 2)] * 6 + [(2, 5)] * 6
    assert all(leaf is group[0] for leaf in group[:6]) and group[7] is group[6]
    assert len({id(leaf) for leaf in group[6:]}) == 5 and len(server.asks) == 4


def test_a_server_that_dies_between_levels_costs_no_prompt_and_no_path_that_has_ended(http: Http) -> None:
    def dies(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if len(ask.token_ids) > 2:
            server.alive = False
            raise ServerError(server.url, "broke off", alive=False)
        return tokens(server, ask)

    tokens = Counting()
    dying, living = Script("http://a:1", http, dies), Script("http://b:1", http, tokens, delay_s=0.05)
    dispatcher = _dispatcher(http, dying, living)
    batch = dispatcher.begin(_prompts(4), SAMPLING, 5)
    batch.wait(20.0)
    assert batch.error is None and batch.unfinished == 0
    for group in batch.groups():
        _assert_tree(group)
    assert list(dispatcher.take_lost()) == ["http://a:1"]
    roots = [ask.token_ids[0] for server in (dying, living) for ask in server.asks if len(ask.token_ids) == 2]
    assert sorted(roots) == [1, 2, 3, 4], "no root was asked for again"


def test_a_continuation_that_is_aborted_goes_on_and_every_token_keeps_its_version(http: Http) -> None:
    tokens, aborted = Counting(), []

    def aborts_once(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if len(ask.token_ids) == 2:
            return tokens(server, ask)
        if len(ask.token_ids) == 4 and not aborted:
            aborted.append(ask)
            return [tokens.piece(1, reason="abort"), tokens.piece(0, reason="abort")]
        return [tokens.piece(ask.max_tokens, version="6") for _ in range(ask.samples)]

    server = Script("http://a:1", http, aborts_once)
    (group,) = _ask(http, server).groups()
    _assert_tree(group)
    assert group[0].versions == (VersionSpan(5, 8),)
    assert group[1].versions == (VersionSpan(5, 5), VersionSpan(6, 3))
    spans = [leaf.versions for leaf in group]
    assert spans.count((VersionSpan(5, 3), VersionSpan(6, 5))) == 2, "leaves of the path that had a token at the abort"
    assert spans.count((VersionSpan(5, 2), VersionSpan(6, 6))) == 6
    assert len({ask.seed for ask in server.asks}) == len(server.asks)


def test_no_prompt_waits_for_another_before_it_forks(http: Http) -> None:
    class Held(Script):
        """Answers the first prompt only after the second one's tree is done."""

        async def generate(self, ask: GenerateRequest, *, timeout_s: float) -> list[GenerateResult]:
            while ask.token_ids[0] == 1 and len([1 for a in self.asks if a.token_ids[0] == 2]) < 9:
                await asyncio.sleep(0.005)
            return await super().generate(ask, timeout_s=timeout_s)

    batch = _ask(http, Held("http://a:1", http, Counting()), count=2)
    assert batch.error is None and batch.unfinished == 0


def test_a_fork_by_entropy_is_where_the_server_says_that_many_tokens_were_likely(http: Http) -> None:
    tokens = Counting()

    def tells(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        assert ask.entropies
        made = len(ask.token_ids) - 2
        # The second root is never in doubt; the others are before their fourth and their seventh token.
        sure = [False, True] if made == 0 else [False] * ask.samples
        told = [[0.0 if s else {3: 1.5, 6: 2.5}.get(made + i, 0.5) for i in range(ask.max_tokens)] for s in sure]
        return [replace(tokens.piece(ask.max_tokens), entropies=np.array(each)) for each in told]

    by_entropy = replace(SAMPLING, samples=8, branches=(BranchConfig(entropy=1.0), BranchConfig(entropy=1.0)))
    (group,) = _ask(http, Script("http://a:1", http, tells), sampling=by_entropy).groups()
    assert [forks_of(leaf) for leaf in group] == [(3, 6)] * 4 + [(8, 8)] * 4


def test_siblings_keep_the_experts_of_the_request_that_first_read_their_tokens(http: Http) -> None:
    """Each request says the number of requests before it, for every token that it has read."""
    tokens = Counting()

    def routes(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        number, read = len(server.asks) - 1, len(ask.token_ids) + ask.max_tokens - 1
        table = np.full((read, 1, 1), number, SHAPE.dtype)
        return [replace(piece, routing=table) for piece in tokens(server, ask)]

    (group,) = _ask(http, Script("http://a:1", http, routes), sampling=replace(SAMPLING, routing=SHAPE)).groups()
    told = [leaf.routing[:, 0, 0].tolist() for leaf in group if leaf.routing is not None]
    assert len(told) == 12 and told[0] == [0] * 9
    for table in told:
        assert len(table) == 9 and table[:4] == [0] * 4, "prompt and two tokens, all of which the root has read"
    for slot in range(0, 12, 2):
        first, second = told[slot : slot + 2]
        assert first[:7] == second[:7] and first[7] != second[7]


def test_a_prompt_that_fails_at_a_later_level_ends_the_batch_and_says_why(http: Http) -> None:
    tokens = Counting()

    def refuses(server: Script, ask: GenerateRequest) -> list[GenerateResult]:
        if len(ask.token_ids) == 7:
            raise ServerError(server.url, "refused: too long", alive=True)
        return tokens(server, ask)

    batch = _ask(http, Script("http://a:1", http, refuses), attempts=2)
    assert isinstance(batch.error, PromptFailedError)
    assert "prompt 0 was asked 2 times" in str(batch.error) and "too long" in str(batch.error)


@pytest.mark.parametrize("shares", [(0.5, 0.25, 0.125), (1.0, 0.0, 0.0)])
def test_entropies_of_the_likeliest_tokens_count_all_others_as_one(shares: tuple[float, ...]) -> None:
    with np.errstate(divide="ignore"):
        (entropy,) = least_entropies([np.log(shares)])
    rest = 1.0 - sum(shares)
    assert entropy == pytest.approx(-sum(p * np.log(p) for p in (*shares, rest) if p > 0))
    assert len(least_entropies([])) == 0
