"""Servers die, hang and come back; the run goes on, no group is lost or doubled, and nobody serves mixed weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.init import write_model
from tests.ranks import RankPool
from tests.servers import colocated_on_ranks, on_ranks
from tests.servers.on_ranks import PROMPTS, SAMPLES, Round
from tests.servers.real import launch_settings

pytestmark = pytest.mark.servers

AGREES = 1e-4
"""Greatest |log p| difference of actor and server that is rounding."""


def _settings(folder: Path) -> list[str]:
    policy = folder / "policy"  # of several buckets, so that an update has a middle
    write_model(policy, hidden=256, heads=4, kv_heads=2, head_dim=32, ffn=1024, std=0.1)
    return [
        f"run.dir={folder / 'run'}",
        f"model.path={policy}",
        "data.max_prompt_tokens=16",
        "rollout.max_response_tokens=64",
        "layout.tp=2",
        *launch_settings("sglang", (1, 1)),
        "rollout.launch.restarts=20",
        "rollout.sync.bucket_mib=1",
        "rollout.sync.timeout_s=20",
        "rollout.health_timeout_s=5",
        "rollout.timeout_s=300",
    ]


@pytest.fixture(scope="module")
def rounds(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, canary: Path) -> Iterator[dict[str, Round]]:
    settings = _settings(tmp_path_factory.mktemp("faults"))
    yield ranks.run(2, on_ranks.faults, settings, timeout=900.0)[0]


FAULTS = [
    "none",
    "killed while generating",
    "after it was killed",
    "once it is back",
    "hung while generating",
    "killed in a sync",
    "hung in a sync",
    "both killed",
    "at the end",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_prompt_is_answered_once_with_all_of_its_samples(rounds: dict[str, Round], fault: str) -> None:
    seen = rounds[fault]
    assert seen.answered == list(range(PROMPTS))
    assert seen.samples == [SAMPLES] * PROMPTS
    assert seen.repeated == 0  # nobody's answer stands for another's


@pytest.mark.parametrize(
    ("fault", "version"),
    [("none", 0), ("killed while generating", 0), ("after it was killed", 1), ("once it is back", 1),
     ("hung while generating", 1), ("killed in a sync", 3), ("hung in a sync", 4), ("both killed", 4)],
)  # fmt: skip
def test_no_token_is_made_by_weights_of_another_version(rounds: dict[str, Round], fault: str, version: int) -> None:
    assert rounds[fault].versions == {version}


@pytest.mark.parametrize(
    "fault", ["once it is back", "killed in a sync", "hung in a sync", "both killed", "at the end"]
)
def test_whoever_serves_agrees_with_the_actor(rounds: dict[str, Round], fault: str) -> None:
    assert rounds[fault].difference <= AGREES


@pytest.mark.parametrize(
    ("fault", "servers"),
    [("none", 2), ("killed while generating", 1), ("after it was killed", 1), ("once it is back", 2),
     ("hung while generating", 1), ("at the end", 2)],
)  # fmt: skip
def test_a_lost_server_serves_again_only_after_an_update(rounds: dict[str, Round], fault: str, servers: int) -> None:
    assert rounds[fault].servers == servers


@pytest.mark.parametrize("fault", ["killed while generating", "hung while generating", "both killed"])
def test_what_was_asked_again_is_counted(rounds: dict[str, Round], fault: str) -> None:
    assert rounds[fault].metrics["rollout/resubmitted"] > 0


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if "killed" in fault or "hung" in fault])
def test_a_loss_is_told(rounds: dict[str, Round], fault: str) -> None:
    assert any("is taken out" in said for said in rounds[fault].words) == (fault != "after it was killed")


@pytest.mark.parametrize("fault", ["killed in a sync", "hung in a sync"])
def test_a_sync_that_failed_is_tried_again_without_the_server_that_failed(rounds: dict[str, Round], fault: str) -> None:
    assert rounds[fault].metrics["rollout/sync_retries"] == 1
    assert any("is tried again" in said for said in rounds[fault].words)


def test_servers_that_share_the_trainers_gpus_sleep_through_each_step_also_those_that_are_started_again(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, canary: Path
) -> None:
    """One that is starting while a step trains would take the memory that the step needs."""
    settings = [*_settings(tmp_path_factory.mktemp("colocated")), "rollout.colocated=true"]
    settings += ["rollout.sync.transport=disk", "rollout.health_timeout_s=20"]
    rounds, asked = ranks.run(2, colocated_on_ranks.colocated, settings, timeout=600.0)[0]
    for version, seen in enumerate(rounds):
        assert seen.answered == list(range(PROMPTS)) and seen.versions == {version}
        assert seen.difference <= AGREES
    wakes = ["release_memory", "regain_weights", "begin_update", "end_update", "regain_cache", "resume"]
    assert asked == [[wakes, wakes]] * 3, "the one that was started again, too: the step waited for it"
    assert [seen.servers for seen in rounds] == [2, 1, 2]
