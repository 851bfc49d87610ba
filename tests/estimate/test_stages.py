"""What a pipeline's stages hold and compute, by hand."""

from __future__ import annotations

import pytest

from tests.estimate.test_plan import of, plan, trainer_parts


def test_a_stage_keeps_activations_of_as_many_packs_as_are_in_flight_in_it() -> None:
    """Under one forward, one backward the first of four stages has a quarter of the layers, and four packs."""
    alone, first_of_four = (
        trainer_parts(of(f"layout.pp={stages}", "layout.tp=4", "model.recompute=none"))["activations"]
        for stages in (1, 4)
    )
    assert first_of_four == pytest.approx(alone, rel=0.05)


def test_a_backward_pass_takes_twice_its_forward_pass_and_the_heads_three_times() -> None:
    phases = plan("model.recompute=none", "loss.kl_coef=0.01", "layout.pp=1").pruned.phases
    forward = phases["reference log-probabilities"]
    assert 3.0 * forward < phases["training"] < 4.0 * forward
