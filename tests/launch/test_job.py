"""``launch --dry-run`` prints a script that runs unchanged; Slurm judges scripts in
tests/slurm/test_nemo_run.py."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dppo.launch.job import JOB

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs/qwen3_32b_dppo.yaml")
WITHOUT = """import sys; sys.modules["nemo_run"] = None
from megatron_dppo.cli import main; sys.exit(main())"""


def print_script(folder: Path, *words: str) -> str:
    """Return the script of a machine without NeMo-Run and Slurm. Nothing is left in the folder."""
    environ = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    command = [sys.executable, "-B", "-c", WITHOUT, "launch", *words, "--dry-run"]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []
    print(done.stderr, file=sys.stderr)
    return done.stdout


def test_slurm_s_script_requests_machines_and_keeps_words_whole(tmp_path: Path) -> None:
    words = [
        "run.dir=runs/my run; $(exit)",
        "cluster.account=mine",
        "cluster.server_nodes=5",
        "rollout.launch.tp=4",
    ]
    text = print_script(tmp_path, *words[:1], CONFIG, *words[1:], "--executor", "slurm")
    asked = [
        line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")
    ]
    sizes = "--gpus-per-node=8 --exclusive --mem=0 --account=mine"
    assert asked[0].startswith("--job-name=megatron-dppo.my-run----exit- ")
    assert asked[1] == "--time=24:00:00 --signal=B:USR1@600 --requeue"
    assert asked[2:] == [
        f"--nodes=2 --ntasks-per-node=8 {sizes}",
        "hetjob",
        f"--nodes=5 --ntasks-per-node=2 {sizes}",
    ]
    *_, enter, job = text.splitlines()
    assert shlex.split(enter)[:2] == ["cd", str(tmp_path)]
    assert shlex.split(job) == ["exec", "bash", str(JOB), CONFIG, *words], (
        "job.sh takes the first word for the file"
    )
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_dry_run_names_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_PYTHON", "/no/python")
    missing = "model.path=no such policy", "data.train=nothing.jsonl"
    script = print_script(tmp_path, CONFIG, *missing, "--executor", "slurm")
    notes = capfd.readouterr().err
    for setting in (*missing, "SERVER_PYTHON=/no/python"):
        assert f"note: on this machine, {setting.replace('=', ' = ')}: " in notes
    assert script.startswith("#!/usr/bin/env bash\n#SBATCH") and "note" not in script


def test_this_machine_s_script_trains(tmp_path: Path) -> None:
    text = print_script(tmp_path, "model.path=no such policy", "data.train=nothing.jsonl")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash"], input=text, env=environ, cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: model.path = no such policy"), done.stderr


PROGRAMS = {
    "scontrol": 'case "$*" in *hostnames*) echo n1 ;; *) echo NodeAddr=127.0.0.1 ;; esac',
    # Runs one task here, and writes down its command line.
    "srun": """
[ "$1" = --help ] && { echo --container-image; exit; }
printf '%s\\n' "$*" >> "$SAID"
while [ "${1#-}" != "$1" ]; do shift; done
SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 exec "$@"
""",
    # Stands in for the run, and prints what the prologue has exported.
    "python": """
