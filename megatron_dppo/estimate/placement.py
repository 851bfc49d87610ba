"""Which GPUs train and which generate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dppo.config import Config, LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, check_layout
from megatron_dppo.rollout.servers.launch import tensor_parallel


@dataclass(frozen=True, slots=True)
class Placement:
    """The cluster, shared out."""

    layout: LayoutConfig
    """With ``dp`` filled in."""
    ranks: int
    """Of the trainer."""
    servers: tuple[int, ...]
    """Tensor-parallel ranks of each server; with the local engine one of 1 for each rank of the trainer."""
    shared: bool
    """Whether servers and the trainer are on the same GPUs."""
    gpus: int
    """All that are paid for."""

    @property
    def replica(self) -> int:
        """Ranks that share the optimizer's state of the same weights."""
        return (self.layout.dp or 1) * self.layout.cp


def place(config: Config, shape: PolicyShape) -> Placement:
    """Share out the cluster's GPUs as a run would.

    Raises:
        UserError: for a layout that does not divide the policy or the cluster, and servers that do not fit a node.
    """
    check_layout(shape, config.layout)
    cluster, rollout = config.cluster, config.rollout
    actors = cluster.nodes * cluster.gpus_per_node
    extra = cluster.server_nodes * cluster.gpus_per_node
    shared = rollout.engine == "local" or rollout.colocated
    servers = _servers(config, shape)
    beside = sum(servers) if rollout.launch.count and not shared else 0
    if beside >= actors:
        problem = f"its servers take {beside} of the {actors} GPUs of cluster.nodes = {cluster.nodes}"
        raise UserError("rollout.launch.count", rollout.launch.count, problem, "Lower it, or raise cluster.nodes")
    layout, ranks = config.layout, actors - beside
    model = layout.tp * layout.pp * layout.cp
    dp = layout.dp or ranks // model
    if model * dp != ranks or not dp:
        raise UserError(
            "layout",
            f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp or 'any'}",
            f"does not divide the {ranks} GPUs that the trainer has of cluster.nodes = {cluster.nodes} with "
            f"{cluster.gpus_per_node} each",
            f"Give the trainer a multiple of {model * (layout.dp or 1)} GPUs, or lower layout.tp, pp, cp or dp",
        )
    local = rollout.engine == "local"
    return Placement(replace(layout, dp=dp), ranks, (1,) * ranks if local else servers, shared, actors + extra)


def _servers(config: Config, shape: PolicyShape) -> tuple[int, ...]:
    """Tensor-parallel ranks of each; Slurm's nodes have as many servers as fit."""
    rollout, cluster = config.rollout, config.cluster
    if rollout.engine == "local":
        return ()
    tp = rollout.launch.tp if isinstance(rollout.launch.tp, int) else rollout.launch.tp[0]
    count = len(rollout.servers)
    if rollout.servers == "slurm":
        if not cluster.server_nodes:
            problem = "rollout.servers = slurm runs servers on the nodes of a second component, and there are none"
            raise UserError("cluster.server_nodes", 0, problem, "Set it to 1 or more")
        count = cluster.server_nodes * max(cluster.gpus_per_node // tp, 1)
    sizes = tensor_parallel(rollout) if rollout.launch.count else (tp,) * count
    for size in sizes:
        if size > cluster.gpus_per_node:
            problem = f"is more than the {cluster.gpus_per_node} GPUs of a node (cluster.gpus_per_node)"
            raise UserError("rollout.launch.tp", size, problem, f"Lower it to {cluster.gpus_per_node} or less")
        if shape.heads % size:
            problem = f"does not divide the policy's {shape.heads} query heads"
            raise UserError("rollout.launch.tp", size, problem, "Set it to a power of two, as GPUs go")
    return sizes
