"""The settings that are rehearsed: name, configuration, rank, and work besides two training
steps."""

from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

from megatron_dppo.config import Config, replace
from megatron_dppo.settings import load_config
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.policies import write_family, write_policy

BASE = """
model.spec=te model.dtype=bf16 layout.dp=1 pack.max_tokens=128 pack.share_prefixes=off
pruning.completions.keep=0.5 pruning.max_weight=5 rollout.samples_per_prompt=4 rollout.temperature=0.8
rollout.max_logprob_diff=100 rollout.max_prob_error=1e30 optimizer.lr=1 optimizer.eps=1 optimizer.clip_grad=1
"""


@dataclass(frozen=True)
class Case:
    """A setting.

    Args:
        words: settings beyond ``BASE``.
        policy: a key of ``write_policies``.
        rank: the rank that is played.
        extra: work after the steps: "release" or "checkpoint".
    """

    words: str = ""
    policy: str = "dense"
    rank: int = 0
    extra: str = ""

    @cached_property
    def config(self) -> Config:
        return load_config(None, [*BASE.split(), *self.words.split()])

    @property
    def expert_layers(self) -> int:
        """Layers of the policy that have experts."""
        return {"moe": 2, "mixture": 4}.get(self.policy, 0)


KL, TWO, LORA = "loss.kl_coef=0.1", "loss.updates_per_rollout=2", "model.lora.rank=4"
TP2_SP, PP2, CP2 = "layout.tp=2 layout.sequence_parallel=true", "layout.pp=2", "layout.cp=2"
SHARED, ETP1 = "pack.share_prefixes=on", f"{TP2_SP} layout.ep=2 layout.etp=1"
OFFLOAD, SELECTIVE = "optimizer.offload=true", "model.recompute=selective"

CASES = {
    "dense": Case(),
    "tied": Case(policy="tied"),
    "release": Case(extra="release"),
    "torch layers": Case("model.spec=torch"),
    "recompute full": Case("model.recompute=full"),
    "recompute selective": Case(SELECTIVE),
    "two updates": Case(TWO),
    "kl": Case(KL),
    "kl reference on host": Case(f"{KL} model.reference_on_host=true"),
    "offload": Case(OFFLOAD),
    "overlap dp2": Case("layout.dp=2 optimizer.overlap=true"),
    "plain optimizer": Case("optimizer.distributed=false"),
    "deterministic": Case("model.deterministic=true"),
    "tp2": Case("layout.tp=2"),
    "tp2 sp": Case(TP2_SP),
    "tp2 sp rank1": Case(TP2_SP, rank=1),
    "cp2": Case(CP2),
    "cp2 tp2 sp": Case(f"{CP2} {TP2_SP}"),
    "pp2 first": Case(PP2),
    "pp2 last": Case(PP2, rank=1),
    "pp2 tied last": Case(PP2, "tied", rank=1),
    "pp2 vpp2": Case(f"{PP2} layout.vpp=2"),
    "lora": Case(LORA),
    "lora tp2 sp": Case(f"{LORA} {TP2_SP}"),
    "lora recompute": Case(f"{LORA} model.recompute=full"),
    "lora kl": Case(f"{LORA} {KL}"),
    "shared prefixes": Case(SHARED),
    "shared prefixes cp2": Case(f"{SHARED} {CP2}"),
    "shared prefixes torch": Case(f"{SHARED} model.spec=torch"),
    "moe": Case(policy="moe"),
    "moe ep2": Case("layout.ep=2 layout.dp=2", "moe"),
    "moe tp2 ep2 etp1": Case(ETP1, "moe"),
    "moe tp2 sp": Case(TP2_SP, "moe"),
    "moe recompute": Case(SELECTIVE, "moe"),
    "moe lora": Case(LORA, "moe"),
    "moe pp2 last": Case(PP2, "moe", rank=1),
    "checkpoint": Case(extra="checkpoint"),
    "checkpoint offload": Case(OFFLOAD, extra="checkpoint"),
    "checkpoint moe": Case(policy="moe", extra="checkpoint"),
}
if version("megatron-core") >= "0.19":
    CASES |= {
        "hybrid": Case(policy="hybrid"),
        "hybrid tp2 sp": Case(TP2_SP, "hybrid"),
        "hybrid cp2": Case(CP2, "hybrid"),
        "hybrid lora": Case(LORA, "hybrid"),
        "hybrid moe tp2 ep2 etp1": Case(ETP1, "mixture"),
        "hybrid moe recompute": Case(SELECTIVE, "mixture"),
    }

SHARE = (
    "recompute selective", "kl reference on host", "offload", "overlap dp2", "tp2 sp", "cp2 tp2 sp",
    "pp2 vpp2",
    "lora tp2 sp", "shared prefixes", "moe tp2 ep2 etp1",
)  # fmt: skip
"""Cases of the second tier. ``REHEARSAL_CASES=all`` rehearses all."""


def write_policies(folder: Path) -> dict[str, Path]:
    """Return the directories of the policies that cases name."""
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


def config_of(case: Case, policy: Path, run: Path) -> Config:
    """Return the settings of a case that trains ``policy`` in the folder ``run``."""
    config = case.config
    return replace(
        config, model=replace(config.model, path=str(policy)), run=replace(config.run, dir=str(run))
    )
