"""``megatron-dppo compress``: a smaller policy from a larger one, as a Hugging Face directory like any other."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.chunks import Chunk
from megatron_dppo.bridge.convert import LIMITS, TOKENS, logits_dtype, stored_chunks
from megatron_dppo.bridge.convert_commands import check_out, in_place, naming, positive, progress_bar
from megatron_dppo.bridge.hf_directory import MODEL_FILES, FilePlan, plan_files
from megatron_dppo.bridge.mapping import expected_tensors, parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.compress.absence import as_cut
from megatron_dppo.compress.calibration import BATCH_TOKENS, batches, draw, read_sequences
from megatron_dppo.compress.choose import NO_CALIBRATION, SCORES, Recipe, choose
from megatron_dppo.compress.cut import MULTIPLES, Cut
from megatron_dppo.compress.live import Live
from megatron_dppo.compress.reader import Reader, Whole
from megatron_dppo.compress.surgery import write_cut
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

MAX_SHARD_BYTES = 5 * 10**9
WHOLE_ALONE = ("shapley-logits", "in-a-row")
"""Scores that need the whole policy in one process: all logits, or streams of layers that lie far apart."""
SHARE = "share of the weights of all layers that is left, embeddings aside"
ROUNDING = 512
"""Tokens that a pack has room for besides: sequences and packs are rounded up to what the layout divides."""


def add_compress_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo compress``."""
    parser.add_argument(
        "source",
        metavar="MODEL",
        type=Path,
        help="the larger policy: a Hugging Face directory, a run, or an id on the hub",
    )
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
    layout = (
        "score in shards on many ranks, started here or by torchrun or srun: layout.* without layout., as tp=8,pp=2"
    )
    parser.add_argument("--layout", metavar="A=N,…", help=layout)
    verify = "load what was written, and compare its logits with those of MODEL without the parts that are gone"
    parser.add_argument("--verify", action="store_true", help=verify)
    dry_run = "check everything, print what would be written, and stop"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory that stands there")


def add_calibration_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that ``compress`` and ``compress sweep`` share."""
    calibrate = "prompts with responses that parts are scored on: the --out folder of `megatron-dppo eval`, or a file"
    parser.add_argument("--calibrate", metavar="FOLDER|FILE", type=Path, help=calibrate)
    for side, name in (("prompt", "prompt"), ("response", "response")):
        column = f"column of {side}s, of a file (default: %(default)s)"
        parser.add_argument(f"--{side}-key", metavar="COLUMN", default=name, help=column)
    parser.add_argument("--chat-template", action="store_true", help="put a file's prompts in the chat template")
    count = "sequences to score on; as many others measure the loss (default: %(default)s)"
    parser.add_argument("--sequences", metavar="N", type=positive(int), default=256, help=count)
    longest = "of a sequence; the end of longer ones is left out (default: %(default)s)"
    parser.add_argument("--max-tokens", metavar="N", type=positive(int), default=2048, help=longest)
    multiple = (
        "of which the number of units or channels that are left is one: 128 for each tensor-parallel rank (default: "
        f"{MULTIPLES['width']}), or that of experts: the expert-parallel ranks (default: {MULTIPLES['experts']})"
    )
    parser.add_argument("--multiple", metavar="N", type=positive(int), help=multiple)
    zeros = "write attention that 2ssp removes as zeros, which keep their size: config.json cannot say that it is gone"
    parser.add_argument("--zero-attention", action="store_true", help=zeros)
    parser.add_argument("--seed", type=int, default=1, help="of the sequences that are drawn, and of random scores")
    workers = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--workers", type=positive(int), default=workers, help="threads that write (default: %(default)s)"
    )


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
    work = _Work.of(chosen)
    work.check_out()
    scored, others = (
        list(batches(of, max_tokens=chosen.max_tokens, device=device())) for of in calibration(chosen, work.recipe)
    )
    if chosen.dry_run:
        work.say_what_would_be_done()
        return 0
    shape, recipe, asked = work.shape, work.recipe, work.recipe.score != "random" or scored or chosen.verify
    model = load_whole(chosen.source, shape, work.plan.dtype) if asked else None
    cut = choose(Whole(model, shape, scored), shape, recipe, say=partial(print, file=sys.stderr, flush=True))
    losses = _losses(Whole(model, shape, others or scored), cut) if scored else {}
    work.write(cut, losses, of_others=bool(others), verify=partial(_verify, model) if chosen.verify else None)
    return 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be done, as it is known before weights are read."""

    chosen: argparse.Namespace
    shape: PolicyShape
    recipe: Recipe
    tensors: Mapping[str, Chunk]
    plan: FilePlan

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> _Work:
        """
        Raises:
            UserError: for what cannot be done to this policy.
        """
        with naming("MODEL"):
            shape = read_shape(chosen.source)
            stored = check_weights(chosen.source, shape)
        names = {name: getattr(chosen, name) for name in ("method", "keep", "multiple", "zero_attention", "seed")}
        recipe = Recipe(score=chosen.score or SCORES[chosen.method][0], **names)
        recipe.check(shape)
        tensors = stored_chunks({name: stored[name] for name in expected_tensors(shape)})
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})
        plan = plan_files(recipe.sizes(shape).shape(shape), MAX_SHARD_BYTES, dtype)
        return cls(chosen, shape, recipe, tensors, plan)

    def check_out(self) -> None:
        size, source = self.plan.total_bytes, self.chosen.source
        check_out(self.chosen, size, [source], "config.json", "model directory", MODEL_FILES)

    def say_what_would_be_done(self) -> None:
        print(_summary(self.shape, self.recipe.sizes(self.shape)))
        size = f"{self.plan.total_bytes / 2**20:,.1f} MiB in {len(self.plan.files)} files"
        print(f"{self.chosen.out}: {size}; nothing has been written")

    def write(
        self,
        cut: Cut,
        losses: Mapping[str, float],
        *,
        of_others: bool,
        verify: Callable[[Path, PolicyShape, Cut], float] | None = None,
    ) -> None:
        """Write the smaller policy, and say what it is.

        Args:
            losses: before and after.
            of_others: whether they are of other sequences than those scored.
            verify: compares what was written with what it comes from.
        """
        chosen, shape, recipe = self.chosen, self.shape, self.recipe
        done = {name: getattr(recipe, name) for name in ("method", "score", "keep", "seed")}
        weights = {"weights_before": parameters(shape), "weights_after": parameters(cut.shape(shape))}
        parts = {"layers": cut.layers, "zero_attention": cut.silenced}
        record = {**done, "from": chosen.named, **parts, **weights, **losses}
        with in_place(chosen.out) as draft:
            with progress_bar("writing", self.plan.total_bytes) as advance:
                work = {"record": record, "workers": chosen.workers, "advance": advance}
                write_cut(self.tensors, chosen.source, shape, cut, self.plan, draft, **work)
            apart = verify(draft, shape, cut) if verify else None
        print(_summary(shape, cut))
        if losses:
            on = "other sequences than those scored" if of_others else "the sequences scored, as there are no others"
            print(f"loss {losses['loss_before']:.4f} before, {losses['loss_after']:.4f} after, on {on}")
        if apart is not None:
            print(
                f"its logits are those of the larger policy without these parts, up to {apart:.2g} of their deviation"
            )
        print(f"{chosen.out}: train it as any policy, with model.path={chosen.out}")


