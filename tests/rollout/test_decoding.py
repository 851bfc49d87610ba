"""One uniform per completion and position, and the token that it picks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_dppo.rollout.decoding import generate_uniforms, sample_tokens

LAST = 1 - 2**-53
"""The largest uniform."""


def test_uniforms_are_a_function_of_seed_prompt_and_sample() -> None:
    row = generate_uniforms(1, 2, 34, 100)
    np.testing.assert_array_equal(row[:7], generate_uniforms(1, 2, 34, 7))
    assert 0 <= row.min() < 0.1 < 0.9 < row.max() < 1
    for other in ((2, 2, 34), (1, 3, 34), (1, 2, 35), (1, 23, 4), (12, 3, 4)):
        assert not np.any(row == generate_uniforms(*other, 100))


def test_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, logprobs, _ = sample_tokens(logits, torch.tensor([0.0, LAST], dtype=torch.float64), 0.7)
    assert tokens.tolist() == [1, 1] and logprobs.tolist() == [0.0, 0.0]


def test_every_rare_token_can_be_drawn() -> None:
    """A share of 3e-8 near the end of the distribution is less than fp32 distinguishes there."""
    rare, share, seen = 4096, 3e-8, 100
    logits = torch.log(torch.tensor([1 - rare * share] + [share] * rare))
    uniforms = 1 - torch.linspace(seen * share, 0, 4 * seen + 1, dtype=torch.float64)[:-1]
    tokens, *_ = sample_tokens(logits.repeat(len(uniforms), 1), uniforms, 1.0)
    assert len(tokens.unique()) >= seen


@pytest.mark.parametrize(
    ("top_p", "top_k", "parts"),
    [
        (None, None, [2, 4, 1, 3]),
        (0.6, None, [0, 4, 0, 3]),
        (None, 3, [2, 4, 0, 3]),
        (0.75, 3, [0, 4, 0, 3]),
    ],
)
def test_tokens_are_drawn_by_their_share_of_the_likeliest(
    top_p: float, top_k: int, parts: list[int]
) -> None:
    """Over all uniforms, at a temperature. Log-probabilities are those of the draw."""
    draws, temperature, law = 20_000, 0.7, torch.tensor([0.2, 0.4, 0.1, 0.3]).log()
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens, logprobs, kept = sample_tokens(
        (temperature * law).expand(draws, -1), uniforms, temperature, top_p, top_k
    )
    found, expected = torch.bincount(tokens, minlength=4) / draws, torch.tensor(parts) / sum(parts)
    torch.testing.assert_close(found, expected, atol=2 / draws, rtol=0)
    assert not found[expected == 0].any()
    torch.testing.assert_close(logprobs, expected.log()[tokens])
    likeliest = [number for number in (1, 3, 0, 2) if parts[number]]
    for ids, count in zip(*kept, strict=True) if kept else ():
        assert ids[:count].tolist() == likeliest
