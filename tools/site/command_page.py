"""Write ``docs/command_line.md``, the reference of all commands and their options.

Run ``python tools/site/command_page.py`` after each change of a command's options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatron_dppo.cli import COMMANDS, build_parsers

PAGE = Path(__file__).parents[2] / "docs/command_line.md"
INTRODUCTION = """# Command line

The option `--help` of each command prints its options, as listed here. `CONFIG SETTING=VALUE` is a
YAML file with [settings](settings.md) that override it. The exit code is 2 for a mistake that you
can mend.
"""


def command_page() -> str:
    """Return the text of the page.

    The anchor of a command's heading is the command's name: ``command_line.md#probe-batch``.
    """
    _, parsers = build_parsers()
    lines = [INTRODUCTION]
    for group, commands in COMMANDS.items():
        lines.append(f"## {group}\n")
        for command, meaning in commands.items():
            lines.append(
                f'<a id="{command.replace(" ", "-")}"></a>\n\n### `{command}`\n\n{meaning}\n'
            )
            rows = list(_list_rows(parsers[command]))
            lines.extend(["| option | meaning |\n|---|---|", *rows, ""] if rows else [])
    return "\n".join(lines)


def _list_rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        value = action.metavar or (
            f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
        )
        # Flags have nargs 0, and no value.
        takes = f" {value}" if action.nargs != 0 else ""
        name = action.option_strings[-1] + takes if action.option_strings else str(value)
        meaning = (
            parser._get_formatter()._expand_help(action).replace("`", "") if action.help else ""
        )
        yield f"| `{_format_cell(name)}` | {_format_cell(meaning)} |"


def _format_cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(command_page(), encoding="utf-8")
