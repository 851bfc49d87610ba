"""What rollouts ahead bring: steps per hour with ``rollout.ahead`` = 0, 1, 2 and 4, and what idles meanwhile.

    source scripts/install_servers.sh
    python benchmarks/async.py [--json] [--engine sglang] [--steps 12] [--ratio 2] [setting=value …]

A real server generates, and is slowed down: ``LANES`` completions are at work, and each takes a fixed time, so that a
batch takes ``--ratio`` times as long as all the rest of a step does. A first run without the delay measures that rest.
The first ``WARM`` steps of each run do not count. The seconds of a run are those of its own log.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from servers_here import server_settings

from megatron_dppo.observe.metrics import read_metrics
from megatron_dppo.observe.timers import breakdown

AHEAD = (0, 1, 2, 4)
LANES, PROMPTS, SAMPLES = 4, 12, 4
WARM = 4
TASK = (
    "data.train=arithmetic", "data.chat_template=false", "data.max_prompt_tokens=24", "data.arithmetic.problems=512",
    f"rollout.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}", "rollout.max_response_tokens=12",
    "pruning.prompts.rule=none", "pack.max_tokens=512", "optimizer.lr=1e-4", "eval.every=0", "run.export=false",
)  # fmt: skip
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""
SLOW = """
import asyncio, os, time

lanes = asyncio.Semaphore({lanes})


async def rollout(client, prompt):
    async with lanes:
        began = time.monotonic()
        turn, _ = await asyncio.gather(client.generate(prompt.token_ids.tolist()), asyncio.sleep({delay_s}))
        with open({log!r}, "a") as log:
            print(time.monotonic() - began, file=log)
    return [turn]
"""


def run(
    folder: Path, policy: Path, settings: Sequence[str], *, engine: str, ahead: int, steps: int, delay_s: float
) -> tuple[list[dict[str, float]], list[float]]:
    """A run from its beginning: the rows of its log that count, and the seconds that completions took."""
    folder.mkdir()
    log = folder / "completions"
    (folder / "slow.py").write_text(SLOW.format(lanes=LANES, delay_s=delay_s, log=str(log)))
    (folder / "reward.py").write_text(REWARD)
    words = [
        *server_settings(engine, [1], policy, folder / "run"), *TASK, f"run.steps={steps}", f"rollout.ahead={ahead}",
        f"rollout.conversation={folder / 'slow.py'}:rollout", f"reward.function={folder / 'reward.py'}:compute_score",
        *settings,
    ]  # fmt: skip
    with (folder / "log").open("wb") as out:
        code = subprocess.run(
            [sys.executable, "-m", "megatron_dppo", "train", *words], stdout=out, stderr=out
        ).returncode
    if code:
        sys.exit((folder / "log").read_text()[-4000:])
    rows = [row for row in read_metrics(folder / "run") if row["step"] > WARM]
    return rows, [float(line) for line in log.read_text().split()]


def figures(rows: Sequence[dict[str, float]], completions: Sequence[float]) -> dict[str, object]:
    step_s = mean(row["perf/step_time"] for row in rows)
    batch_s = mean(completions) * PROMPTS * SAMPLES / LANES
    phases = [breakdown(row) for row in rows]
    return {
        "steps_per_hour": 3600.0 / step_s,
        "idle_share": {
            "servers": 1.0 - min(batch_s / step_s, 1.0),
            "trainer": mean(row["perf/rollout_time"] for row in rows) / step_s,
        },
        "staleness": {name: max(row[f"staleness/{name}"] for row in rows) for name in ("max", "mean", "bound")},
        "seconds": {"step": step_s} | {name: mean(each.get(name, 0.0) for each in phases) for name in phases[0]},
        "batch_seconds": batch_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--engine", choices=["sglang", "vllm"], default="sglang")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ratio", type=float, default=2.0, help="a batch's time at the server over the rest of a step")
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as place:
        folder, policy = Path(place), Path(place, "policy")
        os.environ.setdefault("SGLANG_CPU_CANARY", str(folder / "canary"))
        size = ["--hidden", "512", "--layers", "6", "--heads", "8", "--kv-heads", "2", "--ffn", "1536"]
        init = [sys.executable, "-m", "megatron_dppo", "init", str(policy), "--tokenizer", "arithmetic", *size]
        subprocess.run(init, check=True, stdout=subprocess.DEVNULL)

        def measured(name: str, ahead: int, steps: int, delay_s: float) -> dict[str, object]:
            found = run(
                folder / name, policy, chosen.settings, engine=chosen.engine, ahead=ahead, steps=steps, delay_s=delay_s
            )
            print(name, json.dumps(result := figures(*found)), file=sys.stderr, flush=True)
            return result

        undelayed = measured("undelayed", 0, WARM + 4, 0.0)["seconds"]
        rest_s = undelayed["step"] - undelayed["rollout"]
        delay_s = chosen.ratio * rest_s * LANES / (PROMPTS * SAMPLES)
        results = {ahead: measured(f"ahead-{ahead}", ahead, chosen.steps, delay_s) for ahead in AHEAD}
    for result in results.values():
        result["steps_per_hour_over_sync"] = result["steps_per_hour"] / results[0]["steps_per_hour"]
    whole = {"engine": chosen.engine, "delay_s": delay_s, "rest_of_step_s": rest_s, "ahead": results}
    print(json.dumps(whole) if chosen.json else json.dumps(whole, indent=2))


if __name__ == "__main__":
    main()
