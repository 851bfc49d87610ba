"""Transformer Engine's Adam in Megatron's optimizers: it starts from zeros, resumes, and is never held twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.config import Config, LayoutConfig
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.layer_specs import transformer_engine_installed
from megatron_dppo.models.optimizer import optimizer_parts
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests import fused_adam
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import Weights, build
from tests.trainer.test_checkpoint import STATE, Losses, configure, train

LAYOUT = LayoutConfig(dp=2)

pytestmark = pytest.mark.skipif(
    transformer_engine_installed(), reason="Transformer Engine is installed: tests/gpu asks its own kernels"
)


Updates = tuple[Weights, Losses]


@pytest.fixture(scope="module")
def wheel() -> Path:
    return fused_adam.lay_out_wheel()


def use_te(wheel: Path) -> None:
    """Megatron on Transformer Engine's Adam, and memory that nobody has set is full of NaN."""
    fused_adam.use_in_megatron(wheel)
    torch.empty, torch.empty_like = _poisoned(torch.empty), _poisoned(torch.empty_like)


def train_with_te(rank: int, size: int, wheel: Path, config: Config, stop: int, save: tuple[int, ...]) -> Updates:
    use_te(wheel)
    return train(rank, size, config, stop, save)


def _poisoned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **settings: Any) -> torch.Tensor:
        made = factory(*arguments, **settings)
        return made.fill_(torch.nan) if made.is_floating_point() and not made.is_meta else made

    return make


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), layers=2)


def close(ours: Updates, theirs: Updates) -> None:
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5)
    for name, tensor in theirs[0].items():
        torch.testing.assert_close(ours[0][name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("distributed", [True, False])
def test_updates_start_from_zeros_and_are_those_of_torchs_adam(
    ranks: RankPool, wheel: Path, policy: Path, tmp_path: Path, distributed: bool
) -> None:
    config = configure(policy, tmp_path / "run", LAYOUT, distributed=distributed)
    theirs, ours = ranks.in_turn(2, (train, config, 3, ()), (train_with_te, wheel, config, 3, ()))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)


@pytest.mark.parametrize(("distributed", "dtype"), [(True, "bf16"), (False, "fp32")])
def test_resumed_updates_are_those_of_an_undisturbed_run(
    ranks: RankPool, wheel: Path, policy: Path, tmp_path: Path, distributed: bool, dtype: str
) -> None:
    config = configure(policy, tmp_path / "run", LAYOUT, distributed=distributed, dtype=dtype)
    undisturbed = ranks.run(2, train_with_te, wheel, config, 4, (2,))
    resumed = ranks.run(2, train_with_te, wheel, config, 4, ())
    for (weights, losses), (ours, later) in zip(undisturbed, resumed, strict=True):
        assert later == losses[2:]
        assert all(torch.equal(ours[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(("te_first", "distributed"), [(True, True), (False, False)])
def test_the_one_adam_goes_on_from_the_others_checkpoint(
    ranks: RankPool, wheel: Path, policy: Path, tmp_path: Path, te_first: bool, distributed: bool
) -> None:
    config = configure(policy, tmp_path / "run", LAYOUT, distributed=distributed)
    if te_first:
        undisturbed = ranks.run(2, train_with_te, wheel, config, 4, (2,))
        resumed = ranks.run(2, train, config, 4, ())
    else:
        undisturbed = ranks.run(2, train, config, 4, (2,))
        resumed = ranks.run(2, train_with_te, wheel, config, 4, ())
    for (weights, losses), ours in zip(undisturbed, resumed, strict=True):
        close(ours, (weights, losses[2:]))


def moments(actor: Actor) -> list[int]:
    """Where each of Adam's tensors lies."""
    states = [state for part in optimizer_parts(actor.optimizer) for state in part.optimizer.state.values()]
    return [tensor.data_ptr() for state in states for tensor in state.values()]


def load_and_look(rank: int, size: int, wheel: Path, config: Config) -> tuple[list[int], list[int]]:
    use_te(wheel)
    world, _, policy = build(config)
    before = moments(policy.actor)
    assert Checkpoints(config, world).load(policy.actor) == (2, STATE)
    return before, moments(policy.actor)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_resume_reads_into_the_state_that_is_there(
    ranks: RankPool, wheel: Path, policy: Path, tmp_path: Path, distributed: bool
) -> None:
    config = configure(policy, tmp_path / "run", LAYOUT, distributed=distributed)
    ranks.run(2, train_with_te, wheel, config, 2, (2,))
    for before, after in ranks.run(2, load_and_look, wheel, config):
        assert len(before) > 10
        assert after == before
