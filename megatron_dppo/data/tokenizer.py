"""Load the policy's tokenizer, find special token ids, and check that chat templates terminate.

A chat template is a program from an untrusted source.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from megatron_dppo.errors import UserError

CHAT_MARKS = re.compile(
    r"<\|im_start\|>(system|user|assistant)\n?|<\|im_end\|>|<think>\s*</think>\s*"
)


def strip_chat_marks(text: str) -> str:
    # Qwen's chat template renders these marks.
    return CHAT_MARKS.sub("", text).strip()


class Tokenizer(Protocol):
    """Used part of a Hugging Face tokenizer."""

    chat_template: str | dict[str, str] | None
    """Template, or several templates by name."""
    eos_token_id: int | None
    pad_token_id: int | None
    name_or_path: str
    """Folder of the tokenizer's files."""

    added_tokens_decoder: Mapping[int, Any]
    """Token id to a token with ``content`` and ``special``."""

    def __len__(self) -> int: ...

    def __call__(self, text: Sequence[str], *, add_special_tokens: bool) -> Any: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def batch_decode(
        self,
        sequences: Sequence[Any],
        *,
        skip_special_tokens: bool = False,
    ) -> list[str]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        tools: Any = None,
        add_generation_prompt: bool,
        tokenize: bool,
        **kwargs: Any,
    ) -> list[str]: ...

    def get_chat_template(self, *, tools: Any = None) -> str: ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory, without network.

    Raises:
        UserError: the directory or a file is missing or unreadable, or a token has no row in the
            embedding.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            "model.path",
            path,
            "is no directory",
            "Give a Hugging Face directory, or make one with `init`",
        )
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        remedy = "Copy the tokenizer files of the model there"
        raise UserError(
            "model.path", path, "holds no tokenizer (neither tokenizer.json nor vocab.json)", remedy
        )
    # Import here, because the import takes seconds.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # The tokenizers library raises bare Exception for malformed files.
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        problem = f"its tokenizer cannot be read ({first_line})"
        raise UserError("model.path", path, problem, "Copy the tokenizer files again") from error
    # The vocabulary includes added tokens, such as the padding token.
    check_token_ids(tokenizer.get_vocab().values(), folder, "its tokenizer")
    return cast(Tokenizer, tokenizer)


