"""Llama's scaled rotary positions. All else of the family is in ``tests/test_families.py``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import check_layout, read_shape
from megatron_dppo.rollout.engine import generate
from megatron_dppo.rollout.local import LocalEngine
from tests.bridge.conversions import weights
from tests.models.test_logits import build, pack, reference_logits
from tests.ranks import RankPool
from tests.rollout.test_local import assert_logprobs_of_a_plain_forward, make_prompts, sampling_of, source_of
from tests.test_families import write_policy

SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SMOLLM2 = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = (200, 40)
"""Of two segments, both longer than what the policy was made for before its positions were scaled."""


def write_scaled(path: Path, **changes: object) -> Path:
    """A Llama whose six rotary frequencies are partly kept, partly interpolated, and partly scaled."""
    write_policy(path, "LlamaForCausalLM")
    config = json.loads((path / "config.json").read_text())
    config |= {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **SCALED}, **changes}
    (path / "config.json").write_text(json.dumps(config))
    return path


def logits(rank: int, size: int, path: Path, layout: LayoutConfig) -> np.ndarray:
    policy, _ = build(path, layout)
    return policy.eval().logits(*pack(LENGTHS, policy.shape.vocab_size)).numpy()


def test_logits_beyond_the_original_length_are_those_of_transformers(ranks: RankPool, tmp_path: Path) -> None:
    policy = write_scaled(tmp_path / "scaled")
    expected = reference_logits(policy, LENGTHS)
    for layout in (LayoutConfig(), LayoutConfig(tp=2, sequence_parallel=True), LayoutConfig(cp=2)):
        for ours in ranks.run(layout.tp * layout.cp, logits, policy, layout):
            np.testing.assert_allclose(ours, expected, atol=1e-4, err_msg=str(layout))
    plain = reference_logits(write_scaled(tmp_path / "plain", rope_scaling=None), LENGTHS)
    assert (plain - expected).abs().max() > 0.1, "the comparison can fail"


def test_the_local_engine_scales_them_likewise(tmp_path: Path) -> None:
    policy = write_scaled(tmp_path)
    engine = LocalEngine(policy, device=torch.device("cpu"), dtype=torch.float32, max_batch=8)
    engine.update_weights(source_of(weights(policy)), version=1)
    prompts = make_prompts(60, 200)
    groups = generate(engine, prompts, sampling_of(temperature=1.7))
    reference = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    assert_logprobs_of_a_plain_forward(reference, prompts, groups, 1.7)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path, factor: float, kind: str) -> None:
    """Also as older files write them, ``type`` for ``rope_type``."""
    scaling = SCALED | {"original_max_position_embeddings": 8192, "factor": factor}
    config = LlamaConfig(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, hidden_size=4096)
    expected, attention = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    write_scaled(tmp_path, rope_theta=5e5, rope_scaling={kind: "llama3", **scaling})
    found = read_shape(tmp_path).rope_scaling
    assert found is not None and attention == 1.0
    frequencies = 1.0 / 5e5 ** (torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    torch.testing.assert_close(found.scale(frequencies), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("changes", "problem", "remedy"),
    [
        ({"attention_bias": True}, "attention_bias = true", "whose attention_bias is false"),
        ({"mlp_bias": True}, "mlp_bias = true", "whose mlp_bias is false"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2", "whose pretraining_tp is 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_type = "dynamic"', 'is "default" or "llama3"'),
        ({"rope_scaling": SCALED | {"rope_type": "llama3", "factor": "8"}}, 'factor = "8"', "fetch the model again"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "no 'factor'", "fetch the model again"),
    ],
)
def test_settings_without_support_are_refused(tmp_path: Path, changes: dict, problem: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        read_shape(write_scaled(tmp_path, **changes))
    assert caught.value.setting == "model.path"
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


def test_sizes_that_older_files_leave_out_are_those_of_transformers(tmp_path: Path) -> None:
    path = write_scaled(tmp_path, head_dim=None, num_key_value_heads=None)
    shape, config = read_shape(path), LlamaConfig.from_pretrained(path)
    assert (shape.head_dim, shape.kv_heads) == (config.head_dim, config.num_key_value_heads) == (12, 4)


def test_smollm2_can_be_cut_into_three_and_not_into_two(tmp_path: Path) -> None:
    LlamaConfig(**SMOLLM2, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.head_dim == 64
    check_layout(shape, LayoutConfig(tp=3))
    with pytest.raises(UserError, match=r"does not divide the 3 key-value heads.*one of 1, 3"):
        check_layout(shape, LayoutConfig(tp=2))
