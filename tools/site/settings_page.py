"""Writes ``docs/settings.md``, the reference of settings, from the configuration's own classes.

Where they change, ``python tools/site/settings_page.py`` writes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.settings import Setting, allowed, settings, short

PAGE = Path(__file__).parents[2] / "docs/settings.md"
INTRODUCTION = """# Settings

A run is a YAML file of these, in sections; `a.b=c` on the command line overrides one of them. An unknown key is an
error that names the nearest one. With `--print-config` the command `train` prints all of them, with the values
that a run would take. Where a setting is `null`, its text says what is done instead.
"""


def settings_page() -> str:
    """Every setting under a heading whose anchor is its key, as in ``settings.md#rollout.ahead``."""
    by_section: dict[str, list[Setting]] = {}
    for setting in settings().values():
        by_section.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    return "\n".join(
        [INTRODUCTION, *(line for section, each in by_section.items() for line in _section(section, each))]
    )


def _section(section: str, of_section: list[Setting]) -> Iterator[str]:
    yield f'<a id="{section}"></a>\n\n## {section}\n'
    for setting in of_section:
        yield f'<a id="{setting.key}"></a>\n\n### `{setting.key}`\n'
        meaning = setting.meaning.replace("``", "`")
        yield f"{meaning}\n\n*Default* `{_default(setting)}` · *takes* {allowed(setting.type)}\n"


def _default(setting: Setting) -> str:
    return "[]" if setting.default == () else short(setting.default)


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