def check_token_ids(
    tokens: Iterable[int],
    folder: Path,
    owner: str,
    setting: str = "model.path",
) -> None:
    """Raise UserError if a token has no row in the embedding, by the config.json in ``folder``."""
    file = folder / "config.json"
    try:
        rows = int(json.loads(file.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # The reader of config.json reports the problem.
        return
    if beyond := [token for token in tokens if not 0 <= token < rows]:
        problem = (
            f"{owner} has the token id {min(beyond)}, and the embedding has {rows} rows ({file})"
        )
        remedy = (
            "Give the tokenizer and the config.json of one model, whose embedding has a row "
            "for each token"
        )
        value = folder if setting == "model.path" else beyond
        raise UserError(setting, value, problem, remedy)


def get_leading_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens before a text, such as Llama's beginning-of-text token."""
    plain, whole = (
        tokenizer(["a"], add_special_tokens=special)["input_ids"][0] for special in (False, True)
    )
    starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
    return list(whole[: next(starts, 0)])


def stop_token_ids(path: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a completion, from the policy's files and the tokenizer.

    Raises:
        UserError: an error of ``read_eos_token_ids``, or no source names a token.
    """
    # The padding token ends a completion only if listed, as in Qwen3's generation_config.json.
    listed = read_eos_token_ids(path)[1]
    if listed and tokenizer.eos_token_id is None:
        return listed
    return tuple(dict.fromkeys((*listed, end_token_id(tokenizer))))


def stop_note(path: str | Path, tokenizer: Tokenizer) -> str:
    """Return a note if the policy's files omit the tokenizer's end of turn, else an empty text."""
    file, listed = read_eos_token_ids(path)
    if not listed or tokenizer.eos_token_id in (None, *listed):
        return ""
    own = f"{tokenizer.decode([end_token_id(tokenizer)])} (the tokenizer's eos_token)"
    others = f"{', '.join(tokenizer.decode([token]) for token in listed)} ({file})"
    return (
        f"note: completions end at {own} and at {others}; rollout.stop_token_ids chooses other "
        "tokens"
    )


def read_eos_token_ids(path: str | Path) -> tuple[str, tuple[int, ...]]:
    """Return the name and ``eos_token_id`` of generation_config.json, else of config.json.

    Without a listed token, the tokens are empty, and the name is the file that should list tokens.

    Raises:
        UserError: a file is malformed, or a token has no row in the embedding.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(path) / name
        if not file.is_file():
            continue
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(
                "model.path", file, f"is not JSON ({error})", "Copy the file again"
            ) from error
        if not isinstance(settings, dict):
            raise UserError("model.path", file, "is no JSON object", "Copy the file again")
        listed = settings.get("eos_token_id")
        if listed is None:
            continue
        stops = listed if isinstance(listed, list) else [listed]
        # Exclude booleans, which are integers in Python.
        if not stops or not all(type(token) is int for token in stops):
            raise UserError(
                "model.path",
                file,
                f"has no token's id in eos_token_id ({listed!r:.60})",
                "Copy it again",
            )
        check_token_ids(stops, Path(path), f"eos_token_id in {name}")
        return name, tuple(stops)
    return "generation_config.json", ()


def end_token_id(tokenizer: Tokenizer) -> int:
    """Return the token that ends a turn.

    Raises:
        UserError: the tokenizer has no ``eos_token``.
    """
    if tokenizer.eos_token_id is None:
        problem = "the tokenizer names no eos_token, so completions would never end"
        remedy = "Set eos_token there, or rollout.stop_token_ids"
        raise UserError("model.path", "tokenizer_config.json", problem, remedy)
    return int(tokenizer.eos_token_id)


def pad_token_id(tokenizer: Tokenizer) -> int:
    # Padding is never scored, so any token serves if the tokenizer has no padding token.
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


# Seconds of processor time for a short conversation. Templates in use take a millisecond.
CPU_S = 5
MEMORY_MIB = 1024
LONGEST = 1_000_000
TOO_LONG = 3
NO_MEMORY = 4
CONVERSATION = [{"role": "user", "content": "Hello."}]
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of further chat templates."""
CLOCK = "strftime_now"
"""Function of transformers that prints the date in a chat template."""


def check_template(folder: Path) -> None:
    """Render a short conversation with each chat template of a directory, in a limited process.

    Raises:
        UserError: a template loops, takes too much memory, or makes too long a text.
    """
    # Check limits only. The run's tokenizer reports other problems of a template.
    for template in chat_templates(folder):
        if problem := _check_limits(partial(_render, template)):
            remedy = "Take the model's own template, or set data.chat_template=false"
            raise UserError("model.path", folder, f"its chat template {problem}", remedy)


def chat_templates(folder: Path) -> list[str]:
    """Return the chat templates that are readable without tokenizer."""
    templates = []
    named_files = sorted(folder.glob(f"{NAMED_TEMPLATES}/*.jinja"))
    for file in (folder / "chat_template.jinja", *named_files):
        with suppress(OSError, ValueError):
            templates.append(file.read_text(encoding="utf-8"))
    if templates:
        return templates
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            found = json.loads((folder / name).read_text(encoding="utf-8"))["chat_template"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        named = found if isinstance(found, list) else [{"template": found}]
        texts = [each.get("template") for each in named if isinstance(each, dict)]
        return [text for text in texts if isinstance(text, str)]
    return []


def _render(template: str) -> str:
    """Render with transformers' options that matter for limits."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals[CLOCK] = str
    return environment.from_string(template).render(
        messages=CONVERSATION, add_generation_prompt=True
    )


def _check_limits(render: Callable[[], str]) -> str:
    # A template that loops can be stopped only from outside.
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
        # Limit only further memory, because the parent may already use more than the limit.
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = taken + MEMORY_MIB * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        code = TOO_LONG if len(render()) > LONGEST else 0
    except (MemoryError, OverflowError):
        code = NO_MEMORY
    # Ignore other errors: the tokenizer refuses the template, with a message of the library's own.
    except BaseException:
        code = 0
    finally:
        os._exit(code)
