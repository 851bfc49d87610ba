"""What one router is told and says; whole policies in all layouts are ``trainer/test_routing_replay.py``'s matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_dppo.models.routing import RouterReplay

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.2], [0.8, 0.3, 0.4, 0.7], [0.6, 0.5, 0.1, 0.2], [0.3, 0.4, 0.9, 0.8]])
"""Four tokens, which choose the experts (1, 2), (0, 3), (0, 1) and (2, 3)."""
OWN = [[1, 2], [0, 3], [0, 1], [2, 3]]
TARGET = torch.tensor([[2, 1], [1, 2], [255, 255], [3, 0]], dtype=torch.uint8)
"""The first token's own in another order, two of others, and one of which nothing is known."""


def top_k(scores: torch.Tensor, k: int, **groups: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.topk(scores, k, dim=1)


def chosen(router: RouterReplay, scores: torch.Tensor = SCORES) -> list[list[int]]:
    values, experts = router.get_replay_topk(scores, 2, None, None, top_k)
    assert torch.equal(values, scores.gather(1, experts))
    return experts.tolist()


def test_known_tokens_go_where_they_are_told_and_others_where_they_like() -> None:
    router = RouterReplay(unknown=255)
    router.enter(TARGET, torch.tensor([True, True, True, False]), again=False)
    assert chosen(router) == [[2, 1], [1, 2], OWN[2], [3, 0]]
    assert [count.tolist() for count in router.counts] == [[2, 1]], "of the tokens to be counted that are known"
    assert router.chosen is not None and router.chosen.tolist() == [[2, 1], [1, 2], OWN[2], [3, 0]]
    router.enter(None, None, again=False)
    assert chosen(router) == OWN


def test_a_layer_that_runs_again_is_told_what_it_was_told_first() -> None:
    """Two microbatches are on their way before the first one comes back, as in a pipeline."""
    router, other = RouterReplay(unknown=255), TARGET.flip(0)
    for target in (TARGET, other, None):
        router.enter(target, None, again=True)
        chosen(router)
        router.leave()
    assert chosen(router) == [[2, 1], [1, 2], OWN[2], [3, 0]]
    assert chosen(router) == [[3, 0], OWN[1], [1, 2], [2, 1]]
    assert chosen(router) == OWN
    with pytest.raises(IndexError):
        chosen(router)
    router.enter(TARGET, None, again=True)
    router.clear()
    router.leave()
    with pytest.raises(IndexError):
        chosen(router)


def test_gradients_reach_the_scores_of_the_replayed_experts_and_no_others() -> None:
    router, scores = RouterReplay(unknown=255), SCORES.clone().requires_grad_()
    router.enter(TARGET, None, again=False)
    router.get_replay_topk(scores, 2, None, None, top_k)[0].sum().backward()
    assert scores.grad is not None
    assert scores.grad.nonzero().tolist() == [[0, 1], [0, 2], [1, 1], [1, 2], [2, 0], [2, 1], [3, 0], [3, 3]]
