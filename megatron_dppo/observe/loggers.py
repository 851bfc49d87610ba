"""Where the rows of ``metrics.jsonl`` go besides: TensorBoard, Weights & Biases, MLflow, Trackio
(``run.loggers``).

Each library is imported where it is named alone. None needs a network: without a server or an
account, which each finds in its own environment variables, a run's rows stay in ``run.dir``.

TensorBoard hides what it was told of steps that are taken again after a resume. The others forget
nothing, so ``loggers.json`` has the run that they made and the last step that they were given::

    {"wandb": {"run": "6f1c0a4e", "step": 40}}

A resumed run goes on in theirs, behind that step, and no step is there twice. What they lack,
because they were named later or could not be reached, they are given from ``metrics.jsonl``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_dppo.errors import UserError, install_command, remove_passwords
from megatron_dppo.observe.private import PRIVATE, mask_secrets
from megatron_dppo.process.files import replace_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Row = Mapping[str, float]
STATE = "loggers.json"
PROJECT = "megatron_dppo"
"""Project of the three, unless their own variable names another."""
_PARAMETERS_AT_ONCE = 100
_LONGEST_PARAMETER = 6000
"""Most that MLflow takes."""


class Sink(Protocol):
    """A library's log of a run's rows."""

    run: str
    """By which it finds the run again."""

    def write(self, step: int, row: Row) -> None: ...

    def close(self, *, finished: bool) -> None: ...


def _open_tensorboard(folder: Path, resume_step: int) -> SummaryWriter:
    """Event files in ``tensorboard/``."""
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard hides values of earlier event files from ``purge_step`` on: these steps are taken
    # again.
    first = resume_step + 1 if resume_step > 0 else 0
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first)


class _WeightsAndBiases:
    """A run of Weights & Biases, or of Trackio, whose runs have the same methods.

    Args:
        run: by which the library finds it again.
        log: the library's object.
        failed: arguments of ``finish`` for a run that did not reach its end.
    """

    def __init__(self, run: str, log: Any, failed: Mapping[str, int]) -> None:
        self.run = run
        self._log = log
        self._failed = failed

    def write(self, step: int, row: Row) -> None:
        self._log.log(dict(row), step=step)

    def close(self, *, finished: bool) -> None:
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # where a log is shown is printed at the end of a run
            self._log.finish(**({} if finished else self._failed))


def _open_wandb(folder: Path, settings: Mapping[str, Any], run: str | None) -> Sink:
    """``wandb/``; rows are uploaded if there are credentials and WANDB_MODE does not say
    otherwise."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    known = "WANDB_MODE" in os.environ or wandb.login(prompt=False)
    log = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=folder.name,
        id=run,
        resume="allow",
        dir=folder,
        mode=None if known else "offline",
        config=dict(settings),
        # The metadata are command lines and addresses, the console is what a rank prints.
        settings=wandb.Settings(
            console="off", disable_git=True, save_code=False, silent=True, x_disable_meta=True
        ),
    )
    return _WeightsAndBiases(log.id, log, {"exit_code": 1})


def _open_trackio(folder: Path, settings: Mapping[str, Any], run: str | None) -> Sink:
    """``trackio/``, or the folder, the Space or the server of Trackio's own variables."""
    os.environ.setdefault("TRACKIO_DIR", str(folder.absolute() / "trackio"))
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    name = run or f"{folder.name}-{secrets.token_hex(3)}"  # Trackio finds a run by its name
    with contextlib.redirect_stdout(io.StringIO()):
        log = trackio.init(
            project, name, config=dict(settings), resume="allow", embed=False, auto_log_cpu=False
        )
    return _WeightsAndBiases(name, log, {})


class _MLflow:
    """``mlflow.db``, or the server of MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], run: str | None) -> None:
        for name, value in (
            ("DISABLE_TELEMETRY", "true"),
            ("HTTP_REQUEST_MAX_RETRIES", "1"),
            ("HTTP_REQUEST_TIMEOUT", "20"),
        ):
            os.environ.setdefault(
                f"MLFLOW_{name}", value
            )  # a step is not to wait for a server for minutes
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = Metric
        database = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or database)
        if run is not None:
            self._client.update_run(run, status="RUNNING")
            self.run = run
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self.run = self._client.create_run(experiment, run_name=folder.name).info.run_id
        given = [Param(key, str(value)[:_LONGEST_PARAMETER]) for key, value in settings.items()]
        for first in range(0, len(given), _PARAMETERS_AT_ONCE):
            self._client.log_batch(self.run, params=given[first : first + _PARAMETERS_AT_ONCE])

    def write(self, step: int, row: Row) -> None:
        now = int(time.time() * 1000)
        names = {
            key: re.sub(r"[^\w\-. /]", "_", key.replace("@", "_at_")) for key in row
        }  # which MLflow does not take
        self._client.log_batch(
            self.run, [self._metric(names[key], value, now, step) for key, value in row.items()]
        )

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.run, "FINISHED" if finished else "KILLED")


_OPEN: Mapping[str, Callable[[Path, Mapping[str, Any], str | None], Sink]] = {
    "wandb": _open_wandb,
    "mlflow": _MLflow,
    "trackio": _open_trackio,
}
"""Makers of sinks, from a run's folder, its settings, and the run that is resumed there, if any."""


