"""Python interface: train, evaluate and plan a step, with user-defined functions.

    from megatron_dppo.api import evaluate, load_config, train

    config = load_config("configs/quickstart.yaml", run={"steps": 20})
    run = train(config, reward=my_reward, on_step=print)
    run.metrics[-1]["eval/accuracy"]
    evaluate(run).benchmarks

Ranks are separate processes: the calling process holds no policy and can call again. An interrupt
ends the ranks. On several machines, use the command line under ``torchrun`` or ``srun``.

:func:`plan_step` is the algorithm alone. ``megatron_dppo.prune`` offers the pruning to other
trainers.
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
from megatron_dppo.settings import IN_FORCE
from megatron_dppo.settings import load_config as load_words
from megatron_dppo.trainer.fingerprints import PICKLED, TEXT
from megatron_dppo.trainer.preflight import check_run_dir
from megatron_dppo.trainer.resume import check_resume

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
_LOADS = '''"""What this run was given from Python as its {what}: {name}, of the module {module}."""

import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_name("{what}.pkl").read_bytes())
'''


class RunFailedError(RuntimeError):
    """A run ended before the last step.

    Args:
        code: 2 for a user's mistake, 1 for a crash, 128 + n for signal n.
        reason: printed reason.
    """

    def __init__(self, code: int, reason: str = "") -> None:
        self.code = code
        self.reason = reason
        # Repeat the reason, because a notebook hides the standard error of other processes.
        super().__init__(
            f"the run ended with exit code {code}:\n{reason or 'no rank gave a reason'}"
        )

    def __reduce__(self) -> tuple[type[RunFailedError], tuple[int, str]]:
        # By default, pickle would call the class with the message as the single argument.
        return type(self), (self.code, self.reason)


@dataclass(frozen=True)
class Run:
    """Final result of a run."""

    folder: Path
    """``run.dir``."""
    finished: bool
    """False if the run saved and stopped on SIGUSR1; the same call resumes the run."""

    @cached_property
    def metrics(self) -> list[Row]:
        """Rows of ``metrics.jsonl`` (docs/metrics.md), one per step;
        ``pandas.DataFrame(run.metrics)`` is a table."""
        return read_metrics(self.folder)


@dataclass(frozen=True)
class Evaluation:
    """Answers of a policy."""

    folder: Path

    @cached_property
    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """Figures by benchmark (docs/evaluation.md): ``["gsm8k"]["avg@k"]`` is value, low, high."""
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

        pruning = {"completions": {"keep": 0.3}}
        load_config("configs/quickstart.yaml", run={"steps": 20}, pruning=pruning)

    Raises:
        UserError: if a setting is wrong, as on the command line.
    """
    return load_words(None if path is None else str(path), (), sections)


