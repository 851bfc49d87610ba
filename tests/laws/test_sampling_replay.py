"""Sampling replay: engine and trainer have the same truncated distribution; the same update in
every layout; the gradient of the truncated policy, by enumeration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_dppo.config import Config, LossConfig, replace
from megatron_dppo.models import policy as policy_module
from megatron_dppo.models.policy_head import score_responses
from megatron_dppo.models.responses import to_device
from megatron_dppo.rl.losses import compute_token_losses
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.sampling_mask import SamplingMask
from megatron_dppo.rl.types import Group, StepMetadata
from megatron_dppo.rollout.decoding import sample_tokens
from tests.laws.test_agreement import check, configure
from tests.laws.test_split_invariance import (
    GRPO,
    LAYOUTS,
    METRICS,
    ONE,
    assert_same_updates,
    at_the_start,
)
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.small_runs import die, live, rows, small_run, write_run
from tests.steps import VOCAB, config_for, step_of_groups, step_of_sequences

Step = tuple[StepMetadata, list[Group]]
TRUNCATED = "rollout.top_k=12", "rollout.top_p=0.5"
DIFFERENCE = "train/rollout_logprob_abs_diff"


def keep(token: int) -> list[int]:
    """Return the kept ids of a sampled token: one to five ids, in any part of the vocabulary."""
    return list(dict.fromkeys((token * factor) % VOCAB for factor in range(1, 2 + token % 5)))


def with_masks(groups: list[Group]) -> list[Group]:
    made = []
    for group in groups:
        completions = []
        for completion in group.completions:
            sampled = zip(completion.token_ids.tolist(), completion.loss_mask, strict=True)
            mask = SamplingMask.from_lists([keep(token) if own else [] for token, own in sampled])
            completions.append(dataclasses.replace(completion, sampling_mask=mask))
        made.append(dataclasses.replace(group, completions=tuple(completions)))
    return made


def masked_step(ranks: int) -> Step:
    metadata, groups = step_of_groups(ranks)
    return metadata, with_masks(groups)


def masked_sequences(ranks: int) -> Step:
    metadata, groups = step_of_sequences(ranks)
    return metadata, with_masks(groups)


@pytest.mark.parametrize(
    ("step", "names"),
    [
        pytest.param(masked_step, ("tp2 sp", "pp2 vpp2", "cp2", "dp2"), marks=pytest.mark.quick),
        (masked_step, ("cp2 tp2 sp", "cp2 pp2")),
        (masked_sequences, ("cp2", "dp2")),
    ],
)
def test_update_depends_on_no_layout(
    step: Callable[[int], Step], names: tuple[str, ...], ranks: RankPool, tmp_path: Path
) -> None:
    """With a reference, which has the same kept ids, and packs that share prefixes."""
    write_policy(tmp_path)
    alone = config_for(tmp_path, ONE, GRPO, 256, distributed=False, share="off")
    configs = {"start": at_the_start(alone), "reference": alone}
    for name in names:
        configs[name] = config_for(tmp_path, LAYOUTS[name], GRPO, 256, distributed=True)
    calls = {name: (config, name == "cp2", step) for name, config in configs.items()}
    assert_same_updates(ranks, calls, metrics=METRICS)


@pytest.mark.parametrize("layout", ["tp2 sp", "cp2"])
def test_engine_agrees_with_the_actor(
    layout: str, ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    config = configure(policy, LAYOUTS[layout], tmp_path)
    config = replace(config, rollout=replace(config.rollout, top_k=8, top_p=0.5))
    for metrics, _ in ranks.run(2, check, config):
        assert metrics["rollout/agreement_max_diff"] < 1e-4


def live_without_masks(rank: int, size: int, config: Config) -> None:
    def score(*tensors: Any, kept_ids: Any, **settings: Any) -> Any:
        return score_responses(*tensors, **settings)

    with mock.patch.object(policy_module, "score_responses", score):
        live(rank, size, config)


def test_replay_makes_log_probabilities_equal(ranks: RankPool, tmp_path: Path) -> None:
    """In a run with a reference and two updates; the same run without masks differs."""
    folder, settings = write_run(tmp_path), (*TRUNCATED, "loss.kl_coef=0.1", "run.steps=2")
    permissive = "rollout.max_logprob_diff=100", "rollout.max_prob_error=1e30"
    replayed = small_run(folder, tmp_path / "on", *settings, "loss.updates_per_rollout=2")
    without = small_run(folder, tmp_path / "off", *settings, *permissive)
    ranks.in_turn(1, (live, replayed), (live_without_masks, without))
    on, off = (rows(tmp_path / name)[1:] for name in ("on", "off"))
    assert len(on) == len(off) == 2
    assert all(row["train/grad_norm"] > 0 for row in on)
    assert max(row[DIFFERENCE] for row in on) < 2e-6
    assert min(row[DIFFERENCE] for row in off) > 0.3


def test_resumed_run_repeats_the_steps(ranks: RankPool, tmp_path: Path) -> None:
    """From a checkpoint with rollouts of the next step, which were generated before the death."""
    folder, ahead = write_run(tmp_path), (*TRUNCATED, "rollout.ahead=1")
    whole, resumed = (small_run(folder, tmp_path / name, *ahead) for name in ("whole", "resumed"))
    ranks.in_turn(1, (live, whole), (die, resumed), (live, resumed))
    stored = list((tmp_path / "resumed").rglob("rollouts/rank_*.npz"))
    assert any("mask_counts" in np.load(file).files for file in stored)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    assert max(row.get(DIFFERENCE, 0.0) for row in rows(tmp_path / "whole")) < 2e-6


SIZE, LENGTH, TOP_K, TOP_P = 6, 3, 4, 0.85
TEMPERATURE = 0.7


class Toy(torch.nn.Module):
    """Hidden states of a token and its position, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.token = torch.nn.Parameter(torch.randn(SIZE, 8))
        self.position = torch.nn.Parameter(torch.randn(LENGTH + 1, 8))
        self.output = torch.nn.Parameter(0.4 * torch.randn(SIZE, 8))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.token[tokens] + self.position[positions])


