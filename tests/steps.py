"""One step of made-up groups for tests that train a real policy on real ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from megatron_dppo.bridge.stream import weight_stream
from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    LayoutConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PackConfig,
    PruningConfig,
    RolloutConfig,
)
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.parallel.world import World, initialize
from megatron_dppo.rl.pack import LEAST_SHARED, shared_lengths
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.sequences import no_further
from megatron_dppo.rl.types import Completion, Group, Prompt, StepMetadata, StepPlan, VersionSpan, no_segments
from megatron_dppo.rollout.metadata import metadata_of
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy
from megatron_dppo.trainer.learner import Learner

QUERIES, SAMPLES, VOCAB = 6, 4, 131
Weights = dict[str, torch.Tensor]


def config_for(
    path: Path,
    layout: LayoutConfig,
    loss: LossConfig,
    pack_tokens: int,
    distributed: bool,
    share: Literal["on", "off"] = "on",
) -> Config:
    return Config(
        model=ModelConfig(path=str(path)),
        layout=layout,
        loss=loss,
        pruning=PruningConfig(completions=CompletionPruningConfig(keep=0.5), max_weight=5.0),
        pack=PackConfig(max_tokens=pack_tokens, share_prefixes=share),
        rollout=RolloutConfig(temperature=0.8, samples_per_prompt=SAMPLES, max_logprob_diff=100.0, max_prob_error=1e30),
        optimizer=OptimizerConfig(lr=1.0, eps=1.0, clip_grad=0.0, distributed=distributed),
    )


def step_of_groups(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """A step with prompts pruned (weights up to 5), mixed rewards, and every second longer response with a stretch that
    the policy was given and did not sample, and some that begin alike; the same for every number of ranks."""
    rng = np.random.default_rng(37)  # by which a loss is no small difference of its terms
    groups = []
    for index in range(QUERIES):
        prompt = Prompt(index, rng.integers(3, VOCAB, rng.integers(2, 9)).astype(np.int32), "", "")
        lengths_of_group = rng.integers(1, 24, SAMPLES)
        if index % 2:
            lengths_of_group[1:3] = LEAST_SHARED + 1 + lengths_of_group[1:3] % 6
        completions = tuple(
            Completion(
                rng.integers(3, VOCAB, length).astype(np.int32),
                rng.normal(-3.0, 1.0, length).astype(np.float32),
                loss_mask(length, given=sample % 2 == 1 and length > 6),
                (VersionSpan(0, int(length)),),
                "stop",
            )
            for sample, length in enumerate(lengths_of_group)
        )
        if index % 2:  # the third response goes on from within the second
            common = completions[1].token_ids[:LEAST_SHARED]
            completions[2].token_ids[: len(common)] = common
        rewards = rng.permutation([1.0, 0.0, 0.0, 1.0 if index % 2 else 0.0])
        groups.append(Group(prompt, completions, rewards))
    lengths = np.array([[len(c.token_ids) for c in g.completions] for g in groups])
    metadata = StepMetadata(
        prompt_ids=np.arange(QUERIES),
        prompt_inclusion=np.array([1.0, 0.5, 0.25, 0.2, 0.7, 1.0]),
        prompt_lengths=np.array([len(g.prompt.token_ids) for g in groups]),
        response_lengths=lengths,
        shared_lengths=np.array([shared_lengths(len(g.prompt.token_ids), g.completions) for g in groups]),
        sampled_lengths=np.array([[c.loss_mask.sum() for c in g.completions] for g in groups]),
        further_lengths=no_further(lengths.shape),
        rewards=np.array([g.rewards for g in groups]),
        score_norms=rng.uniform(0.5, 2.0, lengths.shape),
        log_ratios=np.zeros((*lengths.shape, 2)),
        teacher=np.full(QUERIES, -1),
        segments=no_segments(lengths.shape),
        versions=np.zeros(lengths.shape, np.int64),
        truncated=np.zeros(lengths.shape, bool),
        owners=np.arange(QUERIES) % ranks,
        window=float(QUERIES + 3),
    )
    return metadata, groups


def step_with_system_messages(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """That of ``step_of_groups``, where all prompts but the first begin with the same tokens, and the last two with
    more of them."""
    metadata, groups = step_of_groups(ranks)
    message = np.arange(3, 3 + 2 * LEAST_SHARED, dtype=np.int32)
    begun = [message[: LEAST_SHARED * number] for number in (0, 1, 1, 1, 2, 2)]
    prompts = [np.concatenate([begin, group.prompt.token_ids]) for begin, group in zip(begun, groups, strict=True)]
    more = np.array([len(begin) for begin in begun])
    return dataclasses.replace(
        metadata,
        prompt_lengths=metadata.prompt_lengths + more,
        shared_lengths=np.where(np.arange(SAMPLES) > 0, metadata.shared_lengths + more[:, None], 0),
    ), [
        dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, token_ids=prompt))
        for group, prompt in zip(groups, prompts, strict=True)
    ]


def step_of_sequences(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """That of ``step_of_groups``, with longer responses cut into three sequences, each of which has all before it for
    its context."""
    metadata, groups = step_of_groups(ranks)
    cut = [
        dataclasses.replace(group, completions=tuple(in_sequences(group.prompt, each) for each in group.completions))
        for group in groups
    ]
    made = metadata_of(cut, metadata.prompt_inclusion, samples=SAMPLES, segments=0, owner=0)
    same = {"score_norms": metadata.score_norms, "owners": metadata.owners, "window": metadata.window}
    return dataclasses.replace(made, **same), cut


def in_sequences(prompt: Prompt, whole: Completion) -> Completion:
    length, read = len(whole.token_ids), len(prompt.token_ids)
    if length < 8:
        return whole
    bounds = (0, length // 3, 2 * length // 3, length)
    lengths = [bounds[1], read + bounds[2], read + length]

    def joined(of_prompt: np.ndarray, values: np.ndarray, given: np.ndarray) -> np.ndarray:
        """The values of the sequences' own tokens, after ``given`` of those before them."""
        parts = [values[: bounds[1]]]
        for first, last in itertools.pairwise(bounds[1:]):
            parts += [of_prompt, given[:first], values[first:last]]
        return np.concatenate(parts)

    nothing = np.zeros(read + length, np.float32)
    return dataclasses.replace(
        whole,
        token_ids=joined(prompt.token_ids, whole.token_ids, whole.token_ids),
        logprobs=joined(nothing[:read], whole.logprobs, nothing),
        loss_mask=joined(nothing[:read] > 0, whole.loss_mask, nothing > 0),
        versions=(VersionSpan(0, sum(lengths)),),
        starts=(lengths[0], lengths[0] + lengths[1]),
    )


