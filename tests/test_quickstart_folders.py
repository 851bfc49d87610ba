"""The quickstart with other settings leaves the plain quickstart's results alone.

What it calls is stood in for by a script that writes down its arguments: only the folders it is given count.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "quickstart.sh"


def called(folder: Path, *words: str) -> tuple[list[str], str]:
    """The arguments of the training, and what the script says."""
    (folder / "scripts").mkdir(exist_ok=True)
    shutil.copy(SCRIPT, folder / "scripts")
    (folder / "scripts" / "install.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\nvenv=.venv\n')
    said = folder / "megatron-dppo"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >last\n')
    said.chmod(0o755)
    path = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "scripts/quickstart.sh", *words]
    said = subprocess.run(command, cwd=folder, env=path, check=True, text=True, stdout=subprocess.PIPE).stdout
    return (folder / "last").read_text().splitlines(), said


def trained_in(folder: Path, *words: str) -> list[str]:
    """The ``run.dir`` words of the training, in the order in which they count."""
    arguments, said = called(folder, *words)
    assert arguments[0] == "quickstart"
    folders = [word.removeprefix("run.dir=") for word in arguments if word.startswith("run.dir=")]
    assert f"cd {folder} && source {folder}/.venv/bin/activate\n" in said, "what to paste next"
    assert f"megatron-dppo report {folders[-1]} --out report.html" in said
    return folders


def test_other_settings_have_a_folder_that_their_names_tell(tmp_path: Path) -> None:
    assert trained_in(tmp_path) == ["runs/quickstart"]
    assert trained_in(tmp_path, "loss.name=dapo") == ["runs/quickstart-loss.name-dapo"]
    both = trained_in(tmp_path, "run.seed=2", "loss.name=dapo")
    assert both == trained_in(tmp_path, "loss.name=dapo", "run.seed=2") == ["runs/quickstart-loss.name-dapo+run.seed-2"]
    long = [f"data.arithmetic.seed={seed}" for seed in range(9)]
    assert len(trained_in(tmp_path, *long)[0]) < 120
    assert trained_in(tmp_path, *long) != trained_in(tmp_path, *long, "run.seed=2")
    assert trained_in(tmp_path, "run.dir=mine")[-1] == "mine"


def test_a_policy_of_another_kind_has_its_own_config_and_folder(tmp_path: Path) -> None:
    """Where its directory is there already, nothing is fetched."""
    (tmp_path / "runs/smollm2/policy").mkdir(parents=True)
    (tmp_path / "runs/smollm2/policy/config.json").touch()
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >>made\n')
    (tmp_path / "python").chmod(0o755)
    arguments = called(tmp_path, "--policy", "smollm2", "run.seed=2")[0]
    assert arguments[:3] == ["train", "configs/smollm2.yaml", "model.path=runs/smollm2/policy"]
    assert "run.dir=runs/smollm2-run.seed-2" in arguments and arguments[-1] == "run.seed=2"
    assert (tmp_path / "made").read_text() == "tools/smollm2/problems.py runs/smollm2\n"
    (tmp_path / "scripts/install_servers.sh").write_text("SGLANG_PYTHON=sglang VLLM_PYTHON=vllm\n")
    for kind in ("sglang", "vllm"):
        options = ("--policy", "smollm2"), ("--servers", kind)
        one, other = (called(tmp_path, *first, *second)[0] for first, second in (options, options[::-1]))
        assert one == other and one[:3] == arguments[:3]
        assert {f"run.dir=runs/smollm2-{kind}", f"rollout.engine={kind}", "rollout.launch.count=1"} <= {*one}


@pytest.mark.parametrize("options", [("--policy", "other"), ("--servers", "other"), ("--servers",), ("--help",)])
def test_an_option_that_is_unknown_is_named_before_anything_is_installed(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    command = ["bash", str(shutil.copy(SCRIPT, tmp_path)), *options]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {' '.join(options)}")


PYTHON = """#!/bin/bash
case "$*" in
*venv*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*pip*) printf 'Collecting torch\\nlooks at it\\n  Downloading torch-2.13.0.whl (180 MB)\\n' && exit "$CODE" ;;
esac
"""


@pytest.mark.parametrize("code", [0, 1])
def test_an_installation_shows_what_it_is_at_and_keeps_all_that_pip_says(code: int, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT.with_name("install.sh"), tmp_path / "scripts")
    for name, text in (("pyproject.toml", ""), ("setup.py", ""), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
    (tmp_path / "python").chmod(0o755)
    environ = {**os.environ, "PYTHON": str(tmp_path / "python"), "CODE": str(code)}
    command = ["bash", "-c", "source scripts/install.sh cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, text=True, capture_output=True, check=False)
    assert done.returncode == code
    assert "s] Collecting torch\n" in done.stderr and "s] pip has ended\n" in done.stderr
    log = (tmp_path / ".venv/install.log").read_text()
    assert log.splitlines() == ["Collecting torch", "looks at it", "  Downloading torch-2.13.0.whl (180 MB)"]
    assert ("the installation failed" in done.stderr) == bool(code) == (not list(tmp_path.glob(".venv/installed-*")))
