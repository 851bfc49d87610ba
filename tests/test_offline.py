"""Offline rollouts: another policy's completions are trained on as the engine's are, by weights of policy over it."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from megatron_dppo.config import (
    CompletionPruningConfig,
    Config,
    LayoutConfig,
    PromptPruningConfig,
    PruningConfig,
    replace,
)
from megatron_dppo.data.offline import OfflineGroup, load_offline
from megatron_dppo.data.prompts import PromptPool
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.train import Trainer, train
from megatron_dppo.trainer.preflight import preflight
from tests.ranks import RankPool
from tests.small_runs import begin_run, configure, rows, write_run
from tests.test_pruned_runs import die

ONE, TWO = LayoutConfig(dp=1), LayoutConfig(dp=2)
CAP = 2.0
"""Where none is set."""
NONE = PromptPruningConfig(rule="none")
PRUNING = {
    "pruned": PruningConfig(prompts=NONE, completions=CompletionPruningConfig(keep=0.5)),
    "whole": PruningConfig(prompts=NONE, completions=CompletionPruningConfig(rule="none")),
}
Edit = Callable[[dict[str, Any]], Any]


class Writing(Trainer):
    """Writes the rollouts of its steps down, in the order of the pool."""

    file = ""

    def complete(self, rollouts: StepRollouts) -> CompleteRollouts:
        rollouts = super().complete(rollouts)
        with Path(self.file).open("a") as lines:
            for group in sorted(rollouts.held.values(), key=lambda g: g.prompt.id):
                made = [
                    {"token_ids": c.token_ids.tolist(), "logprobs": c.logprobs.tolist(), "reward": float(reward)}
                    for c, reward in zip(group.completions, group.rewards, strict=True)
                ]
                lines.write(json.dumps({"prompt": group.prompt.text, "completions": made}) + "\n")
        return rollouts


def write_down(rank: int, size: int, config: Config, file: str) -> None:
    Writing.file = file
    with ExitStack() as to_close:
        begin_run(config, Writing, to_close).run()


def live(rank: int, size: int, config: Config) -> str:
    """What the run says."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(config)
    return said.getvalue()


def settings(policy: Path, run: Path, pruning: str = "whole", layout: LayoutConfig = ONE, **more: Any) -> Config:
    """The pool is one window, so that the first step is of every prompt, whatever their order."""
    config = configure(policy, run, layout, **more)
    return replace(
        config,
        rollout=replace(config.rollout, prompts_per_step=16),
        data=replace(config.data, arithmetic=replace(config.data.arithmetic, problems=16)),
        pruning=PRUNING[pruning],
        eval=replace(config.eval, problems=0),
    )


def offline(config: Config, file: Path) -> Config:
    return replace(config, data=replace(config.data, rollouts=str(file)))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, ranks: RankPool) -> Path:
    """With ``rollouts.jsonl``, of the run ``online``'s only step."""
    folder = write_run(tmp_path_factory.mktemp("policy"))
    ranks.run(1, write_down, settings(folder, folder / "online", steps=1), str(folder / "rollouts.jsonl"))
    return folder


def edited(policy: Path, to: Path, edit: Edit) -> Path:
    """The file with every completion edited."""
    read = [json.loads(line) for line in (policy / "rollouts.jsonl").read_text().splitlines()]
    for completion in (c for row in read for c in row["completions"]):
        edit(completion)
    to.write_text("\n".join(map(json.dumps, read)))
    return to


