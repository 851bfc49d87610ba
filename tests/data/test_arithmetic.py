"""The generator's pools: distinct, held out, and a function of their own seed."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_dppo.config import ArithmeticConfig, replace
from megatron_dppo.data.generators import Sum, make_sums
from megatron_dppo.errors import UserError

CONFIG = ArithmeticConfig(problems=300, eval_problems=50, max_terms=5, max_operand=30)


def questions(sums: list[Sum]) -> list[str]:
    return [problem.question for problem in sums]


def test_no_question_occurs_twice_in_both_pools_together() -> None:
    train, held_out = make_sums(CONFIG)
    assert (len(train), len(held_out)) == (300, 50)
    assert len({*questions(train), *questions(held_out)}) == 350


def test_pools_are_a_function_of_their_seed() -> None:
    assert make_sums(CONFIG) == make_sums(CONFIG)
    assert make_sums(CONFIG) != make_sums(replace(CONFIG, seed=1))


def test_a_larger_training_pool_holds_the_smaller_and_leaves_the_same_out() -> None:
    train, held_out = make_sums(CONFIG)
    larger, same = make_sums(replace(CONFIG, problems=900))
    assert same == held_out and larger[:300] == train


def test_sums_keep_to_the_settings() -> None:
    for problem in make_sums(CONFIG)[0]:
        assert 2 <= len(problem.terms) <= 5 and all(1 <= term <= 30 for term in problem.terms)
        assert int(problem.label) == sum(problem.terms)


def test_every_length_occurs() -> None:
    lengths = [len(problem.terms) for problem in make_sums(CONFIG)[0]]
    assert min(lengths.count(n) for n in (2, 3, 4, 5)) > 40


def test_worked_answer_has_a_line_for_each_addition() -> None:
    assert Sum((12, 7, 55), (False, False)).worked_answer == "12+7=19\n19+55=74\n#74"
    assert Sum((12, 7, 55), (False, False)).question == "12+7+55="


def test_teacher_who_forgets_to_carry_is_wrong_from_there_on_and_the_label_is_not() -> None:
    forgetful = Sum((5, 8, 6), (True, True))  # the first addition carries, the second does not
    assert forgetful.worked_answer == "5+8=3\n3+6=9\n#9"
    assert forgetful.label == "19"


def test_teacher_slips_only_where_told_to() -> None:
    sums = make_sums(CONFIG)[0]
    assert all(problem.worked_answer.endswith(f"#{problem.label}") for problem in sums)
    forgetful = make_sums(replace(CONFIG, forgotten_carries=1.0))[0]
    wrong = [not problem.worked_answer.endswith(f"#{problem.label}") for problem in forgetful]
    assert 0.5 < sum(wrong) / len(wrong) < 1.0  # right only where nothing carries


def test_short_answers_are_the_result_alone_and_right_whatever_the_teacher_forgets() -> None:
    mixed = make_sums(replace(CONFIG, forgotten_carries=1.0, short_answers=0.3))[0]
    short = [problem for problem in mixed if problem.short]
    assert 0.2 < len(short) / len(mixed) < 0.4
    assert all(problem.worked_answer == f"#{problem.label}" for problem in short)
    assert all("\n" in problem.worked_answer for problem in mixed if not problem.short)


def test_styles_change_neither_the_problems_nor_where_the_teacher_slips() -> None:
    plain = make_sums(replace(CONFIG, forgotten_carries=0.5))[0]
    mixed = make_sums(replace(CONFIG, forgotten_carries=0.5, short_answers=0.5))[0]
    assert [dataclasses.replace(problem, short=False) for problem in mixed] == plain


def test_all_distinct_sums_can_be_used_up_but_no_more() -> None:
    every = ArithmeticConfig(problems=5, eval_problems=7, max_terms=3, max_operand=2)  # 4 + 8 sums
    train, held_out = make_sums(every)
    assert len({*questions(train), *questions(held_out)}) == 12
    with pytest.raises(UserError, match="the 12 distinct sums"):
        make_sums(replace(every, problems=6))
