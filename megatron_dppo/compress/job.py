"""Job of a ``compress`` command: parts chosen by scores, and the smaller policy's files.

It becomes a Hugging Face directory, written from the larger policy's files a few rows at a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from megatron_dppo.bridge.chunks import Chunk, read_rows
from megatron_dppo.bridge.convert import in_threads, stored_chunks
from megatron_dppo.bridge.convert_commands import check_out, in_place, naming
from megatron_dppo.bridge.hf_directory import (
    MODEL_FILES,
    FilePlan,
    SafetensorsWriter,
    copy_config_and_tokenizer,
    plan_files,
)
from megatron_dppo.bridge.mapping import expected_tensors, parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.compress.calibration import (
    Accumulator,
    draw,
    read_sequences,
    scoring,
)
from megatron_dppo.compress.choose import NO_CALIBRATION, SCORES, Recipe, choose
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.reader import Reader
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.models.family import tensor_dimensions
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.streams import Advance, progress, tell


@dataclass(frozen=True, slots=True)
class CompressionJob:
    """Job of a command, as it is known before weights are read."""

    chosen: argparse.Namespace
    shape: PolicyShape
    recipe: Recipe
    tensors: Mapping[str, Chunk]
    plan: FilePlan

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> CompressionJob:
        """
        Raises:
            UserError: for what cannot be done to this policy.
        """
        with naming("MODEL"):
            shape = read_shape(chosen.source)
            stored = check_weights(chosen.source, shape)
        given = {field.name: getattr(chosen, field.name) for field in fields(Recipe)}
        recipe = Recipe(**{**given, "score": chosen.score or SCORES[chosen.method][0]})
        recipe.check(shape)
        tensors = stored_chunks({name: stored[name] for name in expected_tensors(shape)})
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})
        plan = plan_files(recipe.sizes(shape).shape(shape), dtype)
        return cls(chosen, shape, recipe, tensors, plan)

    def check_out(self) -> None:
        size, source = self.plan.total_bytes, self.chosen.source
        check_out(self.chosen, size, [source], "config.json", "model directory", MODEL_FILES)

    def say_what_would_be_done(self) -> None:
        print(_summary(self.shape, self.recipe.sizes(self.shape)))
        size = f"{self.plan.total_bytes / 2**20:,.1f} MiB in {len(self.plan.files)} files"
        print(f"{self.chosen.out}: {size}; nothing has been written")

    def calibration(self) -> tuple[list[WorkedAnswer], list[WorkedAnswer]]:
        """Sequences to score on, and others to measure the loss on; either may be empty."""
        chosen, score = self.chosen, self.recipe.score
        if chosen.calibrate is None:
            if score not in NO_CALIBRATION:
                problem = f"--score {score} is measured on prompts with responses"
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

    def score(
        self,
        reader: Callable[[Sequence[WorkedAnswer], Accumulator], Reader],
        scored: Sequence[WorkedAnswer],
        others: Sequence[WorkedAnswer],
    ) -> tuple[Cut, dict[str, float]]:
        """Kept parts, and the losses before and after, if there are sequences.

        Args:
            reader: makes what reads some of the sequences.
            others: that the losses are of, if there are any.
        """
        read = self.recipe.passes(self.shape) * len(scored) + 2 * len(others or scored)
        with scoring(read) as passes:
            cut = choose(reader(scored, passes), self.shape, self.recipe, say=tell)
            return cut, _losses(reader(others or scored, passes), cut) if scored else {}

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
            losses: as :meth:`score` gives them.
            of_others: whether they are of other sequences than those scored.
            verify: compares what was written with what it comes from.
        """
        chosen, shape, recipe = self.chosen, self.shape, self.recipe
        done = {name: getattr(recipe, name) for name in ("method", "score", "keep", "seed", "subnetworks")}
        weights = {"weights_before": parameters(shape), "weights_after": parameters(cut.shape(shape))}
        parts = {"layers": cut.layers, "zero_attention": cut.silenced}
        record = {**done, "from": chosen.named, **parts, **weights, **losses}
        with in_place(chosen.out) as draft:
            with progress("writing", self.plan.total_bytes, unit="bytes") as advance:
                work = {"record": record, "workers": chosen.workers, "advance": advance}
                write_cut(self.tensors, chosen.source, shape, cut, self.plan, draft, **work)
            apart = verify(draft, shape, cut) if verify else None
        print(_summary(shape, cut))
        if losses:
            on = "other sequences than those scored" if of_others else "the sequences scored, as there are no others"
            print(f"loss {losses['loss_before']:.4f} before, {losses['loss_after']:.4f} after, on {on}")
        if apart is not None:
            of = "the larger policy without these parts"
            print(f"its logits are those of {of}, up to {apart:.2g} of their deviation")
        print(f"{chosen.out}: train it as any policy, with model.path={chosen.out}")


