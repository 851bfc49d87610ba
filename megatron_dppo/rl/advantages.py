"""How rewards become advantages, of whole groups, before anything is drawn: estimators, and who has which.

An estimator is a function from rewards [Q, G] and columns to advantages [Q, G], or to Q lists of G arrays [L], one
advantage for each of a response's tokens. Its columns are

- ``inclusion``: [Q], the probability with which each prompt was rolled out.
- ``present``: [Q, G] of bool, False for what is no part of its group: the conversations in which a role does not speak.
- ``lengths``: [Q, G], L, the tokens of each response.
- ``reward/NAME``: [Q, G], the number NAME that the reward function returned besides; NaN where it returned none.

Advantages of a tree's segments are in ``trees.py``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.errors import UserError
from megatron_dppo.rl.numbers import without_rounding
from megatron_dppo.rl.trees import tree_advantages
from megatron_dppo.rl.types import Bools, Floats, StepMetadata

if TYPE_CHECKING:  # prune() is used where there is no pydantic
    from megatron_dppo.config import Config

SETTING = "loss.advantage"
ROUNDING = 1e-9
"""An advantage below this, in a group of equal rewards, is a rounding error."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """A function from rewards to advantages, and two facts about it.

    Estimator(lambda rewards, columns: rewards - rewards.mean(axis=1, keepdims=True))
    """

    advantages: Callable[[Floats, Mapping[str, NDArray[Any]]], Any]
    zero_if_equal: bool = True
    """Whether completions of a group of equal rewards have the advantage 0."""
    batch_moments: bool = False
    """Whether moments of the whole minibatch go into it, which are estimated where prompts are pruned."""


def group_advantages(rewards: Floats, *, normalise: bool, present: Bools | None = None, less: int = 0) -> Floats:
    """How much better each completion was than its group: r − mean, or (r − mean)/std of the group.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2; without the division, Dr.GRPO (arXiv:2503.20783). Rewards that
    differ by rounding are equal, see ``without_rounding``. Whether a group is mixed is decided on the rewards: the mean
    of equal numbers need not equal them in floating point.

    Args:
        rewards: [Q, G].
        normalise: divide by the standard deviation of the group.
        present: [Q, G], False for what is no part of its group; None: all are. Each group has one part at least.
        less: 1 for the sample's standard deviation, over G − 1; 0 for the population's, over G.

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
    result = deviation / np.where(mixed, np.sqrt((deviation**2).sum(axis=1, keepdims=True) / size), 1.0)
    return result * np.sqrt((size - 1) / size) if less else result


def normalised(rewards: Floats, columns: Mapping[str, NDArray[Any]], less: int = 0) -> Floats:
    """GRPO's (r − mean)/std of the group."""
    return group_advantages(rewards, normalise=True, present=columns["present"], less=less)


