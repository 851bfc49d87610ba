"""Runs ahead with real servers: age has its bound, and lengths the law of sampling.

A policy that hardly learns has the same lengths in every step. They are compared with lengths that
the same servers sample while nobody trains.
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
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.settings import load_config
from tests.chaos.ledger import events, job, trained
from tests.ranks import RankPool
from tests.servers.real import REWARD, Kind, RealServer, RealServers, given
from tests.small_runs import rows

pytestmark = pytest.mark.servers

STEPS, PROMPTS, SAMPLES, LONGEST = 6, 32, 2, 48
STOPS = [2, 3, 4]
"""With several, few completions are cut off, and lengths differ."""
SETTINGS = f"""
run.steps={STEPS} run.export=false data.train=arithmetic data.chat_template=false data.max_prompt_tokens=24
data.arithmetic.problems={STEPS * PROMPTS} rollout.prompts_per_step={PROMPTS} rollout.samples_per_prompt={SAMPLES}
rollout.max_response_tokens={LONGEST} rollout.stop_token_ids=[2,3,4] rollout.sync.check_every=0
pruning.prompts.rule=none optimizer.lr=1e-6 pack.max_tokens=96 eval.every=0 eval.problems=0
"""
EDGES = torch.tensor([1, 2, 4, 6, 9, 13, 20, LONGEST])
"""Bins of lengths, by their last one."""


def train_recorded(rank: int, size: int, settings: Sequence[str], secret: str) -> None:
    os.environ[SECRET] = secret
    job(load_config(None, settings))


def p_of_one_law(*samples: Sequence[int]) -> float:
    """Return p of χ² that two samples of lengths have the same law."""
    table = torch.stack(
        [
            torch.bincount(torch.bucketize(torch.tensor(each), EDGES), minlength=len(EDGES))
            for each in samples
        ]
    ).double()
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    chi2 = ((table - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(EDGES) - 1) / 2.0).double(), chi2 / 2.0))


def sample_lengths(server: RealServer, http: Http, settings: Sequence[str]) -> list[int]:
    """Return lengths that a server gives to the same prompts while nobody trains."""
    config = load_config(None, settings)

    async def sample() -> list[int]:
        pool = load_prompts(config.data, load_tokenizer(config.model.path), split="train")
        requests = [
            (p.token_ids.tolist(), Sampling(4, LONGEST, 1.0, tuple(STOPS), seed=1000 + p.id))
            for p in pool
        ]
        groups = await asyncio.gather(
            *(server.api.generate(*each, timeout_s=120.0) for each in requests)
        )
        return [len(result.token_ids) for group in groups for result in group]

    return http.run(sample())


@pytest.mark.parametrize(
    "servers", [(("sglang", 1), ("sglang", 2)), (("vllm", 1),)], ids=["two of SGLang", "vLLM"]
)
def test_age_and_lengths_hold_however_far_ahead(
    servers: Sequence[tuple[Kind, int]],
    real_servers: RealServers,
    served_policy: Path,
    ranks: RankPool,
    http: Http,
    tmp_path: Path,
) -> None:
    found = [real_servers.get(*server) for server in servers]
    (tmp_path / "reward.py").write_text(REWARD)
    settings = [
        *SETTINGS.split(),
        f"model.path={served_policy}",
        f"reward.function={tmp_path}/reward.py:compute_score",
    ]
    lengths = []
    for ahead in (0, 1, 2, 4):
        run = tmp_path / str(ahead)
        words = [*settings, *given(*found), f"run.dir={run}", f"rollout.ahead={ahead}"]
        ranks.run(1, train_recorded, words, found[0].secret, timeout=600.0)
        ledger, steps = trained(events(run)), rows(run)
        assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
        assert {step["staleness/bound"] for step in steps} == {ahead}
        assert all(step["staleness/max"] <= ahead and step["train/grad_norm"] > 0 for step in steps)
        assert any(step["staleness/max"] > 0 for step in steps) == (ahead > 0)
        lengths += [
            c["length"] for groups in ledger.values() for group in groups.values() for c in group
        ]
    assert len(lengths) == 4 * STEPS * PROMPTS * SAMPLES
    # Servers cannot seed their sampling on a CPU: a higher limit would fail by chance.
    assert p_of_one_law(lengths, sample_lengths(found[0], http, settings)) > 0.001
