"""A folder that looks like the checkout of somebody who follows a page, with the files that the
page has them write."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_dppo.evaluation.benchmarks import BENCHMARKS
from megatron_dppo.init import write_model
from tests.commands import Command
from tests.docs.documents import ROOT, blocks
from tests.docs.ways import SMALL

LINKED = (
    "benchmarks",
    "docs",
    "mkdocs.yml",
    "pyproject.toml",
    "README.md",
    "scripts",
    "setup.py",
    "tools",
)
"""What no command writes to."""
SUMS = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(1, 7)]
GSM8K = [
    {"question": f"What is {i} and {i}?", "answer": f"{i} and {i} is {2 * i}.\n#### {2 * i}"}
    for i in range(1, 7)
]
LIMIT_S = 240
FORKED = re.compile(
    r"((?:[A-Z_]+=\w+ )*)((?:megatron-dppo "
    r"(?:train|sft|eval|init|compress|export|probe-batch|report|plan) "
    r"(?!--out|.*--print-config)"
    r"|python (?:-m pytest|tools/\S+|\w+\.py))[^$;|&<>*]*)"
)
"""What takes torch, with what it sets in its environment, and has nothing in it that only bash
knows."""


class Sandbox:
    """Where the commands of one page are typed, one after the other.

    Args:
        folder: to make it in.
        document: a page or a section of one. Its files with a title are written, its changes
            applied to a copy of the package and its tests.
        quickstart: what has become of ``runs/quickstart``; None: nothing.
    """

    def __init__(self, folder: Path, document: str, quickstart: Path | None = None) -> None:
        self.folder = folder
        self._said = folder / ".said"
        shown = blocks(document) if ".md" in document else []
        changes = [block.text for block in shown if block.language == "diff"]
        code = ("megatron_dppo", "tests")
        self._is_changed = bool(changes) or any(block.title.startswith(code) for block in shown)
        for name in ("configs", *(code if self._is_changed else ())):
            shutil.copytree(ROOT / name, folder / name)
        for name in (*LINKED, *(() if self._is_changed else code)):
            (folder / name).symlink_to(ROOT / name)
        if quickstart is not None:
            shutil.copytree(quickstart, folder / "runs/quickstart")
            for name, place in (("Qwen3-32B", "warm"), ("runs/pruned", ""), ("runs/unpruned", "")):
                (folder / name).symlink_to(folder / "runs/quickstart" / place)
        shutil.copy(folder / "configs/quickstart.yaml", folder / "configs/my_run.yaml")
        self._write_data()
        for block in shown:
            if block.title:
                (folder / block.title).write_text(block.text)
        for (
            change
        ) in changes:  # found by the lines that it replaces or follows, wherever they have moved to
            command = ["git", "apply", "--unidiff-zero", "-C1"]
            subprocess.run(command, cwd=folder, input=change, text=True, check=True)

    def type(self, command: str, environ: Mapping[str, str] | None = None) -> str:
        """Run a command in bash, as a user with the project's environment does; one that takes
        torch in a fork.

        Returns:
            What it said.

        Raises:
            AssertionError: it failed, with all that it said.
        """
        ours = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "PIP_NO_INDEX": "1",
            "MEGATRON_DPPO_BENCHMARKS": "",
        }
        if (forked := FORKED.fullmatch(command)) and not environ:
            self._said.unlink(missing_ok=True)
            ours |= dict(word.split("=") for word in forked[1].split())
            package = self.folder if self._is_changed else None
            code = Command(
                shlex.split(forked[2]), self._said, self.folder, ours, package
            ).exit_code()
            said = self._said.read_text()
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=os.environ | ours | (environ or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            code, said = done.returncode, done.stdout
        assert code == 0, f"{command}\nended with exit code {code} and said\n{said}"
        return said

    def install(self, extras: str) -> None:
        """Make ``.venv`` what ``scripts/install.sh`` would make it: this very environment."""
        (venv := self.folder / ".venv").mkdir()
        for entry in Path(sys.prefix).iterdir():
            (venv / entry.name).symlink_to(entry)
        files = (self.folder / "pyproject.toml", self.folder / "setup.py")
        listed = "".join(
            f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files
        )
        (venv / f"installed-{extras}-{hashlib.sha256(listed.encode()).hexdigest()[:16]}").touch()

    def _write_data(self) -> None:
        _write_rows(self.folder / "gsm8k_train.jsonl", GSM8K)
        _write_rows(self.folder / "held_out.jsonl", SUMS)
        for benchmark in (
            BENCHMARKS.values()
        ):  # made up, but as many and with the columns that the declaration names
            worked = "#### 5" if benchmark.worked else "5"
            row = {"problem": "2+3=", **{benchmark.label: worked}}
            _write_rows(
                self.folder / "data/eval" / f"{benchmark.files[0]}.jsonl",
                [row] * benchmark.problems,
            )


def write_quickstart(folder: Path, *, trained: bool) -> Path:
    """``runs/quickstart`` as ``scripts/quickstart.sh`` leaves it, from a policy that knows nothing.

    Args:
        folder: to work in.
        trained: whether the training is run; else only the policies that it begins with are there.
    """
    run = folder / "runs/quickstart"
    for name in ("initial", "warm"):
        write_model(run / name, hidden=64, heads=4, kv_heads=2, head_dim=32, ffn=128, std=0.2)
    if trained:
        (place := folder / "checkout").mkdir()
        sandbox = Sandbox(place, "", run)
        sandbox.type(f"megatron-dppo train configs/quickstart.yaml {SMALL} run.steps=2")
        run = sandbox.folder / "runs/quickstart"
    return run


def _write_rows(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
