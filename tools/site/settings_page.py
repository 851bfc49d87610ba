"""Writes ``docs/settings.md``, the reference of settings, from the configuration's own classes and exclusions.

Where they change, ``python tools/site/settings_page.py`` writes it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from megatron_dppo.config import Config
from megatron_dppo.config.exclusions import PLACE, Exclusion, Term, exclusions, is_key, value_of
from megatron_dppo.settings import Setting, allowed, settings, short

PAGE = Path(__file__).parents[2] / "docs/settings.md"
INTRODUCTION = """# Settings

A run is a YAML file of these, in sections; `a.b=c` on the command line overrides one of them. An unknown key is an
error that names the nearest one. With `--print-config` the command `train` prints all of them, with the values
that a run would take. Where a setting is `null`, its text says what is done instead. [Exclusions](#exclusions) lists
settings that cannot go together.
"""
EXCLUSIONS = """<a id="exclusions"></a>

## Exclusions

Each command refuses a configuration that meets all conditions of a row, before any rank starts. A setting alone is a
condition, too: its value is neither null, false, 0 nor an empty list. A list equals each of its elements. `policy.`
stands for the shape of the policy, as its config.json has it.
"""
ORDERS = {"<": "below", ">": "above", ">=": "at least"}
SETTING = re.compile(r"[a-z]+(?:\.[a-z_]+)+(?:=(?:\[[^\]]*\]|[^\s,;:]+))?")


def settings_page() -> str:
    """Every setting under a heading whose anchor is its key, as in ``settings.md#rollout.ahead``."""
    by_section: dict[str, list[Setting]] = {}
    for setting in settings().values():
        by_section.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    return "\n".join(
        [
            INTRODUCTION,
            *(line for section, each in by_section.items() for line in _section(section, each)),
            EXCLUSIONS,
            *(
                line
                for commands, rows in groupby(exclusions(), lambda row: row.commands)
                for line in _table(commands, rows)
            ),
        ]
    )


def _section(section: str, of_section: list[Setting]) -> Iterator[str]:
    yield f'<a id="{section}"></a>\n\n## {section}\n'
    for setting in of_section:
        yield f'<a id="{setting.key}"></a>\n\n### `{setting.key}`\n'
        meaning = setting.meaning.replace("``", "`")
        yield f"{meaning}\n\n*Default* `{_default(setting)}` · *takes* {allowed(setting.type)}\n"


def _default(setting: Setting) -> str:
    return "[]" if setting.default == () else short(setting.default)


def _table(commands: tuple[str, ...], rows: Iterator[Exclusion]) -> Iterator[str]:
    yield f"For {', '.join(f'`{command}`' for command in commands)}:\n"
    yield "| setting | with | because | remedy |\n|---|---|---|---|"
    for row in rows:
        refused, *others = map(_condition, row.terms)
        yield f"| {refused} | {', '.join(others)} | {_text(row.because, others)} | {_text(row.remedy, others)} |"
    yield ""


def _condition(term: Term) -> str:
    words = [_named(word) if is_key(word) else word for word in term.words]
    if term.order is None:
        return _named(term.key)
    if term.order == "=" and len(words) == 1 and term.key in settings():
        return f"`{term.key}={words[0]}`"
    how = {"=": "equal to", "!=": "other than"} | ORDERS
    return f"{_named(term.key)} {how[term.order]} {' or '.join(words)}"


def _named(key: str) -> str:
    """A setting by its key, a property by the beginning of its docstring."""
    if key in settings() or key.startswith("policy.") or "//" in key:
        return f"`{key}`"
    section, _, name = key.rpartition(".")
    meaning = getattr(type(value_of(section, Config()) if section else Config()), name).__doc__
    first = re.split(r"[:,.](?:\s|$)", meaning)[0].replace("``", "")
    return first[0].lower() + first[1:]


def _text(text: str, others: list[str]) -> str:
    """A row's text without values."""
    text = PLACE.sub(lambda found: found[0] if found[1] == "with" else "…", re.sub(r" = \{[^}]*\}", "", text))
    return SETTING.sub(lambda found: f"`{found[0]}`", text).replace("{with}", " and ".join(others))


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
