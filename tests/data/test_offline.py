"""Files of another policy's rollouts: groups by rank, texts and tokens, and rows that cannot be
trained on."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.data.offline import load_offline
from megatron_dppo.data.prompts import PromptPool
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import run_preflight
from tests.data.conftest import write_parquet

ROWS = [
    {
        "prompt": f"{number}+1=",
        "completions": [
            {"token_ids": [5, 6 + i], "logprobs": [-0.5, -1.5], "reward": float(i)}
            for i in range(3)
        ],
    }
    for number in range(7)
]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings_of(file: Path) -> list[str]:
    limits = [
        "data.max_prompt_tokens=24",
        "rollout.max_response_tokens=9",
        "rollout.samples_per_prompt=3",
    ]
    return [f"data.rollouts={file}", "data.chat_template=false", *limits]


def load(
    file: Path, tokenizer: Tokenizer, *, rank: int = 0, ranks: int = 1
) -> tuple[PromptPool, Any]:
    return load_offline(
        load_config(None, settings_of(file)), tokenizer, 131, (1,), rank=rank, ranks=ranks
    )


BAD: dict[str, tuple[dict[str, Any], ...]] = {
    "exactly one of token_ids and text": ({"token_ids": None}, {"text": "#5"}),
    "has no tokens": ({"token_ids": []},),
    "none of the policy's": ({"token_ids": [5, 10**6]},),
    "logprobs for": ({"token_ids": [5]},),
    "over rollout.max_response_tokens = 9": ({"token_ids": [1] * 10},),
    "above 0, null or not finite": ({"logprobs": [0.5, -1.0]}, {"logprobs": [math.nan, -1.0]}),
    "no list of numbers under 'logprobs'": ({"logprobs": None},),
    "without a token that the policy sampled": ({"loss_mask": [0, 0]},),
    "a loss_mask with values other": ({"loss_mask": [0.5, 0.5]},),
    "under 'correct'": ({"correct": "no"},),
    "has the reward": ({"reward": "1"}, {"reward": 1e12}),
    "the finish_reason": ({"finish_reason": "abort"},),
}
"""Problems, and changes of a completion that have them."""


@pytest.mark.parametrize("problem", BAD)
def test_bad_completion_is_named_with_line(
    problem: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for change in BAD[problem]:
        rows = json.loads(json.dumps(ROWS))
        rows[2]["completions"][1] |= change
        with pytest.raises(UserError) as caught:
            load(write_rows(tmp_path / "bad.jsonl", rows), tokenizer)
        assert caught.value.setting == "data.rollouts"
        for part in ("line 3", "completion 2", problem):
            assert part in str(caught.value)


def test_groups_are_divided_among_ranks(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rollouts.jsonl", ROWS)
    pool, whole = load(file, tokenizer)
    for rank in range(3):
        own, groups = load(file, tokenizer, rank=rank, ranks=3)
        assert groups.keys() == set(range(rank, len(ROWS), 3))
        assert [prompt.text for prompt in own] == [prompt.text for prompt in pool]
        assert not any("completions" in prompt.extra for prompt in own)
        assert all(group.scores == whole[prompt].scores for prompt, group in groups.items())


def test_texts_are_tokenised_and_a_stop_token_ends_them(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    text = {"text": "#5", "reward": 1.0, "logprobs": [-1.0, -2.0]}
    ids = {
        "token_ids": [5, 1],
        "reward": 0.0,
        "correct": True,
        "loss_mask": [0, 1],
        "logprobs": [-1.0, -2.0],
    }
    # Parquet has null for the fields of other completions.
    file = write_parquet(
        tmp_path / "texts.parquet", prompt=["2+3="], completions=[[text, ids, ids]]
    )
    (group,) = load(file, tokenizer)[1].values()
    first, second, _ = group.completions
    assert tokenizer.decode(first.token_ids) == "#5"
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert second.loss_mask.tolist() == [False, True]
    assert [score.correct for score in group.scores] == [True, True, True]


def test_rollouts_need_no_label_and_are_read_by_preflight(policy: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rollouts.jsonl", ROWS)
    common = [
        f"model.path={policy}",
        f"run.dir={tmp_path}/run",
        "rollout.prompts_per_step=4",
        "pack.max_tokens=64",
    ]
    config = load_config(None, [*common, *settings_of(file)])
    run_preflight(config, "train")
    write_rows(file, [{"prompt": " ", "completions": []}])
    with pytest.raises(UserError, match=r"data.rollouts.*line 1.*empty prompt"):
        run_preflight(config, "train")
