"""A real Slurm of two nodes on this machine's loopback, with GPUs that are nothing but names; and
32 nodes that are nothing but names themselves, so that ``sbatch --test-only`` can judge jobs that
no machine here could run.

Debian's ``slurm-wlm`` and ``munge`` in a folder of their own, as root: another Slurm of this
machine is not touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

NODES = ("n1", "n2")
"""Nodes of the partition ``loopback``, with a slurmd each."""
NAMED = 32
"""Nodes of the default partition. They count as asleep, and would be woken for a job."""
UP_S = 30.0
CONFIGURATION = """
ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
EnforcePartLimits=ALL
SlurmdTimeout=10
KillWait=8
InactiveLimit=0
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
{nodes}
NodeName=named[1-{named}] CPUs=64 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=named Nodes=named[1-{named}] Default=YES MaxTime=INFINITE State=UP
PartitionName=loopback Nodes={names} MaxTime=INFINITE State=UP
"""


class Cluster:
    """The daemons, from ``start`` to ``stop``.

    Args:
        folder: for their state, logs and sockets; a short path, since a socket's may not be long.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Returns when both nodes are idle."""
        (munge := self.folder / "munge").mkdir()
        self._write_configuration()
        (munge / "key-file").write_bytes(secrets.token_bytes(128))
        (munge / "key-file").chmod(stat.S_IRUSR)
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        self._run(
            "munged", "--foreground", "--force", *(f"--{name}={munge / name}" for name in files)
        )
        wait_for(lambda: (munge / "socket").exists(), UP_S, "munged")
        self._run("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.idle() == set(NODES), UP_S, "idle nodes")

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        self._run("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Its slurmd and every process of jobs on it end at once, as if its power had gone."""
        slurmd = self._daemons.pop(f"slurmd {node}")
        tasks = list(self.processes(SLURMD_NODENAME=node))
        managers = {task.parent() for task in tasks}
        for process in [
            psutil.Process(slurmd.pid),
            *(each for each in managers if each and each.pid > 1),
            *tasks,
        ]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        slurmd.wait()

    def processes(self, **environ: str) -> Iterator[psutil.Process]:
        """Those of jobs whose environment holds these values."""
        wanted = {"SLURM_CONF": self.environment["SLURM_CONF"], **environ}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and wanted.items() <= process.environ().items()
                ):
                    yield process

    def idle(self) -> set[str]:
        return set(
            self.call(
                "sinfo", "-h", "-N", "-p", "loopback", "-t", "idle", "-o", "%N"
            ).stdout.split()
        )

    def call(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """One of Slurm's commands."""
        return subprocess.run(
            words,
            env=self.environment | environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def stop(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(UP_S)
            except subprocess.TimeoutExpired:  # slurmd waits for the processes of its jobs
                daemon.kill()
                daemon.wait()

    def _run(self, *words: str) -> None:
        name = f"{words[0]} {words[-1]}" if words[0] == "slurmd" else words[0]
        with (self.folder / f"{name}.log").open("ab") as log:
            environ = self.environment | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
            self._daemons[name] = subprocess.Popen(
                words, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def _write_configuration(self) -> None:
        port, *ports = _free_ports(1 + len(NODES))
        what = "NodeHostname=localhost NodeAddr=127.0.0.1 CPUs=64 RealMemory=512000 Gres=gpu:8"
        nodes = "\n".join(
            f"NodeName={node} Port={own} {what}" for node, own in zip(NODES, ports, strict=True)
        )
        text = CONFIGURATION.format(
            folder=self.folder, port=port, nodes=nodes, names=",".join(NODES), named=NAMED
        )
        (self.folder / "slurm.conf").write_text(text)
        for gpu in range(8):
            os.mknod(
                self.folder / f"gpu{gpu}", stat.S_IFCHR | 0o600, os.makedev(1, 3)
            )  # as /dev/null
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")


def wait_for(there: Callable[[], object], timeout_s: float, what: str) -> None:
    until = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < until, f"no {what} after {timeout_s:g} s"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as to_close:
        sockets = [to_close.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
