"""Kill parts of small runs at random and resume the runs: nothing may be lost, changed or left
behind.

    scripts/chaos.sh [N] [--seed S] [--servers]

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos.sh", description=__doc__.split("\n", 1)[0])
    parser.add_argument("kills", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--servers", action="store_true", help="kill parts of runs ahead, with two SGLang servers"
    )
    asked = parser.parse_args()
    began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="chaos-"))
    module = import_module("tests.chaos.servers" if asked.servers else "tests.chaos.kills")
    tally = module.chaos(folder, asked.kills, asked.seed)
    if not tally.wrong:
        shutil.rmtree(folder)
    print(
        json.dumps({**vars(tally), "seed": asked.seed, "seconds": round(time.monotonic() - began)})
    )
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
