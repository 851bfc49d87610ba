"""Weights from Hugging Face's form to Megatron's distributed format and back, in one process.

Both ways go from file to file, a few rows at a time, whatever the model's size. No process group and no GPU take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from megatron_dppo.bridge.checkpoint_folder import COMPANIONS_FOLDER, RELEASE, TRACKER
from megatron_dppo.bridge.file_plan import FilePlan
from megatron_dppo.bridge.hf_directory import SafetensorsWriter, copy_companions
from megatron_dppo.bridge.mapping import Entry
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.strips import Part, parameter_parts, strips
from megatron_dppo.bridge.torch_dist import CheckpointPlan, write_metadata, write_parameter

Advance = Callable[[int], None]
"""Told the bytes that have been written since the last call, from any thread."""
T = TypeVar("T")


def write_megatron(
    tensors: Mapping[str, Part],
    plan: CheckpointPlan,
    companions: Path,
    out: Path,
    *,
    workers: int,
    advance: Advance = lambda size: None,
) -> None:
    """Write a folder of checkpoints with one in it, ``release``, which every layout loads.

    Besides, ``hf/`` there has the configuration and the tokenizer, for the way back.

    Args:
        tensors: the Hugging Face tensors that the policy is made of.
        companions: the directory that configuration, tokenizer and chat template are taken from.
        out: an existing, empty directory.

    Raises:
        OSError: if the disk is full.
    """
    release, beside = out / RELEASE, out / COMPANIONS_FOLDER
    release.mkdir()
    beside.mkdir()

    checksums: dict[Entry, int] = {}

    def convert(entry: Entry) -> None:
        parts = parameter_parts(entry, tensors)
        checksums[entry] = write_parameter(release, plan, entry, strips(entry.shard_shape(1), parts, plan.dtype))
        advance(entry.elements * plan.dtype.itemsize)

    side_by_side(convert, plan.places, workers)
    copy_companions(companions, beside, plan.dtype)
    write_metadata(release, plan, checksums)
    (out / TRACKER).write_text(RELEASE + "\n")


def write_hf(
    policy: StoredPolicy,
    plan: FilePlan,
    companions: Path,
    out: Path,
    *,
    workers: int,
    advance: Advance = lambda size: None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face directory.

    Args:
        plan: where every tensor goes.
        companions: the directory that configuration, tokenizer and chat template are taken from.
        out: an existing, empty directory.

    Raises:
        OSError: if the disk is full.
        UserError: if the checkpoint is damaged.
    """
    with SafetensorsWriter(plan, out) as writer:
        copy_companions(companions, out, plan.dtype)

        def convert(entry: Entry) -> None:
            for name, parts in policy.tensors(entry).items():
                writer.write_bytes(name, strips(plan.tensors[name], parts, plan.dtype))
                advance(plan.bytes_of(name))

        side_by_side(convert, policy.parameters, workers)


def side_by_side(work: Callable[[T], None], items: Iterable[T], workers: int) -> None:
    """Call ``work`` for every item, in as many threads; the first exception ends it and is raised."""
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        calls = [pool.submit(work, item) for item in items]
        try:
            for call in calls:
                call.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
