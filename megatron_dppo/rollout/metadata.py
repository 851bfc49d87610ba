"""Metadata of groups for the planner: arrays of lengths, rewards and norms, and no tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import DistillationConfig
from megatron_dppo.data.offline import OFFLINE
from megatron_dppo.errors import UserError
from megatron_dppo.rl.numbers import round_rewards
from megatron_dppo.rl.pack import compute_shared_lengths
from megatron_dppo.rl.sequences import compute_further_lengths
from megatron_dppo.rl.types import SEGMENT, Bools, Completion, Floats, Group, StepMetadata


def build_metadata(
    groups: Sequence[Group],
    inclusion: Floats,
    samples: int,
    segments: int,
    owner: int,
    distillation: DistillationConfig = DistillationConfig(),  # noqa: B008
    role_rewards: Sequence[Floats] = (),
    numbers: Sequence[Sequence[Mapping[str, float]]] = (),
) -> StepMetadata:
    """The metadata of one rank's groups, without the window that they stand for.

    Args:
        groups: Q of them; there may be none.
        inclusion: [Q], of their prompts.
        samples: G, completions of each.
        segments: S, those of each completion; 0 where it has one advantage.
        owner: the rank.
        distillation: says who teaches which of them.
        role_rewards: Q of [G, S], the rewards of the roles in each conversation; empty: there are
            no roles.
        numbers: Q of G, the ``parts`` of each completion; empty: there are none.
    """
    shape = (len(groups), samples)

    def table(
        row: Callable[[Group], Sequence[float] | Floats], dtype: type = np.int64
    ) -> NDArray[Any]:
        return np.array([row(group) for group in groups], dtype).reshape(shape)

    parts = np.zeros((*shape, segments), SEGMENT)
    if segments:
        parts.ravel()[:] = [
            row
            for group in groups
            for c in group.completions
            for row in _build_segments(c, segments)
        ]
    for into, rewards in zip(parts, role_rewards, strict=False):
        into["reward"] = round_rewards(rewards.T).T
    sources = [group.prompt.data_source for group in groups]
    teacher = np.array([distillation.find_model_index(source) for source in sources], np.int64)
    log_ratios = np.zeros((*shape, 2))
    log_ratios[teacher >= 0, :, 1] = 1.0
    for ratios, source, group in zip(log_ratios, sources, groups, strict=True):
        if distillation.has_server(source):
            ratios[:] = [_compute_log_ratios(c) for c in group.completions]

    return StepMetadata(
        prompt_ids=np.array([g.prompt.id for g in groups], np.int64),
        prompt_inclusion=inclusion.astype(np.float64),
        prompt_lengths=np.array([len(g.prompt.token_ids) for g in groups], np.int64),
        response_lengths=table(lambda g: [len(c.token_ids) for c in g.completions]),
        shared_lengths=table(
            lambda g: compute_shared_lengths(len(g.prompt.token_ids), g.completions)
        ),
        sampled_lengths=table(lambda g: [int(c.loss_mask.sum()) for c in g.completions]),
        further_lengths=compute_further_lengths([g.completions for g in groups], samples),
        rewards=round_rewards(table(lambda g: g.rewards, np.float64)),
        score_norms=table(lambda g: [_compute_score_norm(c) for c in g.completions], np.float64),
        log_ratios=log_ratios,
        teacher=teacher,
        segments=parts,
        versions=table(lambda g: [c.oldest_version for c in g.completions]),
        truncated=table(lambda g: [c.finish_reason == "length" for c in g.completions], np.bool_),
        owners=np.full(len(groups), owner, np.int64),
        window=0.0,
        parts={
            name: np.array(
                [[of.get(name, np.nan) for of in group] for group in numbers], np.float64
            )
            for name in sorted({name for group in numbers for of in group for name in of})
        },
    )


def _compute_score_norm(completion: Completion, tokens: slice | Bools = slice(None)) -> float:
    """√Σ_t (1 − p_t)² over some of the tokens, a proxy for the norm of their score that costs
    nothing."""
    sampled = completion.logprobs[tokens][completion.loss_mask[tokens]]
    return float(np.linalg.norm(-np.expm1(sampled.astype(np.float64))))


def _compute_log_ratios(completion: Completion) -> tuple[float, float]:
    """A row of ``StepMetadata.log_ratios``, of a completion that a server has read.

    A token counts a little more than its weight, so little that it matters only where the policy
    was sure of all.
    """
    mask = completion.loss_mask
    if completion.teacher_logprobs is None:
        raise ValueError(
            f"a completion of {len(mask)} tokens came without its teacher's log-probabilities"
        )
    if not mask.any():
        return 0.0, 0.0
    logprobs = completion.logprobs[mask].astype(np.float64)
    ratio = completion.teacher_logprobs[mask] - logprobs
    weight = np.expm1(logprobs) ** 2 + 1e-12
    mean = np.average(ratio, weights=weight)
    return float(mean), float(np.sqrt(np.average((ratio - mean) ** 2, weights=weight)))


def _build_segments(completion: Completion, count: int) -> list[tuple[int, float, float, float]]:
    """A row of ``SEGMENT`` for each segment, without a reward of its own."""
    rows = []
    for number in range(count):
        tokens: Bools = np.equal(np.asarray(completion.segments), number)
        logprob = float(completion.logprobs[tokens].sum(dtype=np.float64))
        rows.append((int(tokens.sum()), _compute_score_norm(completion, tokens) ** 2, 0.0, logprob))
    return rows


def compute_role_rewards(metadata: StepMetadata, roles: Sequence[str]) -> dict[str, float]:
    """``rollout/role_reward/…``, the mean reward of each role, over the conversations in which it
    speaks."""
    if not roles:
        return {}
    reward = metadata.segments["reward"]
    speaks = metadata.segments["tokens"] > 0
    count = np.maximum(speaks.sum(axis=(0, 1)), 1)
    means = np.where(speaks, reward, 0.0).sum(axis=(0, 1)) / count
    return {
        f"rollout/role_reward/{role}": float(mean) for role, mean in zip(roles, means, strict=True)
    }


def compute_staleness(metadata: StepMetadata, version: int, *, bound: int) -> dict[str, float]:
    """How much older than ``version`` the weights are that rolled out a step.

    Args:
        metadata: of the step.
        version: of the weights that it trains.
        bound: versions that a completion may be older, ``rollout.ahead``.

    Returns:
        ``rollout/stale_tokens``, the share of tokens in completions that older weights have made,
        if only in part; ``staleness/max`` and ``staleness/mean``, over completions, how many
        versions older the oldest of these weights are, where offline rollouts count as none; and
        ``staleness/bound``.

    Raises:
        UserError: if a completion is older than that. It is not dropped: what is late is long.
    """
    versions = metadata.versions
    lengths = metadata.sampled_lengths
    lag = np.where(versions == OFFLINE, 0, version - versions)
    oldest = int(lag.max(initial=0))
    if oldest > bound:
        problem = (
            "a completion that a step is to train on has tokens of weights that are "
            f"{oldest} updates old"
        )
        remedy = (
            "Look for what generates with weights of its own (rollout.conversation, a "
            "server), or raise it"
        )
        raise UserError("rollout.ahead", bound, problem, remedy)
    return {
        "rollout/stale_tokens": float(lengths[versions != version].sum())
        / max(float(lengths.sum()), 1.0),
        "staleness/max": float(oldest),
        "staleness/mean": float(lag.sum()) / max(np.size(lag), 1),
        "staleness/bound": float(bound),
    }
