"""A real server gives the scores that the policy's own processes give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.rollout.servers.launch import SECRET
from tests.commands import Command
from tests.servers.real import Kind, RealServer, RealServers

pytestmark = pytest.mark.servers

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""
SETTINGS = ("layout.tp=1", "rollout.max_response_tokens=24", "--problems", "60", "eval.batch=20")


def evaluated(out: Path, policy: Path, server: RealServer | None, *more: str) -> tuple[dict[str, Any], list[str]]:
    """The scores and the answers' texts."""
    reward = out.parent / "reward.py"
    reward.write_text(REWARD)
    words = ["megatron-dppo", "eval", str(QUICKSTART), "--model", str(policy), *SETTINGS, *more]
    words += [f"reward.function={reward}:compute_score", f"run.dir={out}-run", "--out", str(out)]
    environ = {}
    if server is not None:
        words += [f"rollout.engine={server.config.rollout.engine}", f"rollout.servers=[{server.api.url}]"]
        environ[SECRET] = server.secret
    log = out.parent / f"{out.name}.log"
    assert Command(words, log, environ=environ).exit_code() == 0, log.read_text()
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_bytes().splitlines()]
    return json.loads((out / "scores.json").read_text()), [row["answer"] for row in rows]


@pytest.fixture(scope="module")
def local(served_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    return evaluated(tmp_path_factory.mktemp("local") / "out", served_policy, None)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_server_scores_as_the_local_engine_does(
    kind: Kind, local: tuple[dict[str, Any], list[str]], real_servers: RealServers, served_policy: Path, tmp_path: Path
) -> None:
    """Greedy answers are the same but where rounding decides between two tokens."""
    here, texts = local
    there, theirs = evaluated(tmp_path / kind, served_policy, real_servers.get(kind, 1))
    assert (here["engine"], there["engine"]) == ("local", kind)
    same = sum(one == other for one, other in zip(texts, theirs, strict=True))
    assert len(texts) == 60 and same >= 57
    mine, other = (scores["benchmarks"]["arithmetic"]["avg@k"]["value"] for scores in (here, there))
    assert 0.0 < mine < 1.0 and abs(mine - other) <= (60 - same) / 60
