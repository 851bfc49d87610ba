"""Rank of a run, started by the launcher (``python -m megatron_dppo.launch.rank JOB CONFIG
OPTIONS``), torchrun or srun.

If a rank fails, one message is printed, every rank ends, and the exit code is

- 2: a problem that the user can fix.
- 1: a crash.
- 75: a run that was requested to stop and has saved.

Only a job that reached its end exits with 0. ``sys.exit`` or ``os._exit`` during the job is a
crash, for any exit code. A rank that a signal ends prints no message; the launcher, torchrun or
srun names the rank.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

from megatron_dppo.config import Config
from megatron_dppo.errors import StandstillError, UserError, format_error
from megatron_dppo.launch.processes import FirstFailure, resolve_marker
from megatron_dppo.parallel.meeting import LOST_CONTACT, find_loopback_interface, is_single_node
from megatron_dppo.process import lifetime
from megatron_dppo.process.files import make_file_limit_error
from megatron_dppo.process.lifetime import MARKER, set_parent_death_signal
from megatron_dppo.process.streams import filter_upstream_warnings, ignore_broken_streams
from megatron_dppo.rollout.servers.launch import ALLOCATOR, rank_environment
from megatron_dppo.settings import load_config

LAUNCHER = "MEGATRON_DPPO_LAUNCHER"
"""Environment variable with the process id of the launcher. The ranks end with the launcher."""

JOBS = {
    "train": "megatron_dppo.train:train",
    "sft": "megatron_dppo.sft:sft",
    "eval": "megatron_dppo.eval:evaluate_model",
    "probe-batch": "megatron_dppo.probe_batch:probe_batch",
}
"""Jobs of a rank, in addition to any ``module:function`` that takes a Config."""

Options = Mapping[str, Any]
NO_OPTIONS: Options = {}

_reported: list[BaseException] = []
"""Errors of failed jobs, kept with the frames, because a user's coroutine may loop forever when
Python discards it."""

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
TOO_MANY_FILES = os.strerror(errno.EMFILE)
HOLD_BACK_S = 10.0
"""Seconds that a rank waits before a message about a lost peer. The rank that failed first can then
print a message, or a launcher that finds a killed rank ends the ranks."""
LOST = re.compile(
    rf"{LOST_CONTACT}|connection (was )?(closed|reset|refused)|broken pipe"
    r"|failed to (recv|send)|gloo|nccl|tcpstore",
    re.IGNORECASE,
)
"""Libraries' messages after a peer has closed a connection."""


