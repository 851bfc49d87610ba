"""Kills servers, judges and trainers of runs two steps ahead with two real SGLang servers: nothing lost, nothing twice.

    scripts/chaos.sh [N] --servers [--seed S] [--kinds server,judge,…]

Servers and the judge, which the reward function asks by HTTP, are started again soon after they were killed; a trainer
at once. In every second run, a user's conversation makes the completions. If it ends its process or returns nonsense,
the run must end by itself, with an exit code that is not 0 and the function's name. If it hangs, the run must name it
and go on. What each step was asked for and trained on is in the run's ledger (``tests/recorded.py``), and is held
against the order of a run that nothing disturbed. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from megatron_dppo.config import RunConfig
from megatron_dppo.rollout.servers.http import Http
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.rollout.servers.processes import ServerProcess, new_secret, stop_all, wait_ready
from megatron_dppo.rollout.servers.sglang import SglangClient
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.prompt_sampler import PromptOrder
from tests.chaos import FAULTS, MARK, TALK, WAIT_S, Configuration, Run, leavings
from tests.ledger import asked_again, events, faults, trained
from tests.servers.real import FIRST_PORT, launch_settings

STEPS, PROMPTS, SAMPLES, PROBLEMS = 24, 8, 4, 96
DATA = (
    f"run.steps={STEPS}", "run.checkpoint_every=2", "run.export=false", "data.train=arithmetic",
    "data.chat_template=false", "data.max_prompt_tokens=24", f"data.arithmetic.problems={PROBLEMS}",
    f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}", "rollout.max_response_tokens=24",
    "pruning.prompts.rule=none", "pack.max_tokens=256", "optimizer.lr=1e-4", "eval.every=0", "eval.problems=0",
)  # fmt: skip
AHEAD = (
    "layout.tp=2", "rollout.engine=sglang", "rollout.ahead=2", "rollout.health_timeout_s=5",
    "rollout.sync.timeout_s=20", "rollout.timeout_s=900", "reward.workers=2",
)  # fmt: skip
TALKING = (
    "rollout.conversation={policy}/../reward.py:talk", "rollout.request_timeout_s=60", "rollout.attempts=8",
    "run.late_s=5",
)  # fmt: skip
NAMED = "talk has been about prompt"
"""What a run says of a conversation that hangs."""
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
"""Seconds until what was killed is started again, at most."""
BETWEEN_S = 9.0
"""Seconds between kills, at most."""
PATIENCE_S = 1200.0
"""Nothing that a run waits for takes longer, however busy the machine is."""


@dataclass(slots=True)
class RecordedRun(Run):
    """A run with a ledger, of given servers or with the local engine."""

    secret: str = ""

    def start(self) -> subprocess.Popen[bytes]:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.ledger", f"run.dir={self.folder / 'run'}", *DATA]
        command += [word.format(policy=self.policy) for word in self.of.settings]
        command += [f"model.path={self.policy}", f"reward.function={self.policy.parent / 'reward.py'}:compute_score"]
        environment = os.environ | {MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp"), SECRET: self.secret}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]


class Judge:
    """The reward's server."""

    def __init__(self, folder: Path, port: int) -> None:
        self.command = [sys.executable, str(folder / "judge.py"), str(port)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Tally:
    """What came of the kills."""

    kills: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    """What a run had just done when a part of it was killed."""
    runs: int = 0
    steps: int = 0
    steps_again: int = 0
    """Of lives whose weights were lost with them."""
    prompts_asked_again: int = 0
    resubmitted: int = 0
    """Requests that went to another server."""
    completions: int = 0
    lost_or_twice: list[str] = field(default_factory=list)
    ended_by_itself: list[str] = field(default_factory=list)
    survivors: list[str] = field(default_factory=list)


class Chaos:
    """Everything that runs, and what is done to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance, self.tally = folder, random.Random(seed), Tally()
        self.secret, self.http = new_secret(), Http()
        self.due: list[tuple[float, Any]] = []
        """What is to be started again, and when."""
        policy = folder / "policy"
        size = ["--hidden", "64", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "32"]
        init = [sys.executable, "-m", "megatron_dppo", "init", str(policy), "--tokenizer", "arithmetic", *size]
        subprocess.run([*init, "--ffn", "128", "--init-std", "0.2"], check=True, capture_output=True)
        judge_port = FIRST_PORT + 4
        (folder / "judge.py").write_text(JUDGE)
        (folder / "reward.py").write_text(TALK + REWARD.format(port=judge_port))
        self.judge = Judge(folder, judge_port)
        launch = [*launch_settings("sglang", (1, 1), first_port=FIRST_PORT), "rollout.launch.ports=2"]
        serving = load_config(None, [f"run.dir={folder}", f"model.path={policy}", *launch])
        self.servers = [ServerProcess(serving, i, host="127.0.0.1", secret=self.secret) for i in range(2)]
        for server in self.servers:
            server.start()
        order = PromptOrder([PROBLEMS], seed=RunConfig().seed)
        self.order = [order.next_window(PROMPTS).tolist() for _ in range(STEPS)]
        """The prompts of each step, where nothing comes between."""
        for server in self.servers:
            self.http.run(wait_ready(server, lambda url: SglangClient(url, self.http, secret=self.secret), PATIENCE_S))
        urls = ",".join(server.url for server in self.servers)
        served = (*AHEAD, f"rollout.servers=[{urls}]")
        self.configurations = (
            Configuration("a conversation, two given servers", (*served, *TALKING)),
            Configuration("two given servers", served),
        )

    def run(self, kinds: Sequence[str], kills: int) -> None:
        """Kill so many times, as often of each kind, and let the last run come to its end."""
        turns = [kind for kind, _ in zip(cycle(kinds), range(kills), strict=False)]
        self.chance.shuffle(turns)
        while turns:
            of = self.configurations[self.tally.runs % 2]
            run = RecordedRun(of, self.folder / f"run-{self.tally.runs}", self.folder / "policy", self.secret)
            process, talks = run.start(), of is self.configurations[0]
            while (code := process.poll()) != 0:
                if code is not None:
                    process = run.start()
                kind = next((turn for turn in turns if talks or turn not in FAULTS), None)
                if kind is None:
                    self._wait_for_the_end(run, process)
                elif self._wait(run, process) and self._kill(kind, run, process):
                    turns.remove(kind)
            self._hold_against_the_order(run)
            self.tally.runs += 1

    def close(self) -> None:
        self.judge.kill()
        stop_all(self.servers)
        self.http.close()

    def _wait(self, run: RecordedRun, process: subprocess.Popen[bytes]) -> bool:
        """Until a life of the run has begun, and for a random time after that; whether it lives still."""
        before = len(events(run.folder / "run"))
        self._wait_until(lambda: process.poll() is not None or len(events(run.folder / "run")) > before)
        until = time.monotonic() + self.chance.uniform(0.0, BETWEEN_S)
        while process.poll() is None and time.monotonic() < until:
            self._start_again()
            time.sleep(0.01)
        return self._lives(run, process)

    def _wait_for_the_end(self, run: RecordedRun, process: subprocess.Popen[bytes]) -> None:
        self._wait_until(lambda: process.poll() is not None)
        assert process.poll() is not None, f"a run does not end: {run.folder}"
        self._lives(run, process)

    def _lives(self, run: RecordedRun, process: subprocess.Popen[bytes]) -> bool:
        if (code := process.poll()) not in (None, 0):
            words = (run.folder / "log").read_text().splitlines()[-6:]
            self.tally.ended_by_itself.append(f"code {code}: " + " | ".join(words))
            self.tally.survivors += leavings(run)
            print(f"      {self.tally.ended_by_itself[-1]}", flush=True)
        return code is None

    def _kill(self, kind: str, run: RecordedRun, process: subprocess.Popen[bytes]) -> bool:
        """Whether one was killed, or the user's code did what it should not."""
        last = events(run.folder / "run")[-1]
        after_s = self.chance.uniform(0.0, AWAY_S)
        if kind == "judge":
            if any(what is self.judge for _, what in self.due):
                return False
            self.judge.kill()
            self.due.append((time.monotonic() + after_s, self.judge))
        elif kind == "server":
            well = [server for server in self.servers if server.listens() and all(s is not server for _, s in self.due)]
            if not well:
                return False
            server = self.chance.choice(well)
            pids = server.pids()
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice([pids[0], *pids]), signal.SIGKILL)
            self.due.append((time.monotonic() + after_s, server))
        elif kind in FAULTS:
            if not self._misbehave(kind, run, process):
                return False
        else:
            victims = run.victims(kind, process.pid)
            try:
                self.chance.choice(victims).send_signal(signal.SIGKILL)
            except (IndexError, psutil.NoSuchProcess):
                return False
        code = None
        if kind in ("rank", "launcher", "exits", "nonsense"):
            code = process.wait(WAIT_S)
            self.tally.survivors += leavings(run)
        for counted, what in ((self.tally.kills, kind), (self.tally.after, last["event"])):
            counted[what] = counted.get(what, 0) + 1
        number = sum(self.tally.kills.values())
        print(f"{number:4}: {kind} after {last['event']} {last.get('step', '')}: code {code}", flush=True)
        return True

    def _misbehave(self, kind: str, run: RecordedRun, process: subprocess.Popen[bytes]) -> bool:
        """Whether a conversation did what it was told to. The run must name it, and end, or go on if it hangs."""
        fault, log = run.folder / "fault", run.folder / "log"
        before = len(log.read_text())
        fault.write_text(kind)
        self._wait_until(lambda: process.poll() is not None or not fault.exists())
        if fault.exists():
            fault.unlink()
            return False
        named = NAMED if kind == "hangs" else "talk"
        self._wait_until(lambda: process.poll() is not None or (kind == "hangs" and named in log.read_text()[before:]))
        code = process.poll()
        if named not in log.read_text()[before:] or (code is not None if kind == "hangs" else code in (0, None)):
            self.tally.ended_by_itself.append(f"a conversation {kind}: code {code}, see {log}")
        return True

    def _wait_until(self, moment: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not moment() and time.monotonic() < until:
            self._start_again()
            time.sleep(0.1)

    def _start_again(self) -> None:
        now, due = time.monotonic(), self.due
        self.due = [(when, what) for when, what in due if when > now]
        for when, what in due:
            if when <= now:
                if isinstance(what, ServerProcess):
                    what.stop()  # what is left of it
                what.start()

    def _hold_against_the_order(self, run: RecordedRun) -> None:
        self.tally.survivors += leavings(run)
        ledger, rows = events(run.folder / "run"), run.rows()
        wrong = list(faults(ledger, self.order, SAMPLES))
        if (steps := [row["step"] for row in rows]) != list(range(1, STEPS + 1)):
            wrong.append(f"metrics.jsonl has the steps {steps}")
        for name in ("rollout/dropped_groups", "reward/errors", "reward/timeouts"):
            wrong += [f"{name} is {row[name]} in step {row['step']}" for row in rows if row[name]]
        wrong += [f"step {row['step']} is too old" for row in rows if row["staleness/max"] > row["staleness/bound"]]
        took = [event["step"] for event in ledger if event["event"] == "trained"]
        self.tally.steps += len(trained(ledger))
        self.tally.steps_again += len(took) - len(trained(ledger))
        self.tally.prompts_asked_again += asked_again(ledger)
        self.tally.resubmitted += int(sum(row.get("rollout/resubmitted", 0) for row in rows))
        self.tally.completions += sum(len(g) for groups in trained(ledger).values() for g in groups.values())
        self.tally.lost_or_twice += [f"{run.folder.name}: {what}" for what in wrong]
        print(f"      {run.folder.name} is at its end; so far {json.dumps(asdict(self.tally))}", flush=True)
        if not wrong:
            shutil.rmtree(run.folder)


def main(kills: int, seed: int, kinds: Sequence[str]) -> int:
    """Kill so many parts, and say what came of it."""
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="chaos-servers-"))
    chaos = Chaos(folder, seed)
    try:
        chaos.run(kinds, kills)
    finally:
        chaos.close()
    tally = chaos.tally
    if well := not (tally.lost_or_twice or tally.survivors or tally.ended_by_itself):
        shutil.rmtree(folder)
    print(json.dumps({**asdict(tally), "seed": seed, "seconds": round(time.monotonic() - began)}))
    return 0 if well else 1
