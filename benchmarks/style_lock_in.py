"""Does pruning tip a policy into the worse of two styles? Lock-in rates, lengths and final rewards, arm against arm.

    python benchmarks/style_lock_in.py [setting=value …] [--json] [--seeds 24] [--steps 60] [--results FILE]
                                       [--policy DIR] [--arms unpruned heavy …]

A fresh Qwen3 is warmed up on sums in two styles: written out, by a teacher who forgets carries, and the result alone.
Where training begins the short style is as good as the long one; what it can come to is far less, but a policy that has
all but given up the long style has little left to learn that from. Every seed trains once in every arm, from the same
warmed-up policy, with the same prompts and the same random numbers for its samples; arms differ in ``pruning.*`` alone,
but for ``fewer_prompts``, which prunes nothing and trains on as many tokens as those that do. A run is locked in if
fewer than ``LOCKED`` of its last answers are written out. Runs are appended to ``--results`` as they come, and those
that stand there are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch.distributed as dist
from lock_in_statistics import fisher, mcnemar, mean_interval, rank_correlation

from megatron_dppo.config import Config, RunConfig
from megatron_dppo.evaluation.evaluate import evaluate
from megatron_dppo.init import write_model
from megatron_dppo.observe.console import LengthGate
from megatron_dppo.parallel.world import initialize, shut_down
from megatron_dppo.report.learning import wilson
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.settings import load_config
from megatron_dppo.sft import sft
from megatron_dppo.train import Trainer

LOCKED = 0.2
"""Share of the last answers written out, below which a run counts as locked into the short style."""
EARLY, LAST = 6, 5
"""Steps at the start whose share of long answers is held against the outcome; steps at the end that count as final."""
NEYMAN = ("pruning.completions.rule=neyman", "pruning.completions.keep=0.3")
ARMS: dict[str, tuple[str, ...]] = {
    "unpruned": ("pruning.completions.rule=none",),
    "heavy": (*NEYMAN, "pruning.max_weight=20"),
    "light": (*NEYMAN, "pruning.max_weight=5"),
    "by_advantage": (*NEYMAN, "pruning.completions.score=advantage", "pruning.max_weight=20"),
    "half": ("pruning.completions.rule=neyman", "pruning.completions.keep=0.5", "pruning.max_weight=5"),
    "half_prompts": (*NEYMAN, "pruning.max_weight=10", "pruning.prompts.rule=neyman", "pruning.prompts.keep=0.5"),
    "few_prompts": (*NEYMAN, "pruning.max_weight=10", "pruning.prompts.rule=neyman", "pruning.prompts.keep=0.4"),
    "fewer_prompts": ("pruning.completions.rule=none", "rollout.prompts_per_step=6"),
}
"""Arms that prune keep 0.3 of the tokens, but for ``half``. ``half_prompts`` and ``few_prompts`` prune prompts as well,
``fewer_prompts`` has no more tokens than ``heavy`` and no pruning: that is the noise of a small batch, with no
weight in it."""
PREDICTS_AFTER = (5, 10, 15, 20, 30)
"""Steps after which the length is held against the outcome."""
SETTINGS = (
    "data.chat_template=false",
    "data.max_prompt_tokens=16",
    "data.arithmetic.problems=1024",
    "data.arithmetic.eval_problems=200",
    "data.arithmetic.max_terms=4",
    "data.arithmetic.max_operand=10",
    "data.arithmetic.forgotten_carries=0.6",
    "data.arithmetic.short_answers=0.64",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=8",
    "rollout.max_response_tokens=48",
    "rollout.max_batch=512",
    "reward.function=exact",
    "reward.timeout_s=60",
    "reward.overlong_buffer=0",
    "loss.name=dapo",
    "pruning.prompts.rule=none",
    "optimizer.lr=4e-4",
    "optimizer.warmup_steps=3",
    "run.export=false",
)
WARM_UP = ("data.arithmetic.problems=6000", "sft.steps=500", "sft.batch=48", "sft.lr=3e-3")
LINE = "\n"
"""What the long style has and the short one has not."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    arm: str
    seed: int
    early_long_share: float
    final_long_share: float
    locked: bool
    lengths: tuple[float, ...]
    """Mean response length of every step, in tokens."""
    final_length: float
    early_reward: float
    final_reward: float
    """Mean over the last steps' samples."""
    accuracy_before: float
    accuracy_after: float
    """Greedy, on held-out problems."""
    max_weight: float
    effective_sample_size: float
    kept_token_fraction: float
    seconds_per_step: float


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def join(folder: Path) -> None:
    """A process group of this process alone: importing Megatron once serves all runs."""
    meeting = Path(tempfile.mkdtemp(dir=folder)) / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)


