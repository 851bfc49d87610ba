"""Random kills of servers, judges and trainers of runs two steps ahead of two real SGLang servers:
nothing is lost, nothing is trained twice.

Servers and the judge, the HTTP server of the rewards, are restarted soon after a kill; a trainer at
once. In every second run a user's conversation makes the completions. The ledger of a run is
compared with the prompts of an undisturbed run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from megatron_dppo.config import RunConfig
from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.rollout.servers.processes import ServerProcess, new_secret, stop_all, wait_ready
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.prompt_sampler import PromptOrder
from tests.chaos.kills import TALK, WAIT_S, Configuration, Run, Tally
from tests.chaos.ledger import events, find_faults, trained
from tests.servers.conftest import SIZES
from tests.servers.real import FIRST_PORT, launch_settings

KINDS = ("server", "rank", "judge", "launcher", "server", "worker")

STEPS, PROMPTS, SAMPLES, PROBLEMS = 24, 8, 4, 96
DATA = (
    f"run.steps={STEPS}", "run.checkpoint_every=2", "run.export=false", "data.train=arithmetic",
    "data.chat_template=false", "data.max_prompt_tokens=24", f"data.arithmetic.problems={PROBLEMS}",
    f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}",
    "rollout.max_response_tokens=24",
    "pruning.prompts.rule=none", "pack.max_tokens=256", "optimizer.lr=1e-4", "eval.every=0",
    "eval.problems=0",
)  # fmt: skip
AHEAD = (
    "layout.tp=2", "rollout.engine=sglang", "rollout.ahead=2", "rollout.health_timeout_s=5",
    "rollout.sync.timeout_s=20", "rollout.timeout_s=900", "reward.workers=2",
)  # fmt: skip
TALKING = (
    "rollout.conversation={folder}/talk.py:talk", "rollout.request_timeout_s=60",
    "rollout.attempts=8",
    "run.stall_warning_s=5",
)  # fmt: skip
JUDGE = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(len(text) % 3).encode())

    def log_message(self, *words):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge).serve_forever()
"""
REWARD = """
import time
from urllib.request import urlopen

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    until = time.monotonic() + 60.0
    while True:
        try:
            with urlopen("http://127.0.0.1:{port}", data=solution_str.encode() or b" ", timeout=5.0) as answer:
                return float(answer.read())
        except OSError:  # the judge is away
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
"""
AWAY_S = 4.0
"""Longest time until a restart of a killed process."""
BETWEEN_S = 9.0
"""Longest time between kills."""
PATIENCE_S = 1200.0
"""Longest time of anything that a run waits for on a busy machine."""


