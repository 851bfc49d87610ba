"""Small policies, and sequences that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.compress.calibration import Batch, make_batches
from megatron_dppo.data.prompts import SupervisedExample
from megatron_dppo.init import build_character_tokenizer, write_tokenizer
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.policies import write_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("compress") / "policy")


@pytest.fixture
def model(policy: Path) -> Any:
    """A copy of the policy for each test, in fp64."""
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64).eval()


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of two layers with six experts, two of them for each token."""
    path = tmp_path_factory.mktemp("mixture") / "policy"
    write_qwen3_moe(path, Sizes(), experts=6)
    write_tokenizer(build_character_tokenizer(), path, max_tokens=128)
    return path


@pytest.fixture(scope="session")
def answers() -> list[SupervisedExample]:
    rng = np.random.default_rng(3)
    lengths = [(3, 9), (7, 2), (5, 5), (2, 11)]
    return [
        SupervisedExample(*(rng.integers(3, 131, n).astype(np.int32) for n in pair))
        for pair in lengths
    ]


@pytest.fixture(scope="session")
def batches(answers: list[SupervisedExample]) -> list[Batch]:
    return make_batches(answers, 512, torch.device("cpu"))
