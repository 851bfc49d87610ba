"""``megatron-dppo export``: a run's policy as a Hugging Face directory, optionally on the hub.

Adapters are exported as PEFT files, or with ``--merge`` as the merged policy. Weights go from file
to file, without process group or GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint, parse_step
from megatron_dppo.bridge.chunks import promote_dtype, read_tensor, tensor_bytes
from megatron_dppo.bridge.convert import WORKERS, check_files, write_weights
from megatron_dppo.bridge.convert_commands import (
    describe_weights,
    find_hf_directory,
    open_stored_policy,
    resolve_dtype,
)
from megatron_dppo.bridge.export import describe_policy
from megatron_dppo.bridge.hf_directory import (
    ADAPTERS,
    MODEL,
    plan_adapter_file,
    plan_files,
    write_adapter_config,
)
from megatron_dppo.bridge.mapping import count_parameters, get_adapter_names, list_entries
from megatron_dppo.bridge.safetensors_files import Chunk, check_weights
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.config import DTYPES, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.files import check_replaceable, replace_text, write_directory
from megatron_dppo.report.card import TAG, find_base_model, render_model_card
from megatron_dppo.report.run import read_run
from megatron_dppo.trainer.fingerprints import compute_weight_fingerprint
from megatron_dppo.trainer.writer import Adapters, read_state

CARD = "README.md"


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="folder of a run: its last checkpoint is taken"
    )
    parser.add_argument(
        "out", metavar="OUT", type=Path, nargs="?", help="directory to make (default: RUN/export)"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a run with model.lora: merge its adapters into the policy that it began from "
        "(default: for PEFT, alone)",
    )
    parser.add_argument(
        "--card",
        action="store_true",
        help="write a model card, README.md, from what the run recorded",
    )
    parser.add_argument(
        "--push", metavar="REPO", help="upload it as the hub's REPO (user/name), made private"
    )
    parser.add_argument(
        "--dtype", choices=["auto", *DTYPES], default="auto", help="of weights (default: as stored)"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what an earlier export left in OUT"
    )


def export(arguments: argparse.Namespace) -> None:
    """Convert the run's last checkpoint; write the card and upload if requested.

    Raises:
        UserError: if the folder is no run; before conversion, if OUT cannot be made or the hub
            refuses access. Also if the base policy of adapters to merge is missing or changed.
    """
    run = arguments.run
    out = arguments.out or arguments.run / "export"
    found = read_run(run, run.resolve().name)
    checkpoint = find_checkpoint(run / "checkpoints", "RUN")
    writer = stored.writer if (stored := read_state(checkpoint)) else None
    adapters = writer.adapters if writer else None
    if arguments.merge and adapters is None:
        raise UserError(
            "--merge", run, "trained all weights, and has no adapters to merge", "Leave it out"
        )
    if arguments.push and adapters and adapters.setting == "checkpoint" and not arguments.merge:
        problem = "would upload adapters of model.checkpoint, which other users do not have"
        raise UserError(
            "--push", arguments.push, problem, "Add --merge: the whole policy is then uploaded"
        )
    base = _find_base(adapters) if arguments.merge and adapters else None
    # Ask the hub before the long conversion.
    if arguments.push:
        make_repository(arguments.push)
    hf, shape = find_hf_directory(checkpoint)
    policy = open_stored_policy(checkpoint, shape, adapters.settings if adapters else None)
    trained = ModelConfig(dtype=writer.dtype).torch_dtype if writer and base else policy.dtype
    dtype = resolve_dtype(arguments, trained)
    if adapters and base is None:
        kind = ADAPTERS
        plan = plan_adapter_file(shape, adapters.settings, dtype)
        # On the hub, a path on this machine would be useless.
        name = find_base_model(found) if arguments.push else adapters.base
        describe = partial(write_adapter_config, base=name, lora=adapters.settings)
        millions = count_parameters(shape, adapters.settings) / 1e6
        weights = f"adapters of rank {adapters.rank}, {millions:,.2f} million weights, of {name}"
    else:
        kind = MODEL
        plan = plan_files(shape, dtype)
        describe = partial(describe_policy, hf, dtype=dtype)
        weights = describe_weights(shape, dtype) + ", with the adapters merged" * (base is not None)
    card = out / CARD
    # Replace only a card written by this program.
    if card.is_file() and TAG in card.read_text(encoding="utf-8", errors="replace"):
        kind = kind._replace(files=(*kind.files, CARD))
    sources = [checkpoint, hf, *filter(None, [base])]
    check_replaceable(
        out, plan.total_bytes, "OUT", kind, sources=sources, overwrite=arguments.overwrite
    )
    check_files(policy, WORKERS)
    rows: Rows = (
        _merge(policy, adapters, base, shape, trained)
        if adapters and base
        else policy.read_tensor_rows
    )
    with write_directory(out, "OUT") as draft:
        describe(draft)
        write_weights(plan, draft, lambda name: rows(name, dtype), WORKERS)
    print(f"{out}: {weights}")
    if arguments.card:
        step = parse_step(checkpoint)
        name = arguments.push.rpartition("/")[2] if arguments.push else found.name
        text = render_model_card(
            found, step=step or 0, name=name, adapters=adapters is not None and base is None
        )
        replace_text(card, text)
        print(f"{card}: read it before you publish it")
    if arguments.push:
        _upload(out, arguments.push)


def _find_base(adapters: Adapters) -> Path:
    """Return the base policy; raise UserError if missing or changed."""
    is_checkpoint = adapters.setting == "checkpoint"
    setting = f"model.{adapters.setting}"
    base = Path(adapters.base) if is_checkpoint else policy_folder(adapters.base, setting)
    if compute_weight_fingerprint(base, base if is_checkpoint else None) != adapters.fingerprint:
        problem = "has other weights than the policy of the adapters' training"
        raise UserError(
            setting, base, problem, "Restore the original weights, or leave --merge out"
        )
    return base


def make_repository(repo: str) -> None:
    """Create a private model repository, unless present.

    Raises:
        UserError: naming ``--push``, if the hub is unreachable or refuses access.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    # Hub client, HTTP and network errors share no base class.
    except Exception as error:
        raise _build_push_error(repo, error, "leave --push out") from error