def _losses(reader: Reader, cut: Cut) -> dict[str, float]:
    """Losses of the policy, and of the smaller one, which is not yet written."""
    before = reader.loss()
    with reader.as_cut(cut):
        return {"loss_before": before, "loss_after": reader.loss()}


def _summary(shape: PolicyShape, cut: Cut) -> str:
    """Removed parts, in words."""
    left = cut.shape(shape)
    sizes = [
        f"{name} {before} → {after}"
        for name, before, after in (
            ("layers", shape.num_layers, left.num_layers),
            ("width of feed-forward layers", shape.ffn, left.ffn),
        )
        if before != after
    ]
    if cut.silenced:
        sizes.append(f"attention of {len(cut.silenced)} layers → zeros, which keep their size")
    before, after = parameters(shape), parameters(left)
    return f"{', '.join(sizes)}: {before / 1e6:,.2f} → {after / 1e6:,.2f} million weights ({after / before:.0%})"


RECORD = "compress.json"
"""Beside the weights: what was done."""


def write_cut(
    tensors: Mapping[str, Chunk],
    source: Path,
    shape: PolicyShape,
    cut: Cut,
    plan: FilePlan,
    out: Path,
    *,
    record: Mapping[str, Any],
    workers: int,
    advance: Advance,
) -> None:
    """Write what a cut leaves of a policy.

    Args:
        tensors: of the larger policy, by name.
        source: its directory.
        plan: of the smaller policy's files.
        out: an existing, empty directory.
        record: what ``compress.json`` is to say.

    Raises:
        OSError: if the disk is full.
        UserError: if a file ends before a tensor does.
    """
    with SafetensorsWriter.open(plan, out) as writer:
        copy_config_and_tokenizer(source, out, plan.dtype)
        _write_config(out / "config.json", shape, cut)
        (out / RECORD).write_text(json.dumps(record, indent=2) + "\n")

        def write(name: str) -> None:
            writer.write_bytes(name, cut_tensor(name, tensors, cut, plan.dtype))
            advance(plan.bytes_of(name))

        in_threads(write, plan.tensors, workers)


def cut_tensor(
    name: str,
    tensors: Mapping[str, Chunk],
    cut: Cut,
    dtype: torch.dtype,
) -> Iterator[memoryview]:
    """The bytes of a tensor of the smaller policy, in its own names, from its first row to its last."""
    parts, layer = name.split("."), None
    if parts[1] == "layers":
        layer = cut.layers[int(parts[2])]
        parts[2] = str(layer)
    whole = ".".join(parts)
    stored, kept = tensors[whole], _kept(cut, layer)
    rows, columns, *_ = [*map(kept.get, tensor_dimensions(name)), None]  # a vector has no columns
    if parts[-2] == "o_proj" and layer in cut.silenced:
        size = [stored.rows if rows is None else len(rows), stored.columns if columns is None else len(columns)]
        yield from read_rows(size, [], dtype)  # what no chunk covers is zero
        return
    yield from _selected(stored, dtype, rows, columns)


def _kept(cut: Cut, layer: int | None) -> dict[str, torch.Tensor]:
    """Which numbers are left, by what a dimension counts; all of those that are not named.

    Args:
        layer: of the larger policy; None outside the layers.
    """
    if layer is None or cut.neurons is None:
        return {}
    return {"feed_forward": torch.tensor(cut.neurons[layer])}


def _selected(
    stored: Chunk, dtype: torch.dtype, rows: torch.Tensor | None, columns: torch.Tensor | None
) -> Iterator[memoryview]:
    """Rows and columns of a stored matrix; None: all of them. Rows that go are read, too: they are few."""
    top = 0
    for data in read_rows((stored.rows, stored.columns), [stored], dtype):
        if rows is None and columns is None:
            yield data
            continue
        block = torch.frombuffer(data, dtype=dtype).view(-1, stored.columns)
        inside = rows if rows is None else rows[(rows >= top) & (rows < top + len(block))] - top
        top += len(block)
        yield _bytes(_of(block, inside, columns))


def _of(block: torch.Tensor, rows: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor:
    block = block if rows is None else block[rows]
    return block if columns is None else block[:, columns]


def _bytes(block: torch.Tensor) -> memoryview:
    return memoryview(block.contiguous().flatten().view(torch.uint8).numpy())


def _write_config(file: Path, shape: PolicyShape, cut: Cut) -> None:
    """Change the sizes that a cut changes, and leave all else as it was."""
    config = json.loads(file.read_text())
    left = cut.shape(shape)
    changed = left.config_sizes.items() - shape.config_sizes.items()
    config |= {each: size for name, size in changed for each in name.split(" | ") if config.get(each)}
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer] for layer in cut.layers]
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
