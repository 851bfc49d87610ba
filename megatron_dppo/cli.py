"""The command line: ``megatron-dppo train``, ``sft``, ``eval``, ``probe-tree``, ``compress``, ``plan`` and others.

Nothing heavy is imported before a command needs it: a mistake in the settings is answered at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dppo import __version__
from megatron_dppo.config import Config
from megatron_dppo.errors import MistakesError, UserError, error_text
from megatron_dppo.process.files import too_few_files
from megatron_dppo.process.streams import speak_plainly
from megatron_dppo.settings import as_yaml, load_config, load_whole, nearest

EVAL_FLAGS = {
    "samples": ("eval.samples", "K", "answers to each problem (default: 1)"),
    "temperature": ("eval.temperature", "T", "0 is greedy (default: greedy for one sample, else rollout.temperature)"),
    "problems": ("eval.problems", "N", "ask the first N of each benchmark (default: all)"),
    "data": ("eval.folder", "FOLDER", "where the benchmarks' files lie"),
    "out": ("eval.out", "FOLDER", "where answers and scores go; run again, it goes on from what is there"),
    "against": ("eval.against", "FOLDER", "an earlier evaluation's, to compare with, problem by problem"),
}
"""Options of ``eval``: the setting that each is short for, what its value is called, and its meaning."""


class OfModule(NamedTuple):
    """A command whose options stand in a module that is slow to import. Functions are named as ``module:name``."""

    help: str
    options: str
    """Is given the command's parser."""
    job: str
    """Is given what was chosen."""


