"""The exact norms of the completions' scores, as the policy head gives them on real ranks, are those of the logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.config import LayoutConfig, LossConfig
from megatron_dppo.rl.plan import unpruned
from megatron_dppo.rl.types import Group, StepMetadata
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import build, config_for, held_by, plan_for, step_of_groups, step_of_sequences

Step = Callable[[int], tuple[StepMetadata, list[Group]]]
TEMPERATURE = 0.8
"""Of ``config_for``."""


def measured(rank: int, size: int, path: Path, layout: LayoutConfig, step: Step = step_of_groups) -> np.ndarray:
    config = config_for(path, layout, LossConfig(updates_per_rollout=2), 64, distributed=False)
    world, learner, _ = build(config)
    metadata, groups = step(size)
    plan = plan_for(world, unpruned(config), metadata)
    return learner.measure_score_norms(metadata, plan, held_by(rank, metadata, groups)).score_norms


@torch.no_grad()
def expected(path: Path) -> np.ndarray:
    """√Σ_t ‖e_t − p_t‖² from transformers' logits; what no gradient can come from keeps the engine's figure."""
    model = AutoModelForCausalLM.from_pretrained(path).double()
    metadata, groups = step_of_groups(1)
    score_norms = metadata.score_norms.copy()
    for q, group in enumerate(groups):
        for i, completion in enumerate(group.completions if np.ptp(group.rewards) else ()):
            tokens = torch.from_numpy(np.concatenate([group.prompt.token_ids, completion.token_ids])).long()
            start = len(group.prompt.token_ids)
            logits = model(tokens[None]).logits[0, start - 1 : -1] / TEMPERATURE
            residue = torch.nn.functional.one_hot(tokens[start:], logits.shape[1]) - logits.softmax(dim=-1)
            score_norms[q, i] = residue[torch.from_numpy(completion.loss_mask)].norm()
    return score_norms


def test_the_heads_scores_are_exact_in_every_layout(ranks: RankPool, tmp_path: Path) -> None:
    path = write_policy(tmp_path)
    one = LayoutConfig(dp=1)
    alone, cut = ranks.in_turn(1, (measured, path, one), (measured, path, one, step_of_sequences))
    layouts = (LayoutConfig(tp=2, dp=1), LayoutConfig(dp=2), LayoutConfig(pp=2, dp=1), LayoutConfig(cp=2, dp=1))
    calls = [(measured, path, layout) for layout in layouts]
    for seen in (alone, cut, *ranks.in_turn(2, *calls, (measured, path, layouts[0], step_of_sequences))):
        for of_rank in seen:
            np.testing.assert_allclose(of_rank, expected(path), rtol=1e-4)
