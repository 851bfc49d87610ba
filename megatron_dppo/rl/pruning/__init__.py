"""Random pruning with known probabilities: of prompts before rollouts, of completions after.

``prune`` draws a batch's completions to train on, with weights, for other trainers, and needs only
NumPy. :func:`~megatron_dppo.rl.plan.plan_step` prunes at both levels, for runs of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.numbers import round_rewards
from megatron_dppo.rl.pruning.completion_rules import (
    COMPLETION_RULES,
    CompletionCandidates,
    compute_completion_inclusion,
    compute_completion_weights,
    draw_completions,
    find_efficient_keep,
)
from megatron_dppo.rl.types import Bools, Floats


class KeptCompletions(NamedTuple):
    """Completions to train on. Arrays are [Q, G].

    Half the tokens of a group of one right and three wrong answers may be ``mask`` [[True, False,
    True, False]] with ``weights`` [[1, 0, 3, 0]].
    """

    mask: Bools
    """True for completions to train on; False for groups of equal reward, which have no gradient.
    """
    weights: Floats
    """Factor of a completion's loss; 0 if not trained on."""


def prune(
    lengths: ArrayLike,
    rewards: ArrayLike,
    logprobs: Sequence[Sequence[ArrayLike]] | None = None,
    budget: float | Literal["auto"] = 0.5,
    *,
    advantages: ArrayLike | None = None,
    prompt_lengths: ArrayLike = 0,
    rule: str = "neyman",
    normalise: bool = True,
    sequence_mean: bool = True,
    max_weight: float = 10.0,
    seed: int | Sequence[int] | np.random.Generator = 0,
) -> KeptCompletions:
    """Draw a batch's completions to train on, with weights that keep the gradient unbiased.

    With the advantages A and the normaliser Z of the *whole* batch, Σ weights·A·c·(∇ of the tokens'
    losses)/Z over the kept completions has the expectation of the same sum over all completions:
    DPPO (arXiv:2603.04135), by default with Neyman's probabilities of least variance. Z must not
    depend on the draw: a mean over the kept completions, divided by their count, is biased.

        mask, weights = prune([[12, 30, 18, 25]], [[1.0, 0.0, 0.0, 0.0]], budget=0.5)

    A trainer that gets only the kept completions divides by their count. Multiply the weights by

    - completions kept / completions, for means over rows: ``grpo``, ``sapo``, ``dr_grpo`` and
      ``luspo`` of TRL, ``seq-mean-…`` of verl;
    - tokens kept / tokens, for means over the kept rows' tokens: ``bnpo`` of TRL, ``token-mean`` of
      verl;
    - 1, if the divisor was counted before the draw: ``dapo`` and ``cispo`` of TRL.

    The product multiplies a completion's whole loss. A trainer's KL term β·KL needs product·β
    instead of β, and covers only groups with non-zero variance: completions of groups of equal
    reward are never kept.

    Args:
        lengths: [Q, G], tokens of each response; G completions of each of Q prompts.
        rewards: [Q, G].
        logprobs: log-probabilities of each completion's tokens at sampling: lists of lists, or [Q,
            G, T] padded at the end. None: gradients' norms are not estimated; more variance.
        budget: fraction of all tokens, prompts included, to train on. ``threshold``: probability of
            low-scored completions, the paper's 1 − r. ``top_k`` and ``extremes``, both biased:
            fraction of completions. ``auto``, for ``neyman``: fraction of least variance × (tokens
            generated and trained on).
        advantages: [Q, G], the trainer's own. None: rewards minus the group's mean. Completions of
            advantage 0 are never kept.
        prompt_lengths: [Q] or one for all, prompt tokens trained with a completion.
        rule: a name in ``COMPLETION_RULES``.
        normalise: whether to divide advantages by the group's standard deviation (GRPO, not
            Dr.GRPO); no effect on given ``advantages``.
        sequence_mean: whether a completion's loss is the mean over its tokens (GRPO), or the sum
            (DAPO, Dr.GRPO).
        max_weight: upper limit of the weights.
        seed: random seed of the draw, another for each step.

    Raises:
        ValueError: an argument has the wrong shape, or is out of range.
    """
    length = np.asarray(lengths, np.float64)
    reward = np.asarray(rewards, np.float64)
    if length.ndim != 2 or length.shape != reward.shape:
        raise ValueError(
            f"lengths {length.shape} and rewards {reward.shape} should both be [prompts, "
            "completions]."
        )
    if rule not in COMPLETION_RULES:
        raise ValueError(f"rule={rule!r} is none of {', '.join(COMPLETION_RULES)}.")
    if budget == "auto" and rule != "neyman":
        raise ValueError(f"budget='auto' is for rule='neyman'; give a share for rule={rule!r}.")
    share = 1.0 if budget == "auto" else budget
    if not (0.0 < share <= 1.0 <= max_weight and (length > 0).all() and np.isfinite(reward).all()):
        raise ValueError(
            "Required: 0 < budget <= 1 <= max_weight, lengths of at least 1, and finite rewards."
        )
    if advantages is None:
        advantage = compute_group_advantages(round_rewards(reward), normalise=normalise)
    else:
        advantage = np.asarray(advantages, np.float64)
        if advantage.shape != length.shape or not np.isfinite(advantage).all():
            raise ValueError(
                f"advantages {advantage.shape} should be finite, and {length.shape} as lengths are."
            )
    # In a sequence mean a token's weight in the loss is 1/length.
    norm = 1.0 if logprobs is None else _compute_score_norms(logprobs, length)
    prompt_length = np.asarray(prompt_lengths, np.float64).reshape(-1, 1)
    candidates = CompletionCandidates(
        advantage=advantage,
        score=np.abs(advantage) * norm / (length if sequence_mean else 1.0),
        cost=length + np.broadcast_to(prompt_length, length.shape),
        floor=np.full_like(length, 1.0 / max_weight),
        zero_advantage=advantage == 0.0,
    )
    kept, _ = prune_candidates(
        candidates, budget, rule=rule, generated=float(length.sum()), seed=seed
    )
    return kept


