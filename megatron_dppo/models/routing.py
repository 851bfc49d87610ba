"""Routing replay: all passes compared by a ratio send a token to the same experts.

After a small update, or in an engine with different rounding, a router chooses different experts
for some tokens. The ratios of these tokens are then far from 1 for reasons unrelated to the update.
The replayed choices are the engine's own and come with the rollouts (arXiv:2510.11370). Each
expert's weight is the router's own softmax over the replayed experts, with its gradient.

:class:`ExpertLoad` measures the balance of tokens over experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_dppo.models.context import PackShare
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Ints, Pack, RoutingShape, get_unknown_expert

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class RouterReplay:
    """Replacement for Megatron's ``RouterReplay``; a router calls only ``get_replay_topk``.

    Megatron's class keeps one list of all models' routers, replays all tokens or no token, and must
    be informed of a layer's second run. Here the router chooses for tokens without known routing.
    """

    def __init__(self, unknown: int) -> None:
        self._unknown = unknown
        self._in_pass = False
        self._target: torch.Tensor | None = None
        self._recompute_targets: deque[torch.Tensor | None] = deque()
        """Targets of layers to run again in the backward pass, in order of microbatches."""

    def enter(self, target: torch.Tensor | None, *, recompute: bool) -> None:
        """Begin a forward pass.

        Args:
            target: [t, k], experts of this rank's tokens; None: the router chooses.
            recompute: whether the layer runs a second time, in the backward pass.
        """
        self._in_pass = True
        self._target = target
        if recompute:
            self._recompute_targets.append(target)

    def exit(self) -> None:
        """End a forward pass."""
        self._in_pass = False
        self._target = None

    def clear(self) -> None:
        self._recompute_targets.clear()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's scores and experts, both [t, k], from scores [t, experts]."""
        values, own = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        # A call outside a forward pass comes from a layer's second run.
        target = self._target if self._in_pass else self._recompute_targets.popleft()
        if target is not None:
            target = target.long()
            own = torch.where(target[:, :1] != self._unknown, target, own)
            values = scores.gather(1, own)
        return values, own


class RoutingReplay:
    """Replay of a pack's experts in one rank's routers.

    Args:
        chunks: chunks of the policy, unwrapped.
    """

    def __init__(self, chunks: Sequence[PolicyModel], world: World, shape: RoutingShape) -> None:
        config = chunks[0].config
        self._world = world
        self._splits_tokens = bool(config.sequence_parallel)
        self._recomputes = config.recompute_granularity is not None
        self._routers: list[list[RouterReplay]] = []
        layers_by_chunk: list[list[int]] = []
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            layers_by_chunk.append([int(router.layer_number or 0) - 1 for router in routers])
            self._routers.append([RouterReplay(get_unknown_expert(shape.dtype)) for _ in routers])
            for router, replay in zip(routers, self._routers[-1], strict=True):
                router.router_replay = replay
                # The fused kernel would silently make its own choice of experts.
                router.config.moe_router_fusion = False
        layers = sorted(chain.from_iterable(layers_by_chunk))
        self.layers: Ints = np.array(layers, np.int64)
        """This rank's layers with routers, counted from 0 over the whole policy."""
        self._columns = [np.searchsorted(self.layers, numbers) for numbers in layers_by_chunk]

    def clear(self) -> None:
        for routers in self._routers:
            for router in routers:
                router.clear()

    @contextmanager
    def apply(self, chunk: int, pack: Pack, share: PackShare | None) -> Iterator[None]:
        """Replay a pack's experts in a chunk's forward pass.

        Args:
            share: this rank's share of the pack, on the host; None: the whole pack.
        """
        # Read here, because the first run of a recomputed layer has no gradients.
        training = torch.is_grad_enabled()
        table = None
        if pack.routing is not None:
            local = self._select_local(pack.routing, share)
            table = self._to_device(local[:, self._columns[chunk]])
        for i, router in enumerate(self._routers[chunk]):
            target = None if table is None else table[:, i]
            router.enter(target, recompute=training and self._recomputes)
        try:
            yield
        finally:
            for router in self._routers[chunk]:
                router.exit()

    def _select_local(
        self,
        values: np.ndarray[Any, Any],
        share: PackShare | None,
    ) -> np.ndarray[Any, Any]:
        """Select the tokens of this rank's routers: [T, …] to [t, …]."""
        if share is not None:
            values = values[share.held.numpy()]
        # Sequence parallelism gives each tensor-parallel rank an equal part of the tokens.
        if self._splits_tokens:
            values = np.split(values, self._world.layout.tp)[self._world.tp_rank]
        return values

    def _to_device(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        device = self._world.device
        if device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)


LAYER_GROUPS = 4
"""Groups of consecutive layers in reports, each of at least one layer."""


class ExpertLoad:
    """Token counts of every expert, including padding, because ranks wait for padding too.

    Args:
        chunks: unwrapped model, a chunk for each virtual pipeline stage.
        shape: shape of a policy with experts.
    """

    def __init__(self, chunks: Sequence[PolicyModel], shape: PolicyShape, world: World) -> None:
        self._world = world
        self._ep = world.layout.ep
        self._counts = torch.zeros(
            shape.num_layers, shape.experts, dtype=torch.int64, device=world.device
        )
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    layer = int(module.layer_number or 0) - 1
                    module.register_forward_hook(partial(self._count, layer))

    def _count(
        self,
        layer: int,
        router: torch.nn.Module,
        inputs: Any,
        outputs: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        # Exactly one run of a layer has gradients enabled, with or without recomputation.
        if torch.is_grad_enabled():
            self._counts[layer] += outputs[1].sum(dim=0)

    def take(self) -> torch.Tensor:
        """Return and reset this rank's counts, [layers, experts] int64 on the device."""
        counts = self._counts
        self._counts = torch.zeros_like(self._counts)
        return counts

    def compute_metrics(self, counts: torch.Tensor) -> dict[str, float]:
        """Return ``train/busiest_expert_…`` and ``train/busiest_rank_…`` on every rank. Collective.

        Each metric is a fraction of a layer's tokens (a token counts once per expert), on average
        over a group of layers.

        Args:
            counts: result of :meth:`take`, on the host as fp64; overwritten by the sum over ranks.
        """
        if self._world.size > 1:
            dist.all_reduce(counts, group=self._world.control)
        of_ranks = counts.unflatten(1, (self._ep, -1)).sum(dim=2)
        found: dict[str, float] = {}
        for name, each in (("expert", counts), ("rank", of_ranks)):
            busiest = each.amax(dim=1) / counts.sum(dim=1)
            groups = busiest.tensor_split(min(LAYER_GROUPS, len(each)))
            found |= {
                f"train/busiest_{name}_{i}": float(group.mean())
                for i, group in enumerate(groups, start=1)
            }
        return found
