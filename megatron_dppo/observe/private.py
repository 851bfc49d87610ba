"""Masking of keys and passwords in settings, for pages, cards, loggers and the console."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo.errors import remove_passwords
from megatron_dppo.settings import format_value

LAUNCH = "rollout.launch."
ENV = "rollout.launch.env"
MAPPINGS = ("data.verifiers.arguments", "data.chat_template_kwargs")
"""Settings that are mappings, with names from a user's code or template."""
PRIVATE = (LAUNCH, "rollout.servers", "loss.distillation.teacher", *MAPPINGS)
"""Prefixes of settings that may contain a key, a password or an address. Loggers do not receive
these settings."""
SECRET = re.compile(
    r"(token(?!s|iz)|key|secret|passw|credential|bearer)[\w.-]*(['\"]?[=:\s]+|$)", re.IGNORECASE
)
"""Name of a secret, with the characters up to the secret, or up to the end of the word if the
secret is the next word. ``--tokenizer`` and ``--max-total-tokens`` are not names of secrets."""


def mask_secrets(key: str, value: Any) -> Any:
    """Return the value of a setting without secrets.

    - Environment variables keep their names only.
    - Commands and flags lose the text after the name of a secret.
    - Mappings that a user's code reads keep numbers and truth values only.
    - URLs lose user and password.

    Args:
        key: dotted name of the setting.
        value: JSON value.
    """
    if key == ENV and isinstance(value, list):
        value = [f"{str(variable).partition('=')[0]}=…" for variable in value]
    elif key.startswith(LAUNCH) and isinstance(value, list):
        value = list(_mask_words(value))
    elif key.startswith(MAPPINGS):
        value = _mask_texts(value)
    return map_texts(value, remove_passwords)


def format_masked(key: str, value: Any) -> str:
    """Return the value of a setting in YAML, without secrets."""
    return format_value(mask_secrets(key, value))


def has_secrets(settings: Mapping[str, Any]) -> bool:
    """Return whether settings by dotted key contain a secret removed by :func:`mask_secrets`."""
    return any(mask_secrets(key, value) != value for key, value in settings.items())


def _mask_words(words: Sequence[Any]) -> Iterator[Any]:
    """Yield words with masked secrets. A secret follows its name, or is the next word."""
    named = False
    for word in words:
        found = SECRET.search(str(word))
        # After a flag with a secret's name, another flag is no secret.
        if named and not str(word).startswith("--"):
            found = None
            yield "…"
        elif found and found.end() < len(word):
            yield word[: found.end()] + "…"
        else:
            yield word
        named = found is not None and found.end() == len(word)


def _mask_texts(value: Any) -> Any:
    if isinstance(value, Mapping):
        masked = {}
        for name, each in value.items():
            is_secret = SECRET.search(str(name)) is not None
            masked[name] = "…" if is_secret else _mask_texts(each)
        return masked
    return value if value is None or isinstance(value, int | float) else "…"


def map_texts(value: Any, convert: Callable[[str], str]) -> Any:
    """Return a JSON value with each text converted."""
    if isinstance(value, Mapping):
        return {name: map_texts(each, convert) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(each, convert) for each in value]
    return convert(value) if isinstance(value, str) else value
