"""Requests of the trainer to one server, of either kind. ``sglang.py`` and ``vllm.py`` translate
them."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.types import Routing
from megatron_dppo.rollout.servers.http import Http, ServerError, wrap_errors

if TYPE_CHECKING:  # what runs servers needs neither torch nor Megatron
    import torch

    from megatron_dppo.parallel.world import World
    from megatron_dppo.rollout.engine import Sampling

InFlight = Literal["retract", "keep", "abort"]
"""Fate of unfinished requests when a server pauses; see ``rollout.sync.in_flight``."""

INCOMPLETE = "incomplete"
"""Version of a server between the beginning and the end of an update: it may hold weights of
two."""
ROUTING_FLAG = "--enable-return-routed-experts"
"""Flag of SGLang and vLLM alike that has them report the experts they chose."""
TOP_LOGPROBS = 20
"""Tokens whose log-probabilities a server reports when entropies are requested: vLLM's default
limit."""
ADAPTER = "policy"
"""Name of a run's adapter at the servers."""
CONTROL_S = 30.0
"""Seconds that a question may take that is no work for a server."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of a server, as reported at the first contact."""

    model: str
    """Path of the model that it was started with."""
    architecture: str | None
    """``Qwen3ForCausalLM``; None where the server does not say."""
    dtype: str | None
    """Type of its weights, ``float32``; None if not reported."""
    max_tokens: int | None
    """Longest sequence, prompt and response; None where the server does not say."""
    stages: int = 1
    """Pipeline stages, if the ranks of all stages would join a group as those of the first."""
    routing: bool = False
    """Whether it says which experts it chose, if it is asked."""
    lora_rank: int = 0
    """Most ranks of an adapter that it takes; 0: it takes none."""
    lora_targets: frozenset[str] = frozenset()
    """Matrices that an adapter may be for, by their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """One continuation as a server gave it.

    ``GenerateResult(token_ids=[8, 2, 0], logprobs=[-0.1, -2.3, -0.7], versions=(("3", 2), ("4",
    1)), reason="stop")``: an update came before the third token.
    """

    token_ids: NDArray[np.int32]
    """[L]"""
    logprobs: NDArray[np.float32]
    """[L], under the temperature-scaled distribution (at temperature 0, under that of temperature
    1)."""
    versions: tuple[tuple[str, int], ...]
    """Version and number of consecutive tokens, in order; the counts sum to L."""
    reason: Literal["stop", "length", "abort"]
    routing: Routing | None = None
    """[P + L − 1, layers, k], of the request's tokens and its own but for the last."""
    entropies: NDArray[np.float64] | None = None
    """[L], see :func:`compute_entropy_bounds`; None where they were not asked for."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Where a server's ranks join a group for weights. The sender is rank 0."""

    name: str
    host: str
    port: int
    backend: Literal["gloo", "nccl"]
    offset: int
    """Rank in the group of the server's first rank."""
    size: int
    """Ranks in the group, the sender included."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of a bucket: tensors one after the other in one flat buffer of bytes, without
    gaps."""

    names: Sequence[str]
    dtypes: Sequence[str]
    """``float32``, ``bfloat16``"""
    shapes: Sequence[Sequence[int]]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        return cls(
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        )


