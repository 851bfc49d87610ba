"""Plans of the published configurations, in layouts that tests count by hand."""

from pathlib import Path

from megatron_dppo.config import Config
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import estimate_actor_memory, resolve_shape
from megatron_dppo.estimate.plan import Plan, make_plan
from megatron_dppo.estimate.workload import Setup, assign_gpus
from megatron_dppo.settings import load_config

ROOT = Path(__file__).parents[2]
LARGE = str(ROOT / "configs" / "qwen3_32b_dppo.yaml")
SMALL = str(ROOT / "configs" / "qwen3_4b_math.yaml")
EXPERTS = str(ROOT / "configs" / "qwen3_235b_a22b_dppo.yaml")
MIXTURE = str(ROOT / "configs" / "qwen3_30b_a3b_dppo.yaml")
WHOLE = ("layout.first_stage_layers=null", "layout.last_stage_layers=null", "pack.max_tokens=16384")
PLAIN = {
    LARGE: ("layout.tp=8", "layout.pp=2", *WHOLE, "cluster.nodes=4", "cluster.server_nodes=4"),
    SMALL: ("model.recompute=full", "rollout.launch.count=6", "rollout.launch.tp=1"),
    MIXTURE: ("layout.pp=1", "layout.ep=8", *WHOLE, "cluster.nodes=2", "cluster.server_nodes=2"),
    EXPERTS: (
        "layout.tp=2", "layout.cp=2", "layout.ep=16", "pack.max_tokens=16384",
        "layout.first_stage_layers=11",
        "layout.last_stage_layers=11", "layout.vpp=1", "cluster.nodes=16",
        "cluster.server_nodes=16",
    ),
}  # fmt: skip
"""The layouts that these tests count by hand; those of the files are the fastest."""


def of(*overrides: str, file: str = LARGE) -> Config:
    return load_config(file, [*PLAIN.get(file, ()), *overrides])


def plan(*overrides: str, file: str = LARGE, **assumed: float) -> Plan:
    return make_plan(of(*overrides, file=file), Assumptions(**assumed))


def setup(config: Config, **assumed: float) -> Setup:
    shape = resolve_shape(config.model.path)
    return Setup(config, shape, assign_gpus(config, shape), Assumptions(**assumed))


def trainer_parts(config: Config) -> dict[str, float]:
    return estimate_actor_memory(setup(config)).parts
