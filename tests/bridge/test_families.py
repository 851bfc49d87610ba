"""Qwen2.5 and Qwen3-MoE train on real ranks, and an update does not depend on the layout (Law 1)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

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
    replace,
)
from megatron_dppo.data.vocabulary import character_tokenizer, write_tokenizer
from megatron_dppo.train import train
from tests.bridge.directories import FAMILIES, Sizes
from tests.ranks import RankPool
from tests.steps import config_for
from tests.test_split_invariance import GRPO, assert_same_update, learned

UPDATE_LAYOUTS = {
    "tp2 sp": (2, LayoutConfig(tp=2, dp=1, sequence_parallel=True)),
    "tp2 sp pp2": (4, LayoutConfig(tp=2, pp=2, dp=1, sequence_parallel=True)),
    "tp2 sp dp2": (4, LayoutConfig(tp=2, dp=2, sequence_parallel=True)),
}


@pytest.mark.parametrize("family", ["Qwen2.5", "Qwen3-MoE"])
def test_update_does_not_depend_on_the_layout(ranks: RankPool, tmp_path: Path, family: str) -> None:
    FAMILIES[family](tmp_path, Sizes())
    config = config_for(tmp_path, LayoutConfig(dp=1), GRPO, 64, distributed=False)
    start = replace(config, optimizer=replace(config.optimizer, lr=1e-30))
    (_, before), *_ = ranks.run(1, learned, start, False)
    [expected] = ranks.run(1, learned, config, False)
    for size, layout in UPDATE_LAYOUTS.values():
        other = config_for(tmp_path, layout, GRPO, 64, distributed=True)
        assert_same_update(ranks.run(size, learned, other, False)[0], expected, before)


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""


def run_of_training(rank: int, size: int, config: Config) -> None:
    train(config)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("Qwen2.5", LayoutConfig(pp=2, dp=1)), ("Qwen3-MoE", LayoutConfig(tp=2, dp=1, sequence_parallel=True))],
    ids=["Qwen2.5 pp2", "Qwen3-MoE tp2"],
)
def test_a_family_trains_with_the_local_engine_and_is_exported_for_transformers(
    ranks: RankPool, tmp_path: Path, family: str, layout: LayoutConfig
) -> None:
    policy, run = tmp_path / "policy", tmp_path / "run"
    FAMILIES[family](policy, Sizes())
    write_tokenizer(character_tokenizer(), policy, max_tokens=128)
    (tmp_path / "reward.py").write_text(REWARD)
    config = Config(
        run=RunConfig(dir=str(run), steps=2),
        model=ModelConfig(path=str(policy)),
        layout=layout,
        data=DataConfig(
            chat_template=False, max_prompt_tokens=24, arithmetic=ArithmeticConfig(problems=16, eval_problems=2)
        ),
        rollout=RolloutConfig(prompts_per_step=8, samples_per_prompt=4, max_response_tokens=12),
        reward=RewardConfig(function=f"{tmp_path / 'reward.py'}:compute_score"),
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
    before, after = (load_file(path / "model.safetensors") for path in (policy, run / "hf"))
    assert before.keys() == after.keys()
    assert not any(torch.equal(after[name], before[name]) for name in before)
