"""Names that functions written for slime import from it and are given by it.

=====================================  ==========================================================================
``slime.utils.types``                  ``Sample``
``slime.utils.http_utils``             ``post(url, payload)``, which shows the run's servers their secret
``slime.rollout.sglang_rollout``       ``GenerateState(args)``, of which ``tokenizer`` and ``args``
=====================================  ==========================================================================

These stand in for slime's own: those would look for a cluster of slime's. The modules of the table have no other names
here, and an import of one says so (``MISSING``).
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MISSING = "Of slime's own names only Sample, post and GenerateState are here: bring the rest along in files of yours"
Post = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
poster: ContextVar[Post] = ContextVar("poster")
""":func:`post` for the completion that is being generated."""


class Arguments(SimpleNamespace):
    """slime's command line: those of its options that have a counterpart in a run here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the function reads args.{name}, an option of slime's without counterpart here")


class Status(Enum):
    """How a sample stands."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


ENDS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""By SGLang's reasons to finish."""


@dataclass
class Sample:
    """A completion, on its way through a function of slime's form."""

    prompt: Any = None
    """As the policy reads it: slime renders prompts, too, before any function sees them."""
    response: str = ""
    label: Any = None
    """Text, or the object or list that the row has."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's extra columns."""
    reward: Any = None
    index: int | None = None
    group_index: int | None = None
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    response_length: int = 0
    """Tokens."""
    loss_mask: list[int] | None = None
    """Mask of the response: 1 for tokens that the policy sampled, 0 for those that it was given; None: all ones."""
    rollout_log_probs: list[float] | None = None
    """Log-probabilities of the response; not read if the mask is 0."""
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    session_id: str | None = None
    Status = Status

    def append_response_tokens(
        self,
        args: Any,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str = "",
    ) -> None:
        """Take in what the policy sampled, or, not ``trainable``, what it was given."""
        mask = [1] * self.response_length if self.loss_mask is None else self.loss_mask
        given = [0.0] * len(tokens) if log_probs is None else list(log_probs)
        self.tokens = [*self.tokens, *tokens]
        self.loss_mask = [*mask, *[int(trainable)] * len(tokens)]
        self.rollout_log_probs = [*(self.rollout_log_probs or ()), *given]
        self.response_length += len(tokens)
        self.response += text
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Take in how a request ended, from SGLang's answer to it."""
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = ENDS[meta_info["finish_reason"]["type"]]


async def post(url: str, payload: Mapping[str, Any], *_: Any, **__: Any) -> Any:
    """A server's answer, read as JSON. Further arguments, of retries and headers, are the run's own business."""
    return await poster.get()(url, payload)


@functools.cache
def _tokenizer(path: str) -> Any:
    from megatron_dppo.data.tokenizer import load_tokenizer

    return load_tokenizer(path)


class GenerateState:
    """The tokenizer of the policy."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self.tokenizer = _tokenizer(args.hf_checkpoint)


NAMES: Mapping[str, Mapping[str, Any]] = {
    "slime": {},
    "slime.utils": {},
    "slime.utils.types": {"Sample": Sample},
    "slime.utils.http_utils": {"post": post},
    "slime.rollout": {},
    "slime.rollout.sglang_rollout": {"GenerateState": GenerateState},
}


@contextmanager
def standing_in_for_slime() -> Iterator[None]:
    """Have imports of slime's modules find those of the table, as long as a user's function is imported.

    Where slime is installed, its other modules are found too, and ``sys.modules`` is afterwards as it was before. Where
    it is not, the modules stay, for functions that import them when they are called.
    """
    before = _slimes_modules()
    for name in before:
        del sys.modules[name]
    spec = importlib.util.find_spec("slime")
    folders = [folder for folder in (spec and spec.submodule_search_locations) or () if Path(folder, "utils").is_dir()]
    for name, values in NAMES.items():
        module = ModuleType(name, "In place of slime's own.")
        vars(module).update(values)
        module.__spec__ = ModuleSpec(name, None, is_package=not values)
        if not values:
            module.__path__ = [str(Path(folder, *name.split(".")[1:])) for folder in folders]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        if folders:
            for name in _slimes_modules():
                del sys.modules[name]
            sys.modules.update(before)


def _slimes_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "slime"}
