"""The writer of a checkpoint: form of the weights and of the optimizer state. Needs no torch.

Both fit every layout, because they are written parameter by parameter.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.bridge.checkpoint_folder import (
    CHECKSUMS,
    Checksums,
    CorruptCheckpointError,
    convert_corruption_errors,
)
from megatron_dppo.config import Config, LoraConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.fingerprints import compute_weight_fingerprint

STATE = "trainer_state.json"
"""The trainer's file in a checkpoint: trainer's state and writer."""
_KEY = "written_by"
FILES = "files"
"""Key for the fingerprints of the files that the run has read."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Settings of a checkpoint's adapters, and their base policy."""

    rank: int
    alpha: float
    targets: list[str]
    base: str
    """Path of the base policy during training."""
    fingerprint: str
    """Fingerprint of the base policy's weights."""
    setting: str = "path"
    """Setting of ``model`` that named the base policy."""

    @property
    def settings(self) -> LoraConfig:
        """``model.lora`` of the writer."""
        return LoraConfig.model_validate(
            {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}
        )

    @classmethod
    def from_config(cls, model: ModelConfig) -> Adapters | None:
        if not (lora := model.lora).rank:
            return None
        mark = compute_weight_fingerprint(
            model.folder, Path(model.checkpoint) if model.checkpoint else None
        )
        setting, base = (
            ("checkpoint", model.checkpoint) if model.checkpoint else ("path", model.path)
        )
        return cls(lora.rank, lora.alpha, sorted(lora.targets), base, mark, setting)


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """Form of a checkpoint's weights, and settings that its optimizer state depends on."""

    dtype: Literal["fp32", "bf16"]
    optimizer: Literal["plain", "fully_reshardable"]
    """State of the whole shard on every rank, or of the distributed optimizer."""
    adapters: Adapters | None = None
    """``None``: the whole policy is in the checkpoint."""

    @classmethod
    def from_config(cls, config: Config) -> CheckpointFormat:
        kind: Literal["plain", "fully_reshardable"] = (
            "fully_reshardable" if config.optimizer.distributed else "plain"
        )
        return cls(config.model.dtype, kind, Adapters.from_config(config.model))

    @property
    def settings(self) -> dict[str, str]:
        """Settings that a resume must not change, as the user writes them."""
        found = {"model.lora.rank": "0"}
        if lora := self.adapters:
            found["model.lora.rank"] = str(lora.rank)
            found["model.lora.alpha"] = f"{lora.alpha:g}"
            found["model.lora.targets"] = f"[{','.join(lora.targets)}]"
        found["model.dtype"] = self.dtype
        found["optimizer.distributed"] = str(self.optimizer != "plain").lower()
        return found

    @classmethod
    def read(cls, values: dict[str, Any]) -> CheckpointFormat:
        """Return the writer from the output of :func:`write_state`.

        Raises:
            TypeError: if ``values`` have a wrong type.
            KeyError: if a value is missing.
        """
        adapters = values.get("adapters")
        return cls(values["dtype"], values["optimizer"], Adapters(**adapters) if adapters else None)


@dataclass(frozen=True, slots=True)
class StoredState:
    """The trainer's part of a checkpoint."""

    trainer: dict[str, Any]
    """State of rank 0: data order, reward history."""
    files: dict[str, str]
    """Fingerprints of files."""
    writer: CheckpointFormat
    is_checked: bool
    """False for another version's checksums."""


def write_state(place: Path, state: dict[str, Any], checkpoint_format: CheckpointFormat) -> None:
    """Write the trainer's state (JSON-able) and the writer."""
    (place / STATE).write_text(json.dumps({**state, _KEY: asdict(checkpoint_format)}))


def read_state(place: Path) -> StoredState | None:
    """Return the trainer's part of a checkpoint; ``None`` if not written by a run.

    Raises:
        UserError: if the checkpoint is damaged.
    """
    if not os.path.lexists(place / STATE):
        return None
    with convert_corruption_errors(place, "run.dir"):
        # Every run writes checksums, so that missing checksums are damage.
        if not os.path.lexists(place / CHECKSUMS):
            raise CorruptCheckpointError(f"{CHECKSUMS} is missing: damage would not be noticed")
        if (checksums := Checksums.read(place)) is not None:
            checksums.check([STATE])
        try:
            state = dict(json.loads((place / STATE).read_bytes()))
            files = state.pop(FILES, {})
            writer = CheckpointFormat.read(state.pop(_KEY))
            return StoredState(state, files, writer, is_checked=checksums is not None)
        except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{STATE} cannot be read ({error!r})") from error


def check_resumable(place: Path, expected: CheckpointFormat) -> StoredState:
    """Return the trainer's part of a checkpoint that ``expected`` can resume.

    Raises:
        UserError: if the checkpoint is damaged, of an earlier version, or does not fit
            ``expected``.
    """
    if (state := read_state(place)) is None:
        problem = f"{place} has no {STATE}: it is no checkpoint of a run"
        remedy = (
            "Name another run.dir; its weights alone are started from with "
            f"model.checkpoint={place}"
        )
        raise UserError("run.dir", place.parent.parent, problem, remedy)
    written = state.writer

    def build_error(setting: str, value: object, problem: str, remedy: str) -> UserError:
        instead = "or begin another run.dir"
        # Adapters alone are no policy.
        if written.adapters is None:
            instead += f" with its weights alone: model.checkpoint={place}"
        return UserError(setting, value, f"{place} {problem}", f"{remedy}, {instead}")

    if not state.is_checked:
        problem = (
            "is of an earlier version, whose checkpoints this version exports and does not resume"
        )
        raise build_error(
            "run.dir", place.parent.parent, problem, "Finish that run with that version"
        )
    for setting, was in written.settings.items():
        if (is_now := expected.settings.get(setting, was)) != was:
            raise build_error(
                setting,
                is_now,
                f"was written with {setting} = {was}",
                f"Resume with {setting}={was}",
            )
    before = written.adapters
    after = expected.adapters
    if before and after and before.fingerprint != after.fingerprint:
        base = f"model.{before.setting} = {before.base}"
        problem = f"holds adapters of {base}, which had other weights than {after.base} has"
        raise build_error(
            f"model.{before.setting}",
            after.base,
            problem,
            f"Resume with model.{before.setting}={before.base}",
        )
    return state
