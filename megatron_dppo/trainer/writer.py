"""Who wrote a checkpoint: what its weights are, and in which form its optimizer's state is. Needs no torch.

Weights and optimizer state fit every layout: both are written parameter by parameter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, Checksums, DamagedError, damaged, refusing_damage
from megatron_dppo.config import Config, LoraConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.fingerprints import fingerprint

STATE = "trainer_state.json"
"""The trainer's own file in a checkpoint: its state, and the writer."""
_KEY = "written_by"
FILES = "files"
"""In the state: fingerprints of the files that the run has read."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Settings of a checkpoint's adapters, and the policy that they belong to."""

    rank: int
    alpha: float
    targets: list[str]
    base: str
    """Where the policy was that they were trained beside."""
    fingerprint: str
    """Fingerprint of its weights."""
    setting: str = "path"
    """That named it, among the model's."""

    @property
    def settings(self) -> LoraConfig:
        """``model.lora``, as it was."""
        return LoraConfig.model_validate({"rank": self.rank, "alpha": self.alpha, "targets": self.targets})

    @classmethod
    def of(cls, model: ModelConfig) -> Adapters | None:
        if not (lora := model.lora).rank:
            return None
        mark = fingerprint(model.folder, Path(model.checkpoint) if model.checkpoint else None)
        setting, base = ("checkpoint", model.checkpoint) if model.checkpoint else ("path", model.path)
        return cls(lora.rank, lora.alpha, sorted(lora.targets), base, mark, setting)


@dataclass(frozen=True, slots=True)
class Writer:
    """Form of a checkpoint's weights, and settings that its optimizer state depends on."""

    dtype: Literal["fp32", "bf16"]
    optimizer: Literal["plain", "fully_reshardable"]
    """Every rank its whole shard's state, or the distributed optimizer's."""
    adapters: Adapters | None = None
    """None: the whole policy is in the checkpoint."""

    @classmethod
    def of(cls, config: Config) -> Writer:
        kind: Literal["plain", "fully_reshardable"] = "fully_reshardable" if config.optimizer.distributed else "plain"
        return cls(config.model.dtype, kind, Adapters.of(config.model))

    @classmethod
    def read(cls, values: dict[str, Any]) -> Writer:
        """Return the writer from what :func:`write_state` wrote. Earlier versions also wrote the layout.

        Raises:
            TypeError: ``values`` are something else.
            KeyError: a value is missing.
        """
        adapters = values.get("adapters")
        return cls(values["dtype"], values["optimizer"], Adapters(**adapters) if adapters else None)


def write_state(place: Path, state: dict[str, Any], writer: Writer) -> None:
    """Write the trainer's state (JSON-able) and the writer into a checkpoint."""
    (place / STATE).write_text(json.dumps({**state, _KEY: asdict(writer)}))


def read_state(place: Path, now: Writer) -> tuple[dict[str, Any], Writer]:
    """The trainer's state in a checkpoint, and its writer.

    Args:
        place: the checkpoint itself.
        now: who would resume from it.

    Raises:
        UserError: if that cannot go on from this checkpoint.
    """
    if not os.path.lexists(place / STATE):
        problem = f"{place} has no {STATE}: it is no checkpoint of a run"
        remedy = f"Name another run.dir; its weights alone are started from with model.checkpoint={place}"
        raise UserError("run.dir", place.parent.parent, problem, remedy)
    with refusing_damage(place, "run.dir"):
        state = _parse(place)

    def refused(setting: str, value: object, problem: str, remedy: str) -> UserError:
        instead = "or begin another run.dir"
        if not (isinstance(writer := state.get(_KEY), dict) and writer.get("adapters")):  # which are no policy
            instead += f" with its weights alone: model.checkpoint={place}"
        return UserError(setting, value, f"{place} {problem}", f"{remedy}, {instead}")

    if (written := _writer(place, state)) is None:
        problem = "is of an earlier version, and does not say how its optimizer's state was written"
        raise refused("run.dir", place.parent.parent, problem, "Finish that run with that version")
    if written.optimizer == "dp_reshardable":
        problem = "has its optimizer's state in optimizer.checkpoint_format = dp_reshardable, which is no longer read"
        raise refused("run.dir", place.parent.parent, problem, "Finish that run with the version that wrote it")
    if written.optimizer not in get_args(get_type_hints(Writer)["optimizer"]):
        raise damaged(place, "run.dir", f"{STATE} names no form of the optimizer's state: {written.optimizer!r}")
    for setting, was, is_now in _adapters_differ(written.adapters, now.adapters):
        problem = "was written of adapters with " if written.adapters else "was written without adapters, with "
        remedy = f"Resume with model.{setting}={was}"
        raise refused(f"model.{setting}", is_now, f"{problem}model.{setting} = {was}", remedy)
    if written.dtype != now.dtype:
        problem = f"was written with model.dtype = {written.dtype}"
        raise refused("model.dtype", now.dtype, problem, f"Resume with model.dtype={written.dtype}")
    was, is_now = (str(writer.optimizer != "plain").lower() for writer in (written, now))
    if was != is_now:
        problem = f"holds the optimizer's state of optimizer.distributed = {was}, in another form"
        raise refused("optimizer.distributed", is_now, problem, f"Resume with optimizer.distributed={was}")
    return {name: value for name, value in state.items() if name not in (_KEY, FILES)}, written


def files_of(place: Path) -> dict[str, str]:
    """The fingerprints in a checkpoint; none where there is no checkpoint.

    Raises:
        UserError: the checkpoint is damaged.
    """
    if not (place / STATE).is_file():
        return {}
    with refusing_damage(place, "run.dir"):
        return dict(_parse(place).get(FILES, {}))


def writer_in(place: Path) -> Writer | None:
    """Who wrote a checkpoint; None where no run did, or one of an earlier version.

    Raises:
        UserError: the checkpoint is damaged.
    """
    if not (place / STATE).is_file():
        return None
    with refusing_damage(place, "run.dir"):
        return _writer(place, _parse(place))


def _writer(place: Path, state: Mapping[str, Any]) -> Writer | None:
    try:
        return Writer.read(state[_KEY]) if _KEY in state else None
    except (AttributeError, KeyError, TypeError) as error:
        raise damaged(place, "run.dir", f"{STATE} does not say who wrote it ({error})") from error


def _adapters_differ(written: Adapters | None, now: Adapters | None) -> Iterator[tuple[str, str, str]]:
    """Setting, old value and new value of each difference that changes a checkpoint's weights."""
    if written is None or now is None:
        if written is not now:
            yield "lora.rank", str(written.rank if written else 0), str(now.rank if now else 0)
        return
    for name in ("rank", "alpha", "targets"):
        was, is_now = getattr(written, name), getattr(now, name)
        if was != is_now:
            yield f"lora.{name}", _as_typed(was), _as_typed(is_now)
    if written.fingerprint != now.fingerprint:
        other = now.base if now.base != written.base else f"{now.base} (its weights have changed)"
        yield written.setting, written.base, other


def _as_typed(value: float | list[str]) -> str:
    """As it is written on the command line."""
    return f"[{','.join(value)}]" if isinstance(value, list) else f"{value:g}"


def _parse(place: Path) -> dict[str, Any]:
    if (checksums := Checksums.read(place)) is None:  # every run writes them
        raise DamagedError(f"{CHECKSUMS} is missing, or is of an earlier version: damage would not be noticed")
    checksums.check([STATE])
    try:
        state = json.loads((place / STATE).read_bytes())
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{STATE} cannot be read ({error})") from error
    return state
