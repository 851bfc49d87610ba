"""Advantages of completions and of their segments, computed of whole groups before anything is drawn.

Those of a tree's segments are in ``trees.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_dppo.rl.numbers import without_rounding
from megatron_dppo.rl.objectives import Objective
from megatron_dppo.rl.trees import tree_advantages
from megatron_dppo.rl.types import Bools, Floats, StepMetadata

if TYPE_CHECKING:  # prune() is used where there is no pydantic
    from megatron_dppo.config import Config


def group_advantages(rewards: Floats, *, normalise: bool, present: Bools | None = None) -> Floats:
    """How much better each completion was than its group: r − mean, or (r − mean)/std of the group.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2; without the division, Dr.GRPO (arXiv:2503.20783). Rewards that
    differ by rounding are equal, see ``without_rounding``. Whether a group is mixed is decided on the rewards: the mean
    of equal numbers need not equal them in floating point.

    Args:
        rewards: [Q, G].
        normalise: divide by the population standard deviation of the group.
        present: [Q, G], False for what is no part of its group; None: all are. Each group has one part at least.

    Returns:
        [Q, G]; exactly 0.0 in every group whose rewards are all equal, and for what is no part of one.
    """
    present = np.ones_like(rewards, np.bool_) if present is None else present
    rewards = np.where(present, without_rounding(rewards, present), 0.0)
    size = present.sum(axis=1, keepdims=True)
    low = np.where(present, rewards, np.inf).min(axis=1, keepdims=True)
    mixed = np.where(present, rewards, -np.inf).max(axis=1, keepdims=True) > low
    deviation = np.where(present & mixed, rewards - rewards.sum(axis=1, keepdims=True) / size, 0.0)
    if not normalise:
        return deviation
    deviation /= np.where(mixed, np.abs(deviation).max(axis=1, keepdims=True), 1.0)  # squares of tiny ones would vanish
    return deviation / np.where(mixed, np.sqrt((deviation**2).sum(axis=1, keepdims=True) / size), 1.0)


def minibatch_advantages(
    rewards: Floats, prompt_inclusion: Floats, objective: Objective, present: Bools | None = None
) -> Floats:
    """The advantages of a minibatch's completions under an objective, [Q, G].

    ``others`` is RLOO's r − mean of the others (arXiv:2402.14740). ``batch`` and ``whiten`` are REINFORCE++'s r − mean
    and division by the deviation (arXiv:2501.03262): moments of the whole minibatch, in which prompts count alike. A
    rolled out prompt stands for 1/π, so that moments of a window whose prompts were pruned are estimated: advantages
    are then ratios, whose bias vanishes as 1/(number of prompts). The draw of completions does not touch them.

    Args:
        rewards: [Q, G].
        prompt_inclusion: [Q]
        objective: of the run.
        present: as in ``group_advantages``.
    """
    if not len(rewards):
        return np.zeros_like(rewards)
    present = np.ones_like(rewards, np.bool_) if present is None else present
    size = present.sum(axis=1, keepdims=True)
    weight = np.where(present, 1.0 / size, 0.0) / prompt_inclusion[:, None]
    weight /= weight.sum()
    result = deviation = group_advantages(rewards, normalise=False, present=present)
    if objective.baseline == "batch":
        rewards = without_rounding(rewards.reshape(1, -1), present.reshape(1, -1)).reshape(rewards.shape)
        mixed = np.ptp(rewards[present]) > 0.0
        result = deviation = np.where(present & mixed, rewards - (weight * rewards).sum(), 0.0)
    elif objective.baseline == "others":
        result = deviation * (size / np.maximum(size - 1, 1))
    elif objective.normalise:
        result = group_advantages(rewards, normalise=True, present=present)
        if objective.deviation == "sample":
            result *= np.sqrt((size - 1) / size)
    if objective.whiten and (largest := np.abs(deviation).max()) > 0.0:  # squares of tiny ones would vanish
        result = result / largest
        result = result / np.sqrt((weight * result * (deviation / largest)).sum())
    return result


def role_advantages(part: StepMetadata, objective: Objective) -> Floats:
    """[Q, G, R], the advantage of each role's tokens in a conversation in which the policy speaks in several roles.

    Token t, which role ρ has sampled in conversation i of a prompt, has the advantage

        A_ρi = r_ρi − mean of r_ρj over the conversations j of the prompt in which ρ speaks

    (divided, whitened or held against the minibatch, as the objective says); 0 where the role does not speak. That
    number of conversations does not depend on what conversation i says, where it is one in which ρ speaks, so that the
    mean of the others is a baseline: with ``rloo`` the expected gradient is

        Σ_ρ E[r_ρ Σ_{t of ρ} ∇log π(y_t | y_<t)]

    Each term is the gradient of a role's expected reward by what that role says, the other roles being a part of its
    environment. They are the same policy and change with it, so that the sum is in general the gradient of no
    objective. Roles that all have the same reward are the exception.

    Two conversations of a solver and a critic, with the rewards 1 and 0 of the one and 0 and 2 of the other, have
    [[[1, −1], [−1, 1]]] under GRPO.
    """
    result = np.zeros(part.segments.shape)
    for role in range(part.segments.shape[2]):
        known = part.segments[..., role]
        speaks = known["tokens"] > 0
        rows = np.flatnonzero(speaks.any(axis=1))
        inclusion = part.prompt_inclusion[rows]
        result[rows, :, role] = minibatch_advantages(known["reward"][rows], inclusion, objective, speaks[rows])
    return result


def advantages_of_segments(part: StepMetadata, config: Config, objective: Objective) -> Floats:
    """[Q, G, S], the advantage of each segment; S = 1 where a completion has one. All are 0 where a teacher alone is
    trained on, and those of masked completions, whose rewards still count in the baselines of the others."""
    segments = part.segments.shape[-1]
    if not config.loss.distillation.use_task_rewards:
        return np.zeros((*part.rewards.shape, segments or 1))
    if config.rollout.tree.branches:
        return tree_advantages(part.rewards, part.segments, config.rollout.tree)
    if segments:
        advantages = role_advantages(part, objective)
    else:
        advantages = minibatch_advantages(part.rewards, part.prompt_inclusion, objective)[..., None]
    return np.where(masked_completions(part, config)[..., None], 0.0, advantages)


def masked_completions(part: StepMetadata, config: Config) -> Bools:
    """[Q, G], True for completions without any loss: truncated ones, with ``loss.mask_truncated``."""
    return part.truncated & config.loss.mask_truncated


def completion_advantages(part: StepMetadata, segments: Floats) -> Floats:
    """[Q, G], the one advantage by which the rules of pruning know a completion whose segments have ``segments``.

    A segment counts by its tokens as well, so little that it matters only where all norms are 0.
    """
    if not part.segments.shape[-1]:
        return segments[..., 0]
    return whole_advantage(segments, part.segments["square"] + 1e-12 * part.segments["tokens"])


def whole_advantage(parts: Floats, squares: Floats) -> Floats:
    """One advantage for a completion whose parts have several.

    Its size is such that |a|·s = √Σ_l A_l² s_l², with s_l the score norms of the parts and s² their sum of squares. A
    completion of the one advantage a would have a gradient of the same norm, where the scores of its tokens are
    orthogonal. So A² is a second moment over tokens, weighted by the squares of their scores. The sign is that of Σ_l
    A_l s_l².

    Args:
        parts: [Q, G, n], the advantages A_l.
        squares: [Q, G, n], s_l².

    Returns:
        [Q, G]; 0 where all parts with s_l > 0 have the advantage 0, and nowhere else.
    """
    share = squares / np.maximum(squares.sum(axis=-1, keepdims=True), np.finfo(float).tiny)
    size = np.sqrt((parts**2 * share).sum(axis=-1))
    return np.where((parts * share).sum(axis=-1) < 0.0, -size, size)
