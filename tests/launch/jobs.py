"""What the launcher's tests have ranks do: functions of a Config, named as
``tests.launch.jobs:name``."""

import os
import sys
import time
from pathlib import Path

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError

RANK = int(os.environ.get("RANK", "0"))


def _mistake(where: str) -> UserError:
    return UserError("layout.tp", 3, f"is a mistake seen {where}", "Mend it")


def fail_on_rank_one(config: Config) -> None:
    """One rank finds a mistake while the other waits for it, as in a collective."""
    if RANK == 1:
        raise _mistake("on rank 1")
    time.sleep(600)


def fail_everywhere(config: Config) -> None:
    raise _mistake("everywhere")


def crash_after_another_failed(config: Config) -> None:
    """Rank 0 crashes because rank 1 left, as a collective does when its peer is gone."""
    if RANK == 1:
        raise _mistake("on rank 1")
    while not Path(os.environ["MEGATRON_DPPO_FAILURE"]).exists():
        time.sleep(0.01)
    raise RuntimeError("connection closed by peer")


def crash_on_rank_one(config: Config) -> None:
    if RANK == 1:
        raise ValueError("a defect")
    time.sleep(600)


def leave_on_rank_one(config: Config) -> None:
    """Code of a user's ends the program as if all were done, past all handlers."""
    if RANK == 1:
        os._exit(0)
    time.sleep(600)


def killed_on_rank_one(config: Config) -> None:
    if RANK == 1:
        os.kill(os.getpid(), 9)
    time.sleep(600)


def say_process_ids(config: Config) -> None:
    """Write this rank's process id to ``run.dir``, and wait for ever."""
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{RANK}.partial").write_text(str(os.getpid()))
    (folder / f"rank{RANK}.partial").rename(folder / f"rank{RANK}")
    time.sleep(600)


def note_nccl(config: Config) -> None:
    """Write what this rank and the servers that it starts tell NCCL."""
    Path(config.run.dir).write_text(os.environ.get("NCCL_CUMEM_ENABLE", "nothing"))


def say_environment(config: Config) -> None:
    """Print what a rank is told; and that its configuration is the launcher's."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")
    names += ("CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    sys.stdout.write(
        " ".join(f"{name}={os.environ[name]}" for name in names) + f" steps={config.run.steps}\n"
    )