def enumerate_policy(policy: Toy) -> Iterator[tuple[list[int], list[list[int]], list[float]]]:
    """Yield each response of the truncated policy, with kept ids and log-probabilities: every
    token that the engine can draw, by a uniform inside its part of the distribution."""
    paths = [([], [], [])]
    for step in range(LENGTH):
        longer = []
        for tokens, kept, logprobs in paths:
            last = torch.tensor([[0, *tokens][-1]])
            logits = policy(last, torch.tensor([step])) @ policy.output.t()
            uniforms = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
            drawn, scores, parts = sample_tokens(
                logits.expand(4000, -1), uniforms, TEMPERATURE, TOP_P, TOP_K
            )
            ids = parts[0][0, : parts[1][0]].tolist()
            assert set(drawn.tolist()) == set(ids)
            for token in ids:
                score = float(scores[drawn == token][0])
                longer.append(([*tokens, token], [*kept, ids], [*logprobs, score]))
        paths = longer
    yield from paths


def reward(tokens: list[int]) -> float:
    return float(np.sin(np.dot(tokens, [1.0, 2.0, 5.0])))


@pytest.mark.parametrize("replayed", [True, False])
def test_expected_gradient_is_that_of_the_truncated_policy(replayed: bool) -> None:
    """Over all responses, and over their pruning. Without kept ids the gradient differs."""
    policy = Toy()
    with torch.no_grad():
        responses = list(enumerate_policy(policy))
    total = sum(np.exp(sum(logprobs)) for *_, logprobs in responses)
    assert total == pytest.approx(1.0, abs=1e-5) and len(responses) > 20
    objective = torch.zeros(())
    for tokens, kept, _ in responses:
        states = policy(torch.tensor([0, *tokens[:-1]]), torch.arange(LENGTH))
        logits = states @ policy.output.t() / TEMPERATURE
        steps = zip(logits, kept, tokens, strict=True)
        chosen = [row[token] - row[ids].logsumexp(0) for row, ids, token in steps]
        objective = objective + torch.stack(chosen).sum().exp() * reward(tokens)
    expected = torch.autograd.grad(objective, list(policy.parameters()))

    loss = torch.zeros(())
    for number, (tokens, kept, logprobs) in enumerate(responses):
        inclusion = (0.3, 0.8, 1.0)[number % 3]
        probability = np.exp(sum(logprobs))
        # A response is sampled, and then kept with its inclusion probability and weight.
        for weight, chance in ((1.0 / inclusion, inclusion), (0.0, 1.0 - inclusion)):
            sample = TrainingSample(
                np.array([0], np.int32),
                np.array(tokens, np.int32),
                np.array(logprobs, np.float32),
                np.ones(LENGTH, bool),
                reward(tokens),
                scale=weight * chance * probability,
                version=0,
                sampling_mask=SamplingMask.from_lists(kept) if replayed else None,
            )
            loss = loss + compute_loss(policy, sample)
    found = torch.autograd.grad(-loss, list(policy.parameters()))
    distance = torch.cat([(a - b).flatten() for a, b in zip(found, expected, strict=True)]).norm()
    scale = torch.cat([each.flatten() for each in expected]).norm()
    assert distance < 2e-5 * scale if replayed else distance > 0.1 * scale


def compute_loss(policy: Toy, sample: TrainingSample) -> torch.Tensor:
    pack = build_pack([sample], 8, pad_id=0, align=1)
    arrays, _ = to_device(pack, torch.device("cpu"), share=None)
    places = arrays["predictors"]
    states = policy(arrays["token_ids"], arrays["position_ids"].clamp(max=LENGTH))
    scores = score_responses(
        states[places],
        policy.output,
        arrays["targets"],
        kept_ids=arrays.get("kept_ids"),
        vocab_size=SIZE,
        temperature=TEMPERATURE,
        tp_group=None,
        chunk_mib=1,
    )
    losses, _ = compute_token_losses(
        resolve_objective(LossConfig(name="rloo")),
        logprobs=scores.logprobs,
        old_logprobs=None,
        engine_logprobs=arrays["engine_logprobs"],
        reference_logprobs=None,
        advantage=arrays["advantage"],
        kl_coef=0.0,
        tis_cap=None,
    )
    return (losses * arrays["scale"]).sum()