OF_MODULES = {
    "init": OfModule(
        "make a fresh Qwen3 model directory, tokenizer included", "init:add_init_arguments", "init:init_from_arguments"
    ),
    "compress": OfModule(
        "make a smaller policy from a larger one",
        "compress.arguments:add_compress_arguments",
        "compress.command:compress",
    ),
    "compress sweep": OfModule(
        "make smaller policies of several sizes and methods, and tell what each is worth",
        "compress.arguments:add_sweep_arguments",
        "compress.sweep:sweep",
    ),
    "compress fit": OfModule(
        "fit the law of recovery to curves", "compress.law_command:add_fit_arguments", "compress.law_command:fit_law"
    ),
    "compress predict": OfModule(
        "say by that law what a smaller policy will lose, and what recovers it",
        "compress.law_command:add_predict_arguments",
        "compress.law_command:predict",
    ),
    "export": OfModule(
        "write a run's policy for Hugging Face, with a model card", "export:add_export_arguments", "export:export"
    ),
}
MODEL = "Hugging Face directory, id on the hub, run, or checkpoint of a run (default: the model of CONFIG)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code: 2 for a mistake that the user can mend, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    speak_plainly()
    try:
        return _run(arguments)
    except (UserError, MistakesError) as error:
        print(error_text(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, `head` perhaps, has gone
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        print(error_text(too_few_files(error)), file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    if " ".join(arguments[:2]) in OF_MODULES:  # a command of two words
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    parser = _parser(options_of=arguments[:1])
    chosen, rest = parser.parse_known_args([*_with_a_number_of_ranks(arguments)])
    # argparse takes no positional after an option: overrides that stand there come back as the rest
    options = [word for word in rest if word.startswith("-")]
    if options and "settings" in chosen:
        raise _no_option(options[0], chosen.command)
    if rest and "settings" not in chosen:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _run_settings(chosen, [*chosen.settings, *rest]) if "settings" in chosen else _run_alone(chosen, arguments)


def _no_option(word: str, command: str) -> UserError:
    """A setting is no option, as in other programs it is."""
    meant = nearest(word.partition("=")[0].lstrip("-").replace("-", "_"))
    example = f"{meant[0]}=… perhaps" if meant else "section.setting=value"
    remedy = f"Settings are written without dashes: {example}; `megatron-dppo {command} --help` lists the options"
    return UserError("argument", word, f"is no option of {command}", remedy)


def _with_a_number_of_ranks(arguments: Sequence[str]) -> Iterator[str]:
    """``--check`` with what it takes: a number, where one follows, and no other word."""
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        yield "--check=0" if word == "--check" and not following.isdecimal() else word


def _run_alone(chosen: argparse.Namespace, words: Sequence[str]) -> int:
    """A command that reads no run's settings; ``words`` are those of the command line."""
    if chosen.command in OF_MODULES:
        given = (chosen, words) if chosen.command == "compress" else (chosen,)
        return _imported(OF_MODULES[chosen.command].job)(*given) or 0
    if chosen.command == "doctor":
        from megatron_dppo.doctor import doctor

        return doctor(as_json=chosen.json)
    from megatron_dppo.report.page import report

    report(chosen.runs, chosen.out, png=chosen.png, price=chosen.price)
    return 0


def _run_settings(chosen: argparse.Namespace, words: Sequence[str]) -> int:
    """A command for CONFIG and overrides."""
    if chosen.command == "plan":
        from megatron_dppo.estimate.report import plan

        assumed = [word for word in words if word.startswith("assume.")]
        smaller = {name: getattr(chosen, name) for name in ("keep", "method", "multiple")}
        return plan(_read([word for word in words if word not in assumed]), assumed, json_wanted=chosen.json, **smaller)
    if chosen.command == "eval":
        if chosen.against and chosen.out and not words and not chosen.model:
            from megatron_dppo.evaluation.scores import compare_folders

            print("\n".join(compare_folders(Path(chosen.out), Path(chosen.against))))
            return 0
        first, last = _eval_settings(chosen)
        words = [*first, *words, *last]
    if chosen.command == "probe-tree":
        places = [] if chosen.at is None else [f"probe.at=[{chosen.at}]"]
        words = [*words, *places, *(_model_settings(chosen.model) if chosen.model else [])]
    checked = chosen.command in ("train", "sft") and chosen.check is not None
    config = _read(words, load_whole if checked else load_config)
    if chosen.print_config:
        print(as_yaml(config), end="")
        return 0
    if chosen.command == "launch":
        from megatron_dppo.launch.nemo_run import launch

        return launch(config, words, executor=chosen.executor, dry_run=chosen.dry_run, detach=chosen.detach)
    if chosen.command == "serve":
        from megatron_dppo.rollout.servers.serve import serve

        return serve(config)
    if checked:
        from megatron_dppo.launch.start import check

        done = check(config, chosen.command, ranks=chosen.check)
        print("no mistake was found", file=sys.stderr)  # what is printed is for job scripts
        print(done)
        return 0
    from megatron_dppo.launch.start import run

    return run(chosen.command, config)


def _read(words: Sequence[str], load: Callable[[str | None, Sequence[str]], Config] = load_config) -> Config:
    """CONFIG and overrides; CONFIG may be left out, and is the one word that is no ``a.b=c``."""
    files = [word for word in words if "=" not in word or Path(word).is_file()]
    if len(files) > 1:
        remedy = "Give one, and write overrides as section.setting=value"
        raise UserError("CONFIG", " ".join(files), "is more than one file", remedy)
    return load(files[0] if files else None, [word for word in words if word not in files])


def _parser(*, options_of: Sequence[str]) -> argparse.ArgumentParser:
    """Of all commands; the options of some, which are slow to import, for ``options_of`` alone."""
    parser = argparse.ArgumentParser(
        prog="megatron-dppo",
        description="Reinforcement learning of Qwen3 policies with Dynamic Pruning Policy Optimization.",
    )
    parser.add_argument("--version", action="version", version=f"megatron-dppo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_commands_with_settings(commands)
    plan = commands.add_parser("plan", help="tell beforehand what a run needs, how long it takes and what it costs")
    what = "as for train; cluster.* says on which machines, assume.* what to assume"
    plan.add_argument("settings", nargs="*", metavar="CONFIG a.b=c", help=what)
    plan.add_argument("--json", action="store_true", help="print JSON")
    what = "say, too, what it saves to `megatron-dppo compress` the policy to this share of its layers' weights"
    plan.add_argument("--keep", metavar="SHARE", type=float, help=what)
    how = "in which way, as compress has it (default: width)"
    plan.add_argument("--method", choices=("width", "depth", "heads", "experts", "hidden", "minitron"), help=how)
    multiple = "units, channels or experts left are a multiple of N, as for compress (default: 128; experts: 8)"
    plan.add_argument("--multiple", metavar="N", type=int, help=multiple)
    report = commands.add_parser("report", help="write one page on a run, or on several compared")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run: its run.dir")
    report.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    report.add_argument("--png", type=Path, metavar="FOLDER", help="draw the runs' pictures there as well")
    report.add_argument("--price", type=float, help="of a GPU for an hour, in place of cluster.price_per_gpu_hour")
    for command, of_module in OF_MODULES.items():
        of = _add_command(commands, command, of_module.help)
        if command in options_of:
            _imported(of_module.options)(of)
    doctor = commands.add_parser("doctor", help="show what is installed and what will be used")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_command(commands: Any, command: str, what: str) -> argparse.ArgumentParser:
    sentence = what[0].upper() + what[1:] + "."
    parser: argparse.ArgumentParser = commands.add_parser(command, help=what, description=sentence)
    return parser


def _imported(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"megatron_dppo.{module}"), name)
    return found


def _add_commands_with_settings(commands: Any) -> None:
    """Those that read a run's settings."""
    for command, what in (
        ("train", "train a policy; run again, it resumes from the last checkpoint in run.dir"),
        ("sft", "warm a policy up on worked answers"),
        ("eval", "score a policy on benchmarks; run again, it goes on from the answers that are there"),
        (
            "probe-tree",
            "tell where, if at all, completions should fork into a tree (rollout.tree), by a policy's gradients",
        ),
        ("serve", "run the rollout server of this node, in a Slurm job beside the trainer's"),
        ("launch", "train as a NeMo-Run experiment, here or on Slurm, on the machines that cluster.* names"),
    ):
        of = _add_command(commands, command, what)
        what = "a YAML file, and settings that override what it says"
        of.add_argument("settings", nargs="*", metavar="CONFIG a.b=c", help=what)
        of.add_argument("--print-config", action="store_true", help="print every setting with its meaning, and stop")
        if command in ("train", "sft"):
            what = "look for all that can be known to be wrong, with so many ranks, say what is done already, and stop"
            of.add_argument("--check", nargs="?", const=0, type=int, metavar="RANKS", help=what)
        if command == "launch":
            of.add_argument("--executor", choices=("local", "slurm"), default="local", help="where to run")
            of.add_argument("--dry-run", action="store_true", help="print the job as a script that runs as it is")
            of.add_argument("--detach", action="store_true", help="on Slurm, do not wait for the end")
        if command == "eval":
            _add_eval_arguments(of)
        if command == "probe-tree":
            of.add_argument("--model", metavar="FOLDER", help=MODEL)
            what = "places, in shares of the mean response's length (default: probe.at)"
            of.add_argument("--at", metavar="A,…", help=what)


def _add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """The options beside CONFIG and overrides."""
    parser.add_argument("--model", metavar="FOLDER", help=MODEL)
    what = "names with commas between, NAME=FILE for a file of your own (default: what CONFIG holds out)"
    parser.add_argument("--benchmarks", metavar="NAME,…", help=what)
    for flag, (_, value, meaning) in EVAL_FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=value, help=meaning)


def _eval_settings(chosen: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The overrides that go before the user's own, and those that go after them.

    Raises:
        UserError: if ``--model`` is neither a Hugging Face directory nor a checkpoint.
    """
    after = [
        f"{setting}={getattr(chosen, flag)}"
        for flag, (setting, _, _) in EVAL_FLAGS.items()
        if getattr(chosen, flag) is not None
    ]
    if chosen.benchmarks is not None:
        after += [f"eval.benchmarks={json.dumps(chosen.benchmarks.split(','))}", "data.eval=null"]
    # A training run's evaluations are a part of each benchmark, to be quick; this one is for its score.
    return ["eval.problems=null"], [*after, *(_model_settings(chosen.model) if chosen.model else [])]


def _model_settings(model: str) -> list[str]:
    from megatron_dppo.evaluation.answers import policy_in

    found = policy_in(Path(model))
    return [f"model.{name}={'null' if value is None else value}" for name, value in found.items()]


if __name__ == "__main__":
    sys.exit(main())
