"""Benchmarks as programs, and the gradients of their windows."""

import dataclasses
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.config import Config
from megatron_dppo.rl.types import Pack
from megatron_dppo.rollout.step_rollouts import CompleteRollouts
from tests.steps import SAMPLES, step_of_groups

ROOT = Path(__file__).parents[2]


def test_help_has_no_warnings() -> None:
    """Of a script that imports Megatron-Core."""
    done = subprocess.run(
        [sys.executable, "benchmarks/estimator.py", "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--rule RULE" in done.stdout and done.stderr == ""


def test_gradients_are_computed_in_groups_of_unequal_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    stages = importlib.import_module("training_stages")

    def count_tokens(actor: object, packs: list[Pack], *_: Any) -> torch.Tensor:
        return torch.tensor([[float(len(pack.token_ids))] for pack in packs])

    monkeypatch.setattr(stages, "gradients", count_tokens)
    metadata, groups = step_of_groups(1)
    rewards = metadata.rewards.copy()
    rewards[[0, 2]] = 1.0
    metadata = dataclasses.replace(metadata, rewards=rewards)
    policy = SimpleNamespace(actor=None, pad_id=0)
    trainer = SimpleNamespace(config=Config(), version=0, policy=policy)
    rollouts = CompleteRollouts(dict(enumerate(groups)), metadata, {}, ())
    live, rows = stages.compute_unit_gradients(trainer, rollouts)
    mixed = [group for group in range(len(groups)) if group not in (0, 2)]
    assert live.tolist() == [SAMPLES * group + each for group in mixed for each in range(SAMPLES)]
    lengths = metadata.prompt_lengths[:, None] + metadata.response_lengths
    assert np.array_equal(rows.numpy().ravel(), lengths[mixed].ravel())
