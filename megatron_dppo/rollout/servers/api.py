"""What the trainer asks of one server, whatever its kind. ``sglang.py`` and ``vllm.py`` say it in its words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_dppo.rollout.servers.http import Http

InFlight = Literal["retract", "keep", "abort"]
"""What becomes of unfinished requests when a server pauses; see ``rollout.sync.in_flight``."""

Handle = Any
"""A bucket in memory of this machine, as JSON can carry it to one rank of a server, in the server's words."""

INCOMPLETE = "incomplete"
"""Version of a server between the beginning and the end of an update: it may hold weights of two."""
CONTROL_S = 30.0
"""How long a question that costs a server nothing may take."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself when it is met."""

    model: str
    """Path of the model that it was started with."""
    architecture: str | None
    """``Qwen3ForCausalLM``; None where the server does not say."""
    ranks: int
    """Its ranks, each of which joins a group for weights."""
    version: str
    """Of its weights, as it was last told."""
    dtype: str | None
    """Of its weights, ``float32``; None where the server does not say."""
    max_tokens: int | None
    """Longest sequence, prompt and response; None where the server does not say."""
    nccl: str | None = None
    """Version of its NCCL, ``2.29.7``; None where the server does not say."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Completions of one prompt."""

    token_ids: Sequence[int]
    samples: int
    max_tokens: int
    temperature: float
    stop_token_ids: Sequence[int]
    seed: int | None
    """Where the server can be seeded; it then depends on the server alone whether a seed repeats."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One continuation as a server gave it."""

    token_ids: NDArray[np.int32]
    """[L]"""
    logprobs: NDArray[np.float32]
    """[L], under the temperature-scaled distribution (at temperature 0, under that of temperature 1)."""
    versions: tuple[tuple[str, int], ...]
    """Version and number of consecutive tokens, in order; the counts sum to L."""
    reason: Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Meeting:
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
    """What a bucket holds: tensors one after the other in one flat buffer of bytes, without gaps."""

    names: Sequence[str]
    dtypes: Sequence[str]
    """``float32``, ``bfloat16``"""
    shapes: Sequence[Sequence[int]]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        return cls(
            names=list(tensors),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
        )


class ServerApi(ABC):
    """One server. Every method raises :class:`ServerError` where the server fails it.

    The order of an update is: ``pause``, ``begin_update``, any number of ``receive`` or ``take`` (or one ``load``),
    ``end_update``, ``flush`` unless requests are kept in flight, ``resume``. ``version`` then tells the new version.

    Args:
        url: ``http://host:port``, without a slash at the end.
        http: through which to speak.
        secret: to be shown with every request; None where the server wants none.
        timeout_s: how long any one step of an update may take.
        ranks: of the server, where they are known already; ``facts`` finds them out.
        seeded: whether its requests may carry a seed; ``facts`` finds that out, too.
        gpus: that the run gave its ranks, as CUDA_VISIBLE_DEVICES names them; none where it gave none.
    """

    def __init__(
        self,
        url: str,
        http: Http,
        *,
        secret: str | None = None,
        timeout_s: float = 300.0,
        ranks: int = 1,
        seeded: bool = True,
        gpus: Sequence[str] = (),
    ) -> None:
        self.url, self.http, self.secret, self.timeout_s = url, http, secret, timeout_s
        self.ranks, self.seeded, self.gpus = ranks, seeded, gpus

    async def get(self, path: str, *, timeout_s: float = CONTROL_S, **query: str) -> Any:
        return await self.http.call("GET", self.url, path, query=query or None, secret=self.secret, timeout_s=timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None, **query: str) -> Any:
        return await self.http.call(
            "POST",
            self.url,
            path,
            body=body,
            query=query or None,
            secret=self.secret,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
        )

    async def routes(self) -> frozenset[str]:
        """The paths that the server serves: what it can do is asked, not inferred from its version."""
        return frozenset((await self.get("/openapi.json"))["paths"])

    @abstractmethod
    async def facts(self) -> Facts: ...

    @abstractmethod
    async def health(self, timeout_s: float) -> None:
        """Return once the server has shown that it can still generate, or is doing so."""

    @abstractmethod
    async def generate(self, ask: Ask, *, timeout_s: float) -> list[Piece]:
        """``ask.samples`` pieces, in no particular order."""

    @abstractmethod
    async def pause(self, in_flight: InFlight) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def flush(self) -> None:
        """Drop what is cached of prompts: it was computed with other weights."""

    @abstractmethod
    async def begin_update(self) -> None: ...

    @abstractmethod
    async def end_update(self, version: str) -> None:
        """Close the update; from here on the server is at ``version``, unless it was told so with the last bucket."""

    @abstractmethod
    async def abandon_update(self) -> None:
        """Close an update that failed half-way, if one is open: the weights are mixed, and another may begin."""

    @abstractmethod
    async def join(self, meeting: Meeting) -> None:
        """Have the server's ranks join a group; returns when all of the group's ranks have."""

    @abstractmethod
    async def leave(self, group: str) -> None:
        """Leave a group, if the server is in it."""

    @abstractmethod
    async def receive(self, manifest: Manifest, group: str, version: str | None) -> None:
        """Receive one bucket that the group's rank 0 broadcasts, and load it. ``version`` goes with the last one."""

    @abstractmethod
    def handle(self, manifest: Manifest, words: Sequence[Any]) -> Handle:
        """What tells a rank of the server of a bucket in memory that ``words`` open, as ``handles.shared`` has them."""

    @abstractmethod
    async def take(self, handles: Sequence[Handle], version: str | None) -> None:
        """Load a bucket, each rank from the memory that its own handle opens. ``version`` goes with the last one."""

    @abstractmethod
    async def load(self, folder: Path, version: str) -> None:
        """Load a Hugging Face directory that the server can read."""

    @abstractmethod
    async def version(self) -> str: ...

    @abstractmethod
    async def checksums(self) -> dict[str, str]:
        """SHA-256 in hex, or the beginning of it, of its parameters, by ``name@rank``; {} where it has none."""

    @abstractmethod
    async def release_memory(self) -> None:
        """Give the GPU's memory back, weights and cache, until ``regain_weights`` and ``regain_cache``."""

    @abstractmethod
    async def regain_weights(self) -> None: ...

    @abstractmethod
    async def regain_cache(self) -> None: ...

    @cached_property
    def shown(self) -> str:
        """The URL without its scheme, for the log."""
        return self.url.removeprefix("http://").removeprefix("https://")