def check_loggers(names: Sequence[str]) -> None:
    """
    Raises:
        UserError: a package is missing.
    """
    for name in names:
        if name in _OPEN and importlib.util.find_spec(name) is None:
            remedy = f"Install it: {install_command(name)}"
            raise UserError(
                "run.loggers", name, f"{name} is not installed in this environment", remedy
            )


class Loggers:
    """Gives every row to every logger once.

    Args:
        names: ``run.loggers``.
        folder: of the run.
        resume_step: as of ``StepLog``.
        past: rows of steps up to there, of which a logger is given what it lacks.
        settings: of the run, by their dotted keys.
        log: takes words for the log.

    Raises:
        UserError: a logger cannot be opened.
    """

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        *,
        resume_step: int,
        past: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        log: Callable[[str], None],
    ) -> None:
        check_loggers(names)
        self._file = folder / STATE
        self._log = log
        self._events = _open_tensorboard(folder, resume_step) if "tensorboard" in names else None
        if resume_step <= 0:
            self._file.unlink(missing_ok=True)
        self._state = _read_state(self._file)
        self._sinks: dict[str, Sink] = {}
        self._owed: dict[str, list[Mapping[str, Any]]] = {}
        """Rows that a logger was not given yet, by its name."""
        shown = {
            key: mask_secrets(key, value)
            for key, value in settings.items()
            if not key.startswith(PRIVATE)
        }
        for name in (name for name in names if name in _OPEN):
            known = self._state.get(name)
            try:
                self._sinks[name] = sink = _OPEN[name](
                    folder, shown, known["run"] if known else None
                )
            except Exception as error:  # each library has its own
                problem = (
                    f"cannot be opened ({type(error).__name__}: {remove_passwords(str(error))})"
                )
                remedy = (
                    "Check its server and its credentials, or remove it: metrics.jsonl has every "
                    "row"
                )
                raise UserError("run.loggers", name, problem, remedy) from error
            self._state[name] = {"run": sink.run, "step": known["step"] if known else -1}
            self._owed[name] = [row for row in past if row["step"] > self._state[name]["step"]]

    def write(self, step: int, row: Row) -> None:
        """Give a row to all. A logger that fails is given it again with the next one, and it is
        said."""
        if self._events:
            for key, value in row.items():
                self._events.add_scalar(key, value, step)
            self._events.flush()
        for name, sink in self._sinks.items():
            if step <= self._state[name]["step"]:
                continue
            owed = self._owed[name]
            owed.append({"step": step, **row})
            try:
                while owed:
                    self._send_row(name, sink, owed[0])
                    owed.pop(0)
            except Exception as error:
                problem = remove_passwords(f"{type(error).__name__}: {error}")
                self._log(
                    f"{name} did not accept a row; the next row's write repeats it ({problem})"
                )

    def close(self, *, finished: bool) -> None:
        """Have all write down what they hold. Safe to call twice."""
        sinks = self._sinks
        events = self._events
        self._sinks = {}
        self._events = None
        if events:
            events.close()
        for name, sink in sinks.items():
            try:
                sink.close(finished=finished)
            except Exception as error:
                self._log(
                    f"{name} was not closed "
                    f"({remove_passwords(f'{type(error).__name__}: {error}')})"
                )

    def _send_row(self, name: str, sink: Sink, row: Mapping[str, Any]) -> None:
        before = self._state[name]
        # Written down first: a kill in between loses a row there, and repeats none.
        self._save_state(name, before | {"step": row["step"]})
        try:
            sink.write(row["step"], {key: value for key, value in row.items() if key != "step"})
        except Exception:
            self._save_state(name, before)
            raise

    def _save_state(self, name: str, state: Mapping[str, Any]) -> None:
        self._state[name] = dict(state)
        replace_text(self._file, json.dumps(self._state) + "\n")


def _read_state(file: Path) -> dict[str, dict[str, Any]]:
    """Each logger's run and last step; empty if the file is absent or damaged: loggers then make
    new runs."""
    try:
        stored = json.loads(file.read_text())
        return {
            name: {"run": str(entry["run"]), "step": int(entry["step"])}
            for name, entry in stored.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
