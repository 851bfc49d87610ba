"""The two conversions as commands: arguments, checks, progress, verification."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    warn_missing_checksums,
)
from megatron_dppo.bridge.chunks import BUFFER_BYTES, find_stored_dtype
from megatron_dppo.bridge.convert import (
    WORKERS,
    check_files,
    choose_logits_dtype,
    compare_logits,
    compare_tensors,
    write_megatron,
    write_weights,
)
from megatron_dppo.bridge.hf_directory import (
    MAX_SHARD_BYTES,
    MODEL,
    copy_config_and_tokenizer,
    plan_files,
)
from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.bridge.safetensors_files import check_weights
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.bridge.torch_dist import plan_checkpoint
from megatron_dppo.config import DTYPES, LoraConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.process.files import DirectoryKind, check_replaceable, write_directory
from megatron_dppo.process.streams import GB

CONVERTED = DirectoryKind(
    "converted checkpoint", f"{RELEASE}/{FORMAT}", (RELEASE, HF_FOLDER, TRACKER)
)


def add_from_hf_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="HF", type=Path, help="Hugging Face model directory")
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="folder to make: OUT/release, its tracker, OUT/hf"
    )
    _add_common(parser)


def from_hf(arguments: argparse.Namespace) -> None:
    """Convert to Megatron, and verify on request.

    Raises:
        UserError: if the source is incomplete, the destination not writable, or both forms differ;
            ``OUT`` is unchanged.
    """
    with rename_error_setting("HF"):
        source = policy_folder(str(arguments.source))
        shape = read_shape(source)
        tensors = check_weights(source, shape)
    plan = plan_checkpoint(shape, resolve_dtype(arguments, find_stored_dtype(tensors, shape)))
    if _is_ready(arguments, shape, plan.dtype, plan.sizes, CONVERTED, [source]):
        with write_directory(arguments.out, "OUT") as draft:
            write_megatron(tensors, plan, source, draft, arguments.workers)
            _verify(arguments, draft / RELEASE, source, shape, plan.dtype)
        print(f"{arguments.out}: {describe_weights(shape, plan.dtype)}")


def add_to_hf_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        type=Path,
        help="folder of checkpoints (RUN/checkpoints: the latest), or one",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    parser.add_argument(
        "--hf",
        metavar="DIR",
        type=Path,
        help=f"where configuration and tokenizer come from (default: {HF_FOLDER}/ beside the "
        "checkpoint)",
    )
    parser.add_argument(
        "--shard-gb",
        metavar="GB",
        type=make_positive_parser(float),
        default=MAX_SHARD_BYTES / GB,
        help="most in a file (default: %(default)s)",
    )
    _add_common(parser)


def to_hf(arguments: argparse.Namespace) -> None:
    """Convert to Hugging Face, and verify on request.

    Raises:
        UserError: if the checkpoint is incomplete, the destination not writable, or both forms
            differ; ``OUT`` is unchanged.
    """
    checkpoint = find_checkpoint(arguments.checkpoint, "CKPT")
    hf, shape = find_hf_directory(checkpoint, arguments.hf)
    policy = open_stored_policy(checkpoint, shape)
    plan = plan_files(shape, resolve_dtype(arguments, policy.dtype), int(arguments.shard_gb * GB))
    if _is_ready(arguments, shape, plan.dtype, plan.sizes, MODEL, [checkpoint, hf]):
        check_files(policy, arguments.workers)
        with write_directory(arguments.out, "OUT") as draft:
            copy_config_and_tokenizer(hf, draft, plan.dtype)
            write_weights(
                plan,
                draft,
                lambda name: policy.read_tensor_rows(name, plan.dtype),
                arguments.workers,
            )
            _verify(arguments, checkpoint, draft, shape, plan.dtype)
        print(f"{arguments.out}: {describe_weights(shape, plan.dtype)}")


def find_hf_directory(checkpoint: Path, folder: Path | None = None) -> tuple[Path, PolicyShape]:
    """Return the directory with a checkpoint's configuration and tokenizer, and the policy's shape.

    Raises:
        UserError: if the directory is missing.
    """
    beside = checkpoint.absolute().parent / HF_FOLDER
    if folder is None and not beside.is_dir():
        problem = (
            f"there is no {HF_FOLDER}/ with the model's config.json and tokenizer beside "
            f"{checkpoint.name}"
        )
        remedy = "Name the Hugging Face directory that the policy began from"
        raise UserError("--hf", "(not given)", problem, remedy)
    with rename_error_setting("--hf"):
        hf = policy_folder(str(folder), weights=False) if folder else beside
        return hf, read_shape(hf)


def resolve_dtype(arguments: argparse.Namespace, stored: torch.dtype) -> torch.dtype:
    return stored if arguments.dtype == "auto" else ModelConfig(dtype=arguments.dtype).torch_dtype


def open_stored_policy(
    checkpoint: Path,
    shape: PolicyShape,
    lora: LoraConfig | None = None,
) -> StoredPolicy:
    """Open a :class:`StoredPolicy`; print a note if the checkpoint's files cannot be checked."""
    policy = StoredPolicy(checkpoint, shape, "CKPT", lora)
    if policy.checksums is None:
        warn_missing_checksums(checkpoint)
    return policy


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="of the weights (default: as stored)",
    )
    parser.add_argument(
        "--workers",
        type=make_positive_parser(int),
        default=WORKERS,
        help="threads (default: %(default)s)",
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        choices=["tensors", "all"],
        const="all",
        help="read what was written and compare every tensor's hash; all (the default of "
        "--verify): logits as well",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print what would be written, and stop",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what an earlier conversion left in OUT"
    )


