"""Whether a run can go on from its last checkpoint, and by which settings its steps were taken.

Needs no torch, so that it can be asked before any rank starts.

``config.yaml`` has the settings that are in force, ``config_history.jsonl`` a line for each time that they changed::

    {"step": 0, "version": "0.1", "settings": {"loss.name": "grpo", "run.seed": 1, …}}
    {"step": 40, "version": "0.1", "settings": {"loss.name": "grpo", …, "optimizer.lr": 1e-06}}

says that steps 1 to 40 were taken by the first, and those from 41 on by the second. The policy, the data, the reward,
the loss, the pruning and the seed decide what a result is a result of. They do not change on the way unless
``run.resume`` says so, since the old result would bear a new name.

The weights of a checkpoint fit every layout. The optimizer's state follows them where it was written parameter by
parameter. Written as it lies in the distributed optimizer's buffers, it fits no other cut of the policy, and no other
order of its parameters, which Megatron would not notice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml

from megatron_dppo import __version__
from megatron_dppo.bridge.checkpoint_folder import damaged, latest_checkpoint, refusing_damage, step_of
from megatron_dppo.bridge.checksums import Checksums, DamagedError
from megatron_dppo.bridge.fingerprint import fingerprint
from megatron_dppo.config import Config, ModelConfig
from megatron_dppo.config.loss import is_server
from megatron_dppo.errors import UserError
from megatron_dppo.process.files import replacing_file
from megatron_dppo.settings import as_yaml, settings, short

HISTORY, IN_FORCE = "config_history.jsonl", "config.yaml"
WARM_UP = "sft.json"
"""Beside a policy that ``sft`` has written: its settings then."""
Settings = Mapping[str, Any]

RESULTS = (
    "model.path",
    "model.checkpoint",
    "model.lora.",
    "data.",
    "reward.",
    "loss.",
    "pruning.",
    "rollout.temperature",
    "rollout.roles",
    "run.seed",
)
"""Settings that decide what a result is a result of, all but ``LIMITS``."""
LIMITS = ("reward.timeout_s", "reward.workers", "reward.memory_mib", "reward.max_failures")
PROMPTS = ("data.", "run.seed")
"""What the order of the prompts depends on, and what is known of each of them."""
PLACES = ("model.path", "model.checkpoint", "loss.distillation.teacher", "data.train", "data.rollouts", "data.eval")
"""What settings begin with that name files and folders, which have several names."""
OF_THE_START = ("run.dir", "run.resume")
"""Settings that say nothing of a step."""
STATE = "trainer_state.json"
"""The trainer's own file in a checkpoint: its state, and the writer."""
_KEY = "written_by"


@dataclass(frozen=True, slots=True)
class Entry:
    """Settings, and after how many steps they came into force."""

    step: int
    settings: Settings


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is another one than before."""

    key: str
    before: Any
    now: Any

    @property
    def of_results(self) -> bool:
        return self.key.startswith(RESULTS) and self.key not in LIMITS

    def __str__(self) -> str:
        return f"{self.key} = {short(self.now)} (was {short(self.before)})"


def flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted key, as JSON has it."""
    return dict(json.loads(json.dumps(dict(config.leaves()), default=dict)))


def read_history(folder: Path) -> list[Entry]:
    """The settings of a run's steps, oldest first. A run of an older version has left its last ones alone."""
    try:
        lines = (folder / HISTORY).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    if entries := [entry for line in lines if (entry := _entry(line)) is not None]:
        return entries
    try:
        text = (folder / IN_FORCE).read_text(encoding="utf-8", errors="replace")
        tree = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # in C, ten times as fast
    except (OSError, ValueError, yaml.YAMLError):
        return []
    return [Entry(0, _leaves(tree))] if isinstance(tree, dict) else []


def changes(before: Settings, now: Settings) -> list[Change]:
    """Settings that differ. One that an older version did not know had its default. One that this version does not know
    is left out."""
    found = []
    for key, setting in settings().items():
        default = list(setting.default) if isinstance(setting.default, tuple) else setting.default
        was, is_now = before.get(key, default), now.get(key, default)
        if key not in OF_THE_START and was != is_now and not (key.startswith(PLACES) and _same_place(was, is_now)):
            found.append(Change(key, was, is_now))
    return found


