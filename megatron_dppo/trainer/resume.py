"""Which runs can go on from a checkpoint. Needs no torch, so that it can be asked before any rank starts.

The weights fit every layout. The optimizer's state follows them where it was written parameter by parameter; written as
it lies in the distributed optimizer's buffers it fits no other cut of the policy, and no other order of its parameters,
which Megatron would not notice.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_dppo.bridge.checkpoint_folder import damaged, refusing_damage
from megatron_dppo.bridge.checksums import Checksums, DamagedError
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError

STATE = "trainer_state.json"
"""The trainer's own file in a checkpoint: its state, and the writer."""
_KEY = "written_by"


@dataclass(frozen=True, slots=True)
class Writer:
    """What the optimizer's state in a checkpoint depends on."""

    tp: int
    pp: int
    dtype: str
    optimizer: Literal["plain", "fully_reshardable", "dp_reshardable"]
    """Every rank its whole shard's state, or the distributed optimizer's, in one of its formats."""
    spec: str | None
    """Layers, which have their parameters in another order each; None before a rank has chosen them."""

    @classmethod
    def of(cls, config: Config, spec: str | None = None) -> Writer:
        optimizer, layout = config.optimizer, config.layout
        kind = optimizer.checkpoint_format if optimizer.distributed else "plain"
        return cls(layout.tp, layout.pp, config.model.dtype, kind, spec)


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
    weights_alone = f"or begin another run.dir with its weights alone: model.checkpoint={place}"
    if _KEY not in state:
        problem = f"{place} is of an earlier version, and does not say how its optimizer's state was written"
        raise UserError("run.dir", place.parent.parent, problem, f"Finish that run with that version, {weights_alone}")
    try:
        written = Writer(**state.pop(_KEY))
    except TypeError as error:
        raise damaged(place, "run.dir", f"{STATE} does not say who wrote it ({error})") from error
    if written.dtype != now.dtype:
        problem = f"{place} was written with model.dtype = {written.dtype}"
        raise UserError("model.dtype", now.dtype, problem, f"Resume with model.dtype={written.dtype}, {weights_alone}")
    distributed = {writer: writer.optimizer != "plain" for writer in (written, now)}
    if distributed[written] != distributed[now]:
        was, is_now = str(distributed[written]).lower(), str(distributed[now]).lower()
        problem = f"{place} holds the optimizer's state of optimizer.distributed = {was}, in another form"
        raise UserError(
            "optimizer.distributed", is_now, problem, f"Resume with optimizer.distributed={was}, {weights_alone}"
        )
    if written.optimizer == "dp_reshardable":
        _check_cut(place, written, now)
    return state, written


def _parse(place: Path) -> dict[str, Any]:
    if (checksums := Checksums.read(place)) is not None:
        checksums.check_file(STATE)
    try:
        state = json.loads((place / STATE).read_bytes())
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{STATE} cannot be read ({error})") from error
    return state


def _check_cut(place: Path, written: Writer, now: Writer) -> None:
    problem = f"{place} has its optimizer's state in optimizer.checkpoint_format = dp_reshardable, written at %s"
    remedy = (
        "Resume with %s; a checkpoint that such a run writes with optimizer.checkpoint_format=fully_reshardable "
        "then resumes in any layout"
    )
    if (written.tp, written.pp) != (now.tp, now.pp):
        ours, theirs = (f"tp {writer.tp} x pp {writer.pp}" for writer in (now, written))
        problem = f"{problem % theirs}, and resumes at that tp and pp only (dp may change)"
        raise UserError("layout", ours, problem, remedy % f"layout.tp={written.tp} layout.pp={written.pp}")
    if now.spec and written.spec != now.spec:
        problem = f"{problem % f'model.spec = {written.spec}'}, whose parameters come in another order"
        raise UserError("model.spec", now.spec, problem, remedy % f"model.spec={written.spec}")
