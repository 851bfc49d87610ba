"""Options of the command ``eval``, and the corresponding settings."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MODEL = (
    "Hugging Face directory, id on the hub, run, or checkpoint of a run (default: the model of "
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
    "baseline": (
        "eval.baseline",
        "FOLDER",
        "folder of an earlier evaluation, for a paired comparison",
    ),
}


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``eval``; the caller adds the arguments CONFIG and overrides."""
    parser.add_argument("--model", metavar="FOLDER", help=MODEL)
    meaning = (
        "comma-separated names; NAME=FILE for your own (default: data.eval and eval.benchmarks "
        "of CONFIG)"
    )
    parser.add_argument("--benchmarks", metavar="NAME,…", help=meaning)
    for flag, (_, value, meaning) in EVAL_FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=value, help=meaning)


def build_eval_overrides(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return overrides to apply before the user's overrides, and overrides to apply after.

    Raises:
        UserError: if ``--model`` is no Hugging Face directory, hub id, run or checkpoint.
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
    if arguments.model:
        after += build_model_overrides(arguments.model)
    # Evaluate whole benchmarks: only evaluations during training are partial, for speed.
    return ["eval.problems=null"], after


def build_model_overrides(model: str) -> list[str]:
    """Return overrides of ``model.path`` and ``model.checkpoint`` that select a policy: a Hugging
    Face directory, hub id, run or checkpoint."""
    from megatron_dppo.evaluation.answers import find_policy

    overrides = []
    for name, value in find_policy(Path(model)).items():
        overrides.append(f"model.{name}={'null' if value is None else value}")
    return overrides
