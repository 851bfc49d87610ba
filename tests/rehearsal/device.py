"""Requirements of a rehearsal, and the C++ half of its device, which is loaded before torch is
imported.

Torch asks only once which devices exist. A process that has imported torch can no longer load the
device."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from megatron_dppo.errors import UserError, install_command

CACHE, NAMED = "MEGATRON_DPPO_CACHE", "REHEARSAL_TRANSFORMER_ENGINE"
VERSIONS = ("2.14.1", "2.20.2")
"""Supported versions of Transformer Engine. :data:`NAMED` names another than the first."""


def cache_folder() -> Path:
    """Folder of the built device and of Transformer Engine's Python."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "megatron_dppo")


def python_folder() -> Path:
    """Folder with Transformer Engine's Python: unpacked by ``scripts/install_te_python.sh``, or
    else installed.

    Raises:
        UserError: there is none of the named version, or of a supported one if none is named.
    """
    named = os.environ.get(NAMED)
    folder = cache_folder() / f"transformer-engine-{named or VERSIONS[0]}"
    if (folder / "transformer_engine").is_dir():
        return folder
    installed = importlib.util.find_spec("transformer_engine")
    if (
        installed is None
        or installed.origin is None
        or _installed_version() not in ((named,) if named else VERSIONS)
    ):
        problem = f"the Python of Transformer Engine {named or ' or '.join(VERSIONS)} is missing"
        remedy = f"run {f'{NAMED}={named} ' if named else ''}bash scripts/install_te_python.sh"
        raise UserError(CACHE, cache_folder(), problem, remedy)
    return Path(installed.origin).parents[1]


def _installed_version() -> str | None:
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def missing_parts() -> list[UserError]:
    """Missing requirements, each with its remedy: torch, the rest of the extra ``train``, g++,
    Transformer Engine."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["train"]
    torch = next(each for each in extra if each.startswith("torch")).partition(";")[0]
    needed = {"torch": f"a rehearsal requires {torch}, a CPU build"}
    needed |= dict.fromkeys(
        ("megatron", "transformers"), "a rehearsal runs the trainer, which requires it"
    )
    remedy = f"run {install_command('cpu')}"
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    missing = [UserError(name, "not installed", needed[name], remedy) for name in absent]
    for find in (find_compiler, python_folder):
        try:
            find()
        except UserError as error:
            missing.append(error)
    return missing


def find_compiler() -> str:
    """Return the path of g++.

    Raises:
        UserError: g++ is not installed.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise UserError(
            "g++", "not installed", "a rehearsal compiles a small C++ file", "install g++"
        )
    return compiler


SOURCE = Path(__file__).with_name("device.cpp")


def load_device() -> None:
    """Load the device into this process.

    Raises:
        ModuleNotFoundError, UserError: as for :func:`build_device`.
        RuntimeError: torch is already imported.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the rehearsal's device must be loaded before torch is imported")
    library = ctypes.CDLL(str(build_device()), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401

    library.register_rehearsal_guard()


def library_of(torch_folder: Path) -> Path:
    """Shared library of the device for this installation of torch, to whose folder it is linked."""
    parts = (SOURCE.read_bytes(), (torch_folder / "version.py").read_bytes(), bytes(torch_folder))
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return cache_folder() / f"rehearsal-{digest}.so"


def build_device() -> Path:
    """Compile the device once for each installation of torch; return the shared library.

    Raises:
        ModuleNotFoundError: torch is not installed.
        UserError: g++ is missing, or cannot compile the device.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("a rehearsal runs torch", name="torch")
    torch_folder = Path(spec.origin).parent
    library = library_of(torch_folder)
    if library.exists():
        return library
    compiler = find_compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    draft = library.with_suffix(f".{os.getpid()}")
    command = [
        compiler,
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{torch_folder / 'include'}",
        str(SOURCE),
    ]
    command += [
        f"-L{torch_folder / 'lib'}",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]
    done = subprocess.run([*command, "-o", str(draft)], capture_output=True, text=True, check=False)
    if done.returncode:
        problem = f"the rehearsal's device does not compile:\n{done.stderr[-2000:]}"
        raise UserError("g++", compiler, problem, "install a g++ that supports C++20")
    draft.rename(library)
    return library
