"""``megatron-dppo compress``: a smaller policy from a larger one, as a Hugging Face directory like any other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.convert import LIMITS, TOKENS, logits_dtype
from megatron_dppo.bridge.convert_commands import naming
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.compress.absence import as_cut
from megatron_dppo.compress.calibration import BATCH_TOKENS, batches, draw, read_sequences
from megatron_dppo.compress.choose import NO_CALIBRATION, SCORES, Recipe
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.live import Live
from megatron_dppo.compress.passes import Passes, forget
from megatron_dppo.compress.reader import Reader, Whole
from megatron_dppo.compress.refit import Refit
from megatron_dppo.compress.work import Work
from megatron_dppo.config import Config, replace
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.launch.start import run_again
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.parallel.world import initialize, shut_down
from megatron_dppo.process.streams import quieten
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.assemble import assemble_frozen

WHOLE_ALONE = ("shapley-logits", "in-a-row")
"""Scores that need the whole policy in one process: all logits, or streams of layers that lie far apart."""
ROUNDING = 512
"""Tokens that a pack has room for besides: sequences and packs are rounded up to what the layout divides."""


def compress(chosen: argparse.Namespace, words: Sequence[str]) -> int:
    """Choose what goes, write what is left, and verify it where that is asked for. Returns the exit code.

    Args:
        words: of the command line, with which ranks are started.

    Raises:
        UserError: for what cannot be done to this policy; ``OUT`` is as it was.
    """
    quieten()
    chosen.named, chosen.source = str(chosen.source), policy_folder(str(chosen.source), "MODEL")
    if chosen.layout is not None:
        return run_again(words, _config(chosen), partial(_compress_in_shards, chosen))
    work = Work.of(chosen)
    work.check_out()
    scored, others = calibration(chosen, work.recipe)
    if chosen.dry_run:
        work.say_what_would_be_done()
        return 0
    asked = work.recipe.score != "random" or scored or chosen.verify
    model: Any = load_whole(chosen.source, work.shape, work.plan.dtype) if asked else None

    def reader(answers: Sequence[WorkedAnswer], passes: Passes) -> Reader:
        read = list(batches(answers, max_tokens=chosen.max_tokens, device=device()))
        return Whole(model, work.shape, read, passes)

    depends_on = work.depends_on(scored, others, model.dtype if asked else None)
    read = list(batches(scored, max_tokens=chosen.max_tokens, device=device()))
    refit = Refit(model, work.shape, read, work.plan.dtype) if work.recipe.refit else None
    cut, losses = work.score(reader, scored, others, depends_on, refit=refit)
    verify = partial(_verify, model, refit) if chosen.verify else None
    work.write(cut, losses, of_others=bool(others), refit=refit, verify=verify)
    forget(chosen.out)
    return 0


def _compress_in_shards(chosen: argparse.Namespace, config: Config) -> None:
    """One rank's part; the leader writes. Collective.

    Raises:
        UserError: on every rank.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    work = world.together(lambda: Work.of(chosen))
    world.from_leader(work.check_out)
    scored, others = world.together(lambda: calibration(chosen, work.recipe))
    if not scored:
        raise UserError(
            "--layout", chosen.layout, "shards what reads sequences, and none are given", "Give --calibrate"
        )
    if chosen.dry_run:
        world.from_leader(work.say_what_would_be_done)
    else:
        parts = assemble_frozen(config, world, temperature=1.0)

        def reader(answers: Sequence[WorkedAnswer], passes: Passes) -> Reader:
            return Live(parts, answers, chosen.max_tokens, passes)

        depends_on = world.from_leader(lambda: work.depends_on(scored, others, config.model.dtype, world.layout))
        cut, losses = work.score(reader, scored, others, depends_on, world)
        world.from_leader(lambda: work.write(cut, losses, of_others=bool(others)))
        forget(chosen.out)  # on every rank, since its sums may lie on a disk of its own machine
    shut_down()