def rank_main(
    job: str | Callable[..., None],
    config: Config,
    options: Options = NO_OPTIONS,
    *,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Run a job as one rank of the process group in the environment, and return the exit code.

    With more than one rank, a failing rank ends its process and does not return.

    Args:
        job: function, ``module:function``, or key of ``JOBS``.
        config: the argument of the job.
        options: named arguments of the job.
        prepare: function to call before the job; its errors are reported in the same way.
    """
    ignore_broken_streams()
    filter_upstream_warnings()
    set_environment(config)
    if job == "train":
        lifetime.install_stop_handler()
    failure = FirstFailure(resolve_marker(Path(config.run.dir), os.environ))
    code = 0
    try:
        with _report_exits(failure):
            if prepare is not None:
                prepare()
            function = resolve_name(JOBS.get(job, job)) if isinstance(job, str) else job
            function(config, **options)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # torch's errors of distributed checkpoints, and SystemExit, are not Exceptions.
        code = _report(config, error, failure)
        _reported.append(error)
    if code == 0 and MARKER in os.environ:
        failure.record_end(int(os.environ["RANK"]))
    # Flush here, because os._exit does not flush.
    sys.stdout.flush()
    sys.stderr.flush()
    # A return may be impossible while the remaining ranks hang in a collective.
    if code and int(os.environ["WORLD_SIZE"]) > 1:
        os._exit(code)
    if code and _is_alone():
        failure.remove_marker()
    return code


def _is_alone() -> bool:
    """Return whether no other process reads the marker of the first failure."""
    return os.environ.get("WORLD_SIZE", "1") == "1" and MARKER not in os.environ


@contextmanager
def _report_exits(failure: FirstFailure) -> Iterator[None]:
    """Report ``os._exit`` in this process as a crash, for any exit code."""
    rank = os.getpid()
    leave = os._exit
    exit_now = lifetime.exit_now

    def end(code: int, text: str) -> NoReturn:
        code = failure.claim(code, text)
        if _is_alone():
            failure.remove_marker()
        leave(code)

    def report(status: int) -> NoReturn:
        # Forked processes keep the original ``os._exit``.
        if os.getpid() != rank:
            leave(status)
        stack = "".join(traceback.format_stack(sys._getframe(1))).rstrip()
        end(1, f"{_name()} was ended by os._exit({status}), called at:\n{stack}")

    os._exit = report
    lifetime.exit_now = end
    try:
        yield
    finally:
        os._exit = leave
        lifetime.exit_now = exit_now


def set_environment(config: Config) -> None:
    """Set the variables that CUDA's libraries read on first use in a rank."""
    # Use one queue, because only then kernels that send start before kernels that multiply. The
    # overlap in tensor and context parallelism depends on this order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Servers on other machines could not reach this machine through the loopback interface.
    is_local = is_single_node(os.environ) and not config.rollout.servers
    if is_local and (interface := find_loopback_interface()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    for name, value in rank_environment(config.rollout).items():
        os.environ.setdefault(name, value)
    # Let segments grow, because packs differ in length and fixed segments fragment. Not tested
    # beside colocated servers, which need memory to be released between phases.
    if not config.rollout.colocated and not os.environ.keys() & {*ALLOCATOR}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if config.model.deterministic:
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"


def has_lost_contact(error: BaseException) -> bool:
    """Return whether an error may follow from the end of another rank."""
    return int(os.environ["WORLD_SIZE"]) > 1 and bool(
        LOST.search(f"{type(error).__name__}: {error}")
    )


def _report(config: Config, error: BaseException, failure: FirstFailure) -> int:
    """Print why the job failed, unless another rank has failed before. Return the run's exit
    code."""
    if isinstance(error, StandstillError):
        error = error.error
    # Search texts, because libraries raise their own types of errors.
    if TOO_MANY_FILES in f"{error!r} {error.__cause__!r} {error.__context__!r}":
        error = make_file_limit_error(error)
    elif isinstance(error, OSError):
        error = _convert_disk_error(config, error) or error
    if isinstance(error, UserError):
        code = 2
        text = format_error(error)
    elif isinstance(error, lifetime.StoppedError):
        code = lifetime.SAVED
        text = str(error)
    else:
        hint = ""
        if has_lost_contact(error):
            failure.wait(HOLD_BACK_S)
            hint = ", perhaps because another rank had ended"
        code = 1
        text = f"{_name()} crashed{hint}:\n{traceback.format_exc().rstrip()}"
    return failure.claim(code, text)


def _convert_disk_error(config: Config, error: OSError) -> UserError | None:
    """Return the error about ``run.dir``: a full disk, a removed file, or a blocked path; else
    None."""
    if error.errno in DISK_IS_FULL:
        problem = f"could not be written to ({error}); the last good checkpoint is untouched"
        remedy = (
            "Free some room or point run.dir at another disk, and run the same command again: it "
            "resumes"
        )
        return UserError("run.dir", config.run.dir, problem, remedy)
    names = [name for name in (error.filename2, error.filename) if isinstance(name, str)]
    run = Path(config.run.dir)
    folders = {run.absolute(), Path(os.path.realpath(run))}
    if any(folders & {*Path(name).absolute().parents} for name in names):
        path = Path(names[0]).absolute()
        absent = [place for place in (path, *path.parents) if not os.path.lexists(place)]
        if error.errno == errno.ENOENT and absent:
            problem = "was removed during the run, or a folder above it was"
            remedy = (
                "Restore it, or run the same command again: it resumes from the last remaining "
                "checkpoint"
            )
            return UserError("run.dir", absent[-1], problem, remedy)
        problem = f"blocks a file or folder of the run ({error.strerror or error})"
        remedy = "Move it away, or change its permissions, and run the same command again"
        return UserError("run.dir", names[0], problem, remedy)
    return None


def _name() -> str:
    size = int(os.environ["WORLD_SIZE"])
    return f"rank {os.environ['RANK']} of {size}" if size > 1 else "the run"


def main(job: str, config: str, options: str = "{}") -> int:
    """Run a rank that the launcher of this package started, and whose configuration it has
    checked."""
    # Restore the default handlers, because a rank in a collective never runs Python's handlers. The
    # launcher prints the meaning of a signal.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    set_parent_death_signal(int(os.environ[LAUNCHER]))
    return rank_main(job, load_config(config, ()), json.loads(options))


if __name__ == "__main__":
    lifetime.exit_process(main(*sys.argv[1:]))
