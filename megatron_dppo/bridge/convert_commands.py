"""The two conversions as commands: arguments, checks before anything is written, progress, verification."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megatron_dppo.bridge.checkpoint_folder import (
    FORMAT,
    HF_FOLDER,
    RELEASE,
    TRACKER,
    find_checkpoint,
    refusing_damage,
    warn_unchecked,
)
from megatron_dppo.bridge.chunks import BUFFER_BYTES, TYPES
from megatron_dppo.bridge.convert import (
    compare_logits,
    compare_tensors,
    in_threads,
    logits_dtype,
    write_hf,
    write_megatron,
)
from megatron_dppo.bridge.hf_directory import MAX_SHARD_BYTES, MODEL_FILES, plan_files
from megatron_dppo.bridge.mapping import exact_tensors, parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.torch_dist import plan_checkpoint
from megatron_dppo.config import DTYPES, LoraConfig, ModelConfig
from megatron_dppo.errors import UserError, error_text
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.files import check_replaceable, replacing_directory
from megatron_dppo.process.streams import GB, progress, quieten, tell


def run(command: Callable[[argparse.Namespace], None], chosen: argparse.Namespace) -> int:
    """Run a command. Returns the exit code: 2 for a mistake that the user can mend, 130 after Ctrl-C."""
    try:
        command(chosen)
    except UserError as error:
        tell(error_text(error))
        return 2
    except OSError as error:
        mended = UserError("file", error.filename, error.strerror or str(error), "Mend that, and convert again")
        tell(error_text(mended))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def add_from_hf_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="HF", type=Path, help="Hugging Face model directory")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make: OUT/release, its tracker, OUT/hf")
    _add_common(parser)


def parse_hf_to_megatron(arguments: Sequence[str]) -> argparse.Namespace:
    return _parsed(add_from_hf_arguments, arguments)


def hf_to_megatron(chosen: argparse.Namespace) -> None:
    """Convert, and verify where that is asked for.

    Raises:
        UserError: for a source that is not whole, a destination that cannot be written, or forms that differ; ``OUT``
            is as it was.
    """
    chosen.source = policy_folder(str(chosen.source), "HF")
    with naming("HF"):
        shape = read_shape(chosen.source)
        tensors = check_weights(chosen.source, shape)
    exact = exact_tensors(shape)
    widest = reduce(torch.promote_types, {TYPES[tensor.dtype] for name, tensor in tensors.items() if name not in exact})
    plan = plan_checkpoint(shape, chosen_dtype(chosen, widest))
    files = (RELEASE, HF_FOLDER, TRACKER)
    check_out(chosen, sum(plan.files.values()), [chosen.source], f"{RELEASE}/{FORMAT}", "converted checkpoint", files)
    if _ready(chosen, shape, plan.files, plan.dtype):
        with in_place(chosen.out) as draft:
            with progress("to Megatron", parameters(shape) * plan.dtype.itemsize, unit="bytes") as advance:
                write_megatron(tensors, plan, chosen.source, draft, workers=chosen.workers, advance=advance)
            _verify(chosen, draft / RELEASE, chosen.source, shape, plan.dtype)
        print(f"{chosen.out}: {_weights(shape, plan.dtype)}")


def add_to_hf_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoint = "folder of checkpoints (RUN/checkpoints: the latest), or one"
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help=checkpoint)
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    hf = f"where configuration and tokenizer come from (default: {HF_FOLDER}/ beside the checkpoint)"
    parser.add_argument("--hf", metavar="DIR", type=Path, help=hf)
    size = "most in a file (default: %(default)s)"
    parser.add_argument("--shard-gb", metavar="GB", type=positive(float), default=MAX_SHARD_BYTES / GB, help=size)
    _add_common(parser)


def parse_megatron_to_hf(arguments: Sequence[str]) -> argparse.Namespace:
    return _parsed(add_to_hf_arguments, arguments)


def megatron_to_hf(chosen: argparse.Namespace, also: Sequence[str] = ()) -> None:
    """Convert, and verify where that is asked for.

    Args:
        also: names of further files that ``--overwrite`` may replace.

    Raises:
        UserError: for a checkpoint that is not whole, a destination that cannot be written, or forms that differ;
            ``OUT`` is as it was.
    """
    checkpoint, hf, shape = checkpoint_and_directory(chosen)
    policy = stored_policy(checkpoint, shape)
    plan = plan_files(shape, chosen_dtype(chosen, policy.dtype), int(chosen.shard_gb * GB))
    sizes = {file: sum(map(plan.bytes_of, names)) for file, names in plan.files.items()}
    check_out(chosen, sum(sizes.values()), [checkpoint, hf], "config.json", "model directory", (*MODEL_FILES, *also))
    if _ready(chosen, shape, sizes, plan.dtype):
        with in_place(chosen.out) as draft:
            with progress("to Hugging Face", plan.total_bytes, unit="bytes") as advance:
                write_hf(policy, plan, hf, draft, workers=chosen.workers, advance=advance)
            _verify(chosen, checkpoint, draft, shape, plan.dtype)
        print(f"{chosen.out}: {_weights(shape, plan.dtype)}")


def checkpoint_and_directory(chosen: argparse.Namespace) -> tuple[Path, Path, PolicyShape]:
    """The checkpoint that was chosen, the directory with its configuration and tokenizer, and the policy's shape.

    Raises:
        UserError: one of the two is not there.
    """
    checkpoint = find_checkpoint(chosen.checkpoint, "CKPT")
    hf = policy_folder(str(chosen.hf), "--hf", weights=False) if chosen.hf else checkpoint.absolute().parent / HF_FOLDER
    if chosen.hf is None and not hf.is_dir():
        problem = f"there is no {HF_FOLDER}/ with the model's config.json and tokenizer beside {checkpoint.name}"
        remedy = "Name the Hugging Face directory that the policy began from"
        raise UserError("--hf", "(not given)", problem, remedy)
    with naming("--hf"):
        shape = read_shape(hf)
    return checkpoint, hf, shape


def chosen_dtype(chosen: argparse.Namespace, stored: torch.dtype) -> torch.dtype:
    """Type of the weights to write."""
    return stored if chosen.dtype == "auto" else ModelConfig(dtype=chosen.dtype).torch_dtype


def stored_policy(checkpoint: Path, shape: PolicyShape, lora: LoraConfig | None = None) -> StoredPolicy:
    """See :class:`StoredPolicy`; says so where the checkpoint's files cannot be checked."""
    policy = StoredPolicy(checkpoint, shape, "CKPT", lora)
    if policy.checksums is None:
        warn_unchecked(checkpoint)
    return policy


