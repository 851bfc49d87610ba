"""``megatron-dppo export``: a run's policy as a Hugging Face directory, with a model card, and on the hub if asked.

Of a run that trained adapters it is these alone, for PEFT, or with ``--merge`` the policy with them merged in.
As in the other conversions weights go from file to file. No process group and no GPU take part.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint, step_of
from megatron_dppo.bridge.chunks import read_rows
from megatron_dppo.bridge.convert import check_files, in_threads, write_tensors
from megatron_dppo.bridge.convert_commands import (
    check_out,
    checkpoint_and_directory,
    chosen_dtype,
    in_place,
    megatron_to_hf,
    parse_megatron_to_hf,
    stored_policy,
)
from megatron_dppo.bridge.hf_directory import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    MODEL_FILES,
    SafetensorsWriter,
    copy_config_and_tokenizer,
    dtype_in,
    list_stops,
    plan_adapter_file,
    plan_files,
    write_adapter_config,
)
from megatron_dppo.bridge.mapping import Entry, adapters_of_tensor, entries, parameters
from megatron_dppo.bridge.safetensors_files import Chunk, check_weights
from megatron_dppo.bridge.stored_policy import StoredPolicy
from megatron_dppo.config import DTYPES, LoraConfig, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.process.files import replace_text
from megatron_dppo.process.streams import GB, progress
from megatron_dppo.report.card import TAG, base_of, model_card
from megatron_dppo.report.run import read_run
from megatron_dppo.trainer.fingerprints import fingerprint
from megatron_dppo.trainer.writer import Adapters, writer_in

CARD = "README.md"


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo export``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run: its last checkpoint is taken")
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="directory to make (default: RUN/export)")
    merge = "of a run with model.lora: merge its adapters into the policy that it began from (default: for PEFT, alone)"
    parser.add_argument("--merge", action="store_true", help=merge)
    parser.add_argument("--card", action="store_true", help="write a model card, README.md, from what the run recorded")
    parser.add_argument("--push", metavar="REPO", help="upload it as the hub's REPO (user/name), made private")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="of weights (default: as stored)")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier export left in OUT")


def export(chosen: argparse.Namespace) -> None:
    """Convert the run's last checkpoint; write the card, and upload both, where that is asked for.

    Raises:
        UserError: for a folder that is no run, an OUT that cannot be made, and a hub that does not answer or does not
            let us in; the last two before anything is converted. Adapters cannot be merged where the policy that they
            were trained beside is not there any more, or is another one now.
    """
    run, out = chosen.run, chosen.out or chosen.run / "export"
    found = read_run(run, run.resolve().name)
    checkpoint = find_checkpoint(run / "checkpoints", "RUN")
    writer = writer_in(checkpoint)
    adapters = writer.adapters if writer else None
    if chosen.merge and adapters is None:
        raise UserError("--merge", run, "trained all weights, and has no adapters to merge", "Leave it out")
    if chosen.push and adapters and adapters.setting == "checkpoint" and not chosen.merge:
        problem = "would be of adapters beside model.checkpoint, a policy that nobody else finds"
        raise UserError("--push", chosen.push, problem, "Add --merge: the whole policy is then uploaded")
    base = _base(adapters) if chosen.merge and adapters else None
    if chosen.push:
        make_repository(chosen.push)
    flags = ["--overwrite"] if chosen.overwrite else []
    card = out / CARD
    # Anybody else's is not replaced.
    ours = [CARD] if card.is_file() and TAG in card.read_text(encoding="utf-8", errors="replace") else []
    command = parse_megatron_to_hf([str(checkpoint), str(out), "--dtype", chosen.dtype, *flags])
    if writer is None or adapters is None:
        megatron_to_hf(command, also=ours)
    elif base is not None:
        of_checkpoint, dtype = adapters.setting == "checkpoint", ModelConfig(dtype=writer.dtype).torch_dtype
        merged_to_hf(command, adapters.settings, base=base, base_is_checkpoint=of_checkpoint, dtype=dtype, also=ours)
    else:
        name = base_of(found) if chosen.push else adapters.base  # a place on this machine is nobody else's
        adapters_to_hf(command, adapters.settings, base=name, also=ours)
    if adapters is None or base is not None:
        list_stops(out)
    if chosen.card:
        step = step_of(checkpoint)
        name = chosen.push.rpartition("/")[2] if chosen.push else found.name
        text = model_card(found, step=step or 0, name=name, adapters=adapters is not None and base is None)
        replace_text(card, text)
        print(f"{card}: read it before you show it to anybody")
    if chosen.push:
        _upload(out, chosen.push)


def _base(adapters: Adapters) -> Path:
    """The policy that adapters were trained beside.

    Raises:
        UserError: it is not there any more, or is another one now.
    """
    is_checkpoint, setting = adapters.setting == "checkpoint", f"model.{adapters.setting}"
    base = Path(adapters.base) if is_checkpoint else policy_folder(adapters.base, setting)
    if fingerprint(base, base if is_checkpoint else None) != adapters.fingerprint:
        problem = "has other weights than the adapters were trained beside"
        raise UserError(setting, base, problem, "Put those back, or leave --merge out")
    return base


def make_repository(repo: str) -> None:
    """Make a private repository of models on the hub, unless it is there.

    Raises:
        UserError: naming ``--push``, where the hub cannot be reached or does not let us in.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repo, private=True, exist_ok=True)
    except Exception as error:  # of the hub's client, of HTTP, of the network
        raise _refused(repo, error, "leave --push out") from error


