"""``megatron-dppo compress``: a smaller policy from a larger one, as a Hugging Face directory like any other."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.convert import LIMITS, TOKENS, logits_dtype
from megatron_dppo.bridge.convert_commands import naming, positive
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.compress.calibration import BATCH_TOKENS, Accumulator, batches, forget
from megatron_dppo.compress.choose import BY_REWARD, SCORES
from megatron_dppo.compress.cut import MULTIPLES, Cut
from megatron_dppo.compress.job import CompressionJob
from megatron_dppo.compress.reader import Reader, Whole
from megatron_dppo.config import Config, LoraConfig, replace
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.launch.rank import LAUNCHER
from megatron_dppo.launch.start import run_again
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.streams import quieten
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import preflight
from megatron_dppo.trainer.resume import flat

WHOLE_ALONE = ("shapley-logits", "in-a-row")
"""Scores that need the whole policy in one process: all logits, or streams of layers that lie far apart."""
SOURCE = "the larger policy: a Hugging Face directory, a run, or an id on the hub"
SHARE = "share of the weights of all layers that is left, embeddings aside"
ROUNDING = 512
"""Tokens that a pack has room for besides: sequences and packs are rounded up to what the layout divides."""


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
    config = (
        "with which --score shapley-reward has answers made and scored: a YAML file, and settings that override it; "
        "comes last"
    )
    parser.add_argument("--config", metavar="CONFIG a.b=c", nargs="+", help=config)
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


def compress(chosen: argparse.Namespace, words: Sequence[str]) -> int:
    """Choose what goes, write what is left, and verify it where that is asked for. Returns the exit code.

    Args:
        words: of the command line, with which ranks are started.

    Raises:
        UserError: for what cannot be done to this policy; ``OUT`` is as it was.
    """
    quieten()
    _check_options(chosen)
    chosen.named, chosen.source = str(chosen.source), policy_folder(str(chosen.source), "MODEL")
    if chosen.layout is not None or chosen.config:
        config = _config(chosen)
        if chosen.config and LAUNCHER not in os.environ:  # before any rank starts
            preflight(config, "compress")
        return run_again(words, config, partial(_compress_in_shards, chosen))
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

    depends_on = work.depends_on(scored, others, model.dtype if asked else None)
    cut, losses = work.score(reader, scored, others, depends_on)
    verify = partial(_verify, model) if chosen.verify else None
    work.write(cut, losses, of_others=bool(others), verify=verify)
    forget(chosen.out)
    return 0


def _compress_in_shards(chosen: argparse.Namespace, config: Config) -> None:
    """One rank's part: what reads or answers is in the trainer's own shards, and the leader writes. Collective.

    Raises:
        UserError: on every rank.
    """
    from megatron_dppo.compress.asking import Asking, digest_of_task, prompts_to_ask  # Megatron-Core
    from megatron_dppo.compress.live import Live
    from megatron_dppo.parallel.world import initialize, shut_down
    from megatron_dppo.trainer.assemble import assemble_frozen

    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    work = world.together(lambda: CompressionJob.of(chosen))
    world.from_leader(work.check_out)
    scored, others = world.together(work.calibration)
    if not scored and not chosen.config:
        raise UserError(
            "--layout", chosen.layout, "shards what reads sequences, and none are given", "Give --calibrate"
        )
    if chosen.dry_run:
        world.from_leader(work.say_what_would_be_done)
        return shut_down()
    with ExitStack() as to_close:
        parts = assemble_frozen(config, world, temperature=1.0)
        problems = prompts_to_ask(parts, chosen.sequences, chosen.seed) if chosen.config else []
        asking = Asking(config, parts, problems, to_close) if problems else None

        def reader(answers: Sequence[WorkedAnswer], passes: Accumulator) -> Reader:
            return Live(parts, answers, chosen.max_tokens, passes, asking)

        depends_on = world.from_leader(lambda: work.depends_on(scored, others, config.model.dtype, world.layout))
        if chosen.config:
            task = world.from_leader(lambda: digest_of_task(problems, config.reward.functions))
            depends_on |= {"--config": str(sorted(flat(config).items())), "task of --config": task}
        cut, losses = work.score(reader, scored, others, depends_on, world, asked=len(problems) or None)
    world.from_leader(lambda: work.write(cut, losses, of_others=bool(others)))
    forget(chosen.out)  # on every rank, since its sums may lie on a disk of its own machine
    shut_down()


def _check_options(chosen: argparse.Namespace) -> None:
    """
    Raises:
        UserError: for options that do not go together.
    """
    score = _score(chosen)
    check_asking(score, chosen.config)
    if chosen.config and score != BY_REWARD:
        problem = f"says how answers are asked for and scored, and --score {score} asks for none"
        raise UserError("--config", " ".join(chosen.config), problem, f"Leave it out, or give --score {BY_REWARD}")
    if chosen.verify:
        check_in_one_process("--verify", score, chosen.layout)


def check_asking(score: str, config: Sequence[str] | None) -> None:
    """
    Raises:
        UserError: naming ``--score``, if it has the policy answer and no configuration says what.
    """
    if score == BY_REWARD and not config:
        problem = "has the policy answer prompts, and no settings say which, and how answers are scored"
        raise UserError("--score", score, problem, "Give --config, the configuration of a run")


def check_in_one_process(option: str, score: str, layout: str | None) -> None:
    """Refuse an option that loads the whole policy, where a layout or rewards take ranks.

    Raises:
        UserError: naming the option.
    """
    if layout is not None or score == BY_REWARD:
        with_option = "--layout" if layout is not None else f"--score {score}"
        raise UserError(
            option, "true", "loads the whole policy in one process", f"Leave {option} out with {with_option}"
        )


def _score(chosen: argparse.Namespace) -> str:
    return chosen.score or SCORES[chosen.method][0]


def _config(chosen: argparse.Namespace) -> Config:
    """Settings of the ranks that score under a layout.

    Raises:
        UserError: naming the setting.
    """
    config = check_in_shards(_score(chosen), chosen.layout, chosen.config or ())
    with naming("MODEL"):
        stored = {of.dtype for of in check_weights(chosen.source, read_shape(chosen.source)).values()}
    dtype = config.model.dtype
    if not chosen.config:
        dtype = "bf16" if stored == {torch.bfloat16} and torch.cuda.is_available() else "fp32"
    tokens = max(BATCH_TOKENS, chosen.max_tokens) + ROUNDING
    model = replace(config.model, path=str(chosen.source), dtype=dtype, checkpoint=None, lora=LoraConfig())
    rollout = replace(config.rollout, sync=replace(config.rollout.sync, adapter=False, in_flight="retract"))
    pack = replace(config.pack, max_tokens=tokens, share_prefixes="off")
    return replace(config, model=model, rollout=rollout, pack=pack)


def check_in_shards(score: str, layout: str | None, config: Sequence[str] = ()) -> Config:
    """Settings with a layout, as ``--layout`` has it.

    Args:
        config: a file, and settings that override what it says; none: the defaults.

    Raises:
        UserError: naming ``--score``, if that is not known under a layout, or the setting.
    """
    if score in WHOLE_ALONE:
        remedy = "Give another --score, or leave --layout out"
        raise UserError("--score", score, "compares what no rank has all of under a layout", remedy)
    of_layout = [f"layout.{setting}" for setting in layout.split(",")] if layout else []
    return load_config(config[0] if config else None, [*config[1:], *of_layout])


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
