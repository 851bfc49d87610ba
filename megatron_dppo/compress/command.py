"""Make a smaller policy from a larger policy, as a Hugging Face directory (``megatron-dppo
compress``)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.chunks import find_stored_dtype
from megatron_dppo.bridge.convert import (
    WORKERS,
    choose_logits_dtype,
    draw_tokens,
    load_transformers,
    measure_difference,
)
from megatron_dppo.bridge.convert_commands import make_positive_parser, rename_error_setting
from megatron_dppo.bridge.hf_directory import MODEL, plan_files
from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.compress.calibration import draw_sequences, make_batches, read_sequences
from megatron_dppo.compress.cut import MULTIPLE, NO_CALIBRATION, PARTS, SCORES, Cut, Recipe
from megatron_dppo.compress.scores import Scorer, apply_cut, choose_cut
from megatron_dppo.compress.write import write_policy
from megatron_dppo.data.prompts import SupervisedExample
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.files import check_replaceable, write_directory
from megatron_dppo.process.streams import report_progress

Sequences = Sequence[SupervisedExample]


def add_compress_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="MODEL",
        type=Path,
        help="the larger policy: a Hugging Face directory, a run, or an id on the hub",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    parser.add_argument(
        "--keep",
        metavar="FRACTION",
        type=float,
        required=True,
        help="fraction of all layers' weights to keep, without embeddings",
    )
    parser.add_argument(
        "--method",
        choices=list(SCORES),
        default="width",
        help="remove feed-forward units (width), layers (depth), or units and attention (2ssp) "
        "(default: %(default)s)",
    )
    scores = "; ".join(f"{method}: {', '.join(names)}" for method, names in SCORES.items())
    parser.add_argument("--score", help=f"order of the parts, the default first. {scores}")
    part = (
        "part of a layer that depth removes (default: %(default)s); attention and feed-forward are "
        "written as zeros, which keep their size"
    )
    parser.add_argument("--part", choices=PARTS, default="block", help=part)
    parser.add_argument(
        "--calibrate",
        metavar="FOLDER|FILE",
        type=Path,
        help="prompts with responses for the scores: the --out folder of `megatron-dppo eval`, or "
        "a file",
    )
    for side in ("prompt", "response"):
        parser.add_argument(
            f"--{side}-key",
            metavar="COLUMN",
            default=side,
            help=f"column of {side}s in a file (default: %(default)s)",
        )
    parser.add_argument(
        "--chat-template", action="store_true", help="put a file's prompts in the chat template"
    )
    add_count = partial(parser.add_argument, metavar="N", type=make_positive_parser(int))
    add_count(
        "--sequences",
        default=256,
        help="sequences for the scores; as many other sequences measure the loss (default: "
        "%(default)s)",
    )
    add_count(
        "--max-tokens", default=2048, help="truncate sequences to N tokens (default: %(default)s)"
    )
    add_count(
        "--subnetworks",
        help="measure Shapley values on N pairs of random halves of the layers "
        "(default: leave out one layer at a time)",
    )
    add_count(
        "--multiple",
        default=MULTIPLE,
        help="keep a multiple of N units per layer (default: %(default)s; give 128 x layout.tp)",
    )
    parser.add_argument(
        "--zero-attention",
        action="store_true",
        help="let 2ssp write removed attention as zeros, which keep their size: "
        "config.json has no sign for its absence",
    )
    parser.add_argument(
        "--seed",
        type=_parse_seed,
        default=1,
        help="of sequences, subnetworks and random scores (default: %(default)s)",
    )
    add_count("--workers", default=WORKERS, help="threads that write (default: %(default)s)")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="load the written policy, and compare its logits with MODEL's without the removed "
        "parts",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print what would be written, and stop",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model directory in OUT")


def _parse_seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^63 - 1")
    return seed


def compress(arguments: argparse.Namespace) -> int:
    """Choose the parts to keep, write the smaller policy, verify on request; return the exit code.

    Raises:
        UserError: naming the option, with ``OUT`` unchanged.
    """
    source = policy_folder(str(arguments.source), "MODEL")
    with rename_error_setting("MODEL"):
        shape = read_shape(source)
        tensors = check_weights(source, shape)
    recipe = _make_recipe(arguments)
    recipe.check(shape)
    dtype = find_stored_dtype(tensors, shape)
    # The result's size is known before the scores: check the disk first.
    planned = recipe.plan_cut(shape)
    plan = plan_files(planned.compute_shape(shape), dtype)
    check_replaceable(
        arguments.out,
        plan.total_bytes,
        "OUT",
        MODEL,
        sources=[source],
        overwrite=arguments.overwrite,
    )
    scored, held_out = _read_calibration(arguments, recipe, source)
    if arguments.dry_run:
        size = f"{plan.total_bytes / 2**20:,.1f} MiB in {len(plan.frames)} files"
        print(f"{_describe_cut(shape, planned)}\n{arguments.out}: {size}; nothing has been written")
        return 0
    model = None
    if recipe.score != "random" or scored or arguments.verify:
        model = _load_model(source, _choose_dtype(source, shape, dtype))
    cut, losses = _choose_and_measure(model, recipe, shape, scored, held_out, arguments.max_tokens)
    logits = None
    if arguments.verify:
        with apply_cut(model, cut):
            logits = _compute_logits(model, shape)
    # Free the larger policy's memory before the smaller policy is loaded.
    del model
    record = {
        **{
            option: getattr(recipe, option)
            for option in ("method", "score", "part", "keep", "seed", "subnetworks")
        },
        "from": str(arguments.source),
        "layers": cut.layers,
        "zero_attention": cut.zero_attention,
        "zero_feed_forward": cut.zero_feed_forward,
        "weights_before": count_parameters(shape),
        "weights_after": count_parameters(cut.compute_shape(shape)),
        **losses,
    }
    difference = None
    with write_directory(arguments.out, "OUT") as draft:
        write_policy(
            tensors, source, shape, cut, plan, draft, record=record, workers=arguments.workers
        )
        if logits is not None:
            difference = _verify(draft, logits)
    print(_describe_cut(shape, cut))
    if losses:
        data = "the scored sequences, as there are no others"
        if held_out:
            data = "other sequences than those scored"
        print(
            f"loss {losses['loss_before']:.4f} before, {losses['loss_after']:.4f} after, on {data}"
        )
    if difference is not None:
        print(
            f"its logits are MODEL's without the removed parts, up to {difference:.2g} of their "
            "deviation"
        )
    print(f"{arguments.out}: train it as any policy, with model.path={arguments.out}")
    return 0


def _make_recipe(arguments: argparse.Namespace) -> Recipe:
    options = {field.name: getattr(arguments, field.name) for field in fields(Recipe)}
    options["score"] = arguments.score or SCORES[arguments.method][0]
    return Recipe(**options)


def _read_calibration(
    arguments: argparse.Namespace,
    recipe: Recipe,
    source: Path,
) -> tuple[Sequences, Sequences]:
    """Return sequences for the scores, and other sequences for the loss. Either may be empty."""
    if arguments.calibrate is None:
        if recipe.score not in NO_CALIBRATION:
            problem = f"--score {recipe.score} is measured on prompts with responses"
            remedy = "Give the --out folder of `megatron-dppo eval`, or a file"
            raise UserError("--calibrate", "(not given)", problem, remedy)
        return [], []
    with rename_error_setting("MODEL"):
        tokenizer = load_tokenizer(source)
    answers = read_sequences(
        arguments.calibrate,
        tokenizer,
        prompt_key=arguments.prompt_key,
        response_key=arguments.response_key,
        chat_template=arguments.chat_template,
    )
    scored, held_out = draw_sequences(answers, arguments.sequences, arguments.seed)

    # The loss is over response tokens: a sequence truncated within its prompt has no loss.
    def has_response(answer: SupervisedExample) -> bool:
        return len(answer.prompt_ids) < arguments.max_tokens and len(answer.response_ids) > 0

    if not any(map(has_response, scored)):
        raise UserError(
            "--max-tokens",
            arguments.max_tokens,
            "ends every sequence within its prompt",
            "Raise it",
        )
    return scored, held_out if any(map(has_response, held_out)) else []


def _choose_dtype(source: Path, shape: PolicyShape, stored: torch.dtype) -> torch.dtype:
    """Return the type for computing: on a GPU as stored, else fp32 if the host has room."""
    if torch.cuda.is_available():
        return stored
    try:
        return choose_logits_dtype(shape, stored)
    except UserError as error:
        problem = error.problem.replace("logits", "scores")
        raise UserError("MODEL", source, problem, "Use a machine with more memory") from error


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    return load_transformers(folder, dtype).to(_find_device())


def _find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _choose_and_measure(
    model: Any,
    recipe: Recipe,
    shape: PolicyShape,
    scored: Sequences,
    held_out: Sequences,
    max_tokens: int,
) -> tuple[Cut, dict[str, float]]:
    """Return the cut, and the losses of both policies; no losses without sequences."""
    # Prefer sequences not used by the choice of parts.
    measured = held_out or scored
    reads = recipe.count_reads(shape) * len(scored) + 2 * len(measured)
    with report_progress("sequences", reads, enabled=reads > 0) as advance:
        batches = make_batches(scored, max_tokens, _find_device())
        cut = choose_cut(Scorer(model, batches, advance), shape, recipe)
        if not measured:
            return cut, {}
        scorer = Scorer(model, make_batches(measured, max_tokens, _find_device()), advance)
        before = scorer.measure_loss(Cut(tuple(range(shape.num_layers))))
        return cut, {"loss_before": before, "loss_after": scorer.measure_loss(cut)}


@torch.no_grad()
def _compute_logits(model: Any, shape: PolicyShape) -> torch.Tensor:
    """Return logits of random tokens, [1, tokens, vocabulary], in the model's type."""
    logits: torch.Tensor = model(draw_tokens(shape).to(_find_device()), use_cache=False).logits
    return logits


