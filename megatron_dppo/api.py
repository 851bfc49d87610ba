"""The trainer from Python: a script trains, evaluates, plans a step, with functions of its own.

    from megatron_dppo.api import evaluate, load_config, train

    run = train(load_config("configs/quickstart.yaml", run={"steps": 20}), reward=my_reward, on_step=print)
    run.metrics[-1]["eval/accuracy"]
    evaluate(run).benchmarks

The ranks are processes of their own, as under ``megatron-dppo train``: the process that calls holds no policy, can
call again, and an interrupt ends them. On several machines ``torchrun`` or ``srun`` start ranks, with the command line.

:func:`plan_step` is the algorithm alone, from lengths and rewards to what is trained on; ``prune``, in the package
itself, is its pruning for other trainers.
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
from megatron_dppo.evaluation.answers import ANSWERS, SCORES, AnswerRow, out_folder, policy_in
from megatron_dppo.launch.start import ranks_to_start, start_ranks
from megatron_dppo.observe.metrics import RowFollower, read_metrics
from megatron_dppo.plugins import load_function, source_of
from megatron_dppo.process.files import refuse_if_held, replace_text, replacing_file
from megatron_dppo.process.lifetime import SAVED
from megatron_dppo.rl import advantages, plan
from megatron_dppo.rl.numbers import without_rounding
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
"""Functions that a run can be given, and the setting that names each."""
_LOADS = '''"""What this run was given from Python as its {what}: {name}, of the module {module}."""

import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_name("{what}.pkl").read_bytes())
'''


class RunFailedError(RuntimeError):
    """A run ended before its last step.

    Args:
        code: the exit code of ``megatron-dppo train``: 2 for what the user can mend, 1 for a crash, 128 + a signal.
        reason: as the run printed it; a notebook does not show the standard error of other processes.
    """

    def __init__(self, code: int, reason: str = "") -> None:
        self.code, self.reason = code, reason
        super().__init__(f"the run ended with exit code {code}:\n{reason or 'no rank said why'}")

    def __reduce__(self) -> tuple[type[RunFailedError], tuple[int, str]]:
        return type(self), (self.code, self.reason)


@dataclass(frozen=True)
class Run:
    """Final result of a run."""

    folder: Path
    """Its ``run.dir``."""
    finished: bool
    """False if it was asked to stop (SIGUSR1) and has saved; the same call goes on from there."""

    @cached_property
    def metrics(self) -> list[Row]:
        """The rows of ``metrics.jsonl``, one for each step, by the names of docs/metrics.md. ``pandas.DataFrame(…)``
        makes a table of them."""
        return read_metrics(self.folder)


@dataclass(frozen=True)
class Evaluation:
    """Answers of a policy."""

    folder: Path
    """With ``answers.jsonl`` and ``scores.json``."""

    @cached_property
    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """The figures of docs/evaluation.md, by benchmark: ``["gsm8k"]["avg@k"]`` has value, low and high."""
        return dict(json.loads((self.folder / SCORES).read_text(encoding="utf-8"))["benchmarks"])

    @cached_property
    def answers(self) -> list[AnswerRow]:
        """The rows of ``answers.jsonl``, one for each answer."""
        return [json.loads(line) for line in (self.folder / ANSWERS).read_text(encoding="utf-8").splitlines()]


def load_config(path: str | Path | None = None, **sections: Mapping[str, Any]) -> Config:
    """The settings in a YAML file (defaults if None), with others laid over them, section by section.

        load_config("configs/quickstart.yaml", run={"steps": 20}, pruning={"completions": {"keep": 0.3}})

    Raises:
        UserError: as for the command line.
    """
    return load_words(None if path is None else str(path), (), sections)


def step_metadata(
    rewards: ArrayLike, response_lengths: ArrayLike, prompt_lengths: ArrayLike, **more: Any
) -> StepMetadata:
    """Input of :func:`plan_step` for a step without teachers, trees and roles, all of whose prompts were rolled out.

    Args:
        rewards: [Q, G]
        response_lengths: [Q, G], tokens.
        prompt_lengths: [Q], tokens.
        more: fields of :class:`~megatron_dppo.rl.types.StepMetadata`, if the step has them: ``prompt_inclusion`` and
            ``window``, in prompts, if some were pruned; ``score_norms``, ``owners``.

    Raises:
        UserError: ``prompt_inclusion`` is given without ``window``.
    """
    if "prompt_inclusion" in more and "window" not in more:
        problem = "is given without window, the number of prompts that these were drawn from"
        raise UserError("prompt_inclusion", more["prompt_inclusion"], problem, "Give window as well")
    given, lengths = without_rounding(np.asarray(rewards, np.float64)), np.asarray(response_lengths, np.int64)
    asked = np.asarray(prompt_lengths, np.int64)
    prompts, samples = given.shape
    plain = plan.plain_fields(asked, samples) | {
        "prompt_ids": np.arange(prompts),
        "prompt_inclusion": np.ones(prompts),
        "prompt_lengths": asked,
        "response_lengths": lengths,
        "sampled_lengths": lengths,
        "rewards": given,
        "score_norms": np.ones(given.shape),
        "versions": np.zeros(given.shape, np.int64),
        "owners": np.zeros(prompts, np.int64),
        "window": float(prompts),
    }
    return StepMetadata(**plain | {name: float(v) if name == "window" else np.asarray(v) for name, v in more.items()})


def plan_step(
    metadata: StepMetadata,
    config: Config,
    *,
    advantage: Callable[..., Any] | None = None,
    prompt_rule: Callable[..., Any] | None = None,
    completion_rule: Callable[..., Any] | None = None,
    **of_layout: Any,
) -> StepPlan:
    """:func:`megatron_dppo.rl.plan.plan_step`, also with an estimator of advantages and pruning rules of one's own:
    given here, or named in settings.

    Raises:
        UserError: such a function cannot be found, or does not return what it has to.
    """
    for what, given, functions in (
        ("advantage", advantage, advantages),
        ("prompt_rule", prompt_rule, prompt_rules),
        ("completion_rule", completion_rule, completion_rules),
    ):
        setting = SETTINGS[what]
        if given is not None:
            config = _with_settings(config, setting.split("."), _name_of(given))
        name = attrgetter(setting)(config)
        if name is not None and name not in advantages.ESTIMATORS:
            functions.adopt(name, given or load_function(setting, name))
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
    """Train to ``run.steps``, from the last checkpoint in ``run.dir`` if there is one.

    Functions that are given here are kept in ``run.dir``, with what they use of the script, so that the command line
    can resume the run.

    Args:
        config: of the run.
        reward: scores completions in place of ``reward.function``, in processes of its own; any signature that may be
            named there.
        objective: in place of ``loss.objective``: from :class:`~megatron_dppo.rl.losses.Tokens` to what is maximised.
        advantage: in place of ``loss.advantage``: from rewards [Q, G] and columns to advantages, as
            ``megatron_dppo/rl/advantages.py`` says.
        prompt_rule: in place of ``pruning.prompts.rule``: from
            :class:`~megatron_dppo.rl.pruning.prompt_rules.PromptCandidates` and ``keep`` to inclusion probabilities.
        completion_rule: in place of ``pruning.completions.rule``: from
            :class:`~megatron_dppo.rl.pruning.completion_rules.CompletionCandidates` and ``keep`` to inclusion
            probabilities.
        conversation: in place of ``rollout.conversation``: has a conversation with the policy for each completion.
        engine: in place of ``rollout.engine_function``: makes a :class:`~megatron_dppo.rollout.engine.RolloutEngine`.
        on_step: called with the row of every step as it is written, in this process.

    Raises:
        UserError: for what can be seen to be wrong before a rank starts.
        RunFailedError: the run ended early.
        KeyboardInterrupt: it was interrupted.
    """
    _refuse_to_be_a_rank("train")
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
    code = _run("train", config, follower.look)
    follower.look()
    return Run(folder, finished=code == 0)


def evaluate(
    what: Config | Run, *, model: str | Path | Run | None = None, reward: Callable[..., Any] | None = None
) -> Evaluation:
    """Have a policy answer held-out problems, as ``megatron-dppo eval`` does. What is answered already is not asked.

    Args:
        what: settings, of which ``eval`` and ``data`` say what is asked; or a run, for its own settings and policy.
        model: a Hugging Face directory, a run, or a checkpoint of one; None: what ``what`` says.
        reward: tells right answers from wrong ones in place of ``reward.function``.

    Raises:
        UserError, RunFailedError, KeyboardInterrupt: as ``train``.
    """
    _refuse_to_be_a_rank("evaluate")
    if isinstance(what, Run):
        model = what if model is None else model
        config = load_config(what.folder / IN_FORCE)
    else:
        config = what
    if model is not None:
        found = policy_in(Path(model.folder if isinstance(model, Run) else model))
        config = replace(config, model=replace(config.model, **found))
    folder = out_folder(config)
    config = _with_functions(config, folder, reward=reward)
    _run("eval", config)
    return Evaluation(folder)


def _refuse_to_be_a_rank(function: str) -> None:
    if "RANK" in os.environ:
        problem = f"makes this process a rank, and {function}() starts ranks of its own"
        raise UserError("RANK", os.environ["RANK"], problem, "Start the script by itself, or use the command line")


def _run(command: Command, config: Config, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Start the ranks of a command, and wait for their end. Returns 0, or ``SAVED``."""
    reasons: list[str] = []
    code = start_ranks(command, config, ranks_to_start(command, config), meanwhile, reasons.append)
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
    """The settings with the names by which ranks find these functions. They are kept in ``folder`` by value, under the
    names that they were written with.

    Args:
        check: refuses settings, and texts of functions by their settings, before the functions of an earlier run in
            ``folder`` are replaced.
    """
    given = {what: function for what, function in functions.items() if function is not None}
    names: dict[str, str] = {}
    for what, function in given.items():
        _check_call(what, function, None)
        own = hasattr(function, "__name__") and function.__name__.isidentifier()  # a lambda is called <lambda>
        names[what] = function.__name__ if own else what
        config = _with_settings(config, SETTINGS[what].split("."), f"{folder / what}.py:{names[what]}")
    pickled = {what: _pickled(what, function) for what, function in given.items()}
    texts = {what: source_of(function) for what, function in given.items()}
    if given:
        check_run_dir(folder)
        check(config, {SETTINGS[what]: text for what, text in texts.items()})
        refuse_if_held(folder)
        folder.mkdir(parents=True, exist_ok=True)
    for what, function in given.items():
        with replacing_file(folder / f"{what}{PICKLED}") as draft:
            draft.write_bytes(pickled[what])
        (folder / f"{what}{TEXT}").unlink(missing_ok=True)
        if (text := texts[what]) is not None:
            replace_text(folder / f"{what}{TEXT}", text)
        replace_text(folder / f"{what}.py", _LOADS.format(what=what, name=names[what], module=function.__module__))
    return config


