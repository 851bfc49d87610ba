"""Each thing that can be known to be wrong with servers is found before one is started, and named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.rollout.servers.preflight import check_servers
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config

STARTED = ("rollout.engine=sglang", "rollout.launch.count=2")
GIVEN = ("rollout.engine=vllm", "rollout.servers=[http://a:1]")
ADAPTERS = ("rollout.sync.adapter=true", "model.lora.rank=4")
SENT = (*GIVEN, "rollout.engine=sglang", *ADAPTERS)
SHARED = ("rollout.colocated=true", "rollout.sync.transport=disk")
SHAPE = PolicyShape(2, 64, 8, 4, 32, 128, 64, True, 1e6, 1e-6, 128)
"""Eight query heads, four key-value heads."""


def _check(tmp_path: Path, *overrides: str) -> None:
    config = load_config(None, [f"run.dir={tmp_path}/run", *overrides])
    check_config(config)
    check_servers(config, SHAPE, environ={})


@pytest.mark.parametrize(
    "overrides",
    [
        (*STARTED, f"rollout.launch.command=[{sys.executable},server.py]", "rollout.launch.env=[A=,_b=c=d]"),
        (*STARTED, "rollout.launch.command=[sh]", "rollout.launch.tp=[2,8]", "rollout.ahead=1", "rollout.max_batch=1"),
        (*GIVEN, "rollout.sync.transport=disk"),
        (*GIVEN, "rollout.timeout_s=240", "rollout.sync.timeout_s=120"),
        (*SENT, "rollout.ahead=1", "rollout.sync.in_flight=abort", "model.lora.targets=[gate_proj]"),
        (*SENT, "model.lora.targets=[q_proj,v_proj]"),
        (*SENT, "rollout.engine=vllm", "model.lora.rank=512", "model.lora.targets=[k_proj,up_proj]"),
        ("rollout.timeout_s=1",),  # no server, no sync
        ("rollout.ahead=1",),  # the local engine gains no time by it, but rehearses it
        (*GIVEN, "rollout.launch.command=[/nowhere/python]", "rollout.launch.tp=3"),  # what is not used is not asked
    ],
)
def test_good_settings_pass_and_write_nothing(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    _check(tmp_path, *overrides)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "setting", "remedy"),
    [
        (["rollout.max_batch=4"], "rollout.max_batch", "8 or more"),
        (["rollout.engine=vllm", "rollout.servers=[a:1]"], "rollout.servers", "http://HOST:PORT"),
        (["rollout.engine=vllm", "rollout.servers=slurm"], "rollout.servers", "MEGATRON_DPPO_SERVERS"),
        ([*STARTED, *SHARED, "rollout.launch.command=[sh]"], "rollout.launch.flags", "--mem-fraction-static"),
        ([*STARTED, *SHARED, "rollout.launch.command=[sh]", "rollout.engine=vllm",
          "rollout.launch.flags=[--mem-fraction-static=0.5]"], "rollout.launch.flags", "--gpu-memory-utilization"),
        ([*GIVEN, "rollout.timeout_s=239", "rollout.sync.timeout_s=120"], "rollout.timeout_s", "Raise it to 240"),
        ([*STARTED, "rollout.launch.tp=[1,2,4]"], "rollout.launch.tp", "one for each"),
        ([*STARTED, "rollout.launch.tp=[1,3]"], "rollout.launch.tp", "1, 2, 4, 8"),
        ([*STARTED, "rollout.launch.first_port=65000"], "rollout.launch.ports", "lower rollout.launch.first_port"),
        ([*STARTED, "rollout.launch.env=[A=1,B]"], "rollout.launch.env", "NAME=value"),
        ([*STARTED, "rollout.launch.env=[1A=1]"], "rollout.launch.env", "NAME=value"),
        ([*STARTED, f"rollout.launch.command=[{sys.executable},server.py]", "rollout.launch.env=[NCCL_CUMEM_ENABLE=1]"],
         "rollout.launch.env", "run the trainer with NCCL_CUMEM_ENABLE=1, too"),
        ([*STARTED, "rollout.launch.flags=[--api-key=x]"], "rollout.launch.flags", "Leave it out"),
        ([*STARTED, "rollout.launch.flags=[--port,1]"], "rollout.launch.flags", "Leave it out"),
        ([*STARTED, "rollout.launch.flags=[--speculative_accept_threshold_acc,0.9]"], "rollout.launch.flags",
         "samples as without drafts"),
        ([*STARTED, "rollout.engine=vllm",
          "rollout.launch.flags=[--speculative-config.rejection_sample_method=synthetic]"], "rollout.launch.flags",
         "samples as without drafts"),
        ([*STARTED, "rollout.launch.command=[/nowhere/python]"], "rollout.launch.command", "an interpreter"),
        ([*STARTED, "rollout.launch.command=[]"], "rollout.launch.command", "an interpreter"),
        ([*GIVEN, "rollout.sync.transport=disk", "rollout.sync.folder=/dev/null/x"], "rollout.sync.folder", "share"),
        ([*SENT, "rollout.engine=vllm", "model.lora.rank=513"], "model.lora.rank", "Lower it to 512"),
        ([*SENT, "rollout.engine=vllm", "rollout.sync.folder=/dev/null/x"], "rollout.sync.folder", "share"),
        ([*SENT, "model.lora.targets=[q_proj,o_proj]"], "model.lora.targets", "Add what is lacking"),
    ],
)  # fmt: skip
def test_a_contradiction_names_the_setting_and_the_remedy(
    tmp_path: Path, overrides: list[str], setting: str, remedy: str
) -> None:
    with pytest.raises(UserError) as caught:
        _check(tmp_path, *overrides)
    assert caught.value.setting == setting
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_is_not_installed_here_is_to_be_named(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"rollout.launch.command=.*python,-m,{engine}"):
        _check(tmp_path, f"rollout.engine={engine}", "rollout.launch.count=1")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has CUDA")
@pytest.mark.parametrize(
    "flags", ["--mem-fraction-static=0.5", "--mem-fraction-static,0.5", "--mem_fraction_static=0.5"]
)
def test_sharing_gpus_wants_gpus(tmp_path: Path, flags: str) -> None:
    with pytest.raises(UserError, match=r"rollout.colocated = true: this machine has no CUDA"):
        _check(tmp_path, *STARTED, *SHARED, "rollout.launch.command=[sh]", f"rollout.launch.flags=[{flags}]")


def test_the_checks_need_no_torch() -> None:
    code = "import sys, megatron_dppo.rollout.servers.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
