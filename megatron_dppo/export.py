"""``megatron-dppo export``: a run's policy as a Hugging Face directory, with a model card, and on the hub if asked.

Of a run that trained adapters it is these alone, for PEFT, or with ``--merge`` the policy with them merged in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint, step_of
from megatron_dppo.bridge.convert_adapters import adapters_to_hf, merged_to_hf
from megatron_dppo.bridge.convert_commands import megatron_to_hf, parse_megatron_to_hf
from megatron_dppo.bridge.fingerprint import fingerprint
from megatron_dppo.config import DTYPES, ModelConfig
from megatron_dppo.errors import UserError
from megatron_dppo.hub import policy_folder
from megatron_dppo.process.files import replace_text
from megatron_dppo.report.card import TAG, base_of, model_card
from megatron_dppo.report.run import read_run
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
    ours = [CARD] if _is_ours(out / CARD) else []
    command = parse_megatron_to_hf([str(checkpoint), str(out), "--dtype", chosen.dtype, *flags])
    if writer is None or adapters is None:
        megatron_to_hf(command, also=ours)
    elif base is not None:
        of_checkpoint, dtype = adapters.setting == "checkpoint", ModelConfig(dtype=writer.dtype).torch_dtype
        merged_to_hf(command, adapters.settings, base=base, base_is_checkpoint=of_checkpoint, dtype=dtype, also=ours)
    else:
        name = base_of(found) if chosen.push else adapters.base  # a place on this machine is nobody else's
        adapters_to_hf(command, adapters.settings, base=name, also=ours)
    if chosen.card:
        step = step_of(checkpoint)
        name = chosen.push.rpartition("/")[2] if chosen.push else found.name
        text = model_card(found, step=step or 0, name=name, adapters=adapters is not None and base is None)
        replace_text(out / CARD, text)
        print(f"{out / CARD}: read it before you show it to anybody")
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


def _is_ours(card: Path) -> bool:
    """Whether an earlier export has written it: anybody else's is not replaced."""
    return card.is_file() and TAG in card.read_text(encoding="utf-8", errors="replace")


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