def make_positive_parser(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return the parser of an option's value: a finite number above 0."""

    def parse(text: str) -> float:
        if not 0 < (number := kind(text)) < float("inf"):
            raise ValueError
        return number

    # argparse uses the function's name in error messages.
    parse.__name__ = "positive number"
    return parse


@contextmanager
def rename_error_setting(setting: str) -> Iterator[None]:
    """Replace the setting in errors about a model directory by the command's argument."""
    try:
        yield
    except UserError as error:
        raise UserError(setting, error.value, error.problem, error.remedy) from error
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise UserError(
            setting, error.filename, problem, "Correct the cause, and try again"
        ) from error


def _is_ready(
    arguments: argparse.Namespace,
    shape: PolicyShape,
    dtype: torch.dtype,
    sizes: Mapping[str, int],
    kind: DirectoryKind,
    sources: Sequence[Path],
) -> bool:
    """Check that OUT can be made, and return whether to convert."""
    check_replaceable(
        arguments.out,
        sum(sizes.values()),
        "OUT",
        kind,
        sources=sources,
        overwrite=arguments.overwrite,
    )
    # Too little memory for logits is an error now, rather than after the conversion.
    logits = choose_logits_dtype(shape, dtype) if arguments.verify == "all" else None
    if not arguments.dry_run:
        return True
    # A dry run prints the plan.
    table = Table(
        "file", "MiB", title=f"{arguments.out}: {sum(sizes.values()) / GB:.2f} GB", box=None
    )
    for file, size in sizes.items():
        table.add_row(file, f"{size / 2**20:,.1f}")
    Console().print(table)
    # Each worker holds a buffer of output, and up to four times that size of input (fp64 to bf16).
    held = arguments.workers * 5 * BUFFER_BYTES
    print(
        f"memory: at most {held / 2**20:.1f} MiB of weights at a time, in {arguments.workers} "
        "workers"
    )
    if logits:
        print(f"        then the whole model for its logits, {describe_weights(shape, logits)}")
    print("nothing has been written")
    return False


def _verify(
    arguments: argparse.Namespace,
    checkpoint: Path,
    hf: Path,
    shape: PolicyShape,
    dtype: torch.dtype,
) -> None:
    if arguments.verify is None:
        return
    # Opened again, to compare the content on the disk.
    policy = StoredPolicy(checkpoint, shape, "--verify")
    check_files(policy, arguments.workers, all_files=True)
    with rename_error_setting("--verify"):
        digest = compare_tensors(policy, hf, shape, output_dtype=dtype, workers=arguments.workers)
    print(
        "every tensor is the same in both forms, read again from the disk (sha256 of all: "
        f"{digest})"
    )
    if arguments.verify == "all":
        difference = compare_logits(
            checkpoint, hf, shape, choose_logits_dtype(shape, dtype), output_dtype=dtype
        )
        print(
            f"logits of both models differ by at most {difference:.2g} of their standard deviation"
        )


def describe_weights(shape: PolicyShape, dtype: torch.dtype) -> str:
    millions = count_parameters(shape) / 1e6
    return f"{millions:,.2f} million weights in {str(dtype).removeprefix('torch.')}"