def _check_call(name: str, function: object, arguments: int | None) -> None:
    """
    Raises:
        UserError: it is no function, or cannot be called with so many arguments; None: not looked at.
    """
    if not callable(function):
        raise UserError(name, repr(function), "is no function", "Give a function, or leave it out")
    if arguments is None:
        return
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError as error:
        problem = f"cannot be called with {arguments} argument ({error})"
        raise UserError(name, _name_of(function), problem, "Give it one parameter, the row of a step") from error
    except ValueError:  # built into Python, which does not tell its parameters
        return


def _pickled(what: str, function: Callable[..., Any]) -> bytes:
    """
    Raises:
        UserError: the function uses something that cannot be written to a file.
    """
    try:
        return bytes(cloudpickle.dumps(function))
    except Exception as error:  # of whatever it refers to
        problem = f"cannot be sent to the ranks ({type(error).__name__}: {error})"
        remedy = "Open files, locks and connections within the function, or name it in a file: FILE.py:FUNCTION"
        raise UserError(what, _name_of(function), problem, remedy) from error


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _with_settings(section: AnySection, path: Sequence[str], value: str) -> AnySection:
    """A copy with another value of the setting at ``path``; of a rule with its function, which is then in use."""
    name, *rest = path
    changes = {name: _with_settings(getattr(section, name), rest, value) if rest else value}
    if isinstance(section, PromptPruningConfig | CompletionPruningConfig):
        changes["rule"] = "neyman"  # whose place the function takes
    return replace(section, **changes)
