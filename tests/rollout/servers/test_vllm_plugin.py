"""Two versions of NCCL are found before a group is tried, and the remedy is named."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dppo.errors import UserError
from megatron_dppo.rollout.servers import nccl
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.vllm import PLUGIN
from tests.rollout.servers.test_pool import pool_of

LIBRARY = "int ncclGetVersion(int *version) { *version = 23007; return 0; }"
TORCH = "class cuda:\n class nccl: version = staticmethod(lambda: (2, 29, 7))\nclass version: cuda = '13.0'"
"""A torch that was built with another NCCL than the one above."""
SGLANG = f"{sys.executable} -m sglang.launch_server"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Environment of an interpreter with a torch for CUDA, which prints a greeting as it starts."""
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "sitecustomize.py").write_text("print('welcome to node 7')")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


@pytest.mark.parametrize("command", [SGLANG, f"{sys.executable} -s server.py --flag"])
def test_the_version_is_the_one_torch_was_built_with(environ: dict[str, str], command: str) -> None:
    assert nccl.of_command(command.split(), environ) == "2.29.7"


@pytest.mark.skipif(shutil.which("cc") is None, reason="makes a library")
def test_a_preloaded_library_comes_before_torch(environ: dict[str, str], tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    command = ["cc", "-shared", "-x", "c", "-", "-o", str(library), "-Wl,-soname,libnccl.so.2"]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    environ["LD_PRELOAD"] = str(library)
    assert nccl.of_command(SGLANG.split(), environ) == "2.30.7"


@pytest.mark.parametrize("command", ["vllm serve", "/nowhere/python -m x", "false -m x"])
def test_a_command_without_torch_has_no_known_version(command: str) -> None:
    assert nccl.of_command(command.split(), os.environ) is None


def test_two_versions_are_refused_and_the_older_is_raised() -> None:
    for ours, theirs in (("2.29.7", "2.29.7"), (None, "2.29.7"), ("2.29.7", None)):
        nccl.refuse_two("rollout.servers", "http://a:1", ours, theirs)
    nccl.refuse_told("NCCL error: unhandled system error")
    for ours, theirs in (("2.28.9", "2.30.7"), ("2.30.7", "2.28.9"), ("2.9.9", "2.30.7")):
        with pytest.raises(UserError) as refused:
            nccl.refuse_two("rollout.servers", "http://a:1", ours, theirs)
        assert refused.value.setting == "rollout.servers"
        assert ours in refused.value.problem and theirs in refused.value.problem
        assert "pip install --no-deps nvidia-nccl-cu13==2.30.7" in refused.value.remedy


def test_a_command_of_another_version_starts_no_server(http: Http, tmp_path: Path, environ: dict[str, str]) -> None:
    settings = f"""
    run.dir={tmp_path}/run model.path=policy rollout.servers=[] rollout.launch.count=1
    rollout.launch.command=[{SGLANG.replace(" ", ",")}] rollout.launch.env=[PYTHONPATH={environ["PYTHONPATH"]}]
    """
    with pytest.raises(UserError, match=r"rollout.launch.command = .*sglang.launch_server: has NCCL 2.29.7"):
        http.run(pool_of(http, *settings.split(), our_nccl="2.28.9").open())
    assert not (tmp_path / "run").exists()


def test_vllm_that_splits_its_default_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """``server_environment`` prevents it where the run starts vLLM."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    group = importlib.import_module("megatron_dppo_vllm.group")
    device = torch.device("cuda:0")
    monkeypatch.setattr(group, "_get_default_group", lambda: SimpleNamespace(bound_device_id=device))
    places = {"host": "127.0.0.1", "port": 1, "rank": 1, "size": 2, "timeout_s": 1.0}
    with pytest.raises(RuntimeError, match="set VLLM_DISTRIBUTED_USE_SPLIT_GROUP=0"):
        group.ReceiverGroup(name="weights", backend="nccl", device=device, **places)
