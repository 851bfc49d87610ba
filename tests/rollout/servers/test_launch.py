"""Servers that run already are found where the user or Slurm says, and servers of our own have their place."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.meeting import listen, open_store
from megatron_dppo.rollout.servers.launch import (
    HOSTS,
    NODES,
    OVERRIDE,
    gpu_shares,
    listening_address,
    local_ranks,
    server_urls,
    visible_gpus,
)
from megatron_dppo.rollout.servers.processes import ServerProcess, _is_free
from megatron_dppo.rollout.servers.sender import address_towards
from megatron_dppo.settings import load_config


def _urls(*overrides: str, **environ: str) -> tuple[str, ...]:
    return server_urls(load_config(None, ["rollout.engine=sglang", *overrides]), environ)


def _refusal(*overrides: str, **environ: str) -> UserError:
    with pytest.raises(UserError) as caught:
        _urls(*overrides, **environ)
    return caught.value


def test_given_urls_are_brought_into_one_form() -> None:
    given = "rollout.servers=[http://Node1:30000/,https://10.0.0.2:8, 'http://[::1]:9']"
    assert _urls(given) == ("http://node1:30000", "https://10.0.0.2:8", "http://[::1]:9")
    assert _urls() == ()


def test_servers_at_addresses_of_ipv6_are_reached_and_weights_come_from_loopback_to_them() -> None:
    assert _urls("rollout.servers=slurm", **{HOSTS: "::1,10.0.0.2,::1"}) == (
        "http://[::1]:30000",
        "http://10.0.0.2:30000",
        "http://[::1]:30001",
    )
    with listen("::1") as listener:
        port = listener.getsockname()[1]
        assert address_towards([f"http://[::1]:{port}"]) == "::1"
        assert not _is_free("::1", port)
        server = ServerProcess(load_config(None, []), 0, host="::1", secret="", gpus=None)
        assert server.url.startswith("http://[::1]:")
    store = open_store("::1", timedelta(seconds=9))
    store.set("a", "b")
    assert store.get("a") == b"b" and not [
        c for c in psutil.Process().net_connections() if c.laddr == ("::", store.port)
    ]


@pytest.mark.parametrize(
    "url", ["node1:30000", "http://node1", "http://node1:0", "http://node1:99999", "http://node1:x", "http://:30000",
            "ftp://node1:30000", "http://node1:30000/v1", "http://me:secret@node1:30000", "http://no de:1", ""],
)  # fmt: skip
def test_what_is_no_server_s_url_is_refused(url: str) -> None:
    error = _refusal(f"rollout.servers=['{url}']")
    assert (error.setting, error.value) == ("rollout.servers", url)


def test_a_server_named_twice_is_refused() -> None:
    assert "twice" in _refusal("rollout.servers=[http://a:1,http://a:1/]").problem


def test_slurm_s_second_component_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    servers = ("rollout.servers=slurm", "rollout.launch.first_port=31000")
    assert _urls(*servers, **{NODES: "node[3-4]"}) == ("http://node3:31000", "http://node4:31000")
    assert _urls(*servers, **{NODES: "node7"}) == ("http://node7:31000",)
    assert "cannot read it" in _refusal(*servers, **{NODES: "node[9-"}).problem
    assert _urls(*servers, **{NODES: "node[3-4]", OVERRIDE: "http://a:1, http://b:2"}) == ("http://a:1", "http://b:2")
    assert _refusal(*servers, **{OVERRIDE: "a:1"}).setting == OVERRIDE


def test_a_job_script_may_have_asked_slurm_and_servers_on_one_address_have_ports_of_their_own() -> None:
    servers = ("rollout.servers=slurm", "rollout.launch.first_port=31000")
    hosts = {HOSTS: "10.0.0.1,10.0.0.1,10.0.0.2", NODES: "node[3-4]"}
    assert _urls(*servers, **hosts) == ("http://10.0.0.1:31000", "http://10.0.0.1:31001", "http://10.0.0.2:31000")
    assert _urls(*servers, **hosts, **{OVERRIDE: "http://a:1"}) == ("http://a:1",)


def test_slurm_outside_of_a_heterogeneous_job_is_refused() -> None:
    assert OVERRIDE in _refusal("rollout.servers=slurm").remedy


def test_servers_listen_on_loopback_unless_ranks_are_elsewhere() -> None:
    for alone in (
        {},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4", "SLURM_STEP_NUM_NODES": "1"},
    ):
        assert listening_address(alone) == "127.0.0.1"
    several = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert listening_address(several | {"MASTER_ADDR": "192.0.2.7"}) == "192.0.2.7"
    own_name_is_loopback = several | {"MASTER_ADDR": "localhost"}
    try:
        assert not listening_address(own_name_is_loopback).startswith("127.")
    except UserError as error:
        assert error.setting == "MASTER_ADDR"


def test_ranks_of_a_machine_are_counted_under_either_launcher() -> None:
    assert local_ranks({}) == 1
    assert local_ranks({"LOCAL_WORLD_SIZE": "4"}) == 4
    assert local_ranks({"SLURM_STEP_TASKS_PER_NODE": "8(x3),2"}) == 8


def _servers(*overrides: str) -> Config:
    return load_config(None, ["rollout.engine=sglang", "rollout.launch.count=2", *overrides])


def test_servers_take_the_gpus_that_the_trainer_leaves() -> None:
    gpus = ["4", "5", "6", "7", "8"]
    assert gpu_shares(_servers("rollout.launch.tp=[1,2]"), gpus, 2) == ["6", "7,8"]
    assert gpu_shares(_servers("rollout.colocated=true"), gpus, 2) == ["4", "5"]
    assert gpu_shares(_servers(), [], 2) == [None, None]
    for overrides in (("rollout.launch.tp=2",), ("rollout.colocated=true", "rollout.launch.tp=2")):
        with pytest.raises(UserError, match="need 4 GPUs"):
            gpu_shares(_servers(*overrides), gpus, 2)


def test_gpus_are_those_that_are_visible() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1, GPU-7"}) == ["1", "GPU-7"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
