"""``megatron-dppo export``: a run's policy as a Hugging Face directory, with a model card, and on the hub if asked."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import find_checkpoint, step_of
from megatron_dppo.bridge.convert_commands import DTYPES, megatron_to_hf, parse_megatron_to_hf
from megatron_dppo.errors import UserError
from megatron_dppo.process.files import replacing_file
from megatron_dppo.report.card import TAG, model_card
from megatron_dppo.report.run import read_run

CARD = "README.md"


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``megatron-dppo export``."""
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run: its last checkpoint is taken")
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help="directory to make (default: RUN/export)")
    parser.add_argument("--card", action="store_true", help="write a model card, README.md, from what the run recorded")
    parser.add_argument("--push", metavar="REPO", help="upload it as the hub's REPO (user/name), made private")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="of weights (default: as stored)")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier export left in OUT")


def export(chosen: argparse.Namespace) -> None:
    """Convert the run's last checkpoint; write the card, and upload both, where that is asked for.

    Raises:
        UserError: for a folder that is no run, an OUT that cannot be made, and a hub that does not answer or does not
            let us in; the last two before anything is converted.
    """
    run, out = chosen.run, chosen.out or chosen.run / "export"
    found = read_run(run, run.resolve().name)
    checkpoint = find_checkpoint(run / "checkpoints", "RUN")
    if chosen.push:
        make_repository(chosen.push)
    flags = ["--overwrite"] if chosen.overwrite else []
    ours = [CARD] if _is_ours(out / CARD) else []
    megatron_to_hf(parse_megatron_to_hf([str(checkpoint), str(out), "--dtype", chosen.dtype, *flags]), also=ours)
    if chosen.card:
        step = step_of(checkpoint)
        name = chosen.push.rpartition("/")[2] if chosen.push else found.name
        with replacing_file(out / CARD) as partial:
            partial.write_text(model_card(found, step=step or 0, name=name), encoding="utf-8")
        print(f"{out / CARD}: read it before you show it to anybody")
    if chosen.push:
        _upload(out, chosen.push)


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
