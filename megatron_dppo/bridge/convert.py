"""Convert weights between Hugging Face's form and Megatron's distributed format, and compare them.

Both conversions copy from file to file, a few rows at a time, for any model size, without a process
group or a GPU. Only the comparison of logits imports Megatron-Core and transformers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist

from megatron_dppo.bridge.checkpoint_folder import HF_FOLDER, RELEASE, TRACKER, FileChecksum
from megatron_dppo.bridge.chunks import (
    FilePlan,
    create_files,
    list_parameter_chunks,
    promote_dtype,
    read_rows,
)
from megatron_dppo.bridge.hf_directory import copy_config_and_tokenizer, write_index
from megatron_dppo.bridge.mapping import StoredRows, count_parameters
from megatron_dppo.bridge.safetensors_files import Chunk, check_weights
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.torch_dist import write_metadata
from megatron_dppo.config import LayoutConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.streams import report_progress

K = TypeVar("K")
WORKERS = min(4, os.cpu_count() or 1)
"""Default number of conversion threads."""


def write_megatron(
    tensors: Mapping[str, Chunk],
    plan: FilePlan[StoredRows],
    source: Path,
    out: Path,
    workers: int,
) -> None:
    """Write a folder of checkpoints with a single checkpoint, ``release``, loadable in every
    layout.

    Args:
        tensors: tensors of a Hugging Face directory, by name.
        source: directory with configuration, tokenizer and chat template.
        out: existing, empty directory.

    Raises:
        OSError: if the disk is full.
    """
    release = out / RELEASE
    hf = out / HF_FOLDER
    release.mkdir()
    hf.mkdir()
    checksums: dict[str, FileChecksum] = {}

    def rows(part: StoredRows) -> Iterable[memoryview]:
        return read_rows(
            part.shape, list_parameter_chunks(part, tensors), promote_dtype(plan.dtype, part.entry)
        )

    write_tensors(plan, release, rows, workers, "to Megatron")

    def compute_checksum(name: str) -> None:
        checksums[name] = FileChecksum.from_file(release / name)

    run_in_threads(compute_checksum, plan.frames, workers)
    # The conversion back needs the configuration and the tokenizer.
    copy_config_and_tokenizer(source, hf, plan.dtype)
    write_metadata(release, plan, checksums)
    (out / TRACKER).write_text(RELEASE + "\n")


def write_tensors(
    plan: FilePlan[K],
    out: Path,
    rows: Callable[[K], Iterable[memoryview]],
    workers: int,
    title: str,
) -> None:
    """Write the files of a plan.

    Args:
        rows: function that returns a tensor's bytes in the plan's type, from the first row to the
            last; called from any thread.
        title: title of the progress bar.

    Raises:
        OSError: if the disk is full.
    """
    with (
        create_files(plan, out) as write,
        report_progress(title, plan.total_bytes, unit="bytes") as advance,
    ):

        def convert(key: K) -> None:
            write(key, rows(key))
            advance(plan.places[key].length)

        run_in_threads(convert, plan.places, workers)


def write_weights(
    plan: FilePlan[str],
    out: Path,
    rows: Callable[[str], Iterable[memoryview]],
    workers: int,
    title: str = "to Hugging Face",
) -> None:
    """Write the weights of a Hugging Face directory."""
    write_tensors(plan, out, rows, workers, title)
    write_index(out, plan)


def check_files(policy: StoredPolicy, workers: int, *, all_files: bool = False) -> None:
    """Compare the files of a policy's weights with the checksums.

    Args:
        all_files: check every file of the checkpoint, not only files with weights.

    Raises:
        UserError: naming a damaged file.
    """
    run_in_threads(
        lambda share: policy.check(share=share, num_shares=workers, all_files=all_files),
        range(workers),
        workers,
    )


def run_in_threads(work: Callable[[K], None], items: Iterable[K], workers: int) -> None:
    """Call ``work`` for every item, in ``workers`` threads; raise the first exception."""
    # Limit torch to one thread per worker, because the workers already run in parallel.
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # map() cancels the remaining calls after an exception.
        for _ in pool.map(work, items):
            pass


MEMORY = 1.9
"""Memory of a comparison of logits, relative to the size of the weights (measured: 1.3 to 1.8).
Megatron holds gated layers twice during loading, and bf16 logits need an fp32 copy of the output
layer."""


def compare_tensors(
    policy: StoredPolicy,
    hf: Path,
    shape: PolicyShape,
    *,
    output_dtype: torch.dtype,
    workers: int,
) -> str:
    """Compare the SHA-256 of every tensor.

    Args:
        hf: Hugging Face directory.
        output_dtype: written type; tensors of the source are cast to this type.

    Returns:
        SHA-256 over the names and hashes of all tensors, in hexadecimal.

    Raises:
        UserError: if the Hugging Face directory is incomplete, or a tensor differs.
    """
    tensors = check_weights(hf, shape)
    digests: dict[str, bytes] = {}
    with report_progress(
        "verifying", count_parameters(shape) * output_dtype.itemsize, unit="bytes"
    ) as advance:

        def compare(name: str) -> None:
            tensor = tensors[name]
            dtype = promote_dtype(output_dtype, policy.entries[name])
            digests[name] = _compute_digest(policy.read_tensor_rows(name, output_dtype))
            if digests[name] != _compute_digest(read_rows(tensor.shape, [tensor], dtype)):
                problem = "differs between the two forms"
                raise UserError("--verify", name, problem, "Convert again, and report it")
            advance(tensor.rows * tensor.columns * output_dtype.itemsize)

        run_in_threads(compare, tensors, workers)
    return hashlib.sha256(
        b"".join(name.encode() + digests[name] for name in sorted(digests))
    ).hexdigest()


def choose_logits_dtype(shape: PolicyShape, stored: torch.dtype) -> torch.dtype:
    """Return the type for the computation of logits: fp32, or bf16 if memory is short.

    Raises:
        UserError: if memory is too small for both; the message names the verification without
            logits.
    """
    free = psutil.virtual_memory().available
    # Consider bf16 only for weights stored in bf16.
    candidates = [torch.float32] + [torch.bfloat16] * (stored is torch.bfloat16)
    needed = {dtype: count_parameters(shape) * dtype.itemsize * MEMORY for dtype in candidates}
    # fp32 first, because differences show best.
    if fitting := [dtype for dtype in candidates if needed[dtype] <= free]:
        return fitting[0]
    gib = f"{needed[candidates[-1]] / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
    remedy = "Give --verify tensors, which compares every tensor's hash"
    raise UserError("--verify", "all", f"logits take the whole model in memory: {gib}", remedy)


def _compute_digest(data: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for buffer in data:
        digest.update(buffer)
    return digest.digest()


TOKENS = 48
"""Number of tokens in a comparison of logits."""
LIMITS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest difference of two logits that different kernels explain, in standard deviations of all
logits."""