def centred(rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Dr.GRPO's r − mean of the group."""
    return group_advantages(rewards, normalise=False, present=columns["present"])


def leave_one_out(rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """RLOO's r − mean of the others (arXiv:2402.14740)."""
    size = columns["present"].sum(axis=1, keepdims=True)
    return centred(rewards, columns) * (size / np.maximum(size - 1, 1))


def batch_normalised(rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """REINFORCE++'s (r − mean)/std of the minibatch (arXiv:2501.03262)."""
    present = columns["present"]
    rewards = without_rounding(rewards.reshape(1, -1), present.reshape(1, -1)).reshape(rewards.shape)
    mixed = np.ptp(rewards[present]) > 0.0
    return whitened(np.where(present & mixed, rewards - (_weights(columns) * rewards).sum(), 0.0), columns)


def whitened(advantages: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Advantages divided by their root mean square over the minibatch, as REINFORCE++ with a baseline has those of
    groups."""
    largest = np.abs(advantages).max()
    if largest == 0.0:
        return advantages
    scaled = advantages / largest  # squares of tiny ones would vanish
    result: Floats = scaled / np.sqrt((_weights(columns) * scaled * scaled).sum())
    return result


def _weights(columns: Mapping[str, NDArray[Any]]) -> Floats:
    """[Q, G], of a minibatch's completions in its moments: prompts count alike, and a rolled out prompt stands for 1/π.

    The moments of a window whose prompts were pruned are thus estimated. Advantages are then ratios, whose bias
    vanishes as 1/(number of prompts). The draw of completions does not touch them.
    """
    present = columns["present"]
    each = np.where(present, 1.0 / present.sum(axis=1, keepdims=True), 0.0) / columns["inclusion"][:, None]
    weights: Floats = each / each.sum()
    return weights


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(normalised),
    "grpo_sample": Estimator(partial(normalised, less=1)),
    "dr_grpo": Estimator(centred),
    "rloo": Estimator(leave_one_out),
    "reinforce_pp": Estimator(batch_normalised, zero_if_equal=False, batch_moments=True),
    "reinforce_pp_baseline": Estimator(lambda r, columns: whitened(centred(r, columns), columns), batch_moments=True),
}

_OWN: dict[str, Estimator] = {}


def adopt(name: str, function: Callable[[Floats, Mapping[str, NDArray[Any]]], Any]) -> None:
    """Have a user's function be the estimator of this name, in this process. Its facts are its attributes."""
    facts = {fact: getattr(function, fact) for fact in ("zero_if_equal", "batch_moments") if hasattr(function, fact)}
    _OWN[name] = Estimator(function, **facts)


def estimator_named(name: str) -> Estimator:
    """An estimator of the table, or one that was adopted."""
    return ESTIMATORS.get(name) or _OWN[name]


def estimated(name: str, rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """[Q, G, S], the advantages that an estimator gives: S = 1, or the most tokens that a response has.

    Raises:
        UserError: a user's function raised, or what it returned is not an advantage for each completion or token.
    """
    if not len(rewards):
        return np.zeros((*rewards.shape, 1))
    if name in ESTIMATORS:
        return np.asarray(ESTIMATORS[name].advantages(rewards, columns))[..., None]
    try:
        rewards = without_rounding(rewards, columns["present"])
        found = _checked(_OWN[name].advantages(rewards, columns), columns["lengths"])
        mixed = group_advantages(rewards, normalise=False, present=columns["present"]).any(axis=1)
        found[~mixed & (np.abs(found).max(axis=(1, 2)) < ROUNDING)] = (
            0.0  # the mean of equal numbers may differ from them
        )
        return found
    except (Exception, SystemExit) as error:
        problem = f"failed for rewards of {len(rewards)} prompts:\n{traceback.format_exc(limit=-2)}"
        remedy = "Mend it: docs/recipes/advantage.md says what it returns"
        raise UserError(SETTING, name, problem, remedy) from error


def _checked(returned: Any, lengths: NDArray[Any]) -> Floats:
    """
    Raises:
        ValueError: it has another shape, or a number that is not finite.
    """
    if not any(np.ndim(each) for group in returned for each in group):
        result = np.array(returned, np.float64)[..., None]
        if result.shape[:-1] != lengths.shape:
            raise ValueError(f"advantages of shape {result.shape[:-1]} for rewards of {lengths.shape}")
    else:
        result = np.zeros((*lengths.shape, int(lengths.max())))
        for into, group, counts in zip(result, returned, lengths.tolist(), strict=True):
            for row, of_tokens, count in zip(into, group, counts, strict=True):
                if np.shape(of_tokens) != (count,):
                    raise ValueError(f"advantages of shape {np.shape(of_tokens)} for a response of {count} tokens")
                row[:count] = of_tokens
    if not np.isfinite(result).all():
        raise ValueError("an advantage that is not finite")
    return result


def columns_of(part: StepMetadata) -> dict[str, NDArray[Any]]:
    """The columns of a minibatch in which every completion is part of its group."""
    present = np.ones(part.rewards.shape, np.bool_)
    return {"inclusion": part.prompt_inclusion, "present": present, "lengths": part.response_lengths, **part.parts}


TRIED = np.array([[1.0, 0.0, 0.0, 0.5], [0.25, 0.25, 0.25, 0.25], [1.0, 1.0, 0.0, 1.0]])


def try_out(name: str) -> None:
    """
    Raises:
        UserError: a user's estimator cannot be used, or its facts are not true.
    """
    whole = _tried(name, TRIED)[..., 0]
    apart = np.concatenate([_tried(name, TRIED[[row]])[..., 0] for row in range(len(TRIED))])
    if _OWN[name].zero_if_equal and whole[1].any():
        raise _untrue(name, "zero_if_equal = False", "gives a group of equal rewards advantages")
    if not (_OWN[name].batch_moments or np.allclose(whole, apart)):
        raise _untrue(name, "batch_moments = True", "gives a group other advantages beside other groups")


def _untrue(name: str, fact: str, problem: str) -> UserError:
    return UserError(SETTING, name, problem, f"Say so below it, NAME.{fact}, or mend it")


def _tried(name: str, rewards: Floats, inclusion: Floats | None = None) -> Floats:
    """Advantages of rewards, as though every number that a reward function returns were the reward."""
    columns = _TryOut(
        reward=rewards,
        inclusion=np.ones(len(rewards)) if inclusion is None else inclusion,
        present=np.ones(rewards.shape, np.bool_),
        lengths=np.ones(rewards.shape, np.int64),
    )
    return estimated(name, rewards, columns)


class _TryOut(dict[str, NDArray[Any]]):
    """Columns in which every part of the reward is the reward."""

    def __missing__(self, name: str) -> NDArray[Any]:
        return self["reward"]


def squares_by_right(name: str, likely: Floats) -> Floats:
    """The mean A² of a group of which 0, 1, …, G answers are right, as an estimator gives them.

    It is tried out on one group of each kind, in a minibatch where the kind k is as frequent as ``likely`` says.

    Args:
        name: of the estimator.
        likely: [G + 1]

    Returns:
        [G + 1]
    """
    right = np.tri(len(likely), len(likely) - 1, -1)
    found = _tried(name, right, 1.0 / np.maximum(likely / likely.max(), 1e-9))
    squares: Floats = (found[..., 0] ** 2).mean(axis=1)
    return squares


def role_advantages(part: StepMetadata, name: str) -> Floats:
    """[Q, G, R], the advantage of each role's tokens in a conversation in which the policy speaks in several roles.

    Token t, which role ρ has sampled in conversation i of a prompt, has the advantage

        A_ρi = r_ρi − mean of r_ρj over the conversations j of the prompt in which ρ speaks

    (or what the run's estimator has in its place); 0 where the role does not speak. That number of conversations does
    not depend on what conversation i says, where it is one in which ρ speaks, so that the mean of the others is a
    baseline: with ``rloo`` the expected gradient is

        Σ_ρ E[r_ρ Σ_{t of ρ} ∇log π(y_t | y_<t)]

    Each term is the gradient of a role's expected reward by what that role says, the other roles being a part of its
    environment. They are the same policy and change with it, so that the sum is in general the gradient of no
    objective. Roles that all have the same reward are the exception.

    Two conversations of a solver and a critic, with the rewards 1 and 0 of the one and 0 and 2 of the other, have
    [[[1, −1], [−1, 1]]] under GRPO.
    """
    result, columns = np.zeros(part.segments.shape), columns_of(part)
    for role in range(part.segments.shape[2]):
        known = part.segments[..., role]
        speaks = known["tokens"] > 0
        rows = np.flatnonzero(speaks.any(axis=1))
        of_rows = {each: column[rows] for each, column in columns.items()} | {"present": speaks[rows]}
        found = estimated(name, known["reward"][rows], of_rows)
        if found.shape[2] > 1:
            problem = "returned an advantage for each token, and rollout.roles has one for each role"
            raise UserError(SETTING, name, problem, "Return [Q, G]")
        result[rows, :, role] = np.where(speaks[rows], found[..., 0], 0.0)
    return result


def advantages_of_segments(part: StepMetadata, config: Config, name: str) -> Floats:
    """[Q, G, S], the advantage of each segment, or of each token; S = 1 where a completion has one. All are 0 where a
    teacher alone is trained on, and those of masked completions, whose rewards still count in the baselines of the
    others. ``name`` is the estimator's."""
    if not config.loss.distillation.use_task_rewards:
        return np.zeros((*part.rewards.shape, part.segments.shape[-1] or 1))
    if config.rollout.tree.branches:
        return tree_advantages(part.rewards, part.segments, config.rollout.tree)
    if part.segments.shape[-1]:
        advantages = role_advantages(part, name)
    else:
        advantages = estimated(name, part.rewards, columns_of(part))
    return np.where(masked_completions(part, config)[..., None], 0.0, advantages)


def masked_completions(part: StepMetadata, config: Config) -> Bools:
    """[Q, G], True for completions without any loss: truncated ones, with ``loss.mask_truncated``."""
    return part.truncated & config.loss.mask_truncated


def completion_advantages(part: StepMetadata, segments: Floats) -> Floats:
    """[Q, G], the one advantage by which the rules of pruning know a completion whose segments have ``segments``.

    A segment counts by its tokens as well, so little that it matters only where all norms are 0. Tokens with an
    advantage each are taken to have scores of one norm.
    """
    if not part.segments.shape[-1]:
        if segments.shape[-1] == 1:
            return segments[..., 0]
        there = np.arange(segments.shape[-1]) < part.response_lengths[..., None]
        return whole_advantage(segments, there.astype(np.float64))
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
