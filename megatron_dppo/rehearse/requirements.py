"""Requirements of a rehearsal: g++ and Transformer Engine's Python."""

from __future__ import annotations

import importlib.util
import os
import shutil
from importlib import metadata
from pathlib import Path

from megatron_dppo.errors import UserError

CACHE, NAMED = "MEGATRON_DPPO_CACHE", "REHEARSAL_TRANSFORMER_ENGINE"
VERSIONS = ("2.14.1", "2.20.2")
"""Supported versions of Transformer Engine. :data:`NAMED` names another than the first."""


def cache_folder() -> Path:
    """Folder of the built device and of Transformer Engine's Python."""
    return Path(os.environ.get(CACHE) or Path.home() / ".cache" / "megatron_dppo")


def python_folder() -> Path:
    """Folder with Transformer Engine's Python: unpacked by ``scripts/install_te_python.sh``, or else installed.

    Raises:
        UserError: there is none of the named version, or of a supported one if none is named.
    """
    named = os.environ.get(NAMED)
    folder = cache_folder() / f"transformer-engine-{named or VERSIONS[0]}"
    if (folder / "transformer_engine").is_dir():
        return folder
    installed = importlib.util.find_spec("transformer_engine")
    if installed is None or installed.origin is None or _installed_version() not in ((named,) if named else VERSIONS):
        problem = f"the Python of Transformer Engine {named or ' or '.join(VERSIONS)} is missing"
        remedy = f"run {f'{NAMED}={named} ' if named else ''}bash scripts/install_te_python.sh"
        raise UserError(CACHE, cache_folder(), problem, remedy)
    return Path(installed.origin).parents[1]


def _installed_version() -> str | None:
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def missing_parts() -> list[str]:
    """Missing requirements, with the way to get each."""
    missing = [] if shutil.which("g++") else ["g++ (install it)"]
    try:
        python_folder()
    except UserError as error:
        missing.append(f"{error.problem} ({error.remedy})")
    return missing
