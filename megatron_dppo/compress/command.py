"""``megatron-dppo compress``: a smaller policy from a larger one, as a Hugging Face directory like any other."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.convert import LIMITS, TOKENS, logits_dtype, stored_chunks
from megatron_dppo.bridge.convert_commands import check_out, in_place, naming, positive, progress_bar
from megatron_dppo.bridge.hf_directory import MODEL_FILES, plan_files
from megatron_dppo.bridge.mapping import expected_tensors, parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.compress.absence import as_cut, mean_loss
from megatron_dppo.compress.calibration import Batch, batches, draw, read_sequences
from megatron_dppo.compress.choose import NO_CALIBRATION, SCORES, Recipe, choose
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.surgery import write_cut
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.streams import quieten

MAX_SHARD_BYTES = 5 * 10**9


def add_compress_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo compress``."""
    parser.add_argument("source", metavar="MODEL", type=Path, help="Hugging Face directory of the larger policy")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    share = "share of the weights of all layers that is left, embeddings aside"
    parser.add_argument("--keep", type=float, required=True, help=share)
    what = "what goes: layers, units of feed-forward layers, groups of query heads, or units and some attention (2ssp)"
    parser.add_argument("--method", choices=list(SCORES), default="width", help=f"{what} (default: %(default)s)")
    scores = "; ".join(f"{method}: {', '.join(names)}" for method, names in SCORES.items())
    parser.add_argument("--score", help=f"what is kept; the first is the default. {scores}")
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
    multiple = "of which the width of feed-forward layers is one: 128 for each tensor-parallel rank (default: 128)"
    parser.add_argument("--multiple", metavar="N", type=positive(int), default=128, help=multiple)
    zeros = "write attention that 2ssp removes as zeros, which keep their size: config.json cannot say that it is gone"
    parser.add_argument("--zero-attention", action="store_true", help=zeros)
    parser.add_argument("--seed", type=int, default=1, help="of the sequences that are drawn, and of --score random")
    workers = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--workers", type=positive(int), default=workers, help="threads that write (default: %(default)s)"
    )
    verify = "load what was written, and compare its logits with those of MODEL without the parts that are gone"
    parser.add_argument("--verify", action="store_true", help=verify)
    dry_run = "check everything, print what would be written, and stop"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory that stands there")


def compress(chosen: argparse.Namespace) -> None:
    """Choose what goes, write what is left, and verify it where that is asked for.

    Raises:
        UserError: for what cannot be done to this policy; ``OUT`` is as it was.
    """
    quieten()
    chosen.source = policy_folder(str(chosen.source), "MODEL")
    with naming("MODEL"):
        shape = read_shape(chosen.source)
        stored = check_weights(chosen.source, shape)
    names = {name: getattr(chosen, name) for name in ("method", "keep", "multiple", "zero_attention", "seed")}
    recipe = Recipe(score=chosen.score or SCORES[chosen.method][0], **names)
    recipe.check(shape)
    sizes = recipe.sizes(shape)
    tensors = stored_chunks({name: stored[name] for name in expected_tensors(shape)})
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})
    plan = plan_files(sizes.shape(shape), MAX_SHARD_BYTES, dtype)
    check_out(chosen, plan.total_bytes, [chosen.source], "config.json", "model directory", MODEL_FILES)
    scored, others = _calibration(chosen, recipe)
    if chosen.dry_run:
        print(_summary(shape, sizes))
        print(f"{chosen.out}: {plan.total_bytes / 2**20:,.1f} MiB in {len(plan.files)} files; nothing has been written")
        return
    model = (
        None if recipe.score == "random" and not scored and not chosen.verify else _load(chosen.source, shape, dtype)
    )
    say = partial(print, file=sys.stderr, flush=True)
    cut = choose(model, shape, scored, recipe, say=say)
    losses = _losses(model, cut, others or scored)
    done = {name: getattr(recipe, name) for name in ("method", "score", "keep", "seed")}
    record = {**done, "from": str(chosen.source), "layers": cut.layers, "zero_attention": cut.silenced, **losses}
    with in_place(chosen.out) as draft:
        with progress_bar("writing", plan.total_bytes) as advance:
            work = {"record": record, "workers": chosen.workers, "advance": advance}
            write_cut(tensors, chosen.source, shape, cut, plan, draft, **work)
        apart = _verify(model, draft, shape, cut) if chosen.verify else None
    print(_summary(shape, cut))
    if losses:
        on = "other sequences than those scored" if others else "the sequences scored, as there are no others"
        print(f"loss {losses['loss_before']:.4f} before, {losses['loss_after']:.4f} after, on {on}")
    if apart is not None:
        print(f"its logits are those of the larger policy without these parts, up to {apart:.2g} of their deviation")
    print(f"{chosen.out}: train it as any policy, with model.path={chosen.out}")


def _calibration(chosen: argparse.Namespace, recipe: Recipe) -> tuple[list[Batch], list[Batch]]:
    """Batches to score on, and others to measure the loss on."""
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
    made = [
        list(batches(of, max_tokens=chosen.max_tokens, device=_device()))
        for of in draw(answers, chosen.sequences, chosen.seed)
    ]
    if not any(bool(batch.response.any()) for batch in made[0]):
        problem = "cuts every sequence off within its prompt"
        raise UserError("--max-tokens", chosen.max_tokens, problem, "Raise it")
    return made[0], made[1] if any(bool(batch.response.any()) for batch in made[1]) else []


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _load(folder: Path, shape: PolicyShape, stored: torch.dtype) -> Any:
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
    return model.to(_device()).eval()


def _losses(model: Any, cut: Cut, measured: Sequence[Batch]) -> dict[str, float]:
    """On sequences, if there are any; the smaller policy is not yet written."""
    if not measured:
        return {}
    before = mean_loss(model, measured)
    with as_cut(model, cut):
        return {"loss_before": before, "loss_after": mean_loss(model, measured)}


@torch.no_grad()
def _verify(model: Any, written: Path, shape: PolicyShape, cut: Cut) -> float:
    """The largest difference of two logits of the written policy and the larger one, over the deviation of all.

    Raises:
        UserError: if it is beyond what different kernels explain, or a tensor is missing.
    """
    with naming("--verify"):
        left = read_shape(written)
        check_weights(written, left)
    tokens = torch.randint(shape.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(_device())
    with as_cut(model, cut):
        expected = model(tokens, use_cache=False).logits.float()
    smaller = _load(written, left, model.dtype).to(model.dtype)
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