def _upload(out: Path, repo: str) -> None:
    from huggingface_hub import HfApi

    try:
        print(
            HfApi().upload_folder(
                repo_id=repo, folder_path=out, commit_message="Export of megatron-dppo"
            )
        )
    except Exception as error:
        raise _build_push_error(
            repo, error, f"{out} is complete: `hf upload {repo} {out}` sends it later"
        ) from error


def _build_push_error(repo: str, error: Exception, alternative: str) -> UserError:
    """Build the error with the cause's first line."""
    reason = next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
    problem = f"the hub does not take it ({type(error).__name__}: {reason:.200})"
    remedy = (
        f"log in with `hf auth login`, look at HF_HUB_OFFLINE and the network, or {alternative}"
    )
    return UserError("--push", repo, problem, remedy)


Rows = Callable[[str, torch.dtype], Iterable[memoryview]]
"""Function from tensor name and dtype to the tensor's bytes."""


def _merge(
    policy: StoredPolicy,
    adapters: Adapters,
    base: Path,
    shape: PolicyShape,
    trained: torch.dtype,
) -> Rows:
    """Return rows with W + alpha/rank · B A for matrices with adapters, other weights unchanged.

    Each worker holds a whole matrix.

    Args:
        policy: adapters.
        base: policy that the adapters were trained on.
        trained: the run's dtype.

    Raises:
        UserError: if the base policy is incomplete.
    """
    # Sum in fp32 and round once to ``trained``, as the run's own export and servers do.
    chunks: Callable[[str], Sequence[Chunk]]
    if adapters.setting == "checkpoint":
        whole = StoredPolicy(find_checkpoint(base, "model.checkpoint"), shape, "model.checkpoint")
        check_files(whole, WORKERS)
        chunks = whole.list_chunks
    else:
        chunks = {name: [each] for name, each in check_weights(base, shape).items()}.__getitem__
    of_name = {name: entry for entry in list_entries(shape) for name in entry.tensors}

    def adapter(name: str) -> torch.Tensor | None:
        if (entry := policy.entries.get(name)) is None:
            return None
        return read_tensor(entry.tensors[name], policy.list_chunks(name), torch.float32)

    def rows(name: str, dtype: torch.dtype) -> Iterable[memoryview]:
        entry = of_name[name]
        weight = read_tensor(entry.tensors[name], chunks(name), promote_dtype(trained, entry))
        a, b = map(adapter, get_adapter_names(name))
        if a is not None and b is not None:
            weight = torch.addmm(weight.float(), b, a, alpha=adapters.alpha / adapters.rank).to(
                trained
            )
        return [tensor_bytes(weight.to(promote_dtype(dtype, entry)))]

    return rows
