"""Runs ahead, with real servers: age has its bound, order is that of asking, and lengths are those sampled.

A policy that hardly learns has the same lengths in every step. They are held against lengths that the same servers give
where nobody trains.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_dppo.data.prompts import load_prompts
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.rollout.servers.client import GenerateRequest
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.settings import load_config
from tests.chaos.ledger import Event, events, job, trained
from tests.ranks import RankPool
from tests.servers.real import Kind, RealServer, RealServers
from tests.small_runs import MIXED, REWARD, Rows, rows

pytestmark = pytest.mark.servers

STEPS, PROMPTS, SAMPLES, LONGEST = 6, 32, 2, 48
STOPS = [2, 3, 4]
"""With several, few completions are cut off, and lengths differ."""
SETTINGS = (
    f"run.steps={STEPS}", "run.export=false", "data.train=arithmetic", "data.chat_template=false",
    "data.max_prompt_tokens=24", f"data.arithmetic.problems={STEPS * PROMPTS}",
    f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
    f"rollout.max_response_tokens={LONGEST}", f"rollout.stop_token_ids={STOPS}", "rollout.sync.check_every=0",
    "pruning.prompts.rule=none", "optimizer.lr=1e-6", "pack.max_tokens=96", "eval.every=0", "eval.problems=0",
)  # fmt: skip
EDGES = (1, 2, 4, 6, 9, 13, 20, LONGEST)
"""Bins of lengths, by their last one."""


def live(rank: int, size: int, settings: Sequence[str], secret: str) -> None:
    os.environ[SECRET] = secret
    job(load_config(None, settings))


def without_the_longest(ledger: Sequence[Event]) -> list[int]:
    """The lengths that would be trained on, had each step gone without the quarter of its prompts that took longest.

    Taken by lengths: on a busy machine answers come in an order of its own, which would bias less.
    """
    lengths = []
    for groups in trained(ledger).values():
        kept = sorted(([c["length"] for c in group] for group in groups.values()), key=max)[: len(groups) * 3 // 4]
        lengths += [length for group in kept for length in group]
    return lengths


def p_of_one_law(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Of χ², that two samples of lengths come from the same law."""
    edges = torch.tensor(EDGES)
    table = torch.stack(
        [torch.bincount(torch.bucketize(torch.tensor(each), edges), minlength=len(EDGES)) for each in (ours, theirs)]
    ).double()
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    chi2 = ((table - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(EDGES) - 1) / 2.0).double(), chi2 / 2.0))


def sampled(server: RealServer, http: Http, settings: Sequence[str]) -> list[int]:
    """Lengths that a server gives to the same prompts while nobody trains."""
    config = load_config(None, settings)
    tokenizer = load_tokenizer(config.model.path)

    async def ask() -> list[int]:
        pool = load_prompts(config.data, tokenizer, split="train")
        asks = [
            GenerateRequest(prompt.token_ids.tolist(), 4, LONGEST, 1.0, STOPS, seed=1000 + prompt.id) for prompt in pool
        ]
        groups = await asyncio.gather(*(server.api.generate(each, timeout_s=120.0) for each in asks))
        return [len(result.token_ids) for group in groups for result in group]

    return http.run(ask())


@pytest.mark.parametrize("kinds", [(("sglang", 1), ("sglang", 2)), (("vllm", 1),)], ids=["two of SGLang", "vLLM"])
def test_however_far_ahead_age_has_its_bound_and_order_and_lengths_are_those_asked_for(
    kinds: Sequence[tuple[Kind, int]],
    real_servers: RealServers,
    served_policy: Path,
    ranks: RankPool,
    http: Http,
    tmp_path: Path,
) -> None:
    servers = [real_servers.get(*kind) for kind in kinds]
    (tmp_path / "reward.py").write_text(REWARD.format(reward=MIXED))
    urls = ",".join(server.api.url for server in servers)
    settings = [*SETTINGS, f"model.path={served_policy}", f"reward.function={tmp_path}/reward.py:compute_score"]
    settings += [f"rollout.engine={kinds[0][0]}", f"rollout.servers=[{urls}]"]
    lengths, biased = [], []
    for ahead in (0, 1, 2, 4):
        run = tmp_path / str(ahead)
        ranks.run(1, live, [*settings, f"run.dir={run}", f"rollout.ahead={ahead}"], servers[0].secret, timeout=600.0)
        ledger = events(run)
        is_in_order(ledger, ahead)
        is_within(rows(run), ahead)
        lengths += [c["length"] for groups in trained(ledger).values() for group in groups.values() for c in group]
        biased += without_the_longest(ledger)
    assert len(lengths) == 4 * STEPS * PROMPTS * SAMPLES
    law = sampled(servers[0], http, [*settings, f"run.dir={tmp_path}"])
    assert p_of_one_law(lengths, law) > 0.001  # servers cannot seed their sampling on a CPU: more would fail by chance
    assert p_of_one_law(biased, law) < 1e-4


def is_in_order(ledger: Sequence[Event], ahead: int) -> None:
    """Steps train as they were asked for, on all that was asked for, and so many are asked for before one trains."""
    words = [(event["event"], event["step"]) for event in ledger if event["event"] in ("asked", "trained")]
    assert [step for word, step in words if word == "asked"] == list(range(STEPS))
    assert [step for word, step in words if word == "trained"] == list(range(STEPS))
    for step in range(STEPS):
        before = words[: words.index(("trained", step))]
        assert [word for word, _ in before].count("asked") == min(step + 1 + ahead, STEPS)
    asked = {event["step"]: event["prompts"] for event in ledger if event["event"] == "asked"}
    for step, groups in trained(ledger).items():
        assert sorted(map(int, groups)) == sorted(asked[step])
        assert {len(group) for group in groups.values()} == {SAMPLES}


def is_within(steps: Rows, ahead: int) -> None:
    """Nothing is older than the bound, and something is old where it may be."""
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert {step["staleness/bound"] for step in steps} == {ahead}
    assert all(step["staleness/max"] <= ahead and step["train/grad_norm"] > 0 for step in steps)
    assert any(step["staleness/max"] > 0 for step in steps) == (ahead > 0)
