"""Servers are found where the user or Slurm has them, and started with the flags of the run."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.parallel.meeting import open_listener, open_store
from megatron_dppo.rollout.servers.client import ROUTING_FLAG
from megatron_dppo.rollout.servers.launch import (
    HOSTS,
    NODES,
    OVERRIDE,
    assign_server_gpus,
    find_listen_address,
    local_ranks,
    server_command,
    server_environment,
    server_urls,
    visible_gpus,
)
from megatron_dppo.rollout.servers.processes import ServerProcess, _is_free
from megatron_dppo.rollout.servers.sender import find_local_address
from megatron_dppo.settings import load_config


def urls(servers: str, **environ: str) -> tuple[str, ...]:
    settings = [
        "rollout.engine=sglang",
        "rollout.launch.first_port=31000",
        f"rollout.servers={servers}",
    ]
    return server_urls(load_config(None, settings), environ)


def refusal(servers: str, **environ: str) -> UserError:
    with pytest.raises(UserError) as caught:
        urls(servers, **environ)
    return caught.value


def test_given_urls_get_one_form() -> None:
    given = "[http://Node1:30000/,https://10.0.0.2:8, 'http://[::1]:9']"
    assert urls(given) == ("http://node1:30000", "https://10.0.0.2:8", "http://[::1]:9")
    assert urls("[]") == ()
    assert "twice" in refusal("[http://a:1,http://a:1/]").problem


@pytest.mark.parametrize(
    "url", ["node1:30000", "http://node1", "http://node1:x", "http://:30000", "ftp://node1:30000",
            "http://node1:30000/v1", "http://me:secret@node1:30000"],
)  # fmt: skip
def test_a_malformed_url_is_refused(url: str) -> None:
    error = refusal(f"['{url}']")
    assert (error.setting, error.value) == ("rollout.servers", url)


def test_ipv6_servers_are_reached_over_loopback() -> None:
    assert urls("slurm", **{HOSTS: "::1,10.0.0.2"}) == (
        "http://[::1]:31000",
        "http://10.0.0.2:31000",
    )
    with open_listener("::1") as listener:
        port = listener.getsockname()[1]
        assert find_local_address([f"http://[::1]:{port}"]) == "::1"
        assert not _is_free("::1", port)
        server = ServerProcess(load_config(None, []), 0, host="::1", secret="", gpus=None)
        assert server.url.startswith("http://[::1]:")
    store = open_store("::1", timedelta(seconds=9))
    store.set("a", "b")
    assert store.get("a") == b"b"
    assert not [c for c in psutil.Process().net_connections() if c.laddr == ("::", store.port)]


def test_slurm_nodes_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The override comes first, then the hosts that a job script looked up, then the nodes."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    nodes = {NODES: "node[3-4]"}
    assert urls("slurm", **nodes) == ("http://node3:31000", "http://node4:31000")
    assert urls("slurm", **{NODES: "node7"}) == ("http://node7:31000",)
    assert "cannot read it" in refusal("slurm", **{NODES: "node[9-"}).problem
    nodes[HOSTS] = "10.0.0.1,10.0.0.1,10.0.0.2"
    assert urls("slurm", **nodes) == (
        "http://10.0.0.1:31000",
        "http://10.0.0.1:31001",
        "http://10.0.0.2:31000",
    )
    nodes[OVERRIDE] = "http://a:1, http://b:2"
    assert urls("slurm", **nodes) == ("http://a:1", "http://b:2")
    assert refusal("slurm", **{OVERRIDE: "a:1"}).setting == OVERRIDE
    assert OVERRIDE in refusal("slurm").remedy


def test_servers_listen_on_loopback_for_ranks_of_one_machine() -> None:
    four = {"WORLD_SIZE": "4"}
    for alone in (
        {},
        {"WORLD_SIZE": "1"},
        four | {"LOCAL_WORLD_SIZE": "4"},
        four | {"SLURM_STEP_NUM_NODES": "1"},
    ):
        assert find_listen_address(alone) == "127.0.0.1"
    several = four | {"LOCAL_WORLD_SIZE": "2"}
    assert find_listen_address(several | {"MASTER_ADDR": "192.0.2.7"}) == "192.0.2.7"
    try:
        assert not find_listen_address(several | {"MASTER_ADDR": "localhost"}).startswith("127.")
    except UserError as error:
        assert error.setting == "MASTER_ADDR"


def test_ranks_of_a_machine_are_counted_under_either_launcher() -> None:
    assert local_ranks({}) == 1
    assert local_ranks({"LOCAL_WORLD_SIZE": "4"}) == 4
    assert local_ranks({"SLURM_STEP_TASKS_PER_NODE": "8(x3),2"}) == 8


def test_servers_take_the_gpus_after_the_trainers() -> None:
    def shares(*settings: str, gpus: str = "4, 5,6,7,GPU-8") -> list[str | None]:
        config = load_config(None, ["rollout.engine=sglang", "rollout.launch.count=2", *settings])
        return assign_server_gpus(config, visible_gpus({"CUDA_VISIBLE_DEVICES": gpus}), 2)

    assert shares("rollout.launch.tp=[1,2]") == ["6", "7,GPU-8"]
    assert shares("rollout.colocated=true") == ["4", "5"]
    assert shares(gpus="") == [None, None]
    for colocated in ("true", "false"):
        with pytest.raises(UserError, match="need 4 GPUs"):
            shares("rollout.launch.tp=2", f"rollout.colocated={colocated}")


LORA = "model.lora.targets=[q_proj,v_proj] rollout.sync.adapter=true"
SGLANG_FLAGS = (
    "--enable-lora --max-loras-per-batch 2 --max-lora-rank 4 --lora-target-modules q_proj v_proj"
)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ("rollout.engine=sglang loss.replay_routing=rollout", ROUTING_FLAG),
        ("rollout.engine=vllm rollout.top_k=9", "--return-sampling-mask"),
        ("rollout.engine=sglang rollout.top_k=9", ""),
        (f"rollout.engine=sglang model.lora.rank=4 {LORA}", SGLANG_FLAGS),
        (f"rollout.engine=vllm model.lora.rank=1 {LORA}", "--enable-lora --max-lora-rank 1"),
        (f"rollout.engine=vllm model.lora.rank=33 {LORA}", "--enable-lora --max-lora-rank 64"),
    ],
)
def test_servers_are_started_for_routing_and_adapters(settings: str, flags: str) -> None:
    """The last setting alone adds the flags."""
    *plain, last = settings.split()
    commands, updating = [], []
    for words in (plain, [*plain, last]):
        config = load_config(None, ["rollout.launch.count=1", "model.path=.", *words])
        commands.append(
            server_command(config, 0, host="127.0.0.1", port=1, secret_file=Path("secret"))
        )
        updating.append(
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in server_environment(config.rollout, secret="")
        )
    assert commands[1] == commands[0] + flags.split()
    assert updating == [False, "vllm" in settings and "lora" in settings]