def _parsed(add: Callable[[argparse.ArgumentParser], None], arguments: Sequence[str]) -> argparse.Namespace:
    add(parser := argparse.ArgumentParser())
    return parser.parse_args(arguments)


def _add_common(parser: argparse.ArgumentParser) -> None:
    """The options that both commands have."""
    dtype = "of the weights (default: as stored)"
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help=dtype)
    workers = min(4, os.cpu_count() or 1)
    parser.add_argument("--workers", type=positive(int), default=workers, help="threads (default: %(default)s)")
    verify = "read what was written and compare every tensor's hash; all (the default of --verify): logits as well"
    parser.add_argument("--verify", nargs="?", choices=["tensors", "all"], const="all", help=verify)
    dry_run = "check everything, print what would be written, and stop"
    parser.add_argument("--dry-run", action="store_true", help=dry_run)
    overwrite = "replace what an earlier conversion left in OUT"
    parser.add_argument("--overwrite", action="store_true", help=overwrite)


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Parser of an option's value: a finite number above 0."""

    def parse(text: str) -> float:
        if not 0 < (number := kind(text)) < float("inf"):
            raise ValueError
        return number

    parse.__name__ = "positive number"  # argparse's word for it
    return parse


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Errors about a model directory name the argument, not the setting of a run."""
    try:
        yield
    except UserError as error:
        raise UserError(setting, error.value, error.problem, error.remedy) from error


def check_out(
    chosen: argparse.Namespace, size: int, sources: Sequence[Path], mark: str, what: str, files: Sequence[str]
) -> None:
    """Check that OUT can be made or replaced; for ``mark``, ``what`` and ``files`` see :func:`check_replaceable`."""
    out = chosen.out.resolve()
    for source in sources:
        if out in (source.resolve(), *source.resolve().parents):
            raise UserError("OUT", chosen.out, f"{source} is read from there", "Name another directory")
    if out.is_dir() and any(out.iterdir()) and not chosen.overwrite:
        raise UserError("OUT", chosen.out, "is there already", "Name another directory, or give --overwrite")
    check_replaceable(chosen.out, size, "OUT", mark=mark, what=what, files=files)


def _ready(chosen: argparse.Namespace, shape: PolicyShape, sizes: Mapping[str, int], dtype: torch.dtype) -> bool:
    """Whether to go on; with ``--dry-run`` what would be done is printed instead."""
    logits = logits_dtype(shape, dtype) if chosen.verify == "all" else None  # refused now, not after the conversion
    if not chosen.dry_run:
        return True
    table = Table("file", "MiB", title=f"{chosen.out}: {sum(sizes.values()) / GB:.2f} GB", box=None)
    for file, size in sizes.items():
        table.add_row(file, f"{size / 2**20:,.1f}")
    Console().print(table)
    held = chosen.workers * 5 * BUFFER_BYTES  # what is written, and what it is cast from: four times, of fp64 to bf16
    print(f"memory: at most {held / 2**20:.1f} MiB of weights at a time, in {chosen.workers} workers")
    if logits:
        print(f"        then the whole model for its logits, {_weights(shape, logits)}")
    print("nothing has been written")
    return False


@contextmanager
def in_place(out: Path) -> Iterator[Path]:
    """A draft of ``out``, which takes its place at the end. A failing file or disk becomes a UserError."""
    try:
        with replacing_directory(out) as draft:
            yield draft
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "Free some space, or name a directory on another disk" if full else "Mend that, and try again"
        raise UserError("OUT", out, f"was not written ({error}); nothing is left of this attempt", remedy) from error


def _verify(chosen: argparse.Namespace, checkpoint: Path, hf: Path, shape: PolicyShape, dtype: torch.dtype) -> None:
    if chosen.verify is None:
        return
    policy = StoredPolicy(checkpoint, shape, "--verify")
    with refusing_damage(checkpoint, "--verify"):
        if (checksums := policy.checksums) is not None:
            workers = chosen.workers
            in_threads(lambda share: checksums.check(share=share, of=workers), range(workers), workers)
    size = parameters(shape) * dtype.itemsize
    with naming("--verify"), progress("verifying", size, unit="bytes") as advance:
        digest = compare_tensors(policy, hf, shape, written=dtype, workers=chosen.workers, advance=advance)
    print(f"every tensor is the same in both forms, read again from the disk (sha256 of all: {digest})")
    if chosen.verify == "all":
        quieten()
        difference = compare_logits(checkpoint, hf, shape, logits_dtype(shape, dtype), written=dtype)
        print(f"logits of both models differ by at most {difference:.2g} of their standard deviation")


def _weights(shape: PolicyShape, dtype: torch.dtype) -> str:
    millions = parameters(shape) / 1e6
    return f"{millions:,.2f} million weights in {str(dtype).removeprefix('torch.')}"


from_hf, to_hf = partial(run, hf_to_megatron), partial(run, megatron_to_hf)
"""Commands ``megatron-dppo convert from-hf`` and ``to-hf``: of parsed options the exit code."""
