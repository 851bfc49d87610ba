"""Qwen2.5 and Qwen3-MoE on real ranks: Laws 1 and 4, and every parameter where its table says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_dppo.bridge.load import bind
from megatron_dppo.bridge.mapping import entries, expected_tensors
from megatron_dppo.bridge.stream import weight_stream
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
from megatron_dppo.data.vocabulary import character_tokenizer, write_tokenizer
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.train import train
from tests.bridge.directories import Sizes, write_qwen2, write_qwen3, write_qwen3_moe
from tests.bridge.on_ranks import loaded_policy
from tests.ranks import RankPool
from tests.steps import config_for
from tests.test_split_invariance import GRPO, assert_same_update, learned

FAMILIES: dict[str, Callable[..., PolicyShape]] = {
    "Qwen3": write_qwen3,
    "Qwen2.5": write_qwen2,
    "Qwen3-MoE": write_qwen3_moe,
}
LAYOUTS = {
    "one": LayoutConfig(),
    "tp2": LayoutConfig(tp=2, sequence_parallel=True),
    "pp2": LayoutConfig(pp=2),
    "tp2pp2": LayoutConfig(tp=2, pp=2, sequence_parallel=True),
}


def stream_back(rank: int, size: int, path: Path, layout: LayoutConfig, dtype: str) -> list[str]:
    """Every name that is streamed, after its tensor has been compared with the directory's."""
    model, shape, world = loaded_policy(path, layout, dtype)
    stored = load_file(path / "model.safetensors")
    names = []
    for bucket in weight_stream(model, shape, world, bucket_mib=1):
        for name, tensor in bucket.items():
            assert torch.equal(tensor, stored[name]), f"{name} has changed"
            names.append(name)
    return sorted(names)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["Qwen2.5", "Qwen3-MoE"])
def test_round_trip_is_the_identity(ranks: RankPool, tmp_path: Path, family: str, layout: LayoutConfig) -> None:
    shape = FAMILIES[family](tmp_path, Sizes(tie_word_embeddings=layout.pp == 1), dtype=torch.bfloat16)
    expected = sorted(expected_tensors(shape))
    assert expected == sorted(load_file(tmp_path / "model.safetensors"))
    count = layout.tp * layout.pp
    assert ranks.run(count, stream_back, tmp_path, layout, "bf16") == [expected] * count


def stored_shapes(rank: int, size: int, path: Path, layout: LayoutConfig) -> dict[str, tuple[int, ...]]:
    """Whole shapes of what this rank would write parts of, by their keys in Megatron's distributed format."""
    model, _, _ = loaded_policy(path, layout)
    parts: list[ShardedTensor] = []
    for value in model.sharded_state_dict().values():
        parts += value.build() if isinstance(value, ShardedTensorFactory) else [value]
    return {part.key: part.global_shape for part in parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoints_keys_are_the_tables_with_layers_and_experts_leading(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    shape = FAMILIES[family](tmp_path, Sizes())
    expected = {entry.row.key: entry.stored_shape for entry in entries(shape)}
    for layout in (LAYOUTS["one"], LAYOUTS["tp2pp2"]):
        stored: dict[str, tuple[int, ...]] = {}
        for part in ranks.run(layout.tp * layout.pp, stored_shapes, tmp_path, layout):
            stored |= part
        assert stored == expected


def bind_as(rank: int, size: int, path: Path, changes: dict[str, object]) -> str:
    model, shape, world = loaded_policy(path, LayoutConfig())
    with pytest.raises(ValueError) as caught:
        bind(model, replace(shape, **changes), world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Qwen2.5", {"architecture": "Qwen3ForCausalLM"}, "0 parameters of the model are .*q_layernorm"),
        ("Qwen3", {"architecture": "Qwen2ForCausalLM"}, "0 parameters of the model are .*linear_qkv.bias"),
        ("Qwen3-MoE", {"architecture": "Qwen3ForCausalLM", "experts": 0}, "0 parameters of the model are .*fc1"),
        ("Qwen3-MoE", {"experts": 4}, "router.weight has shape .5, 24., and the mapping makes it .4, 24."),
    ],
)
def test_a_model_of_another_family_or_with_other_experts_is_refused(
    ranks: RankPool, tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    FAMILIES[family](tmp_path, Sizes())
    [refusal] = ranks.run(1, bind_as, tmp_path, changes)
    assert re.search(message, refusal), refusal


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


@pytest.mark.parametrize(("family", "name"), [("Qwen2.5", "pp2"), ("Qwen3-MoE", "tp2")])
def test_a_family_trains_with_the_local_engine_and_is_exported_for_transformers(
    ranks: RankPool, tmp_path: Path, family: str, name: str
) -> None:
    policy, run = tmp_path / "policy", tmp_path / "run"
    FAMILIES[family](policy, Sizes())
    write_tokenizer(character_tokenizer(), policy, max_tokens=128)
    (tmp_path / "reward.py").write_text(REWARD)
    config = Config(
        run=RunConfig(dir=str(run), steps=2),
        model=ModelConfig(path=str(policy)),
        layout=replace(LAYOUTS[name], dp=1),
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
