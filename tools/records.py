"""Record a table of small training runs, and compare two records bit for bit.

    python tools/records.py take FOLDER [NAME ...] [--workers 2]
    python tools/records.py compare BEFORE AFTER

Take the records before and after a refactoring on one machine, in one environment. The record of a
run has:

- the exit code,
- each row of ``metrics.jsonl`` without ``perf/``,
- SHA-256 of ``pruning.jsonl``,
- SHA-256 of each exported file; of a safetensors file, of the tensors' names, types, shapes and
  values,
- with ``sglang`` and ``vllm``: the requests to a server in their order, without health checks and
  random ids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Reward workers are fresh interpreters, which must import the same checkout.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
os.environ["OMP_NUM_THREADS"] = "1"  # because sums depend on the number of threads
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from safetensors import safe_open  # noqa: E402

from megatron_dppo.init import build_character_tokenizer, write_tokenizer  # noqa: E402
from tests.commands import Command  # noqa: E402
from tests.laws.test_resume import kill_when  # noqa: E402
from tests.policies import write_family, write_policy  # noqa: E402
from tests.rollout.servers.recording import RecordingServer  # noqa: E402
from tests.rollout.servers.script import answering  # noqa: E402
from tests.runs.test_runs import CONVERSATION  # noqa: E402
from tests.runs.test_runs import RUNS as WHOLE_RUNS  # noqa: E402
from tests.small_runs import rows, small_words, write_run  # noqa: E402

Record = dict[str, Any]
FILE = "records.json"
ROLES = '''
async def rollout(client, prompt):
    """Take three turns, of the solver, the critic and the solver again."""
    tokens, turns = prompt.token_ids.tolist(), []
    for role in ("solver", "critic", "solver"):
        turn = await client.generate(tokens, max_tokens=3)
        turns.append((role, turn))
        tokens += turn.token_ids.tolist()
    return turns

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    length = len(solution_str)
    return {"score": float(length % 3), "roles": {"critic": float(length % 2)}}
'''
# With more stop tokens than the policy's own, completions have different lengths.
SETTINGS = ("run.export=true", "rollout.stop_token_ids=[0,2,20,21,22,23,24,25,26,27,28,29,30]")
SERVED = (
    "run.steps=2",
    "rollout.sync.transport=disk",
    # Concurrent requests would arrive in any order.
    "rollout.max_in_flight=1",
    # The recording server's log-probabilities are random.
    "rollout.max_logprob_diff=1e9",
    "rollout.max_prob_error=1e30",
)
RUNS: dict[str, Sequence[str]] = {
    "default": (),
    "kl": ("loss.kl_coef=0.05", "loss.updates_per_rollout=2"),
    "rloo": ("loss.name=rloo",),
    "reinforce_pp": ("loss.name=reinforce_pp",),
    "paper": (
        "pruning.prompts.rule=threshold",
        "pruning.prompts.keep=0.5",
        "pruning.completions.rule=threshold",
        "pruning.completions.keep=0.5",
    ),
    "rounds": WHOLE_RUNS["several rounds of rollouts"].settings,
    "trees": WHOLE_RUNS["trees"].settings,
    "roles": (
        "rollout.conversation=FOLDER/roles.py:rollout",
        "rollout.roles=[solver,critic]",
        "reward.function=FOLDER/roles.py:compute_score",
    ),
    "sequences": WHOLE_RUNS["conversations scored by the group"].settings,
    "teacher": ("loss.distillation.teacher=FOLDER/teacher", "loss.distillation.coef=0.5"),
    "experts": ("model.path=FOLDER/experts",),
    "ahead": ("rollout.ahead=2",),
    "two_ranks": ("layout.tp=2",),
    "resume": ("run.checkpoint_every=2",),
    "sglang": ("rollout.engine=sglang", *SERVED),
    "vllm": ("rollout.engine=vllm", *SERVED),
}
"""Settings of each run on top of ``small_words`` and ``SETTINGS``. FOLDER is the folder of the
policies."""


def write_policies(folder: Path) -> None:
    write_run(folder)
    (folder / "agent.py").write_text(CONVERSATION)
    (folder / "roles.py").write_text(ROLES)
    write_policy(folder / "teacher", layers=3, hidden=64, seed=11)
    write_family(folder / "experts", "Qwen3MoeForCausalLM")
    for name in ("teacher", "experts"):
        write_tokenizer(build_character_tokenizer(), folder / name, max_tokens=128)


def make_record(folder: Path, name: str) -> Record:
    """Run ``name`` in ``folder``, which holds the policies, and return its record."""
    began = time.monotonic()
    run = folder / name
    server = RecordingServer()
    # Relative paths, so that records do not depend on the location of the folder.
    settings = [setting.replace("FOLDER", "policies") for setting in RUNS[name]]
    with ExitStack() as to_close:
        if name in ("sglang", "vllm"):
            settings.append(f"rollout.servers=[{to_close.enter_context(answering(server.answer))}]")
        words = small_words(Path("policies"), Path(name), *SETTINGS, *settings)
        command = Command(
            ["megatron-dppo", "train", *words], log=folder / f"{name}.log", folder=folder
        )
        if name == "resume":
            metrics = run / "metrics.jsonl"
            # Lines of steps 0 to 3: the checkpoint of step 2 is complete.
            kill_when(
                command.start(), lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 4
            )
        exit_code = command.exit_code()
    print(f"{name}: exit code {exit_code}, {time.monotonic() - began:.0f} s", flush=True)
    record: Record = {"exit code": exit_code}
    if exit_code == 0:
        record["metrics"] = {f"step {row['step']}": row for row in rows(run)}
        record["pruning.jsonl"] = hashlib.sha256((run / "pruning.jsonl").read_bytes()).hexdigest()
        exported = sorted(file for file in (run / "hf").rglob("*") if file.is_file())
        record["export"] = {
            str(file.relative_to(run / "hf")): compute_digest(file) for file in exported
        }
        record["requests"] = dict(enumerate(server.read_requests(folder)))
    return record


def compute_digest(file: Path) -> str:
    """Return SHA-256 of a file; of a safetensors file, of the tensors, because equal tensors may
    have other headers."""
    if file.suffix != ".safetensors":
        return hashlib.sha256(file.read_bytes()).hexdigest()
    content = hashlib.sha256()
    with safe_open(file, "numpy") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            content.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return content.hexdigest()


def find_differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Return a line for each different value: place, exact text before, exact text after (null:
    absent)."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        parts = [
            find_differences(before.get(key), after.get(key), f"{place} / {key}") for key in keys
        ]
        return [line for part in parts for line in part]
    old = "{…}" if isinstance(before, dict) else json.dumps(before)
    new = "{…}" if isinstance(after, dict) else json.dumps(after)
    return [] if old == new else [f"{place.removeprefix(' / ')}: {old} | {new}"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    taking = commands.add_parser("take", help=f"write FOLDER/{FILE}; FOLDER is new")
    taking.add_argument("folder", type=Path)
    taking.add_argument(
        "names", nargs="*", metavar="NAME", help=f"all by default: {' '.join(RUNS)}"
    )
    taking.add_argument("--workers", type=int, default=1, help="runs at a time")
    comparing = commands.add_parser(
        "compare", help="print each difference; exit code 1 if there is one"
    )
    comparing.add_argument("folders", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.command == "compare":
        before, after = (json.loads((folder / FILE).read_text()) for folder in options.folders)
        found = find_differences(before, after)
        print(*found, f"{len(found)} differences", sep="\n")
        return int(bool(found))

    folder = options.folder.resolve()
    names = options.names or list(RUNS)
    if unknown := set(names) - RUNS.keys():
        parser.error(f"no run has the name {', '.join(sorted(unknown))}")
    if folder.exists():
        parser.error(f"{folder} exists: name a new folder, because a finished run is not repeated")
    folder.mkdir(parents=True)
    write_policies(folder / "policies")
    with ThreadPoolExecutor(options.workers) as workers:
        records = dict(
            zip(names, workers.map(lambda name: make_record(folder, name), names), strict=True)
        )
    (folder / FILE).write_text(json.dumps(records, indent=1) + "\n")
    failed = [
        f"{name}: see {folder}/{name}.log"
        for name, record in records.items()
        if record["exit code"]
    ]
    if {"default", "resume"} <= records.keys():
        failed += find_differences(records["default"], records["resume"], "default and resume")
    print(*failed, f"{len(records)} records in {folder / FILE}", sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
