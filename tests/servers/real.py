"""Real servers on this machine's CPU, shared by the tests, and whole runs with them.

A test that kills, stops or slows a server needs no repair: the next one that requests the server
gets it running again. No test may rely on the weights of a shared server: a test that depends on
them sends its own.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from megatron_dppo.config.rollout import ServerKind as Kind
from megatron_dppo.rollout.servers.client import ServerClient
from megatron_dppo.rollout.servers.http import Http, ServerError
from megatron_dppo.rollout.servers.launch import SECRET, load_engine_spec
from megatron_dppo.rollout.servers.processes import ServerProcess, new_secret, stop_all, wait_ready
from megatron_dppo.settings import load_config
from tests.commands import Command
from tests.small_runs import Rows, rows

PYTHONS = {"sglang": "SGLANG_PYTHON", "vllm": "VLLM_PYTHON"}
"""Environment variables with the interpreters of the environments that hold the servers."""
CANARY = "SGLANG_CPU_CANARY"
"""Environment variable with the file in which placeholders of SGLang's CUDA packages report that
they were called."""
SGLANG_ON_CPU = Path(__file__).parent / "sglang_cpu" / "server.py"
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
FIRST_PORT = 23000 + os.getpid() % 100 * 40
"""Test sessions run beside each other."""
WAIT_S = 180.0
AGREES = 1e-4
"""Greatest difference of two log-probabilities that is rounding."""


def launch_settings(
    kind: Kind, tp: tuple[int, ...], *, first_port: int = FIRST_PORT + 10
) -> list[str]:
    """Return settings of a run that starts servers on CPU. The test is skipped without an
    environment of this kind."""
    if PYTHONS[kind] not in os.environ:
        pytest.skip(f"needs {kind}: scripts/test.sh --servers")
    command = {"sglang": str(SGLANG_ON_CPU), "vllm": "-m,vllm.entrypoints.openai.api_server"}[kind]
    settings = f"""
    rollout.engine={kind} rollout.launch.command=[{os.environ[PYTHONS[kind]]},{command}]
    rollout.launch.count={len(tp)} rollout.launch.tp=[{",".join(map(str, tp))}]
    rollout.launch.first_port={first_port} rollout.launch.ports=30 rollout.launch.wait_s={WAIT_S}
    """
    if kind == "vllm":
        settings += """
        rollout.launch.flags=[--enforce-eager,--max-model-len,1024,--max-num-seqs,64]
        rollout.launch.env=[VLLM_CPU_KVCACHE_SPACE=1,VLLM_NO_USAGE_STATS=1,HF_HUB_OFFLINE=1,OMP_NUM_THREADS=1]
        """
    return settings.split()


@dataclass(frozen=True, slots=True)
class RealServer:
    """A server that can generate."""

    process: ServerProcess
    api: ServerClient
    kind: Kind
    tp: int
    policy: Path

    @property
    def secret(self) -> str:
        return self.process.secret

    def restore(self) -> RealServer:
        """Load the weights that the server was started with, at version 1."""
        api, run = self.api, self.api.http.run
        run(api.pause("abort"))
        run(api.begin_update())
        run(api.update_from_disk(self.policy, "1"))
        run(api.end_update("1"))
        run(api.flush())
        run(api.resume())
        return self


class RealServers:
    """Starts each server at its first request.

    Args:
        policy: Hugging Face directory that they serve.
        folder: of their logs.
        http: of their clients.
    """

    def __init__(self, policy: Path, folder: Path, http: Http) -> None:
        self._policy, self._folder, self._http = policy, folder, http
        self._secret = new_secret()  # the same for all, as it is for the servers of a run
        self._running: dict[object, RealServer] = {}

    def get(
        self, kind: Kind, tp: int = 1, *settings: str, policy: Path | None = None
    ) -> RealServer:
        """Return a server of this kind with ``tp`` ranks, started with these settings, that can
        generate."""
        key, number = (kind, tp, settings, policy), len(self._running)
        server = self._running.get(key)
        if server is None:
            policy = policy or self._policy
            places = [f"run.dir={self._folder}/{number}", f"model.path={policy}"]
            launched = launch_settings(kind, (tp,), first_port=FIRST_PORT + number)
            config = load_config(None, [*places, *launched, *settings])
            process = ServerProcess(config, 0, host="127.0.0.1", secret=self._secret)
        elif self._is_well(server):
            return server
        else:
            process, policy = server.process, server.policy
            process.stop()
        process.start()
        client = partial(
            load_engine_spec(kind).client, http=self._http, secret=self._secret, timeout_s=60.0
        )
        api = self._http.run(wait_ready(process, client, WAIT_S))
        self._http.run(api.get_info())
        self._running[key] = RealServer(process, api, kind, tp, policy)
        return self._running[key]

    def stop(self) -> None:
        stop_all([server.process for server in self._running.values()])

    def _is_well(self, server: RealServer) -> bool:
        for pid in server.process.list_pids():
            if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                os.kill(pid, signal.SIGCONT)
        try:
            self._http.run(server.api.resume())
            self._http.run(server.api.health(20.0))
        except ServerError:
            return False
        return server.process.is_alive()


def given(*servers: RealServer) -> list[str]:
    urls = ",".join(server.api.url for server in servers)
    return [f"rollout.engine={servers[0].kind}", f"rollout.servers=[{urls}]"]


LORA = (
    "model.lora.rank=4",
    "rollout.sync.adapter=true",
    "model.lora.targets=[q_proj,v_proj,o_proj]",
)
SETTINGS = """
data.arithmetic.problems=64 rollout.prompts_per_step=16 rollout.samples_per_prompt=4 rollout.max_response_tokens=24
rollout.timeout_s=200 rollout.sync.timeout_s=60 rollout.sync.check_every=1 optimizer.lr=1e-3 eval.every=0
eval.problems=4
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""
"""Mixed on purpose: a fresh policy is never right, and a step of equal rewards would train and send
nothing."""


