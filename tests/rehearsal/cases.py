"""The settings that are rehearsed: name, configuration, rank, and the work besides two training steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.config.run import LoraConfig
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.policies import write_family, write_policy
from tests.steps import config_for

PACK_TOKENS = 128


@dataclass(frozen=True)
class Case:
    policy: str = "dense"
    layout: LayoutConfig = field(default_factory=lambda: LayoutConfig(dp=1))
    rank: int = 0
    spec: str = "te"
    share: Any = "off"
    loss: LossConfig = field(default_factory=LossConfig)
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    extra: str = ""
    """Work after the steps: "score norms", "release" or "checkpoint"."""

    @property
    def ranks(self) -> int:
        layout = self.layout
        return layout.tp * layout.pp * layout.cp * (layout.dp or 1)

    @property
    def expert_layers(self) -> int:
        """Layers of the policy that have experts."""
        return {"moe": 2, "mixture": 4}.get(self.policy, 0)


def layout(**sizes: Any) -> LayoutConfig:
    return LayoutConfig(**{"dp": 1, **sizes})


KL = LossConfig(kl_coef=0.1)
TWO = LossConfig(updates_per_rollout=2)
REPLAY = LossConfig(updates_per_rollout=2, replay_routing="update")
LORA = {"lora": LoraConfig(rank=4)}
TP2_SP = layout(tp=2, sequence_parallel=True)

CASES = {
    "dense": Case(),
    "tied": Case("tied"),
    "release": Case(extra="release"),
    "torch layers": Case(spec="torch"),
    "score norms": Case(extra="score norms"),
    "recompute full": Case(model={"recompute": "full"}),
    "recompute selective": Case(model={"recompute": "selective"}),
    "two updates": Case(loss=TWO),
    "kl": Case(loss=KL),
    "kl reference on host": Case(loss=KL, model={"reference_on_host": True}),
    "offload": Case(optimizer={"offload": True}),
    "overlap dp2": Case(layout=layout(dp=2), optimizer={"overlap": True}),
    "plain optimizer": Case(optimizer={"distributed": False}),
    "deterministic": Case(model={"deterministic": True}),
    "tp2": Case(layout=layout(tp=2)),
    "tp2 sp": Case(layout=TP2_SP),
    "tp2 sp rank1": Case(layout=TP2_SP, rank=1),
    "cp2": Case(layout=layout(cp=2)),
    "cp2 tp2 sp": Case(layout=layout(cp=2, tp=2, sequence_parallel=True)),
    "pp2 first": Case(layout=layout(pp=2)),
    "pp2 last": Case(layout=layout(pp=2), rank=1),
    "pp2 tied last": Case("tied", layout=layout(pp=2), rank=1),
    "pp2 vpp2": Case(layout=layout(pp=2, vpp=2)),
    "lora": Case(model=LORA),
    "lora tp2 sp": Case(model=LORA, layout=TP2_SP),
    "lora recompute": Case(model={**LORA, "recompute": "full"}),
    "lora kl": Case(model=LORA, loss=KL),
    "shared prefixes": Case(share="on"),
    "shared prefixes cp2": Case(share="on", layout=layout(cp=2)),
    "shared prefixes torch": Case(share="on", spec="torch"),
    "moe": Case("moe"),
    "moe ep2": Case("moe", layout=layout(ep=2, dp=2)),
    "moe tp2 ep2 etp1": Case("moe", layout=layout(tp=2, ep=2, etp=1, sequence_parallel=True)),
    "moe tp2 sp": Case("moe", layout=TP2_SP),
    "moe recompute": Case("moe", model={"recompute": "selective"}),
    "moe lora": Case("moe", model=LORA),
    "moe pp2 last": Case("moe", layout=layout(pp=2), rank=1),
    "moe replay update": Case("moe", loss=REPLAY),
    "checkpoint": Case(extra="checkpoint"),
    "checkpoint offload": Case(optimizer={"offload": True}, extra="checkpoint"),
    "checkpoint dp_reshardable": Case(optimizer={"checkpoint_format": "dp_reshardable"}, extra="checkpoint"),
    "checkpoint moe": Case("moe", extra="checkpoint"),
}
if version("megatron-core") >= "0.19":
    CASES |= {
        "hybrid": Case("hybrid"),
        "hybrid tp2 sp": Case("hybrid", layout=TP2_SP),
        "hybrid cp2": Case("hybrid", layout=layout(cp=2)),
        "hybrid lora": Case("hybrid", model=LORA),
        "hybrid moe tp2 ep2 etp1": Case("mixture", layout=layout(tp=2, ep=2, etp=1, sequence_parallel=True)),
        "hybrid moe recompute": Case("mixture", model={"recompute": "selective"}),
    }

SHARE = (
    "dense", "recompute selective", "kl reference on host", "offload", "overlap dp2", "tp2 sp", "cp2 tp2 sp",
    "pp2 last", "pp2 vpp2", "lora tp2 sp", "shared prefixes", "moe ep2", "moe tp2 ep2 etp1",
)  # fmt: skip
"""Cases of the main suite. ``REHEARSAL_CASES=all`` rehearses all."""


def write_policies(folder: Path) -> dict[str, Path]:
    """Directories of the policies that cases name."""
    sizes = {"heads": 8, "kv_heads": 4, "hidden": 64, "ffn": 96, "layers": 4}
    experts = Sizes(vocab_size=131, hidden_size=64, intermediate_size=64, head_dim=16)
    write_qwen3_moe(folder / "moe", experts, experts=8)
    return {
        "dense": write_policy(folder / "dense", **sizes),
        "tied": write_policy(folder / "tied", **sizes, tied=True),
        "moe": folder / "moe",
        "hybrid": write_family(folder / "hybrid", "Qwen3_5ForCausalLM"),
        "mixture": write_family(folder / "mixture", "Qwen3_5MoeForCausalLM"),
    }


def config_of(case: Case, policies: dict[str, Path], run: Path) -> Config:
    config = config_for(policies[case.policy], case.layout, case.loss, PACK_TOKENS, distributed=True, share=case.share)
    return replace(
        config,
        model=replace(config.model, spec=case.spec, dtype="bf16", **case.model),
        optimizer=replace(config.optimizer, clip_grad=1.0, **case.optimizer),
        run=replace(config.run, dir=str(run)),
    )
