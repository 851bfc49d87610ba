"""Benchmarks as programs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_help_has_no_warnings() -> None:
    """Of a script that imports Megatron-Core."""
    done = subprocess.run(
        [sys.executable, "benchmarks/estimator.py", "--help"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--rule RULE" in done.stdout and done.stderr == ""
