"""A slow rank is named; the default group is bound to no device."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import initialize


def come_late(rank: int, size: int, reported: Path) -> str:
    world = replace(initialize(LayoutConfig(dp=2), seed=1, timeout_s=60.0), timeout_s=0.5)

    def roll_out() -> None:
        while rank == 1 and not reported.exists():
            time.sleep(0.01)

    try:
        world.run_on_all_ranks(roll_out, description="rollouts")
    except UserError as error:
        reported.touch()
        return str(error)
    except RuntimeError:
        return "torch's own error"
    return "no error"


def test_late_rank_is_named_with_the_setting_and_the_work(ranks, tmp_path):
    leader, late = ranks.run(2, come_late, tmp_path / "reported")
    assert leader.startswith(
        "rollout.timeout_s = 0.5: not every rank finished its rollouts in time"
    )
    assert "1" in leader.split("in time: ")[1]
    assert late == "torch's own error"


def test_default_group_is_bound_to_no_device(monkeypatch):
    """Torch would split the group for weights off a group that is bound."""
    asked: dict[str, Any] = {}

    def record(backend: str, **options: Any) -> None:
        asked.update(options, backend=backend)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", record)
    with pytest.raises(KeyboardInterrupt):
        initialize(LayoutConfig(), seed=1, timeout_s=1.0)
    assert asked["backend"] == "nccl"
    assert "device_id" not in asked
