"""What is built is whole, and runs where nothing of this checkout is in reach."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from megatron_dppo import __version__
from tests.report.made_up import write_run

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = ("configs", "scripts/slurm")


def build(source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([*command, "--wheel-dir", folder, source], env=environ, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that git knows, in a folder of its own, so that no leftover of another build gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    known = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if known.returncode:
        pytest.skip("needs a checkout of git's")
    for name in filter(None, known.stdout.split("\0")):
        if (REPOSITORY / name).is_file() and not name.startswith(("tests/", "docs/")):
            place = folder / "source" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((REPOSITORY / name).read_bytes())
    return build(folder / "source", folder)


def installed(wheel: Path, place: Path) -> Path:
    """The site-packages of an environment that holds the wheel alone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    python = place / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    return packages


def output(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package_the_examples_and_nothing_else(wheel: Path) -> None:
    source = wheel.parent / "source"
    expected = {str(path.relative_to(source)) for path in (source / "megatron_dppo").rglob("*") if path.is_file()}
    examples = [path.relative_to(source) for folder in EXAMPLES for path in (source / folder).iterdir()]
    expected |= {f"megatron_dppo/examples/{path}" for path in examples}
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert len(examples) > 15 and held == {name for name in expected if "__pycache__" not in name}


def test_the_archive_of_the_sources_gives_the_same_wheel_bit_by_bit(wheel: Path, tmp_path: Path) -> None:
    program = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    output(sys.executable, "-c", program, cwd=wheel.parent / "source")
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(tmp_path, filter="data")
    again = build(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path)
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


def test_it_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """It has this one's dependencies, and neither our own package nor what makes it editable."""
    packages = installed(wheel, tmp_path / "environment")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python, ours = (tmp_path / "environment/bin" / name for name in ("python", "megatron-dppo"))
    where = output(python, "-c", "import megatron_dppo; print(megatron_dppo.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(packages)
    assert "samples_per_prompt" in output(ours, "train", "--print-config", cwd=tmp_path)
    output(ours, "init", "runs/quickstart/warm", "--hidden", "32", "--ffn", "64", cwd=tmp_path)
    small = ["rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=4"]
    output(ours, "quickstart", "run.steps=1", "eval.problems=2", "layout.tp=1", *small, cwd=tmp_path)
    checkpoints = "runs/quickstart/checkpoints"
    written = output(ours, "convert", "to-hf", checkpoints, "exported", "--verify", "tensors", cwd=tmp_path)
    assert "million weights" in written and (tmp_path / "exported/config.json").exists()


def test_without_an_extra_it_prunes_plans_reports_and_lists(wheel: Path, tmp_path: Path) -> None:
    """The environment has links to the distributions that the wheel requires, directly or not, and nothing else."""
    packages = installed(wheel, tmp_path / "environment")
    (metadata,) = packages.glob("megatron_dppo-*.dist-info")
    waiting, linked = list(PathDistribution(metadata).requires or []), set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in linked or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        linked.add(requirement.name)
        found = distribution(requirement.name)
        waiting += found.requires or []
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(found.locate_file(top))))
    assert {"numpy", "pydantic", "rich"} < linked and len(linked) < 20

    python, ours = (tmp_path / "environment/bin" / name for name in ("python", "megatron-dppo"))
    (folder := tmp_path / "empty").mkdir()
    assert output(ours, "--version", cwd=folder).split() == ["megatron-dppo", __version__]
    assert "convert to-hf" in output(ours, "--help", cwd=folder)
    output(python, "-c", "from megatron_dppo import prune; print(prune)", cwd=folder)
    listed = output(ours, "configs", cwd=folder).splitlines()
    assert "configs/quickstart.yaml                A policy of a million parameters learns to carry" in listed
    assert not list(folder.iterdir())
    output(ours, "configs", "--copy", ".", cwd=folder)
    copied = [file for name in EXAMPLES for file in (folder / name).iterdir()]
    assert len(copied) >= len(listed)
    named = {name for file in copied for name in re.findall(r"(?:configs|scripts/slurm)/[\w.]+\w", file.read_text())}
    assert "configs/gsm8k_reward.py" in named and not [name for name in named if not (folder / name).exists()]
    assert "GPU-hours" in output(ours, "plan", "configs/qwen3_4b_math.yaml", cwd=folder)
    write_run(folder / "run")
    output(ours, "report", "run", "--out", "report.html", cwd=folder)
    assert "</html>" in (folder / "report.html").read_text()
    refused = subprocess.run([ours, "init", "policy"], cwd=folder, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert re.fullmatch(r"error: \w+ is not installed: pip install 'megatron-dppo\[cpu\]'.*\n", refused.stderr)
