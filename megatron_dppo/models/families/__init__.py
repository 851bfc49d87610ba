"""Table of families, collected from all files of this folder."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_dppo.models.family import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for file in iter_modules(__path__)
    for family in vars(import_module(f"{__name__}.{file.name}")).values()
    if isinstance(family, Family)
}
"""Families by the architecture named in config.json."""
