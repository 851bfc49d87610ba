"""Write ``docs/settings.md``, the reference of all settings and of the combinations that commands
refuse.

Run ``python tools/site/settings_page.py`` after each change of ``megatron_dppo/config/``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from megatron_dppo.config import Config
from megatron_dppo.config.exclusions import (
    PLACE,
    Condition,
    Exclusion,
    get_value,
    is_key,
    load_exclusions,
)
from megatron_dppo.settings import Setting, describe_type, format_value, get_settings

PAGE = Path(__file__).parents[2] / "docs/settings.md"
INTRODUCTION = """# Settings

A run is configured by a YAML file with these sections and settings; `a.b=c` on the command line
overrides a setting. An unknown key is an error that names the nearest key. The option
`--print-config` of `train` prints every setting with the value that the run would use. If `null`
is allowed, the setting's text describes its effect. [Exclusions](#exclusions) lists the
combinations of settings that commands refuse.
"""
EXCLUSIONS = """<a id="exclusions"></a>

## Exclusions

Before any rank starts, a command refuses a configuration that meets the conditions under *setting*
and *with* of a row:

- A setting without a value means that the value is neither null, false, 0 nor an empty list.
- A list is equal to a value if one of its elements is.
- `policy.` marks a size of the policy, read from its `config.json`.

The text under *because* continues the name of the setting. The sign … replaces a value of the run.
"""
COMPARISONS = {"<": "below", ">": "above", ">=": "at least"}
SETTING = re.compile(r"[a-z]+(?:\.[a-z_]+)+(?:=(?:\[[^\]]*\]|[^\s,;:]+))?")


def settings_page() -> str:
    """Return the text of the page.

    The anchor of a setting's heading is the setting's key: ``settings.md#rollout.ahead``.
    """
    by_section: dict[str, list[Setting]] = {}
    for setting in get_settings().values():
        by_section.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    return "\n".join(
        [
            INTRODUCTION,
            *(
                line
                for section, members in by_section.items()
                for line in _render_section(section, members)
            ),
            EXCLUSIONS,
            *(
                line
                for commands, rows in groupby(load_exclusions(), lambda row: row.commands)
                for line in _render_table(commands, rows)
            ),
        ]
    )


def _render_section(section: str, members: list[Setting]) -> Iterator[str]:
    yield f'<a id="{section}"></a>\n\n## {section}\n'
    for setting in members:
        yield f'<a id="{setting.key}"></a>\n\n### `{setting.key}`\n'
        meaning = setting.meaning.replace("``", "`")
        yield (
            f"{meaning}\n\n*Default* `{_format_default(setting)}` · *takes* "
            f"{describe_type(setting.type)}\n"
        )


def _format_default(setting: Setting) -> str:
    return "[]" if setting.default == () else format_value(setting.default)


def _render_table(commands: tuple[str, ...], rows: Iterator[Exclusion]) -> Iterator[str]:
    yield f"For {', '.join(f'`{command}`' for command in commands)}:\n"
    yield "| setting | with | because | remedy |\n|---|---|---|---|"
    for row in rows:
        refused, *others = map(_describe_condition, row.terms)
        yield (
            f"| {refused} | {', '.join(others)} | {_format_text(row.because, others)} | "
            f"{_format_text(row.remedy, others)} |"
        )
    yield ""


def _describe_condition(term: Condition) -> str:
    words: list[str] = []
    for word in term.words:
        words.append(_describe_key(word) if is_key(word) else word)
    if term.order is None:
        return _describe_key(term.key)
    if term.order == "=" and len(words) == 1 and term.key in get_settings():
        return f"`{term.key}={words[0]}`"
    comparisons = {"=": "equal to", "!=": "other than"} | COMPARISONS
    return f"{_describe_key(term.key)} {comparisons[term.order]} {' or '.join(words)}"


def _describe_key(key: str) -> str:
    """Name a setting by its key, and a property of a section by the first clause of its
    docstring."""
    if key in get_settings() or key.startswith("policy.") or "//" in key:
        return f"`{key}`"
    section, _, name = key.rpartition(".")
    meaning = getattr(type(get_value(section, Config()) if section else Config()), name).__doc__
    clause = re.split(r"[:,.](?:\s|$)", meaning)[0].replace("``", "")
    return clause[0].lower() + clause[1:]


def _format_text(text: str, conditions: list[str]) -> str:
    """Replace values in a row's text by an ellipsis, and ``{with}`` by the other conditions."""
    text = re.sub(r" = \{[^}]*\}", "", text)
    text = PLACE.sub(lambda found: found[0] if found[1] == "with" else "…", text)
    text = SETTING.sub(lambda found: f"`{found[0]}`", text)
    return text.replace("{with}", " and ".join(conditions))


if __name__ == "__main__":
    PAGE.write_text(settings_page(), encoding="utf-8")
