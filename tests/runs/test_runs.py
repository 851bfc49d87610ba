"""Whole runs: a table of configurations, each run to its end by one runner.

A run that holds rollouts in memory at its death is killed after its checkpoint and resumed as well:
its metrics equal the undisturbed run's, bit for bit. The files of rollouts in flight are the matter
of ``rollout/test_step_rollouts.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.small_runs import SAVED, Rows, die, live, rows, small_run, write_run

CONVERSATION = '''
import asyncio
import random

async def rollout(client, prompt):
    """Take two turns with a slow tool between them; of some prompts the second turn has a context of its own."""
    first = await client.generate(prompt.token_ids, max_tokens=3)
    await asyncio.sleep(0.01 * random.random())
    told = client.tokenizer.encode("=7", add_special_tokens=False)
    context = [*prompt.token_ids, *first.token_ids, *told]
    second = await client.generate(context)
    if prompt.id % 2 and len(second.token_ids):
        return [[first], [context, second]]
    return [first, told, second]

def group_rm(args, samples):
    order = sorted(sample.response for sample in samples)
    return [float(order.index(sample.response)) for sample in samples]
'''
AGENT = '''
import json, os, random, urllib.request

def complete(prompt, **limits):
    body = json.dumps({"model": "policy", "prompt": prompt, **limits}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]

def agent(task):
    """Take two turns with a tool between them; of some tasks all turns have another context than the prompt."""
    question = task["prompt"]
    own = len(question) % 2
    first = complete(f"{random.randint(1, 9)}+7=" if own else question, max_tokens=3)
    second = complete("7+7=" if own else question + first + "=7")
    return float(len(first + second) % 3)
'''
HALF = ("reward.function=FOLDER/half.py:compute_score", "eval.problems=0")


def check_staleness(steps: Rows, run: Path) -> None:
    """Check that rollouts are one version old, except in the first step."""
    assert [row["rollout/stale_tokens"] for row in steps] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [row["staleness/mean"] for row in steps] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert [row.get("train/rollout_logprob_abs_diff", 1.0) < 1e-5 for row in steps] == [True] + [
        False
    ] * 4
    assert [row["step"] for row in rows(run) if "rollout/agreement_max_diff" in row] == [0, 3]
    assert all(row["train/grad_norm"] > 0 for row in steps)


def check_trees(steps: Rows, run: Path) -> None:
    for row in steps:
        assert row["rollout/unique_tokens"] < row["rollout/generated_tokens"]
        assert row["train/grad_norm"] > 0


def check_conversations(steps: Rows, run: Path) -> None:
    """Check that the tool's tokens and repeated contexts are part of the responses, and not
    sampled."""
    assert steps[0]["train/rollout_logprob_abs_diff"] < 1e-5
    for row in steps:
        given = row["rollout/response_len/mean"] - row["rollout/generated_tokens"] / (8 * 3)
        assert given > 2
        assert row["train/grad_norm"] > 0


def check_agents(steps: Rows, run: Path) -> None:
    """Check that the log-probabilities of all sequences are the trainer's, and no rollout failed."""
    assert steps[0]["train/rollout_logprob_abs_diff"] < 1e-5
    for row in steps:
        assert row["reward/errors"] == row["reward/timeouts"] == 0
        assert 0 < row["rollout/generated_tokens"] < row["rollout/response_len/mean"] * 8 * 3
        assert row["train/grad_norm"] > 0


def check_replaced_prompts(steps: Rows, run: Path) -> None:
    for row in steps:
        assert row["prune/discarded_groups"] > 0
        assert 0.0 < row["prune/kept_completion_fraction"] <= 1.0
        assert row["rollout/zero_std/ratio"] < 1.0


def check_windows(steps: Rows, run: Path) -> None:
    """Check that each window grows with the variance that pruning added in earlier steps."""
    census = [json.loads(line) for line in (run / "pruning.jsonl").read_text().splitlines()]
    windows = [sum(row[fate][0] for fate in ("kept", "pruned", "idle")) / 3 for row in census]
    inflation = 1.0
    expected = []
    for row in steps:
        expected.append(round(8 * inflation))
        inflation += 0.1 * (row["prune/variance_inflation"] - inflation)
    assert windows == expected
    assert windows[0] < windows[-1]


