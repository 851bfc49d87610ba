"""A run from Python: a script starts it, and hears of every step.

    from megatron_dppo.api import load_config, train

    run = train(load_config("configs/quickstart.yaml", run={"steps": 20}), reward=my_reward, on_step=print)
    run.metrics[-1]["eval/accuracy"]

The ranks are processes of their own, as under ``megatron-dppo train``: the process that calls holds no policy, can
call again, and an interrupt ends them. On several machines ``torchrun`` or ``srun`` start ranks, with the command line.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cloudpickle

from megatron_dppo.bridge.checkpoint_folder import latest_step
from megatron_dppo.config import Config, replace
from megatron_dppo.errors import UserError
from megatron_dppo.launch.start import ranks_to_start, start_ranks
from megatron_dppo.observe.metrics import FILE, read_metrics, read_rows
from megatron_dppo.process.files import replacing_file
from megatron_dppo.process.lock import refuse_if_held
from megatron_dppo.process.stop import SAVED
from megatron_dppo.settings import load_config as load_words
from megatron_dppo.trainer.preflight import check_run_dir

Row = dict[str, float]
REWARD, PICKLED = "reward.py", "reward.pkl"
_LOADS = f'''"""The reward function that this run was given from Python."""

import pickle
from pathlib import Path

compute_score = pickle.loads(Path(__file__).with_name("{PICKLED}").read_bytes())
'''


class RunFailedError(RuntimeError):
    """A run ended before its last step. What was wrong stands on standard error.

    Args:
        code: the exit code of ``megatron-dppo train``: 2 for what the user can mend, 1 for a crash, 128 + a signal.
    """

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"the run ended with exit code {code}; what was wrong stands on standard error")


@dataclass(frozen=True)
class Run:
    """What a run has come to."""

    folder: Path
    """Its ``run.dir``."""
    finished: bool
    """False if it was asked to stop (SIGUSR1) and has saved; the same call goes on from there."""

    @cached_property
    def metrics(self) -> list[Row]:
        """The rows of ``metrics.jsonl``, one for each step, by the names of docs/metrics.md. ``pandas.DataFrame(…)``
        makes a table of them."""
        return read_metrics(self.folder)


def load_config(path: str | Path | None = None, **sections: Mapping[str, Any]) -> Config:
    """The settings in a YAML file (defaults if None), with others laid over them, section by section.

        load_config("configs/quickstart.yaml", run={"steps": 20}, pruning={"completions": {"keep": 0.3}})

    Raises:
        UserError: as for the command line.
    """
    words = [f"{key}={json.dumps(value)}" for key, value in _leaves(sections, "")]
    return load_words(None if path is None else str(path), words)


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; a mapping is a section."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value) if isinstance(value, Path) else value


def train(
    config: Config, *, reward: Callable[..., Any] | None = None, on_step: Callable[[Row], object] | None = None
) -> Run:
    """Train to ``run.steps``, from the last checkpoint in ``run.dir`` if there is one.

    Args:
        config: of the run.
        reward: scores completions in place of ``reward.function``, in processes of its own; any signature that may be
            named there. It is kept in ``run.dir``, so that the command line can resume the run.
        on_step: called with the row of every step as it is written, in this process.

    Raises:
        UserError: for what can be seen to be wrong before a rank starts.
        RunFailedError: the run ended early.
        KeyboardInterrupt: it was interrupted.
    """
    if "RANK" in os.environ:
        problem = "makes this process a rank, and train() starts ranks of its own"
        raise UserError("RANK", os.environ["RANK"], problem, "Start the script by itself, or use megatron-dppo train")
    folder = Path(config.run.dir)
    if reward is not None:
        check_run_dir(folder)
        refuse_if_held(folder, "run.dir")
        config = replace(config, reward=replace(config.reward, function=_kept(reward, folder)))
    follower = _Follower(folder, on_step or (lambda row: None))
    code = start_ranks("train", config, ranks_to_start("train", config), follower.look)
    follower.look()
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code not in (0, SAVED):
        raise RunFailedError(code)
    return Run(folder, finished=code == 0)


def _kept(reward: Callable[..., Any], folder: Path) -> str:
    """The function by value, with what it uses of the script: the name by which the run finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_file(folder / PICKLED) as draft:
        draft.write_bytes(cloudpickle.dumps(reward))
    with replacing_file(folder / REWARD) as draft:
        draft.write_text(_LOADS, encoding="utf-8")
    return f"{folder / REWARD}:compute_score"


class _Follower:
    """Tells of rows of ``metrics.jsonl`` as they come."""

    def __init__(self, folder: Path, tell: Callable[[Row], object]) -> None:
        self._file, self._tell = folder / FILE, tell
        done = latest_step(folder / "checkpoints")
        self._last, self._size = -1 if done is None else done, 0
        self._before = self._file.stat().st_ino if self._file.exists() else None

    def look(self) -> None:
        now = self._file.stat() if self._file.exists() else None
        if now is None or now.st_ino == self._before:
            return  # the run has not replaced the file yet, by one without the rows of steps that it takes again
        if now.st_size == self._size:
            return
        self._size = now.st_size
        for row in read_rows(self._file):
            if row["step"] > self._last:
                self._last = row["step"]
                self._tell(row)