def _compress_in_shards(chosen: argparse.Namespace, config: Config) -> None:
    """One rank's part; the leader writes. Collective.

    Raises:
        UserError: on every rank.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    work = world.together(lambda: _Work.of(chosen))
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

        def say(text: str) -> None:
            if world.leads:
                print(text, file=sys.stderr, flush=True)

        cut = choose(Live(parts, scored, chosen.max_tokens), work.shape, work.recipe, say=say)
        losses = _losses(Live(parts, others or scored, chosen.max_tokens), cut)
        world.from_leader(lambda: work.write(cut, losses, of_others=bool(others)))
    shut_down()


def _config(chosen: argparse.Namespace) -> Config:
    """Settings of the ranks that score under a layout.

    Raises:
        UserError: naming the option, or the setting of the layout.
    """
    score = chosen.score or SCORES[chosen.method][0]
    if chosen.verify:
        raise UserError("--verify", "true", "loads the whole policy in one process", "Leave it out with --layout")
    if score in WHOLE_ALONE:
        remedy = "Give another --score, or leave --layout out"
        raise UserError("--score", score, "compares what no rank has all of under a layout", remedy)
    config = load_config(None, [f"layout.{setting}" for setting in chosen.layout.split(",")])
    with naming("MODEL"):
        stored = {of.dtype for of in check_weights(chosen.source, read_shape(chosen.source)).values()}
    dtype = "bf16" if stored == {torch.bfloat16} and torch.cuda.is_available() else "fp32"
    tokens = max(BATCH_TOKENS, chosen.max_tokens) + ROUNDING
    model = replace(config.model, path=str(chosen.source), dtype=dtype)
    return replace(config, model=model, pack=replace(config.pack, max_tokens=tokens, share_prefixes="off"))


def calibration(chosen: argparse.Namespace, recipe: Recipe) -> tuple[list[WorkedAnswer], list[WorkedAnswer]]:
    """Sequences to score on, and others to measure the loss on; either may be empty."""
    if chosen.calibrate is None:
        if recipe.score not in NO_CALIBRATION:
            problem = f"--score {recipe.score} is measured on prompts with responses"
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


def _losses(reader: Reader, cut: Cut) -> dict[str, float]:
    """Of the policy, and of the smaller one, which is not yet written."""
    before = reader.loss()
    with reader.as_cut(cut):
        return {"loss_before": before, "loss_after": reader.loss()}


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
    with as_cut(model, cut):
        expected = model(tokens, use_cache=False).logits.float()
    smaller = load_whole(written, left, model.dtype).to(model.dtype)
    difference = float((smaller(tokens, use_cache=False).logits.float() - expected).abs().max() / expected.std())
    limit = LIMITS["bf16" if model.dtype == torch.bfloat16 else "fp32"]
    if not difference <= limit:
        problem = f"the written policy's logits are {difference:.2g} of their deviation off, over {limit:g}"
        raise UserError("--verify", written, problem, "Compress again, and report it")
    return difference


def _summary(shape: PolicyShape, cut: Cut) -> str:
    """What goes, in words."""
    left = cut.shape(shape)
    sizes = [
        f"{name} {before} → {after}"
        for name, before, after in (
            ("layers", shape.num_layers, left.num_layers),
            ("width of the residual stream", shape.hidden, left.hidden),
            ("experts", shape.experts, left.experts),
            ("width of feed-forward layers", shape.ffn, left.ffn),
            ("query heads", shape.heads, left.heads),
            ("key-value heads", shape.kv_heads, left.kv_heads),
        )
        if before != after
    ]
    if cut.silenced:
        sizes.append(f"attention of {len(cut.silenced)} layers → zeros, which keep their size")
    before, after = parameters(shape), parameters(left)
    return f"{', '.join(sizes)}: {before / 1e6:,.2f} → {after / 1e6:,.2f} million weights ({after / before:.0%})"
