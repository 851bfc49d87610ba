"""Problems of reasoning-gym, as a run reads and scores them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.config import DataConfig, ReasoningGymConfig, replace
from megatron_dppo.data.generators import check_tasks, make_problems
from megatron_dppo.data.prompts import load_prompts
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.init import write_model
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import reasoning_gym_score
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Score

pytest.importorskip("reasoning_gym")

PRINT = """
from megatron_dppo.config import ReasoningGymConfig
from megatron_dppo.data.generators import make_problems
print([row["prompt"] for split in ("train", "eval") for row in make_problems({config!r}, split=split)])
"""
TASKS = {"chain_sum": {"max_terms": 3}, "leg_counting": {}, "bitwise_arithmetic": {"difficulty": 1}}
CONFIG = ReasoningGymConfig(tasks=TASKS, problems=60, eval_problems=15, seed=7)


def test_pools_are_functions_of_the_settings_and_share_no_question() -> None:
    train, held_out = (make_problems(CONFIG, split=split) for split in ("train", "eval"))
    assert (len(train), len(held_out)) == (60, 15)
    questions = [row["prompt"] for row in (*train, *held_out)]
    assert len(set(questions)) == 75
    assert [row["prompt"] for row in make_problems(CONFIG, split="train")] == questions[:60]
    assert [row["prompt"] for row in make_problems(replace(CONFIG, seed=8), split="train")] != questions[:60]
    larger = make_problems(replace(CONFIG, problems=90), split="eval")
    assert [row["prompt"] for row in larger] == questions[60:], "whatever the size of the training pool"
    sources = [row["data_source"].partition("/")[2] for row in train]
    assert {sources.count(task) for task in TASKS} == {20}


def test_pools_are_the_same_in_every_process_whatever_it_hashes_by() -> None:
    """Families that walk through sets."""
    config = ReasoningGymConfig(tasks={"isomorphic_strings": {}, "ransom_note": {}}, problems=6, eval_problems=2)
    made = {
        subprocess.run(
            [sys.executable, "-c", PRINT.format(config=config)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(made) == 1 and "isomorphic" in made.pop()


def test_an_answer_that_a_verifier_cannot_read_is_wrong_and_settings_decide_what_is_right() -> None:
    (row,) = make_problems(
        ReasoningGymConfig(tasks={"prime_factorization": {}}, problems=1, eval_problems=1), split="train"
    )
    words = reasoning_gym_score(row["data_source"], "I think it is 2 times 3", row["label"], row["extra_info"])
    assert words["score"] == 0.0
    exact = {"decimal_arithmetic": {"min_num_decimal_places": 8, "max_num_decimal_places": 10}}
    (row,) = make_problems(ReasoningGymConfig(tasks=exact, problems=1, eval_problems=1, seed=3), split="train")
    rounded = f"{float(row['label']):.3f}"
    assert reasoning_gym_score(row["data_source"], row["label"], row["label"], row["extra_info"])["acc"]
    assert not reasoning_gym_score(row["data_source"], rounded, row["label"], row["extra_info"])["acc"]


def test_every_task_s_own_verifier_scores_what_the_policy_says(tmp_path: Path) -> None:
    write_model(tmp_path / "model", hidden=32, heads=2, kv_heads=1, head_dim=16, ffn=32, layers=1)
    data = DataConfig(train="reasoning_gym", chat_template=False, max_prompt_tokens=4096, reasoning_gym=CONFIG)
    tokenizer = load_tokenizer(tmp_path / "model")
    prompts = [*load_prompts(data, tokenizer, split="train")[:9], *load_prompts(data, tokenizer, split="eval")[:3]]
    workers = RewardWorkers("reasoning_gym", workers=1, timeout_s=60.0, memory_mib=4096)
    try:
        said = [f"I think <answer>1</answer>, no, <answer>{prompt.label}</answer>" for prompt in prompts]
        said += [prompt.label for prompt in prompts] + ["<answer>nonsense</answer>" for _ in prompts]
        items = [
            ScoreItem(prompt.data_source, text, prompt.label, prompt.extra)
            for prompt, text in zip(prompts * 3, said, strict=True)
        ]
        scored = workers.score(items, most_failures=0)
    finally:
        workers.close()
    assert (scored.timeouts, scored.errors) == (0, 0)
    scores = [score for score in scored.scores if isinstance(score, Score)]
    assert [score.correct for score in scores] == [True] * 24 + [False] * 12
    assert all(score.reward == 1.0 for score in scores[:24]) and all(score.reward < 0.5 for score in scores[24:])


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ({"chain_sm": {}}, "is no task of reasoning-gym. Perhaps 'chain_sum' was meant"),
        ({"chain_sum": {"max_term": 3}}, "unexpected keyword argument 'max_term'"),
        ({"chain_sum": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
    ],
)
def test_a_task_that_does_not_exist_is_refused_before_a_run_begins(tasks: dict, words: str) -> None:
    with pytest.raises(UserError) as raised:
        check_tasks(ReasoningGymConfig(tasks=tasks))
    assert raised.value.setting.startswith("data.reasoning_gym.tasks") and words in str(raised.value)


def test_a_task_with_too_few_problems_is_told_of() -> None:
    few = ReasoningGymConfig(
        tasks={"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}, problems=500
    )
    with pytest.raises(UserError, match="has no more than about"):
        make_problems(few, split="train")
