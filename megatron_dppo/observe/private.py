"""Masking of keys and passwords in settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_dppo.errors import remove_passwords
from megatron_dppo.settings import format_value

LAUNCH = "rollout.launch."
ENV = "rollout.launch.env"
MAPPINGS = ("data.verifiers.arguments", "data.chat_template_kwargs")
"""Mappings with names from a user's code or template."""
PRIVATE = (LAUNCH, "rollout.servers", "loss.distillation.teacher", *MAPPINGS)
"""Prefixes of settings with a key, a password or an address. Loggers do not receive them."""
SECRET = re.compile(
    r"(token(?!s|iz)|key|secret|passw|credential|bearer)[\w.-]*(['\"]?[=:\s]+|$)", re.IGNORECASE
)
"""Name of a secret, up to the secret, or up to the word's end if the secret is the next word.
``--tokenizer`` and ``--max-total-tokens`` do not match."""


def mask_secrets(key: str, value: Any) -> Any:
    """Return the value (JSON) of a dotted setting without secrets.

    - Environment variables keep their names only.
    - Commands and flags lose the text after the name of a secret.
    - Mappings read by a user's code keep numbers and truth values only.
    - URLs lose user and password.
    """
    if key == ENV and isinstance(value, list):
        value = [f"{str(variable).partition('=')[0]}=…" for variable in value]
    elif key.startswith(LAUNCH) and isinstance(value, list):
        value = list(_mask_words(value))
    elif key.startswith(MAPPINGS):
        value = _mask_texts(value)
    return map_texts(value, remove_passwords)


def format_masked(key: str, value: Any) -> str:
    """Return the value in YAML, without secrets."""
    return format_value(mask_secrets(key, value))


def has_secrets(settings: Mapping[str, Any]) -> bool:
    """Return whether :func:`mask_secrets` changes a setting. Keys are dotted."""
    return any(mask_secrets(key, value) != value for key, value in settings.items())


def _mask_words(words: Sequence[Any]) -> Iterator[Any]:
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
    # A user's code may read a secret under any name, so no text is shown.
    return value if value is None or isinstance(value, int | float) else "…"


def map_texts(value: Any, convert: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: map_texts(each, convert) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(each, convert) for each in value]
    return convert(value) if isinstance(value, str) else value
