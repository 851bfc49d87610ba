"""Options of the command ``eval``, and the settings that they stand for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MODEL = (
    "Hugging Face directory, id on the hub, run, or checkpoint of a run (default: the model "
    "of "
    "CONFIG)"
)
EVAL_FLAGS = {
    "samples": ("eval.samples", "K", "answers per problem (default: 1)"),
    "temperature": (
        "eval.temperature",
        "T",
        "0: greedy (default: 0 for one sample, else rollout.temperature)",
    ),
    "problems": ("eval.problems", "N", "use the first N problems of each benchmark (default: all)"),
    "data": ("eval.folder", "FOLDER", "folder of the benchmarks' files"),
    "out": ("eval.out", "FOLDER", "folder for answers and scores"),
    "against": (
        "eval.against",
        "FOLDER",
        "folder of an earlier evaluation, for a paired comparison",
    ),
}
"""Options of ``eval``: the setting that each option sets, the name of its value, and its
meaning."""


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """The options beside CONFIG and overrides."""
    parser.add_argument("--model", metavar="FOLDER", help=MODEL)
    meaning = (
        "comma-separated names; NAME=FILE for your own (default: data.eval and eval.benchmarks "
        "of CONFIG)"
    )
    parser.add_argument("--benchmarks", metavar="NAME,…", help=meaning)
    for flag, (_, value, meaning) in EVAL_FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=value, help=meaning)


def build_eval_overrides(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The overrides that go before the user's own, and those that go after them.

    Raises:
        UserError: if ``--model`` is neither a Hugging Face directory nor a checkpoint.
    """
    after = [
        f"{setting}={getattr(arguments, flag)}"
        for flag, (setting, _, _) in EVAL_FLAGS.items()
        if getattr(arguments, flag) is not None
    ]
    if arguments.benchmarks is not None:
        after += [
            f"eval.benchmarks={json.dumps(arguments.benchmarks.split(','))}",
            "data.eval=null",
        ]
    # A training run's evaluations are a part of each benchmark, to be quick; this one is for its
    # score.
    return ["eval.problems=null"], [
        *after,
        *(build_model_overrides(arguments.model) if arguments.model else []),
    ]


def build_model_overrides(model: str) -> list[str]:
    """The overrides that make a run, a checkpoint or a Hugging Face directory the policy."""
    from megatron_dppo.evaluation.answers import find_policy

    found = find_policy(Path(model))
    return [f"model.{name}={'null' if value is None else value}" for name, value in found.items()]
