"""Made-up training steps for tests that train a real policy on real ranks."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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
from megatron_dppo.rl.pack import LEAST_SHARED
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.types import Completion, Group, Prompt, StepMetadata, StepPlan
from megatron_dppo.rollout.metadata import build_metadata
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy
from megatron_dppo.trainer.learner import Learner
from tests.ranks import RankPool

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
        rollout=RolloutConfig(
            temperature=0.8, samples_per_prompt=SAMPLES, max_logprob_diff=100.0, max_prob_error=1e30
        ),
        optimizer=OptimizerConfig(lr=1.0, eps=1.0, clip_grad=0.0, distributed=distributed),
    )


def step_of_groups(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """Return a made-up step, the same for every number of ranks.

    - Prompts are pruned, with weights up to 5. Rewards of a group are mixed.
    - Every second response has a segment that the policy did not sample, if the response is long
      enough.
    - In every second group the third response shares a prefix with the second.
    """
    rng = np.random.default_rng(37)  # with this seed the loss is no small difference of its terms
    groups = []
    for index in range(QUERIES):
        prompt = Prompt(index, rng.integers(3, VOCAB, rng.integers(2, 9)).astype(np.int32), "", "")
        lengths_of_group = rng.integers(1, 24, SAMPLES)
        if index % 2:
            lengths_of_group[1:3] = LEAST_SHARED + 1 + lengths_of_group[1:3] % 6
        completions = tuple(
            draw_completion(rng, length, sample) for sample, length in enumerate(lengths_of_group)
        )
        if index % 2:
            common = completions[1].token_ids[:LEAST_SHARED]
            completions[2].token_ids[: len(common)] = common
        rewards = rng.permutation([1.0, 0.0, 0.0, 1.0 if index % 2 else 0.0])
        groups.append(Group(prompt, completions, rewards))
    made = build_metadata(
        groups, np.array([1.0, 0.5, 0.25, 0.2, 0.7, 1.0]), samples=SAMPLES, segments=0, owner=0
    )
    score_norms = rng.uniform(0.5, 2.0, (QUERIES, SAMPLES))
    owners = np.arange(QUERIES) % ranks
    return dataclasses.replace(
        made, score_norms=score_norms, owners=owners, window=float(QUERIES + 3)
    ), groups


def draw_completion(rng: np.random.Generator, length: int, sample: int) -> Completion:
    """Draw tokens and log-probabilities; of an odd ``sample`` three tokens are not sampled by the
    policy."""
    sampled = np.ones(length, bool)
    sampled[2:5] = sample % 2 == 0 or length <= 6
    return Completion(
        rng.integers(3, VOCAB, length).astype(np.int32),
        rng.normal(-3.0, 1.0, length).astype(np.float32),
        sampled,
        np.full(int(length), 0, np.int32),
        "stop",
    )


def step_with_system_messages(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """Return ``step_of_groups`` with longer prompts: all but the first share a prefix, the last two
    a longer prefix."""
    metadata, groups = step_of_groups(ranks)
    message = np.arange(3, 3 + 2 * LEAST_SHARED, dtype=np.int32)
    longer = []
    for group, pieces in zip(groups, (0, 1, 1, 1, 2, 2), strict=True):
        token_ids = np.concatenate([message[: LEAST_SHARED * pieces], group.prompt.token_ids])
        longer.append(
            dataclasses.replace(
                group, prompt=dataclasses.replace(group.prompt, token_ids=token_ids)
            )
        )
    return describe_again(metadata, longer), longer


def step_of_sequences(ranks: int) -> tuple[StepMetadata, list[Group]]:
    """Return ``step_of_groups`` with longer responses in three sequences; the context is all tokens
    before."""
    metadata, groups = step_of_groups(ranks)
    cut = [
        dataclasses.replace(
            group, completions=tuple(in_sequences(group.prompt, each) for each in group.completions)
        )
        for group in groups
    ]
    return describe_again(metadata, cut), cut


def describe_again(metadata: StepMetadata, groups: list[Group]) -> StepMetadata:
    """Return the metadata of changed groups, with the owners, score norms and window of
    ``metadata``."""
    made = build_metadata(groups, metadata.prompt_inclusion, samples=SAMPLES, segments=0, owner=0)
    same = {
        "score_norms": metadata.score_norms,
        "owners": metadata.owners,
        "window": metadata.window,
    }
    return dataclasses.replace(made, **same)


def in_sequences(prompt: Prompt, whole: Completion) -> Completion:
    """Cut a completion of 8 tokens or more into three sequences."""
    length, read = len(whole.token_ids), len(prompt.token_ids)
    if length < 8:
        return whole
    bounds = (0, length // 3, 2 * length // 3, length)
    lengths = [bounds[1], read + bounds[2], read + length]

    def joined(of_prompt: np.ndarray, values: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Return each sequence's values behind ``given`` for its context."""
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
        versions=np.full(sum(lengths), 0, np.int32),
        starts=(lengths[0], lengths[0] + lengths[1]),
    )


def plan_for(
    world: World, config: Config, metadata: StepMetadata, groups: Sequence[Group] = ()
) -> StepPlan:
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


def size_of(layout: LayoutConfig) -> int:
    """Return the ranks of a layout."""
    return layout.tp * layout.pp * layout.cp * (layout.dp or 1)


def run_in_layouts(ranks: RankPool, calls: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Run calls on the ranks of their layouts; calls on equally many ranks share processes.

    Args:
        calls: by name: a function, a configuration and further arguments.

    Returns:
        The results of each call, one per rank.
    """
    found = {}
    for size in {size_of(config.layout) for _, config, *_ in calls.values()}:
        names = [name for name, (_, config, *_) in calls.items() if size_of(config.layout) == size]
        results = ranks.in_turn(size, *(calls[name] for name in names))
        found |= dict(zip(names, results, strict=True))
    return found


def build(config: Config) -> tuple[World, Learner, PolicyParts]:
    world = initialize(config.layout, seed=1, timeout_s=120.0)
    policy = assemble_policy(config, world, temperature=config.rollout.temperature)
    return world, Learner(policy, PhaseTimers()), policy


def held_by(rank: int, metadata: StepMetadata, groups: list[Group]) -> dict[int, Group]:
    return {i: group for i, group in enumerate(groups) if metadata.owners[i] == rank}


def weights_of(policy: PolicyParts, world: World) -> Weights:
    """Return copies of the policy's whole tensors under Hugging Face's names. Collective."""
    return {
        name: tensor.clone()
        for bucket in weight_stream(policy.actor.chunks, world)
        for name, tensor in bucket.items()
    }
