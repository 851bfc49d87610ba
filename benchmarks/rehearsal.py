"""``python -m tests.rehearsal`` on the published configurations: memory beside the plan, host waits, kernels, and the
share of the matrix rate at the rates that well-made kernels reach, if no gap lies between them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CONFIGS = sorted(Path("configs").glob("qwen3_[!5]*.yaml"))
"""Those that every Python can rehearse."""
KEPT = (
    "rank", "stage", "fits", "packs", "packs_played", "kernels_per_pack", "memory_over_plan", "host_waits_per_update",
    "share_of_matrix_rate", "kernel_seconds", "planned_kernel_seconds", "collective_seconds",
    "planned_collective_seconds", "pipeline_wait_seconds",
    "took_s",
)  # fmt: skip


def rehearse(config: Path, overrides: list[str]) -> dict[str, object]:
    """The findings of a configuration; Transformer Engine's patches want a process of its own."""
    command = [sys.executable, "-m", "tests.rehearsal", str(config), *overrides, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 2) or not done.stdout:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    passes = [sum(found["memory"][part][of] for part in ("activations", "head")) for of in ("rehearsed", "planned")]
    return {"activations_over_plan": passes[0] / passes[1], **{name: found[name] for name in KEPT}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", type=Path, help="configurations (default: those of Qwen3 in configs)")
    parser.add_argument("--set", nargs="*", default=[], metavar="SETTING=VALUE", help="overrides of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    chosen = parser.parse_args()
    found = {}
    for config in chosen.configs or CONFIGS:
        found[config.stem] = made = rehearse(config, chosen.set)
        if not chosen.json:
            print(config.stem, made, flush=True)
    if chosen.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
