"""How much of its loss a smaller policy keeps, method by method and score by score, against parts taken by chance.

    python benchmarks/compress.py [--json] [--seeds 3] [--layers 4] [--keep 0.75] [--steps 300] [--tiny] [--out DIR]

For each seed a policy learns written-out sums by ``sft``. Then every method and score of ``megatron-dppo compress``
makes it smaller, scored on 256 worked answers of its training data; losses are of 256 others of them.
``loss_over_random`` is the loss over that of ``random`` with the same method, a mean over five draws;
``loss_over_whole`` is the loss over that of the whole policy. ``depth:shapley-loss:16`` and the like are Shapley
values over 16 pairs of random halves of the layers; for ``shapley-reward`` the policy answers 256 sums of its training
data greedily, and is rewarded for right results. One that has no held-out answer right is not asked.

``megatron-dppo compress sweep`` measures recovery, accuracy and speed of smaller policies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from harness import arguments, finish
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from megatron_dppo.cli import main
from megatron_dppo.compress.choose import SCORES
from megatron_dppo.config import ArithmeticConfig
from megatron_dppo.data.generators import Sum, make_sums

BATCH = 48
SUMS = {"problems": 16384, "min_terms": 2, "max_terms": 6, "max_operand": 9, "forgotten_carries": 0.0}
DRAWS = 5
PAIRS = 16
"""Of random halves of the layers, for Shapley values besides those of layers that are left out alone."""


def measure() -> None:
    options = arguments(
        __doc__,
        seeds=3,
        layers=4,
        hidden=128,
        steps=300,
        problems=200,
        keep=0.75,
        out=(Path, "where policies and runs are kept, and not made again"),
        tiny=(False, "see whether it runs: its figures mean nothing"),
    ).parse_args()
    if options.tiny:
        options.seeds, options.layers, options.hidden, options.steps, options.problems = 1, 4, 64, 16, 8
    torch.set_num_threads(1)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = options.out or Path(name)
        seeds = []
        for seed in range(1, options.seeds + 1):
            seeds.append(of_seed(folder / str(seed), options, seed))
            print(json.dumps(seeds[-1]), file=sys.stderr, flush=True)
    finish({"seeds": seeds, **summary(seeds)}, options)


def of_seed(folder: Path, chosen: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Everything that is measured of one policy."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ArithmeticConfig(**SUMS, eval_problems=chosen.problems, seed=seed)
    trained, held_out = make_sums(config)
    write_calibration(folder / "calibration.jsonl", trained)
    fresh, whole = folder / "fresh", folder / "whole"
    init(fresh, chosen.hidden, chosen.layers, 2 * chosen.hidden, seed)
    sft(fresh, whole, chosen.steps, seed)
    found: dict[str, Any] = {"accuracy": accuracy(whole, held_out), "losses": {}}
    for name, method, score, pairs in ways(earns=found["accuracy"] > 0):
        losses = []
        for draw in range(DRAWS if score == "random" else 1):
            out = folder / (name + f"-{draw}" * (draw > 0))
            options = ["--subnetworks", pairs] if pairs else []
            options += rewarded(out, seed) if score == "shapley-reward" else []
            compress(whole, out, chosen.keep, method, score, *options, seed=1000 * draw + seed)
            record = json.loads((out / "compress.json").read_text())
            losses.append(record["loss_after"])
        found["losses"][name] = mean(losses)
        found.setdefault("loss_whole", record["loss_before"])
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


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in seeds[0]["losses"] if all(name in seed["losses"] for seed in seeds)]
    by_chance = {name: f"{name.partition(':')[0]}:random" for name in names}
    return {
        "loss_over_random": {n: mean(s["losses"][n] / s["losses"][by_chance[n]] for s in seeds) for n in names},
        "loss_over_whole": {n: mean(s["losses"][n] / s["loss_whole"] for s in seeds) for n in names},
    }


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


def sft(start: Path, out: Path, steps: int, seed: int) -> None:
    """Train on worked answers, unless that was done."""
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
    }
    if not out.exists():
        run("sft", "configs/quickstart.yaml", *(f"{name}={value}" for name, value in settings.items()))


@torch.no_grad()
def accuracy(folder: Path, held_out: list[Sum]) -> float:
    """The fraction of greedy answers that end in the right result."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = tokenizer([s.question for s in held_out], return_tensors="pt", padding=True)
    ids = model.generate(
        input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=64, do_sample=False
    )[:, asked["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return mean(float(text.rstrip().endswith(f"#{s.label}")) for text, s in zip(texts, held_out, strict=True))


if __name__ == "__main__":
    measure()