def prune_candidates(
    candidates: CompletionCandidates,
    budget: float | Literal["auto"],
    *,
    rule: str,
    generated: float,
    seed: int | Sequence[int] | np.random.Generator,
) -> tuple[KeptCompletions, Floats]:
    """Draw completions as ``prune``, for trainers with their own scores and costs.

    Args:
        candidates: completions of the whole batch.
        generated: tokens of all responses, counted as cost under ``auto``.

    Returns:
        The kept completions with weights, and the inclusion probabilities [Q, G] of all.
    """
    share = find_efficient_keep(rule, candidates, generated) if budget == "auto" else budget
    inclusion = compute_completion_inclusion(rule, candidates, share)
    mask = draw_completions(rule, candidates, inclusion, np.random.default_rng(seed))
    weights = compute_completion_weights(rule, candidates, inclusion, share)
    return KeptCompletions(mask, np.where(mask, weights, 0.0)), inclusion


def _compute_score_norms(logprobs: Sequence[Sequence[ArrayLike]], lengths: Floats) -> Floats:
    """Return √Σ_t (1 − p_t)², [Q, G], assumed proportional to the norm of a completion's score."""
    if [len(group) for group in logprobs] != [lengths.shape[1]] * len(lengths):
        raise ValueError(
            "logprobs should have {} prompts of {} completions, as lengths has.".format(
                *lengths.shape
            )
        )
    norms = np.empty_like(lengths)
    for (prompt, completion), length in np.ndenumerate(lengths):
        tokens = np.asarray(logprobs[prompt][completion], np.float64)
        if len(tokens) < length:
            where = f"logprobs[{prompt}][{completion}]"
            raise ValueError(
                f"{where} has {len(tokens)} log-probabilities, and the response {length:.0f} "
                "tokens."
            )
        # Padding follows the response. expm1 keeps digits of 1 − p near p = 1.
        norms[prompt, completion] = np.linalg.norm(np.expm1(tokens[: int(length)]))
    return norms