class Run:
    """``megatron-dppo train`` in a folder of its own, which tells all processes that the run
    starts.

    Args:
        folder: new, or of an earlier life of the run.
        policy: Hugging Face directory.
        settings: on top of configs/quickstart.yaml.
        servers: given to the run; none: it starts its own.
    """

    def __init__(
        self, folder: Path, policy: Path, *settings: str, servers: tuple[RealServer, ...] = ()
    ) -> None:
        self.folder, self.log = folder, folder / "log"
        folder.mkdir(exist_ok=True)
        (folder / "reward.py").write_text(REWARD)
        words = [
            "megatron-dppo",
            "train",
            str(QUICKSTART),
            f"run.dir={folder}",
            f"model.path={policy}",
        ]
        words += [f"reward.function={folder}/reward.py:compute_score", *SETTINGS.split()]
        words += [*(given(*servers) if servers else ()), *settings]
        secret = servers[0].secret if servers else ""
        self.process = Command(words, self.log, folder, {SECRET: secret}).start()

    def finish(self) -> Rows:
        """Return the metrics of the run's steps, once it has ended well."""
        self.process.join(300.0)
        assert self.process.exitcode == 0, self.log.read_text()
        return rows(self.folder)

    def kill(self) -> None:
        """With all of its ranks."""
        os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()

    def wait_for(self, file: str) -> Path:
        until = time.monotonic() + 300.0
        while not (self.folder / file).exists():
            assert self.process.is_alive() and time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)
        return self.folder / file

    def children(self, words: str = "") -> list[psutil.Process]:
        """Return the living processes that the run has started whose command line has these
        words."""
        found = []
        for process in psutil.process_iter():
            try:
                if Path(process.cwd()) == self.folder and process.status() != psutil.STATUS_ZOMBIE:
                    found += [process] * (words in " ".join(process.cmdline()))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def check_agreement(steps: Rows, servers: int) -> None:
    """Every step trained on tokens of the weights that it trained, and every server then had the
    new ones."""
    for step in steps:
        assert step["train/grad_norm"] > 0
        assert step["rollout/agreement_max_diff"] <= AGREES
        assert step["train/rollout_logprob_abs_diff"] <= AGREES
        assert (step["rollout/stale_tokens"], step["staleness/mean"]) == (0.0, 0.0)
        assert (step["rollout/servers"], step["rollout/sync_retries"]) == (servers, 0.0)
