"""Read a run's settings: a YAML file, ``a.b=c`` overrides, types and limits of ``config/``.

Needs no torch or Megatron: any machine can check a file.
"""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_dppo import __version__
from megatron_dppo.config import Config
from megatron_dppo.config.types import Dumper, Loader, Section
from megatron_dppo.errors import MistakesError, UserError
from megatron_dppo.process.streams import print_message

IN_FORCE = "config.yaml"
"""File of a run: the settings in force."""
HISTORY = "config_history.jsonl"
"""File of a run: the settings of earlier steps."""
RENAMED = {
    "run.late_s": "run.stall_warning_s",
    "run.resume=anyway": "run.resume=force",
    "eval.against": "eval.baseline",
    "cluster.warn_s": "cluster.stop_before_limit_s",
    "pruning.refill": "pruning.resample",
    "pruning.noise": "pruning.target_noise",
}
"""Old names of settings and of values, and the new ones. Old names are refused, except in the files
of a run."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Leaf of the configuration."""

    key: str
    """``pruning.prompts.keep``."""
    type: Any
    """With limits."""
    default: Any
    meaning: str
    """Docstring in ``config/``."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words, if a choice of words."""
        if get_origin(self.type) is not Literal:
            return ()
        return tuple(str(c) for c in get_args(self.type))

    @property
    def kinds(self) -> tuple[Any, ...]:
        return get_args(self.type) if get_origin(self.type) in (Union, UnionType) else (self.type,)

    @property
    def takes_none(self) -> bool:
        return type(None) in get_args(self.type)


def load_config(
    path: str | None,
    overrides: Sequence[str],
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration of a YAML file (defaults if None) with overrides applied.

    Args:
        path: YAML file.
        overrides: words ``a.b=c``.
        values: nested sections of Python values.

    Raises:
        UserError: if the file cannot be read, a key is unknown (naming the nearest), or a value has
            the wrong type or exceeds limits.
    """
    try:
        return load_whole(path, overrides, values)
    except MistakesError as found:
        raise found.errors[0] from None


def load_whole(
    path: str | None,
    overrides: Sequence[str],
    values: Mapping[str, Any] | None = None,
) -> Config:
    """Load as :func:`load_config`, with all errors at once, as a :class:`MistakesError`."""
    sources = [
        partial(_from_file, path),
        *(partial(_from_override, override) for override in overrides),
        partial(_from_python, values or {}),
    ]
    given: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    mistakes: list[UserError] = []
    for read in sources:
        try:
            given |= read()
        except UserError as error:
            mistakes.append(error)
    for key, value in given.items():
        if len(mistakes) >= MOST_MISTAKES:
            break
        try:
            _set(tree, key, value)
        except UserError as error:
            mistakes.append(error)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        mistakes += _convert_errors(error)
    if mistakes:
        raise MistakesError(mistakes)
    return config


@cache
def get_settings() -> Mapping[str, Setting]:
    """Return all settings by dotted key, in order."""
    return {setting.key: setting for setting in _iterate_settings(Config, "")}


@cache
def get_sections() -> frozenset[str]:
    """Return the sections: ``pruning``, ``pruning.prompts``, …"""
    return frozenset(
        key[:i] for key in get_settings() for i, letter in enumerate(key) if letter == "."
    )


def _iterate_settings(section: type[Section], prefix: str) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        key = prefix + name
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _iterate_settings(kind, key + ".")
        else:
            yield Setting(
                key,
                field.rebuild_annotation(),
                field.default,
                " ".join((field.description or "").split()),
            )


MOST_MISTAKES = 20
"""Most mistakes reported."""


def flatten_tree(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested sections."""
    for name, value in tree.items():
        # YAML reads some names as numbers.
        key = f"{prefix}{name}"
        # A section with all lines commented out is null.
        if key in get_sections() and isinstance(value, Mapping | None):
            yield from flatten_tree(value or {}, f"{key}.")
        else:
            yield key, value


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text"
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
        remedy = (
            "give the path of a YAML file; `megatron-dppo configs --copy .` writes configs/ "
            "with examples"
        )
        raise UserError("CONFIG", path, f"cannot be read: {reason}", remedy) from None
    try:
        tree = yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            "CONFIG", path, f"is not YAML: {_format_position(error)}", "correct that line"
        ) from None
    if not isinstance(tree, Mapping | None):
        raise UserError(
            "CONFIG",
            path,
            "holds no sections",
            "write sections and settings, as the files in configs/ do",
        )
    given: dict[str, Any] = {}
    for key, value in flatten_tree(tree or {}):
        if key in given:
            raise UserError(
                "CONFIG",
                path,
                f"has {key} twice, in its section and by its dotted name",
                "remove one",
            )
        given[key] = value
    if Path(path).name == IN_FORCE and Path(path).with_name(HISTORY).is_file():
        given, renamed = translate_renamed(given)
        if renamed and os.environ.get("RANK", "0") == "0":
            print_message(f"note  {describe_renamed(path, renamed)}")
    return given


