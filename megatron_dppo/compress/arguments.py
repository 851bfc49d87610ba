"""Arguments of ``megatron-dppo compress`` and ``compress sweep``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dppo.bridge.convert_commands import positive
from megatron_dppo.compress.choose import SCORES
from megatron_dppo.compress.cut import MULTIPLES

SOURCE = "the larger policy: a Hugging Face directory, a run, or an id on the hub"
SHARE = "share of the weights of all layers that is left, embeddings aside"


def add_compress_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo compress``."""
    parser.add_argument("source", metavar="MODEL", type=Path, help=SOURCE)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    parser.add_argument("--keep", type=float, required=True, help=SHARE)
    what = (
        "what goes: layers, units of feed-forward layers, groups of query heads, experts, channels of the residual "
        "stream (hidden), these with units and groups (minitron), or units and some attention (2ssp)"
    )
    parser.add_argument("--method", choices=list(SCORES), default="width", help=f"{what} (default: %(default)s)")
    scores = "; ".join(f"{method}: {', '.join(names)}" for method, names in SCORES.items())
    parser.add_argument("--score", help=f"what is kept; the first is the default. {scores}")
    add_calibration_arguments(parser)
    refit = (
        "fit down projections to what is left, by least squares: residual streams as close to MODEL's as can be; not "
        "with --layout or --score shapley-reward"
    )
    parser.add_argument("--refit", action="store_true", help=refit)
    config = (
        "with which --score shapley-reward has answers made and scored: a YAML file, and settings that override it; "
        "comes last"
    )
    parser.add_argument("--config", metavar="CONFIG a.b=c", nargs="+", help=config)
    verify = (
        "load what was written, and compare its logits with those of MODEL without the parts that are gone, and with "
        "the fitted weights of --refit"
    )
    parser.add_argument("--verify", action="store_true", help=verify)
    dry_run = "check everything, print what would be written, and stop"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory that stands there")


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo compress sweep``."""
    parser.add_argument("source", metavar="MODEL", type=Path, help=SOURCE)
    again = "folder for policies and figures; run again, it goes on from what is there"
    parser.add_argument("out", metavar="OUT", type=Path, help=again)
    parser.add_argument("--keep", metavar="SHARE", type=float, nargs="+", required=True, help=f"{SHARE}: each of these")
    methods = "or METHOD:SCORE or METHOD:SCORE:refit, see `megatron-dppo compress --help` (default: width depth)"
    parser.add_argument("--methods", metavar="METHOD", nargs="+", default=["width", "depth"], help=methods)
    add_calibration_arguments(parser)
    config = "with which policies are asked and recovered: a YAML file, and settings that override what it says"
    parser.add_argument("--config", metavar="CONFIG a.b=c", nargs="+", help=config)
    recover = "steps of sft to recover by, each a run of its own, until one is enough (default: no recovery)"
    parser.add_argument("--recover", metavar="STEPS", type=positive(int), nargs="+", default=[], help=recover)
    enough = "share of the whole policy's accuracy that counts as recovered (default: %(default)s)"
    parser.add_argument("--enough", metavar="SHARE", type=float, default=0.95, help=enough)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _seed(text: str) -> int:
    if not 0 <= (seed := int(text)) < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^63 - 1")
    return seed


def add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that ``compress`` and ``compress sweep`` share."""
    calibrate = "prompts with responses that parts are scored on: the --out folder of `megatron-dppo eval`, or a file"
    parser.add_argument("--calibrate", metavar="FOLDER|FILE", type=Path, help=calibrate)
    for side, name in (("prompt", "prompt"), ("response", "response")):
        column = f"column of {side}s, of a file (default: %(default)s)"
        parser.add_argument(f"--{side}-key", metavar="COLUMN", default=name, help=column)
    parser.add_argument("--chat-template", action="store_true", help="put a file's prompts in the chat template")
    count = "sequences (of shapley-reward: prompts) to score on; as many others measure the loss (default: %(default)s)"
    parser.add_argument("--sequences", metavar="N", type=positive(int), default=256, help=count)
    longest = "of a sequence; the end of longer ones is left out (default: %(default)s)"
    pairs = "measure Shapley values on N pairs of random halves of the layers (default: leave out one layer at a time)"
    parser.add_argument("--subnetworks", metavar="N", type=positive(int), help=pairs)
    parser.add_argument("--max-tokens", metavar="N", type=positive(int), default=2048, help=longest)
    multiple = (
        f"units and channels left are a multiple of N (default: {MULTIPLES['width']}; give 128 x layout.tp), experts "
        f"(default: {MULTIPLES['experts']}; give layout.ep)"
    )
    parser.add_argument("--multiple", metavar="N", type=positive(int), help=multiple)
    zeros = "write attention that 2ssp removes as zeros, which keep their size: config.json cannot say that it is gone"
    parser.add_argument("--zero-attention", action="store_true", help=zeros)
    parser.add_argument("--seed", type=_seed, default=1, help="of what is drawn: sequences, subnetworks, random scores")
    workers = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--workers", type=positive(int), default=workers, help="threads that write (default: %(default)s)"
    )
    layout = "score in shards on many ranks: layout.* without layout., as tp=8,pp=2"
    parser.add_argument("--layout", metavar="A=N,…", help=layout)


def options_of_both(chosen: argparse.Namespace) -> dict[str, Any]:
    """Options of :func:`add_calibration_arguments`."""
    parser = argparse.ArgumentParser()
    add_calibration_arguments(parser)
    return {name: getattr(chosen, name) for name in vars(parser.parse_args([]))}


def as_words(options: Mapping[str, Any]) -> list[str]:
    """As they are typed. One that is None was not given."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return words
