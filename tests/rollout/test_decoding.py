"""One uniform per completion and position, and the token that it picks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_dppo.rollout.decoding import completion_uniforms, draw_tokens

LAST = 1 - 2**-53
"""The largest uniform."""


def test_uniforms_are_a_function_of_seed_prompt_and_sample() -> None:
    row = completion_uniforms(1, 2, 34, 100)
    np.testing.assert_array_equal(row[:7], completion_uniforms(1, 2, 34, 7))
    assert 0 <= row.min() < 0.1 < 0.9 < row.max() < 1
    for other in ((2, 2, 34), (1, 3, 34), (1, 2, 35), (1, 23, 4), (12, 3, 4)):
        assert not np.any(row == completion_uniforms(*other, 100))


def test_impossible_token_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, logprobs = draw_tokens(logits, torch.tensor([0.0, LAST], dtype=torch.float64), 0.7)
    assert tokens.tolist() == [1, 1] and logprobs.tolist() == [0.0, 0.0]


def test_every_rare_token_can_be_drawn() -> None:
    """A share of 3e-8 near the end of the distribution is less than fp32 distinguishes there."""
    rare, share, seen = 4096, 3e-8, 100
    logits = torch.log(torch.tensor([1 - rare * share] + [share] * rare))
    uniforms = 1 - torch.linspace(seen * share, 0, 4 * seen + 1, dtype=torch.float64)[:-1]
    tokens, _ = draw_tokens(logits.repeat(len(uniforms), 1), uniforms, 1.0)
    assert len(tokens.unique()) >= seen


@pytest.mark.parametrize(("top_p", "top_k"), [(None, None), (0.8, None), (None, 5), (0.6, 7)])
def test_shares_of_the_likeliest_tokens_are_those_of_transformers(top_p: float | None, top_k: int | None) -> None:
    """Over all uniforms, at a temperature."""
    draws, temperature = 20_000, 0.7
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2.0
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    uniforms[[0, -1]] = torch.tensor([0.0, LAST], dtype=torch.float64)
    tokens, logprobs = draw_tokens(logits.expand(draws, -1), uniforms, temperature, top_p, top_k)

    chosen = [TemperatureLogitsWarper(temperature)]
    chosen += [TopKLogitsWarper(top_k)] if top_k else []
    chosen += [TopPLogitsWarper(top_p)] if top_p else []
    expected = LogitsProcessorList(chosen)(torch.zeros(1, 1), logits[None].double())[0].softmax(dim=-1)
    found = torch.bincount(tokens, minlength=50) / draws
    torch.testing.assert_close(found.double(), expected, atol=2 / draws, rtol=0)
    assert set(tokens.unique().tolist()) <= set(expected.nonzero()[:, 0].tolist())
    torch.testing.assert_close(logprobs, torch.log_softmax(logits / temperature, dim=-1)[tokens])
