"""Estimators of advantages, from whole groups before the draw of completions.

An estimator maps rewards [Q, G] and columns to advantages [Q, G], or to Q lists of G arrays [L] of
token advantages. The columns are

- ``inclusion``: [Q], inclusion probability of each prompt.
- ``present``: [Q, G], False for conversations without a turn of the role, which do not count.
- ``lengths``: [Q, G], L, tokens of each response.
- ``reward/NAME``: [Q, G], the reward function's metric NAME; NaN if not returned.
- ``compared`` [P, Q, G] and ``weights`` [P], under GDPO: the P rewards of ``loss.reward_weights``.

``trees.py`` computes the advantages of a tree's segments.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.errors import UserError
from megatron_dppo.rl.numbers import ROUNDING as REWARD_ROUNDING
from megatron_dppo.rl.numbers import round_rewards
from megatron_dppo.rl.trees import compute_tree_advantages
from megatron_dppo.rl.types import Bools, Floats, StepMetadata

# Not at run time, because prune() also runs without pydantic.
if TYPE_CHECKING:
    from megatron_dppo.config import Config

SETTING = "loss.advantage"
ROUNDING = 1e-9
"""Bound on rounding errors of advantages in a group of equal rewards."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """Function from rewards to advantages, with two facts about the function."""

    advantages: Callable[[Floats, Mapping[str, NDArray[Any]]], Any]
    zero_if_equal: bool = True
    """Whether a group of equal rewards has the advantages 0."""
    batch_moments: bool = False
    """Whether advantages depend on moments of the minibatch, estimates if prompts are pruned."""


def compute_group_advantages(
    rewards: Floats,
    *,
    normalise: bool,
    present: Bools | None = None,
    less: int = 0,
) -> Floats:
    """Return r − mean of the group (Dr.GRPO, arXiv:2503.20783), or (r − mean)/std (DeepSeekMath,
    arXiv:2402.03300, section 4.1.2).

    Args:
        rewards: [Q, G], from ``round_rewards``.
        normalise: divide by the standard deviation.
        present: [Q, G], False for completions that do not count; None: all True.
        less: 1 for the sample's standard deviation, over G − 1; 0 for the population's, over G.

    Returns:
        [Q, G]; exactly 0.0 in groups of equal rewards, and for completions that do not count.
    """
    present = np.ones_like(rewards, np.bool_) if present is None else present
    rewards = np.where(present, rewards, 0.0)
    size = np.maximum(present.sum(axis=1, keepdims=True), 1)
    low = np.where(present, rewards, np.inf).min(axis=1, keepdims=True)
    # Compare rewards, because the mean of equal numbers may differ from the numbers in floating
    # point.
    mixed = np.where(present, rewards, -np.inf).max(axis=1, keepdims=True) > low
    deviation = np.where(present & mixed, rewards - rewards.sum(axis=1, keepdims=True) / size, 0.0)
    if not normalise:
        return deviation
    # Scale to a maximum of 1, because squares of tiny deviations would underflow.
    largest = np.abs(deviation).max(axis=1, keepdims=True)
    deviation /= np.where(mixed, largest, 1.0)
    std = np.sqrt((deviation**2).sum(axis=1, keepdims=True) / size)
    result = deviation / np.where(mixed, std, 1.0)
    return result * np.sqrt((size - 1) / size) if less else result


def compute_grpo(rewards: Floats, columns: Mapping[str, NDArray[Any]], less: int = 0) -> Floats:
    """Return GRPO's (r − mean)/std of the group."""
    return compute_group_advantages(rewards, normalise=True, present=columns["present"], less=less)


