"""Run a random sample of mutmut's mutants, and print the mutants that no test caught.

    python tools/mutation/sample.py --size 1500 [--seed 7] [--part 3/15]

``[tool.mutmut]`` in pyproject.toml names the packages, which need no ranks, and the tests. mutmut
works in the folder ``mutants``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path("mutants")
SMALLEST = "megatron_dppo.rl.seeds*"
"""A run of these few mutants creates all mutants, and records the functions that each test
reaches."""
KILLED = {"killed", "timeout", "suspicious", "segfault", "caught by type check"}


def run_mutmut(*words: str) -> str:
    """Run a command of mutmut, and return its output.

    Raises:
        RuntimeError: the tests fail without a mutant, or mutmut itself fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "mutmut", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last_lines = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise RuntimeError(
            f"mutmut {words[0]} ended with exit code {done.returncode}:\n{last_lines}"
        )
    return done.stdout


def read_mutants() -> tuple[list[str], set[str]]:
    """Return the names of all mutants, and the functions that a test reaches."""
    names: list[str] = []
    for file in sorted(FOLDER.rglob("*.meta")):
        names += json.loads(file.read_text(encoding="utf-8"))["exit_code_by_key"]
    stats = json.loads((FOLDER / "mutmut-stats.json").read_text(encoding="utf-8"))
    reached = {
        function for function, tests in stats["tests_by_mangled_function_name"].items() if tests
    }
    return names, reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=1500, help="mutants of the whole sample")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--part", default="0/1", help="K/N: only the K-th of N equal parts of the sample, from 0"
    )
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))

    # mutmut copies a file that is no module only if it is missing: an old copy fails the tests.
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True)
    marker = FOLDER / "commit"
    if not marker.exists() or marker.read_text(encoding="utf-8") != commit:
        shutil.rmtree(FOLDER, ignore_errors=True)
    run_mutmut("run", SMALLEST)
    marker.write_text(commit, encoding="utf-8")
    names, reached = read_mutants()
    size = min(options.size, len(names))
    sample = random.Random(options.seed).sample(sorted(names), size)[part::parts]
    # mutmut need not run mutants that no test reaches.
    tested = [name for name in sample if name.rpartition("__mutmut_")[0] in reached]
    run_mutmut("run", *tested)

    lines = (line.split() for line in run_mutmut("results", "--all", "true").splitlines())
    outcome = {words[0].rstrip(":"): " ".join(words[1:]) for words in lines if len(words) > 1}
    survivors = [name for name in tested if outcome[name] not in KILLED]
    unreached = [name for name in sample if name not in tested]
    for name in survivors:
        print(f"survived: {name}")
    for function in sorted({name.rpartition("__mutmut_")[0] for name in unreached}):
        print(f"no test reaches: {function}")
    caught = len(tested) - len(survivors)
    print(
        f"{caught} of {len(sample)} mutants were caught; {len(unreached)} lie in functions that no "
        "test reaches"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
