"""``quickstart.sh`` keeps the results of other settings apart, ``install.sh`` keeps pip's output,
and ``check_gpu.sh`` ends with its table.

Stand-ins for the programs that the scripts call write down their arguments.
"""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SELECTED = "Selected backend = "


def write_program(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o755)


def copy_script(folder: Path, name: str) -> None:
    (folder / "scripts").mkdir(exist_ok=True)
    shutil.copy(SCRIPTS / name, folder / "scripts")


def run_quickstart(folder: Path, *words: str) -> tuple[list[str], str]:
    """Return the arguments of the training, and the output of the script."""
    copy_script(folder, "quickstart.sh")
    (folder / "scripts" / "install.sh").write_text(
        'cd "$(dirname "${BASH_SOURCE[0]}")/.."\nvenv=.venv\n'
    )
    write_program(folder / "megatron-dppo", '#!/bin/sh\nprintf "%s\\n" "$@" >last\n')
    path = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "scripts/quickstart.sh", *words]
    said = subprocess.run(
        command, cwd=folder, env=path, check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    return (folder / "last").read_text().splitlines(), said


def find_folders(folder: Path, *words: str) -> list[str]:
    """Return the values of ``run.dir``, the last of which counts."""
    arguments, said = run_quickstart(folder, *words)
    assert arguments[0] == "quickstart"
    folders = [word.removeprefix("run.dir=") for word in arguments if word.startswith("run.dir=")]
    assert f"cd {folder} && source {folder}/.venv/bin/activate\n" in said
    assert f"megatron-dppo report {folders[-1]} --out report.html" in said
    return folders


def test_other_settings_have_a_folder_of_their_names(tmp_path: Path) -> None:
    assert find_folders(tmp_path) == ["runs/quickstart"]
    assert find_folders(tmp_path, "loss.name=dapo") == ["runs/quickstart-loss.name-dapo"]
    both = ["runs/quickstart-loss.name-dapo+run.seed-2"]
    assert find_folders(tmp_path, "run.seed=2", "loss.name=dapo") == both
    assert find_folders(tmp_path, "loss.name=dapo", "run.seed=2") == both
    long = [f"data.arithmetic.seed={seed}" for seed in range(9)]
    (short,) = find_folders(tmp_path, *long)
    assert len(short) < 120 and find_folders(tmp_path, *long, "run.seed=2") != [short]
    assert find_folders(tmp_path, "run.dir=mine")[-1] == "mine"


def test_smollm2_has_its_own_configuration_and_folder(tmp_path: Path) -> None:
    """A policy's directory that exists is not fetched again."""
    (tmp_path / "runs/smollm2/policy").mkdir(parents=True)
    (tmp_path / "runs/smollm2/policy/config.json").touch()
    write_program(tmp_path / "python", '#!/bin/sh\necho "$@" >>made\n')
    arguments = run_quickstart(tmp_path, "--policy", "smollm2", "run.seed=2")[0]
    assert arguments[:3] == ["train", "configs/smollm2.yaml", "model.path=runs/smollm2/policy"]
    assert "run.dir=runs/smollm2-run.seed-2" in arguments and arguments[-1] == "run.seed=2"
    assert (tmp_path / "made").read_text() == "tools/smollm2/problems.py runs/smollm2\n"
    (tmp_path / "scripts/install_servers.sh").write_text("SGLANG_PYTHON=sglang VLLM_PYTHON=vllm\n")
    for kind in ("sglang", "vllm"):
        found = run_quickstart(tmp_path, "--servers", kind, "--policy", "smollm2")[0]
        assert found[:3] == arguments[:3]
        assert {
            f"run.dir=runs/smollm2-{kind}",
            f"rollout.engine={kind}",
            "rollout.launch.count=1",
        } <= {*found}


@pytest.mark.parametrize("options", ["--policy other", "--servers other", "--servers", "--help"])
def test_unknown_options_are_refused_before_an_installation(options: str, tmp_path: Path) -> None:
    command = ["bash", str(shutil.copy(SCRIPTS / "quickstart.sh", tmp_path)), *options.split()]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {options}")


PYTHON = """#!/bin/bash
case "$*" in
*venv*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*pip*) printf 'Collecting torch\\nlooks at it\\n  Downloading torch-2.13.0.whl (180 MB)\\n' && exit "$CODE" ;;
esac
"""


@pytest.mark.parametrize("code", [0, 1])
def test_an_installation_shows_progress_and_keeps_pip_s_output(code: int, tmp_path: Path) -> None:
    copy_script(tmp_path, "install.sh")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "setup.py").touch()
    write_program(tmp_path / "python", PYTHON)
    environ = {**os.environ, "PYTHON": str(tmp_path / "python"), "CODE": str(code)}
    command = ["bash", "-c", "source scripts/install.sh cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, text=True, capture_output=True)
    assert done.returncode == code
    assert "s] Collecting torch\n" in done.stderr and "s] pip has ended\n" in done.stderr
    log = (tmp_path / ".venv/install.log").read_text()
    assert log.splitlines() == [
        "Collecting torch",
        "looks at it",
        "  Downloading torch-2.13.0.whl (180 MB)",
    ]
    assert (
        ("the installation failed" in done.stderr)
        == bool(code)
        == (not list(tmp_path.glob(".venv/installed-*")))
    )


def check_gpu(
    folder: Path,
    part: str,
    *,
    gpus: str = "exit 0",
    backend: str = f"{SELECTED}FusedAttention",
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``check_gpu.sh`` with stand-ins for Python, which fails at 4B and the policy head, and
    ``nvidia-smi``.

    Args:
        backend: Transformer Engine's log of the attention step.
    """
    (folder / "programs").mkdir()
    write_program(folder / "programs/nvidia-smi", f"#!/bin/sh\n{gpus}\n")
    fails = "*--shapes\\ 4b | *policy_head.py*) echo no room; exit 3 ;;"
    says = f"*gpu_rates.py*) echo '{backend}' ;;"
    write_program(folder / "programs/python", f'#!/bin/sh\ncase "$*" in {fails} {says} esac\n')
    own = {
        "PATH": f"{folder}/programs:{os.environ['PATH']}",
        "PYTHON": "python",
        "OUT": str(folder / "out"),
        **environ,
    }
    command = ["bash", str(SCRIPTS / "check_gpu.sh"), part]
    return subprocess.run(
        command, env=os.environ | own, text=True, capture_output=True, check=False
    )


@pytest.mark.parametrize(
    ("part", "steps"),
    [
        ("B", {"step-4b": 3, "step-4b-recompute": 0, "step-0.6b": 0, "rates": 0, "head-8b": 3}),
        ("A", {"versions": 0, "attention": 0, "head": 3}),  # without kernels, nothing else is tried
    ],
)
def test_a_gpu_check_ends_with_a_table_and_an_archive(
    part: str, steps: dict[str, int], tmp_path: Path
) -> None:
    done = check_gpu(tmp_path, part)
    assert done.returncode == 1, done.stderr
    archive, head, *rows = done.stdout.splitlines()[-len(steps) - 2 :]
    assert head.split() == ["step", "seconds", "code"]
    assert {row.split()[0]: int(row.split()[2]) for row in rows} == steps
    with tarfile.open(archive.removeprefix("archive to send back: ")) as logs:
        log = logs.extractfile(f"{part}/{'head' if part == 'A' else 'step-4b'}.log")
        assert log is not None and log.read() == b"no room\n"


@pytest.mark.parametrize(
    ("backend", "code"),
    [("FusedAttention", 0), ("FlashAttention", 0), ("UnfusedDotProductAttention", 1), (None, 1)],
)
def test_a_gpu_check_needs_fused_attention(backend: str | None, code: int, tmp_path: Path) -> None:
    said = check_gpu(tmp_path, "A", backend=f"{SELECTED}{backend}" if backend else "").stdout
    (row,) = (
        line.split()
        for line in said.splitlines()
        if line.startswith("attention ") and ":" not in line
    )
    assert row[2] == str(code)


@pytest.mark.parametrize(("part", "seconds"), [("A", 360), ("B", 240)])
def test_a_dry_gpu_check_prints_steps_within_minutes(
    part: str, seconds: int, tmp_path: Path
) -> None:
    done = check_gpu(tmp_path, part, gpus="exit 9", DRY_RUN="1")
    limits = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    beside = sum(
        sorted(limits.pop(name) for name in ("nccl", "experts", "quickstart") if name in limits)[
            -1:
        ]
    )
    assert (done.returncode, sum(limits.values()) + beside) == (0, seconds)
    assert not (tmp_path / "out").exists()


def test_a_gpu_check_without_a_gpu_ends_in_one_sentence(tmp_path: Path) -> None:
    done = check_gpu(tmp_path, "A", gpus="exit 9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this machine has no GPU") and done.stderr.count("\n") == 1
