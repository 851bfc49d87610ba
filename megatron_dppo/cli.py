"""Command line: ``megatron-dppo`` with the commands of :data:`COMMANDS`.

Heavy imports wait, so that wrong settings fail at once.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from megatron_dppo import __version__
from megatron_dppo.config import Config
from megatron_dppo.errors import MistakesError, UserError, format_error, format_missing_extra
from megatron_dppo.evaluation.options import (
    MODEL,
    add_eval_arguments,
    build_eval_overrides,
    build_model_overrides,
)
from megatron_dppo.process.files import make_file_limit_error
from megatron_dppo.process.guard import run_guarded
from megatron_dppo.process.lifetime import MARKER, exit_process
from megatron_dppo.process.streams import (
    escape_unencodable,
    filter_upstream_warnings,
    print_message,
)
from megatron_dppo.settings import RENAMED, as_yaml, find_nearest_settings, load_whole

COMMANDS = {
    "Train": {
        "quickstart": "Start here: make, warm up and train a small policy, in minutes on two "
        "cores.",
        "train": "Train a policy by reinforcement learning, or resume from the checkpoint in "
        "run.dir.",
        "sft": "Fine-tune a policy on worked answers first, if few of its own answers earn a "
        "reward.",
        "launch": "Start a run with NeMo-Run: on Slurm without a job script, or on this machine.",
        "serve": "Run this node's rollout server, in a Slurm job with nodes for servers.",
    },
    "Evaluate": {
        "eval": "Score a policy on benchmarks, or compare two. Evaluation resumes from answers in "
        "--out.",
        "report": "Write an HTML page about a run, during training or later, or a comparison of "
        "several.",
    },
    "Plan": {
        "configs": "List or copy the example configurations and Slurm scripts, to begin a run of "
        "your own.",
        "plan": "Estimate memory, time and cost of a run, before it takes GPUs.",
        "doctor": "Print the packages and the hardware, after an installation or for a bug report.",
        "probe-batch": "Estimate whether a smaller batch would do, and how much to prune, before a "
        "long run.",
    },
    "Models": {
        "init": "Create a small policy with random weights, and its tokenizer, for a first "
        "experiment.",
        "export": "Write a run's policy as a Hugging Face directory, to serve or publish it.",
        "convert to-hf": "Write a Megatron checkpoint (torch_dist) as a Hugging Face model, for "
        "other libraries.",
        "convert from-hf": "Write a Hugging Face model as a Megatron checkpoint, for trainers that "
        "load no other.",
        "compress": "Make a smaller policy from a larger one, if rollouts or serving cost too "
        "much.",
    },
}
EXAMPLE = """\
Example:
  megatron-dppo train configs/quickstart.yaml run.dir=runs/second optimizer.lr=1e-4

`megatron-dppo quickstart` requires no GPU.
`megatron-dppo COMMAND --help` lists a command's options."""


OF_MODULES = {
    "quickstart": ("quickstart:add_quickstart_arguments", "quickstart:quickstart"),
    "configs": ("quickstart:add_configs_arguments", "quickstart:configs"),
    "convert to-hf": (
        "bridge.convert_commands:add_to_hf_arguments",
        "bridge.convert_commands:to_hf",
    ),
    "convert from-hf": (
        "bridge.convert_commands:add_from_hf_arguments",
        "bridge.convert_commands:from_hf",
    ),
    "init": ("init:add_init_arguments", "init:init_from_arguments"),
    "compress": ("compress.command:add_compress_arguments", "compress.command:compress"),
    "export": ("export:add_export_arguments", "export:export"),
}
"""Commands in modules that are slow to import: functions to add options, and to run."""
# Default and minimum of ``probe-batch``.
STEPS = 12
LEAST_STEPS = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 2 for a user's mistake, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    escape_unencodable()
    filter_upstream_warnings()
    try:
        return _run(arguments)
    except (UserError, MistakesError) as error:
        print_message(format_error(error))
        return 2
    except ModuleNotFoundError as error:
        print_message(format_missing_extra(error))
        return 2
    except KeyboardInterrupt:
        return 130
    # The reader of standard output, such as `head`, has closed the pipe.
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            problem = "is longer than the name of a file can be"
            found = UserError("argument", error.filename, problem, "Give a shorter name")
        elif error.errno == errno.EMFILE:
            found = make_file_limit_error(error)
        else:
            raise
        print_message(format_error(found))
        return 2


def entry() -> NoReturn:
    """Run the command of this process."""
    # The process that starts ranks looks for the marks of all ranks.
    if MARKER in os.environ:
        exit_process(main())
    run_guarded(main)


