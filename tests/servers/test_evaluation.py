"""A real server gives the scores that the policy's own processes give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.rollout.servers.launch import SECRET
from tests.commands import Command
from tests.servers.real import QUICKSTART, REWARD, Kind, RealServer, RealServers, given

pytestmark = pytest.mark.servers


def evaluate(out: Path, policy: Path, *servers: RealServer) -> tuple[dict[str, Any], list[str]]:
    """Return the scores and the answers' texts."""
    (reward := out.parent / "reward.py").write_text(REWARD)
    words = [
        "megatron-dppo",
        "eval",
        str(QUICKSTART),
        "--model",
        str(policy),
        "--problems",
        "60",
        "--out",
        str(out),
    ]
    words += [
        "layout.tp=1",
        "rollout.max_response_tokens=24",
        "eval.batch=20",
        f"run.dir={out}-run",
    ]
    words += [f"reward.function={reward}:compute_score", *(given(*servers) if servers else ())]
    environ = {SECRET: servers[0].secret if servers else ""}
    log = out.parent / f"{out.name}.log"
    assert Command(words, log, environ=environ).exit_code() == 0, log.read_text()
    answers = [
        json.loads(line)["answer"] for line in (out / "answers.jsonl").read_bytes().splitlines()
    ]
    return json.loads((out / "scores.json").read_text()), answers


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_scores_as_the_local_engine_does(
    kind: Kind, real_servers: RealServers, served_policy: Path, tmp_path: Path
) -> None:
    """Greedy answers are the same unless rounding decides between two tokens."""
    here, texts = evaluate(tmp_path / "local", served_policy)
    there, theirs = evaluate(tmp_path / kind, served_policy, real_servers.get(kind))
    assert (here["engine"], there["engine"]) == ("local", kind)
    same = sum(one == other for one, other in zip(texts, theirs, strict=True))
    assert len(texts) == 60 and same >= 57
    mine, other = (scores["benchmarks"]["arithmetic"]["avg@k"]["value"] for scores in (here, there))
    assert 0.0 < mine < 1.0 and abs(mine - other) <= (60 - same) / 60