def warm_up(folder: Path, settings: Sequence[str], init_seed: int) -> Path:
    """The policy that all runs start from, of 0.4 million parameters."""
    write_model(folder / "initial", hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=384, std=0.05, seed=init_seed)
    places = (f"model.path={folder / 'initial'}", f"sft.out={folder / 'warm'}", f"run.dir={folder / 'warm-up'}")
    join(folder)
    with quietly():
        sft(load_config(None, [*SETTINGS, *WARM_UP, *places, *settings]))
    return folder / "warm"


def train(arm: str, seed: int, config: Config, workers: RewardWorkers, folder: Path) -> Run:
    """What ``megatron_dppo.train`` does, step by step, with an eye on the styles."""
    join(folder)
    world = initialize(config.layout, seed=seed, timeout_s=config.rollout.timeout_s)
    shares, lengths, rewards, plans = [], [], [], []
    with ExitStack() as to_close, quietly():
        trainer = Trainer(config, world, workers, to_close)
        line = trainer.policy.tokenizer(LINE, add_special_tokens=False)["input_ids"][0]

        def accuracy() -> float:
            return evaluate(trainer.evaluator, trainer.held_out, config.eval).metrics["eval/accuracy"]

        trainer.sync(0)
        before, start = accuracy(), time.perf_counter()
        for trainer.step in range(config.run.steps):
            rollouts = trainer.roll_out(trainer.select(trainer.step))
            plan = trainer.plan(rollouts)
            trainer.train(plan, rollouts)
            answers = [c.token_ids for group in rollouts.held.values() for c in group.completions]
            shares.append(float(np.mean([line in tokens for tokens in answers])))
            lengths.append(rollouts.metrics["rollout/response_len/mean"])
            rewards.append(rollouts.metrics["rollout/reward"])
            plans.append(plan.metrics)
        seconds, after = time.perf_counter() - start, accuracy()
    shut_down()
    final = statistics.mean(shares[-LAST:])
    return Run(
        arm=arm,
        seed=seed,
        early_long_share=statistics.mean(shares[:EARLY]),
        final_long_share=final,
        locked=final < LOCKED,
        lengths=tuple(round(length, 2) for length in lengths),
        final_length=statistics.mean(lengths[-LAST:]),
        early_reward=statistics.mean(rewards[:EARLY]),
        final_reward=statistics.mean(rewards[-LAST:]),
        accuracy_before=before,
        accuracy_after=after,
        max_weight=max(plan["prune/max_weight"] for plan in plans),
        effective_sample_size=statistics.mean(
            plan["prune/effective_sample_size"] for plan in plans if "prune/effective_sample_size" in plan
        ),
        kept_token_fraction=statistics.mean(plan["prune/kept_token_fraction"] for plan in plans),
        seconds_per_step=seconds / config.run.steps,
    )


def describe(runs: Sequence[Run]) -> dict[str, object]:
    """One arm by itself."""
    locked = sum(run.locked for run in runs)

    def mean(figure: str) -> float:
        return statistics.mean(getattr(run, figure) for run in runs)

    figures = ("final_long_share", "final_length", "final_reward", "accuracy_after", "max_weight")
    return {
        "seeds": len(runs),
        "locked": locked,
        "lock_in_rate_interval": wilson(locked / len(runs), len(runs)),
        "early_share_predicts_final": rank_correlation(
            [run.early_long_share for run in runs], [run.final_long_share for run in runs]
        ),
        **{figure: mean(figure) for figure in (*figures, "effective_sample_size", "kept_token_fraction")},
    }


