"""The settings of runs: what differs between them or from the defaults, and all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_dppo.report.parts import Folded, Note, Part, Section, Table
from megatron_dppo.report.run import Run, default_of
from megatron_dppo.settings import settings, short

LAUNCH, ENV = "rollout.launch.", "rollout.launch.env"
SECRET = re.compile(r"(token(?!s|iz)|key|secret|passw|credential|bearer)[\w.-]*(['\"]?[=:\s]+|$)", re.IGNORECASE)
"""A name that looks like a secret's, and what stands between it and the secret, up to the end of a word where that is
the next one. ``--tokenizer`` and ``--max-total-tokens`` are none."""


def options(runs: Sequence[Run]) -> Section:
    """Of several runs what differs, of one run what is not the default; then each run's whole file, folded."""
    told = [run for run in runs if run.config]
    parts: list[Part] = []
    if len(told) > 1:
        keys = [key for key in dict.fromkeys(key for run in told for key in run.config) if key != "run.dir"]
        values = {key: [_value(run, key) for run in told] for key in keys}
        differ = {key: of for key, of in values.items() if any(value != of[0] for value in of)}
        rows = [[key, *(_word(key, value) for value in of)] for key, of in differ.items()]
        head = ["setting", *(run.name for run in told)]
        parts.append(Table(head, rows, words=True) if rows else Note("No setting but the folder differs."))
    elif told:
        run = told[0]
        rows = [
            [key, _word(key, value), _word(key, _default(key))]
            for key, value in run.config.items()
            if key not in settings() or value != _default(key)
        ]
        parts.append(Table(["setting", "value", "default"], rows, words=True))
    for run in runs:
        rows = [
            [f"{step:,}", change.key, _word(change.key, change.before), _word(change.key, change.now)]
            for step, changes in run.changes
            for change in changes
        ]
        if rows:
            parts.append(Note(f"Changed in {run.name} when it was started again:"))
            parts.append(Table(["after step", "setting", "before", "then"], rows, words=True))
    for run in told:
        text = "\n".join(f"{key} = {_word(key, value)}" for key, value in run.config.items())
        parts.append(Folded(f"All settings of {run.name}", text))
    lead = "Only what differs between the runs." if len(told) > 1 else "Only what is not the default."
    return Section("settings", "Settings", lead, parts)


def _value(run: Run, key: str) -> Any:
    """The default, for a run of a version that does not know the setting."""
    return run.config.get(key, _default(key))


def _default(key: str) -> Any:
    return default_of(key) if key in settings() else None


def _word(key: str, value: Any) -> str:
    """As YAML writes it. A page is made to be passed on: what looks like a secret is left out, and of environment
    variables all values."""
    if key == ENV and isinstance(value, list):
        value = [f"{str(variable).partition('=')[0]}=…" for variable in value]
    elif key.startswith(LAUNCH) and isinstance(value, list):
        value = list(_masked(value))
    return short(value)


def _masked(words: Sequence[Any]) -> Iterator[Any]:
    """The words without what follows the name of a secret, in the same word or in the next one."""
    named = False
    for word in words:
        found = SECRET.search(str(word))
        if named and not str(word).startswith("--"):
            found = None
            yield "…"
        elif found and found.end() < len(word):
            yield word[: found.end()] + "…"
        else:
            yield word
        named = found is not None and found.end() == len(word)
