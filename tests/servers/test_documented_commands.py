"""What the documentation has people type who have SGLang or vLLM, with real servers on CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.sandbox import Sandbox, write_quickstart
from tests.docs.ways import typed_in
from tests.servers.real import RealServers

pytestmark = pytest.mark.servers
DOCUMENTED = typed_in("servers")


@pytest.mark.parametrize("document", DOCUMENTED)
def test_the_commands_of_a_page_work_with_real_servers(
    document: str, real_servers: RealServers, tmp_path: Path
) -> None:
    (place := tmp_path / "checkout").mkdir()
    sandbox = Sandbox(place, document, write_quickstart(tmp_path, trained=False))
    sandbox.install("cpu")
    server = real_servers.get("vllm")
    given = {"VLLM_SERVER": server.api.url, "MEGATRON_DPPO_SERVER_SECRET": server.secret}
    for command in DOCUMENTED[document]:
        sandbox.type(command, given if "$VLLM_SERVER" in command else None)