def step_of_one_group(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """64 completions of a prompt of one token, the rewards of which are mixed."""
    rng = np.random.default_rng(5)
    completions = tuple(
        Completion(
            rng.integers(3, VOCAB, length).astype(np.int32),
            rng.normal(-3.0, 1.0, length).astype(np.float32),
            loss_mask(length, given=False),
            (VersionSpan(0, int(length)),),
            "stop",
        )
        for length in rng.integers(1, 12, 64)
    )
    rewards = (rng.random(64) < 0.3).astype(np.float64)
    group = Group(Prompt(0, np.array([7], np.int32), "", ""), completions, rewards)
    metadata = metadata_of([group], np.ones(1), samples=64, segments=0, owner=0)
    return dataclasses.replace(metadata, window=1.0), [group]


def loss_mask(length: int, *, given: bool) -> np.ndarray:
    mask = np.ones(length, bool)
    mask[2:5] = not given
    return mask


def plan_for(world: World, config: Config, metadata: StepMetadata, groups: Sequence[Group] = ()) -> StepPlan:
    layout = config.layout
    return plan_step(
        metadata,
        config,
        replicas=world.dp,
        align=layout.row_multiple,
        capacity_multiple=layout.pack_multiple,
        step=0,
        pipeline=layout.pp,
        prompts=[group.prompt.token_ids for group in groups],
    )


def build(config: Config) -> tuple[World, Learner, PolicyParts]:
    world = initialize(config.layout, seed=1, timeout_s=120.0)
    policy = assemble_policy(config, world, temperature=config.rollout.temperature)
    return world, Learner(policy, PhaseTimers()), policy


def held_by(rank: int, metadata: StepMetadata, groups: list[Group]) -> dict[int, Group]:
    return {i: group for i, group in enumerate(groups) if metadata.owners[i] == rank}


def weights_of(policy: PolicyParts, world: World) -> Weights:
    """Copies of the policy's tensors, whole, under Hugging Face's names. Collective."""
    return {
        name: tensor.clone() for bucket in weight_stream(policy.actor.chunks, world) for name, tensor in bucket.items()
    }
