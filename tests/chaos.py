"""Disturbs small runs at random, and starts them again: nothing may be lost, changed or left behind.

Parts of them are killed; and once in a while a conversation of the user's ends its process, hangs, or returns nonsense,
upon which the run must end by itself, with an exit code that is not 0 and the function's name.

    scripts/chaos.sh [N] [--seed S]

Every second kill comes while a checkpoint is written, the others at any time from the first step on. A run that has
come to its end is held against one that nothing disturbed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

STEPS = 6
COMMON = (
    f"run.steps={STEPS}", "run.checkpoint_every=2", "data.train=arithmetic", "data.chat_template=false",
    "data.max_prompt_tokens=24", "data.arithmetic.problems=24", "data.arithmetic.eval_problems=8",
    "rollout.prompts_per_step=10", "rollout.samples_per_prompt=4", "rollout.max_response_tokens=12",
    "pack.max_tokens=256", "optimizer.lr=1e-3", "eval.every=2", "eval.problems=8",
)  # fmt: skip
TALK = """
import asyncio
import os
from pathlib import Path

FAULT = Path(os.environ.get("MEGATRON_DPPO_CHAOS", "."), "fault")

async def talk(client, prompt):
    turn = await client.generate(prompt.token_ids)
    try:
        fault = FAULT.read_text()
        FAULT.unlink()
    except FileNotFoundError:
        return [turn]
    if fault == "exits":
        os._exit(0)
    if fault == "hangs":
        await asyncio.sleep(1e9)
    return [10**9]