def changed_since(folder: Path, step: int, config: Config) -> list[Change]:
    """Settings that differ from those by which the folder's run has taken its steps up to ``step``."""
    entries = [entry for entry in read_history(folder) if entry.step < step]
    return changes(entries[-1].settings, flat(config)) if entries else []


def same_prompts(folder: Path, step: int, config: Config) -> bool:
    """Whether the run goes on with the prompts, and the draws, that it had."""
    return not any(change.key.startswith(PROMPTS) for change in changed_since(folder, step, config))


def check_resume(config: Config) -> None:
    """
    Raises:
        UserError: the run cannot go on from its last checkpoint; or it could, and its results would be those of other
            settings, which ``run.resume`` does not allow.
    """
    folder = Path(config.run.dir)
    place = latest_checkpoint(folder / "checkpoints")
    if place is None or (step := step_of(place)) is None:
        return
    read_state(place, Writer.of(config))
    other = [change for change in changed_since(folder, step, config) if change.of_results]
    if other and config.run.resume != "anyway":
        raise UserError(
            "run.dir",
            folder,
            "\n".join([f"holds {step} steps that were taken with other settings:", *map(str, other)]),
            "Name another run.dir; or give those settings as they were; or set run.resume=anyway to go on with the new "
            "ones, which reports then tell",
        )


def record(folder: Path, step: int, config: Config) -> None:
    """Write down that the steps after ``step`` are taken by these settings. What was in force for steps that are taken
    again is forgotten."""
    entries = [entry for entry in read_history(folder) if entry.step < step]
    now = flat(config)
    if not entries or changes(entries[-1].settings, now):
        entries.append(Entry(step if entries else 0, now))
    lines = [{"step": entry.step, "version": __version__, "settings": dict(entry.settings)} for entry in entries]
    for name, text in (HISTORY, "".join(json.dumps(line) + "\n" for line in lines)), (IN_FORCE, as_yaml(config)):
        with replacing_file(folder / name) as partial:
            partial.write_text(text, encoding="utf-8")


def check_warm_up(config: Config) -> None:
    """
    Raises:
        UserError: the policy that ``sft`` is to start from is one that it has warmed up already.
    """
    file = config.model.folder / WARM_UP
    if config.run.resume == "anyway" or config.model.checkpoint is not None or not file.exists():
        return
    try:
        source = str(json.loads(file.read_text(encoding="utf-8"))["model.path"])
    except (OSError, ValueError, KeyError, TypeError):
        source = "THE_INITIAL_POLICY"
    raise UserError(
        "model.path",
        config.model.path,
        f"is a policy that sft has warmed up already, from {source}",
        f"Set model.path={source} to warm that one up again, or run.resume=anyway to go on with this one",
    )


def record_warm_up(out: Path, config: Config) -> None:
    """Write down beside a warmed-up policy what it comes from."""
    with replacing_file(out / WARM_UP) as partial:
        partial.write_text(json.dumps(flat(config), indent=2) + "\n", encoding="utf-8")


def _entry(line: str) -> Entry | None:
    try:
        row = json.loads(line)
        return Entry(int(row["step"]), dict(row["settings"]))
    except (ValueError, KeyError, TypeError):
        return None


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        found |= _leaves(value, key + ".") if isinstance(value, dict) and key not in settings() else {key: value}
    return found


def _same_place(one: Any, other: Any) -> bool:
    """Whether two names, if they are such, are of one file or folder, or both of servers, whose addresses change."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return all(one[name] == other[name] or _same_place(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(a == b or _same_place(a, b) for a, b in zip(one, other, strict=True))
    if not (isinstance(one, str) and isinstance(other, str)):
        return False
    return (is_server(one) and is_server(other)) or Path(one).resolve() == Path(other).resolve()


CUT = ("tp", "pp", "ep", "etp", "vpp", "first_stage_layers", "last_stage_layers")
"""Settings of the layout that say which parameters a rank has."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """What the adapters in a checkpoint belong to, and how they are read."""

    rank: int
    alpha: float
    targets: list[str]
    base: str
    """Where the policy was that they were trained beside."""
    fingerprint: str
    """Of its weights."""
    setting: str = "path"
    """That named it, among the model's."""

    @classmethod
    def of(cls, model: ModelConfig) -> Adapters | None:
        if not (lora := model.lora).rank:
            return None
        mark = fingerprint(model.folder, Path(model.checkpoint) if model.checkpoint else None)
        setting, base = ("checkpoint", model.checkpoint) if model.checkpoint else ("path", model.path)
        return cls(lora.rank, lora.alpha, sorted(lora.targets), base, mark, setting)


