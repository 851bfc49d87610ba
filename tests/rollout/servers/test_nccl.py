"""Two versions of NCCL are found before a group is tried, and the remedy is named."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers import nccl, sglang
from megatron_dppo.rollout.servers.client import ServerInfo
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.pool import ServerPool
from megatron_dppo.rollout.servers.processes import ServerProcess
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.rollout.servers.vllm import PLUGIN
from megatron_dppo.settings import load_config

LIBRARY = "int ncclGetVersion(int *version) { *version = 23007; return 0; }"
TORCH = "class cuda:\n class nccl: version = staticmethod(lambda: (2, 29, 7))\nclass version: cuda = '13.0'"
"""A torch that was built with another NCCL than the one above."""
FAR_PORT = 15000 + os.getpid() % 400 * 20


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of an interpreter whose torch is of CUDA."""
    (tmp_path / "torch.py").write_text(TORCH)
    return os.environ | {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def http() -> Iterator[Http]:
    http = Http()
    yield http
    http.close()


def test_the_version_that_torch_was_built_with_is_that_of_a_torch_with_nccl_in_it(environ: dict[str, str]) -> None:
    assert nccl.of_command([sys.executable, "-m", "sglang.launch_server"], environ) == "2.29.7"
    assert nccl.of_command([sys.executable, "-s", "server.py", "--flag"], environ) == "2.29.7"


@pytest.mark.skipif(shutil.which("cc") is None, reason="makes a library")
def test_a_library_that_is_preloaded_counts_and_not_what_torch_was_built_with(
    environ: dict[str, str], tmp_path: Path
) -> None:
    library = tmp_path / "libnccl.so.2"
    command = ["cc", "-shared", "-x", "c", "-", "-o", str(library), "-Wl,-soname,libnccl.so.2"]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    environ["LD_PRELOAD"] = str(library)
    assert nccl.of_command([sys.executable, "-m", "sglang.launch_server"], environ) == "2.30.7"


@pytest.mark.parametrize(
    "command",
    [["vllm", "serve"], ["-m", "sglang"], ["/nowhere/python", "-m", "x"], ["false", "-m", "x"], [sys.executable]],
)
def test_a_command_that_cannot_be_asked_has_no_known_version(command: list[str]) -> None:
    assert nccl.of_command(command, os.environ) is None


@pytest.mark.parametrize(("ours", "theirs"), [("2.29.7", "2.29.7"), (None, "2.29.7"), ("2.29.7", None), (None, None)])
def test_one_version_or_an_unknown_one_is_not_refused(ours: str | None, theirs: str | None) -> None:
    nccl.refuse_two("rollout.servers", "http://a:1", ours, theirs)
    nccl.refuse_told("NCCL error: unhandled system error")


def test_two_versions_are_refused_and_the_older_one_is_to_be_raised() -> None:
    for ours, theirs in (("2.28.9", "2.30.7"), ("2.30.7", "2.28.9"), ("2.9.9", "2.30.7")):
        with pytest.raises(UserError) as refused:
            nccl.refuse_two("rollout.servers", "http://a:1", ours, theirs)
        assert refused.value.setting == "rollout.servers"
        assert ours in refused.value.problem and theirs in refused.value.problem
        assert "pip install --no-deps nvidia-nccl-cu13==2.30.7" in refused.value.remedy


class Told(SglangClient):
    """A server that says which NCCL it has."""

    async def info(self) -> ServerInfo:
        return ServerInfo("policy", None, 1, "0", None, None, nccl="2.30.7")

    async def resume(self) -> None: ...
    async def health(self, timeout_s: float) -> None: ...


def _pool(http: Http, tmp_path: Path, *settings: str, our_nccl: str | None) -> ServerPool:
    config = load_config(None, [f"run.dir={tmp_path}/run", "model.path=policy", "rollout.engine=sglang", *settings])
    return ServerPool(config, http, architecture="Qwen3ForCausalLM", secret=None, say=print, our_nccl=our_nccl)


def test_a_given_server_that_says_another_version_is_refused_by_name(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "SPEC", replace(sglang.SPEC, client=Told))
    monkeypatch.setattr(ServerPool, "_workers", _no_router)
    given = "rollout.servers=[http://127.0.0.1:1]"
    with pytest.raises(UserError, match=r"rollout.servers = http://127.0.0.1:1: has NCCL 2.30.7") as refused:
        http.run(_pool(http, tmp_path, given, our_nccl="2.29.7").open())
    assert "nvidia-nccl-cu13==2.30.7" in refused.value.remedy
    for fine in (None, "2.30.7"):
        assert len(http.run(_pool(http, tmp_path, given, our_nccl=fine).open())) == 1


async def _no_router(pool: ServerPool, door: object) -> None:
    return None


class Staged(Told):
    """A server that says that it has a pipeline."""

    async def info(self) -> ServerInfo:
        return ServerInfo("policy", None, 4, "0", None, None, stages=2)


def test_a_given_server_with_a_pipeline_is_refused_where_its_stages_would_have_to_join_a_group(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang, "SPEC", replace(sglang.SPEC, client=Staged))
    monkeypatch.setattr(ServerPool, "_workers", _no_router)
    given = "rollout.servers=[http://127.0.0.1:1]"
    with pytest.raises(UserError, match=r"has 2 pipeline stages.*Start it with --pp-size 1"):
        http.run(_pool(http, tmp_path, given, our_nccl=None).open())
    disk = ("rollout.sync.transport=disk", given)
    assert len(http.run(_pool(http, tmp_path, *disk, our_nccl=None).open())) == 1


def test_a_command_of_another_version_is_refused_before_a_server_is_started(
    http: Http, tmp_path: Path, environ: dict[str, str]
) -> None:
    settings = [
        "rollout.launch.count=1",
        f"rollout.launch.command=[{sys.executable},-m,sglang.launch_server]",
        f"rollout.launch.env=[PYTHONPATH={environ['PYTHONPATH']}]",
        f"rollout.launch.first_port={FAR_PORT}",
    ]
    with pytest.raises(UserError, match=r"rollout.launch.command = .*sglang.launch_server: has NCCL 2.29.7"):
        http.run(_pool(http, tmp_path, *settings, our_nccl="2.28.9").open())
    assert not (tmp_path / "run").exists()


def test_vllm_is_started_with_a_default_group_that_no_group_is_split_off(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}", "rollout.engine=vllm", "rollout.launch.count=1"])
    server = ServerProcess(config, 0, host="127.0.0.1", secret="s")
    assert server.environment({"VLLM_DISTRIBUTED_USE_SPLIT_GROUP": "1"})["VLLM_DISTRIBUTED_USE_SPLIT_GROUP"] == "0"


def test_a_given_vllm_that_would_split_the_group_off_its_own_is_told_how_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    group = importlib.import_module("megatron_dppo_vllm.group")
    monkeypatch.setattr(group, "_get_default_group", lambda: SimpleNamespace(bound_device_id=torch.device("cuda:0")))
    places = {"host": "127.0.0.1", "port": 1, "rank": 1, "size": 2, "timeout_s": 1.0}
    with pytest.raises(RuntimeError, match="set VLLM_DISTRIBUTED_USE_SPLIT_GROUP=0"):
        group.ReceiverGroup(name="weights", backend="nccl", device=torch.device("cuda:0"), **places)
