"""The table of families: each file of this folder has one, as ``FAMILY``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from megatron_dppo.models.family import Family

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (import_module(f"{__name__}.{file.name}").FAMILY for file in iter_modules(__path__))
}
"""Families by the architecture that config.json names."""