def test_a_file_of_the_policys_own_rollouts_is_trained_on_as_they_were(
    policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Also on two ranks, each of which takes its share of the file."""
    config = offline(settings(policy, tmp_path, layout=TWO, steps=1), policy / "rollouts.jsonl")
    said, _ = ranks.run(2, live, config)
    assert "tokens are another policy's" in (text := " ".join(said.split())) and "2 at most" in text
    (online,), (row,) = rows(policy / "online")[-1:], rows(tmp_path)[-1:]
    for name in ("rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm", "train/tokens"):
        assert row[name] == pytest.approx(online[name], rel=1e-4, abs=1e-6), name
    assert row["rollout/stale_tokens"] == 1.0 and row["staleness/mean"] == 0.0
    assert "train/rollout_logprob_abs_diff" not in row, "another policy's may differ"


@pytest.mark.parametrize(("less", "weight"), [(math.log(1.5), 1.5), (5.0, CAP), (-math.log(4.0), 0.25)])
def test_tokens_have_the_weight_of_policy_over_behaviour_up_to_the_cap(
    less: float, weight: float, policy: Path, ranks: RankPool, tmp_path: Path
) -> None:
    def rarer(completion: dict[str, Any]) -> None:
        completion["logprobs"] = [value - less for value in completion["logprobs"]]

    # Random weights leave every token a probability of far less than a quarter.
    file = edited(policy, tmp_path / "other.jsonl", rarer)
    ranks.run(1, live, offline(settings(policy, tmp_path / "run", steps=1), file))
    (online,), (row,) = rows(policy / "online")[-1:], rows(tmp_path / "run")[-1:]
    assert row["train/grad_norm"] == pytest.approx(weight * online["train/grad_norm"], rel=1e-3)


def test_a_pruned_run_that_dies_goes_on_bit_by_bit(policy: Path, ranks: RankPool, tmp_path: Path) -> None:
    configs = [
        offline(settings(policy, tmp_path / name, "pruned"), policy / "rollouts.jsonl") for name in ("whole", "died")
    ]
    ranks.run(1, live, configs[0])
    ranks.run(1, die, configs[1])
    ranks.run(1, live, configs[1])
    whole = rows(tmp_path / "whole")
    assert rows(tmp_path / "died") == whole
    assert 0.3 < sum(row["prune/kept_completion_fraction"] for row in whole[-5:]) / 5 < 0.9


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.pop("token_ids"), "either token_ids or text"),
        (lambda c: c.update(text="#5"), "either token_ids or text"),
        (lambda c: c.update(token_ids=[]), "has no tokens"),
        (lambda c: c["token_ids"].__setitem__(0, 10**6), "none of the policy's"),
        (lambda c: c["token_ids"].pop(), "logprobs for"),
        (lambda c: c.update(token_ids=[1] * 10), "has 10 tokens, over rollout.max_response_tokens = 9"),
        (lambda c: c["logprobs"].__setitem__(0, 0.5), "above 0, null or not finite"),
        (lambda c: c["logprobs"].__setitem__(0, math.nan), "above 0, null or not finite"),
        (lambda c: c.pop("logprobs"), "no list of numbers under 'logprobs'"),
        (lambda c: c.update(loss_mask=[0] * len(c["token_ids"])), "without a token that the policy sampled"),
        (lambda c: c["logprobs"].__setitem__(0, None), "no list of numbers under 'logprobs'"),
        (lambda c: c.update(loss_mask=[0.5] * len(c["token_ids"])), "a loss_mask of other values than true and false"),
        (lambda c: c.update(loss_mask=[math.nan] * len(c["token_ids"])), "a loss_mask of other values"),
        (lambda c: c.update(correct="no"), "has 'no' under 'correct'"),
        (lambda c: c.update(correct=0.5), "has 0.5 under 'correct'"),
        (lambda c: c.update(reward="1"), "has the reward '1'"),
        (lambda c: c.update(reward=None), "has the reward None"),
        (lambda c: c.update(reward=1e12), "within ±1e+09"),
        (lambda c: c.update(finish_reason="abort"), "the finish_reason 'abort'"),
    ],
)
def test_a_bad_row_is_named_with_its_line(edit: Edit, words: str, policy: Path, tmp_path: Path) -> None:
    lines = (policy / "rollouts.jsonl").read_text().splitlines()
    row = json.loads(lines[2])
    edit(row["completions"][1])
    (file := tmp_path / "bad.jsonl").write_text("\n".join([*lines[:2], json.dumps(row), *lines[3:]]))
    with pytest.raises(UserError) as caught:
        load(policy, file)
    assert caught.value.setting == "data.rollouts"
    for part in ("line 3", "completion 2", words):
        assert part in str(caught.value)


def load(
    policy: Path, file: Path, samples: int = 3, rank: int = 0, ranks: int = 1
) -> tuple[PromptPool, dict[int, OfflineGroup]]:
    config = offline(settings(policy, file.parent), file)
    config = replace(config, rollout=replace(config.rollout, samples_per_prompt=samples, max_response_tokens=9))
    vocab_size = read_shape(policy / "hf").vocab_size
    return load_offline(config, load_tokenizer(policy / "hf"), vocab_size, (1,), rank=rank, ranks=ranks)


def test_each_group_is_on_one_rank_and_prompts_have_none_of_it(policy: Path) -> None:
    shares = [load(policy, policy / "rollouts.jsonl", rank=rank, ranks=3) for rank in range(3)]
    pool, whole = load(policy, policy / "rollouts.jsonl")
    assert [sorted(groups) for _, groups in shares] == [list(range(rank, 16, 3)) for rank in range(3)]
    for own, groups in shares:
        assert [prompt.text for prompt in own] == [prompt.text for prompt in pool]
        assert not any("completions" in prompt.extra for prompt in own)
        for prompt, group in groups.items():
            assert group.scores == whole[prompt].scores


def test_groups_of_another_size_are_refused(policy: Path) -> None:
    with pytest.raises(UserError, match=r"line 1.* 3 completions, and rollout.samples_per_prompt = 4"):
        load(policy, policy / "rollouts.jsonl", samples=4)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_texts_are_tokenised_and_a_stop_token_ends_them(kind: str, policy: Path, tmp_path: Path) -> None:
    text, ids = (
        {"text": "#5", "reward": 1.0},
        {"token_ids": [5, 1], "reward": 0.0, "correct": True, "loss_mask": [0, 1]},
    )
    given = [each | {"logprobs": [-1.0, -2.0]} for each in (text, ids, ids)]
    row, file = {"prompt": "2+3=", "completions": given}, tmp_path / f"texts.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row))
    (group,) = load(policy, file)[1].values()
    first, second, _ = group.completions
    assert load_tokenizer(policy / "hf").decode(first.token_ids) == "#5"
    assert (first.finish_reason, second.finish_reason) == ("length", "stop")
    assert second.loss_mask.tolist() == [False, True]
    assert [score.correct for score in group.scores] == [True, True, True]


def test_prompts_need_no_label_and_are_read_before_a_rank_starts(policy: Path, tmp_path: Path) -> None:
    preflight(offline(settings(policy, tmp_path / "run"), policy / "rollouts.jsonl"), "train")
    (file := tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": " ", "completions": []}))
    with pytest.raises(UserError, match=r"data.rollouts.*line 1.*empty prompt"):
        preflight(offline(settings(policy, tmp_path / "run"), file), "train")