def _config(chosen: argparse.Namespace) -> Config:
    """Settings of the ranks that score under a layout.

    Raises:
        UserError: naming the option, or the setting of the layout.
    """
    for option, given in (("--verify", chosen.verify), ("--refit", chosen.refit)):
        if given:
            raise UserError(option, "true", "takes the whole policy in one process", "Leave it out with --layout")
    config = check_in_shards(chosen.score or SCORES[chosen.method][0], chosen.layout)
    with naming("MODEL"):
        stored = {of.dtype for of in check_weights(chosen.source, read_shape(chosen.source)).values()}
    dtype = "bf16" if stored == {torch.bfloat16} and torch.cuda.is_available() else "fp32"
    tokens = max(BATCH_TOKENS, chosen.max_tokens) + ROUNDING
    model = replace(config.model, path=str(chosen.source), dtype=dtype)
    return replace(config, model=model, pack=replace(config.pack, max_tokens=tokens, share_prefixes="off"))


def check_in_shards(score: str, layout: str) -> Config:
    """Settings with a layout, as ``--layout`` has it.

    Raises:
        UserError: naming ``--score``, if that is not known under a layout, or the setting.
    """
    if score in WHOLE_ALONE:
        remedy = "Give another --score, or leave --layout out"
        raise UserError("--score", score, "compares what no rank has all of under a layout", remedy)
    return load_config(None, [f"layout.{setting}" for setting in layout.split(",")])


def calibration(chosen: argparse.Namespace, recipe: Recipe) -> tuple[list[WorkedAnswer], list[WorkedAnswer]]:
    """Sequences to score on, and others to measure the loss on; either may be empty."""
    if chosen.calibrate is None:
        if recipe.score not in NO_CALIBRATION or recipe.refit:
            asks = "--refit is fitted" if recipe.refit else f"--score {recipe.score} is measured"
            problem = f"{asks} on prompts with responses"
            remedy = "Give the --out folder of `megatron-dppo eval`, or a file"
            raise UserError("--calibrate", "(not given)", problem, remedy)
        return [], []
    with naming("MODEL"):
        tokenizer = load_tokenizer(chosen.source)
    columns = {"prompt_key": chosen.prompt_key, "response_key": chosen.response_key}
    answers = read_sequences(chosen.calibrate, tokenizer, chat_template=chosen.chat_template, **columns)
    scored, others = draw(answers, chosen.sequences, chosen.seed)

    def reaches_a_response(answer: WorkedAnswer) -> bool:
        return len(answer.prompt_ids) < chosen.max_tokens and len(answer.response_ids) > 0

    if not any(map(reaches_a_response, scored)):
        problem = "cuts every sequence off within its prompt"
        raise UserError("--max-tokens", chosen.max_tokens, problem, "Raise it")
    return scored, others if any(map(reaches_a_response, others)) else []


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
def _verify(model: Any, refit: Refit | None, written: Path, shape: PolicyShape, cut: Cut) -> float:
    """The largest difference of two logits of the written policy and the larger one, over the deviation of all.

    Raises:
        UserError: if it is beyond what different kernels explain, or a tensor is missing.
    """
    with naming("--verify"):
        left = read_shape(written)
        check_weights(written, left)
    tokens = torch.randint(shape.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device())
    with as_cut(model, cut), refit.applied() if refit else nullcontext():
        expected = model(tokens, use_cache=False).logits.float()
    smaller = load_whole(written, left, model.dtype).to(model.dtype)
    difference = float((smaller(tokens, use_cache=False).logits.float() - expected).abs().max() / expected.std())
    limit = LIMITS["bf16" if model.dtype == torch.bfloat16 else "fp32"]
    if not difference <= limit:
        problem = f"the written policy's logits are {difference:.2g} of their deviation off, over {limit:g}"
        raise UserError("--verify", written, problem, "Compress again, and report it")
    return difference
