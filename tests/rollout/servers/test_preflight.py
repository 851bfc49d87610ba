"""Settings of servers that cannot work are refused before a server is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.rollout.servers.launch import SERVER_PYTHON, base_command
from megatron_dppo.rollout.servers.preflight import check_servers
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config

SHAPE = PolicyShape(2, 64, 8, 4, 32, 128, 64, True, 1e6, 1e-6, 128)
"""Eight query heads, four key-value heads."""
STARTED = ("rollout.engine=sglang", "rollout.launch.count=2", "rollout.launch.command=[sh]")
GIVEN = ("rollout.engine=vllm", "rollout.servers=[http://a:1]")
DISK = (*GIVEN, "rollout.sync.transport=disk")
SENT = (*GIVEN, "rollout.sync.adapter=true", "model.lora.rank=4")
SHARED = (*STARTED, "rollout.colocated=true", "rollout.sync.transport=disk")


def check(tmp_path: Path, *overrides: str) -> None:
    config = load_config(None, [f"run.dir={tmp_path}/run", *overrides])
    check_config(config)
    check_servers(config, SHAPE, environ={})


@pytest.mark.parametrize(
    "overrides",
    [
        (
            *STARTED,
            "rollout.launch.tp=[2,8]",
            "rollout.launch.env=[A=,_b=c=d]",
            "rollout.max_batch=1",
        ),
        DISK,
        (*GIVEN, "rollout.timeout_s=240", "rollout.sync.timeout_s=120"),
        (*SENT, "model.lora.rank=512", "model.lora.targets=[k_proj,up_proj]"),
        ("rollout.timeout_s=1", "rollout.ahead=1"),  # without a server there is no sync
        (*GIVEN, "rollout.launch.command=[/nowhere/python]", "rollout.launch.tp=3"),  # unused
    ],
)
def test_fitting_settings_pass_and_write_nothing(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    check(tmp_path, *overrides)
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    "rollout.max_batch": (("rollout.max_batch=4",),),
    "rollout.servers": (
        ("rollout.engine=vllm", "rollout.servers=[a:1]"),
        ("rollout.engine=vllm", "rollout.servers=slurm"),
    ),
    "rollout.timeout_s": ((*GIVEN, "rollout.timeout_s=239", "rollout.sync.timeout_s=120"),),
    "rollout.launch.flags": (
        SHARED,
        (*SHARED, "rollout.engine=vllm", "rollout.launch.flags=[--mem-fraction-static=0.5]"),
        (*STARTED, "rollout.launch.flags=[--api-key=x]"),
        (*STARTED, "rollout.launch.flags=[--speculative_accept_threshold_acc,0.9]"),
        (
            *STARTED,
            "rollout.engine=vllm",
            "rollout.launch.flags=[--speculative-config.rejection_sample_method=synthetic]",
        ),
    ),
    "rollout.launch.tp": ((*STARTED, "rollout.launch.tp=[1,3]"),),
    "rollout.launch.env": (
        (*STARTED, "rollout.launch.env=[1A=1]"),
        (*STARTED, "rollout.launch.env=[NCCL_CUMEM_ENABLE=1]"),
    ),
    "rollout.launch.command": (
        (*STARTED, "rollout.launch.command=[/nowhere/python]"),
        (*STARTED, "rollout.launch.command=[]"),
    ),
    "rollout.sync.folder": ((*SENT, "rollout.sync.folder=/dev/null/x"),),
    "model.lora.rank": ((*SENT, "model.lora.rank=513"),),
    "model.lora.targets": ((*SENT, "rollout.engine=sglang", "model.lora.targets=[q_proj,o_proj]"),),
}
"""Settings, and overrides with which each is refused."""


@pytest.mark.parametrize("setting", REFUSED)
def test_unfit_setting_is_refused(setting: str, tmp_path: Path) -> None:
    for overrides in REFUSED[setting]:
        with pytest.raises(UserError) as caught:
            check(tmp_path, *overrides)
        assert caught.value.setting == setting, overrides


def test_uninstalled_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for engine in ("sglang", "vllm"):
        with pytest.raises(UserError, match=f"rollout.launch.command=.*python,-m,{engine}"):
            check(tmp_path, f"rollout.engine={engine}", "rollout.launch.count=1")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_server_python_starts_and_is_checked(engine: str, tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}/run", f"rollout.engine={engine}", "rollout.launch.count=1"]
    config = load_config(None, words)
    (python := tmp_path / "python").write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    check_servers(config, SHAPE, {SERVER_PYTHON: str(python)})
    assert base_command(config.rollout, {SERVER_PYTHON: str(python)})[:2] == (str(python), "-m")
    for wrong, problem in (
        ("/nowhere/python", "cannot be run"),
        (sys.executable, f"has no package {engine}"),
    ):
        with pytest.raises(UserError, match=f"{SERVER_PYTHON} = {wrong}: {problem}"):
            check_servers(config, SHAPE, {SERVER_PYTHON: wrong})
    named = load_config(None, [*words, "rollout.launch.command=[sh]"])
    check_servers(named, SHAPE, {SERVER_PYTHON: "/nowhere/python"})
    assert base_command(named.rollout, {SERVER_PYTHON: "/nowhere/python"}) == ("sh",)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has CUDA")
@pytest.mark.parametrize("flags", ["--mem-fraction-static,0.5", "--mem_fraction_static=0.5"])
def test_colocated_servers_need_gpus(tmp_path: Path, flags: str) -> None:
    with pytest.raises(UserError, match=r"rollout.colocated = true: this machine has no CUDA"):
        check(tmp_path, *SHARED, f"rollout.launch.flags=[{flags}]")


def test_refused_flags_are_shown_without_keys(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check(tmp_path, *SHARED, "rollout.launch.flags=[--hub-token,s3cret]")
    assert caught.value.value == ["--hub-token", "…"]


def test_checks_need_no_torch() -> None:
    code = "import sys, megatron_dppo.rollout.servers.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