def _verify(output_dir: Path, expected: torch.Tensor) -> float:
    """Measure the difference of the written policy's logits from the larger policy's under the cut.

    Raises:
        UserError: a tensor is missing, or the logits differ.
    """
    with rename_error_setting("--verify"):
        shape = read_shape(output_dir)
        check_weights(output_dir, shape)
    logits = _compute_logits(_load_model(output_dir, expected.dtype), shape)
    return measure_difference(logits, expected)


def _describe_cut(shape: PolicyShape, cut: Cut) -> str:
    smaller = cut.compute_shape(shape)
    changes = []
    if smaller.num_layers != shape.num_layers:
        changes.append(f"layers {shape.num_layers} → {smaller.num_layers}")
    if smaller.ffn != shape.ffn:
        changes.append(f"feed-forward units {shape.ffn} → {smaller.ffn}")
    for part, zeroed in (
        ("attention", cut.zero_attention),
        ("feed-forward", cut.zero_feed_forward),
    ):
        if zeroed:
            changes.append(
                f"{part} of {len(zeroed)} of {shape.num_layers} layers → zeros, which keep their "
                "size"
            )
    before = count_parameters(shape)
    after = count_parameters(smaller)
    weights = f"{before / 1e6:,.2f} → {after / 1e6:,.2f} million weights ({after / before:.0%})"
    return f"{', '.join(changes)}: {weights}"
