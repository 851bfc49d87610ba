"""What the documentation has people type on a cluster, on a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.sandbox import Sandbox, write_quickstart
from tests.docs.ways import typed_in
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm
DOCUMENTED = typed_in("slurm")


@pytest.mark.parametrize("document", DOCUMENTED)
def test_the_commands_of_a_page_work_on_a_cluster(
    document: str, cluster: Cluster, tmp_path: Path
) -> None:
    (place := tmp_path / "checkout").mkdir()
    sandbox = Sandbox(place, document, write_quickstart(tmp_path, trained=False))
    environ = {
        "SLURM_CONF": cluster.environment["SLURM_CONF"],
        "NEMORUN_HOME": str(tmp_path / "nemo"),
        "MASTER_ADDR": "127.0.0.1",  # these nodes' names are no hosts' names
    }
    for command in DOCUMENTED[document]:
        sandbox.type(command, environ)
