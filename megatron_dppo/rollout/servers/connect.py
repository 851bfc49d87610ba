"""What speaks to a server of either kind."""

from __future__ import annotations

from typing import Literal

from megatron_dppo.rollout.servers.api import ServerApi
from megatron_dppo.rollout.servers.http import Http


def api_for(
    kind: Literal["sglang", "vllm"],
    url: str,
    http: Http,
    *,
    secret: str | None,
    timeout_s: float,
    ranks: int = 1,
    seeded: bool = True,
) -> ServerApi:
    """See :class:`ServerApi` for the arguments."""
    if kind == "sglang":
        from megatron_dppo.rollout.servers.sglang import SglangApi as Api
    else:
        from megatron_dppo.rollout.servers.vllm import VllmApi as Api
    return Api(url, http, secret=secret, timeout_s=timeout_s, ranks=ranks, seeded=seeded)
