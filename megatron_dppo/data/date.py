"""Fix the date that some chat templates print, such as Llama 3.2's.

All ranks and all starts of a run print the same date.
"""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path

from megatron_dppo.config import DataConfig, replace
from megatron_dppo.data.tokenizer import CLOCK, chat_templates
from megatron_dppo.errors import UserError
from megatron_dppo.process.files import replace_text
from megatron_dppo.process.streams import print_message

DATE = "prompt_date.txt"
"""File of a run's folder."""
# Directives of strftime, without percent signs.
DATE_PARTS = (
    "-d",
    "-m",
    "-H",
    "-I",
    "-M",
    "-S",
    "-j",
    "-y",
    *"aAbBcdDeFGhHIjklmMpPrRSTuUVwWxXyYzZ%",
)


def with_date(data: DataConfig, policy: Path, folder: Path, *, keep: bool = False) -> DataConfig:
    """Return the settings with the date of prompts, if the policy's chat template prints one.

    Args:
        data: settings; a date in them stays.
        policy: folder of the tokenizer.
        folder: folder of a stored date; without one, today's date.
        keep: True to store the date in ``folder``.

    Raises:
        UserError: the date cannot be read or kept.
    """
    if data.date or not data.chat_template or not uses_date(policy):
        return data
    file = folder / DATE
    try:
        if file.is_file():
            return replace(data, date=file.read_text(encoding="utf-8").strip())
        dated = replace(data, date=date.today().isoformat())
        if keep:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(file, f"{dated.date}\n")
            print_message(
                f"note: the chat template prints a date, always {dated.date} in this run: {file}, "
                "or data.date"
            )
    except (OSError, ValueError) as error:
        remedy = "Write a day like 2026-01-31 there, or set data.date"
        raise UserError(
            "data.date", "null", f"{file} cannot hold the date of prompts ({error})", remedy
        ) from error
    return dated


def freeze_date(template: str, day: str) -> str:
    """Return a chat template with a fixed time, midnight of a day such as ``2026-01-31``."""
    now = datetime.fromisoformat(day)
    # A macro must format the date, because transformers converts functions among a template's
    # variables to text.
    formats = "".join(f"|replace('%{part}', {now.strftime('%' + part)!r})" for part in DATE_PARTS)
    macro = f"{{% macro {CLOCK}(format) %}}{{{{ format{formats} }}}}{{% endmacro %}}"
    # The empty text keeps a newline at the start of the template.
    return macro + "{{ '' }}" + template


def uses_date(policy: Path) -> bool:
    """Return whether a chat template of the policy prints the date."""
    return any(CLOCK in template for template in chat_templates(policy))
