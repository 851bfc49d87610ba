"""``megatron-dppo compress``: a smaller policy from a larger one, as a Hugging Face directory like any other."""

from __future__ import annotations

import argparse
import os
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
from megatron_dppo.compress.calibration import BATCH_TOKENS, Batch, batches
from megatron_dppo.compress.choose import BY_REWARD, SCORES
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.passes import Accumulator, forget
from megatron_dppo.compress.reader import Reader, Whole
from megatron_dppo.compress.refit import Refit
from megatron_dppo.compress.work import CompressionJob
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
    _check_options(chosen)
    chosen.named, chosen.source = str(chosen.source), policy_folder(str(chosen.source), "MODEL")
    if chosen.layout is not None or chosen.config:
        from megatron_dppo.compress.in_shards import compress_in_shards  # Megatron-Core

        config = _config(chosen)
        if chosen.config and LAUNCHER not in os.environ:  # before any rank starts
            preflight(config, "compress")
        return run_again(words, config, partial(compress_in_shards, chosen))
    work = CompressionJob.of(chosen)
    work.check_out()
    scored, others = work.calibration()
    if chosen.dry_run:
        work.say_what_would_be_done()
        return 0
    asked = work.recipe.score != "random" or scored or chosen.verify
    model: Any = load_whole(chosen.source, work.shape, work.plan.dtype) if asked else None

    def read(answers: Sequence[WorkedAnswer]) -> list[Batch]:
        return list(batches(answers, max_tokens=chosen.max_tokens, device=device()))

    def reader(answers: Sequence[WorkedAnswer], passes: Accumulator) -> Reader:
        return Whole(model, work.shape, read(answers), passes)

    depends_on = work.depends_on(scored, others, model.dtype if asked else None)
    refit = Refit(model, work.shape, read(scored), work.plan.dtype) if work.recipe.refit else None
    cut, losses = work.score(reader, scored, others, depends_on, refit=refit)
    verify = partial(_verify, model, refit) if chosen.verify else None
    work.write(cut, losses, of_others=bool(others), refit=refit, verify=verify)
    forget(chosen.out)
    return 0


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
    for option, given in (("--verify", chosen.verify), ("--refit", chosen.refit)):
        if given:
            check_in_one_process(option, score, chosen.layout)


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
