"""Transformer Engine's layers on one GPU, in bf16: parity, the laws as far as one GPU goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.layer_specs import has_transformer_engine
from megatron_dppo.models.optimizer import list_optimizers
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.trainer.checkpoint import Checkpoints
from megatron_dppo.trainer.learner import PolicyLoss
from tests.laws.test_split_invariance import reverse_order
from tests.ranks import RankPool
from tests.steps import Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and has_transformer_engine()),
        reason="Transformer Engine runs on CUDA, and this machine lacks one of them",
    ),
]
TEMPERATURE = 0.8
"""Of ``config_for``."""


def configure(path: Path, spec: str, **optimizer: Any) -> Config:
    config = config_for(path, LayoutConfig(dp=1), LossConfig(), 64, distributed=True)
    return replace(
        config,
        model=replace(config.model, spec=spec, dtype="bf16"),
        optimizer=replace(config.optimizer, **optimizer),
    )


def state_of(policy: Actor) -> list[torch.Tensor]:
    """Return moments, and master weights that are not the weights themselves."""
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    inner = [part.optimizer for part in policy.optimizer.chained_optimizers]
    masters = [master for one in inner for group in one.param_groups for master in group["params"]]
    moments = [
        one.state[m][name] for one in inner for m in one.state for name in ("exp_avg", "exp_avg_sq")
    ]
    return [m for m in masters if m.untyped_storage().data_ptr() not in weights] + moments


def over_nccl() -> None:
    """The pool's ranks meet over gloo; a GPU's gradients are not its matter."""
    dist.destroy_process_group()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def rows_of_a_step() -> list[TrainingSample]:
    """Every completion of the made-up step, with advantages of both signs."""
    rng = np.random.default_rng(1)
    _, groups = step_of_groups(1)
    rows = []
    for group in groups:
        for each in group.completions:
            tokens = (group.prompt.token_ids, each.token_ids, each.logprobs, each.loss_mask)
            rows.append(
                TrainingSample(*tokens, float(rng.normal()), 1.0 / len(each.token_ids), version=0)
            )
    return rows


def scored(rank: int, size: int, config: Config) -> list[np.ndarray]:
    """The log-probabilities of every completion, all of them in one pack."""
    over_nccl()
    _, _, policy = build(config)
    rows = rows_of_a_step()
    pack = build_pack(rows, capacity=1024, pad_id=0, align=1)
    (logprobs,) = policy.actor.log_probabilities([pack])
    return np.split(logprobs, np.cumsum([len(row.response_ids) for row in rows])[:-1])


@torch.no_grad()
def by_transformers(path: Path, dtype: torch.dtype) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda().eval()
    found = []
    for row in rows_of_a_step():
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long().cuda()
        logits = model(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1].float() / TEMPERATURE
        found.append(
            logits.log_softmax(-1).gather(1, ids[len(row.prompt_ids) :, None])[:, 0].cpu().numpy()
        )
    return np.concatenate(found)


def test_te_is_as_close_to_fp32_as_transformers_and_torch_are_in_bf16(
    ranks: RankPool, policy: Path
) -> None:
    exact = by_transformers(policy, torch.float32)
    error = {"transformers": np.abs(by_transformers(policy, torch.bfloat16) - exact).mean()}
    for spec in ("torch", "te"):
        [ours] = ranks.run(1, scored, configure(policy, spec))
        error[spec] = np.abs(np.concatenate(ours) - exact).mean()
    assert 0 < error["te"] < 2 * max(error["torch"], error["transformers"]), error


def learned(
    rank: int, size: int, config: Config, backwards: bool
) -> tuple[dict[str, float], Weights]:
    over_nccl()
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    plan = plan_for(world, config, metadata)
    plan = reverse_order(plan) if backwards else plan
    metrics = learner.train(plan, held_by(rank, metadata, groups), step=1, version=0)
    return metrics, {
        name: tensor.float().cpu() for name, tensor in weights_of(policy, world).items()
    }


def test_an_update_does_not_depend_on_the_order_or_the_size_of_packs(
    ranks: RankPool, policy: Path
) -> None:
    config = configure(policy, "te")
    large = replace(config, pack=replace(config.pack, max_tokens=400))
    [(expected, _)] = ranks.run(1, learned, config, False)
    for other, backwards in ((config, True), (large, False)):
        [(metrics, _)] = ranks.run(1, learned, other, backwards)
        assert metrics["train/tokens"] == expected["train/tokens"]
        for name in ("train/grad_norm", "train/entropy_loss"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-2), name


def moments_are_zero(rank: int, size: int, config: Config) -> bool:
    over_nccl()
    torch.full(
        (2**26,), torch.nan, device="cuda"
    )  # freed at once: what memory that nobody sets will hold
    _, _, policy = build(config)
    states = [
        state
        for part in list_optimizers(policy.actor.optimizer)
        for state in part.optimizer.state.values()
    ]
    assert states
    return all(not tensor.any() for state in states for tensor in state.values())


def test_adam_starts_from_zeros_in_memory_that_was_used_before(
    ranks: RankPool, policy: Path
) -> None:
    assert ranks.run(1, moments_are_zero, configure(policy, "te")) == [True]


def test_state_on_the_host_and_overlap_change_no_bit(ranks: RankPool, policy: Path) -> None:
    [(expected, weights)] = ranks.run(1, learned, configure(policy, "te"), False)
    [(metrics, ours)] = ranks.run(
        1, learned, configure(policy, "te", offload=True, overlap=True), False
    )
    assert metrics == expected
    assert all(torch.equal(ours[name], weights[name]) for name in weights)


def room_for_state(rank: int, size: int, config: Config) -> tuple[int, list[int], bool]:
    """Bytes of the optimizer's state; bytes allocated without, with and again without it; whether
    it is pinned."""
    over_nccl()
    _, _, policy = build(config)
    waiting, state = policy.actor._offloaded, state_of(policy.actor)
    assert waiting is not None
    allocated = []
    for move in (waiting.offload, waiting.onload, waiting.offload):
        move()
        allocated.append(torch.cuda.memory_allocated())
    return (
        sum(tensor.nbytes for tensor in state),
        allocated,
        all(tensor.is_pinned() for tensor in state),
    )


def test_state_on_the_host_leaves_its_memory_on_the_device_to_others(
    ranks: RankPool, policy: Path
) -> None:
    [(needed, (without, within, after), pinned)] = ranks.run(
        1, room_for_state, configure(policy, "te", offload=True)
    )
    assert pinned
    assert within - without >= needed > 0
    assert after == without


def resumed_from_the_background(rank: int, size: int, config: Config, resume: bool) -> Weights:
    """The weights after two updates; between them a checkpoint is begun, or gone on from."""
    over_nccl()
    world, learner, policy = build(config)
    metadata, groups = step_of_groups(size)
    checkpoints = Checkpoints(config, world)
    if resume:
        assert checkpoints.load(policy.actor) == (1, {})
    for step in range(1 if resume else 0, 2):
        learner.train(
            plan_for(world, config, metadata),
            held_by(rank, metadata, groups),
            step=step + 1,
            version=0,
        )
        if step == 0:
            checkpoints.save(policy.actor, 1, {})
    checkpoints.finish()
    return {name: tensor.float().cpu() for name, tensor in weights_of(policy, world).items()}


@pytest.mark.parametrize("offload", [False, True])
def test_a_forked_writer_holds_the_state_of_its_step(
    ranks: RankPool, policy: Path, tmp_path: Path, offload: bool
) -> None:
    """As it lies on the device or in pinned memory, of which the update after it changes every
    byte."""
    config = configure(policy, "te", offload=offload)
    config = replace(
        config, run=replace(config.run, dir=str(tmp_path), checkpoint_in_background=True)
    )
    [expected] = ranks.run(1, resumed_from_the_background, config, False)
    [ours] = ranks.run(1, resumed_from_the_background, config, True)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def gradients(
    rank: int, size: int, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all completions in one pack; the weighted sum of each one's own; of one pack with those
    weights. fp32."""
    over_nccl()
    _, _, policy = build(config)
    loss = PolicyLoss(resolve_objective(config.loss), kl_coef=0.0, tis_cap=None, version=0)
    rows = rows_of_a_step()
    weights = np.random.default_rng(2).choice([0.0, 1.0, 3.0], len(rows))

    def gradient(some: Sequence[TrainingSample]) -> torch.Tensor:
        pack = build_pack(some, capacity=1024, pad_id=0, align=1)
        policy.actor.accumulate([pack], loss)
        return torch.cat([p.main_grad.flatten() for p in policy.actor.parameters()]).double().cpu()

    whole = gradient(rows)
    total = sum(
        (weight * gradient([row]) for row, weight in zip(rows, weights, strict=True)),
        torch.zeros_like(whole),
    )
    weighted = gradient(
        [
            dataclasses.replace(row, scale=row.scale * w)
            for row, w in zip(rows, weights, strict=True)
            if w
        ]
    )
    return whole, total, weighted


def test_a_pruned_gradient_is_the_weighted_sum_of_its_completions(
    ranks: RankPool, policy: Path
) -> None:
    """From which unbiasedness follows for every plan: the expectation of a weight is one."""
    [(whole, total, weighted)] = ranks.run(1, gradients, configure(policy, "te"))
    assert float((weighted - total).norm()) < 0.02 * float(total.norm())
    assert float((weighted - whole).norm()) > 0.2 * float(whole.norm()), "the comparison can fail"
