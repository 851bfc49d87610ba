"""Whether a chat template ends: it is a program, and comes with a model from anywhere."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron_dppo.errors import UserError

CPU_S = 5
"""Seconds of processor time for one short conversation; templates in use take a millisecond."""
MEMORY_MIB = 1024
LONGEST = 1_000_000
"""Characters of a rendered conversation of two words."""
TOO_LONG, NO_MEMORY = 3, 4
"""Exit codes of a process that renders."""
CONVERSATION = [{"role": "user", "content": "Hello."}]


def check_template(folder: Path) -> None:
    """Render a short conversation with the chat template of a Hugging Face directory, in a process with limits.

    Only limits are looked at: whatever else is wrong with a template, the run's own tokenizer tells.

    Raises:
        UserError: the template loops, or takes too much memory, or makes a text without measure.
    """
    if (template := _template(folder)) is None:
        return
    if problem := _limited(lambda: _render(template)):
        remedy = "Take the model's own template, or set data.chat_template=false"
        raise UserError("model.path", folder, f"its chat template {problem}", remedy)


def _template(folder: Path) -> str | None:
    """As a tokenizer reads it; None where there is none, or one that only the tokenizer itself can tell."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(found, list):
            found = next((each.get("template") for each in found if isinstance(each, dict)), None)
        return found if isinstance(found, str) else None
    return None


def _render(template: str) -> str:
    """As transformers does, as far as limits are concerned."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return environment.from_string(template).render(messages=CONVERSATION, add_generation_prompt=True)


def _limited(render: Callable[[], str]) -> str:
    """Limit that a rendering process exceeds; empty: none."""
    child = os.fork()
    if child == 0:
        _render_and_leave(render)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return f"does not end within {CPU_S} s"
    problems = {
        TOO_LONG: f"makes more than {LONGEST:,} characters of one short question",
        NO_MEMORY: f"takes more than {MEMORY_MIB} MiB",
    }
    return problems.get(os.waitstatus_to_exitcode(status), "")


def _render_and_leave(render: Callable[[], str]) -> NoReturn:
    code = 0
    try:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = taken + MEMORY_MIB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        code = TOO_LONG if len(render()) > LONGEST else 0
    except (MemoryError, OverflowError):
        code = NO_MEMORY
    except BaseException:  # of a template that the tokenizer refuses, in words of its own
        code = 0
    finally:
        os._exit(code)
