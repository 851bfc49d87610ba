"""Clipping by the norm of all gradients, and Adam's state: on the host between steps, and loaded in
place."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dppo.config import LayoutConfig, LossConfig, replace
from megatron_dppo.models.optimizer import OffloadedState, prepare_adam_state
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.laws.test_formula import update
from tests.models.test_actor import assert_same_bits, configure, learned
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, config_for


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A policy without experts, and one with experts, which have an optimizer of their own."""
    folder = tmp_path_factory.mktemp("policies")
    write_qwen3_moe(folder / "experts", Sizes(vocab_size=VOCAB), experts=4)
    return {False: write_policy(folder / "dense", tied=True, layers=2), True: folder / "experts"}


@pytest.mark.parametrize("distributed", [True, False])
def test_experts_are_clipped_by_the_norm_of_all_gradients(
    distributed: bool, ranks: RankPool, paths: dict[bool, Path]
) -> None:
    """Adam with eps = 1 and rate 1 moves weights by small gradients themselves."""
    config = config_for(
        paths[True], LayoutConfig(ep=2, dp=2), LossConfig(), 64, distributed=distributed
    )
    config = replace(config, optimizer=replace(config.optimizer, clip_grad=1e-3))
    (metrics, moved, _), _ = ranks.run(2, update, config, 1.0)
    norm = sum(float(by.double().square().sum()) for by in moved.values()) ** 0.5
    assert metrics["train/grad_norm"] > 0.1
    assert norm == pytest.approx(1e-3, rel=0.02)


@pytest.mark.parametrize(("dtype", "experts"), [("bf16", True), ("fp32", False)])
def test_state_on_the_host_changes_no_bit(
    dtype: str, experts: bool, ranks: RankPool, paths: dict[bool, Path]
) -> None:
    """In fp32 the master weights are the weights, which stay on the device."""
    config = configure(paths[experts], LayoutConfig(dp=2), dtype)
    offloading = replace(config, optimizer=replace(config.optimizer, offload=True))
    ((expected, weights, *_), *_), results = ranks.in_turn(
        2, (learned, config), (learned, offloading)
    )
    for metrics, ours, *_ in results:
        assert metrics == expected
        assert_same_bits(ours, weights)


@pytest.fixture
def adam() -> torch.optim.AdamW:
    """Adam of one parameter, after a step."""
    parameter = torch.nn.Parameter(torch.randn(7))
    adam = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(7)
    adam.step()
    return adam


def offloaded(adam: torch.optim.Optimizer) -> OffloadedState:
    state = OffloadedState(SimpleNamespace(optimizer=adam), [], torch.device("cpu"))
    state.offload()
    return state


def test_loaded_tensors_move_into_the_slots_of_the_host(adam: torch.optim.AdamW) -> None:
    state, (moments,) = offloaded(adam), adam.state.values()
    slot, loaded = moments["exp_avg"].data_ptr(), torch.randn(7)
    moments["exp_avg"] = loaded.clone()
    state.offload()
    assert moments["exp_avg"].data_ptr() == slot
    state.onload()
    assert torch.equal(moments["exp_avg"], loaded)
    assert moments["exp_avg"].data_ptr() != slot


class FusedAdam(torch.optim.Optimizer):
    """Counts steps in the group, and makes new tensors when it loads, as Transformer Engine's Adam
    does."""


def test_fused_adam_loads_into_its_own_tensors(adam: torch.optim.AdamW) -> None:
    """Load a state of torch's Adam, which counts steps for each parameter."""
    parameter = torch.nn.Parameter(torch.randn(7))
    fused = FusedAdam([parameter], {"step": 0})

    def make_state(inner: torch.optim.Optimizer, config: object) -> None:
        inner.state[parameter] = {name: torch.zeros(7) for name in ("exp_avg", "exp_avg_sq")}

    prepare_adam_state(SimpleNamespace(optimizer=fused, config=None, init_state_fn=make_state))
    places = {name: tensor.data_ptr() for name, tensor in fused.state[parameter].items()}
    fused.load_state_dict(adam.state_dict())
    (expected,) = adam.state.values()
    assert {name: tensor.data_ptr() for name, tensor in fused.state[parameter].items()} == places
    for name in places:
        assert torch.equal(fused.state[parameter][name], expected[name])
    assert fused.param_groups[0]["step"] == 1
