"""``megatron-dppo compress``: a smaller policy from a larger one, as a Hugging Face directory like any other."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.convert import LIMITS, TOKENS, logits_dtype
from megatron_dppo.bridge.convert_commands import naming, positive
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.compress.calibration import Accumulator, batches
from megatron_dppo.compress.choose import SCORES
from megatron_dppo.compress.cut import MULTIPLE, Cut
from megatron_dppo.compress.job import CompressionJob
from megatron_dppo.compress.reader import Whole
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.streams import quieten

SOURCE = "the larger policy: a Hugging Face directory, a run, or an id on the hub"
SHARE = "share of the weights of all layers that is left, embeddings aside"


def add_compress_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo compress``."""
    parser.add_argument("source", metavar="MODEL", type=Path, help=SOURCE)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    parser.add_argument("--keep", type=float, required=True, help=SHARE)
    what = "what goes: layers, units of feed-forward layers, or units and some attention (2ssp)"
    parser.add_argument("--method", choices=list(SCORES), default="width", help=f"{what} (default: %(default)s)")
    scores = "; ".join(f"{method}: {', '.join(names)}" for method, names in SCORES.items())
    parser.add_argument("--score", help=f"what is kept; the first is the default. {scores}")
    add_calibration_arguments(parser)
    verify = "load what was written, and compare its logits with those of MODEL without the parts that are gone"
    parser.add_argument("--verify", action="store_true", help=verify)
    dry_run = "check everything, print what would be written, and stop"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory that stands there")


def _seed(text: str) -> int:
    if not 0 <= (seed := int(text)) < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^63 - 1")
    return seed


def add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of what parts are scored on, and of how they are removed."""
    calibrate = "prompts with responses that parts are scored on: the --out folder of `megatron-dppo eval`, or a file"
    parser.add_argument("--calibrate", metavar="FOLDER|FILE", type=Path, help=calibrate)
    for side, name in (("prompt", "prompt"), ("response", "response")):
        column = f"column of {side}s, of a file (default: %(default)s)"
        parser.add_argument(f"--{side}-key", metavar="COLUMN", default=name, help=column)
    parser.add_argument("--chat-template", action="store_true", help="put a file's prompts in the chat template")
    count = "sequences to score on; as many others measure the loss (default: %(default)s)"
    parser.add_argument("--sequences", metavar="N", type=positive(int), default=256, help=count)
    longest = "of a sequence; the end of longer ones is left out (default: %(default)s)"
    pairs = "measure Shapley values on N pairs of random halves of the layers (default: leave out one layer at a time)"
    parser.add_argument("--subnetworks", metavar="N", type=positive(int), help=pairs)
    parser.add_argument("--max-tokens", metavar="N", type=positive(int), default=2048, help=longest)
    multiple = f"units left are a multiple of N (default: {MULTIPLE}; give 128 x layout.tp)"
    parser.add_argument("--multiple", metavar="N", type=positive(int), help=multiple)
    zeros = "write attention that 2ssp removes as zeros, which keep their size: config.json cannot say that it is gone"
    parser.add_argument("--zero-attention", action="store_true", help=zeros)
    parser.add_argument("--seed", type=_seed, default=1, help="of what is drawn: sequences, subnetworks, random scores")
    workers = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--workers", type=positive(int), default=workers, help="threads that write (default: %(default)s)"
    )


def compress(chosen: argparse.Namespace) -> int:
    """Choose what goes, write what is left, and verify it where that is asked for. Returns the exit code.

    Raises:
        UserError: for what cannot be done to this policy; ``OUT`` is as it was.
    """
    quieten()
    chosen.named, chosen.source = str(chosen.source), policy_folder(str(chosen.source), "MODEL")
    work = CompressionJob.of(chosen)
    work.check_out()
    scored, others = work.calibration()
    if chosen.dry_run:
        work.say_what_would_be_done()
        return 0
    asked = work.recipe.score != "random" or scored or chosen.verify
    model: Any = load_whole(chosen.source, work.shape, work.plan.dtype) if asked else None

    def reader(answers: Sequence[WorkedAnswer], passes: Accumulator) -> Whole:
        read = list(batches(answers, max_tokens=chosen.max_tokens, device=device()))
        return Whole(model, work.shape, read, passes)

    cut, losses = work.score(reader, scored, others)
    verify = partial(_verify, model) if chosen.verify else None
    work.write(cut, losses, of_others=bool(others), verify=verify)
    return 0


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_whole(folder: Path, shape: PolicyShape, stored: torch.dtype) -> Any:
    """Transformers' own model, whole: in fp32 where the host has room for that."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        dtype = stored if torch.cuda.is_available() else logits_dtype(shape, stored)
    except UserError as error:
        remedy = "Use a machine with more memory: scores take the whole policy"
        raise UserError("MODEL", folder, error.problem.replace("logits", "scores"), remedy) from error
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device()).eval()


@torch.no_grad()
def _verify(model: Any, written: Path, shape: PolicyShape, cut: Cut) -> float:
    """The largest difference of two logits of the written policy and the larger one, over the deviation of all.

    Raises:
        UserError: if it is beyond what different kernels explain, or a tensor is missing.
    """
    with naming("--verify"):
        left = read_shape(written)
        check_weights(written, left)
    tokens = torch.randint(shape.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device())
    with Whole(model, shape, ()).as_cut(cut):
        expected = model(tokens, use_cache=False).logits.float()
    smaller = load_whole(written, left, model.dtype).to(model.dtype)
    difference = float((smaller(tokens, use_cache=False).logits.float() - expected).abs().max() / expected.std())
    limit = LIMITS["bf16" if model.dtype == torch.bfloat16 else "fp32"]
    if not difference <= limit:
        problem = f"the written policy's logits are {difference:.2g} of their deviation off, over {limit:g}"
        raise UserError("--verify", written, problem, "Compress again, and report it")
    return difference
