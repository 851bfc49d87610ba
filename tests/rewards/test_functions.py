"""A reward is found by its name or refused; its result is a finite number or an error; several
rewards are summed."""

from __future__ import annotations

from collections import OrderedDict
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.rewards.adapters import GroupScorer, NotScoredError, ScoreItem, run_awaitable
from megatron_dppo.rewards.functions import (
    LARGEST,
    InvalidScoreError,
    check_columns,
    check_completion_form,
    check_labels,
    exact_score,
    parse_reward,
    parse_role_rewards,
    read_score,
    resolve,
)
from megatron_dppo.rl.score import Score
from megatron_dppo.settings import load_config
from tests.rewards.math.test_completion import THOUGHTS

CONFIGS = Path(__file__).parents[2] / "configs"
MINE = '''
import neighbour

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form, with further numbers."""
    return {"score": neighbour.SCORE, "acc": True, "pred": "it", "format": True, "depth": 3, "note": "well",
            "odd": float("inf"), "roles": {"solver": 2.0}}

def text(data_source, solution_str, ground_truth, extra_info=None):
    return "0.5"

def brevity(completions, **columns):
    """TRL's form."""
    return [-float(len(completion)) for completion in completions]

def code_only(completions, task, log_metric, **columns):
    if task[0] != "code":
        return [None]
    log_metric("lines", 1)
    log_metric("lines", 2)
    log_metric("no_number", float("nan"))
    return [10.0]

async def judge(completions, log_metric, **columns):
    log_metric("asked", 1.0)
    return [4.0]

def group_rm(args, samples):
    """slime's form: the shortest of the group is worth 1."""
    shortest = min(len(sample.response) for sample in samples)
    return [float(len(sample.response) == shortest) for sample in samples]
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "neighbour.py").write_text("SCORE = 0.5\n")
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "mine.py").write_text(MINE)
    return folder / "mine.py"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("maths", ["names no reward", "'math'"]),
        ("nowhere.py:compute_score", ["there is no file nowhere.py"]),
        ("no_such_module:compute_score", ["cannot be imported", "no_such_module"]),
        ("FILE:compute_scores", ["no function 'compute_scores'", "Perhaps 'compute_score'"]),
        ("FOLDER/broken.py:f", ["ZeroDivisionError: division by zero"]),
    ],
)
def test_unusable_functions_are_refused(file: Path, spec: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        resolve(spec.replace("FILE", str(file)).replace("FOLDER", str(file.parent)))
    assert all(word in str(caught.value) for word in ["reward.function", *words]), str(caught.value)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, (1.0, True)),
        ({"score": 0.5, "acc": True}, (0.5, True)),
        ({"score": 1.5, "acc": False, "pred": "7"}, (1.5, False)),
        (0.7 + 0.2 + 0.1, (0.7 + 0.2 + 0.1, True)),
        (OrderedDict(score=-1, acc=None), (-1.0, False)),
        (torch.tensor(0.5), (0.5, False)),
        (Decimal("0.25"), (0.25, False)),
        ({"score": Decimal(1), "acc": torch.tensor(False)}, (1.0, False)),
        (LARGEST, (LARGEST, True)),
    ],
)
def test_scores_and_correctness_are_told_apart(
    returned: object, expected: tuple[float, bool]
) -> None:
    assert parse_reward(returned) == expected


@pytest.mark.parametrize(
    "returned",
    [float("nan"), float("inf"), -1e308, 2e9, 10**400, 1j, None, "1.0", {}, {"acc": True},
     [1.0], {"score": 1.0, "acc": float("nan")}, {"score": 0.0, "acc": "false"},
     np.array([1.0]), Decimal("sNaN")],
)  # fmt: skip
def test_other_results_are_errors(returned: object) -> None:
    with pytest.raises(InvalidScoreError):
        parse_reward(returned)


def test_roles_of_a_conversation_have_rewards_of_their_own() -> None:
    returned = {"score": 0.5, "roles": {"solver": 1, "critic": np.float32(-0.25)}}
    assert (parse_reward(returned), parse_role_rewards(returned)) == (
        (0.5, False),
        {"solver": 1.0, "critic": -0.25},
    )
    assert parse_role_rewards(1.0) == parse_role_rewards({"score": 1.0}) == {}
    for wrong in ([1.0], {"solver": None}, {"solver": float("nan")}):
        with pytest.raises(InvalidScoreError):
            parse_role_rewards({"score": 0.5, "roles": wrong})


@pytest.mark.parametrize(
    ("solution", "label", "expected"),
    [
        (r"So \boxed{5\text{ cm}}.", "5", (True, r"5\text{ cm}", ("unit",))),
        ("#### 72.0", "72", (True, "72.0", ("number",))),
        (r"\boxed{6}", "5", (False, "6", ())),
    ],
)
def test_math_returns_answer_and_equivalences(
    solution: str, label: object, expected: object
) -> None:
    found = read_score(resolve("math")(ScoreItem("", solution, label)))
    assert (found.correct, found.answer, found.by) == expected


@pytest.mark.parametrize(
    ("solution", "label", "right"),
    [
        ("1+1=2\n#2", "2", True),
        (" B ", "B", True),
        ("#2 ", "#### 2", True),
        ("#5", ["5"], True),
        ("#2\n#3", "2", False),
    ],
)
def test_exact_compares_the_text_after_the_last_sign(
    solution: str, label: object, right: bool
) -> None:
    assert resolve("exact")(ScoreItem("", solution, label)) == float(right)


def test_exact_ignores_thoughts() -> None:
    for prompt, completion, answer in THOUGHTS:
        marked = (
            completion.replace(r"\boxed{", "#").replace("}", "").replace("The answer is 43.", "#43")
        )
        for label in ("42", "43"):
            assert exact_score("", marked, label, prompt=prompt) == float(label == answer)
    assert resolve("exact", ("(", ")"))(ScoreItem("", "(no) #43", "43")) == 1.0


@pytest.mark.parametrize(
    ("function", "label", "words"),
    [
        ("math", "", "has an empty one"),
        ("math", {"target": "1"}, "is a dict"),
        ("math", [float("nan")], "is nan"),
        ("exact", "5 #", "has an empty one"),
    ],
)
def test_labels_without_one_answer_are_refused(function: str, label: object, words: str) -> None:
    good = ("rows.jsonl, line 1", "5")
    check_labels(function, [good, ("rows.jsonl, line 2", ["5"]), ("rows.jsonl, line 3", "#### 5")])
    with pytest.raises(
        UserError, match=rf"reward.function = {function}: .*rows.jsonl, line 2.*{words}"
    ):
        check_labels(function, [good, ("rows.jsonl, line 2", label)])
    check_labels("mine.py:score", [("rows.jsonl, line 2", label)])


def read_spec(*parts: str) -> str:
    return load_config(
        None, [f"reward.function=[{', '.join(f'{{{part}}}' for part in parts)}]"]
    ).reward.spec


def score(spec: str, *solutions: str, **extra: object) -> list[Score]:
    """Score completions of one prompt, the label of which is 7."""
    items = [ScoreItem("here", solution, "7", extra) for solution in solutions]
    scorer = resolve(spec)
    returned = (
        scorer(items)
        if isinstance(scorer, GroupScorer)
        else [run_awaitable(scorer(item)) for item in items]
    )
    return [read_score(each) for each in returned]


def test_reward_is_the_weighted_sum_and_the_first_function_judges(file: Path) -> None:
    spec = read_spec(
        "function: exact, weight: 2", f"function: {file}:brevity, weight: 0.1, name: short"
    )
    assert score(spec, "7", "it is 8") == [
        Score(2 * 1.0 + 0.1 * -1.0, True, metrics={"exact": 1.0, "short": -1.0}),
        Score(0.1 * -7.0, False, metrics={"exact": 0.0, "short": -7.0}),
    ]
    unweighted = read_spec("function: exact", f"function: {file}:brevity, weight: 0")
    assert score(unweighted, "77") == [Score(0.0, False, metrics={"exact": 0.0, "brevity": -2.0})]


def test_none_has_no_share_in_the_sum(file: Path) -> None:
    """TRL's sum leaves out the None of a function for other completions."""
    spec = read_spec(f"function: {file}:code_only, weight: 3", "function: exact")
    assert score(spec, "7", task="math") == [Score(1.0, True, metrics={"exact": 1.0})]
    metrics = {"code_only": 10.0, "exact": 0.0, "lines": 1.5}
    assert score(spec, "8", task="code") == [Score(30.0, True, metrics=metrics)]
    with pytest.raises(NotScoredError, match="none of them scores this completion"):
        score(read_spec(f"function: {file}:code_only"), "7", task="math")


def test_functions_of_all_forms_are_summed(file: Path) -> None:
    spec = read_spec("function: exact", f"function: {file}:judge", f"function: {file}:group_rm")
    assert score(spec, "7", "it is 8") == [
        Score(6.0, True, metrics={"exact": 1.0, "judge": 4.0, "group_rm": 1.0, "asked": 1.0}),
        Score(4.0, False, metrics={"exact": 0.0, "judge": 4.0, "group_rm": 0.0, "asked": 1.0}),
    ]


def test_further_numbers_of_a_result_are_metrics(file: Path) -> None:
    function, numbers = f"{file}:compute_score", {"format": 1.0, "depth": 3.0}
    assert score(function, "") == [Score(0.5, True, "it", (), {"solver": 2.0}, numbers)]
    metrics = {**numbers, "compute_score": 0.5, "exact": 1.0}
    summed = read_spec(f"function: {function}, weight: 2", "function: exact, weight: 3")
    assert score(summed, "7") == [Score(4.0, True, "it", (), {"solver": 7.0}, metrics)]
    assert score(f"{file}:judge", "7") == [Score(4.0, True, metrics={"asked": 1.0})]


def test_invalid_scores_of_a_sum_name_the_function(file: Path) -> None:
    with pytest.raises(InvalidScoreError) as caught:
        score(read_spec("function: exact", f"function: {file}:text"), "7")
    assert f"a str for a score ({file}:text): '0.5'" in str(caught.value)
    with pytest.raises(InvalidScoreError, match="a score beyond"):
        score(
            read_spec("function: exact, weight: 1e9", f"function: {file}:judge, weight: 1e9"), "7"
        )


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (["function: exact", "function: a.py:exact"], "names exact more than once"),
        (["function: a.py:errors"], "names a metric errors, which counts failures"),
        (["function: exact, wieght: 2"], "wieght: Extra inputs are not permitted"),
        (["function: exact, weight: inf"], "weight: should be a finite number"),
    ],
)
def test_ambiguous_lists_of_functions_are_refused(parts: list[str], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        read_spec(*parts)
    assert refused.value.setting == "reward.function" and problem in refused.value.problem


def test_labels_and_columns_are_checked_for_each_function(file: Path) -> None:
    spec = read_spec(f"function: {file}:code_only", "function: exact")
    with pytest.raises(UserError, match="row 1 has an empty one"):
        check_labels(spec, [("row 0", "7"), ("row 1", " ")])
    with pytest.raises(UserError, match="the column 'task', which row 1 does not have"):
        check_columns(spec, [("row 0", {"task": "code"}), ("row 1", {"label": "7"})])


MESSAGES = """
def in_messages(completions, **columns):
    return [float(completion[0]["content"] == "7") for completion in completions]

def in_both(completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text == "7") for text in texts]

def failing(completions, **columns):
    columns["absent"]["content"]
"""


def test_messages_are_not_read_from_a_text(tmp_path: Path) -> None:
    """Before the first step, for a prompt that is text."""
    (tmp_path / "trl_form.py").write_text(MESSAGES)
    item = ScoreItem("", "1", "7", {}, raw_prompt="3 + 4 =", place="row 0")
    with pytest.raises(UserError, match="the prompt of row 0 is text") as raised:
        check_completion_form(f"{tmp_path / 'trl_form.py'}:in_messages", item)
    assert 'Write completion in place of completion[0]["content"]' in raised.value.remedy
    for name in ("in_both", "failing"):
        check_completion_form(f"{tmp_path / 'trl_form.py'}:{name}", item)
    chat = ScoreItem("", "7", "7", {}, raw_prompt=[{"role": "user", "content": "3 + 4 ="}])
    assert resolve(f"{tmp_path / 'trl_form.py'}:in_messages")(chat) == 1.0


def test_example_reward_prefers_closer_answers() -> None:
    """configs/gsm8k_reward.py: 1 for the right answer alone, a part for a close answer in the right
    form."""
    score = resolve(f"{CONFIGS / 'gsm8k_reward.py'}:compute_score")
    label = "48/2 = <<48/2=24>>24\n#### 1,072"
    assert parse_reward(score(ScoreItem("", "so\n#### 1,072.0", label))) == (1.0, True)
    answers = ["1072.001", "1071", "1000", "500", "0", "-9", "99999999"]
    values = [parse_reward(score(ScoreItem("", f"#### {answer}", label)))[0] for answer in answers]
    assert values == sorted({*values}, reverse=True)
    assert values[-1] > 0.1 and values[0] <= 0.5
    assert parse_reward(score(ScoreItem("", "it is 1072", label))) == (0.0, False)
