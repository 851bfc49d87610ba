"""One rank of a run, started by the launcher (``python -m megatron_dppo.launch.rank JOB CONFIG
OPTIONS``), torchrun or srun.

However a rank fails, one message is seen, every rank ends, and the exit code says which kind it
was: 2 for what the user can mend, 1 for a crash, 75 for a run that was asked to stop and has saved.
Only a job that reached its end exits with 0: code that calls ``sys.exit`` or ``os._exit`` on the
way is a crash, whatever code it gives. A rank that a signal ends says nothing: the launcher,
torchrun or srun names it.
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
"""Environment variable with the process id of the launcher, without which its ranks do not live
on."""

JOBS = {
    "train": "megatron_dppo.train:train",
    "sft": "megatron_dppo.sft:sft",
    "eval": "megatron_dppo.eval:evaluate_model",
    "probe-batch": "megatron_dppo.probe_batch:probe_batch",
}
"""Jobs of a rank, besides any ``module:function`` that takes a Config."""

Options = Mapping[str, Any]
NO_OPTIONS: Options = {}

_reported: list[BaseException] = []
"""Errors of failed jobs. Their frames stay: when Python discards a user's coroutine, the coroutine
may loop forever."""

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
TOO_MANY_FILES = os.strerror(errno.EMFILE)
HOLD_BACK_S = 10.0
"""How long a rank that has lost another one keeps it to itself: whoever failed first may speak, and
a launcher that sees a rank killed names it, and ends the others, long before."""
LOST = re.compile(
    rf"{LOST_CONTACT}|connection (was )?(closed|reset|refused)|broken pipe|failed to "
    r"(recv|send)|gloo|nccl|tcpstore",
    re.IGNORECASE,
)
"""Libraries' messages when the other end of a connection has gone."""


def rank_main(
    job: str | Callable[..., None],
    config: Config,
    options: Options = NO_OPTIONS,
    *,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Run a job as one rank of the process group that the environment describes. Returns the exit
    code.

    With more than one rank a failing rank does not return but ends its process: there may be no way
    out through a collective that others hang in.

    Args:
        job: a function, ``module:function``, or a key of ``JOBS``.
        config: what the job is given.
        options: named arguments of the job.
        prepare: called before it; its errors are reported in the same way.
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
    except (
        BaseException
    ) as error:  # torch's errors of distributed checkpoints, and SystemExit, are no Exceptions
        code = _report(config, error, failure)
        _reported.append(error)
    if code == 0 and MARKER in os.environ:
        failure.record_end(int(os.environ["RANK"]))
    sys.stdout.flush()
    sys.stderr.flush()
    if code and int(os.environ["WORLD_SIZE"]) > 1:
        os._exit(code)
    if code and _is_alone():
        failure.remove_marker()
    return code


def _is_alone() -> bool:
    """Whether nobody else, rank or launcher, asks who was the first to fail."""
    return os.environ.get("WORLD_SIZE", "1") == "1" and MARKER not in os.environ


@contextmanager
def _report_exits(failure: FirstFailure) -> Iterator[None]:
    """Within it ``os._exit`` in this process, by whatever code, is reported as a crash. Forked
    copies keep theirs."""
    rank = os.getpid()
    leave = os._exit
    said = lifetime.exit_now

    def end(code: int, text: str) -> NoReturn:
        code = failure.claim(code, text)
        if _is_alone():
            failure.remove_marker()
        leave(code)

    def report(status: int) -> NoReturn:
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
        lifetime.exit_now = said


def set_environment(config: Config) -> None:
    """Set the variables that CUDA's libraries read when a rank first uses them, whoever has started
    the rank."""
    # Kernels that send start before those that multiply only where both wait in one queue: tensor
    # and context parallelism overlap by that.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if (
        is_single_node(os.environ)
        and not config.rollout.servers
        and (interface := find_loopback_interface())
    ):
        os.environ.setdefault(
            "GLOO_SOCKET_IFNAME", interface
        )  # servers elsewhere would not reach it there
    for name, value in rank_environment(config.rollout).items():
        os.environ.setdefault(name, value)
    # Packs differ in length, and fixed segments fragment. Beside colocated servers, which need
    # memory to be released between phases, segments that grow were not tried.
    if not config.rollout.colocated and not os.environ.keys() & {*ALLOCATOR}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if config.model.deterministic:
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"


def has_lost_contact(error: BaseException) -> bool:
    """Whether it may be that another rank has ended."""
    return int(os.environ["WORLD_SIZE"]) > 1 and bool(
        LOST.search(f"{type(error).__name__}: {error}")
    )


def _report(config: Config, error: BaseException, failure: FirstFailure) -> int:
    """Say why the job has failed, unless another rank has. Returns the exit code of the run."""
    if isinstance(error, StandstillError):
        error = error.error
    if (
        TOO_MANY_FILES in f"{error!r} {error.__cause__!r} {error.__context__!r}"
    ):  # libraries have errors of their own
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
    """Return the error about ``run.dir`` for the user.

    - The disk is full.
    - A file or folder of the run was removed.
    - Something is in the way of a file or folder of the run.
    """
    if error.errno in DISK_IS_FULL:
        problem = f"could not be written to ({error}); the last good checkpoint is untouched"
        remedy = (
            "Free some room or point run.dir at another disk, and run the same command "
            "again: "
            "it resumes"
        )
        return UserError("run.dir", config.run.dir, problem, remedy)
    names = [name for name in (error.filename2, error.filename) if isinstance(name, str)]
    run = Path(config.run.dir)
    folders = {run.absolute(), Path(os.path.realpath(run))}
    if any(folders & {*Path(name).absolute().parents} for name in names):
        path = Path(names[0]).absolute()
        absent = [place for place in (path, *path.parents) if not os.path.lexists(place)]
        if error.errno == errno.ENOENT and absent:
            problem = "is gone: something removed it, or a folder above it, during the run"
            remedy = (
                "Put it back, or run the same command again: it resumes from the last "
                "checkpoint that is left"
            )
            return UserError("run.dir", absent[-1], problem, remedy)
        problem = (
            f"is in the way ({error.strerror or error}): a run has a file or folder of its "
            "own there"
        )
        remedy = "Move it away, or see to its permissions, and run the same command again"
        return UserError("run.dir", names[0], problem, remedy)
    return None


def _name() -> str:
    size = int(os.environ["WORLD_SIZE"])
    return f"rank {os.environ['RANK']} of {size}" if size > 1 else "the run"


def main(job: str, config: str, options: str = "{}") -> int:
    """Run a rank that our own launcher started, and that has checked the configuration."""
    # A rank in a collective never gets to run Python's handler; and the launcher says what a signal
    # meant.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    set_parent_death_signal(int(os.environ[LAUNCHER]))
    return rank_main(job, load_config(config, ()), json.loads(options))


if __name__ == "__main__":
    lifetime.exit_process(main(*sys.argv[1:]))