def compare_logits(
    checkpoint: Path,
    hf: Path,
    shape: PolicyShape,
    dtype: torch.dtype,
    *,
    output_dtype: torch.dtype,
) -> float:
    """Run both models in turn on a few tokens, and compare the logits.

    Args:
        checkpoint: Megatron checkpoint.
        hf: Hugging Face directory.
        dtype: type of the computation, fp32 or bf16.
        output_dtype: written type; the source's weights are first cast to this type.

    Returns:
        Largest difference of two logits, in standard deviations of all logits.

    Raises:
        UserError: if different kernels do not explain the difference.
    """
    tokens = draw_tokens(shape)
    with torch.no_grad():
        expected = load_transformers(hf, output_dtype).to(dtype)(tokens).logits[0]
        found = _compute_megatron_logits(
            checkpoint, shape, tokens, "bf16" if dtype == torch.bfloat16 else "fp32", output_dtype
        )
    return measure_difference(found, expected)


def draw_tokens(shape: PolicyShape) -> torch.Tensor:
    """Draw the [1, TOKENS] token ids for the comparison of logits."""
    return torch.randint(shape.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def measure_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of two models' logits, in standard deviations of ``expected``.

    Raises:
        UserError: if different kernels do not explain the difference.
    """
    difference = float((logits.float() - expected.float()).abs().max() / expected.float().std())
    limit = LIMITS["bf16" if expected.dtype == torch.bfloat16 else "fp32"]
    if not difference <= limit:
        problem = (
            f"the models' logits differ by {difference:.2g} of their standard deviation, more than "
            f"{limit:g}"
        )
        remedy = "Report it: the weights are equal, and the models' computations differ"
        raise UserError("--verify", "all", problem, remedy)
    return difference


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _compute_megatron_logits(
    checkpoint: Path,
    shape: PolicyShape,
    tokens: torch.Tensor,
    dtype: Literal["fp32", "bf16"],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the logits of a model loaded by Megatron, [tokens, vocabulary] fp32."""
    from megatron_dppo.bridge.load import load_checkpoint
    from megatron_dppo.models.policy import build_packed_sequence, build_policy
    from megatron_dppo.parallel.world import initialize, shutdown

    # Megatron requires a process group. A HashStore needs no network.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = initialize(LayoutConfig(), seed=1, timeout_s=600.0)
        settings = ModelConfig(dtype=dtype, spec="torch")
        (model,) = build_policy(shape, settings, LayoutConfig(), temperature=1.0)
        model.to(world.device, settings.torch_dtype).eval()
        load_checkpoint([model], checkpoint, world)
        # Round the weights like the conversion, to compare models with equal weights.
        for parameter in model.parameters():
            parameter.data.copy_(parameter.data.to(output_dtype))
        packed = build_packed_sequence(np.array([0, TOKENS], dtype=np.int32), TOKENS, world.device)
        positions = torch.arange(TOKENS)[None]
        return model.compute_logits(
            tokens.to(world.device), positions.to(world.device), packed
        ).cpu()
    finally:
        shutdown()