"""
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""
FAULTS = ("exits", "hangs", "nonsense")
"""What a user's code may do in the place of its work."""
SERVED = ("server", "rank", "exits", "judge", "launcher", "hangs", "server", "worker", "nonsense")
"""What is killed of runs with servers and a judge, or done by a user's code."""
SGLANG = "SGLANG_PYTHON"
"""Environment variable with the interpreter of an environment that holds SGLang."""
SERVER = str(Path(__file__).parent / "servers" / "sglang_cpu" / "server.py")
MARK = "MEGATRON_DPPO_CHAOS"
"""Environment variable by which all processes of a run are found, whoever their parent is by now."""
EACH_START = "tensorboard/"
"""Folder of a run with a file for each start of it."""
TEMPORARY = ("megatron-dppo-", "torchinductor_")
"""Beginnings of names that may be left in the temporary folder: of a launcher that got SIGKILL, and torch's cache."""
OF_WANDB = re.compile(r"tmp\w+wandb-(artifacts|media)")
"""Folders that W&B makes when it is imported and removes at exit; Megatron-Core imports it wherever it is installed."""
GONE_S = 10.0
"""Within so many seconds of the launcher's end nothing of a run may live."""
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run to disturb."""

    name: str
    settings: tuple[str, ...]
    victims: tuple[str, ...] = ("rank", "launcher", "writer")
    seeded: bool = True
    """Whether it is the same bit for bit each time: a server on a CPU draws as it likes."""


CONFIGURATIONS = (
    Configuration("two updates, TP 2", ("layout.tp=2", "loss.updates_per_rollout=2")),
    Configuration(
        "a conversation, one rank",
        ("rollout.conversation={policy}/../reward.py:talk", "rollout.timeout_s=20", "run.late_s=5"),
        FAULTS,
    ),
    Configuration(
        "two steps ahead, PP 2, checkpoints in the background",
        ("layout.pp=2", "rollout.ahead=2", "run.checkpoint_in_background=true"),
    ),
    Configuration(
        "distributed optimizer, DP 2, checkpoints in the background",
        ("layout.dp=2", "optimizer.distributed=true", "run.checkpoint_in_background=true"),
    ),
    Configuration("KL to a reference, one rank", ("loss.kl_coef=0.01",), ("rank", "writer")),
)
WITH_SERVERS = Configuration(
    "SGLang server, TP 2",
    (
        "layout.tp=2", "rollout.engine=sglang", "rollout.launch.count=1", "rollout.launch.first_port=24800",
        f"rollout.launch.command=[{os.environ.get(SGLANG, '')},{SERVER}]",
    ),
    ("rank", "launcher", "writer", "server"),
    seeded=False,
)  # fmt: skip
CONTEXT_PARALLEL = Configuration("GSPO, CP 2", ("layout.cp=2", "loss.name=gspo"))


@dataclass(slots=True)
class Run:
    """A run in a folder of its own, started as often as it takes."""

    of: Configuration
    folder: Path
    policy: Path

    def start(self) -> subprocess.Popen[bytes]:
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "megatron_dppo", "train", f"run.dir={self.folder / 'run'}"]
        command += [f"model.path={self.policy}", f"reward.function={self.policy.parent / 'reward.py'}:compute_score"]
        settings = [word.format(policy=self.policy) for word in self.of.settings]
        environment = os.environ | {MARK: str(self.folder), "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*command, *COMMON, *settings],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def alive(self) -> list[psutil.Process]:
        """All processes of the run, whoever their parent is."""
        return [process for process in psutil.process_iter() if _marked(process, str(self.folder))]

    def victims(self, kind: str, launcher: int) -> list[psutil.Process]:
        """Processes of a kind: ``launcher``, ``rank``, ``writer`` (of a checkpoint: forked by a rank) or ``server``."""
        alive = self.alive()
        if kind == "launcher":
            return [p for p in alive if p.pid == launcher]
        if kind == "worker":
            return [p for p in alive if "megatron_dppo.rewards.worker" in _command(p)]
        if kind == "server":
            return [p for p in alive if SERVER in _command(p) and "-IS" not in _command(p)]  # not its supervisor
        of_ranks = [p for p in alive if _command(p)[1:3] == ["-m", "megatron_dppo.launch.rank"]]
        ranks = [p for p in of_ranks if _parent(p) == launcher]
        if not ranks:  # one rank, which is the launcher
            ranks = [p for p in alive if p.pid == launcher]
            of_ranks = [p for p in alive if _command(p) in map(_command, ranks)]
        return ranks if kind == "rank" else [p for p in of_ranks if p not in ranks]

    def steps(self) -> int:
        """Rows of metrics."""
        file = self.folder / "run" / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def saving(self) -> bool:
        return any((self.folder / "run" / "checkpoints").glob(".iter_*.partial"))

    def outcome(self) -> dict[str, Any]:
        """What must not depend on kills: metrics but for times, the exported weights, and which files there are."""
        run = self.folder / "run"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        names = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
        weights = hashlib.sha256((run / "hf" / "model.safetensors").read_bytes()).hexdigest()
        return {
            "steps": [row["step"] for row in rows],
            "rows": [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows],
            "weights": weights,
            "files": [name for name in names if not name.startswith(EACH_START)],
        }


@dataclass(slots=True)
class Tally:
    """What came of the kills."""

    kills: Counter[str] = field(default_factory=Counter)
    codes: dict[str, Counter[int]] = field(default_factory=dict)
    survivors: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    finished: int = 0
    lost: list[str] = field(default_factory=list)
    """Runs that did not come to their end, or to another one."""


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:
        return 0


def _wait(process: subprocess.Popen[bytes], moment: Callable[[], Any]) -> Any:
    """What the moment gave once it gave anything; None where the process ended before."""
    until = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < until:
        if found := moment():
            return found
        time.sleep(0.002)
    return None


def disturb(run: Run, kind: str, *, saving: bool, seconds: float, chance: random.Random) -> int | None:
    """Start a run, and kill one of its processes, or have the user's code fail it; the launcher's exit code, or None
    where there was nothing to disturb."""
    process, before = run.start(), run.steps()
    _wait(process, lambda: run.steps() > before or run.saving())
    if saving or kind == "writer":
        _wait(process, run.saving)
        time.sleep(chance.uniform(0.0, 0.05))
    else:
        time.sleep(chance.uniform(0.0, seconds / 3 if kind in FAULTS else seconds))  # there is a next conversation
    fault = run.folder / "fault"
    if kind in FAULTS:
        fault.write_text(kind)
        disturbed = _wait(process, lambda: not fault.exists())
    elif disturbed := _wait(process, lambda: run.victims(kind, process.pid)):
        chance.choice(disturbed).send_signal(signal.SIGKILL)
    try:
        code = process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        code = None
    fault.unlink(missing_ok=True)
    return code if disturbed else None


def leavings(run: Run) -> list[str]:
    """Processes that outlive the launcher; they are ended."""
    _, left = psutil.wait_procs(run.alive(), timeout=GONE_S)
    lines = [" ".join(_command(process))[:200] for process in left]
    for process in left:
        process.kill()
    return lines


def finish(run: Run, reference: Mapping[str, Any], tally: Tally) -> None:
    """Let a run come to its end, and hold it against the one that nothing disturbed."""
    code = run.start().wait(WAIT_S)
    tally.survivors += leavings(run)
    if code != 0:
        tally.lost.append(f"{run.of.name}: exit code {code}, see {run.folder / 'log'}")
        return
    outcome = run.outcome()
    compared = ("steps", "rows", "weights") if run.of.seeded else ("steps",)
    if different := [what for what in compared if outcome[what] != reference[what]]:
        tally.lost.append(f"{run.of.name}: other {', '.join(different)}, see {run.folder}")
    tally.leftovers += sorted(set(outcome["files"]) - set(reference["files"]))
    temporary = [path.name for path in (run.folder / "tmp").iterdir()]
    tally.leftovers += [name for name in temporary if not name.startswith(TEMPORARY) and not OF_WANDB.fullmatch(name)]
    tally.finished += 1
    if not different:
        shutil.rmtree(run.folder)


def configurations(kills: int) -> Sequence[Configuration]:
    """As many as have three kills each, at most six; the sixth has a real server where there is one."""
    every = (*CONFIGURATIONS, WITH_SERVERS if os.environ.get(SGLANG) else CONTEXT_PARALLEL)
    return every[: max(1, kills // 3)]


def chaos(kills: int, seed: int, folder: Path) -> Tally:
    """Kill so many times, over all configurations in turn."""
    chance, tally, disturbed = random.Random(seed), Tally(), configurations(kills)
    policy = folder / "policy"
    size = ["--hidden", "32", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "48"]
    init = [sys.executable, "-m", "megatron_dppo", "init", str(policy), "--tokenizer", "arithmetic", *size]
    subprocess.run(init, check=True, capture_output=True)
    (folder / "reward.py").write_text(TALK + REWARD)
    references: dict[str, tuple[dict[str, Any], float]] = {}
    runs: dict[str, Run] = {}
    order: Iterator[tuple[int, Configuration]] = zip(range(10 * kills), cycle(disturbed), strict=False)
    for turn, of in order:
        if sum(tally.kills.values()) == kills:
            break
        if of.name not in references:
            reference = Run(of, folder / f"undisturbed-{len(references)}", policy)
            began = time.monotonic()
            assert reference.start().wait(WAIT_S) == 0, (reference.folder / "log").read_text()
            references[of.name] = reference.outcome(), (time.monotonic() - began) / 3
        run = runs.setdefault(of.name, Run(of, folder / f"run-{turn}", policy))
        kind = of.victims[(turn + turn // len(disturbed)) % len(of.victims)]
        saving = chance.random() < 0.5 and kind not in FAULTS
        code = disturb(run, kind, saving=saving, seconds=references[of.name][1], chance=chance)
        left = leavings(run)
        tally.survivors += left
        if kind in FAULTS and code is not None and (code == 0 or "talk" not in (run.folder / "log").read_text()):
            tally.lost.append(f"{of.name}: {kind}, code {code}, see {run.folder / 'log'}")
        ended = run.steps() > STEPS and code in (0, None)
        if code is not None:
            tally.kills[kind] += 1
            tally.codes.setdefault(kind, Counter())[code] += 1
            when = "while saving" if saving or kind == "writer" else "at any time"
            number = sum(tally.kills.values())
            print(f"{number:4} of {kills}: {kind} {when}, {of.name}: code {code}, {len(left)} survivors", flush=True)
        if ended:
            finish(runs.pop(of.name), references[of.name][0], tally)
    for name, run in runs.items():
        finish(run, references[name][0], tally)
    return tally


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos.sh", description=__doc__.split("\n", 1)[0])
    parser.add_argument("kills", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--servers", action="store_true", help="kill parts of runs ahead, with two SGLang servers")
    parser.add_argument("--kinds", default=",".join(SERVED), help=f"with --servers: {', '.join(SERVED)}")
    asked = parser.parse_args(words)
    if asked.servers:
        from tests import chaos_servers

        return chaos_servers.main(asked.kills, asked.seed, asked.kinds.split(","))
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="chaos-"))
    tally = chaos(asked.kills, asked.seed, folder)
    if well := not (tally.survivors or tally.leftovers or tally.lost):
        shutil.rmtree(folder)
    figures = {
        "kills": sum(tally.kills.values()),
        "by_victim": dict(tally.kills),
        "exit_codes": {kind: dict(codes) for kind, codes in tally.codes.items()},
        "runs": tally.finished,
        "lost_or_changed": tally.lost,
        "survivors": tally.survivors,
        "leftovers": tally.leftovers,
        "seed": asked.seed,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(figures))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
