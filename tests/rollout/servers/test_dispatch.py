"""Every prompt of a rank is answered exactly once, as flat completions and as trees, whatever its
servers do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest

from megatron_dppo.config import BranchConfig
from megatron_dppo.rl.types import Completion, RoutingShape
from megatron_dppo.rollout.servers.batch import RequestBatch, wait
from megatron_dppo.rollout.servers.client import GenerateResult
from megatron_dppo.rollout.servers.dispatch import RETRY_DELAY_S, PromptFailedError
from megatron_dppo.rollout.servers.http import Http, ServerError
from tests.rollout.local import forks_of
from tests.rollout.servers.script import (
    SAMPLES,
    SAMPLING,
    VERSION,
    Request,
    Script,
    dispatcher_of,
    happens,
    prompts_of,
    request_all,
    result_of,
)


def echo(server: Script, request: Request) -> list[GenerateResult]:
    """Answer with the prompt's first token twice and the stop token; continue from what there is of
    them."""
    first, made = request.token_ids[0], len(request.token_ids) - 2
    return [result_of([first, first, 0][made:]) for _ in range(request.sampling.samples)]


def check_echoed(batch: RequestBatch, count: int) -> None:
    assert batch.error is None and batch.unfinished_count == 0
    assert len(batch.build_groups()) == count
    for prompt, group in enumerate(batch.build_groups()):
        assert [c.token_ids.tolist() for c in group] == [[prompt + 1, prompt + 1, 0]] * SAMPLES
        assert all(c.logprobs.tolist() == [-prompt - 1, -prompt - 1, 0] for c in group)
        assert all(
            c.versions.tolist() == [VERSION] * 3 and c.finish_reason == "stop" for c in group
        )


def test_prompts_are_shared_and_returned_in_order(http: Http) -> None:
    servers = [Script(http, echo, name) for name in "ab"]
    check_echoed(request_all(dispatcher_of(http, *servers), 9), 9)
    assert sorted(len(server.requests) for server in servers) == [4, 5]


def test_requests_carry_the_sampling_settings(http: Http) -> None:
    server = Script(http, echo)
    sampling = replace(SAMPLING, temperature=0.6, stop_token_ids=(0, 3), top_p=0.9, top_k=20)
    request_all(dispatcher_of(http, server), 1, sampling)
    (request,) = server.requests
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (
        0.6,
        0.9,
        20,
    )
    assert request.sampling.stop_token_ids == (0, 3)


def test_partial_rollouts_resume_from_their_tokens(http: Http) -> None:
    """Finished samples are not requested again; prompts without any token are requested whole."""
    over = threading.Event()

    def answer_some(server, request):
        whole, first = echo(server, request), request.token_ids[0]
        part = result_of([first], reason="abort")
        return {1: whole, 2: [whole[0], part, part]}.get(first, [part] * SAMPLES)

    server = Script(
        http, answer_some, holds=lambda request: request.token_ids[0] > 1 and not over.is_set()
    )
    dispatcher = dispatcher_of(http, server, max_in_flight=2)
    batch = dispatcher.begin(prompts_of(4), SAMPLING, VERSION)
    assert happens(lambda: len(server.requests) == 3)
    dispatcher.stop_submitting([batch])
    over.set()
    (partial,) = dispatcher.collect_partial([batch], 10.0)
    known = Counter((one.prompt, one.ended, len(one.completion.token_ids)) for one in partial)
    assert known == {(0, True, 3): 3, (1, True, 3): 1, (1, False, 1): 2, (2, False, 1): 3}

    other = Script(http, echo, "b")
    batch = dispatcher_of(http, other).begin(prompts_of(4), SAMPLING, VERSION, partial)
    batch.wait(20.0)
    check_echoed(batch, 4)
    requested = Counter(
        (tuple(each.token_ids), each.sampling.samples, each.sampling.max_tokens)
        for each in other.requests
    )
    assert requested == {((2, 7, 2), 1, 7): 2, ((3, 7, 3), 1, 7): 3, ((4, 7), 3, 8): 1}
    assert len({request.sampling.seed for request in server.requests + other.requests}) == 3 + 6


def test_requests_of_a_dead_server_are_resubmitted_whole(http: Http) -> None:
    dying = Script(http, lambda server, request: server.die())
    living = Script(http, echo, "b")
    dispatcher = dispatcher_of(http, dying, living)
    check_echoed(request_all(dispatcher, 6), 6)
    assert dispatcher.take_unhealthy() == {"http://a:1": "broke off"}
    assert dispatcher.take_unhealthy() == {}
    assert dispatcher.resubmitted == len(dying.requests)
    assert all(request.sampling.samples == SAMPLES for request in living.requests)

    dispatcher = dispatcher_of(http, dying, living)
    check_echoed(request_all(dispatcher, 3), 3)
    dispatcher.set_servers([Script(http, echo)])
    assert dispatcher.take_unhealthy() == {}, "a server that serves again is not lost"


@pytest.mark.parametrize(
    "fault", ["breaks off once", "refuses once", "is one sample short", "answers nonsense"]
)
def test_a_failed_request_is_repeated_with_another_seed(http: Http, fault: str) -> None:
    def fail_first(server, request):
        if len(server.requests) > 1:
            return echo(server, request)
        if fault == "answers nonsense":
            raise KeyError("output_ids")
        if fault == "is one sample short":
            return echo(server, request)[1:]
        raise ServerError(server.url, fault, alive=fault == "refuses once")

    server = Script(http, fail_first)
    dispatcher = dispatcher_of(http, server)
    check_echoed(request_all(dispatcher, 1), 1)
    assert (dispatcher.take_unhealthy(), dispatcher.resubmitted) == ({}, 1)
    first, second = server.requests
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize("version", ["4", "default"])
def test_answers_of_other_weights_are_not_taken(http: Http, version: str) -> None:
    stale = Script(
        http,
        lambda server, request: [result_of([9] * 3, version=version)] * request.sampling.samples,
    )
    dispatcher = dispatcher_of(http, stale, Script(http, echo, "b"))
    check_echoed(request_all(dispatcher, 4), 4)
    assert f"{version!r}" in dispatcher.take_unhealthy()["http://a:1"]


def test_a_prompt_refused_everywhere_fails_the_batch(http: Http) -> None:
    def refuse_second(server, request):
        if request.token_ids[0] == 2:
            server.fail("refused: too long")
        return echo(server, request)

    batch = request_all(dispatcher_of(http, Script(http, refuse_second)), 3)
    assert isinstance(batch.error, PromptFailedError)
    assert "prompt 1 was requested 3 times" in str(batch.error) and "too long" in str(batch.error)


def test_prompts_wait_for_a_server_and_for_room(http: Http) -> None:
    dispatcher = dispatcher_of(http, max_in_flight=2)
    batch = dispatcher.begin(prompts_of(7), SAMPLING, VERSION)
    batch.wait(0.1)
    assert batch.unfinished_count == 7
    server = Script(http, echo)
    dispatcher.set_servers([server])
    batch.wait(20.0)
    check_echoed(batch, 7)
    assert server.most_in_flight == 2
    assert [request.token_ids[0] for request in server.requests] == list(range(1, 8)), (
        "in the order of the prompts"
    )


def test_requests_hung_at_a_removed_server_are_resubmitted(http: Http) -> None:
    """Until then, the hung server gets no more than its limit of requests."""
    hung, living = Script(http, echo, holds=lambda request: True), Script(http, echo, "b")
    dispatcher = dispatcher_of(http, hung, living, max_in_flight=2)
    batch = dispatcher.begin(prompts_of(9), SAMPLING, VERSION)
    assert happens(lambda: (len(hung.requests), batch.unfinished_count) == (2, 2))
    dispatcher.set_servers([living])
    batch.wait(20.0)
    check_echoed(batch, 9)


def test_a_server_that_refuses_everything_is_removed(http: Http) -> None:
    broken = Script(http, lambda server, request: server.fail("refused with status 500"))
    living = Script(http, echo, "b", holds=lambda request: len(broken.requests) < 8)
    dispatcher = dispatcher_of(http, broken, living, attempts=2)
    check_echoed(request_all(dispatcher, 20), 20)
    assert "failed 8 requests in a row" in dispatcher.take_unhealthy()["http://a:1"]


def test_a_paused_server_is_asked_after_a_pause(http: Http) -> None:
    times: list[float] = []

    def abort_twice(server, request):
        times.append(time.monotonic())
        if len(times) < 3:
            return [result_of([], reason="abort")] * request.sampling.samples
        return echo(server, request)

    dispatcher = dispatcher_of(http, Script(http, abort_twice), attempts=1)
    check_echoed(request_all(dispatcher, 1), 1)
    assert min(np.diff(times)) > 0.9 * RETRY_DELAY_S
    assert dispatcher.resubmitted == 0


def test_continuations_come_before_new_prompts(http: Http) -> None:
    def abort_once(server, request):
        if len(request.token_ids) > 2:
            return echo(server, request)
        return [result_of([request.token_ids[0]], reason="abort")] * request.sampling.samples

    server = Script(http, abort_once)
    check_echoed(request_all(dispatcher_of(http, server, max_in_flight=1), 4), 4)
    prompts = [request.token_ids[0] for request in server.requests]
    assert prompts == sorted(prompts) and len(prompts) == 4 * (1 + SAMPLES)


def test_complete_groups_are_taken_before_the_batch_ends(http: Http) -> None:
    """The first prompt is answered once the other two groups have been taken."""
    taken: set[int] = set()
    server = Script(http, echo, holds=lambda request: request.token_ids[0] == 1 and len(taken) < 2)
    batch = dispatcher_of(http, server).begin(prompts_of(3), SAMPLING, VERSION)

    wait(batch, 20.0, lambda groups: taken.update(place for place, _ in groups))
    assert batch.is_done and taken == {0, 1, 2}
    busy = iter([True, True, False])
    wait(batch, 20.0, lambda groups: next(busy))
    assert next(busy, None) is None, "waits while groups are being scored"
    wait(batch, 0.1, lambda groups: True)


# Trees


LENGTH = 8
TREE = (BranchConfig(at=2, children=3), BranchConfig(at=5, children=2))
TREES = replace(SAMPLING, samples=12, branches=TREE)


class Numbers:
    """Answers with a new number for each token, up to the limit of tokens."""

    def __init__(self) -> None:
        self.last = 99

    def __call__(self, server: Script, request: Request) -> list[GenerateResult]:
        return [self.result(request.sampling.max_tokens) for _ in range(request.sampling.samples)]

    def result(
        self, length: int, version: str = str(VERSION), reason: str = "length"
    ) -> GenerateResult:
        first = self.last + 1
        self.last += length
        return result_of(range(first, first + length), version=version, reason=reason)


def check_tree(group: Sequence[Completion]) -> None:
    """Two roots, each with three continuations after two tokens, each of which has two after
    five."""
    assert len(group) == 12
    tokens = [leaf.token_ids.tolist() for leaf in group]
    for leaf, ids in zip(group, tokens, strict=True):
        assert forks_of(leaf) == (2, 5) and len(ids) == LENGTH
        assert leaf.logprobs.tolist() == [-token for token in ids]
        assert len(leaf.versions) == LENGTH and leaf.finish_reason == "length"
    for place, siblings in ((1, 6), (2, 2), (4, 2), (5, 1)):
        counts = Counter(ids[place] for ids in tokens)  # in their order
        assert list(counts.values()) == [siblings] * (12 // siblings)


def test_every_fork_is_a_request_from_its_tokens(http: Http) -> None:
    server = Script(http, Numbers())
    (group,) = request_all(dispatcher_of(http, server), 1, TREES).build_groups()
    check_tree(group)
    requested = Counter(
        (len(each.token_ids) - 2, each.sampling.samples, each.sampling.max_tokens)
        for each in server.requests
    )
    assert requested == {(0, 2, 8): 1, (2, 2, 6): 2, (5, 1, 3): 6}
    assert len({each.sampling.seed for each in server.requests}) == 9
    for request in server.requests[1:]:
        assert request.token_ids[:2] == [1, 7]
        assert request.token_ids[2:] in [
            leaf.token_ids[: len(request.token_ids) - 2].tolist() for leaf in group
        ]


def test_forks_go_to_the_server_with_their_tokens(http: Http) -> None:
    servers = [Script(http, Numbers(), name) for name in "ab"]
    assert request_all(dispatcher_of(http, *servers), 6, TREES).error is None
    for server in servers:
        roots = {request.token_ids[0] for request in server.requests if len(request.token_ids) == 2}
        assert len(roots) == 3 and {request.token_ids[0] for request in server.requests} == roots


def test_a_death_between_levels_repeats_no_root(http: Http) -> None:
    numbers = Numbers()

    def die_at_forks(server, request):
        if len(request.token_ids) > 2:
            server.die()
        return numbers(server, request)

    servers = [Script(http, die_at_forks), Script(http, numbers, "b")]
    dispatcher = dispatcher_of(http, *servers)
    batch = request_all(dispatcher, 4, TREES)
    assert batch.error is None and batch.unfinished_count == 0
    for group in batch.build_groups():
        check_tree(group)
    assert list(dispatcher.take_unhealthy()) == ["http://a:1"]
    roots = [
        each.token_ids[0]
        for server in servers
        for each in server.requests
        if len(each.token_ids) == 2
    ]
    assert sorted(roots) == [1, 2, 3, 4]


def test_an_aborted_fork_resumes_and_keeps_versions(http: Http) -> None:
    numbers, aborted = Numbers(), []

    def abort_once(server, request):
        if len(request.token_ids) == 2:
            return numbers(server, request)
        if len(request.token_ids) == 4 and not aborted:
            aborted.append(request)
            return [numbers.result(1, reason="abort"), numbers.result(0, reason="abort")]
        return [
            numbers.result(request.sampling.max_tokens, version="6")
            for _ in range(request.sampling.samples)
        ]

    server = Script(http, abort_once)
    (group,) = request_all(dispatcher_of(http, server), 1, TREES).build_groups()
    check_tree(group)
    spans = [
        tuple(len(list(same)) for _, same in groupby(leaf.versions.tolist())) for leaf in group
    ]
    assert spans[:2] == [(8,), (5, 3)]
    assert (spans.count((3, 5)), spans.count((2, 6))) == (2, 6), (
        "two leaves' path had a token at the abort"
    )
    assert len({request.sampling.seed for request in server.requests}) == len(server.requests)


def test_forks_by_entropy_follow_the_servers_entropies(http: Http) -> None:
    """The second root is never uncertain; the others are before their fourth and their seventh
    token."""
    numbers = Numbers()

    def report(server, request):
        assert request.sampling.needs_entropies
        made = len(request.token_ids) - 2
        uncertain = np.array([{3: 1.5, 6: 2.5}.get(place, 0.5) for place in range(made, LENGTH)])
        entropies = [uncertain] * request.sampling.samples
        if made == 0:
            entropies[1] = np.zeros(LENGTH)
        return [replace(numbers.result(len(each)), entropies=each) for each in entropies]

    by_entropy = replace(
        SAMPLING, samples=8, branches=(BranchConfig(entropy=1.0), BranchConfig(entropy=1.0))
    )
    (group,) = request_all(dispatcher_of(http, Script(http, report)), 1, by_entropy).build_groups()
    assert [forks_of(leaf) for leaf in group] == [(3, 6)] * 4 + [(8, 8)] * 4


def test_siblings_keep_the_experts_of_their_shared_tokens(http: Http) -> None:
    """Each request routes every token it reads to the number of requests before it."""
    numbers, shape = Numbers(), RoutingShape(layers=1, per_token=1, experts=200)

    def route(server, request):
        assert request.sampling.routing == shape
        number, read = (
            len(server.requests) - 1,
            len(request.token_ids) + request.sampling.max_tokens - 1,
        )
        table = np.full((read, 1, 1), number, shape.dtype)
        return [replace(result, routing=table) for result in numbers(server, request)]

    (group,) = request_all(
        dispatcher_of(http, Script(http, route)), 1, replace(TREES, routing=shape)
    ).build_groups()
    tables = np.stack([leaf.routing[:, 0, 0] for leaf in group])
    assert tables.shape == (12, 9) and not tables[0].any()
    assert not tables[:, :4].any(), "prompt and two tokens, all read by the root's request"
    assert (tables[::2, :7] == tables[1::2, :7]).all() and (tables[::2, 7] != tables[1::2, 7]).all()
