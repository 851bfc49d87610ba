"""Rehearse cases in this process, which must not have imported torch: ``python -m
tests.rehearsal.play OUT CASE...``.

Each line of OUT is the JSON of one case. ``WORK: CASE`` does other work.
"""

import sys
import warnings
from pathlib import Path

from tests.rehearsal.device import load_device

warnings.simplefilter("ignore")
load_device()

from tests.rehearsal.device import python_folder  # noqa: E402
from tests.rehearsal.patches import prepare  # noqa: E402

MODE = prepare(python_folder())

from tests.rehearsal.stage import play_all  # noqa: E402

if __name__ == "__main__":
    play_all(MODE, sys.argv[2:], Path(sys.argv[1]))