def _run(arguments: Sequence[str]) -> int:
    # Join a command of two words.
    if " ".join(arguments[:2]) in OF_MODULES:
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    parser, _ = build_parsers(commands_with_options=arguments[:1])
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    _check_command(arguments[0])
    chosen, rest = parser.parse_known_args([*_add_rank_count(arguments)])
    # argparse takes no positional after an option: `rest` has the overrides after options.
    options = [word for word in rest if word.startswith("-")]
    if options and "settings" in chosen:
        raise _build_option_error(options[0], chosen.command)
    if rest and "settings" not in chosen:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "settings" not in chosen:
        return _run_without_config(chosen)
    return _run_settings(chosen, [*chosen.settings, *rest])


def _check_command(word: str) -> None:
    known = [command for commands in COMMANDS.values() for command in commands]
    if word.startswith("-") or word in known:
        return
    near = difflib.get_close_matches(word, known, 1)
    remedy = f"Did you mean {near[0]}?" if near else "`megatron-dppo --help` lists the commands"
    raise UserError("command", word, "does not exist", remedy)


def _build_option_error(word: str, command: str) -> UserError:
    """Build the error for a setting written as an option."""
    option = word.partition("=")[0]
    name = option.lstrip("-").replace("-", "_")
    if new := RENAMED.get(f"{command}.{name}"):
        new = f"--{new.partition('.')[2]}"
        return UserError("argument", word, f"{option} is now {new}", f"Write {new}")
    meant = find_nearest_settings(name)
    example = f"{meant[0]}=… perhaps" if meant else "section.setting=value"
    remedy = (
        f"Settings are written without dashes: {example}; `megatron-dppo {command} --help` "
        "lists the options"
    )
    return UserError("argument", word, f"is no option of {command}", remedy)


def _add_rank_count(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, with a number for ``--check``."""
    # argparse would take the next word as the number.
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        unnumbered = word == "--check" and not following.isdecimal() and arguments[0] != "serve"
        yield "--check=0" if unnumbered else word


def _run_without_config(arguments: argparse.Namespace) -> int:
    if arguments.command in OF_MODULES:
        return resolve_name(f"megatron_dppo.{OF_MODULES[arguments.command][1]}")(arguments) or 0
    if arguments.command == "doctor":
        from megatron_dppo.doctor import print_diagnostics

        return print_diagnostics(as_json=arguments.json)
    from megatron_dppo.report.page import report

    report(arguments.runs, arguments.out, png=arguments.png, price=arguments.price)
    return 0


def _run_settings(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    if arguments.command == "plan":
        # Assumptions are no settings: only the estimate reads them.
        assumed = [word for word in words if word.startswith("assume.")]
        config = read_config([word for word in words if word not in assumed])
        from megatron_dppo.estimate.report import plan, plan_search

        if arguments.search or arguments.gpus is not None:
            return plan_search(config, assumed, arguments.gpus, json_output=arguments.json)
        return plan(config, assumed, json_output=arguments.json)
    if arguments.command == "eval":
        # Two finished evaluations are compared without a policy.
        if arguments.baseline and arguments.out and not words and not arguments.model:
            from megatron_dppo.evaluation.scores import compare_folders

            print("\n".join(compare_folders(Path(arguments.out), Path(arguments.baseline))))
            return 0
        first, last = build_eval_overrides(arguments)
        words = [*first, *words, *last]
    # Last, so that the option wins over the file and the overrides.
    if arguments.command == "probe-batch" and arguments.model:
        words = [*words, *build_model_overrides(arguments.model)]
    checked = arguments.command in ("train", "sft") and arguments.check is not None
    config = read_config(words)
    if arguments.print_config:
        print(as_yaml(config), end="")
        return 0
    if arguments.command == "probe-batch":
        return _probe_batch(config, steps=arguments.steps, as_json=arguments.json)
    if arguments.command == "launch":
        from megatron_dppo.launch.job import launch

        return launch(
            config,
            words,
            executor=arguments.executor,
            dry_run=arguments.dry_run,
            detach=arguments.detach,
        )
    if arguments.command == "serve":
        from megatron_dppo.rollout.servers.serve import serve, task_server

        if arguments.check:
            print(f"server {task_server(config, os.environ).name}: no mistake was found")
            return 0
        return serve(config)
    if checked:
        from megatron_dppo.launch.start import check

        done = check(config, arguments.command, ranks=arguments.check)
        # Keep standard output for job scripts.
        print_message("no mistake was found")
        print(done)
        return 0
    from megatron_dppo.launch.start import run

    return run(arguments.command, config)


def _probe_batch(config: Config, *, steps: int, as_json: bool) -> int:
    if steps < LEAST_STEPS:
        problem = (
            f"is too few: the prompt predictor learns from the first {LEAST_STEPS - 2}, and "
            "intervals require 2 more"
        )
        raise UserError("--steps", steps, problem, f"Give {LEAST_STEPS} or more")
    if config.rollout.prompts_per_step < 2:
        problem = "has no halves, whose gradients the noise scale compares"
        raise UserError(
            "rollout.prompts_per_step",
            config.rollout.prompts_per_step,
            problem,
            "Set it to 2 or more",
        )
    from megatron_dppo.launch.start import run

    return run("probe-batch", config, {"steps": steps, "as_json": as_json})


def read_config(words: Sequence[str]) -> Config:
    """Read overrides, and the optional CONFIG."""
    # A file's name may contain an equals sign.
    files = [word for word in words if "=" not in word or _is_file(word)]
    if len(files) > 1:
        remedy = "Give one, and write overrides as section.setting=value"
        raise UserError("CONFIG", " ".join(files), "is more than one file", remedy)
    return load_whole(files[0] if files else None, [word for word in words if word not in files])


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    # An override may be longer than a file name can be.
    except OSError:
        return False


def build_parsers(
    *, commands_with_options: Collection[str] = OF_MODULES.keys()
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the program's parser, and the commands' parsers.

    ``commands_with_options`` of ``OF_MODULES`` have options, which need slow imports.
    """
    groups = []
    for group, commands in COMMANDS.items():
        lines = [f"  {command:<18}{description}" for command, description in commands.items()]
        groups.append(f"{group}:\n" + "\n".join(lines))
    parser = argparse.ArgumentParser(
        prog="megatron-dppo",
        usage="megatron-dppo COMMAND ...",
        description="Reinforcement learning for Qwen3, with Dynamic Pruning Policy Optimization "
        "(DPPO).",
        epilog="\n\n".join((*groups, EXAMPLE)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron-dppo {__version__}")
    added = parser.add_subparsers(
        dest="command", required=True, prog="megatron-dppo", help=argparse.SUPPRESS
    )
    parsers = {
        command: added.add_parser(command, description=description)
        for commands in COMMANDS.values()
        for command, description in commands.items()
    }
    _add_settings_arguments(parsers)
    add_eval_arguments(parsers["eval"])
    _add_plan_arguments(parsers["plan"])
    report = parsers["report"]
    report.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run (run.dir), or NAME=FOLDER",
    )
    report.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)"
    )
    report.add_argument(
        "--png", type=Path, metavar="FOLDER", help="also draw the runs' pictures, in this folder"
    )
    meaning = "price of one GPU-hour; overrides cluster.price_per_gpu_hour"
    report.add_argument("--price", type=float, help=meaning)
    for command in OF_MODULES.keys() & {*commands_with_options}:
        resolve_name(f"megatron_dppo.{OF_MODULES[command][0]}")(parsers[command])
    parsers["doctor"].add_argument("--json", action="store_true", help="print JSON")
    return parser, parsers