def compare(baseline: Sequence[Run], runs: Sequence[Run]) -> dict[str, object]:
    """An arm against another over the seeds that both have."""
    theirs = {run.seed: run for run in baseline}
    pairs = [(theirs[run.seed], run) for run in runs if run.seed in theirs]
    hits, others = (sum(pair[side].locked for pair in pairs) for side in (1, 0))
    only_this = sum(run.locked and not other.locked for other, run in pairs)
    only_other = sum(other.locked and not run.locked for other, run in pairs)
    result: dict[str, object] = {
        "pairs": len(pairs),
        "locked": [hits, others],
        "fisher_p": fisher(hits, len(pairs), others, len(pairs)),
        "locked_in_one_alone": [only_this, only_other],
        "mcnemar_p": mcnemar(only_this, only_other),
    }
    for figure in ("final_reward", "accuracy_after", "final_length", "early_long_share", "final_long_share"):
        differences = [getattr(run, figure) - getattr(other, figure) for other, run in pairs]
        result[figure] = {"difference": statistics.mean(differences), "interval": mean_interval(differences)}
    return result


def gate(runs: Sequence[Run]) -> dict[str, object]:
    """What ``run.length_gate`` at its default would have said of a fall in these runs, and after which step."""

    def fell_at(run: Run) -> int | None:
        watch = LengthGate(RunConfig().length_gate)
        rows = [{"rollout/response_len/mean": length} for length in run.lengths]
        notes = {step: watch.look(step, row) or "" for step, row in enumerate(rows, start=1)}
        return next((step for step, note in notes.items() if note.startswith("response length fell")), None)

    fell = {locked: [fell_at(run) for run in runs if run.locked is locked] for locked in (True, False)}
    said = {locked: [step for step in steps if step is not None] for locked, steps in fell.items()}
    return {
        "bound": RunConfig().length_gate,
        "said_of_locked": [len(said[True]), len(fell[True])],
        "said_of_others": [len(said[False]), len(fell[False])],
        "median_step": statistics.median(said[True]) if said[True] else None,
    }


def report(runs: Sequence[Run]) -> dict[str, object]:
    arms = {arm: [run for run in runs if run.arm == arm] for arm in dict.fromkeys(run.arm for run in runs)}
    names = list(arms)
    return {
        "locked_below": LOCKED,
        "gate": gate(runs),
        "length_predicts_final": {
            step: rank_correlation(
                [statistics.mean(run.lengths[step - LAST : step]) for run in runs],
                [run.final_long_share for run in runs],
            )
            for step in PREDICTS_AFTER
        },
        "arms": {arm: describe(of) for arm, of in arms.items()},
        "comparisons": {
            f"{second} - {first}": compare(arms[first], arms[second])
            for i, first in enumerate(names)
            for second in names[i + 1 :]
        },
        "early_share_predicts_final": rank_correlation(
            [run.early_long_share for run in runs], [run.final_long_share for run in runs]
        ),
        "runs": [asdict(run) for run in runs],
    }


def read_runs(file: Path) -> list[Run]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [Run(**{**row, "lengths": tuple(row["lengths"])}) for row in map(json.loads, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=24, help="trainings in each arm")
    parser.add_argument("--first-seed", type=int, default=101)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["unpruned", "heavy", "light", "fewer_prompts"])
    parser.add_argument("--policy", type=Path, help="start from this policy; by default one is made and warmed up")
    parser.add_argument("--init-seed", type=int, default=1, help="of the policy that is made")
    parser.add_argument("--results", type=Path, help="JSONL file that runs are appended to, and resumed from")
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("settings", nargs="*", help="more settings, for all arms")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="style-lock-in-") as made, ExitStack() as to_close:
        folder = Path(made)
        results = options.results or folder / "runs.jsonl"
        runs = read_runs(results)
        done = {(run.arm, run.seed) for run in runs}
        policy = options.policy or warm_up(folder, options.settings, options.init_seed)
        workers = RewardWorkers("exact", workers=1, timeout_s=60.0)
        to_close.callback(workers.close)
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for arm in (arm for arm in options.arms if (arm, seed) not in done):
                places = (f"model.path={policy}", f"run.dir={folder / f'{arm}-{seed}'}")
                numbers = (f"run.seed={seed}", f"run.steps={options.steps}")
                config = load_config(None, [*SETTINGS, *ARMS[arm], *places, *numbers, *options.settings])
                runs.append(train(arm, seed, config, workers, folder))
                with results.open("a") as file:
                    file.write(json.dumps(asdict(runs[-1])) + "\n")
                if not options.json:
                    print(runs[-1], file=sys.stderr)
    print(json.dumps(report(runs)))


if __name__ == "__main__":
    main()
