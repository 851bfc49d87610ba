"""What speaks to a server of either kind."""

from __future__ import annotations

from typing import Literal

from megatron_dppo.rollout.servers.api import ServerApi
from megatron_dppo.rollout.servers.http import Http


def api_for(
    kind: Literal["local", "sglang", "vllm"],
    url: str,
    http: Http,
    *,
    secret: str | None,
    timeout_s: float,
    ranks: int = 1,
    seeded: bool = True,
) -> ServerApi:
    """See :class:`ServerApi` for the arguments.

    Raises:
        ValueError: for the local engine, which is no server.
    """
    api: type[ServerApi]
    if kind == "sglang":
        from megatron_dppo.rollout.servers.sglang import SglangApi

        api = SglangApi
    elif kind == "vllm":
        from megatron_dppo.rollout.servers.vllm import VllmApi

        api = VllmApi
    else:
        raise ValueError(f"{kind!r} is no server")
    return api(url, http, secret=secret, timeout_s=timeout_s, ranks=ranks, seeded=seeded)
