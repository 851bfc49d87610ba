"""Requests of the trainer to a server; ``sglang.py`` and ``vllm.py`` translate the requests."""

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

from megatron_dppo.rl.sampling_mask import SamplingMask
from megatron_dppo.rl.types import Routing
from megatron_dppo.rollout.servers.http import Http, ServerError, wrap_errors

# Processes that only run servers have no torch and no Megatron.
if TYPE_CHECKING:
    import torch

    from megatron_dppo.parallel.world import World
    from megatron_dppo.rollout.engine import Sampling

InFlight = Literal["retract", "keep", "abort"]
"""Fate of unfinished requests when a server pauses; see ``rollout.sync.in_flight``."""

INCOMPLETE = "incomplete"
"""Version of a server during an update: the weights may be a mixture of two versions."""
ROUTING_FLAG = "--enable-return-routed-experts"
"""Flag of SGLang and of vLLM for reporting the chosen experts."""
TOP_LOGPROBS = 20
"""Number of log-probabilities per position, likeliest first, in requests for entropies: vLLM's
default limit."""
ADAPTER = "policy"
"""Name of a run's adapter at the servers."""
CONTROL_S = 30.0
"""Timeout in seconds of a request without work for the server."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Properties of a server, as reported at the first contact."""

    model: str
    """Path of the model loaded at the start."""
    architecture: str | None
    """``Qwen3ForCausalLM``; None if not reported."""
    dtype: str | None
    """Type of the weights, ``float32``; None if not reported."""
    max_tokens: int | None
    """Limit for prompt and response together; None if not reported."""
    stages: int = 1
    """Pipeline stages. Above 1 only for a kind of server whose stages would all join a group as
    the ranks of the first stage."""
    routing: bool = False
    """Whether the server reports the chosen experts on request."""
    sampling_mask: bool = False
    """Whether the server reports the kept ids of top-k and top-p on request."""
    lora_rank: int = 0
    """Maximum rank of an adapter; 0: no adapters."""
    lora_targets: frozenset[str] = frozenset()
    """Matrices allowed in an adapter, by Hugging Face names."""


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """Continuation returned by a server.

        GenerateResult([8, 2, 0], [-0.1, -2.3, -0.7], versions=(("3", 2), ("4", 1)), reason="stop")

    is a continuation with an update of the weights before the third token.
    """

    token_ids: NDArray[np.int32]
    """[L]"""
    logprobs: NDArray[np.float32]
    """[L], under the temperature-scaled distribution, over the kept ids of ``sampling_mask``; at
    temperature 0, under temperature 1."""
    versions: tuple[tuple[str, int], ...]
    """Version and number of consecutive tokens, in order; the counts sum to L."""
    reason: Literal["stop", "length", "abort"]
    routing: Routing | None = None
    """[P + L − 1, layers, k]: experts of all tokens of prompt and continuation but the last."""
    entropies: NDArray[np.float64] | None = None
    """[L], see :func:`compute_entropy_bounds`; None if not requested."""
    sampling_mask: SamplingMask | None = None
    """Mask of L tokens; None if not requested."""


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Process group for weights: rank 0 is the sender, the other ranks belong to servers."""

    name: str
    host: str
    port: int
    backend: Literal["gloo", "nccl"]
    offset: int
    """Group rank of the server's first rank."""
    size: int
    """Ranks of the group, including the sender."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Tensors of a bucket, concatenated in a flat buffer of bytes without gaps."""

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
    """Return lower bounds of entropies, with all tokens but the likeliest merged into one.

    - The bound lacks the entropy among the merged tokens.
    - The bound depends only on the preceding tokens, as required for a fork, not on the drawn
      token.

    Args:
        top: [L][k], log-probabilities of each position's k likeliest tokens.

    Returns:
        [L], nats.
    """
    if not top:
        return np.zeros(0)
    # Rounding may raise the sum above 1.
    likeliest = np.exp(np.array(top, np.float64))
    others = np.maximum(1.0 - likeliest.sum(axis=1, keepdims=True), 0.0)
    shares = np.concatenate([likeliest, others], axis=1)
    # 0 · log 0 counts as 0.
    return -np.sum(shares * np.log(np.where(shares > 0.0, shares, 1.0)), axis=1)


def call_servers(
    world: World,
    http: Http,
    clients: Sequence[ServerClient],
    call: Callable[[ServerClient], Awaitable[None]],
) -> dict[str, str]:
    """Call all servers concurrently from rank 0; return problems by URL on every rank.
    Collective."""

    async def gather_problems() -> dict[str, str]:
        calls = (wrap_errors(client.url, call(client)) for client in clients)
        # Wait for all servers, because the problem of every server is reported.
        results = await asyncio.gather(*calls, return_exceptions=True)
        problems = {}
        for client, result in zip(clients, results, strict=True):
            if isinstance(result, ServerError):
                problems[client.url] = result.problem
            elif result is not None:
                raise result
        return problems

    return http.run_on_rank0(world, gather_problems)


