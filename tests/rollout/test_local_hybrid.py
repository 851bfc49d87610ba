"""The local engine's states of gated delta networks: behind prompts, for each sample, and as rows come and go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.decoding import LEAST_COMMON
from megatron_dppo.rollout.engine import generate
from megatron_dppo.rollout.local import LocalEngine
from tests.bridge.conversions import policy_tensors
from tests.policies import write_family
from tests.rollout.test_local import (
    assert_logprobs_of_a_plain_forward,
    make_prompts,
    sampling_of,
    source_of,
    tokens_of,
)

SAMPLES = 4


@pytest.fixture(scope="module", params=["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("policy"), request.param)


@pytest.fixture(scope="module")
def reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def engine(path: Path, max_batch: int) -> LocalEngine:
    made = LocalEngine(path, device=torch.device("cpu"), dtype=torch.float32, max_batch=max_batch)
    made.update_weights(source_of(policy_tensors(path)), version=1)
    return made


def begun_alike(prompts: list[Prompt]) -> list[Prompt]:
    """Prompts that all begin with the same tokens, which are read once."""
    common = np.arange(8, 8 + LEAST_COMMON + 3, dtype=np.int32)
    return [replace(prompt, token_ids=np.concatenate([common, prompt.token_ids])) for prompt in prompts]


@pytest.mark.parametrize("alike", [False, True])
def test_rows_that_come_and_go_keep_their_states(path: Path, reference: PreTrainedModel, alike: bool) -> None:
    """Ten stop tokens of 131 end rows at all lengths; others take their places, in batches of eight rows and of all."""
    prompts = make_prompts(3, 40, 1, 6, 17, 33, 2, 25)
    prompts = begun_alike(prompts) if alike else prompts
    sampling = sampling_of(samples=SAMPLES, stop=tuple(range(10)), temperature=1.7)
    groups = generate(engine(path, 2 * SAMPLES), prompts, sampling)
    assert len({len(completion.token_ids) for group in groups for completion in group}) > 5
    assert_logprobs_of_a_plain_forward(reference, prompts, groups, 1.7)
    assert tokens_of(generate(engine(path, 64), prompts, sampling)) == tokens_of(groups)