def check_updates(steps: Rows, run: Path) -> None:
    for row in steps:
        assert row["train/grad_norm"] > 0
        assert row["train/no_op_updates"] == 0
        assert row["prune/kept_completion_fraction"] > 0.1


def check_no_updates(steps: Rows, run: Path) -> None:
    """Check that every step was counted as one without an update."""
    assert [row["train/no_op_updates"] for row in steps] == [1, 1]
    assert not any("train/grad_norm" in row for row in steps)


@dataclass(frozen=True)
class Run:
    """A configuration.

    Args:
        settings: further settings of ``small_run``; FOLDER is the folder of the policy.
        check: takes the rows of the steps and the run's folder.
        ranks: number of ranks.
        dies: whether the run is also killed and resumed.
    """

    settings: tuple[str, ...]
    check: Callable[[Rows, Path], None]
    ranks: int = 1
    dies: bool = False


RUNS = {
    "one step ahead": Run(("rollout.ahead=1", "layout.tp=2"), check_staleness, ranks=2, dies=True),
    "trees": Run(
        (
            "rollout.ahead=1",
            "rollout.samples_per_prompt=8",
            "rollout.tree.branches=[{at: 2}, {entropy: 2.2}]",
            "loss.name=dr_grpo",
        ),
        check_trees,
    ),
    "conversations scored by the group": Run(
        (
            "rollout.ahead=1",
            "rollout.conversation=FOLDER/agent.py:rollout",
            "reward.function=FOLDER/agent.py:group_rm",
            "pruning.prompts.rule=none",
        ),
        check_conversations,
    ),
    "agents": Run(
        (
            "rollout.ahead=1",
            "rollout.agent=FOLDER/own_agent.py:agent",
            "reward.function=agent",
            "pruning.prompts.rule=none",
        ),
        check_agents,
        dies=True,
    ),
    "several rounds of rollouts": Run(
        (
            *HALF,
            "rollout.ahead=1",
            "rollout.prompts_per_step=16",
            "pruning.prompts.rule=greso",
            "pruning.resample=prompts",
        ),
        check_replaced_prompts,
        dies=True,
    ),
    "equal noise": Run(
        (
            *HALF,
            "loss.name=reinforce_pp",
            "pruning.prompts.rule=none",
            "pruning.completions.keep=0.1",
            "pruning.max_weight=50",
            "pruning.target_noise=1",
        ),
        check_windows,
    ),
    "automatic keep, two updates": Run(
        (
            *HALF,
            "layout.tp=2",
            "run.steps=2",
            "loss.name=gspo",
            "loss.updates_per_rollout=2",
            "pruning.completions.keep=auto",
        ),
        check_updates,
        ranks=2,
    ),
    "every scoring fails, as allowed": Run(
        (
            "reward.function=FOLDER/fails.py:compute_score",
            "reward.max_failures=1",
            "run.steps=2",
            "eval.problems=0",
        ),
        check_no_updates,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("policy"))
    (folder / "agent.py").write_text(CONVERSATION)
    (folder / "own_agent.py").write_text(AGENT)
    return folder


FIRST, *REST = RUNS


@pytest.mark.parametrize("name", [pytest.param(FIRST, marks=pytest.mark.quick), *REST])
def test_configuration_runs_and_resumes_bit_for_bit(
    name: str, folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    run = RUNS[name]
    settings = [word.replace("FOLDER", str(folder)) for word in run.settings]
    whole, died = (small_run(folder, tmp_path / kind, *settings) for kind in ("whole", "died"))
    if run.dies:
        ranks.run(run.ranks, die, died)
        assert rows(tmp_path / "died")[-1]["step"] > SAVED
        assert [path.name for path in (tmp_path / "died/checkpoints").glob("iter_*")] == [
            f"iter_{SAVED:07d}"
        ]
        ranks.in_turn(run.ranks, (live, died), (live, whole))
        assert rows(tmp_path / "died") == rows(tmp_path / "whole")
    else:
        ranks.run(run.ranks, live, whole)
    steps = [row for row in rows(tmp_path / "whole") if row["step"] > 0]
    run.check(steps, tmp_path / "whole")
