"""What the trainer hands over of its memory: to which server's rank, and that real servers load it."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import threading
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import Bucket
from megatron_dppo.rollout.servers.api import Ask, Handle
from megatron_dppo.rollout.servers.handles import Handles, Place, givers, lay_out, shared
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.sglang import SglangApi
from megatron_dppo.rollout.servers.vllm import PLUGIN, VllmApi
from tests.rollout.scripted import world_of
from tests.servers.real import RealServer, hand_over
from tests.servers.receiver import open_handles

HERE = "http://127.0.0.1"


def _api(http: Http, url: str, ranks: int, gpus: tuple[str, ...] = ()) -> SglangApi:
    return SglangApi(url, http, ranks=ranks, gpus=gpus)


def test_a_servers_rank_is_given_memory_of_its_own_gpu(http: Http) -> None:
    apis = [_api(http, f"{HERE}:1", 2, ("3", "2")), _api(http, f"{HERE}:2", 1, ("1",))]
    places = [Place("a", "0"), Place("b", "2"), Place("a", "1"), Place("a", "2"), Place("a", "3")]
    assert givers(apis, places) == {(f"{HERE}:1", 0): 4, (f"{HERE}:1", 1): 3, (f"{HERE}:2", 0): 2}


def test_without_gpus_ranks_of_the_first_machine_give_in_turn(http: Http) -> None:
    places = [Place("a", None), Place("b", None), Place("a", None)]
    assert list(givers([_api(http, f"{HERE}:1", 3)], places).values()) == [0, 2, 0]


@pytest.mark.parametrize(
    ("url", "gpus", "place", "said"),
    [
        ("http://192.0.2.1:1", ("0",), Place("a", "0"), "another machine"),
        ("http://192.0.2.1:1", (), Place("a", None), "another machine"),
        (f"{HERE}:1", ("1",), Place("a", "0"), "rank 0 of server http://127.0.0.1:1 is on GPU 1"),
        (f"{HERE}:1", (), Place("a", "0"), "an unknown GPU"),
    ],
)
def test_memory_that_a_server_cannot_open_is_refused(
    http: Http, url: str, gpus: tuple[str, ...], place: Place, said: str
) -> None:
    """A handle that cannot be opened would kill an SGLang server."""
    with pytest.raises(UserError, match=said) as caught:
        givers([_api(http, url, 1, gpus)], [place])
    assert caught.value.setting == "rollout.sync.transport"
    assert "rollout.launch" in caught.value.remedy


class Hears(SglangApi):
    """A server that keeps what it is asked, and answers as SGLang would with as many samples."""

    async def get(self, path: str, **named: Any) -> Any:
        return {"enable_deterministic_inference": True}

    async def post(self, path: str, body: Mapping[str, Any], **named: Any) -> Any:
        self.body = body
        meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 7]], "weight_version": "1"}
        return [{"output_ids": [7], "meta_info": meta}] * len(body["input_ids"])


def test_where_inference_is_deterministic_each_sample_has_a_seed_of_its_own(http: Http) -> None:
    api = Hears(f"{HERE}:1", http)
    pieces = http.run(api.generate(Ask([3, 4], 5, 8, 1.0, (), seed=2**31), timeout_s=1.0))
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
    api = SglangApi(sglang_tp1.api.url, http, secret=sglang_tp1.secret)
    api._known_deterministic = True
    ask = Ask([3, 4, 5], samples=3, max_tokens=8, temperature=1.0, stop_token_ids=[], seed=5)
    pieces = http.run(api.generate(ask, timeout_s=60.0))
    assert len(pieces) == 3 and all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)


@pytest.mark.servers
@pytest.mark.parametrize("fixture", ["sglang_tp1", "sglang_tp2"])
def test_a_server_holds_what_was_handed_over_as_if_it_had_read_it_from_disk(
    fixture: str, request: pytest.FixtureRequest, http: Http, served_policy: Path, tmp_path: Path
) -> None:
    server: RealServer = request.getfixturevalue(fixture)
    api, generator = server.api, torch.Generator().manual_seed(7)
    old = load_file(served_policy / "model.safetensors")
    new = {name: tensor + torch.randn(tensor.shape, generator=generator) for name, tensor in old.items()}
    for file in served_policy.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(new, tmp_path / "model.safetensors")
    http.run(api.pause("abort"))
    http.run(api.abandon_update())  # what another test may have left half-done
    http.run(api.begin_update())
    http.run(api.load(tmp_path, "from disk"))
    http.run(api.end_update("from disk"))
    read = http.run(api.checksums())

    for weights, version in ((old, "old"), (new, "new")):
        names = sorted(weights)
        http.run(api.begin_update())
        for part, last in ((names[:5], None), (names[5:], version)):  # cuts a layer in two
            hand_over(http, api, {name: weights[name] for name in part}, last)
        http.run(api.end_update(version))
        assert http.run(api.version()) == version
        assert (http.run(api.checksums()) == read) == (version == "new")
    norm = hashlib.sha256(new["model.norm.weight"].numpy().tobytes()).hexdigest()
    assert norm.startswith(read["model.norm.weight@0"])
    http.run(api.begin_update())
    http.run(api.load(served_policy, "from disk"))  # a server tells the folder that it has read last
    http.run(api.end_update("from disk"))
    http.run(api.resume())


class Opens(VllmApi):
    """A server whose ranks are processes that open what they are handed."""

    def __init__(self, url: str, http: Http, ranks: int) -> None:
        super().__init__(url, http, ranks=ranks)
        context = multiprocessing.get_context("spawn")
        self.pipes: list[Connection] = []
        for _ in range(self.ranks):
            ours, theirs = context.Pipe()
            context.Process(target=open_handles, args=(theirs, str(PLUGIN)), daemon=True).start()
            self.pipes.append(ours)
        self.until = threading.Event()
        self.forget()

    def forget(self, *, refuses: int = -1) -> None:
        """Begin again, with a bucket that is to be refused, by its number."""
        self.received: list[list[bytes]] = [[] for _ in self.pipes]
        self.versions: list[str | None] = []
        self.refuses = refuses
        self.until.clear()

    async def take(self, handles: Sequence[Handle], version: str | None) -> None:
        await asyncio.to_thread(self._take, handles, version)

    def _take(self, handles: Sequence[Handle], version: str | None) -> None:
        if len(self.versions) == self.refuses:
            raise ServerError(self.url, "refused it", alive=True)
        if not self.until.wait(20.0):
            raise ServerError(self.url, "waited in vain for the next bucket", alive=True)
        self.versions.append(version)
        for pipe, handle, received in zip(self.pipes, handles, self.received, strict=True):
            pipe.send((handle, sum(prod(shape) for shape in handle["shapes"]) * 4))
            received.append(pipe.recv())


@pytest.fixture(scope="module")
def opens(http: Http) -> Iterator[list[Opens]]:
    servers = [Opens(f"{HERE}:{ranks}", http, ranks) for ranks in (2, 1)]
    yield servers
    for pipe in (pipe for server in servers for pipe in server.pipes):
        pipe.send(None)


class Source:
    """Five buckets in the same memory."""

    def __init__(self, servers: Sequence[Opens]) -> None:
        self._servers, self.given = servers, list[bytes]()

    def __call__(self, *, to: Consumers, bucket_mib: int = 64) -> Iterator[Bucket]:
        memory = torch.empty(3, 5)
        for number in range(5):
            bucket = {"a": memory.fill_(number), "b": torch.full((7,), -1.0 - number)}
            self.given.append(b"".join(tensor.numpy().tobytes() for tensor in bucket.values()))
            if number == 2:  # the first one may be loaded now
                for server in self._servers:
                    server.until.set()
            yield bucket


def test_every_rank_finds_each_bucket_though_the_next_is_gathered_while_it_looks(
    http: Http, opens: list[Opens]
) -> None:
    for server in opens:
        server.forget()
    source = Source(opens)
    sent = Handles(http, world_of(1, 0), bucket_mib=1).send(opens, source, "new")
    assert (sent.problem, dict(sent.problems)) == (None, {})
    assert sent.moved.bytes == 5 * 22 * 4
    for server in opens:
        assert server.received == [source.given] * server.ranks
        assert server.versions == [None, None, None, None, "new"]


def test_a_server_that_refuses_a_bucket_is_named_and_gets_no_more(http: Http, opens: list[Opens]) -> None:
    opens[0].forget()
    opens[1].forget(refuses=2)
    source = Source(opens)
    sent = Handles(http, world_of(1, 0), bucket_mib=1).send(opens, source, "new")
    assert dict(sent.problems) == {opens[1].url: "refused it"} and sent.problem
    assert [len(server.versions) for server in opens] == [3, 2]
    assert len(source.given) == 5, "other ranks would wait for one that does not take them to the end"
    opens[1].forget()
    again = Handles(http, world_of(1, 0), bucket_mib=1).send(opens, Source(opens), "new")
    assert again.problem is None


def test_memory_that_was_let_go_of_leaves_no_name_behind() -> None:
    """What was opened once for each handle is gone with the last that held it."""
    bucket = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
    flat = lay_out(bucket, torch.device("cpu"))
    words = [shared(flat) for _ in range(2)]
    named = {Path("/dev/shm", handle.decode().lstrip("/")) for _, handle, _ in words}
    assert named and all(place.exists() for place in named)
    for manager, handle, size in words:
        storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, size)._shared_decref()
        seen = torch.empty(0, dtype=torch.uint8).set_(storage)
        assert torch.equal(seen[:24].view(torch.float32), bucket["a"].flatten())
        assert torch.equal(seen[24:].view(torch.float32), bucket["b"])
        del storage, seen
    del flat
    assert not set(Path("/dev/shm").iterdir()) & named
