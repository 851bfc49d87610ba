"""Random kills of ranks, launchers and checkpoint writers.

Every second kill comes while a checkpoint is written, the others at any time from the first step
on. A finished run is compared with an undisturbed run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.small_runs import small_words, write_run

STEPS = 6
TALK = """
async def talk(client, prompt):
    return [await client.generate(prompt.token_ids)]
"""
MARK = "MEGATRON_DPPO_CHAOS"
"""Environment variable of all processes of a run, whatever their parent is by now."""
MAY_STAY = re.compile(r"megatron-dppo-.*|torchinductor_.*|tmp\w+wandb-(artifacts|media)")
"""Names that may stay in the temporary folder: of a launcher after SIGKILL, torch's cache, and
W&B's at its import."""
GONE_S = 10.0
"""Limit of the processes of a run after the launcher's end."""
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run to disturb."""

    name: str
    settings: tuple[str, ...]


KINDS = ("rank", "launcher", "writer")
CONFIGURATIONS = (
    Configuration("two updates, TP 2", ("layout.tp=2", "loss.updates_per_rollout=2")),
    Configuration(
        "a conversation and KL to a reference, one rank",
        ("rollout.conversation={folder}/talk.py:talk", "loss.kl_coef=0.01"),
    ),
    Configuration(
        "two steps ahead, PP 2, checkpoints in the background",
        ("layout.pp=2", "rollout.ahead=2", "run.checkpoint_in_background=true"),
    ),
    Configuration(
        "distributed optimizer, DP 2, checkpoints in the background",
        ("layout.dp=2", "optimizer.distributed=true", "run.checkpoint_in_background=true"),
    ),
    Configuration("GSPO, CP 2", ("layout.cp=2", "loss.name=gspo")),
)


@dataclass(slots=True)
class Run:
    """A run in a folder of its own, started as often as needed."""

    of: Configuration
    folder: Path
    command: list[str]
    secrets: dict[str, str] = field(default_factory=dict)

    def start(self) -> subprocess.Popen[bytes]:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        settings = [word.format(folder=self.folder.parent) for word in self.of.settings]
        environment = {
            MARK: str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", *self.command, *settings],
                env=os.environ | environment | self.secrets,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def find_processes(self) -> list[psutil.Process]:
        """Return all live processes of the run; ``info`` has their attributes."""
        found = psutil.process_iter(["pid", "ppid", "cmdline", "environ", "status"], ad_value=None)
        mine = [
            each for each in found if (each.info["environ"] or {}).get(MARK) == str(self.folder)
        ]
        return [
            each
            for each in mine
            if each.info["status"] != psutil.STATUS_ZOMBIE and each.info["cmdline"]
        ]

    def find_victims(self, kind: str, launcher: int) -> list[psutil.Process]:
        """Return processes of a kind; a writer of a checkpoint is forked by a rank."""
        processes = self.find_processes()
        if kind == "launcher":
            return [each for each in processes if each.pid == launcher]
        if kind == "worker":
            return [
                each for each in processes if "megatron_dppo.rewards.worker" in each.info["cmdline"]
            ]
        of_ranks = [
            each
            for each in processes
            if each.info["cmdline"][1:3] == ["-m", "megatron_dppo.launch.rank"]
        ]
        ranks = [each for each in of_ranks if each.info["ppid"] == launcher]
        if not ranks:  # a single rank is the launcher
            ranks = [each for each in processes if each.pid == launcher]
            of_ranks = [
                each
                for each in processes
                if ranks and each.info["cmdline"] == ranks[0].info["cmdline"]
            ]
        return ranks if kind == "rank" else [each for each in of_ranks if each not in ranks]

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics without times."""
        file = self.folder / "run" / "metrics.jsonl"
        read = (
            [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
            if file.exists()
            else []
        )
        return [
            {name: value for name, value in row.items() if not name.startswith("perf/")}
            for row in read
        ]

    def is_saving(self) -> bool:
        return any((self.folder / "run" / "checkpoints").glob(".iter_*.partial"))

    def end_processes(self) -> list[str]:
        """End the processes that outlive the launcher, and return their commands."""
        _, left = psutil.wait_procs(self.find_processes(), timeout=GONE_S)
        for process in left:
            process.kill()
        return [
            f"{self.of.name}: outlived by {' '.join(process.info['cmdline'])[:200]}"
            for process in left
        ]

    def outcome(self) -> dict[str, Any]:
        """Return everything that must not depend on kills: metrics without times, exported weights,
        and file names."""
        run = self.folder / "run"
        names = {str(path.relative_to(run)) for path in run.rglob("*")}
        return {
            "rows": self.rows(),
            "weights": hashlib.sha256((run / "hf" / "model.safetensors").read_bytes()).hexdigest(),
            "files": {
                name for name in names if not name.startswith("tensorboard/")
            },  # one for each start
        }


@dataclass
class Tally:
    """Counts of kills by kind and exit code, finished runs, and everything that went wrong."""

    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    completions: int = 0
    """Trained, in runs with a ledger."""
    wrong: list[str] = field(default_factory=list)


def wait_for(process: subprocess.Popen[bytes], moment: Callable[[], Any]) -> Any:
    """Return the moment's first true result; None if the process ends before."""
    until = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < until:
        if found := moment():
            return found
        time.sleep(0.002)
    return None


def disturb(
    run: Run, kind: str, *, saving: bool, seconds: float, chance: random.Random
) -> int | None:
    """Start a run, and kill one of its processes.

    Returns:
        The launcher's exit code; None without a victim.
    """
    process, before = run.start(), len(run.rows())
    wait_for(process, lambda: len(run.rows()) > before or run.is_saving())
    if saving or kind == "writer":
        wait_for(process, run.is_saving)
        time.sleep(chance.uniform(0.0, 0.05))
    else:
        time.sleep(chance.uniform(0.0, seconds))
    victims = wait_for(process, lambda: run.find_victims(kind, process.pid))
    if victims:
        chance.choice(victims).send_signal(signal.SIGKILL)
    try:
        code = process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        code = None
    return code if victims else None


def finish(run: Run, reference: dict[str, Any], tally: Tally) -> None:
    """Run to the end, and compare with the undisturbed run."""
    code = run.start().wait(WAIT_S)
    tally.wrong += run.end_processes()
    if code != 0:
        tally.wrong.append(f"{run.of.name}: exit code {code}, see {run.folder / 'log'}")
        return
    outcome = run.outcome()
    different = [name for name in ("rows", "weights") if outcome[name] != reference[name]]
    left = sorted(outcome["files"] - reference["files"])
    left += [
        path.name for path in (run.folder / "tmp").iterdir() if not MAY_STAY.fullmatch(path.name)
    ]
    tally.wrong += [f"{run.of.name}: other {name}, see {run.folder}" for name in different]
    tally.wrong += [f"{run.of.name}: left {name}" for name in left]
    tally.runs += 1
    if not different:
        shutil.rmtree(run.folder)


def make_run(of: Configuration, folder: Path) -> Run:
    settings = (f"run.steps={STEPS}", "run.checkpoint_every=2", "run.export=true")
    words = small_words(folder.parent / "policy", folder / "run", *settings)
    return Run(of, folder, ["megatron_dppo", "train", *words])


def chaos(folder: Path, kills: int, seed: int) -> Tally:
    """Kill parts of all configurations in turn; each configuration has three kills or more."""
    every = CONFIGURATIONS[: max(1, kills // 3)]
    chance, tally = random.Random(seed), Tally()
    write_run(folder / "policy")
    (folder / "talk.py").write_text(TALK)
    references: dict[str, tuple[dict[str, Any], float]] = {}
    runs: dict[str, Run] = {}
    for turn in range(10 * kills):
        of = every[turn % len(every)]
        if tally.kills.total() == kills:
            break
        if of.name not in references:
            reference = make_run(of, folder / f"undisturbed-{len(references)}")
            began = time.monotonic()
            assert reference.start().wait(WAIT_S) == 0, (reference.folder / "log").read_text()
            references[of.name] = reference.outcome(), (time.monotonic() - began) / 3
        run = runs.setdefault(of.name, make_run(of, folder / f"run-{turn}"))
        kind = KINDS[sum(divmod(turn, len(every))) % len(KINDS)]
        saving = chance.random() < 0.5
        code = disturb(run, kind, saving=saving, seconds=references[of.name][1], chance=chance)
        tally.wrong += run.end_processes()
        if code is not None:
            tally.kills[f"{kind}: code {code}"] += 1
            print(
                f"{tally.kills.total():4} of {kills}: {kind}, saving: {saving}, {of.name}: code "
                f"{code}",
                flush=True,
            )
        if len(run.rows()) > STEPS and code in (0, None):
            finish(runs.pop(of.name), references[of.name][0], tally)
    for name, run in runs.items():
        finish(run, references[name][0], tally)
    return tally
