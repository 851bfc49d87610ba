"""Transformer Engine's own Python decides whether attention is fused; only cuDNN's answer is a
stand-in."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
import tests.rehearsal.play
from transformer_engine.pytorch.attention.dot_product_attention import utils
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.layer_specs import check_attention
from megatron_dppo.models.shape import PUBLISHED

def check(cp):
    model, layout = ModelConfig(dtype="bf16"), LayoutConfig(tp=2, cp=cp)
    try:
        check_attention(PUBLISHED["qwen3-4b"], model, layout, training=True)
        print("fused")
    except UserError as error:
        print(error)

check(1), check(2)
os.environ["NVTE_FUSED_ATTN"] = "0"
check(1), check(2)
utils.FlashAttentionUtils.is_installed = True
utils.FlashAttentionUtils.version = utils.PkgVersion("2.8.3")
check(1), check(2)
"""


def test_policy_without_fused_attention_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    *by_cudnn, alone, split, flash, split_flash = done.stdout.splitlines()
    assert [*by_cudnn, flash, split_flash] == ["fused"] * 4
    problem = (
        "model.spec = auto: Transformer Engine has no fused attention over packs on NVIDIA H100"
    )
    for refusal in (alone, split):
        assert (
            problem in refusal
            and "pip install --no-build-isolation flash-attn" in refusal
            and "model.spec=torch" in refusal
        )
    assert "layout.cp" in split and "layout.cp" not in alone
