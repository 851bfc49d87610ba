"""The answer is what follows the policy's thoughts, and without their end there is none."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_dppo.config import RewardConfig
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.rewards.adapters import ScoreItem
from megatron_dppo.rewards.functions import exact_score, resolve
from megatron_dppo.rewards.math.completion import THINKING_TAGS, after_thoughts
from megatron_dppo.rewards.math.verdict import math_verdict
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.scoring import GroupScoring

PLAIN, OPENED, CLOSED = "user: ?\nassistant: ", "assistant: <think>\n", "assistant: <think>\n\n</think>\n\n"
CASES = [
    (PLAIN, r"<think>\boxed{42}</think> The answer is 43.", "43"),
    (PLAIN, r"<think> so \boxed{42}", ""),
    (PLAIN, r"<think> so \boxed{42} </think>", ""),
    (PLAIN, r"so \boxed{43}", "43"),
    (OPENED, r"so \boxed{42}</think>\boxed{43}", "43"),
    (OPENED, r"so \boxed{42}", ""),
    (OPENED, r"<think>so \boxed{42}</think>\boxed{43}", "43"),
    (CLOSED, r"so \boxed{43}", "43"),
    (CLOSED, r"<think> so \boxed{42}", ""),
    ("What does <think> mean?\nassistant: ", r"\boxed{43}", "43"),
    (PLAIN, r"<think>\boxed{1}</think>\boxed{42}<think>no,</think> #### 43", "43"),
    (PLAIN, r"<think>\boxed{1}</think>\boxed{43}<think>or", ""),
]


@pytest.mark.parametrize(("prompt", "completion", "answer"), CASES)
@pytest.mark.parametrize("label", ["42", "43"])
def test_only_what_follows_the_thoughts_is_the_answer(prompt: str, completion: str, answer: str, label: str) -> None:
    verdict = math_verdict("", completion, label, prompt=prompt)
    assert (verdict["score"], verdict["pred"].rstrip(".")) == (float(label == answer), answer)
    marked = completion.replace(r"\boxed{", "#").replace("}", "").replace("The answer is 43.", "#43")
    assert exact_score("", marked, label, prompt=prompt) == float(label == answer)


def test_other_tags_may_be_set_and_none() -> None:
    text = r"[T] \boxed{42} [/T] <think> \boxed{43}"
    assert math_verdict("", text, "43", thinking_tags=("[T]", "[/T]"))["score"] == 1.0
    assert math_verdict("", r"[T] \boxed{43}", "43", thinking_tags=("[T]", "[/T]"))["score"] == 0.0
    assert math_verdict("", text, "43", thinking_tags=())["score"] == 1.0
    assert after_thoughts(text) == ""


def test_the_settings_reach_the_processes_that_score() -> None:
    """With the prompt as the policy read it."""
    assert RewardConfig().thinking_tags == THINKING_TAGS
    items = [ScoreItem("", completion, "43", rendered=prompt) for prompt, completion, _ in CASES]
    for function in ("math", "exact"):
        with closing(RewardWorkers.of(RewardConfig(function=function, timeout_s=20.0))) as pool:
            scores = pool.score(items).scores
        if function == "math":
            assert [score and score.reward for score in scores] == [float(answer == "43") for *_, answer in CASES]
        with closing(RewardWorkers.of(RewardConfig(function=function, timeout_s=20.0, thinking_tags=()))) as pool:
            (score,) = pool.score([ScoreItem("", "<think>\n#43", "43", rendered=OPENED)]).scores
        assert score is not None and score.reward == 1.0
    assert resolve("exact", ("(", ")"))(ScoreItem("", "(no) #43", "43")) == 1.0


def test_tags_that_are_special_tokens_are_read(tmp_path: Path) -> None:
    write_tokenizer(character_tokenizer(), tmp_path, max_tokens=512)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.add_tokens(["[T]", "[/T]", "[X]"], special_tokens=True)
    theirs.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    (ids,) = tokenizer(["[T]#2[/T]#3[X]"], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "#2#3"
    spans = (VersionSpan(0, len(ids)),)
    whole = Completion(np.array(ids, np.int32), np.zeros(len(ids), np.float32), np.ones(len(ids), bool), spans, "stop")
    cut = replace(whole, token_ids=whole.token_ids[:3])
    reward = RewardConfig(function="exact", timeout_s=20.0)
    for tags, texts, rewards in (
        (("[T]", "[/T]"), ["[T]#2[/T]#3", "[T]#2"], [1.0, 0.0]),
        (THINKING_TAGS, ["#2#3", "#2"], [1.0, 0.0]),
    ):
        with closing(RewardWorkers("exact", workers=1, timeout_s=reward.timeout_s, thinking_tags=tags)) as pool:
            scoring = GroupScoring(pool, tokenizer, [Prompt(0, np.array([3], np.int32), "", "3")], most_failures=0)
            found = scoring.finish([(whole, cut)])
        assert found.texts == [texts]
        assert [score and score.reward for score in found.scores[0]] == rewards