case "$*" in
*"megatron_dppo serve"*) exit 2 ;;
*--check*) echo "run: 0 of 1 steps are done" ;;
*megatron_dppo.launch.health*) echo "health of nodes"; exit "${HEALTH:-0}" ;;
*) [ -n "${CUT_SHORT:-}" ] || touch "$MEGATRON_DPPO_FAILURE.end-0" ;;
esac
echo "greeting: ${GREETING:-none}"
""",
    "apptainer": 'shift 7; exec "$@"',
}
"""One node of a cluster, as far as job.sh asks for it: no Slurm, Pyxis or Apptainer."""


class Node:
    """A node that runs jobs of job.sh in a checkout with ``image.sif``."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.said, self.checkout = (
            folder / "programs",
            folder / "said",
            folder / "checkout",
        )
        for place in (self.programs, self.checkout):
            place.mkdir()
        (self.checkout / "image.sif").touch()
        for program, words in PROGRAMS.items():
            (self.programs / program).write_text(f"#!/usr/bin/env bash\n{words}\n")
            (self.programs / program).chmod(0o755)

    def run_job(self, config: str = "run.yaml", **environ: str) -> tuple[int, str]:
        """Return the exit code of a job and its log."""
        slurm = {"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}
        own = {
            "SAID": str(self.said),
            "PYTHON": str(self.programs / "python"),
            "PYTHONPATH": str(ROOT),
        }
        path = {"PATH": f"{self.programs}:{os.environ['PATH']}"}
        command = ["bash", "-c", f"source {JOB} {config}"]
        everything = {**os.environ, **slurm, **own, **path, **environ}
        done = subprocess.run(
            command, cwd=self.checkout, env=everything, capture_output=True, text=True, timeout=200
        )
        return done.returncode, done.stdout

    def read_steps(self) -> list[str]:
        return self.said.read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_an_absent_container_is_named_by_its_variable(node: Node) -> None:
    code, log = node.run_job(SERVER_CONTAINER="/no/such/image")
    assert code == 2 and "error: SERVER_CONTAINER = /no/such/image: there is no such file" in log


def test_the_prologue_is_sourced_in_every_task(node: Node) -> None:
    (node.checkout / "prologue").write_text(
        "module() { export GREETING=$1; }\nmodule 'good morning'\n"
    )
    code, log = node.run_job(PROLOGUE="prologue")
    assert code == 0 and "greeting: good morning" in log, log
    assert all(
        f'exec "$@" {node.checkout}/prologue {node.programs}/python' in step
        for step in node.read_steps()
    )


def test_a_failing_prologue_ends_the_job(node: Node) -> None:
    (node.checkout / "prologue").write_text("module load nothing\nfalse")
    code, log = node.run_job(PROLOGUE="./prologue")
    assert code == 2
    assert re.search(r"error: PROLOGUE = \S*/prologue: ended with exit code 1", log), log


def test_apptainer_runs_behind_the_prologue_that_loads_it(node: Node, tmp_path: Path) -> None:
    """The stand-in for Apptainer runs the words behind the image."""
    (other := tmp_path / "modules").mkdir()
    (node.programs / "apptainer").rename(other / "apptainer")
    container = {"CONTAINER": "image.sif", "CONTAINER_MOUNTS": "/data:/data"}
    code, log = node.run_job(**container)
    assert code == 2 and "there is no apptainer on the path" in log
    (node.checkout / "prologue").write_text(f"export PATH=$PATH:{other} GREETING=hello\n")
    code, log = node.run_job(**container, PROLOGUE="prologue")
    assert code == 0 and "greeting: hello" in log, log
    here = node.checkout
    started = (
        f"apptainer exec --nv --pwd {here} --bind {here}:{here},/data:/data image.sif "
        f"{node.programs}/python -m"
    )
    for step in node.read_steps():
        assert (
            step.partition(f"{here}/prologue ")[2].startswith(started)
            and "--container-image" not in step
        )


@pytest.mark.parametrize(
    ("image", "option"),
    [("registry#image:1", "container-mounts="), ("image.sif", "bind ")],
    ids=str,
)
def test_a_container_mounts_folders_outside_of_the_checkout(
    node: Node, tmp_path: Path, image: str, option: str
) -> None:
    for name in ("home/run.yaml", "site/prologue"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (node.checkout / "link").symlink_to(tmp_path / "home")
    mounts = ",".join(
        f"{place}:{place}" for place in (node.checkout, tmp_path / "home", tmp_path / "site")
    )
    for config in ("../home/run.yaml", "link/run.yaml"):
        code, log = node.run_job(config, CONTAINER=image, PROLOGUE=f"{tmp_path}/site/prologue")
        assert code == 0, log
        step = node.read_steps()[-1]
        assert f" --{option}{mounts} " in step
        assert step.split("megatron_dppo ")[1].split()[1] == f"{tmp_path}/home/run.yaml"
    (node.checkout / "run.yaml").touch()
    node.run_job(CONTAINER=image)
    step = node.read_steps()[-1]
    assert str(tmp_path / "home") not in step and step.endswith(" train run.yaml --check 1")


def test_ranks_that_end_before_their_job_fail_it(node: Node) -> None:
    code, log = node.run_job(CUT_SHORT="1")
    assert code == 1 and "rank 0 ended with exit code 0 before its job had ended" in log, log


def test_the_servers_side_is_checked_before_anything_starts(node: Node) -> None:
    """The stand-in for the run finds a mistake on the servers' node."""
    groups = {"JOB_NODELIST": "n1", "NTASKS": "1", "JOB_NUM_NODES": "1"}
    slurm = {
        f"SLURM_{name}_HET_GROUP_{group}": value
        for name, value in groups.items()
        for group in (0, 1)
    }
    code, log = node.run_job(**slurm)
    assert code == 2 and "starting" not in log, log
    step = node.read_steps()[-1]
    assert step.startswith("--het-group=1 ") and step.endswith(" serve run.yaml --check")


def test_the_nodes_health_is_checked_before_anything_starts(node: Node) -> None:
    code, log = node.run_job(HEALTH_CHECK="1")
    assert code == 0 and log.index("health of nodes") < log.index("actors: starting"), log
    code, log = node.run_job(HEALTH_CHECK="1", HEALTH="1")
    assert code == 1 and "actors: starting" not in log, log