@dataclass(frozen=True, slots=True)
class Writer:
    """What a checkpoint's weights are, and what the optimizer's state in it depends on."""

    tp: int
    pp: int
    dtype: str
    optimizer: Literal["plain", "fully_reshardable", "dp_reshardable"]
    """Every rank its whole shard's state, or the distributed optimizer's, in one of its formats."""
    spec: str | None
    """Layers, which have their parameters in another order each; None before a rank has chosen them."""
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    adapters: Adapters | None = None
    """None: the whole policy is in the checkpoint."""

    @classmethod
    def of(cls, config: Config, spec: str | None = None) -> Writer:
        optimizer, layout = config.optimizer, config.layout
        kind = optimizer.checkpoint_format if optimizer.distributed else "plain"
        cut = {name: getattr(layout, name) for name in CUT}
        adapters = Adapters.of(config.model)
        return cls(dtype=config.model.dtype, optimizer=kind, spec=spec, adapters=adapters, **cut)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Writer:
        """From what :func:`write_state` wrote.

        Raises:
            TypeError: if it is something else.
        """
        adapters = values.get("adapters")
        return cls(**{**values, "adapters": Adapters(**adapters) if adapters else None})


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
        if _holds_policy(state):
            instead += f" with its weights alone: model.checkpoint={place}"
        return UserError(setting, value, f"{place} {problem}", f"{remedy}, {instead}")

    if _KEY not in state:
        problem = "is of an earlier version, and does not say how its optimizer's state was written"
        raise refused("run.dir", place.parent.parent, problem, "Finish that run with that version")
    try:
        written = Writer.read(state[_KEY])
    except TypeError as error:
        raise damaged(place, "run.dir", f"{STATE} does not say who wrote it ({error})") from error
    if written.optimizer not in get_args(get_type_hints(Writer)["optimizer"]):
        raise damaged(place, "run.dir", f"{STATE} names no form of the optimizer's state: {written.optimizer!r}")
    for setting, was, is_now in _adapters_differ(written.adapters, now.adapters):
        problem = "was written of adapters with " if written.adapters else "was written without adapters, with "
        raise refused(
            f"model.{setting}", is_now, f"{problem}model.{setting} = {was}", f"Resume with model.{setting}={was}"
        )
    if written.dtype != now.dtype:
        problem = f"was written with model.dtype = {written.dtype}"
        raise refused("model.dtype", now.dtype, problem, f"Resume with model.dtype={written.dtype}")
    was, is_now = (str(writer.optimizer != "plain").lower() for writer in (written, now))
    if was != is_now:
        problem = f"holds the optimizer's state of optimizer.distributed = {was}, in another form"
        raise refused("optimizer.distributed", is_now, problem, f"Resume with optimizer.distributed={was}")
    if written.optimizer == "dp_reshardable":
        _check_cut(place, written, now)
    return {name: value for name, value in state.items() if name != _KEY}, written


def _holds_policy(state: Mapping[str, Any]) -> bool:
    """Whether the checkpoint of a trainer's state has weights that a run can start from: adapters alone are none."""
    writer = state.get(_KEY)
    return not (isinstance(writer, dict) and writer.get("adapters"))


def _adapters_differ(written: Adapters | None, now: Adapters | None) -> Iterator[tuple[str, str, str]]:
    """The setting, what it was and what it is now, of whatever makes other weights of a checkpoint."""
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
    wanted = {name: getattr(written, name) for name in CUT}
    if wanted != (ours := {name: getattr(now, name) for name in CUT}):
        named = [name for name in CUT if name in ("tp", "pp") or wanted[name] != ours[name]]
        now_said, then = (" x ".join(f"{name} {cut[name]}" for name in named) for cut in (ours, wanted))
        problem = f"{problem % then}, and resumes at that only (dp may change)"
        settings = " ".join(f"layout.{name}={'null' if wanted[name] is None else wanted[name]}" for name in named)
        raise UserError("layout", now_said, problem, remedy % settings)
    if now.spec and written.spec != now.spec:
        problem = f"{problem % f'model.spec = {written.spec}'}, whose parameters come in another order"
        raise UserError("model.spec", now.spec, problem, remedy % f"model.spec={written.spec}")
