"""The shipped job scripts with a policy of a few thousand weights: what a user types, and what is
seen of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.slurm.cluster import Cluster, wait_for

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
WAIT_S = 600.0
REWARD = """
import collections, pathlib, time
calls = collections.Counter()
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    here = pathlib.Path(__file__)
    if here.with_name("slow").exists():
        time.sleep(0.2)
    with here.with_name("scored").open("a") as file:
        file.write(ground_truth + " ")
    calls[ground_truth] += 1
    return float(calls[ground_truth] % 4)
"""
"""The same for the n-th sample of a problem, whatever it is, so that what follows from rewards
depends on no engine. It takes its time while there is a file ``slow`` beside it, and writes down
for which problems it was asked."""
PROBLEMS, SAMPLES, PROMPTS = 64, 4, 8
TINY = (
    f"rollout.samples_per_prompt={SAMPLES}",
    f"rollout.prompts_per_step={PROMPTS}",
    "pruning.prompts.rule=none",
    "rollout.max_response_tokens=16",
    "rollout.timeout_s=200",
    "rollout.sync.timeout_s=60",
    "eval.problems=0",
    "reward.workers=1",
    "run.export=false",
)
"""On top of configs/quickstart.yaml. Every step has as many prompts, whatever an engine answers."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the cluster."""

    cluster: Cluster
    number: int
    log: Path
    run: Path

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def field(self, name: str) -> str:
        """What ``scontrol`` says of its first component."""
        shown = self.cluster.call("scontrol", "show", "job", str(self.number)).stdout
        found = re.search(rf"\b{name}=(\S+)", shown)
        return found[1] if found else ""

    def tell_to_stop(self) -> None:
        """As Slurm does some time before a job's limit."""
        told = self.cluster.call("scancel", "--signal=USR1", "--batch", str(self.number))
        assert told.returncode == 0, told.stderr

    def wait_for_line(self, words: str, timeout_s: float = WAIT_S) -> None:
        def there() -> bool:
            return words in self.text() or self.field("JobState") in ENDED

        wait_for(there, timeout_s, f"{words!r} in the log")
        assert words in self.text(), self.text()

    def wait_for_step(self, step: int) -> None:
        rows = self.run / "metrics.jsonl"
        wait_for(
            lambda: rows.exists() and len(rows.read_text().splitlines()) > step,
            WAIT_S,
            f"step {step}",
        )

    def wait(self, timeout_s: float = WAIT_S) -> int:
        """Its exit code, once it has ended; one that is requeued has not."""
        wait_for(
            lambda: self.field("JobState") in ENDED, timeout_s, f"end; the log:\n{self.text()}"
        )
        code, _, number = self.field("ExitCode").partition(":")
        return int(code) or 128 * (number != "0") + int(number)

    def scored(self) -> list[list[str]]:
        """The problems of each step's completions."""
        labels, size = (self.run / "scored").read_text().split(), SAMPLES * PROMPTS
        return [sorted(labels[i : i + size]) for i in range(0, len(labels), size)]

    def ranks(self) -> dict[int, psutil.Process]:
        """The actors that live, by rank."""
        found = {}
        for process in self.cluster.processes(
            SLURM_JOB_ID=str(self.number), SLURM_STEP_NUM_TASKS="2"
        ):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if (parent := process.parent()) and parent.name().startswith("slurmstepd"):
                    found[int(process.environ()["SLURM_PROCID"])] = process
        return found

    def left(self) -> list[str]:
        """Command lines of its processes that live."""
        lines = []
        for component in (self.number, self.number + 1):
            for process in self.cluster.processes(SLURM_JOB_ID=str(component)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    lines.append(" ".join(process.cmdline()))
        return lines


@dataclass(frozen=True, slots=True)
class Submitter:
    """Submits from the root of the checkout, as the scripts want it; each has one run."""

    cluster: Cluster
    folder: Path
    policy: Path

    def heterogeneous(self, *words: str, slow: bool = False, **environ: str) -> Job:
        """The 32B script, with two ranks on one node and a server on the other."""
        partition = "--partition=loopback"
        sizes = [partition, "--nodes=1", "--ntasks-per-node=2", ":", partition, "--nodes=1"]
        return self._submit("qwen3_32b_dppo.sh", sizes, self.settings(*words, slow=slow), environ)

    def one_node(self, *words: str, **environ: str) -> Job:
        """The 4B script, with two ranks."""
        sizes = ["--partition=loopback", "--ntasks-per-node=2"]
        return self._submit("qwen3_4b_dppo.sh", sizes, self.settings(*words), environ)

    def _submit(
        self, script: str, sizes: list[str], settings: list[str], environ: dict[str, str]
    ) -> Job:
        log = self.folder / "log"
        command = [
            "sbatch",
            "--parsable",
            f"--output={log}",
            *sizes,
            str(SCRIPTS / script),
            *settings,
        ]
        environ = (
            self.cluster.environment | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | environ
        )
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return Job(self.cluster, int(done.stdout.partition(";")[0]), log, self.run)

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "run"

    def settings(self, *words: str, slow: bool = False) -> list[str]:
        """Make the folder, and return what a command line says of the run."""
        run = self.run
        run.mkdir()
        if slow:
            (run / "slow").touch()
        (reward := run / "reward.py").write_text(REWARD)
        rows = [{"prompt": f"{i // 8}+{i % 8}=", "label": f"problem-{i}"} for i in range(PROBLEMS)]
        (data := run / "problems.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings = ["configs/quickstart.yaml", f"run.dir={run}", f"model.path={self.policy}", *TINY]
        return [*settings, f"data.train={data}", f"reward.function={reward}:compute_score", *words]


def one_sglang_server(port: int) -> list[str]:
    """Settings for real SGLang servers on CPU, found through Slurm."""
    command = f"[{os.environ['SGLANG_PYTHON']},{ROOT}/tests/servers/sglang_cpu/server.py]"
    return [
        "rollout.engine=sglang",
        "rollout.servers=slurm",
        f"rollout.launch.command={command}",
        f"rollout.launch.first_port={port}",
        "rollout.launch.wait_s=150",
    ]