def translate_renamed(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate the old names in a run's stored settings, by dotted key.

    Returns:
        The settings with new names, and the old names that were found.
    """
    translated: dict[str, Any] = {}
    found: list[str] = []
    for key, value in settings.items():
        old = _find_renamed(key, value)
        name, _, word = RENAMED[old].partition("=") if old else (key, "", "")
        translated[name] = word or value
        found += [old] if old else []
    return translated, tuple(found)


def describe_renamed(file: str | Path, names: Iterable[str]) -> str:
    """Return a note on the old names in a run's file."""
    return f"{file}: {', '.join(f'{old} is now {RENAMED[old]}' for old in names)}"


def _find_renamed(key: str, value: object) -> str | None:
    word = f"{key}={value}" if isinstance(value, str) else key
    return next((old for old in (word, key) if old in RENAMED), None)


def _from_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError("override", override, "has no value", "write it as section.setting=value")
    setting = get_settings().get(key.strip())
    return {key.strip(): _value(setting, text) if setting else text}


def _from_python(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain_value(value) for key, value in flatten_tree(values)}


def _format_position(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return (
            f"{error.problem}, line {error.problem_mark.line + 1}, column "
            f"{error.problem_mark.column + 1}"
        )
    return " ".join(str(error).split())


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a setting in nested sections.

    Raises:
        UserError: if the key is no setting, or pydantic would accept or not name a wrong value.
    """
    if old := _find_renamed(key, value):
        problem = f"{old} is now {RENAMED[old]}"
        raise UserError(key, format_value(value), problem, f"write {RENAMED[old]}")
    if key in get_sections():
        first = next(each for each in get_settings() if each.startswith(f"{key}."))
        raise UserError(
            key, format_value(value), "is a section, and holds settings", f"write {first} and so on"
        )
    if key not in get_settings():
        raise _build_unknown_error(key, value)
    setting = get_settings()[key]
    # pydantic reads ``true`` as 1, and ``yes`` as true.
    if isinstance(value, bool) != (setting.type is bool):
        raise _build_value_error(
            setting,
            value,
            "is true or false" if isinstance(value, bool) else "is neither true nor false",
        )
    if not _is_writable(value):
        problem = "holds a character that no file can hold, null or half of another one"
        raise UserError(key, format_value(ascii(value)), problem, "take it out")
    *path, leaf = key.split(".")
    for name in path:
        tree = tree.setdefault(name, {})
    tree[leaf] = _split_list(setting, value)


def _split_list(setting: Setting, value: Any) -> Any:
    """Split words without brackets if the setting takes lists:
    ``eval.benchmarks=gsm8k,math500``."""
    takes_list = any(get_origin(kind) is tuple for kind in setting.kinds)
    if not takes_list or not isinstance(value, str | int | float):
        return value
    if type(value) in map(_strip_constraints, setting.kinds) or str(value) in _list_words(setting):
        return value
    if not isinstance(value, str) or any(letter in value for letter in "[]{}'\""):
        return [value]
    return [word.strip() for word in value.split(",")]


def _strip_constraints(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _list_words(setting: Setting) -> set[str]:
    return {
        str(word)
        for kind in setting.kinds
        if get_origin(kind) is Literal
        for word in get_args(kind)
    }


def _build_unknown_error(key: str, value: object) -> UserError:
    near = " or ".join(find_nearest_settings(key))
    remedy = f"write {near}, if that was meant" if near else "--print-config shows every setting"
    return UserError(key, format_value(value), "there is no such setting", remedy)


def find_nearest_settings(key: str) -> list[str]:
    """Return the settings or section that an unknown dotted key may mean; empty without a match.

    - A known name under a wrong section always matches, in all or the nearest sections.
    - Initials match: ``optimizer.learning_rate`` means ``optimizer.lr``.
    """
    if key in RENAMED:
        return [RENAMED[key]]
    section, _, leaf = key.lower().rpartition(".")
    initials = f"{section}.{''.join(word[:1] for word in leaf.split('_'))}"
    if initials in get_settings():
        return [initials]

    def compute_likeness(other: str) -> float:
        whole = difflib.SequenceMatcher(None, key.lower(), other).ratio()
        end = difflib.SequenceMatcher(None, leaf, other.rpartition(".")[2]).ratio()
        # A wrong section is a likelier mistake than a wrong name.
        return max(whole, 0.75 * end + 0.25 * whole)

    same_name = [other for other in get_settings() if other.rpartition(".")[2] == leaf]
    if same_name:
        misspelt = difflib.get_close_matches(key.lower(), same_name, 1, 0.9)
        return (
            [other for other in same_name if other.startswith(section + ".")]
            or misspelt
            or same_name
        )
    best = max([*get_settings(), *sorted(get_sections())], key=compute_likeness)
    return [best] if compute_likeness(best) > 0.65 else []


def _plain_value(value: Any) -> Any:
    """Convert NumPy values and paths to the types of YAML."""
    if isinstance(value, Mapping):
        return {name: _plain_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(part) for part in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _is_writable(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_writable, [*value, *value.values()]))
    if isinstance(value, list | tuple):
        return all(map(_is_writable, value))
    return not isinstance(value, str) or (
        "\0" not in value and value == value.encode(errors="ignore").decode()
    )


def _value(setting: Setting, text: str) -> Any:
    """Parse an override as YAML, where words stay words, also in lists and mappings:
    ``run.dir=2024``, ``data.label_key=yes``, ``rollout.launch.flags=[--context-length, 2048]``."""
    kinds = setting.kinds
    if setting.takes_none and text.strip() in ("", "~", "null"):
        return None
    try:
        named = text.lstrip().startswith("{") and any(kind == dict[str, str] for kind in kinds)
        if named or any(get_origin(kind) is tuple and str in get_args(kind) for kind in kinds):
            return yaml.load(text, Loader=yaml.BaseLoader)
        listed = text.lstrip().startswith("[") and any(get_origin(kind) is tuple for kind in kinds)
        if not listed and (
            str in kinds or any(isinstance(choice, str) for choice in get_args(setting.type))
        ):
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            return text[1:-1] if quoted else text
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError):
        # The check of the value reports the mistake, with the setting's type.
        return text


def _convert_errors(error: ValidationError) -> Iterator[UserError]:
    wrong: dict[str, ErrorDetails] = {}
    for each in error.errors():
        names = [str(part) for part in each["loc"]]
        key = next(key for key in accumulate(names, "{}.{}".format) if key in get_settings())
        # For a union, keep the error of the type that matched furthest: the type meant.
        if key not in wrong or len(names) > len(wrong[key]["loc"]):
            wrong[key] = each
    for key, details in wrong.items():
        problem = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        # The remedy lists the values.
        if details["type"] == "literal_error":
            problem = "is none of its values"
        inside = details["loc"][-1]
        if len(details["loc"]) > key.count(".") + 2 and isinstance(inside, str):
            problem = f"{inside}: {problem}"
        yield _build_value_error(get_settings()[key], details["input"], problem)


def _build_value_error(setting: Setting, value: object, problem: str) -> UserError:
    default = format_value(
        list(setting.default) if isinstance(setting.default, tuple) else setting.default
    )
    remedy = f"set {setting.key} to {describe_type(setting.type)} (its default is {default})"
    return UserError(setting.key, format_value(value), problem, remedy)


def describe_type(kind: Any) -> str:
    """Describe a type's values in words."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if origin is Annotated:
        return f"{describe_type(arguments[0])} {' and '.join(map(_describe_limit, arguments[1:]))}"
    if origin is Literal:
        return " or ".join(str(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is tuple:
        return f"a list, each element {describe_type(arguments[0])}"
    if origin is dict:
        return f"names, each with {describe_type(arguments[1])}"
    if isinstance(kind, type) and issubclass(kind, Section):
        return f"any of {', '.join(kind.model_fields)}"
    words = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
    }
    return "any value" if kind is Any else words[kind]


def _describe_limit(limit: Any) -> str:
    name = type(limit).__name__
    words = {"Ge": "at least", "Gt": "above", "Le": "at most", "Lt": "below"}
    return f"{words[name]} {getattr(limit, name.lower()):g}"


def format_value(value: object) -> str:
    """Format as in YAML, cut to 80 characters."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if value is None:
        text = "null"
    return text if len(text) <= 80 else text[:77] + "..."


def as_yaml(config: Config) -> str:
    """Return every value with its meaning as a comment. The text gives the same config."""
    lines = [f"# Every setting of megatron-dppo {__version__}.", *_render_section(config, "")]
    return "\n".join(lines) + "\n"


def _render_section(section: Section, prefix: str) -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in section:
        if isinstance(value, Section):
            yield from ([""] if not prefix else []) + [f"{indent}{name}:"]
            yield from _render_section(value, f"{prefix}{name}.")
            continue
        setting = get_settings()[prefix + name]
        meaning = setting.meaning.replace("``", "")
        if setting.choices:
            meaning = f"{meaning} [{', '.join(setting.choices)}]".strip()
        yield from textwrap.wrap(
            meaning, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        # A list or mapping is on one line, like an override.
        many = isinstance(value, tuple | dict)
        plain = {name: value}
        if many:
            plain = section.model_dump(mode="json", include={name}, exclude_none=True)
        flow = None if many else False
        written = yaml.dump(
            plain, Dumper=Dumper, default_flow_style=flow, allow_unicode=True, width=10**6
        )
        yield from (indent + line for line in written.removesuffix("\n").split("\n"))
