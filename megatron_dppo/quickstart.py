"""``megatron-dppo configs`` and ``megatron-dppo quickstart``: examples, and a first run."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch.job import EXAMPLES, JOB
from megatron_dppo.settings import load_config

WARM_UP = ("layout.tp=1", "layout.dp=2", "data.arithmetic.problems=8192")
# Two ranks on a GPU cannot form an NCCL group.
ONE_GPU = ("layout.tp=1", "layout.dp=1")
"""Layout for a single GPU."""


def add_configs_arguments(parser: argparse.ArgumentParser) -> None:
    meaning = (
        "copy them to DIR/configs and DIR/scripts/slurm; commands in their first lines are "
        "typed in DIR"
    )
    parser.add_argument("--copy", metavar="DIR", type=Path, help=meaning)


def configs(arguments: argparse.Namespace) -> None:
    """List this version's configurations and Slurm scripts, with first sentences, or copy all.

    Raises:
        UserError: if another file is in the way (before copying), or the folder is not writable.
    """
    files = [
        file
        for folder in ("configs", "scripts/slurm")
        for file in sorted((EXAMPLES / folder).glob("*.*"))
    ]
    if arguments.copy is None:
        for file in files:
            if file.suffix != ".py" and file != JOB:
                comment = next(
                    line
                    for line in file.read_text(encoding="utf-8").splitlines()
                    if line.startswith("# ")
                )
                sentence = comment.removeprefix("# ").partition(". ")[0].rstrip(".:")
                print(f"{file.relative_to(EXAMPLES)!s:<38} {sentence}")
        return
    places = {file: arguments.copy / file.relative_to(EXAMPLES) for file in files}
    try:
        # Look at all files before the first copy.
        for file, place in places.items():
            if place.exists() and place.read_bytes() != file.read_bytes():
                raise UserError(
                    "--copy",
                    place,
                    "is there already, and differs",
                    "Name another directory, or move it",
                )
        for file, place in places.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
    except OSError as error:
        raise UserError(
            "--copy", arguments.copy, f"cannot be written ({error})", "Name another directory"
        ) from error
    print(f"{arguments.copy}: {len(files)} files in configs and scripts/slurm")


def add_quickstart_arguments(parser: argparse.ArgumentParser) -> None:
    meaning = (
        "settings of the training, or sft.* of the warm-up; give a second run a folder, "
        "run.dir=FOLDER"
    )
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help=meaning)


def quickstart(arguments: argparse.Namespace) -> int:
    """Make a policy of a million parameters, warm it up on sums, and train. Skip existing parts.

    Raises:
        UserError: if a setting is wrong, before anything is made.
    """
    from megatron_dppo.init import write_model
    from megatron_dppo.launch.start import count_gpus, prepare_environment, run

    file = str(EXAMPLES / "configs/quickstart.yaml")
    # Read the settings first, because a mistake must stop before anything is made.
    config = load_config(file, arguments.overrides)
    plain = load_config(file, ())
    prepare_environment(config)
    layout = ONE_GPU if count_gpus() == 1 else ()
    config = load_config(file, [*layout, *arguments.overrides])
    warm = Path(str(plain.model.path))
    initial = Path(plain.run.dir, "initial")
    if not (warm / "config.json").exists():
        if not (initial / "config.json").exists():
            # A larger deviation suits a tiny model.
            write_model(initial, std=0.05)
        of_warm_up = [word for word in arguments.overrides if word.startswith("sft.")]
        folders = f"model.path={initial}", f"sft.out={warm}"
        if code := run("sft", load_config(file, [*of_warm_up, *WARM_UP, *layout, *folders])):
            return code
    return run("train", config)
