"""What a lever brings is Amdahl's law and what pruning was measured to cost, and the pages say the same."""

from __future__ import annotations

import re

import pytest

from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.plan import as_json
from megatron_dppo.estimate.report import as_text, gain_text, ratio_text
from megatron_dppo.estimate.time import (
    PRICES,
    SHARES,
    TABLE,
    Levers,
    lever_table,
    measured_price,
    pruning_of,
    step_speed_up,
)
from tests.docs.documents import text_of
from tests.estimate.test_plan import of, plan


def test_a_step_is_its_parts_as_each_lever_leaves_them() -> None:
    every = Levers(prompts=0.7, completions=0.5, faster=2.0)
    assert step_speed_up(every, 0.65, mixed=0.6) == pytest.approx(1 / (0.65 * 0.7 / 2 + 0.35 * 0.7 * 0.5 / 0.6))
    assert step_speed_up(every, 0.6, fixed=0.1) == pytest.approx(1 / (0.1 + 0.6 * 0.7 / 2 + 0.3 * 0.7 * 0.5))
    assert step_speed_up(Levers(), 0.35, fixed=0.2, mixed=0.6) == pytest.approx(1.0)


def test_a_step_ahead_takes_the_longer_of_its_two_parts() -> None:
    assert step_speed_up(Levers(ahead=True), 0.75) == pytest.approx(1 / 0.75)
    assert step_speed_up(Levers(ahead=True), 0.35) == pytest.approx(1 / 0.65)
    assert step_speed_up(Levers(ahead=True, faster=1.5), 0.75, fixed=0.05) == pytest.approx(1 / 0.55)


def test_no_lever_on_one_part_brings_more_than_that_part_takes() -> None:
    assert step_speed_up(Levers(completions=1e-9), 0.75) == pytest.approx(1 / 0.75)
    assert step_speed_up(Levers(faster=1e9), 0.75) == pytest.approx(1 / 0.25)


def test_keeping_all_that_has_a_gradient_brings_nothing() -> None:
    assert step_speed_up(Levers(completions=0.7), 0.35, mixed=0.6) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("prompts", "completions", "ratio"),
    [(1.0, 1.0, 1.0), (1.0, 0.3, 0.98), (1.0, 0.5, 0.98), (0.7, 1.0, 0.92), (0.7, 0.5, 0.92), (0.5, 1.0, 0.76)],
)
def test_a_price_is_that_of_the_least_measured_pruning_that_prunes_as_much(
    prompts: float, completions: float, ratio: float
) -> None:
    price = measured_price(Levers(prompts=prompts, completions=completions))
    assert price is not None and price.steps_ratio == ratio


def test_nobody_knows_the_price_of_more_pruning_than_was_measured() -> None:
    [row] = lever_table([(0.35, 0.0)], mixed=1.0, table=[Levers(prompts=0.3)])
    assert row.steps_ratio is None and row.gains[0].accuracy is None
    assert ratio_text(row) == "unknown" and gain_text(row.gains[0]).endswith("?")


def test_prices_are_those_of_the_page_that_they_name() -> None:
    """The column "steps to 60%", row by row; later tables are of longer runs and other tasks."""
    page = text_of("docs/pruning_measured.md")
    for price in PRICES:
        words = f"prompts {price.prompts:g}, tokens" if price.prompts < 1.0 else "completions alone,"
        line, *_ = re.findall(rf"^\| \**`neyman`, {words} {price.completions:g}\b.*$", page, re.MULTILINE)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        interval = price.interval and f" [{price.interval[0]:.2f}, {price.interval[1]:.2f}]"
        assert (cells[1], cells[4]) == (str(price.seeds), f"{price.steps_ratio:.2f}{interval or ''}")


def test_the_page_shows_the_table_of_the_function() -> None:
    page = text_of("docs/scaling.md")
    rows = list(lever_table([(share, 0.0) for share in SHARES], mixed=Assumptions().mixed_share))
    assert len(rows) == len(TABLE)
    for row in rows:
        cells = [row.levers.words, ratio_text(row), *map(gain_text, row.gains)]
        line = "| " + " | ".join(cells).replace("*", r"\*") + " |"
        assert line in page


def test_the_page_holds_the_formula_against_what_was_measured() -> None:
    page = text_of("docs/scaling.md")
    for price in PRICES:
        levers = Levers(prompts=price.prompts, completions=price.completions)
        step = step_speed_up(levers, price.share, mixed=0.6)
        words = rf"^\| {levers.words} \| (\d+)% \| ([\d.]+)x \| .* \| ([\d.]+)x \| .*$"
        found = re.findall(words, page, re.MULTILINE)
        assert found == [(f"{100 * price.share:.0f}", f"{step:.2f}", f"{step * price.steps_ratio:.2f}")]


def test_a_plan_shows_the_levers_at_its_own_share_and_at_the_three() -> None:
    made = plan()
    (own, fixed), *others = made.lever_shares
    before, after = made.unpruned.phases, made.pruned.phases
    same = sum(seconds for phase, seconds in before.items() if after[phase] == seconds)
    assert fixed * sum(before.values()) == pytest.approx(same), "no phase is forgotten"
    assert others == [(0.35, 0.0), (0.65, 0.0), (0.75, 0.0)]
    phases = made.unpruned.phases
    assert own == pytest.approx(phases["generation"] / sum(phases.values()))
    text, found = "\n".join(as_text(made)), as_json(made)
    assert f"this run {own:.0%}" in text
    [row] = [row for row in made.levers if row.levers == Levers(faster=2.0)]
    assert row.gains[0].step == pytest.approx(1 / (1 - own / 2))
    assert f"{row.gains[0].step:.2f}x" in text
    assert len(found["levers"]) == len(TABLE) and found["lever_shares"][0] == [own, fixed]


def test_all_groups_have_a_gradient_with_a_kl_term() -> None:
    [without], [with_kl] = (
        [row.gains[1].step for row in plan(*words).levers if row.levers == Levers(completions=0.5)]
        for words in ([], ["loss.kl_coef=0.01"])
    )
    assert without == pytest.approx(1 / (0.35 + 0.65 * 0.5 / 0.6)) and with_kl == pytest.approx(1 / (0.35 + 0.65 * 0.5))


def test_the_price_in_steps_is_an_input_that_defaults_to_what_was_measured() -> None:
    made = plan()
    assert made.steps_ratio == 0.92
    assert made.speed_up_to_accuracy == pytest.approx(0.92 * made.speed_up)
    assert plan(steps_ratio=0.95).steps_ratio == 0.95
    assert plan("pruning.completions.rule=top_k").steps_ratio is None


def test_a_run_whose_pruning_was_not_measured_has_no_price() -> None:
    assert pruning_of(of()) == Levers(prompts=0.7, completions=0.5)
    assert pruning_of(of("pruning.prompts.rule=none")) == Levers(completions=0.5)
    for words in ("pruning.refill=prompts", "pruning.prompts.rule=greso", "pruning.completions.schedule.shape=linear"):
        assert pruning_of(of(words)) is None
