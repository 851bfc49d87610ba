"""Llama 2 and 3, SmolLM2: no query or key norms, no biases; scaled rotary positions from Llama 3.1
on.

Mistral has Llama's layers; some Mistral checkpoints also have a sliding window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_dppo.models.family import ATTENTION, MLP, Family, RopeScaling


@dataclass(frozen=True, slots=True)
class LlamaRopeScaling(RopeScaling):
    """Scaling of Llama 3.1: low frequencies are divided by ``factor``, high frequencies stay, and
    frequencies between are interpolated.

    Source: https://github.com/meta-llama/llama-models, ``apply_scaling``.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def __post_init__(self) -> None:
        """Check the frequency bounds.

        Raises:
            ValueError: the range between low and high frequencies is empty.
        """
        low = self.low_freq_factor
        high = self.high_freq_factor
        if low >= high:
            raise ValueError(
                f"low_freq_factor = {low:g}, which is not below high_freq_factor = {high:g}"
            )

    def scale(self, frequencies: Any) -> Any:
        # Rotations over the original context; the frequency factors are bounds on this number.
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        band = self.high_freq_factor - self.low_freq_factor
        unscaled = ((turns - self.low_freq_factor) / band).clip(0, 1)
        return frequencies * ((1 - unscaled) / self.factor + unscaled)


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    rows=(*ATTENTION, *MLP),
    optional=("head_dim", "num_key_value_heads"),
    supported={
        "attention_bias": (False, None),
        "hidden_act": ("silu",),
        "mlp_bias": (False, None),
        "pretraining_tp": (1, None),
    },
    rope_scalings=(LlamaRopeScaling,),
)

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    rows=LLAMA.rows,
    optional=("head_dim",),
    supported={"hidden_act": ("silu",), "sliding_window": (None,)},
    absent={"sliding_window": 4096},
)
