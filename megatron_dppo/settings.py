"""Reading a run's settings: a YAML file, then ``a.b=c`` overrides, then the types and limits of
``config/``.

Needs neither torch nor Megatron, so that a file can be checked on any machine, at once.
"""

from __future__ import annotations

import difflib
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the configuration."""

    key: str
    """Dotted, ``pruning.prompts.keep``."""
    type: Any
    """Its annotation, limits included."""
    default: Any
    meaning: str
    """The text under it in ``config/``."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The words it may hold, empty if it is not a choice of words."""
        return (
            tuple(str(c) for c in get_args(self.type)) if get_origin(self.type) is Literal else ()
        )

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that it may have."""
        return get_args(self.type) if get_origin(self.type) in (Union, UnionType) else (self.type,)

    @property
    def takes_none(self) -> bool:
        return type(None) in get_args(self.type)


def load_config(
    path: str | None, overrides: Sequence[str], values: Mapping[str, Any] | None = None
) -> Config:
    """The configuration in the file at ``path`` (defaults if None), with the overrides ``a.b=c``
    laid over it.

    Args:
        path: of a YAML file.
        overrides: as they are typed.
        values: nested sections with values from Python, which are taken as they are.

    Raises:
        UserError: for a file that cannot be read, an unknown key (naming the nearest one), a value
            of the wrong type or beyond its limits.
    """
    try:
        return load_whole(path, overrides, values)
    except MistakesError as found:
        raise found.errors[0] from None


def load_whole(
    path: str | None, overrides: Sequence[str], values: Mapping[str, Any] | None = None
) -> Config:
    """As :func:`load_config`, but for the error.

    Raises:
        MistakesError: for all that is wrong with the file and the overrides.
    """
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
    """Every setting by its dotted key, in the order of ``config/``."""
    return {setting.key: setting for setting in _iterate_settings(Config, "")}


@cache
def get_sections() -> frozenset[str]:
    """The dotted names that hold settings or further sections: ``pruning``,
    ``pruning.prompts``, …"""
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
"""After so many, the remaining settings are not checked."""


def flatten_tree(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys in nested sections, and their values. A null section, whose lines are
    all comments, has none."""
    for name, value in tree.items():
        key = f"{prefix}{name}"  # YAML reads some names as numbers and the like
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
        reason = (
            error.strerror or type(error).__name__
            if isinstance(error, OSError)
            else "it is not UTF-8 text"
        )
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
    return given


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
        UserError: the key is no setting; or the value is one that pydantic would take, or could not
            name: a boolean for anything else, anything else for a boolean (pydantic reads ``true``
            as 1, and ``yes`` as true), text that no file can hold.
    """
    if key in get_sections():
        first = next(each for each in get_settings() if each.startswith(f"{key}."))
        raise UserError(
            key, format_value(value), "is a section, and holds settings", f"write {first} and so on"
        )
    if key not in get_settings():
        raise _build_unknown_error(key, value)
    setting = get_settings()[key]
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
    """A list where a list is meant and words stand without brackets:
    ``eval.benchmarks=gsm8k,math500``."""
    if not any(get_origin(kind) is tuple for kind in setting.kinds) or not isinstance(
        value, str | int | float
    ):
        return value
    if type(value) in map(_strip_constraints, setting.kinds) or str(value) in _list_words(setting):
        return value
    if not isinstance(value, str) or any(letter in value for letter in "[]{}'\""):
        return [value]
    return [word.strip() for word in value.split(",")]


def _strip_constraints(kind: Any) -> Any:
    """A type without its limits."""
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
    if key in ("rollout.top_p", "rollout.top_k"):
        problem = "is not supported in training, which uses log-probabilities over all tokens"
        return UserError(
            key, format_value(value), problem, f"leave it out; evaluations have {near}"
        )
    return UserError(key, format_value(value), "there is no such setting", remedy)


def find_nearest_settings(key: str) -> list[str]:
    """The settings or the section that an unknown dotted key may have meant, empty if none is like
    it.

    A right name under a wrong section counts as near, however the sections differ; where several
    sections have the name, those closest to the one given are all named. A name of several words
    may stand for its initials: ``optimizer.learning_rate`` for ``optimizer.lr``.
    """
    section, _, leaf = key.lower().rpartition(".")
    initials = f"{section}.{''.join(word[:1] for word in leaf.split('_'))}"
    if initials in get_settings():
        return [initials]

    def compute_likeness(other: str) -> float:
        whole = difflib.SequenceMatcher(None, key.lower(), other).ratio()
        end = difflib.SequenceMatcher(None, leaf, other.rpartition(".")[2]).ratio()
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
    """A value from Python in the types of YAML, as far as it has one of NumPy's or a path."""
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
    """Read an override's value as YAML, in which words stay words: ``run.dir=2024`` and
    ``data.label_key=yes``, and in lists and mappings of words too:
    ``rollout.launch.flags=[--context-length, 2048]``."""
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
        return text


def _convert_errors(error: ValidationError) -> Iterator[UserError]:
    """Yield one error for each setting that is wrong."""
    wrong: dict[str, ErrorDetails] = {}
    for each in error.errors():
        names = [str(part) for part in each["loc"]]
        key = next(key for key in accumulate(names, "{}.{}".format) if key in get_settings())
        # Of a setting that may be of several types, the error that got farthest is of the type that
        # was meant.
        if key not in wrong or len(names) > len(wrong[key]["loc"]):
            wrong[key] = each
    for key, details in wrong.items():
        problem = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if details["type"] == "literal_error":  # the remedy lists them
            problem = "is none of its values"
        if len(details["loc"]) > key.count(".") + 2 and isinstance(
            inside := details["loc"][-1], str
        ):
            problem = f"{inside}: {problem}"
        yield _build_value_error(get_settings()[key], details["input"], problem)


def _build_value_error(setting: Setting, value: object, problem: str) -> UserError:
    default = format_value(
        list(setting.default) if isinstance(setting.default, tuple) else setting.default
    )
    remedy = f"set {setting.key} to {describe_type(setting.type)} (its default is {default})"
    return UserError(setting.key, format_value(value), problem, remedy)


def describe_type(kind: Any) -> str:
    """Values that a type allows, in words."""
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
    """A setting's value as YAML would write it, cut to 80 characters."""
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."


def as_yaml(config: Config) -> str:
    """Every value, under its meaning as a comment; reading the text back gives the same
    configuration."""
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
        many = isinstance(value, tuple | dict)
        plain = {
            name: section.model_dump(mode="json", include={name}, exclude_none=True)[name]
            if many
            else value
        }
        flow = None if many else False
        written = yaml.dump(
            plain, Dumper=Dumper, default_flow_style=flow, allow_unicode=True, width=10**6
        )
        yield from (indent + line for line in written.removesuffix("\n").split("\n"))
