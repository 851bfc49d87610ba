"""Scores of a policy in shards are those of the whole policy in one process, whatever the layout."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.compress.asking import writing_nothing
from megatron_dppo.compress.calibration import batches
from megatron_dppo.compress.choose import shapley_values
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.live import Live
from megatron_dppo.compress.reader import Reader, Whole
from megatron_dppo.config import Config, LayoutConfig, ModelConfig, PackConfig
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.world import initialize
from megatron_dppo.trainer.assemble import assemble_frozen
from tests.ranks import RankPool

DENSE = {
    "tp2": LayoutConfig(tp=2, dp=1),
    "tp2 sp": LayoutConfig(tp=2, dp=1, sequence_parallel=True),
    "pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=1),
    "cp2": LayoutConfig(cp=2, dp=1),
}
EXPERTS = {
    "ep2 dp2": LayoutConfig(ep=2, dp=2),
    "tp2 ep2": LayoutConfig(tp=2, ep=2, etp=1, dp=1, sequence_parallel=True),
}
CUTS = {
    "units": Cut((0, 1, 2, 3), neurons=(tuple(range(7, 70)),) * 4, silenced=(1,)),
    "groups": Cut((0, 2, 3), groups=((1,),) * 4),
    "channels": Cut((0, 1, 2, 3), channels=(*range(9), *range(20, 48))),
}
CUTS_OF_EXPERTS = {
    "experts": Cut((0, 1), experts=((0, 3, 4), (1, 2, 5))),
    "channels": Cut((0, 1), channels=tuple(range(3, 19))),
}
MOST = 15
"""Tokens of a sequence: fewer than the longest has."""


def found_by(reader: Reader) -> dict[str, Any]:
    """All that scores are made of."""
    dense = not reader.shape.experts
    activity = reader.activity()
    found = {field.name: getattr(activity, field.name) for field in fields(activity)}
    found["cosines"] = activity.cosines.diagonal(1)
    found |= {"loss": reader.loss(), "shapley": shapley_values(reader, "loss", 0, seed=1)}
    with reader.without(attention=[0, reader.shape.num_layers - 1]):
        found["without attention"] = reader.loss()
    if dense:
        found["squares"], found["columns"] = reader.weights_of_neurons()
    for name, cut in (CUTS if dense else CUTS_OF_EXPERTS).items():
        with reader.as_cut(cut):
            found[f"loss of {name}"] = reader.loss()
    assert reader.loss() == found["loss"], "the policy is as it was"
    return found


def in_shards(rank: int, size: int, path: Path, layout: LayoutConfig, answers: list[WorkedAnswer]) -> dict[str, Any]:
    config = Config(model=ModelConfig(path=str(path)), layout=layout, pack=PackConfig(max_tokens=32))
    world = initialize(layout, seed=1, timeout_s=60.0)
    parts = assemble_frozen(config, world, temperature=1.0)
    live = Live(parts, answers, MOST)
    with pytest.raises(UserError, match="shapley-logits"):
        live.costs("logits", [()])
    with live.without(blocks=[0]):
        absent = live.loss()
    with writing_nothing(parts.actor, [0]):
        assert live.loss() == pytest.approx(absent, rel=1e-6), "engines are told of absence by zeros"
    return found_by(live)


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        found, right = (np.asarray(value, np.float64) for value in (ours[name], expected))
        scale = abs(theirs["loss"]) if name == "shapley" else 0.0  # a small difference of losses
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5 * scale, err_msg=f"{where}: {name}")


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_scores_depend_on_no_layout(
    family: str, ranks: RankPool, policy: Path, mixture: Path, answers: list[WorkedAnswer]
) -> None:
    path, layouts, dtype = policy, DENSE, torch.float64
    if family == "experts":
        path, layouts, dtype = mixture, EXPERTS, torch.float32  # torch multiplies experts' in no other
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    read = list(batches(answers, max_tokens=MOST, device=torch.device("cpu")))
    whole = found_by(Whole(model, read_shape(path), read))
    results = ranks.in_turn(2, *((in_shards, path, layout, answers) for layout in layouts.values()))
    for name, of_ranks in zip(layouts, results, strict=True):
        for rank, ours in enumerate(of_ranks):
            assert_same(ours, whole, f"{name}, rank {rank}")
