"""Two ranks of ``PrunedGRPOTrainer`` on gloo: ``test_trl.py`` starts them.

Each rank rolls out its own completions. Those of rank 1 have equal rewards in most groups, so that
rows have to move.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed
from trl import GRPOTrainer

from megatron_dppo.integrations.trl import PrunedGRPOTrainer, Pruning, Row
from tests.integrations.trl_steps import (
    ACCUMULATED,
    SAMPLES,
    draws,
    gradient,
    odd,
    rolled_out,
    trained,
    trainer,
)


def lopsided(completions: list[str], **_: object) -> list[float]:
    """Return rewards of which on rank 1 only the first group may be unequal."""
    found = odd(completions)
    return (
        found if distributed.get_rank() == 0 else found[:SAMPLES] + [0.0] * (len(found) - SAMPLES)
    )


class Watched(PrunedGRPOTrainer):
    """Trainer that records the rows of a rank before and after rows have moved."""

    def _levelled(self, kept: list[Row]) -> tuple[list[Row], int]:
        mine, most = super()._balance_rows(kept)
        self.had, self.has = len(kept), len(mine)
        return mine, most


def gather(value: float | torch.Tensor) -> torch.Tensor:
    """[ranks, …]"""
    local = torch.as_tensor(value)
    every = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
    distributed.all_gather(every, local)
    return torch.stack(every)


def check(policy: Path, folder: Path, loss_type: str) -> None:
    case = {"loss_type": loss_type, "rewards": lopsided, "num_iterations": 2}
    plain, pruned = (
        trainer(policy, folder, **case),
        trainer(policy, folder, Watched, pruning=Pruning(0.3), **case),
    )
    loaded = [rolled_out(made, ACCUMULATED) for made in (plain, pruned)]
    assert not torch.equal(*gather(pruned._buffered_inputs[0]["completion_ids"][:, 0]))
    full = gather(gradient(plain, loaded[0], ACCUMULATED)).mean(dim=0)
    mean, moved = torch.zeros_like(full), 0
    for share in draws(pruned):
        mean += share * gather(gradient(pruned, loaded[1], ACCUMULATED)).mean(dim=0)
        had, has = gather(pruned.had).tolist(), gather(pruned.has).tolist()
        assert sum(had) == sum(has) and max(has) - min(has) <= 1
        moved += had != has
    assert moved
    assert float((mean - full).norm() / full.norm()) < 1e-6


def main() -> None:
    policy, folder = map(Path, sys.argv[1:])
    check(policy, folder, "dr_grpo")
    check(policy, folder, "dapo")
    parameters = gather(
        trained(trainer(policy, folder, Watched, pruning=Pruning(0.3), rewards=lopsided))
    )
    assert torch.equal(parameters[0], parameters[1])
    unpruned = gather(trained(trainer(policy, folder, GRPOTrainer, rewards=lopsided)))
    assert not torch.equal(parameters, unpruned)
    print("as expected", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
