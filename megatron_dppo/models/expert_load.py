"""How evenly routers share out tokens: what the busiest expert and the busiest expert-parallel rank get of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World

GROUPS = 4
"""Layers are reported in so many groups, from the first to the last, or each on its own where there are fewer."""


class ExpertLoad:
    """Counts the tokens of every expert in the passes of an update, padding included: ranks wait for it as well.

    Args:
        chunks: the bare model, one for each virtual pipeline stage.
        shape: of the policy, which has experts.
        world: this rank's place.
    """

    def __init__(self, chunks: Sequence[PolicyModel], shape: PolicyShape, world: World) -> None:
        self._world, self._ep = world, world.layout.ep
        self._counts = torch.zeros(shape.num_layers, shape.experts, dtype=torch.int64, device=world.device)
        for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)):
            router.register_forward_hook(partial(self._count, int(router.layer_number or 0) - 1))

    def _count(self, layer: int, router: torch.nn.Module, given: Any, found: tuple[torch.Tensor, torch.Tensor]) -> None:
        if torch.is_grad_enabled():  # once for each token, also where a layer runs again in the backward pass
            self._counts[layer] += found[1].sum(dim=0)

    def take(self) -> dict[str, float]:
        """``train/busiest_expert_…`` and ``train/busiest_rank_…`` since the last call, on every rank. Collective.

        Shares of a layer's tokens, each counted once for each of its experts; means over the layers of a group.
        """
        counts = self._counts.to("cpu", copy=True)
        self._counts.zero_()
        if self._world.size > 1:
            dist.all_reduce(counts, group=self._world.control)
        of_ranks = counts.unflatten(1, (self._ep, -1)).sum(dim=2)
        found: dict[str, float] = {}
        for name, each in (("expert", counts), ("rank", of_ranks)):
            busiest = each.amax(dim=1).double() / counts.sum(dim=1)
            groups = busiest.tensor_split(min(GROUPS, len(each)))
            found |= {f"train/busiest_{name}_{i}": float(group.mean()) for i, group in enumerate(groups, start=1)}
        return found
