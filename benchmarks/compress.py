"""What a smaller policy made from a larger one is worth: before recovery, after it, and against training it afresh.

    python benchmarks/compress.py [--json] [--seeds 3] [--layers 4] [--keep 0.75] [--steps 300] [--tiny] [--out DIR]
                                  [--recover METHOD:SCORE | --recover none]

For each seed a policy learns written-out sums by ``sft``. Then every method and score of ``megatron-dppo compress``
makes it smaller, scored on 256 worked answers of its training data; losses are of 256 others of them.
``loss_over_random`` is the loss over that of ``random`` with the same method, a mean over five draws;
``loss_over_whole`` is the loss over that of the whole policy. ``depth:shapley-loss:16`` and the like are Shapley
values over 16 pairs of random halves of the layers; for ``shapley-reward`` the policy answers 256 sums of its training
data greedily, and is rewarded for right results. One that has no held-out answer right is not asked.

Then the policy that ``--recover`` names, unless that is ``none``, is trained on by ``sft`` for 1/16, 1/8, 1/4, 1/2 and
all of the steps, each with its own schedule, and so is a fresh policy of the same shape. ``recovery_tokens`` is the
least number of trained tokens that gives 95% of the whole policy's held-out accuracy (greedy answers, exact results),
``recovery_tokens_over_scratch`` its ratio to that of the fresh policy, ``scratch_tokens``. Where these are None, no
budget was enough for the fresh policy: the ratio is to the largest one, and what it says is an upper bound. It is None
where no budget was enough for the smaller policy.
``tokens_per_second_ratio`` is of transformers' ``generate``, small over large, one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.cli import main
from megatron_dppo.compress.choose import SCORES
from megatron_dppo.config import ArithmeticConfig
from megatron_dppo.data.generators import Sum, make_sums
from megatron_dppo.models.shape import read_shape

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
BATCH = 48
SUMS = {"problems": 16384, "min_terms": 2, "max_terms": 6, "max_operand": 9, "forgotten_carries": 0.0}
ENOUGH = 0.95
DRAWS = 5
PAIRS = 16
"""Of random halves of the layers, for Shapley values besides those of layers that are left out alone."""


def measure() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    for name, default in ("seeds", 3), ("layers", 4), ("hidden", 128), ("steps", 300), ("problems", 200):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", type=float, default=0.75)
    parser.add_argument("--recover", default="depth:shapley-loss", metavar="METHOD:SCORE")
    parser.add_argument("--out", type=Path, help="where policies and runs are kept, and not made again")
    parser.add_argument("--tiny", action="store_true", help="see whether it runs: its figures mean nothing")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.seeds, arguments.layers, arguments.hidden, arguments.steps, arguments.problems = 1, 4, 64, 16, 8
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.out or Path(name)
        seeds = []
        for seed in range(1, arguments.seeds + 1):
            seeds.append(of_seed(folder / str(seed), arguments, seed))
            print(json.dumps(seeds[-1]), file=sys.stderr, flush=True)
    figures = {"seeds": seeds, **summary(seeds, arguments.recover)}
    if not arguments.json:
        for name, value in figures["loss_over_random"].items():
            print(f"{name:24s} loss over random {value:.3f}")
    print(json.dumps(figures))


def of_seed(folder: Path, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Everything that is measured of one policy."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ArithmeticConfig(**SUMS, eval_problems=arguments.problems, seed=seed)
    trained, held_out = make_sums(config)
    write_calibration(folder / "calibration.jsonl", trained)
    fresh, whole = folder / "fresh", folder / "whole"
    init(fresh, arguments.hidden, arguments.layers, 2 * arguments.hidden, seed)
    tokens = sft(fresh, whole, arguments.steps, seed)
    found: dict[str, Any] = {"accuracy": accuracy(whole, held_out), "tokens": tokens, "losses": {}}
    for name, method, score, pairs in ways(earns=found["accuracy"] > 0):
        losses = []
        for draw in range(DRAWS if score == "random" else 1):
            out = folder / (name + f"-{draw}" * (draw > 0))
            options = ["--subnetworks", pairs] if pairs else []
            options += rewarded(out, seed) if score == "shapley-reward" else []
            compress(whole, out, arguments.keep, method, score, *options, seed=1000 * draw + seed)
            record = json.loads((out / "compress.json").read_text())
            losses.append(record["loss_after"])
        found["losses"][name] = mean(losses)
        found.setdefault("loss_whole", record["loss_before"])
    if arguments.recover == "none":
        return found
    small = folder / arguments.recover
    found["recovery"] = curve(small, arguments, seed, held_out)
    shape, scratch = read_shape(small), folder / "scratch"
    init(scratch, shape.hidden, shape.num_layers, shape.ffn, seed)
    found["scratch"] = curve(scratch, arguments, seed, held_out)
    found["tokens_per_second_ratio"] = speed(small, held_out) / speed(whole, held_out)
    return found


def ways(*, earns: bool) -> Iterator[tuple[str, str, str, int]]:
    """Name, method, score and pairs of halves (0: none) of what is tried.

    Args:
        earns: whether the policy has any answer right: rewards of one that has none tell nothing.
    """
    for method, score in ((method, score) for method, scores in SCORES.items() for score in scores):
        if method in ("heads", "experts"):  # heads are too few for the share, and there are no experts
            continue
        if score != "shapley-reward" or earns:
            yield f"{method}:{score}", method, score, 0
            if score.startswith("shapley"):
                yield f"{method}:{score}:{PAIRS}", method, score, PAIRS


def curve(start: Path, arguments: argparse.Namespace, seed: int, held_out: list[Sum]) -> list[dict[str, float]]:
    """Trained tokens and accuracy, budget by budget."""
    points = [{"tokens": 0.0, "accuracy": accuracy(start, held_out)}]
    for share in SHARES:
        out = start.with_name(f"{start.name}-{share:g}")
        tokens = sft(start, out, max(1, round(share * arguments.steps)), seed)
        points.append({"tokens": tokens, "accuracy": accuracy(out, held_out)})
    return points


def summary(seeds: list[dict[str, Any]], recovered: str) -> dict[str, Any]:
    names = [name for name in seeds[0]["losses"] if all(name in seed["losses"] for seed in seeds)]
    by_chance = {name: f"{name.partition(':')[0]}:random" for name in names}
    ratios_of_losses = {
        "loss_over_random": {n: mean(s["losses"][n] / s["losses"][by_chance[n]] for s in seeds) for n in names},
        "loss_over_whole": {n: mean(s["losses"][n] / s["loss_whole"] for s in seeds) for n in names},
    }
    if recovered == "none":
        return ratios_of_losses
    budgets = [(least(seed["recovery"], seed), least(seed["scratch"], seed)) for seed in seeds]
    ratios_to_scratch = [
        small / (scratch or seed["scratch"][-1]["tokens"])
        for seed, (small, scratch) in zip(seeds, budgets, strict=True)
        if small is not None
    ]
    return {
        **ratios_of_losses,
        "recovered": recovered,
        "accuracy_recovered": mean(s["recovery"][-1]["accuracy"] / max(s["accuracy"], 1e-9) for s in seeds),
        "recovery_tokens": [small for small, _ in budgets],
        "scratch_tokens": [scratch for _, scratch in budgets],
        "recovery_tokens_over_scratch": mean(ratios_to_scratch) if len(ratios_to_scratch) == len(seeds) else None,
        "tokens_per_second_ratio": median(seed["tokens_per_second_ratio"] for seed in seeds),
    }


def least(points: list[dict[str, float]], seed: dict[str, Any]) -> float | None:
    enough = [point["tokens"] for point in points if point["accuracy"] >= max(ENOUGH * seed["accuracy"], 1e-9)]
    return min(enough) if enough else None


def run(*words: Any) -> None:
    """A command of the package, in this process, but for what becomes a rank."""
    text = [str(word) for word in words]
    if text[0] != "sft" and "--config" not in text:
        with contextlib.redirect_stdout(sys.stderr):
            failed = main(text)
        if failed:
            sys.exit(f"{' '.join(text)} failed")
        return
    done = subprocess.run([sys.executable, "-m", "megatron_dppo", *text], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(text)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def compress(source: Path, out: Path, keep: float, method: str, score: str, *options: Any, seed: int) -> None:
    """By the calibration data beside the policy."""
    if out.exists():
        return
    words = [*options, *["--zero-attention"] * (method == "2ssp")]
    run("compress", source, out, "--keep", keep, "--method", method, "--score", score, "--multiple", 8, "--seed", seed,
        "--calibrate", source.with_name("calibration.jsonl"), *words)  # fmt: skip


def rewarded(out: Path, seed: int) -> list[Any]:
    """Options by which the policy answers sums of its training data, and is rewarded for right results."""
    settings = {"run.dir": f"{out}-run", "layout.tp": 1, "rollout.max_response_tokens": 64, **of_sums(seed)}
    return ["--config", "configs/quickstart.yaml", *(f"{name}={value}" for name, value in settings.items())]


def of_sums(seed: int) -> dict[str, Any]:
    return {f"data.arithmetic.{name}": value for name, value in {**SUMS, "seed": seed}.items()}


def write_calibration(file: Path, trained: list[Sum]) -> None:
    rows = [{"prompt": each.question, "response": each.worked_answer} for each in trained[:512]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def init(out: Path, hidden: int, layers: int, ffn: int, seed: int) -> None:
    if out.exists():
        return
    run("init", out, "--hidden", hidden, "--layers", layers, "--ffn", ffn, "--head-dim", hidden // 4, "--seed", seed,
        "--init-std", 0.05)  # fmt: skip


def sft(start: Path, out: Path, steps: int, seed: int, **more: Any) -> float:
    """Train on worked answers, with ``more`` settings of ``sft``. Returns the tokens."""
    settings = {
        "model.path": start,
        "run.dir": f"{out}-run",
        "run.seed": seed,
        "sft.out": out,
        "sft.steps": steps,
        "sft.batch": BATCH,
        "sft.warmup_steps": 10,
        "layout.tp": 1,
        **of_sums(seed),
        **{f"sft.{name}": value for name, value in more.items()},
    }
    if not out.exists():
        run("sft", "configs/quickstart.yaml", *(f"{name}={value}" for name, value in settings.items()))
    rows = (out.with_name(f"{out.name}-run") / "sft-log" / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(row)["train/tokens"] for row in rows)


@torch.no_grad()
def answers(folder: Path, held_out: list[Sum]) -> tuple[list[str], int]:
    """Greedy answers, and how many tokens they have."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = tokenizer([s.question for s in held_out], return_tensors="pt", padding=True)
    ids = model.generate(
        input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=64, do_sample=False
    )[:, asked["input_ids"].shape[1] :]
    return tokenizer.batch_decode(ids, skip_special_tokens=True), ids.numel()


def accuracy(folder: Path, held_out: list[Sum]) -> float:
    texts, _ = answers(folder, held_out)
    return mean(float(text.rstrip().endswith(f"#{s.label}")) for text, s in zip(texts, held_out, strict=True))


def speed(folder: Path, held_out: list[Sum]) -> float:
    """Tokens per second of this process, whatever else the machine does; the best of three."""
    found = []
    for _ in range(3):
        began = time.process_time()
        _, tokens = answers(folder, held_out)
        found.append(tokens / (time.process_time() - began))
    return max(found)


if __name__ == "__main__":
    measure()