@dataclass(eq=False)
class ServerClient(ABC):
    """Client of a server. Every method raises :class:`ServerError` if the server fails.

    Clients are sent between ranks, and each rank sets ``http``. Two clients are equal if URL and
    life are equal.

    Order of an update:

    1. ``pause``
    2. ``begin_update``
    3. any number of ``update_from_distributed``, or a single ``update_from_disk``, ``load_adapter``
       or ``load_adapter_from``
    4. ``end_update``
    5. ``flush``, unless requests are kept in flight
    6. ``resume``

    ``get_version`` then returns the new version.
    """

    url: str
    """``http://host:port``, without a final slash."""
    http: Http
    _: KW_ONLY
    secret: str | None = None
    """Secret of every request; None if the server requires no secret."""
    timeout_s: float = 300.0
    """Timeout in seconds of each step of an update."""
    adapted: bool = False
    """Whether updates load an adapter instead of the whole policy."""
    process: int | None = None
    """Index among the servers started by the run; None for an externally managed server."""
    life: int = 0
    """Number of recoveries. Connections and groups of an earlier life are gone."""
    ranks: int = 1
    """Ranks of the server in the group for weights; set by ``get_info``."""
    seeded: bool = True
    """Whether requests may contain a seed; set by ``get_info``."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ServerClient) and (self.url, self.life) == (other.url, other.life)

    def __hash__(self) -> int:
        return hash((self.url, self.life))

    def __getstate__(self) -> dict[str, Any]:
        # Connections cannot be pickled; the receiving rank sets its own client.
        return {**vars(self), "http": None}

    @property
    def name(self) -> str:
        """URL without scheme, as logged."""
        return self.url.partition("//")[2]

    async def get(self, path: str, *, timeout_s: float = CONTROL_S, **query: str) -> Any:
        return await self.http.call(
            "GET", self.url, path, query=query or None, secret=self.secret, timeout_s=timeout_s
        )

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        **query: str,
    ) -> Any:
        """Send a request. With ``timeout_s``, repeat the request to a busy server within the
        limit."""
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
        """Parse the routing of ``length`` tokens after a prompt of ``prompt`` tokens.

        Raises:
            ServerError: the requested routing is missing or impossible.
        """
        shape = sampling.routing
        # A request aborted before its first token has no routing; the next request reports the
        # routing from the prompt on.
        if shape is None or length == 0 or (reported is None and reason == "abort"):
            return None
        if reported is None:
            raise ServerError(
                self.url,
                f"did not report the chosen experts: start it with {ROUTING_FLAG}",
                alive=True,
            )
        wanted = (prompt + length - 1, shape.layers, shape.per_token)
        largest = reported.max(initial=0)
        is_known = reported.min(initial=0) >= 0 and largest < shape.experts
        if reported.size != math.prod(wanted) or not is_known:
            experts = f"{reported.size} experts up to number {largest}"
            problem = (
                f"named {experts}, not {wanted[1]} x {wanted[2]} of {shape.experts} for "
                f"{wanted[0]} tokens"
            )
            raise ServerError(self.url, problem, alive=True)
        return reported.reshape(wanted).astype(shape.dtype)

    def parse_mask(
        self,
        sampling: Sampling,
        length: int,
        kept: Sequence[Sequence[int]] | None,
    ) -> SamplingMask | None:
        """Parse the kept ids of ``length`` tokens.

        Raises:
            ServerError: requested ids are missing.
        """
        if not sampling.sampling_mask:
            return None
        if len(kept or ()) != length:
            problem = f"reported the kept ids of {len(kept or ())} tokens, and generated {length}"
            raise ServerError(self.url, problem, alive=True)
        return SamplingMask.from_lists(kept or ())

    async def get_routes(self) -> frozenset[str]:
        """Return the paths served: capabilities follow from paths, not from the version."""
        return frozenset((await self.get("/openapi.json"))["paths"])

    @abstractmethod
    async def get_info(self) -> ServerInfo: ...

    @abstractmethod
    async def health(self, timeout_s: float) -> None:
        """Return after the server has demonstrated generation."""

    @abstractmethod
    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        timeout_s: float,
    ) -> list[GenerateResult]:
        """Return ``sampling.samples`` continuations, in no particular order."""

    @abstractmethod
    async def pause(self, in_flight: InFlight) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def flush(self) -> None:
        """Drop the cache of prompts, computed with other weights."""

    @abstractmethod
    async def begin_update(self) -> None: ...

    @abstractmethod
    async def end_update(self, version: str) -> None:
        """Close the update; the server then has ``version``."""

    @abstractmethod
    async def abort_update(self) -> None:
        """Close a failed update, if open. The weights stay a mixture until another update."""

    @abstractmethod
    async def join(self, group: WeightGroup) -> None:
        """Return after all ranks of the group, including the server's, have joined."""

    @abstractmethod
    async def leave(self, group: str) -> None:
        """Leave a group, if joined."""

    @abstractmethod
    async def update_from_distributed(
        self,
        manifest: Manifest,
        group: str,
        version: str | None,
    ) -> None:
        """Receive a bucket broadcast by the group's rank 0, and load the bucket. ``version`` is
        given with the last bucket."""

    @abstractmethod
    async def update_from_disk(self, folder: Path, version: str) -> None:
        """Load a Hugging Face directory readable by the server."""

    async def load_adapter(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Replace the adapter. No request may be using the previous adapter.

        Args:
            config: PEFT's configuration.
            tensors: PEFT's name to tensor, each with separate memory on the CPU.
        """
        raise ServerError(self.url, "is of a kind that takes adapters from disk only", alive=True)

    async def load_adapter_from(self, folder: Path) -> None:
        """Replace the adapter from a PEFT directory readable by the server, which may be deleted
        afterwards."""
        raise ServerError(
            self.url, "is of a kind that takes adapters with a request only", alive=True
        )

    @abstractmethod
    async def get_version(self) -> str: ...

    @abstractmethod
    async def get_checksums(self) -> dict[str, str]:
        """Return parameter checksums by ``name@rank``: SHA-256 in hex, possibly truncated; {} if
        unsupported."""

    @abstractmethod
    async def release_memory(self) -> None:
        """Release the GPU memory of weights and cache, until ``resume_weights`` and
        ``resume_kv_cache``."""

    @abstractmethod
    async def resume_weights(self) -> None: ...

    @abstractmethod
    async def resume_kv_cache(self) -> None: ...
