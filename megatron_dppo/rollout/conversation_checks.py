"""Checks of a user's completions: token ids, log-probabilities, masks, roles."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.numbers import as_logprobs
from megatron_dppo.rl.types import Completion


class InvalidCompletionError(ValueError):
    """Return value unusable for training. The message follows "it"."""


def check_ids(
    token_ids: Sequence[int] | NDArray[Any],
    vocabulary: int,
    action: str,
) -> NDArray[np.int32]:
    """Return token ids as an array.

    Args:
        token_ids: token ids from a user's function.
        vocabulary: exclusive upper bound of the ids.
        action: the function's action in error messages: ``returned a turn 1``.

    Raises:
        InvalidCompletionError: ``token_ids`` is no list of ids below ``vocabulary``.
    """
    try:
        whole = [operator.index(token) for token in token_ids]
    except TypeError:
        raise InvalidCompletionError(f"{action} that is no list of token ids") from None
    if wrong := next((token for token in whole if not 0 <= token < vocabulary), None):
        raise InvalidCompletionError(
            f"{action} with the token id {wrong}; the policy's vocabulary has {vocabulary} tokens"
        )
    return np.array(whole, np.int32)


def check_completion(completion: Completion, limit: int) -> None:
    length = len(completion.token_ids)
    for name in ("logprobs", "loss_mask"):
        if len(values := getattr(completion, name)) != length:
            raise InvalidCompletionError(
                f"returned {len(values)} of {name} for a response of {length} tokens"
            )
    # Tokens past the limit are cut off.
    if not completion.loss_mask[:limit].any():
        raise InvalidCompletionError("returned a response none of whose tokens the policy sampled")
    try:
        as_logprobs(completion.logprobs, completion.loss_mask)
    except ValueError as error:
        raise InvalidCompletionError(f"returned {error}") from None
    if (count := len(completion.versions)) != length:
        raise InvalidCompletionError(
            f"returned the versions of {count} tokens for a response of {length}"
        )


def check_roles(completion: Completion, roles: Sequence[str]) -> None:
    role_ids = completion.segments
    if (role_ids is not None) != bool(roles):
        there = "without the role of each token" if roles else "with roles"
        raise InvalidCompletionError(
            f"returned a response {there}, and rollout.roles has {', '.join(roles) or 'none'}"
        )
    if role_ids is None:
        return
    # Sampled tokens have role numbers from 0; all other tokens have −1.
    is_whole = len(role_ids) == len(completion.token_ids)
    if not is_whole or ((role_ids >= 0) != completion.loss_mask).any():
        raise InvalidCompletionError(
            "returned a response whose roles are not those of its sampled tokens, and -1 elsewhere"
        )
    if role_ids.max() >= len(roles):
        raise InvalidCompletionError(
            f"returned a response of a role {role_ids.max()}, and rollout.roles has {len(roles)}"
        )
