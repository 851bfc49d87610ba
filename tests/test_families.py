"""Every family of ``models/families``, found by itself: from transformers' logits to a trained and exported step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.bridge.mapping import parameters
from megatron_dppo.config import (
    ArithmeticConfig,
    Config,
    DataConfig,
    EvalConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    PackConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_dppo.models.families import FAMILIES
from megatron_dppo.models.shape import read_shape
from megatron_dppo.rollout.engine import generate
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.train import train
from tests.bridge.conversions import policy_tensors, same, to_hf, to_megatron, weights
from tests.models.test_logits import assert_equal_in_every_layout, assert_gradients_equal
from tests.policies import trains, write_family
from tests.ranks import RankPool
from tests.rollout.test_local import assert_logprobs_of_a_plain_forward, make_prompts, sampling_of, source_of, tokens_of

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""


def run_of_training(rank: int, size: int, config: Config) -> None:
    train(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_transformers_and_converts_generates_trains_and_is_exported(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    policy = write_family(tmp_path / "policy", family)
    if not trains(policy):
        pytest.skip("this Megatron-Core cannot train it")
    assert_equal_in_every_layout(ranks, policy)
    # A decay's gradient is a sum of large terms: transformers' own in fp32 is 7e-5 from that in fp64.
    most = 1e-4 if read_shape(policy).hybrid else 2e-5
    assert_gradients_equal(ranks, policy, tmp_path / "gradients", most=most)
    assert to_megatron(policy, tmp_path / "megatron", "--verify") == 0
    assert to_hf(tmp_path / "megatron", tmp_path / "back", "--verify") == 0
    assert same(weights(tmp_path / "back"), weights(policy))
    assert_generates(policy)
    assert_trains(ranks, tmp_path, policy)


def assert_generates(policy: Path) -> None:
    """The local engine, from the tensors of the files, of which it misses none in silence."""
    engine = LocalEngine(policy, device=torch.device("cpu"), dtype=torch.float32, max_batch=64)
    stored = policy_tensors(policy)
    for name in stored:
        with pytest.raises(ValueError, match=f"model: {name} is missing.$"):
            engine.update_weights(source_of({each: stored[each] for each in stored if each != name}), version=1)
    engine.update_weights(source_of(stored), version=2)
    reference = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    assert parameters(read_shape(policy)) == reference.num_parameters()
    prompts, sampling = make_prompts(3, 11, 1, 6), sampling_of(temperature=1.7)
    groups = generate(engine, prompts, sampling)
    assert tokens_of(groups) == tokens_of(generate(engine, prompts, sampling))
    assert_logprobs_of_a_plain_forward(reference, prompts, groups, 1.7)


def assert_trains(ranks: RankPool, folder: Path, policy: Path) -> None:
    """Two steps with the local engine, whose log-probabilities are the actor's, and what transformers then loads."""
    run = folder / "run"
    (folder / "reward.py").write_text(REWARD)
    config = Config(
        run=RunConfig(dir=str(run), steps=2),
        model=ModelConfig(path=str(policy)),
        layout=LayoutConfig(tp=2, dp=1, sequence_parallel=True),
        data=DataConfig(
            chat_template=False, max_prompt_tokens=24, arithmetic=ArithmeticConfig(problems=16, eval_problems=2)
        ),
        rollout=RolloutConfig(prompts_per_step=8, samples_per_prompt=4, max_response_tokens=12),
        reward=RewardConfig(function=f"{folder / 'reward.py'}:compute_score"),
        pack=PackConfig(max_tokens=256),
        optimizer=OptimizerConfig(lr=1e-3),
        eval=EvalConfig(problems=0),
    )
    ranks.run(2, run_of_training, config)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["train/rollout_logprob_abs_diff"] < 1e-5 for step in steps] == [True, True]
    assert all(step["train/grad_norm"] > 0 for step in steps)
    _, said = AutoModelForCausalLM.from_pretrained(run / "hf", output_loading_info=True)
    assert not any(said.values()), said
    assert read_shape(run / "hf") == read_shape(policy)
    before, after = weights(policy), weights(run / "hf")
    assert before.keys() == after.keys()
    carried = {name for name in before if name.startswith(read_shape(policy).family.carried)}
    assert {name for name in before if torch.equal(after[name], before[name])} == carried