def compute_entropy_bounds(top: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Entropies of distributions of which the likeliest tokens are known, with all others as one.

    That is less than the true entropy by what the others' would be among themselves. It depends on
    the tokens before alone, which a fork wants, and not on the token that was drawn.

    Args:
        top: [L][k], log-probabilities of each position's k likeliest tokens.

    Returns:
        [L], nats.
    """
    if not top:
        return np.zeros(0)
    likeliest = np.exp(np.array(top, np.float64))
    others = np.maximum(1.0 - likeliest.sum(axis=1, keepdims=True), 0.0)
    shares = np.concatenate([likeliest, others], axis=1)
    return -np.sum(shares * np.log(np.where(shares > 0.0, shares, 1.0)), axis=1)


def call_servers(
    world: World,
    http: Http,
    clients: Sequence[ServerClient],
    call: Callable[[ServerClient], Awaitable[None]],
) -> dict[str, str]:
    """Ask one thing of all servers at once, from the leader; what went wrong, by URL, on every
    rank. Collective."""

    async def gather_problems() -> dict[str, str]:
        asked = (wrap_errors(client.url, call(client)) for client in clients)
        problems = {}
        for client, result in zip(
            clients, await asyncio.gather(*asked, return_exceptions=True), strict=True
        ):
            if isinstance(result, ServerError):
                problems[client.url] = result.problem
            elif result is not None:
                raise result
        return problems

    return http.run_on_rank0(world, gather_problems)


@dataclass(eq=False)
class ServerClient(ABC):
    """One server. Every method raises :class:`ServerError` where the server fails it.

    ``SglangClient("http://127.0.0.1:30000", http, process=0, life=1)`` is the first server that the
    run started; it was started again once. Clients are sent between ranks, and each rank sets
    ``http``. Clients of one life are equal.

    The order of an update is: ``pause``, ``begin_update``, any number of
    ``update_from_distributed`` (or one ``update_from_disk``, ``load_adapter`` or
    ``load_adapter_from``), ``end_update``, ``flush`` unless requests are kept in flight,
    ``resume``. ``version`` then returns the new version.
    """

    url: str
    """``http://host:port``, without a slash at the end."""
    http: Http
    _: KW_ONLY
    secret: str | None = None
    """Shown with every request; None where the server wants none."""
    timeout_s: float = 300.0
    """Seconds that any one step of an update may take."""
    adapted: bool = False
    """Whether it generates with an adapter, which updates bring."""
    process: int | None = None
    """Its number among the servers that the run starts; None where it was given."""
    life: int = 0
    """How often it has come back. Connections and groups of an earlier life are gone."""
    ranks: int = 1
    """Its ranks, each of which joins a group for weights; set by ``info``."""
    seeded: bool = True
    """Whether its requests may carry a seed; set by ``info``."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServerClient) and (self.url, self.life) == (other.url, other.life)

    def __hash__(self) -> int:
        return hash((self.url, self.life))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "http": None}

    @property
    def name(self) -> str:
        """The URL without its scheme, for the log."""
        return self.url.partition("//")[2]

    async def get(self, path: str, *, timeout_s: float = CONTROL_S, **query: str) -> Any:
        return await self.http.call(
            "GET", self.url, path, query=query or None, secret=self.secret, timeout_s=timeout_s
        )

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None, **query: str
    ) -> Any:
        """A request; where a time limit is named, as of completions, a busy server is asked again
        within it."""
        call = self.http.call if timeout_s is None else self.http.call_with_retries
        return await call(
            "POST",
            self.url,
            path,
            body=body,
            query=query or None,
            secret=self.secret,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
        )

    def parse_routing(
        self,
        sampling: Sampling,
        prompt: int,
        length: int,
        reason: str,
        reported: NDArray[np.integer] | None,
    ) -> Routing | None:
        """Parse a server's routing for ``length`` tokens after a prompt of ``prompt`` tokens.

        A request that is aborted while it waits has none. The next request's begins with the prompt
        again.

        Raises:
            ServerError: the requested routing is missing or impossible.
            ServerError: it was asked and told nothing, or what cannot be.
        """
        shape = sampling.routing
        if shape is None or length == 0 or (reported is None and reason == "abort"):
            return None
        if reported is None:
            raise ServerError(
                self.url,
                f"did not say which experts it chose: start it with {ROUTING_FLAG}",
                alive=True,
            )
        wanted = (prompt + length - 1, shape.layers, shape.per_token)
        if (
            reported.size != math.prod(wanted)
            or reported.min(initial=0) < 0
            or reported.max(initial=0) >= shape.experts
        ):
            experts = f"{reported.size} experts up to number {reported.max(initial=0)}"
            problem = (
                f"named {experts}, not {wanted[1]} x {wanted[2]} of {shape.experts} for "
                f"{wanted[0]} tokens"
            )
            raise ServerError(self.url, problem, alive=True)
        return reported.reshape(wanted).astype(shape.dtype)

    async def get_routes(self) -> frozenset[str]:
        """The paths that the server serves: what it can do is asked, not inferred from its
        version."""
        return frozenset((await self.get("/openapi.json"))["paths"])

    @abstractmethod
    async def get_info(self) -> ServerInfo: ...

    @abstractmethod
    async def health(self, timeout_s: float) -> None:
        """Return once the server has shown that it can generate."""

    @abstractmethod
    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, timeout_s: float
    ) -> list[GenerateResult]:
        """Return ``sampling.samples`` continuations of ``token_ids``, in no particular order."""

    @abstractmethod
    async def pause(self, in_flight: InFlight) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def flush(self) -> None:
        """Drop the cache of prompts, which was computed with other weights."""

    @abstractmethod
    async def begin_update(self) -> None: ...

    @abstractmethod
    async def end_update(self, version: str) -> None:
        """Close the update. The server is at ``version`` afterwards."""

    @abstractmethod
    async def abort_update(self) -> None:
        """Close an update that failed half-way, if one is open. The weights are mixed until another
        update."""

    @abstractmethod
    async def join(self, group: WeightGroup) -> None:
        """Have the server's ranks join a group; returns when all of the group's ranks have."""

    @abstractmethod
    async def leave(self, group: str) -> None:
        """Leave a group, if the server is in it."""

    @abstractmethod
    async def update_from_distributed(
        self, manifest: Manifest, group: str, version: str | None
    ) -> None:
        """Receive one bucket that the group's rank 0 broadcasts, and load it. ``version`` goes with
        the last one."""

    @abstractmethod
    async def update_from_disk(self, folder: Path, version: str) -> None:
        """Load a Hugging Face directory that the server can read."""

    async def load_adapter(
        self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Put an adapter in the place of the one before, which no request may have in use.

        Args:
            config: of PEFT.
            tensors: by PEFT's names, each with memory of its own on the CPU.
        """
        raise ServerError(self.url, "is of a kind that takes adapters from disk only", alive=True)

    async def load_adapter_from(self, folder: Path) -> None:
        """As :meth:`load_adapter`, from PEFT's directory, which the server can read. It does not
        need that later."""
        raise ServerError(
            self.url, "is of a kind that takes adapters with a request only", alive=True
        )

    @abstractmethod
    async def get_version(self) -> str: ...

    @abstractmethod
    async def get_checksums(self) -> dict[str, str]:
        """SHA-256 in hex, or the beginning of it, of its parameters, by ``name@rank``; {} where it
        has none."""

    @abstractmethod
    async def release_memory(self) -> None:
        """Give the GPU's memory back, weights and cache, until ``resume_weights`` and
        ``resume_kv_cache``."""

    @abstractmethod
    async def resume_weights(self) -> None: ...

    @abstractmethod
    async def resume_kv_cache(self) -> None: ...
