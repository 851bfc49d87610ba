"""What a pipeline's stages hold and compute, by hand."""

from __future__ import annotations

import pytest

from megatron_dppo.config import Config, LayoutConfig
from megatron_dppo.estimate.memory import FUSED, activation_bytes
from megatron_dppo.estimate.parameters import shape_of
from megatron_dppo.estimate.placement import place
from tests.estimate.test_plan import of, plan


def activations(config: Config, stage: int) -> float:
    shape = shape_of(config.model.path)
    return activation_bytes(config, shape, place(config, shape), stage, FUSED)


def test_a_stage_keeps_activations_of_as_many_packs_as_are_in_flight_in_it() -> None:
    """Under one forward, one backward the first of four has four packs in flight, the third two."""
    config = of("layout.pp=4", "layout.tp=4", "model.recompute=none")
    assert config.layout == LayoutConfig(pp=4, tp=4, dp=config.layout.dp, sequence_parallel=True)
    first, second, third = (activations(config, stage) for stage in range(3))
    assert (first, second) == (pytest.approx(2 * third), pytest.approx(1.5 * third))


def test_the_head_multiplies_once_more_for_its_gradient_than_a_layer_does() -> None:
    """A layer's backward pass takes twice its forward pass, and the head's three times."""
    phases = plan("model.recompute=none", "loss.kl_coef=0.01", "layout.pp=1").pruned.phases
    forward = phases["reference log-probabilities"]
    assert 3.0 * forward < phases["training"] < 4.0 * forward
