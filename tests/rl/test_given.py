"""What comes from outside is a number, a truth value, a mask or a log-probability, or it is refused."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from megatron_dppo.rl.numbers import as_logprobs, as_mask, as_number, as_truth

HALVES = [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.bfloat16),
          Decimal("0.5"), Fraction(1, 2)]  # fmt: skip
TRUE = [True, 1, 1.0, np.bool_(True), np.array(True), np.int64(1), torch.tensor(True), torch.tensor(1), Decimal(1)]
NEITHER = ["true", "false", "no", "1", 0.5, 2, -1, math.nan, np.array([True]), torch.tensor([1]), [True], {}, object()]


@pytest.mark.parametrize("value", HALVES, ids=repr)
def test_scalars_of_every_kind_are_numbers(value: object) -> None:
    assert as_number(value) == 0.5
    assert as_truth(value) is None


@pytest.mark.parametrize("value", TRUE, ids=repr)
def test_true_is_true_or_one(value: object) -> None:
    assert as_truth(value) is True
    assert as_number(value) == 1.0
    assert as_truth(1 - as_number(value)) is False


@pytest.mark.parametrize("value", NEITHER, ids=lambda value: type(value).__name__)
def test_nothing_else_is_true_or_false(value: object) -> None:
    assert as_truth(value) is None


@pytest.mark.parametrize(
    "value", [None, "0.5", [0.5], np.array([0.5]), torch.tensor([0.5, 0.5]), 1j, np.complex64(1), {}, b"1"], ids=repr
)
def test_what_is_no_number_is_none(value: object) -> None:
    assert as_number(value) is None


def test_numbers_beyond_a_float_are_not_finite() -> None:
    assert as_number(10**400) == math.inf
    assert math.isnan(as_number(Decimal("sNaN")))


@pytest.mark.parametrize("mask", [[True, False], [1, 0], [1.0, 0.0], np.array([True, False]), torch.tensor([1, 0])])
def test_masks_are_true_and_false(mask: object) -> None:
    assert as_mask(mask).tolist() == [True, False]
    assert as_mask(mask).dtype == np.bool_


@pytest.mark.parametrize("mask", [[1, 0.5], [1, math.nan], ["yes", "no"], [True, "no"], [1, None], [2, 0], [1, [0]]])
def test_nothing_else_is_a_mask(mask: object) -> None:
    with pytest.raises(ValueError):
        as_mask(mask)


def test_log_probabilities_are_at_most_zero_where_they_are_read() -> None:
    read = as_logprobs([-1.0, 1e-6, -0.0, 7.0], np.array([True, True, True, False]))
    assert read.tolist() == [-1.0, 0.0, 0.0, 7.0]
    assert read.dtype == np.float32
    for bad in (0.01, None, math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="above 0, null or not finite"):
            as_logprobs([-1.0, bad])
    with pytest.raises(ValueError, match="no numbers"):
        as_logprobs([-1.0, "a"])