def _add_settings_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    for command in ("train", "sft", "eval", "probe-batch", "serve", "launch"):
        meaning = "a YAML file, and settings that override it"
        parsers[command].add_argument(
            "settings", nargs="*", metavar="CONFIG SETTING=VALUE", help=meaning
        )
        meaning = "print every setting with its meaning, and exit"
        parsers[command].add_argument("--print-config", action="store_true", help=meaning)
    for command in ("train", "sft"):
        meaning = "validate settings, data and functions for RANKS ranks, print progress, and exit"
        parsers[command].add_argument(
            "--check", nargs="?", const=0, type=int, metavar="RANKS", help=meaning
        )
    meaning = "check this task's server, its interpreter and its GPUs, start nothing, and exit"
    parsers["serve"].add_argument("--check", action="store_true", help=meaning)
    launch = parsers["launch"]
    probe = parsers["probe-batch"]
    meaning = "where to run (default: %(default)s)"
    launch.add_argument("--executor", choices=("local", "slurm"), default="local", help=meaning)
    launch.add_argument(
        "--dry-run", action="store_true", help="print the job as a script that can be submitted"
    )
    launch.add_argument(
        "--detach", action="store_true", help="do not wait for the end of a Slurm job"
    )
    probe.add_argument("--model", metavar="FOLDER", help=MODEL)
    meaning = "unpruned steps to measure (default: %(default)s)"
    probe.add_argument("--steps", metavar="N", type=int, default=STEPS, help=meaning)
    probe.add_argument("--json", action="store_true", help="print JSON")


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    meaning = "as for train; cluster.* describes the machines, assume.* the assumptions"
    parser.add_argument("settings", nargs="*", metavar="CONFIG SETTING=VALUE", help=meaning)
    parser.add_argument("--json", action="store_true", help="print JSON")
    meaning = (
        "print the settings of the fastest and of the cheapest step that fit, GPUs for training "
        "and rollouts included"
    )
    parser.add_argument("--search", action="store_true", help=meaning)
    parser.add_argument(
        "--gpus", metavar="N", type=int, help="search: at most N GPUs (default: the run's)"
    )


if __name__ == "__main__":
    sys.exit(main())
