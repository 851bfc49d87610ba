"""Python interface of the trainer: train, evaluate and plan a step, with user-defined functions.

    from megatron_dppo.api import evaluate, load_config, train

    run = train(load_config("configs/quickstart.yaml", run={"steps": 20}), reward=my_reward,
    on_step=print) run.metrics[-1]["eval/accuracy"] evaluate(run).benchmarks

The ranks are separate processes, as under ``megatron-dppo train``. The calling process holds no
policy, and can call again. An interrupt ends the ranks. On several machines, start ranks with the
command line, under ``torchrun`` or ``srun``.

:func:`plan_step` is the algorithm alone, from lengths and rewards to a training plan.
``megatron_dppo.prune`` offers the algorithm's pruning to other trainers.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import ArrayLike

from megatron_dppo.config import CompletionPruningConfig, Config, PromptPruningConfig, replace
from megatron_dppo.config.types import AnySection, Command
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.answers import (
    ANSWERS,
    SCORES,
    AnswerRow,
    find_policy,
    resolve_out_folder,
)
from megatron_dppo.launch.start import resolve_rank_count, start_ranks
from megatron_dppo.observe.metrics import RowFollower, read_metrics
from megatron_dppo.plugins import get_source, load_function
from megatron_dppo.process.files import check_not_held, replace_file, replace_text
from megatron_dppo.process.lifetime import SAVED
from megatron_dppo.rl import advantages, plan
from megatron_dppo.rl.numbers import round_rewards
from megatron_dppo.rl.pruning import completion_rules, prompt_rules
from megatron_dppo.rl.types import StepMetadata, StepPlan
from megatron_dppo.settings import load_config as load_words
from megatron_dppo.trainer.fingerprints import PICKLED, TEXT
from megatron_dppo.trainer.preflight import check_run_dir
from megatron_dppo.trainer.resume import IN_FORCE, check_resume

__all__ = [
    "Config",
    "Evaluation",
    "Run",
    "RunFailedError",
    "evaluate",
    "load_config",
    "plan_step",
    "step_metadata",
    "train",
]

Row = dict[str, float]
SETTINGS: Mapping[str, str] = {
    "reward": "reward.function",
    "objective": "loss.objective",
    "advantage": "loss.advantage",
    "prompt_rule": "pruning.prompts.function",
    "completion_rule": "pruning.completions.function",
    "conversation": "rollout.conversation",
    "engine": "rollout.engine_function",
}
"""Arguments that take a function, each with the setting that names the function."""
_LOADS = '''"""What this run was given from Python as its {what}: {name}, of the module {module}."""

import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_name("{what}.pkl").read_bytes())
'''


class RunFailedError(RuntimeError):
    """A run ended before its last step.

    Args:
        code: exit code of ``megatron-dppo train``: 2 for a mistake that the user can correct, 1 for
            a crash, 128 + n for signal n.
        reason: printed reason of the failure. A notebook does not show the standard error of other
            processes.
    """

    def __init__(self, code: int, reason: str = "") -> None:
        self.code = code
        self.reason = reason
        super().__init__(
            f"the run ended with exit code {code}:\n{reason or 'no rank gave a reason'}"
        )

    def __reduce__(self) -> tuple[type[RunFailedError], tuple[int, str]]:
        return type(self), (self.code, self.reason)


@dataclass(frozen=True)
class Run:
    """Final result of a run."""

    folder: Path
    """``run.dir`` of the run."""
    finished: bool
    """False if the run saved and stopped on request (SIGUSR1). The same call resumes the run."""

    @cached_property
    def metrics(self) -> list[Row]:
        """Rows of ``metrics.jsonl``, one per step, named as in docs/metrics.md.
        ``pandas.DataFrame(run.metrics)`` is a table of the rows."""
        return read_metrics(self.folder)


@dataclass(frozen=True)
class Evaluation:
    """Answers of a policy."""

    folder: Path
    """Folder of ``answers.jsonl`` and ``scores.json``."""

    @cached_property
    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """Figures of docs/evaluation.md, by benchmark: ``["gsm8k"]["avg@k"]`` has value, low and
        high."""
        return dict(json.loads((self.folder / SCORES).read_text(encoding="utf-8"))["benchmarks"])

    @cached_property
    def answers(self) -> list[AnswerRow]:
        """Rows of ``answers.jsonl``, one per answer."""
        return [
            json.loads(line)
            for line in (self.folder / ANSWERS).read_text(encoding="utf-8").splitlines()
        ]


def load_config(path: str | Path | None = None, **sections: Mapping[str, Any]) -> Config:
    """Return the settings of a YAML file (defaults if None), overridden section by section.

        load_config("configs/quickstart.yaml", run={"steps": 20}, pruning={"completions": {"keep":
        0.3}})

    Raises:
        UserError: under the same conditions as on the command line.
    """
    return load_words(None if path is None else str(path), (), sections)


def step_metadata(
    rewards: ArrayLike, response_lengths: ArrayLike, prompt_lengths: ArrayLike, **more: Any
) -> StepMetadata:
    """Return the input of :func:`plan_step` for a step without teachers, trees and roles.

    The defaults are for a step that rolled out all of its prompts.

    Args:
        rewards: rewards of the completions, [Q, G].
        response_lengths: tokens of the responses, [Q, G].
        prompt_lengths: tokens of the prompts, [Q].
        more: further fields of :class:`~megatron_dppo.rl.types.StepMetadata`: ``prompt_inclusion``
            and ``window`` (number of prompts) if some prompts were pruned; ``score_norms``,
            ``owners``.

    Raises:
        UserError: if ``prompt_inclusion`` is given without ``window``.
    """
    if "prompt_inclusion" in more and "window" not in more:
        problem = "is given without window, the number of prompts that these were drawn from"
        raise UserError(
            "prompt_inclusion", more["prompt_inclusion"], problem, "Give window as well"
        )
    given = round_rewards(np.asarray(rewards, np.float64))
    lengths = np.asarray(response_lengths, np.int64)
    prompt_tokens = np.asarray(prompt_lengths, np.int64)
    prompts, samples = given.shape
    plain = plan.build_default_fields(prompt_tokens, samples) | {
        "prompt_ids": np.arange(prompts),
        "prompt_inclusion": np.ones(prompts),
        "prompt_lengths": prompt_tokens,
        "response_lengths": lengths,
        "sampled_lengths": lengths,
        "rewards": given,
        "score_norms": np.ones(given.shape),
        "versions": np.zeros(given.shape, np.int64),
        "owners": np.zeros(prompts, np.int64),
        "window": float(prompts),
    }
    return StepMetadata(
        **plain
        | {name: float(v) if name == "window" else np.asarray(v) for name, v in more.items()}
    )


def plan_step(
    metadata: StepMetadata,
    config: Config,
    *,
    advantage: Callable[..., Any] | None = None,
    prompt_rule: Callable[..., Any] | None = None,
    completion_rule: Callable[..., Any] | None = None,
    **of_layout: Any,
) -> StepPlan:
    """Plan one step by :func:`megatron_dppo.rl.plan.plan_step`, with user-defined advantages and
    pruning rules.

    The functions are arguments here, or are named in the settings.

    Raises:
        UserError: if a function cannot be found, or returns an invalid result.
    """
    for name, given, functions in (
        ("advantage", advantage, advantages),
        ("prompt_rule", prompt_rule, prompt_rules),
        ("completion_rule", completion_rule, completion_rules),
    ):
        setting = SETTINGS[name]
        if given is not None:
            config = _with_settings(config, setting.split("."), _get_name(given))
        name = attrgetter(setting)(config)
        if name is not None and name not in advantages.ESTIMATORS:
            functions.register(name, given or load_function(setting, name))
    return plan.plan_step(metadata, config, **of_layout)


def train(
    config: Config,
    *,
    reward: Callable[..., Any] | None = None,
    objective: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    prompt_rule: Callable[..., Any] | None = None,
    completion_rule: Callable[..., Any] | None = None,
    conversation: Callable[..., Any] | None = None,
    engine: Callable[..., Any] | None = None,
    on_step: Callable[[Row], object] | None = None,
) -> Run:
    """Train to ``run.steps``, from the last checkpoint in ``run.dir`` if the folder has a
    checkpoint.

    Functions in the arguments are stored in ``run.dir``, with the parts of the script that the
    functions use, so that the command line can resume the run.

    Args:
        config: configuration of the run.
        reward: replacement for ``reward.function``, with any signature that the setting accepts;
            runs in separate processes.
        objective: replacement for ``loss.objective``: function from
            :class:`~megatron_dppo.rl.losses.Tokens` to the maximised quantity.
        advantage: replacement for ``loss.advantage``: function from rewards [Q, G] and columns to
            advantages, see ``megatron_dppo/rl/advantages.py``.
        prompt_rule: replacement for ``pruning.prompts.rule``: function from
            :class:`~megatron_dppo.rl.pruning.prompt_rules.PromptCandidates` and ``keep`` to
            inclusion probabilities.
        completion_rule: replacement for ``pruning.completions.rule``: function from
            :class:`~megatron_dppo.rl.pruning.completion_rules.CompletionCandidates` and ``keep`` to
            inclusion probabilities.
        conversation: replacement for ``rollout.conversation``: function that has a conversation
            with the policy for each completion.
        engine: replacement for ``rollout.engine_function``: factory of a
            :class:`~megatron_dppo.rollout.engine.RolloutEngine`.
        on_step: callback in this process, called with the row of every step when the row is
            written.

    Raises:
        UserError: if a mistake is found before a rank starts.
        RunFailedError: if the run fails.
        KeyboardInterrupt: if the run is interrupted.
    """
    _check_not_rank("train")
    folder = Path(config.run.dir)
    config = _with_functions(
        config,
        folder,
        check=check_resume,
        reward=reward,
        objective=objective,
        advantage=advantage,
        prompt_rule=prompt_rule,
        completion_rule=completion_rule,
        conversation=conversation,
        engine=engine,
    )
    if on_step is not None:
        _check_call("on_step", on_step, 1)
    follower = RowFollower(folder, on_step)
    code = _run("train", config, follower.read_new_rows)
    follower.read_new_rows()
    return Run(folder, finished=code == 0)


def evaluate(
    target: Config | Run,
    *,
    model: str | Path | Run | None = None,
    reward: Callable[..., Any] | None = None,
) -> Evaluation:
    """Generate and score a policy's answers to held-out problems, as ``megatron-dppo eval`` does.

    Answers that the folder has already are not generated again.

    Args:
        target: settings, with the choice of problems in ``eval`` and ``data``; or a run, with the
            run's settings and policy.
        model: Hugging Face directory, run, or checkpoint of a run; None: the policy of ``target``.
        reward: replacement for ``reward.function``, which judges the answers.

    Raises:
        UserError, RunFailedError, KeyboardInterrupt: see ``train``.
    """
    _check_not_rank("evaluate")
    if isinstance(target, Run):
        model = target if model is None else model
        config = load_config(target.folder / IN_FORCE)
    else:
        config = target
    if model is not None:
        found = find_policy(Path(model.folder if isinstance(model, Run) else model))
        config = replace(config, model=replace(config.model, **found))
    folder = resolve_out_folder(config)
    config = _with_functions(config, folder, reward=reward)
    _run("eval", config)
    return Evaluation(folder)


def _check_not_rank(function: str) -> None:
    if "RANK" in os.environ:
        problem = f"makes this process a rank, and {function}() starts new ranks"
        raise UserError(
            "RANK",
            os.environ["RANK"],
            problem,
            "Start the script without torchrun or srun, or use the command line",
        )


def _run(command: Command, config: Config, on_poll: Callable[[], None] = lambda: None) -> int:
    """Start the ranks of a command and wait for their end. Return 0 or ``SAVED``."""
    reasons: list[str] = []
    code = start_ranks(
        command, config, resolve_rank_count(command, config), on_poll, reasons.append
    )
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code not in (0, SAVED):
        raise RunFailedError(code, *reasons)
    return code


def _with_functions(
    config: Config,
    folder: Path,
    *,
    check: Callable[[Config, Mapping[str, str | None]], None] = lambda config, given: None,
    **functions: Callable[..., Any] | None,
) -> Config:
    """Store these functions in ``folder`` by value, and return the settings with the functions'
    names for the ranks.

    Args:
        check: function that may refuse the settings, and the functions' source texts by setting.
            ``check`` is called before the functions of an earlier run in ``folder`` are replaced.
    """
    given = {kind: function for kind, function in functions.items() if function is not None}
    names: dict[str, str] = {}
    for kind, function in given.items():
        _check_call(kind, function, None)
        own = (
            hasattr(function, "__name__") and function.__name__.isidentifier()
        )  # not a lambda's, <lambda>
        names[kind] = function.__name__ if own else kind
        config = _with_settings(
            config, SETTINGS[kind].split("."), f"{folder / kind}.py:{names[kind]}"
        )
    pickled = {kind: _pickle_function(kind, function) for kind, function in given.items()}
    texts = {kind: get_source(function) for kind, function in given.items()}
    if given:
        check_run_dir(folder)
        check(config, {SETTINGS[kind]: text for kind, text in texts.items()})
        check_not_held(folder)
        folder.mkdir(parents=True, exist_ok=True)
    for kind, function in given.items():
        with replace_file(folder / f"{kind}{PICKLED}") as draft:
            draft.write_bytes(pickled[kind])
        (folder / f"{kind}{TEXT}").unlink(missing_ok=True)
        if (text := texts[kind]) is not None:
            replace_text(folder / f"{kind}{TEXT}", text)
        replace_text(
            folder / f"{kind}.py",
            _LOADS.format(what=kind, name=names[kind], module=function.__module__),
        )
    return config


def _check_call(name: str, function: object, arguments: int | None) -> None:
    """Check that ``function`` can be called.

    Args:
        arguments: number of positional arguments; None: not checked.

    Raises:
        UserError: if ``function`` is not callable, or cannot be called with ``arguments``
            arguments.
    """
    if not callable(function):
        raise UserError(name, repr(function), "is no function", "Give a function, or leave it out")
    if arguments is None:
        return
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError as error:
        problem = f"cannot be called with {arguments} argument ({error})"
        raise UserError(
            name, _get_name(function), problem, "Give it one parameter, the row of a step"
        ) from error
    except ValueError:  # functions built into Python may have no signature
        return


def _pickle_function(name: str, function: Callable[..., Any]) -> bytes:
    """Return the function, pickled by value.

    Raises:
        UserError: if the function uses an object that cannot be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:  # the objects that the function refers to may raise any error
        problem = f"cannot be sent to the ranks ({type(error).__name__}: {error})"
        remedy = (
            "Open files, locks and connections within the function, or name it in a file: "
            "FILE.py:FUNCTION"
        )
        raise UserError(name, _get_name(function), problem, remedy) from error


def _get_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _with_settings(section: AnySection, path: Sequence[str], value: str) -> AnySection:
    """Return a copy with another value of the setting at ``path``. The function of a pruning rule
    is also enabled."""
    name, *rest = path
    changes = {name: _with_settings(getattr(section, name), rest, value) if rest else value}
    if isinstance(section, PromptPruningConfig | CompletionPruningConfig):
        changes["rule"] = "neyman"  # replaced by the function
    return replace(section, **changes)
