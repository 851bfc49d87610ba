"""The archive of the sources builds a whole wheel, which runs without this checkout."""

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
from tests.small_runs import small_words
from tests.small_runs import write_run as write_small_run

pytestmark = pytest.mark.xdist_group("test_wheel")
REPOSITORY = Path(__file__).parents[1]
EXAMPLES = ("configs", "scripts/slurm")


def run(*command: str | Path, cwd: Path) -> str:
    done = finish(*command, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def finish(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the archive of the files that git knows, in a folder without leftovers of other
    builds."""
    folder = tmp_path_factory.mktemp("wheel")
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(list_files, cwd=REPOSITORY, capture_output=True, text=True)
    if known.returncode:
        pytest.skip("needs a checkout of git's")
    for name in filter(None, known.stdout.split("\0")):
        if (REPOSITORY / name).is_file() and not name.startswith(("tests/", "docs/")):
            place = folder / "source" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((REPOSITORY / name).read_bytes())
    program = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-c", program, cwd=folder / "source")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    run(*build, "--wheel-dir", folder, folder / archive.name.removesuffix(".tar.gz"), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the wheel and links to the distributions that the wheel requires without an
    extra."""
    place = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    install = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install"]
    run(*install, "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    (packages,) = place.glob("lib/python*/site-packages")
    (metadata,) = packages.glob("megatron_dppo-*.dist-info")
    waiting, linked = list(PathDistribution(metadata).requires or []), set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in linked or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        linked.add(requirement.name)
        found = distribution(requirement.name)
        waiting += found.requires or []
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(found.locate_file(top))))
    assert {"numpy", "pydantic", "rich"} < linked and len(linked) < 20
    return place


def test_the_wheel_holds_the_package_and_the_examples_alone(wheel: Path) -> None:
    source = wheel.parent / "source"
    examples = [path for folder in EXAMPLES for path in (source / folder).iterdir()]
    expected = {f"megatron_dppo/examples/{path.relative_to(source)}": path for path in examples}
    package = [path for path in (source / "megatron_dppo").rglob("*") if path.is_file()]
    expected |= {
        str(path.relative_to(source)): path for path in package if "__pycache__" not in path.parts
    }
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert len(examples) > 15 and held == expected.keys()
        assert all(archive.read(name) == path.read_bytes() for name, path in expected.items())


def test_commands_without_an_extra_run(environment: Path, tmp_path: Path) -> None:
    python, ours = (environment / "bin" / name for name in ("python", "megatron-dppo"))
    assert run(ours, "--version", cwd=tmp_path).split() == ["megatron-dppo", __version__]
    run(python, "-c", "from megatron_dppo import prune; print(prune)", cwd=tmp_path)
    listed = run(ours, "configs", cwd=tmp_path).splitlines()
    assert not list(tmp_path.iterdir())
    run(ours, "configs", "--copy", ".", cwd=tmp_path)
    copied = [file for name in EXAMPLES for file in (tmp_path / name).iterdir()]
    assert len(copied) >= len(listed) > 9
    assert "GPU-hours" in run(ours, "plan", "configs/qwen3_4b_math.yaml", cwd=tmp_path)
    write_run(tmp_path / "run")
    run(ours, "report", "run", "--out", "report.html", cwd=tmp_path)
    assert "</html>" in (tmp_path / "report.html").read_text()


def test_commands_that_lack_an_extra_name_its_origin(
    environment: Path, wheel: Path, tmp_path: Path
) -> None:
    small = small_words(write_small_run(tmp_path), tmp_path / "run")
    install = re.escape(f"pip install 'megatron-dppo[cpu] @ {wheel.as_uri()}' ")
    checks = (["train", *small, "--check"], ["eval", *small])
    for words in (["init", "policy"], ["train", *small], *checks):
        refused = finish(environment / "bin" / "megatron-dppo", *words, cwd=tmp_path)
        assert re.fullmatch(rf"error: \S+ is not installed: {install}.*\n", refused.stderr), words
        assert refused.returncode == 2


def test_rehearsal_without_torch_names_the_required_torch(environment: Path) -> None:
    done = finish(
        environment / "bin" / "python",
        "-m",
        "tests.rehearsal",
        "configs/quickstart.yaml",
        cwd=REPOSITORY,
    )
    assert done.returncode == 2
    assert re.match(
        r"error: torch = not installed\n  problem  a rehearsal requires torch>=2\S+, a CPU",
        done.stderr,
    )
    for name in ("megatron", "transformers"):
        assert f"error: {name} = not installed" in done.stderr


def test_the_quickstart_trains_without_the_checkout(environment: Path, tmp_path: Path) -> None:
    """All dependencies are those of the environment that runs this test."""
    paths = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    ours = environment / "bin" / "megatron-dppo"
    quick = (
        "run.steps=1 eval.problems=2 layout.tp=1 rollout.prompts_per_step=2 "
        "rollout.max_response_tokens=4"
    )
    for command in ("init runs/quickstart/warm --hidden 32 --ffn 64", f"quickstart {quick}"):
        subprocess.run([ours, *command.split()], cwd=tmp_path, env=paths, check=True)
    assert (tmp_path / "runs/quickstart/hf/config.json").exists()
