"""A reward is found by its name or refused in words; what it returns is a finite number or an error."""

from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import (
    LARGEST,
    InvalidScoreError,
    check_labels,
    details,
    resolve,
    role_rewards,
    to_score,
)

SOURCE = """
import neighbour
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return neighbour.SCORE
def too_few(solution_str):
    return 0.0
async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 0.125
number = 3
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("SCORE = 0.25\n")
    file = tmp_path / "my_reward.py"
    file.write_text(SOURCE)
    return file


def test_builtin_rewards_go_by_their_names() -> None:
    assert resolve("exact")(ScoreItem("", "2+3=5\n#5", "5")) == 1.0
    assert to_score(resolve("math")(ScoreItem("", r"\boxed{\frac{1}{2}}", "0.5"))) == (1.0, True)


def test_function_of_a_file_can_import_its_neighbours(source: Path) -> None:
    assert resolve(f"{source}:compute_score")(ScoreItem("", "", "")) == 0.25


def test_coroutine_function_is_waited_for(source: Path) -> None:
    assert resolve(f"{source}:later")(ScoreItem("", "", "")) == 0.125


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("maths", ["names no reward", "'math'"]),
        (":f", ["names no reward"]),
        ("nowhere.py:compute_score", ["there is no file nowhere.py"]),
        ("no_such_module:compute_score", ["cannot be imported", "no_such_module"]),
        ("FILE:compute_scores", ["no function 'compute_scores'", "Perhaps 'compute_score'"]),
        ("FILE:too_few", ["cannot be called with (data_source, solution_str, ground_truth, extra_info)"]),
        ("FILE:number", ["is no function"]),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(source: Path, spec: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(spec.replace("FILE", str(source)))
    assert all(word in str(caught.value) for word in ["reward.function", *words]), str(caught.value)


def test_file_that_fails_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        resolve(f"{tmp_path}/broken.py:compute_score")


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1.0, (1.0, True)),
        (0.99, (0.99, False)),
        (True, (1.0, True)),
        (np.float32(0.5), (0.5, False)),
        (np.int64(2), (2.0, True)),
        ({"score": 0.5, "acc": True}, (0.5, True)),
        ({"score": 1.5, "acc": False, "pred": "7"}, (1.5, False)),
        ({"score": 1.0}, (1.0, True)),
        (0.7 + 0.2 + 0.1, (0.7 + 0.2 + 0.1, True)),
        (OrderedDict(score=-1, acc=None), (-1.0, False)),
        (np.bool_(True), (1.0, True)),
        (np.array(0.5), (0.5, False)),
        (torch.tensor(0.5), (0.5, False)),
        (Decimal("0.25"), (0.25, False)),
        ({"score": torch.tensor(0.0), "acc": np.bool_(True)}, (0.0, True)),
        ({"score": Decimal(1), "acc": torch.tensor(False)}, (1.0, False)),
        ({"score": 1.0, "acc": 0}, (1.0, False)),
    ],
)
def test_scores_and_correctness_are_told_apart(returned: object, expected: tuple[float, bool]) -> None:
    assert to_score(returned) == expected


@pytest.mark.parametrize(
    "returned",
    [float("nan"), float("inf"), 1e308, -1e308, 2e9, 10**400, 1j, None, "1.0", {}, {"acc": True}, {"score": None},
     [1.0], {"score": 1.0, "acc": float("nan")}, {"score": 0.0, "acc": "false"}, {"score": 1.0, "acc": 0.5},
     np.array([1.0]), Decimal("sNaN"), {"score": 1.0, "acc": []}],
)  # fmt: skip
def test_what_is_no_number_to_train_on_is_an_error(returned: object) -> None:
    with pytest.raises(InvalidScoreError):
        to_score(returned)


def test_each_role_of_a_conversation_may_have_a_reward() -> None:
    returned = {"score": 0.5, "roles": {"solver": 1, "critic": np.float32(-0.25)}}
    assert (to_score(returned), role_rewards(returned)) == ((0.5, False), {"solver": 1.0, "critic": -0.25})
    assert role_rewards(1.0) == role_rewards({"score": 1.0}) == {}
    for wrong in ([1.0], {"solver": None}, {"solver": float("nan")}):
        with pytest.raises(InvalidScoreError):
            role_rewards({"score": 0.5, "roles": wrong})


def test_rewards_up_to_the_largest_leave_advantages_and_squares_finite() -> None:
    largest = np.float32(to_score(LARGEST)[0])
    assert to_score(-LARGEST) == (-LARGEST, False)
    # A gradient of a thousand by each of 10¹² weights, as large as the reward, squared and summed as its norm is.
    assert np.isfinite(largest**2 * np.float32(1e6) * np.float32(1e12))


@pytest.mark.parametrize(
    ("function", "label", "words"),
    [
        ("math", "", "has an empty one"),
        ("math", " \u200b", "has an empty one"),
        ("math", ["1", "2"], "is a list of 2"),
        ("math", {"target": "1"}, "is a dict"),
        ("math", [float("nan")], "is nan"),
        ("exact", "5 #", "has an empty one"),
        ("exact", [], "is a list of 0"),
    ],
)
def test_label_that_a_built_in_verifier_cannot_compare_is_refused_with_its_row(
    function: str, label: object, words: str
) -> None:
    good = ("rows.jsonl, line 1", "5")
    check_labels(function, [good, ("rows.jsonl, line 2", ["5"]), ("rows.jsonl, line 3", "#### 5")])
    with pytest.raises(UserError, match=rf"reward.function = {function}: .*rows.jsonl, line 2.*{words}"):
        check_labels(function, [good, ("rows.jsonl, line 2", label)])
    check_labels("mine.py:score", [("rows.jsonl, line 2", label)])


def test_only_label_of_a_list_is_the_label() -> None:
    assert resolve("exact")(ScoreItem("", "#5", ["5"])) == 1.0
    assert to_score(resolve("math")(ScoreItem("", r"\boxed{5}", [5.0]))) == (1.0, True)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (1.0, (None, ())),
        ({"score": 1.0, "acc": True}, (None, ())),
        ({"score": 0.0, "pred": None, "by": "unit"}, (None, ())),
        ({"score": 1.0, "pred": 7, "by": ["unit", "number"]}, ("7", ("unit", "number"))),
    ],
)
def test_a_function_may_say_which_answer_it_took_and_why_it_is_right(returned: object, told: object) -> None:
    assert details(returned) == told


def test_the_verifier_for_mathematics_says_both() -> None:
    verdict = resolve("math")
    assert details(verdict(ScoreItem("", r"So \boxed{5\text{ cm}}.", "5"))) == (r"5\text{ cm}", ("unit",))
    assert details(verdict(ScoreItem("", "#### 72.0", "72"))) == ("72.0", ("number",))
    assert details(verdict(ScoreItem("", "#### 72", "72"))) == ("72", ())
    assert details(verdict(ScoreItem("", r"\boxed{6}", "5"))) == ("6", ())
