"""What the shipped job scripts ask Slurm for is what their configurations are cut for. Needs no
Slurm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dppo.parallel.layout import resolve_layout
from megatron_dppo.rollout.servers.launch import count_reserved_gpus
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config
from tests.slurm.jobs import ROOT, SCRIPTS

SHIPPED = sorted(path.name for path in SCRIPTS.glob("qwen3_*.sh"))


def _asked(script: str) -> list[dict[str, str]]:
    """The options of each component of a job."""
    lines = re.findall(r"^#SBATCH (.*)$", Path(SCRIPTS, script).read_text(), re.MULTILINE)
    components = " ".join(lines).split("hetjob")
    return [dict(re.findall(r"--([a-z-]+)=(\S+)", component)) for component in components]


def test_there_is_a_script_for_each_size() -> None:
    sizes = ["14b", "235b_a22b", "30b_a3b", "32b", "4b", "8b"]
    assert [f"qwen3_{size}_dppo.sh" for size in sizes] == SHIPPED


@pytest.mark.parametrize("script", SHIPPED)
def test_a_script_asks_for_the_machines_of_its_configuration(script: str) -> None:
    named = re.search(r"job\.sh (\S+)", Path(SCRIPTS, script).read_text().splitlines()[-1])
    assert named is not None
    config = load_config(str(ROOT / named[1]), [])
    check_config(config)
    actors, *servers = _asked(script)
    cluster, per_node = config.cluster, int(actors["ntasks-per-node"])
    assert int(actors["nodes"]) == cluster.nodes
    assert (
        int(actors["gpus-per-node"])
        == cluster.gpus_per_node
        == per_node + count_reserved_gpus(config.rollout)
    )
    resolve_layout(config.layout, cluster.nodes * per_node)
    assert actors["time"] == f"{cluster.hours:02.0f}:00:00"
    assert actors["signal"] == f"B:USR1@{cluster.stop_before_limit_s:.0f}"
    assert sum(int(component["nodes"]) for component in servers) == cluster.server_nodes
    for component in servers:
        assert int(component["ntasks-per-node"]) * config.rollout.launch.tp <= int(
            component["gpus-per-node"]
        )