class Judge:
    """The reward's server."""

    def __init__(self, folder: Path, port: int) -> None:
        (folder / "judge.py").write_text(JUDGE)
        self.command = [sys.executable, str(folder / "judge.py"), str(port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)

    def list_pids(self) -> list[int]:
        return [self.process.pid]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Chaos:
    """Servers, the judge and the runs, and their kills."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance, self.tally = folder, random.Random(seed), Tally()
        self.secret, self.http = new_secret(), Http()
        self.due: list[tuple[float, Any]] = []
        """Restarts: time and process."""
        write_model(policy := folder / "policy", **SIZES, ffn=128)
        judge_port = FIRST_PORT + 4
        (folder / "talk.py").write_text(TALK)
        (folder / "reward.py").write_text(REWARD.format(port=judge_port))
        self.judge = Judge(folder, judge_port)
        launch = [
            *launch_settings("sglang", (1, 1), first_port=FIRST_PORT),
            "rollout.launch.ports=2",
        ]
        serving = load_config(None, [f"run.dir={folder}", f"model.path={policy}", *launch])
        self.servers = [
            ServerProcess(serving, i, host="127.0.0.1", secret=self.secret) for i in range(2)
        ]
        for server in self.servers:
            server.start()
        order = PromptOrder([PROBLEMS], seed=RunConfig().seed)
        self.order = [order.next_window(PROMPTS).tolist() for _ in range(STEPS)]
        """The prompts of each step of an undisturbed run."""
        for server in self.servers:
            self.http.run(
                wait_ready(
                    server, lambda url: SglangClient(url, self.http, secret=self.secret), PATIENCE_S
                )
            )
        served = (*AHEAD, f"rollout.servers=[{','.join(server.url for server in self.servers)}]")
        self.configurations = (
            Configuration("a conversation, two given servers", (*served, *TALKING)),
            Configuration("two given servers", served),
        )

    def run(self, kills: int) -> None:
        """Kill so many times, equally often of each kind, and run to the end of the last run."""
        turns = list(islice(cycle(KINDS), kills))
        self.chance.shuffle(turns)
        while turns:
            folder = self.folder / f"run-{self.tally.runs}"
            own = [f"run.dir={folder / 'run'}", f"model.path={self.folder / 'policy'}"]
            command = [
                "tests.chaos.ledger",
                *own,
                f"reward.function={self.folder / 'reward.py'}:compute_score",
                *DATA,
            ]
            run = Run(
                self.configurations[self.tally.runs % 2], folder, command, {SECRET: self.secret}
            )
            while self._live(run, turns) != 0:
                pass
            self._compare(run)
            self.tally.runs += 1

    def _live(self, run: Run, turns: list[str]) -> int:
        """Start a run, kill in their order until its end, and return the exit code."""
        process, before = run.start(), len(events(run.folder / "run"))
        self._wait_until(
            lambda: process.poll() is not None or len(events(run.folder / "run")) > before
        )
        killed = False
        while not killed and process.poll() is None:
            until = time.monotonic() + (
                self.chance.uniform(0.0, BETWEEN_S) if turns else PATIENCE_S
            )
            self._wait_until(
                lambda until=until: process.poll() is not None or time.monotonic() > until
            )
            assert turns or process.poll() is not None, f"a run does not end: {run.folder}"
            if process.poll() is None and self._kill(turns[0], run, process):
                killed = turns[0] in ("rank", "launcher")
                self.tally.kills[turns.pop(0)] += 1
        code = process.wait(WAIT_S)
        self.tally.wrong += run.end_processes()
        if code and not killed:
            last = " | ".join((run.folder / "log").read_text().splitlines()[-6:])
            self.tally.wrong.append(f"ended by itself, code {code}: {last}")
        return code

    def close(self) -> None:
        self.judge.stop()
        stop_all(self.servers)
        self.http.close()

    def _kill(self, kind: str, run: Run, process: subprocess.Popen[bytes]) -> bool:
        """Kill a process of the kind; return False without a victim."""
        away = [what for _, what in self.due]
        well: list[Judge | ServerProcess] = [
            each for each in self.servers if each.is_listening() and each not in away
        ]
        if kind in ("judge", "server"):
            well = well if kind == "server" else [self.judge][: self.judge not in away]
            if not well:
                return False
            what = self.chance.choice(well)
            pids = what.list_pids()
            self.due.append((time.monotonic() + self.chance.uniform(0.0, AWAY_S), what))
        else:
            pids = [victim.pid for victim in run.find_victims(kind, process.pid)]
        try:
            os.kill(self.chance.choice([*pids[:1], *pids]), signal.SIGKILL)
        except (IndexError, ProcessLookupError):
            return False
        print(f"{self.tally.kills.total() + 1:4}: {kind}", flush=True)
        return True

    def _wait_until(self, moment: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not moment() and time.monotonic() < until:
            now, due = time.monotonic(), self.due
            self.due = [(when, what) for when, what in due if when > now]
            for when, what in due:
                if when <= now:
                    what.stop()  # processes that outlived the kill
                    what.start()
            time.sleep(0.05)

    def _compare(self, run: Run) -> None:
        ledger, rows = events(run.folder / "run"), run.rows()
        wrong = list(find_faults(ledger, self.order, SAMPLES))
        if (steps := [row["step"] for row in rows]) != list(range(1, STEPS + 1)):
            wrong.append(f"metrics.jsonl has the steps {steps}")
        for name in ("rollout/dropped_groups", "reward/errors", "reward/timeouts"):
            wrong += [f"{name} is {row[name]} in step {row['step']}" for row in rows if row[name]]
        wrong += [
            f"step {row['step']} is too old"
            for row in rows
            if row["staleness/max"] > row["staleness/bound"]
        ]
        self.tally.completions += sum(
            len(g) for groups in trained(ledger).values() for g in groups.values()
        )
        self.tally.wrong += [f"{run.folder.name}: {fault}" for fault in wrong]
        if not wrong:
            shutil.rmtree(run.folder)


def chaos(folder: Path, kills: int, seed: int) -> Tally:
    everything = Chaos(folder, seed)
    try:
        everything.run(kills)
    finally:
        everything.close()
    return everything.tally
