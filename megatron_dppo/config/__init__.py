"""Every setting of a run, with its meaning. Imports neither torch nor Megatron, so any machine can check a file."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_dppo.config.cluster import ClusterConfig
from megatron_dppo.config.data import ArithmeticConfig, DataConfig, ReasoningGymConfig, RewardConfig
from megatron_dppo.config.loss import (
    CompletionPruningConfig,
    LossConfig,
    PackConfig,
    PromptPruningConfig,
    PruningConfig,
    ScheduleConfig,
)
from megatron_dppo.config.model import HEAD_CHUNK_MIB, LayoutConfig, ModelConfig, OptimizerConfig
from megatron_dppo.config.rollout import LaunchConfig, RolloutConfig, SyncConfig
from megatron_dppo.config.run import EvalConfig, RunConfig, SftConfig
from megatron_dppo.config.types import STRICT

__all__ = [
    "HEAD_CHUNK_MIB",
    "ArithmeticConfig",
    "ClusterConfig",
    "CompletionPruningConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LaunchConfig",
    "LayoutConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PackConfig",
    "PromptPruningConfig",
    "PruningConfig",
    "ReasoningGymConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "SftConfig",
    "SyncConfig",
]


@dataclass(frozen=True, slots=True)
class Config:
    """A whole run. ``megatron-dppo train FILE a.b=c`` reads FILE over these defaults, then the overrides."""

    __pydantic_config__ = STRICT

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    pack: PackConfig = field(default_factory=PackConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
