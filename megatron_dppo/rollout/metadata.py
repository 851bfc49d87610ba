"""Metadata of groups for the planner: arrays of lengths, rewards and norms, without tokens."""

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
    """Build the metadata of one rank's groups, without the window.

    Args:
        groups: Q groups, possibly zero.
        inclusion: [Q], inclusion probability of each prompt.
        samples: G, completions of each group.
        segments: S, segments of each completion; 0: one advantage per completion.
        owner: rank with the groups.
        distillation: settings with the teacher of each group.
        role_rewards: Q arrays [G, S], rewards of the roles in each conversation; empty: no roles.
        numbers: Q × G, ``parts`` of each completion; empty: no parts.
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
    # Mean 0 and deviation 1 for a teacher with a full distribution: the ratio is not known yet.
    log_ratios[teacher >= 0, :, 1] = 1.0
    for ratios, source, group in zip(log_ratios, sources, groups, strict=True):
        if distillation.has_server(source):
            ratios[:] = [_compute_log_ratios(c) for c in group.completions]

    # A part missing from a completion is NaN, because completions may report different parts.
    numbers_by_name: dict[str, NDArray[Any]] = {}
    for name in sorted({name for group in numbers for row in group for name in row}):
        values = []
        for group_numbers in numbers:
            values.append([row.get(name, np.nan) for row in group_numbers])
        numbers_by_name[name] = np.array(values, np.float64)

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
        parts=numbers_by_name,
    )


def _compute_score_norm(completion: Completion, tokens: slice | Bools = slice(None)) -> float:
    """Compute √Σ_t (1 − p_t)² over sampled ``tokens``, a free proxy for the norm of the score."""
    sampled = completion.logprobs[tokens][completion.loss_mask[tokens]]
    return float(np.linalg.norm(-np.expm1(sampled.astype(np.float64))))


def _compute_log_ratios(completion: Completion) -> tuple[float, float]:
    """Compute a row of ``StepMetadata.log_ratios`` for a completion read by a teacher server."""
    mask = completion.loss_mask
    if completion.teacher_logprobs is None:
        raise ValueError(
            f"a completion of {len(mask)} tokens has no log-probabilities of its teacher"
        )
    if not mask.any():
        return 0.0, 0.0
    logprobs = completion.logprobs[mask].astype(np.float64)
    ratio = completion.teacher_logprobs[mask] - logprobs
    # The constant prevents weights of 0 if the policy was certain of all tokens.
    weight = np.expm1(logprobs) ** 2 + 1e-12
    mean = np.average(ratio, weights=weight)
    return float(mean), float(np.sqrt(np.average((ratio - mean) ** 2, weights=weight)))


def _build_segments(completion: Completion, count: int) -> list[tuple[int, float, float, float]]:
    """Build a row of ``SEGMENT`` for each segment, with reward 0."""
    rows = []
    for number in range(count):
        tokens: Bools = np.equal(np.asarray(completion.segments), number)
        logprob = float(completion.logprobs[tokens].sum(dtype=np.float64))
        rows.append((int(tokens.sum()), _compute_score_norm(completion, tokens) ** 2, 0.0, logprob))
    return rows


def compute_role_rewards(metadata: StepMetadata, roles: Sequence[str]) -> dict[str, float]:
    """Compute ``rollout/role_reward/…``: each role's mean reward, over conversations with the
    role."""
    if not roles:
        return {}
    reward = metadata.segments["reward"]
    present = metadata.segments["tokens"] > 0
    count = np.maximum(present.sum(axis=(0, 1)), 1)
    means = np.where(present, reward, 0.0).sum(axis=(0, 1)) / count
    return {
        f"rollout/role_reward/{role}": float(mean) for role, mean in zip(roles, means, strict=True)
    }


def compute_staleness(metadata: StepMetadata, version: int, *, bound: int) -> dict[str, float]:
    """Compute the staleness of a step's rollouts.

    The lag of a completion is ``version`` minus the oldest version of a token; 0 for offline
    rollouts.

    Args:
        metadata: metadata of the step.
        version: version of the weights to train.
        bound: greatest permitted lag, ``rollout.ahead``.

    Returns:
        - ``rollout/stale_tokens``: fraction of tokens in completions with tokens of older weights.
        - ``staleness/max`` and ``staleness/mean``: lag over completions, in versions.
        - ``staleness/bound``: the bound.

    Raises:
        UserError: a lag exceeds the bound.
    """
    versions = metadata.versions
    lengths = metadata.sampled_lengths
    lag = np.where(versions == OFFLINE, 0, version - versions)
    oldest = int(lag.max(initial=0))
    # Late completions are not dropped, because they are the long completions.
    if oldest > bound:
        problem = f"a completion for training has tokens of weights that are {oldest} updates old"
        remedy = (
            "Look for a component that generates with other weights (rollout.conversation, a "
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