def step_metadata(
    rewards: ArrayLike,
    response_lengths: ArrayLike,
    prompt_lengths: ArrayLike,
    **more: Any,
) -> StepMetadata:
    """Return the input of :func:`plan_step` for a step without teachers, trees and roles.

    Args:
        rewards: [Q, G], for Q prompts with G completions.
        response_lengths: tokens of the responses, [Q, G].
        prompt_lengths: tokens of the prompts, [Q].
        more: further fields of :class:`~megatron_dppo.rl.types.StepMetadata`: ``prompt_inclusion``
            and ``window`` (number of prompts) if prompts were pruned; ``score_norms``, ``owners``.

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
        # By default, all prompts of the step were rolled out.
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
    given_fields: dict[str, Any] = {}
    for name, value in more.items():
        given_fields[name] = float(value) if name == "window" else np.asarray(value)
    return StepMetadata(**plain | given_fields)


def plan_step(
    metadata: StepMetadata,
    config: Config,
    *,
    advantage: Callable[..., Any] | None = None,
    prompt_rule: Callable[..., Any] | None = None,
    completion_rule: Callable[..., Any] | None = None,
    **of_layout: Any,
) -> StepPlan:
    """Plan a step by :func:`megatron_dppo.rl.plan.plan_step`.

    Advantages and pruning rules come from the arguments, else from the settings.

    Raises:
        UserError: if a function cannot be found, or returns an invalid result.
    """
    for kind, given, functions in (
        ("advantage", advantage, advantages),
        ("prompt_rule", prompt_rule, prompt_rules),
        ("completion_rule", completion_rule, completion_rules),
    ):
        setting = SETTINGS[kind]
        if given is not None:
            config = _with_settings(config, setting.split("."), _get_name(given))
        name = attrgetter(setting)(config)
        # A built-in estimator is registered already.
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
    """Train to ``run.steps``, from the last checkpoint in ``run.dir`` if present.

    Function arguments are stored in ``run.dir``, so that the command line can resume the run.

    Args:
        reward: replaces ``reward.function``, with any signature of this setting; runs in separate
            processes.
        objective: replaces ``loss.objective``. Maps :class:`~megatron_dppo.rl.losses.Tokens` to the
            maximised quantity.
        advantage: replaces ``loss.advantage``. Maps rewards [Q, G] and columns to advantages, see
            ``megatron_dppo/rl/advantages.py``.
        prompt_rule: replaces ``pruning.prompts.rule``. Maps
            :class:`~megatron_dppo.rl.pruning.prompt_rules.PromptCandidates` and ``keep`` to
            inclusion probabilities.
        completion_rule: replaces ``pruning.completions.rule``. Maps
            :class:`~megatron_dppo.rl.pruning.completion_rules.CompletionCandidates` and ``keep`` to
            inclusion probabilities.
        conversation: replaces ``rollout.conversation``: converses with the policy per completion.
        engine: replaces ``rollout.engine_function``: factory of a
            :class:`~megatron_dppo.rollout.engine.RolloutEngine`.
        on_step: called in this process with each step's row.

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
    # The run may have written rows after the last poll.
    follower.read_new_rows()
    return Run(folder, finished=code == 0)


def evaluate(
    target: Config | Run,
    *,
    model: str | Path | Run | None = None,
    reward: Callable[..., Any] | None = None,
) -> Evaluation:
    """Generate and score answers to held-out problems, as ``megatron-dppo eval``. Existing answers
    are kept.

    Args:
        target: settings with problems in ``eval`` and ``data``; or a run.
        model: Hugging Face directory, run, or checkpoint; None: the policy of ``target``.
        reward: replaces ``reward.function``, which judges the answers.

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
    """Return 0 or ``SAVED``."""
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
    """Store functions in ``folder`` by value, and return settings with the functions' names.

    Args:
        check: called with the settings and the functions' sources by setting; may raise.
    """
    given = {kind: function for kind, function in functions.items() if function is not None}
    names: dict[str, str] = {}
    for kind, function in given.items():
        _check_call(kind, function, None)
        # The name of a lambda, <lambda>, is no identifier.
        own = hasattr(function, "__name__") and function.__name__.isidentifier()
        names[kind] = function.__name__ if own else kind
        config = _with_settings(
            config, SETTINGS[kind].split("."), f"{folder / kind}.py:{names[kind]}"
        )
    # Pickle all before the first write, because a failure must leave the folder unchanged.
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
    """Raise UserError unless ``function`` takes ``arguments`` positional arguments (None: any)."""
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
    # Functions built into Python may have no signature.
    except ValueError:
        return


def _pickle_function(name: str, function: Callable[..., Any]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(function))
    # Objects used by the function may raise any error.
    except Exception as error:
        problem = f"cannot be sent to the ranks ({type(error).__name__}: {error})"
        remedy = (
            "Open files, locks and connections within the function, or name it in a file: "
            "FILE.py:FUNCTION"
        )
        raise UserError(name, _get_name(function), problem, remedy) from error


def _get_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _with_settings(section: AnySection, path: Sequence[str], value: str) -> AnySection:
    """Return a copy with another value of the setting at ``path``."""
    name, *rest = path
    changes = {name: _with_settings(getattr(section, name), rest, value) if rest else value}
    if isinstance(section, PromptPruningConfig | CompletionPruningConfig):
        # The function replaces the rule, and the rule ``none`` would disable the function.
        changes["rule"] = "neyman"
    return replace(section, **changes)
