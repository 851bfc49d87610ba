"""The options of ``megatron-dppo eval``: short words for settings, so that every rank reads them in one place."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import HF_FOLDER, find_checkpoint

FLAGS = {
    "samples": ("eval.samples", "K", "answers to each problem (default: 1)"),
    "temperature": ("eval.temperature", "T", "0 is greedy (default: greedy for one sample, else rollout.temperature)"),
    "problems": ("eval.problems", "N", "ask the first N of each benchmark (default: all)"),
    "data": ("eval.folder", "FOLDER", "where the benchmarks' files lie"),
    "out": ("eval.out", "FOLDER", "where answers and scores go; run again, it goes on from what is there"),
    "against": ("eval.against", "FOLDER", "an earlier evaluation's, to compare with, problem by problem"),
}
"""Setting, what its value is called, and meaning."""


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """The options beside CONFIG and overrides."""
    what = "Hugging Face directory, run, or checkpoint of a run (default: the model of CONFIG)"
    parser.add_argument("--model", metavar="FOLDER", help=what)
    what = "names with commas between, NAME=FILE for a file of your own (default: what CONFIG holds out)"
    parser.add_argument("--benchmarks", metavar="NAME,…", help=what)
    for flag, (_, value, meaning) in FLAGS.items():
        parser.add_argument(f"--{flag}", metavar=value, help=meaning)


def eval_settings(chosen: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The overrides that go before the user's own, and those that go after them.

    Raises:
        UserError: if ``--model`` is neither a Hugging Face directory nor a checkpoint.
    """
    after = [
        f"{setting}={getattr(chosen, flag)}"
        for flag, (setting, _, _) in FLAGS.items()
        if getattr(chosen, flag) is not None
    ]
    if chosen.benchmarks is not None:
        after += [f"eval.benchmarks={json.dumps(chosen.benchmarks.split(','))}", "data.eval=null"]
    # A training run's evaluations are a part of each benchmark, to be quick; this one is for its score.
    return ["eval.problems=null"], [*after, *(_model_settings(chosen.model) if chosen.model else [])]


def _model_settings(model: str) -> list[str]:
    folder = Path(model)
    if (folder / "config.json").is_file():
        return [f"model.path={folder}", "model.checkpoint=null"]
    inside = folder / "checkpoints"
    place = find_checkpoint(inside if inside.is_dir() else folder, "--model")
    companions = place.parent / HF_FOLDER
    words = [f"model.checkpoint={place}"]
    return [*words, f"model.path={companions}"] if (companions / "config.json").is_file() else words