def compute_dr_grpo(rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return Dr.GRPO's r − mean of the group."""
    return compute_group_advantages(rewards, normalise=False, present=columns["present"])


def compute_rloo(rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return RLOO's r − mean of the group's other rewards (arXiv:2402.14740)."""
    size = columns["present"].sum(axis=1, keepdims=True)
    return compute_dr_grpo(rewards, columns) * (size / np.maximum(size - 1, 1))


def compute_reinforce_pp(rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return REINFORCE++'s (r − mean)/std of the minibatch (arXiv:2501.03262)."""
    present = columns["present"]
    counted = rewards[present]
    mixed = np.ptp(counted) > REWARD_ROUNDING * np.abs(counted).max()
    mean = (_compute_weights(columns) * rewards).sum()
    return normalize_by_rms(np.where(present & mixed, rewards - mean, 0.0), columns)


def normalize_by_rms(advantages: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Divide advantages by the minibatch's root mean square (REINFORCE++ with a baseline)."""
    largest = np.abs(advantages).max()
    if largest == 0.0:
        return advantages
    # Scale to a maximum of 1, because squares of tiny advantages would underflow.
    scaled = advantages / largest
    result: Floats = scaled / np.sqrt((_compute_weights(columns) * scaled * scaled).sum())
    return result


def compute_gdpo(rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return GDPO's advantages (arXiv:2601.05242): (r − mean)/std of the group for each of several
    rewards, summed by weight, then divided by the minibatch's deviation."""
    # The minibatch's mean is 0, because the mean of each group is 0.
    return normalize_by_rms(sum_normalized_rewards(columns), columns)


def sum_normalized_rewards(columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return Σ_p w_p (r_p − mean)/std of the group, [Q, G]; a missing reward adds 0."""
    compared = columns["compared"]
    weights = columns["weights"]
    total = np.zeros(compared.shape[1:])
    for weight, rewards in zip(weights, compared, strict=True):
        present = ~np.isnan(rewards)
        # The deviation over G − 1 matters only if rewards are missing.
        total += weight * compute_group_advantages(rewards, normalise=True, present=present, less=1)
    # Rewards may cancel. The division by the deviation would make advantages of rounding errors.
    return np.where(np.abs(total) < ROUNDING * np.abs(weights).sum(), 0.0, total)


def _compute_weights(columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return the weights [Q, G] of completions in the minibatch's moments, 1/π per prompt."""
    # If prompts are pruned, moments are estimates, and advantages are ratios with a bias of
    # O(1/prompts). The draw of completions does not change the moments.
    present = columns["present"]
    shares = np.where(present, 1.0 / present.sum(axis=1, keepdims=True), 0.0)
    shares /= columns["inclusion"][:, None]
    weights: Floats = shares / shares.sum()
    return weights


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": Estimator(compute_grpo),
    "grpo_sample": Estimator(partial(compute_grpo, less=1)),
    "dr_grpo": Estimator(compute_dr_grpo),
    "rloo": Estimator(compute_rloo),
    "reinforce_pp": Estimator(compute_reinforce_pp, zero_if_equal=False, batch_moments=True),
    "reinforce_pp_baseline": Estimator(
        lambda r, columns: normalize_by_rms(compute_dr_grpo(r, columns), columns),
        batch_moments=True,
    ),
    "gdpo": Estimator(compute_gdpo, batch_moments=True),
}

_REGISTERED: dict[str, Estimator] = {}


def register(name: str, function: Callable[[Floats, Mapping[str, NDArray[Any]]], Any]) -> None:
    """Register a user's function, with its attributes as the two facts, in this process."""
    facts = {
        fact: getattr(function, fact)
        for fact in ("zero_if_equal", "batch_moments")
        if hasattr(function, fact)
    }
    _REGISTERED[name] = Estimator(function, **facts)


def find_estimator(name: str) -> Estimator:
    return ESTIMATORS.get(name) or _REGISTERED[name]


def estimate_advantages(name: str, rewards: Floats, columns: Mapping[str, NDArray[Any]]) -> Floats:
    """Return an estimator's advantages [Q, G, S], with S = 1 or the longest response's length.

    Raises:
        UserError: a user's function raised, or did not return a finite advantage for each
            completion or token.
    """
    if not len(rewards):
        return np.zeros((*rewards.shape, 1))
    if name in ESTIMATORS:
        return np.asarray(ESTIMATORS[name].advantages(rewards, columns))[..., None]
    try:
        returned = _REGISTERED[name].advantages(rewards, columns)
        found = _validate_advantages(returned, columns["lengths"])
        deviation = compute_group_advantages(rewards, normalise=False, present=columns["present"])
        mixed = deviation.any(axis=1)
        # Clear rounding errors, because the mean of equal numbers may differ from the numbers.
        rounding = np.abs(found).max(axis=(1, 2)) < ROUNDING
        found[~mixed & rounding] = 0.0
        return found
    except (Exception, SystemExit) as error:
        problem = f"failed for rewards of {len(rewards)} prompts:\n{traceback.format_exc(limit=-2)}"
        remedy = "Correct it: docs/recipes/advantage.md describes its return value"
        if isinstance(error, KeyError) and str(error.args[0]).startswith("reward/"):
            remedy = f"Read one of {', '.join(columns)}: reward.function has returned no other name"
        raise UserError(SETTING, name, problem, remedy) from error


def _validate_advantages(returned: Any, lengths: NDArray[Any]) -> Floats:
    """Return a user's advantages as an array [Q, G, S].

    Raises:
        ValueError: the shape is wrong, or a number is not finite.
    """
    # Numbers are advantages of completions, arrays are advantages of tokens.
    if not any(np.ndim(each) for group in returned for each in group):
        result = np.array(returned, np.float64)[..., None]
        if result.shape[:-1] != lengths.shape:
            raise ValueError(
                f"advantages of shape {result.shape[:-1]} for rewards of {lengths.shape}"
            )
    else:
        result = np.zeros((*lengths.shape, int(lengths.max())))
        for into, group, counts in zip(result, returned, lengths.tolist(), strict=True):
            for row, of_tokens, count in zip(into, group, counts, strict=True):
                if np.shape(of_tokens) != (count,):
                    raise ValueError(
                        f"advantages of shape {np.shape(of_tokens)} for a response of {count} "
                        "tokens"
                    )
                row[:count] = of_tokens
    if not np.isfinite(result).all():
        raise ValueError("an advantage that is not finite")
    return result


def read_columns(
    part: StepMetadata,
    compared: Sequence[tuple[str, float]] = (),
) -> dict[str, NDArray[Any]]:
    """Return the columns of a minibatch, with all completions present.

    Args:
        compared: ``Config.compared_rewards``.

    Raises:
        UserError: no completion has one of the compared rewards.
    """
    columns = {
        "inclusion": part.prompt_inclusion,
        "present": np.ones(part.rewards.shape, np.bool_),
        "lengths": part.response_lengths,
        **part.parts,
    }
    if compared:
        columns["compared"] = np.stack([_read_reward(part, name) for name, _ in compared])
        columns["weights"] = np.array([weight for _, weight in compared])
    return columns


def _read_reward(part: StepMetadata, name: str) -> Floats:
    """Return the reward function's metric ``name``, [Q, G], rounded as rewards are."""
    found = part.parts.get(f"reward/{name}", np.full(part.rewards.shape, np.nan))
    present = ~np.isnan(found)
    if found.size and not present.any():
        known = sorted(key.removeprefix("reward/") for key in part.parts if "reward/" in key[:7])
        problem = "no completion of a step has a reward of that name"
        remedy = f"Name metrics of reward.function: {', '.join(known) or 'it returned none'}"
        raise UserError("loss.reward_weights", name, problem, remedy)
    return round_rewards(found, present)


TRIAL_REWARDS = np.array([[1.0, 0.0, 0.0, 0.5], [0.25, 0.25, 0.25, 0.25], [1.0, 1.0, 0.0, 1.0]])


def check_estimator(name: str) -> None:
    """Check a user's estimator on three made-up groups.

    Raises:
        UserError: a user's estimator cannot be used, or its facts are not true.
    """
    whole = _compute_trial_advantages(name, TRIAL_REWARDS)[..., 0]
    rows = range(len(TRIAL_REWARDS))
    parts = [_compute_trial_advantages(name, TRIAL_REWARDS[[row]])[..., 0] for row in rows]
    apart = np.concatenate(parts)
    if _REGISTERED[name].zero_if_equal and whole[1].any():
        raise _make_fact_error(
            name, "zero_if_equal = False", "gives non-zero advantages to a group of equal rewards"
        )
    if not (_REGISTERED[name].batch_moments or np.allclose(whole, apart)):
        raise _make_fact_error(
            name, "batch_moments = True", "gives a group advantages that depend on the other groups"
        )


def _make_fact_error(name: str, fact: str, problem: str) -> UserError:
    remedy = f"Set NAME.{fact} below the function, or correct the function"
    return UserError(SETTING, name, problem, remedy)


def _compute_trial_advantages(
    name: str,
    rewards: Floats,
    inclusion: Floats | None = None,
) -> Floats:
    columns = _TrialColumns(
        reward=rewards,
        inclusion=np.ones(len(rewards)) if inclusion is None else inclusion,
        present=np.ones(rewards.shape, np.bool_),
        lengths=np.ones(rewards.shape, np.int64),
        compared=rewards[None],
        weights=np.ones(1),
    )
    return estimate_advantages(name, rewards, columns)


class _TrialColumns(dict[str, NDArray[Any]]):
    def __missing__(self, name: str) -> NDArray[Any]:
        # Every metric of the reward function equals the reward.
        return self["reward"]


def compute_mean_squares(name: str, probabilities: Floats) -> Floats:
    """Return an estimator's mean A² [G + 1] in groups with k = 0, 1, …, G right answers.

    Args:
        name: estimator, applied to a made-up minibatch with one group of each kind.
        probabilities: [G + 1], weights of the groups in the minibatch's moments.
    """
    right = np.tri(len(probabilities), len(probabilities) - 1, -1)
    # Moments weight a prompt by 1/π, so the inverse of the relative probability is the inclusion.
    inclusion = 1.0 / np.maximum(probabilities / probabilities.max(), 1e-9)
    found = _compute_trial_advantages(name, right, inclusion)
    squares: Floats = (found[..., 0] ** 2).mean(axis=1)
    return squares


def compute_role_advantages(part: StepMetadata, name: str) -> Floats:
    """Return the advantages [Q, G, R] of roles in conversations with several roles of the policy.

    Tokens of role ρ in conversation i of a prompt have the advantage

        A_ρi = r_ρi − mean of r_ρj over the prompt's conversations j with a turn of ρ

    (or the advantage of the run's estimator). A role without a turn has 0. If conversation i has a
    turn of ρ, the number of conversations with turns of ρ does not depend on the text of
    conversation i. The mean of the other conversations is therefore a baseline: with ``rloo`` the
    expected gradient is

        Σ_ρ E[r_ρ Σ_{t of ρ} ∇log π(y_t | y_<t)]

    Each term is the gradient of a role's expected reward by its own tokens, with all other roles as
    a part of the environment. All roles are the same policy, so that the sum is in general not
    the gradient of an objective; the exception is roles with equal rewards.

    Two conversations of a solver and a critic with rewards (1, 0) and (0, 2) have the
    advantages [[[1, −1], [−1, 1]]] under GRPO.

    Raises:
        UserError: the estimator returned an advantage for each token.
    """
    result = np.zeros(part.segments.shape)
    columns = read_columns(part)
    for role in range(part.segments.shape[2]):
        segments = part.segments[..., role]
        present = segments["tokens"] > 0
        rows = np.flatnonzero(present.any(axis=1))
        selected = {column: values[rows] for column, values in columns.items()}
        selected["present"] = present[rows]
        found = estimate_advantages(name, segments["reward"][rows], selected)
        if found.shape[2] > 1:
            problem = (
                "returned an advantage for each token, and rollout.roles has one for each role"
            )
            raise UserError(SETTING, name, problem, "Return [Q, G]")
        result[rows, :, role] = np.where(present[rows], found[..., 0], 0.0)
    return result


def compute_advantages(part: StepMetadata, config: Config, name: str) -> Floats:
    """Return advantages [Q, G, S] of segments or tokens (S = 1: of completions) under ``name``.

    Advantages are 0 without task rewards (``loss.distillation.use_task_rewards``), and in masked
    completions.
    """
    if not config.loss.distillation.use_task_rewards:
        return np.zeros((*part.rewards.shape, part.segments.shape[-1] or 1))
    if config.rollout.tree.branches:
        return compute_tree_advantages(part.rewards, part.segments, config.rollout.tree)
    if part.segments.shape[-1]:
        advantages = compute_role_advantages(part, name)
    else:
        columns = read_columns(part, config.compared_rewards)
        advantages = estimate_advantages(name, part.rewards, columns)
    # Masked after the estimate, because rewards of masked completions count in the baselines.
    return np.where(find_masked_completions(part, config)[..., None], 0.0, advantages)


def find_masked_completions(part: StepMetadata, config: Config) -> Bools:
    return part.truncated & config.loss.mask_truncated


def compute_completion_advantages(part: StepMetadata, segments: Floats) -> Floats:
    """Return one advantage [Q, G] per completion, from segments or tokens [Q, G, S], for pruning
    rules."""
    if not part.segments.shape[-1]:
        if segments.shape[-1] == 1:
            return segments[..., 0]
        there = np.arange(segments.shape[-1]) < part.response_lengths[..., None]
        # Scores of tokens are assumed to have equal norms.
        return combine_advantages(segments, there.astype(np.float64))
    # The tiny weight of tokens matters only if all norms are 0.
    return combine_advantages(segments, part.segments["square"] + 1e-12 * part.segments["tokens"])


def combine_advantages(parts: Floats, squares: Floats) -> Floats:
    """Combine the advantages of a completion's parts into one advantage.

    - |a|·s = √Σ_l A_l² s_l², with the parts' score norms s_l and s² = Σ_l s_l²: with the one
      advantage a, the completion's gradient would have the same norm, if scores of tokens are
      orthogonal. a² is therefore a second moment over tokens, weighted by squared scores.
    - The sign of a is the sign of Σ_l A_l s_l².

    Args:
        parts: [Q, G, n], the advantages A_l.
        squares: [Q, G, n], s_l².

    Returns:
        a, [Q, G]; 0 if and only if all parts with s_l > 0 have the advantage 0.
    """
    share = squares / np.maximum(squares.sum(axis=-1, keepdims=True), np.finfo(float).tiny)
    size = np.sqrt((parts**2 * share).sum(axis=-1))
    return np.where((parts * share).sum(axis=-1) < 0.0, -size, size)
