"""The memory model counts what real ranks hold: to the byte where it is exact, but for padding;
else within a tenth."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.config import Config, LayoutConfig, LoraConfig, LossConfig, replace
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import (
    Saved,
    count_activation_bytes,
    count_chunks_in_flight,
    count_persistent_bytes,
)
from megatron_dppo.estimate.workload import Placement, Setup
from megatron_dppo.init import write_model
from megatron_dppo.models.actor import Responses, Sums
from megatron_dppo.models.optimizer import list_optimizers
from megatron_dppo.models.shape import read_shape
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import build, config_for, held_by, plan_for, step_of_groups

MIXTURES = {
    "ep2": LayoutConfig(ep=2, dp=2),
    "tp2 ep2 etp2": LayoutConfig(tp=2, ep=2, dp=2, sequence_parallel=True),
    "tp2 etp1": LayoutConfig(tp=2, etp=1, dp=1, sequence_parallel=True),
    "pp2 ep2": LayoutConfig(pp=2, ep=2, dp=2),
    "pp2, uneven": LayoutConfig(pp=2, first_stage_layers=1, dp=1),
}
LAYOUTS = {
    "one rank": LayoutConfig(dp=1),
    "tp2": LayoutConfig(tp=2, dp=1),
    "tp2 sp": LayoutConfig(tp=2, dp=1, sequence_parallel=True),
    "dp2": LayoutConfig(dp=2),
    **MIXTURES,
}
EAGER = Saved(norms=6, queries=6, keys=4, feed_forward=5, copies=2)
"""Torch's own operators, counted on a CPU. A norm keeps its input, the normed and the scaled
values."""
PADDING = 4 * 128 * 8
"""Bytes by which a buffer may differ from its parameters: buckets end on a multiple, and are cut
there for shards."""


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of distinct storages."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def held(rank: int, size: int, config: Config) -> dict[str, Any]:
    """Bytes that a rank holds, and those that a pack's forward pass keeps for the backward one."""
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata)
    (pack, *_) = learner._build_packs(plan.minibatches[0], held_by(rank, metadata, groups))
    actor = policy.actor
    parameters = list(actor.parameters())
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: list[torch.Tensor] = []
    at_loss: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor)
        return tensor

    def loss(responses: Responses) -> tuple[torch.Tensor, Sums]:
        at_loss.extend(kept)  # the forward pass is over, and the backward one has not begun
        return responses.logprobs.sum(), {}

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        actor.accumulate([pack] * config.layout.min_packs, loss)
    buffers = [
        buffer
        for module in actor.modules
        for buffer in (*module.buffers, *module.expert_parallel_buffers)
    ]
    inner = [part.optimizer for part in list_optimizers(actor.optimizer)]
    state = [
        value
        for one in inner
        for of_parameter in one.state.values()
        for value in of_parameter.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    masters = [
        parameter
        for group in actor.optimizer.param_groups
        for parameter in group["params"]
        if parameter.untyped_storage().data_ptr() not in own
    ]
    return {
        "weights": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "gradients": sum(
            buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in buffers
        ),
        "optimizer": storage_bytes([*state, *masters]),
        "activations": storage_bytes(at_loss),
        "tokens": len(pack.token_ids),
        "stage": world.pp_rank,
    }


def expected(config: Config, size: int, tokens: int, stage: int) -> dict[str, float]:
    shape = read_shape(config.model.path)
    placement = Placement(config.layout, size, (1,) * size, True, size)
    config = replace(config, pack=replace(config.pack, max_tokens=tokens))
    setup = Setup(config, shape, placement, Assumptions(expert_imbalance=1.0))
    return {
        **count_persistent_bytes(setup, stage),
        "activations": count_activation_bytes(setup, stage, EAGER, packs=config.layout.min_packs),
    }


def configured(policy: Path, layout: LayoutConfig, **model: Any) -> Config:
    config = config_for(policy, layout, LossConfig(), 1024, distributed=True, share="off")
    return replace(config, model=replace(config.model, **model))


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("policies")
    sizes = {
        "hidden": 48,
        "layers": 4,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 64,
        "vocab_size": 131,
    }
    write_model(folder / "experts", experts=8, experts_per_token=2, tie=False, **sizes)
    return {
        "dense": write_policy(folder / "dense", layers=4, heads=6, ffn=192),
        "experts": folder / "experts",
    }


STATES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("dense", "tp2", {"dtype": "fp32"}),
    ("dense", "dp2", {"dtype": "bf16"}),
    *(("experts", name, {"dtype": "bf16"}) for name in MIXTURES),
    ("experts", "pp2 ep2", {"dtype": "bf16", "lora": LoraConfig(rank=16)}),
)
"""Policies, layouts and settings of ``model``."""


@pytest.mark.parametrize(("kind", "name", "model"), STATES)
def test_planned_state_equals_real_ranks(
    kind: str, name: str, model: dict[str, Any], ranks: RankPool, policies: dict[str, Path]
) -> None:
    layout = LAYOUTS[name]
    size = layout.tp * layout.pp * (layout.dp or 1)
    config = configured(policies[kind], layout, **model)
    padding = PADDING * (1 if kind == "dense" else 2)
    for found in ranks.run(size, held, config):
        wanted = expected(config, size, found["tokens"], found["stage"])
        assert found["weights"] == wanted["weights"]
        for part in ("gradients", "optimizer"):
            assert wanted[part] > padding
            assert abs(found[part] - wanted[part]) <= padding, (part, found[part], wanted[part])


@pytest.mark.parametrize(
    ("kind", "name", "recompute"),
    [
        ("dense", "one rank", "none"),
        ("dense", "one rank", "full"),
        ("dense", "tp2 sp", "selective"),
        ("experts", "one rank", "none"),
        ("experts", "one rank", "selective"),
        ("experts", "ep2", "none"),
        ("experts", "tp2 etp1", "full"),
        ("experts", "tp2 ep2 etp2", "selective"),
    ],
)
def test_activations_are_within_a_tenth(
    kind: str, name: str, recompute: str, ranks: RankPool, policies: dict[str, Path]
) -> None:
    """A fresh router is uneven by chance; together the ranks have every token once for each of its
    experts."""
    layout = LAYOUTS[name]
    config = configured(policies[kind], layout, recompute=recompute)
    found = ranks.run(layout.tp * (layout.dp or 1), held, config)
    for group in [found] if kind == "experts" else [[rank] for rank in found]:
        wanted = sum(
            expected(config, layout.tp, rank["tokens"], 0)["activations"] for rank in group
        )
        assert sum(rank["activations"] for rank in group) == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize(
    ("stages", "virtual", "packs", "measured"),
    [
        (2, 1, 6, [2, 1]),
        (2, 2, 6, [5, 3]),
        (2, 4, 6, [9, 7]),
        (4, 2, 8, [11, 9, 7, 5]),
        (4, 2, 9, [12, 10, 8, 6]),
        (4, 2, 4, [8, 8, 7, 5]),
        (4, 1, 2, [2, 2, 2, 1]),
    ],
)
def test_passes_in_flight_equal_megatron_s_schedules(
    stages: int, virtual: int, packs: int, measured: list[int]
) -> None:
    """The first five were counted on real ranks: forward passes of a virtual stage without their
    backward pass."""
    layout = LayoutConfig(pp=stages, vpp=virtual)
    assert [count_chunks_in_flight(stage, layout, packs) for stage in range(stages)] == measured
