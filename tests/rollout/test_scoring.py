"""Groups are scored as they are completed, and their scores come in the order of their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.init import character_tokenizer, write_tokenizer
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.types import Completion, Prompt, VersionSpan
from megatron_dppo.rollout.scoring import GroupScoring
from tests.rollout.scripted import FAILING, LIMIT_S


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(character_tokenizer(), folder, max_tokens=512)
    return load_tokenizer(folder)


@pytest.fixture
def workers() -> Iterator[RewardWorkers]:
    pool = RewardWorkers(FAILING, workers=1, timeout_s=LIMIT_S)
    pool.wait_ready()
    yield pool
    pool.close()


def group(tokenizer: Tokenizer, *texts: str) -> tuple[Completion, ...]:
    def completion(text: str) -> Completion:
        ids = np.array(tokenizer([text], add_special_tokens=False)["input_ids"][0], np.int32)
        spans = (VersionSpan(0, len(ids)),)
        return Completion(ids, np.zeros(len(ids), np.float32), np.ones(len(ids), np.bool_), spans, "stop")

    return tuple(map(completion, texts))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, np.array([3], np.int32), "", "1", "here") for i in range(count)]


def test_scores_are_the_prompts_whatever_is_complete_first(workers: RewardWorkers, tokenizer: Tokenizer) -> None:
    groups = [group(tokenizer, f"score {2 * i}", f"score {2 * i + 1}") for i in range(4)]
    scoring = GroupScoring(workers, tokenizer, prompts(4), most_failures=0)
    for place in (2, 0):
        scoring.look([(place, groups[place])])
    found = scoring.finish(groups)
    assert found.texts == [[f"score {2 * i}", f"score {2 * i + 1}"] for i in range(4)]
    assert [[score and score.reward for score in scores] for scores in found.scores] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_function_of_groups_is_given_those_of_the_prompts(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "groups.py").write_text(
        "def group_rm(args, samples):\n    return [float(s.response[-1]) + 10 * len(samples) for s in samples]\n"
    )
    groups = [group(tokenizer, "score 1", "score 2"), group(tokenizer, "score 3"), group(tokenizer, *["score 4"] * 3)]
    with closing(RewardWorkers(f"{tmp_path}/groups.py:group_rm", workers=2, timeout_s=LIMIT_S)) as pool:
        scoring = GroupScoring(pool, tokenizer, prompts(3), most_failures=0)
        scoring.look([(2, groups[2])])
        found = scoring.finish(groups).scores
    assert [[score and score.reward for score in scores] for scores in found] == [[21, 22], [13], [34] * 3]


def test_trls_functions_are_given_the_tokens_that_the_engine_made(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Not those of the text, which may be others: special tokens are not in it."""
    (tmp_path / "ids.py").write_text("def reward(completion_ids, completions):\n    return [sum(completion_ids[0])]\n")
    (completion,) = group(tokenizer, "score 1")
    ended = replace(
        completion,
        token_ids=np.append(completion.token_ids, np.int32(tokenizer.eos_token_id)),
        logprobs=np.append(completion.logprobs, np.float32(0)),
        loss_mask=np.append(completion.loss_mask, True),
        versions=(VersionSpan(0, len(completion.token_ids) + 1),),
    )
    with closing(RewardWorkers(f"{tmp_path}/ids.py:reward", workers=1, timeout_s=LIMIT_S)) as pool:
        ((score,),) = GroupScoring(pool, tokenizer, prompts(1), most_failures=0).finish([(ended,)]).scores
    assert score is not None and score.reward == ended.token_ids.sum() != completion.token_ids.sum()


def test_what_fails_while_others_generate_is_raised_at_the_end(workers: RewardWorkers, tokenizer: Tokenizer) -> None:
    scoring = GroupScoring(workers, tokenizer, prompts(1), most_failures=0)
    broken = group(tokenizer, "score 1")
    assert scoring.look([(7, broken)]) is False  # of a prompt that there is not
    with pytest.raises(IndexError):
        scoring.finish([broken])
