"""Send rows of ``metrics.jsonl`` to TensorBoard, Weights & Biases, MLflow and Trackio.

Only libraries named in ``run.loggers`` are imported. No library needs a network: the library's
environment variables give a server or account; else rows stay in ``run.dir``.

TensorBoard hides rows of repeated steps. Other loggers keep all rows, so ``loggers.json`` has the
logger's run and last step::

    {"wandb": {"run": "6f1c0a4e", "step": 40}}

A resumed run continues the logger's run after this step. Rows that a logger lacks, because the
logger was added later or was unreachable, come from ``metrics.jsonl``.
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
"""Default project of Weights & Biases, MLflow and Trackio."""
_PARAMETERS_AT_ONCE = 100
_LONGEST_PARAMETER = 6000
"""Limits of MLflow: parameters per call, characters of a parameter."""


class Sink(Protocol):
    """Open run of a logging library, which receives rows."""

    run: str
    """Id of the run in the library, kept by a resumed run."""

    def write(self, step: int, row: Row) -> None: ...

    def close(self, *, finished: bool) -> None: ...


def _open_tensorboard(folder: Path, resume_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    # A resumed run repeats steps: TensorBoard hides the values that earlier event files have for
    # steps from ``purge_step`` on.
    first = resume_step + 1 if resume_step > 0 else 0
    return SummaryWriter(str(folder / "tensorboard"), purge_step=first)


class _WeightsAndBiases:
    """Run of Weights & Biases or Trackio.

    Args:
        run: id of the run.
        log: run object of the library.
        failed: arguments of ``finish`` for an incomplete run.
    """

    def __init__(self, run: str, log: Any, failed: Mapping[str, int]) -> None:
        self.run = run
        self._log = log
        self._failed = failed

    def write(self, step: int, row: Row) -> None:
        self._log.log(dict(row), step=step)

    def close(self, *, finished: bool) -> None:
        # Discard output, because the libraries print the address of the log at the end.
        with contextlib.redirect_stdout(io.StringIO()):
            self._log.finish(**({} if finished else self._failed))


def _open_wandb(folder: Path, settings: Mapping[str, Any], run: str | None) -> Sink:
    """Open ``wandb/``; upload if credentials exist and WANDB_MODE permits."""
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
        # Do not send metadata (command lines, addresses) or the console (a rank's output).
        settings=wandb.Settings(
            console="off", disable_git=True, save_code=False, silent=True, x_disable_meta=True
        ),
    )
    return _WeightsAndBiases(log.id, log, {"exit_code": 1})


def _open_trackio(folder: Path, settings: Mapping[str, Any], run: str | None) -> Sink:
    """Open ``trackio/``, or the place in Trackio's environment variables."""
    os.environ.setdefault("TRACKIO_DIR", str(folder.absolute() / "trackio"))
    import trackio

    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    # Make the name unique, because Trackio finds a run by name.
    name = run or f"{folder.name}-{secrets.token_hex(3)}"
    with contextlib.redirect_stdout(io.StringIO()):
        log = trackio.init(
            project, name, config=dict(settings), resume="allow", embed=False, auto_log_cpu=False
        )
    return _WeightsAndBiases(name, log, {})


class _MLflow:
    """Run in ``mlflow.db``, or on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], run: str | None) -> None:
        # Limit retries and timeouts, because a step must not wait for a server for minutes.
        for name, value in (
            ("DISABLE_TELEMETRY", "true"),
            ("HTTP_REQUEST_MAX_RETRIES", "1"),
            ("HTTP_REQUEST_TIMEOUT", "20"),
        ):
            os.environ.setdefault(f"MLFLOW_{name}", value)
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
        # Replace characters that MLflow refuses.
        names = {key: re.sub(r"[^\w\-. /]", "_", key.replace("@", "_at_")) for key in row}
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
"""Open a sink from folder, settings, and the logger's run to resume, if any."""


def check_loggers(names: Sequence[str]) -> None:
    """Raise UserError if the package of a logger is missing."""
    for name in names:
        if name in _OPEN and importlib.util.find_spec(name) is None:
            remedy = f"Install it: {install_command(name)}"
            raise UserError(
                "run.loggers", name, f"{name} is not installed in this environment", remedy
            )


class Loggers:
    """Loggers of a run. Every logger receives every row once.

    Args:
        resume_step: finished steps of the resumed checkpoint, see ``StepLog``.
        past: rows up to ``resume_step``, for loggers that lack rows.
        settings: settings by dotted key.

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
        """Rows not yet sent, by logger."""
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
            # Each library raises exceptions of the library's own.
            except Exception as error:
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
        """Send a row to all loggers. After a failure, a message goes to the run's log, and the row
        is sent again with the next row."""
        if self._events:
            for key, value in row.items():
                self._events.add_scalar(key, value, step)
            self._events.flush()
        for name, sink in self._sinks.items():
            if step <= self._state[name]["step"]:
                continue
            # Keep the order of steps: send earlier rows first.
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
        """Flush and close all loggers. Safe to call twice."""
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
        # Save the step first: a kill in between loses a row of the logger, and repeats no row.
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
    """Return each logger's run and last step; empty for an absent or damaged file."""
    # A logger without an entry makes a new run.
    try:
        stored = json.loads(file.read_text())
        return {
            name: {"run": str(entry["run"]), "step": int(entry["step"])}
            for name, entry in stored.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
