"""Groups are scored as they are completed, and their scores come in the order of their prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.init import build_character_tokenizer, write_tokenizer
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Completion, Prompt
from megatron_dppo.rollout.scoring import GroupScoring
from tests.rollout.scripted import FAILING, LIMIT_S, ScriptedWorkers, completion_of
from tests.waiting import wait_until

REWARD, REWARD_TIMEOUT_S = FAILING, LIMIT_S


def group_of(tokenizer: Tokenizer, *texts: str) -> tuple[Completion, ...]:
    return tuple(map(completion_of, tokenizer([*texts], add_special_tokens=False)["input_ids"]))


def prompts_of(count: int) -> list[Prompt]:
    return [
        Prompt(i, np.array([3], np.int32), "", "1", "here", {"add": 2 * i}) for i in range(count)
    ]


def test_scores_keep_the_order_of_prompts(workers: RewardWorkers, tokenizer: Tokenizer) -> None:
    """Groups that are complete early are scored before the last is there. ``echo`` reads the label
    and columns."""
    groups = [group_of(tokenizer, f"score {2 * i}", "echo") for i in range(4)]
    scoring = GroupScoring(workers, tokenizer, prompts_of(4), max_failures=0)
    for place in (2, 0):
        scoring.process_groups([(place, groups[place])])
    wait_until(lambda: not scoring.process_groups([]))
    found = scoring.finish(groups)
    assert [group.texts for group in found] == [(f"score {2 * i}", "echo") for i in range(4)]
    assert [group.rewards.tolist() for group in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_functions_get_the_tokens_of_the_engine(tokenizer: Tokenizer) -> None:
    """For TRL's ``completion_ids``. Special tokens are not in the text."""
    ended = completion_of([*tokenizer.encode("score 1"), tokenizer.eos_token_id])
    workers = ScriptedWorkers()
    GroupScoring(workers, tokenizer, prompts_of(1), max_failures=0).finish([(ended,)])
    (item,) = workers._items
    assert (item.solution, [*item.token_ids]) == ("score 1", ended.token_ids.tolist())


def test_thinking_tags_that_are_special_tokens_are_kept(tmp_path: Path) -> None:
    write_tokenizer(build_character_tokenizer(), tmp_path, max_tokens=512)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.add_tokens(["[T]", "[/T]", "[X]"], special_tokens=True)
    theirs.save_pretrained(tmp_path)
    tokenizer, workers = load_tokenizer(tmp_path), ScriptedWorkers()
    (whole,) = group_of(tokenizer, "[T]#2[/T]#3[X]")
    assert tokenizer.decode(whole.token_ids, skip_special_tokens=True) == "#2#3"
    workers.thinking_tags = ("[T]", "[/T]")
    cut = replace(whole, token_ids=whole.token_ids[:3])
    found = GroupScoring(workers, tokenizer, prompts_of(1), max_failures=2).finish([(whole, cut)])
    assert found[0].texts == ("[T]#2[/T]#3", "[T]#2")


def test_failure_of_a_look_is_raised_at_the_end(tokenizer: Tokenizer) -> None:
    scoring = GroupScoring(ScriptedWorkers(), tokenizer, prompts_of(1), max_failures=0)
    group = group_of(tokenizer, "score 1")
    assert scoring.process_groups([(7, group)]) is False, "there is no such prompt"
    with pytest.raises(IndexError):
        scoring.finish([group])
