"""Random pruning with known probabilities: of prompts before rollouts, of completions after them.

``prune`` does it to completions for trainers of others: what of a batch to train on, and with which
weights. It requires only NumPy, and no configuration. :func:`~megatron_dppo.rl.plan.plan_step` does
the same for a run of this project, with both levels, minibatches and packs.
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

    For a group of one right and three wrong answers half the tokens may leave ``mask`` [[True,
    False, True, False]] and ``weights`` [[1, 0, 3, 0]].
    """

    mask: Bools
    """True for what is trained on. Groups of equal reward have no gradient, and are never."""
    weights: Floats
    """Factor of a completion's loss; 0 for completions that are not trained on."""


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
    """Choose by chance which completions of a batch are trained on, and weigh them so that the
    gradient stays unbiased.

    With the advantages A and the normaliser Z of the *whole* batch, Σ weights·A·c·(∇ of the tokens'
    losses)/Z over the completions that are kept has the expectation of the same sum over all of
    them: DPPO (arXiv:2603.04135), with the probabilities of least variance (Neyman's) for its
    default rule. Z must not depend on the draw: dividing by what was kept, as a mean over the kept
    completions does, is biased.

        mask, weights = prune([[12, 30, 18, 25]], [[1.0, 0.0, 0.0, 0.0]], budget=0.5)

    A trainer that sees only the kept completions divides by its own count of them. Multiply the
    weights by that count over the count of the whole batch:

    - completions kept over completions, for means over rows: ``grpo``, ``sapo``, ``dr_grpo`` and
      ``luspo`` of TRL, ``seq-mean-…`` of verl;
    - tokens kept over tokens, for means over the tokens of the kept rows: ``bnpo`` of TRL,
      ``token-mean`` of verl;
    - 1, if the divisor was counted before the draw: ``dapo`` and ``cispo`` of TRL.

    The product multiplies the whole loss of a completion. A KL term β·KL that the trainer adds to
    the loss needs the same factor, weights·factor·β in place of β. It then counts the completions
    of groups whose rewards differ: completions of equal reward are never kept, and their KL is left
    out.

    Args:
        lengths: [Q, G], tokens of each response; G completions of each of Q prompts.
        rewards: [Q, G].
        logprobs: of each prompt's completions, the log-probabilities of their tokens at sampling:
            lists of lists, or [Q, G, T] with padding at the end. None: what they would tell of the
            gradients' norms is not used, and the variance is higher.
        budget: share of all tokens, prompts' included, that is trained on. Under
            ``threshold`` it is the chance of the low-scored, 1 − r of the paper; under
            ``top_k`` and ``extremes``, which are biased, a share of completions.
            ``auto``, for ``neyman``: the share at which variance × (tokens generated and
            trained on) is least.
        advantages: [Q, G], the trainer's own. None: rewards less their group's mean. Completions
            whose advantage is 0 are never kept.
        prompt_lengths: [Q] or one for all, tokens that a completion is trained together with.
        rule: a name in ``COMPLETION_RULES``.
        normalise: whether advantages are divided by their group's standard deviation (as in GRPO,
            not in Dr.GRPO); without effect on a trainer's own.
        sequence_mean: whether a completion's loss is the mean over its tokens (GRPO), or their sum
            (DAPO, Dr.GRPO).
        max_weight: no weight is larger.
        seed: of the draw; another one in each step.

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
    norm = 1.0 if logprobs is None else _compute_score_norms(logprobs, length)
    candidates = CompletionCandidates(
        advantage=advantage,
        score=np.abs(advantage) * norm / (length if sequence_mean else 1.0),
        cost=length
        + np.broadcast_to(np.asarray(prompt_lengths, np.float64).reshape(-1, 1), length.shape),
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
    """The draw of ``prune``, for trainers that know their completions' scores and costs.

    Args:
        candidates: of the whole batch.
        budget: see ``prune``.
        rule: a name in ``COMPLETION_RULES``.
        generated: tokens of all responses, which ``auto`` counts as spent already.
        seed: of the draw.

    Returns:
        The completions kept with their weights, and the inclusion probabilities [Q, G] of all.
    """
    share = find_efficient_keep(rule, candidates, generated) if budget == "auto" else budget
    inclusion = compute_completion_inclusion(rule, candidates, share)
    mask = draw_completions(rule, candidates, inclusion, np.random.default_rng(seed))
    return KeptCompletions(
        mask, np.where(mask, compute_completion_weights(rule, candidates, inclusion, share), 0.0)
    ), inclusion


def _compute_score_norms(logprobs: Sequence[Sequence[ArrayLike]], lengths: Floats) -> Floats:
    """[Q, G], √Σ_t (1 − p_t)², in proportion to which the norm of a completion's score is expected
    to grow."""
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
        norms[prompt, completion] = np.linalg.norm(np.expm1(tokens[: int(length)]))
    return norms
