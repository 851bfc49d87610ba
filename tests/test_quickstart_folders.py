"""The quickstart with other settings leaves the plain quickstart's results alone.

What it calls is stood in for by a script that writes down its arguments: only the folders it is given count.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "quickstart.sh"


def trained_in(folder: Path, *words: str) -> list[str]:
    """The ``run.dir`` words of the training, in the order in which they count."""
    (folder / "scripts").mkdir(exist_ok=True)
    shutil.copy(SCRIPT, folder / "scripts")
    (folder / "scripts" / "install.sh").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    said = folder / "megatron-dppo"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >last\n')
    said.chmod(0o755)
    path = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "scripts/quickstart.sh", *words], cwd=folder, env=path, check=True)
    arguments = (folder / "last").read_text().splitlines()
    assert arguments[:2] == ["train", "configs/quickstart.yaml"]
    assert "model.path=runs/quickstart/warm" in arguments, "which is warmed up once"
    return [word.removeprefix("run.dir=") for word in arguments if word.startswith("run.dir=")]


def test_other_settings_have_a_folder_that_their_names_tell(tmp_path: Path) -> None:
    assert trained_in(tmp_path) == ["runs/quickstart"]
    assert trained_in(tmp_path, "loss.name=dapo") == ["runs/quickstart-loss.name-dapo"]
    both = trained_in(tmp_path, "run.seed=2", "loss.name=dapo")
    assert both == trained_in(tmp_path, "loss.name=dapo", "run.seed=2") == ["runs/quickstart-loss.name-dapo+run.seed-2"]
    long = [f"data.arithmetic.seed={seed}" for seed in range(9)]
    assert len(trained_in(tmp_path, *long)[0]) < 120
    assert trained_in(tmp_path, *long) != trained_in(tmp_path, *long, "run.seed=2")
    assert trained_in(tmp_path, "run.dir=mine")[-1] == "mine"