def _upload(out: Path, repo: str) -> None:
    from huggingface_hub import HfApi

    try:
        print(HfApi().upload_folder(repo_id=repo, folder_path=out, commit_message="Export of megatron-dppo"))
    except Exception as error:
        raise _refused(repo, error, f"{out} is whole: `hf upload {repo} {out}` sends it later") from error


def _refused(repo: str, error: Exception, otherwise: str) -> UserError:
    """In the words of what happened: no network, no token, no right, or no such name."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    problem = f"the hub does not take it ({type(error).__name__}: {said:.200})"
    remedy = f"log in with `hf auth login`, look at HF_HUB_OFFLINE and the network, or {otherwise}"
    return UserError("--push", repo, problem, remedy)


Base = Callable[[str], Sequence[Chunk]]
"""Chunks of a Hugging Face tensor of the policy without adapters, by name."""


def adapters_to_hf(chosen: argparse.Namespace, lora: LoraConfig, *, base: str, also: Sequence[str] = ()) -> None:
    """Write the adapters for ``PeftModel.from_pretrained``, and for servers that load PEFT's directories.

    Args:
        chosen: the options of ``megatron_to_hf``.
        lora: of the run.
        base: the policy that they were trained beside, as PEFT is to find it.
        also: names of further files that ``--overwrite`` may replace.

    Raises:
        UserError: for a checkpoint that is not whole, or a destination that cannot be written; ``OUT`` is as it was.
    """
    checkpoint, hf, shape = checkpoint_and_directory(chosen)
    adapters = stored_policy(checkpoint, shape, lora)
    plan = plan_adapter_file(shape, lora, chosen_dtype(chosen, adapters.dtype))
    what = "directory of adapters"
    check_out(chosen, plan.total_bytes, [checkpoint, hf], ADAPTER_CONFIG, what, (*ADAPTER_FILES, *also))
    with in_place(chosen.out) as draft, progress("to PEFT", plan.total_bytes, unit="bytes") as advance:
        write_adapter_config(draft, base=base, lora=lora)
        write_tensors(adapters, plan, draft, workers=chosen.workers, advance=advance)
    print(
        f"{chosen.out}: adapters of rank {lora.rank}, {parameters(shape, lora) / 1e6:,.2f} million weights, of {base}"
    )


def merged_to_hf(
    chosen: argparse.Namespace,
    lora: LoraConfig,
    *,
    base: Path,
    base_is_checkpoint: bool,
    dtype: torch.dtype,
    also: Sequence[str] = (),
) -> None:
    """Write W + alpha/rank · B A in the place of every matrix that has adapters, and all other weights as they are.

    The sum is taken in fp32 and rounded once to the run's type, as the run's own export and its servers have it. Each
    worker holds a matrix whole.

    Args:
        chosen, lora, also: see :func:`adapters_to_hf`.
        base: the policy that they were trained beside: a Hugging Face directory, or a Megatron checkpoint.
        base_is_checkpoint: which of the two.
        dtype: of the run's weights.

    Raises:
        UserError: as ``adapters_to_hf``; also for a policy that is not whole.
    """
    checkpoint, hf, shape = checkpoint_and_directory(chosen)
    adapters = stored_policy(checkpoint, shape, lora)
    plan = plan_files(shape, chosen_dtype(chosen, dtype), int(chosen.shard_gb * GB))
    check_out(chosen, plan.total_bytes, [checkpoint, hf, base], "config.json", "model directory", (*MODEL_FILES, *also))
    check_files(adapters, chosen.workers)
    tensors = _base_tensors(base, shape, chosen.workers, is_checkpoint=base_is_checkpoint)

    def adapter(name: str) -> torch.Tensor | None:
        if (entry := adapters.entries.get(name)) is None:
            return None
        return _read(entry.tensors[name], adapters.chunks(name), torch.float32)

    with (
        in_place(chosen.out) as draft,
        SafetensorsWriter.open(plan, draft) as writer,
        progress("to Hugging Face", plan.total_bytes, unit="bytes") as advance,
    ):
        copy_config_and_tokenizer(hf, draft, plan.dtype)

        def merge(entry: Entry) -> None:
            for name, size in entry.tensors.items():
                weight = _read(size, tensors(name), dtype_in(dtype, entry))
                a, b = map(adapter, adapters_of_tensor(name))
                if a is not None and b is not None:
                    weight = torch.addmm(weight.float(), b, a, alpha=lora.alpha / lora.rank).to(dtype)
                writer.write(name, weight)
                advance(plan.bytes_of(name))

        in_threads(merge, entries(shape), chosen.workers)
    print(f"{chosen.out}: {parameters(shape) / 1e6:,.2f} million weights, with the adapters merged")


def _base_tensors(folder: Path, shape: PolicyShape, workers: int, *, is_checkpoint: bool) -> Base:
    if is_checkpoint:
        policy = StoredPolicy(find_checkpoint(folder, "model.checkpoint"), shape, "model.checkpoint")
        check_files(policy, workers)
        return policy.chunks
    stored = check_weights(folder, shape)
    return lambda name: [stored[name]]


def _read(shape: tuple[int, ...], chunks: Sequence[Chunk], dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor, cast to ``dtype``."""
    data = bytearray()
    for rows in read_rows(shape, chunks, dtype):  # in a buffer that the next ones are written into
        data += rows
    return torch.frombuffer(data, dtype=dtype).view(shape)
