"""One router that replays, and the load of experts; ``laws/test_routing_replay.py`` replays whole
policies."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.models.routing import RouterReplay
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.ranks import RankPool
from tests.steps import VOCAB, build, config_for, held_by, plan_for, step_of_groups

SCORES = torch.tensor(
    [[0.1, 0.9, 0.5, 0.2], [0.8, 0.3, 0.4, 0.7], [0.6, 0.5, 0.1, 0.2], [0.3, 0.4, 0.9, 0.8]]
)
"""Four tokens, which choose the experts (1, 2), (0, 3), (0, 1) and (2, 3)."""
OWN = [[1, 2], [0, 3], [0, 1], [2, 3]]
TARGET = torch.tensor([[2, 1], [1, 2], [255, 255], [3, 0]], dtype=torch.uint8)
"""The first token's own experts in another order, other experts for two tokens; the third token is
unknown."""


def top_k(scores: torch.Tensor, k: int, **groups: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(scores, k, dim=1)


def chosen(router: RouterReplay, scores: torch.Tensor = SCORES) -> list[list[int]]:
    values, experts = router.get_replay_topk(scores, 2, None, None, top_k)
    assert torch.equal(values, scores.gather(1, experts))
    return experts.tolist()


def test_known_tokens_take_the_replayed_experts() -> None:
    router = RouterReplay(unknown=255)
    router.enter(TARGET, recompute=False)
    assert chosen(router) == [[2, 1], [1, 2], OWN[2], [3, 0]]
    router.enter(None, recompute=False)
    assert chosen(router) == OWN


def loads(rank: int, size: int, config: Config) -> dict[str, float]:
    world, learner, _ = build(config)
    metadata, groups = step_of_groups(size)
    metrics = learner.train(
        plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0
    )
    return {
        name.removeprefix("train/busiest_"): metrics[name] for name in metrics if "busiest" in name
    }


def test_busiest_expert_and_rank_are_reported(ranks: RankPool, tmp_path: Path) -> None:
    """In the last two of four layers all tokens go to the same two experts."""
    write_qwen3_moe(tmp_path, Sizes(vocab_size=VOCAB, num_hidden_layers=4), experts=4)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in (2, 3):
        gate = tensors[f"model.layers.{layer}.mlp.gate.weight"].zero_()
        gate[0], gate[1] = (
            1e-3,
            -1e-3,
        )  # with either sign of a token's sum, one of them is the largest
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = config_for(tmp_path, LayoutConfig(dp=2), LossConfig(), 64, distributed=True)
    apart = replace(
        config, layout=LayoutConfig(ep=2, dp=2), model=replace(config.model, recompute="full")
    )
    (replicated, _), (found, other) = ranks.in_turn(2, (loads, config), (loads, apart))
    assert found == other
    for i in range(1, 5):
        assert found[f"expert_{i}"] == replicated[f"expert_{i}"]
        assert replicated[f"rank_{i}"] == 1.0
    for i in (1, 2):
        assert 1 / 4 < found[f"expert_{i}"] < 1 / 2 < found[f"rank_{i}"] < 1.0
