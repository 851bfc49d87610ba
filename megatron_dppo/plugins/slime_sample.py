"""What functions written for slime are given: its ``Sample``, as far as they read and set it, and its ``args``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any


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
    """Of the response: 1 for tokens that the policy sampled, 0 for those that it was given; None: all ones."""
    rollout_log_probs: list[float] | None = None
    """Of the response; what stands where the mask is 0 is not read."""
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
