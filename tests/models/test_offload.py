"""The optimizer's state in the host's memory: nothing of it is left behind, and no bit of an update changes."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.models import actor
from megatron_dppo.models.optimizer import OffloadedState
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.models.test_actor import configure, learned
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, Weights


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Of a policy without experts, and of one with experts, which have an optimizer of their own."""
    folder = tmp_path_factory.mktemp("policies")
    write_qwen3_moe(folder / "experts", Sizes(vocab_size=VOCAB))
    return {False: write_policy(folder / "dense", tied=True, layers=2), True: folder / "experts"}


def state_of(policy: actor.Actor) -> list[torch.Tensor]:
    """Moments, and the master weights that are not the weights themselves."""
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    inner = [part.optimizer for part in policy.optimizer.chained_optimizers]
    masters = [master for one in inner for group in one.param_groups for master in group["params"]]
    moments = [one.state[m][name] for one in inner for m in one.state for name in ("exp_avg", "exp_avg_sq")]
    return [m for m in masters if m.untyped_storage().data_ptr() not in weights] + moments


def learned_and_watched(rank: int, size: int, config: Config) -> tuple[dict[str, float], Weights, dict[str, int]]:
    """As ``learned``, and the number of optimizers and of tensors of their state."""
    found: dict[str, int] = {}
    on_device: list[StorageWeakRef] = []
    accumulate, squares, policies = actor.Actor.accumulate, actor.gradient_squares, []

    def passes(self: actor.Actor, *arguments: Any) -> Any:
        policies[:], state = [self], state_of(self)
        (host,) = {tensor.untyped_storage().data_ptr() for tensor in state}
        assert all(storage.expired() for storage in on_device), "what the last step used is given up"
        found.update(
            optimizers=len(self.optimizer.chained_optimizers), tensors=len(state), used=len(on_device), host=host
        )
        return accumulate(self, *arguments)

    def step(*arguments: Any) -> torch.Tensor:
        state = state_of(policies[0])
        assert found["host"] not in {tensor.untyped_storage().data_ptr() for tensor in state}
        on_device[:] = [StorageWeakRef(tensor.untyped_storage()) for tensor in state]
        return squares(*arguments)

    with mock.patch.object(actor.Actor, "accumulate", passes), mock.patch.object(actor, "gradient_squares", step):
        metrics, weights, _ = learned(rank, size, config)
    assert found["used"] == found["tensors"]
    return metrics, weights, found


@pytest.mark.parametrize(
    ("size", "dtype", "experts"),
    [(1, "bf16", False), (2, "bf16", False), (2, "bf16", True), (2, "fp32", False)],
    ids=["bf16", "dp2 bf16", "dp2 bf16 with experts", "dp2 fp32, whose master weights are the weights"],
)
def test_state_on_the_host_but_for_the_step_changes_no_bit(
    ranks: RankPool, paths: dict[bool, Path], size: int, dtype: str, experts: bool
) -> None:
    config = configure(paths[experts], LayoutConfig(dp=size))
    config = replace(config, model=replace(config.model, dtype=dtype))
    offloading = replace(config, optimizer=replace(config.optimizer, offload=True))
    ((expected, weights, _), *_), results = ranks.in_turn(size, (learned, config), (learned_and_watched, offloading))
    for metrics, ours, found in results:
        assert found["optimizers"] == 1 + experts
        assert metrics == expected
        assert [tensor for tensor in weights if not torch.equal(ours[tensor], weights[tensor])] == []


def test_tensors_that_take_the_place_of_others_move_into_their_slots() -> None:
    """As those of Transformer Engine's Adam do when a checkpoint is loaded."""
    master = torch.nn.Parameter(torch.randn(7))
    adam = torch.optim.AdamW([master])
    master.grad = torch.ones(7)
    adam.step()
    state = OffloadedState(SimpleNamespace(optimizer=adam), [], torch.device("cpu"))
    state.leave_device()
    slot = adam.state[master]["exp_avg"].data_ptr()
    loaded = torch.randn(7)
    adam.state[master]["exp_avg"] = loaded.clone()
    state.leave_device()
    assert adam.state[master]["exp_avg"].data_ptr() == slot
    state.return_to_device()
    assert torch.equal(adam.state[master]["exp_avg"], loaded)
    assert adam.state[master]["exp_avg"].data_ptr() != slot


def test_no_fork_has_the_state_that_the_device_goes_on_writing_into() -> None:
    master = torch.nn.Parameter(torch.randn(7))
    adam = torch.optim.AdamW([master])
    OffloadedState(SimpleNamespace(optimizer=adam), [], torch.device("cpu")).leave_device()
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # of a death that is wanted
        master.data.sum().item()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it reads memory that it does not have, instead of some that changes"
