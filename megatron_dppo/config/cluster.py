"""The machines that a run is planned for, and launched on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_dppo.config.types import STRICT, Count, NonNegative, Positive, Seconds


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Read by ``plan`` and ``launch``. A run takes the machines that it is given, and reads ``gpu`` alone."""

    __pydantic_config__ = STRICT

    nodes: Positive = 1
    """Nodes of the actors."""
    server_nodes: Count = 0
    """Nodes of the rollout servers; 0: servers, if there are any, run on the actors' nodes."""
    gpus_per_node: Positive = 8
    """GPUs of each node, of actors and servers alike."""
    gpu: Literal["a100-40", "a100-80", "h100", "h200", "b200"] = "h100"
    """Kind of GPU. A plan goes by its memory, bandwidth and matrix rate; ``perf/actor_train_peak_share`` by its matrix
    rate."""
    price_per_gpu_hour: NonNegative | None = None
    """Price of one GPU for one hour, in whatever currency; null: plans say hours and no price."""
    account: str | None = None
    """Slurm account; null: the user's default."""
    partition: str | None = None
    """Slurm partition; null: the cluster's default."""
    hours: Annotated[float, Field(gt=0.0)] = 4.0
    """Slurm's time limit for one job; a run that is not done by then saves, and goes on in the next one."""
    warn_s: Seconds = 600.0
    """Seconds before the time limit at which the run is told to save and stop: longer than a step and a checkpoint."""
    container: str | None = None
    """Image that the job's steps run in (Pyxis); null: the environment that submits it."""
    mounts: tuple[str, ...] = ()
    """Folders that the container sees, each as ``/from:/to``."""
