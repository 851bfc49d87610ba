"""SmolLM2-135M by this trainer and by transformers: tokens per second of a step's parts, on one thread.

    python benchmarks/real_model.py [--settings model.dtype=fp32 ...] [--json]

Policy, problems and settings are those of ``scripts/quickstart.sh --policy smollm2``, whose folder has to be there.
Each of the trainer's steps is followed by transformers' own work on the same prompts and completions: ``generate``, in
the batch size that suits it best, and a plain forward and backward pass over the completions that the step trained on,
each behind its prompt, padded in batches of 8. The trainer's seconds are those of whole phases: ``rollout`` has the
verdicts, ``train`` the packing, the optimizer and the weights' way to the engine. Those of transformers have no
optimizer.

Rates are in tokens per second of processor time. Those of training count a completion with its prompt, also where a
pack has a prompt once for several completions. Ratios are geometric means over the steps, with their 95% intervals.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, TypeVar

import torch
from harness import arguments, be_the_only_rank, finish, paired_ratio
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from megatron_dppo.config import Config
from megatron_dppo.parallel.world import initialize, shut_down
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer

T = TypeVar("T")
PADDED = 8
"""Sequences of a padded batch."""


def busy(work: Callable[..., T], *given: Any) -> tuple[float, T]:
    """Seconds of processor time, and the result."""
    start = time.process_time()
    result = work(*given)
    return time.process_time() - start, result


class Step:
    """One step of the trainer, and what it was made of."""

    def __init__(self, trainer: Trainer) -> None:
        selected = trainer.select(trainer.step)
        self.rollout_s, rollouts = busy(trainer.roll_out, selected)
        plan = trainer.plan(rollouts)
        held = rollouts.held
        samples = [
            (held[int(group)], held[int(group)].completions[int(completion)])
            for minibatch in plan.minibatches
            for group, completion in zip(minibatch.samples.group, minibatch.samples.completion, strict=True)
        ]
        self.train_s, _ = busy(trainer.train, plan, rollouts)
        trainer.step += 1
        trainer.timers.take()
        self.prompts = [group.prompt.token_ids.tolist() for group in held.values()]
        self.kept = [(group.prompt.token_ids.tolist(), completion.token_ids.tolist()) for group, completion in samples]
        self.generated = sum(len(c.token_ids) for group in held.values() for c in group.completions)
        self.trained = sum(len(prompt) + len(response) for prompt, response in self.kept)


def padded(rows: list[list[int]], pad: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, longest] token ids, and the mask of those that are no padding."""
    width = max(map(len, rows))
    fill = [[pad] * (width - len(row)) for row in rows]
    real = [[1] * len(row) for row in rows]
    none = [[0] * len(each) for each in fill]
    pairs = [(fill, rows), (none, real)] if left else [(rows, fill), (real, none)]
    ids, mask = (torch.tensor([a + b for a, b in zip(*pair, strict=True)]) for pair in pairs)
    return ids, mask


def generated(policy: PreTrainedModel, prompts: list[list[int]], config: Config, batch: int, seed: int) -> int:
    """Let ``generate`` complete prompts, ``batch`` of them at a time; return how many tokens it made."""
    torch.manual_seed(seed)
    stop = policy.generation_config.eos_token_id
    settings = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=config.rollout.max_response_tokens,
        num_return_sequences=config.rollout.samples_per_prompt,
        eos_token_id=stop,
        pad_token_id=stop,
    )
    tokens = 0
    for at in range(0, len(prompts), batch):
        ids, mask = padded(prompts[at : at + batch], stop, left=True)
        with torch.inference_mode():
            rows = policy.generate(input_ids=ids, attention_mask=mask, generation_config=settings)[:, ids.shape[1] :]
        tokens += sum(row.index(stop) + 1 if stop in row else len(row) for row in rows.tolist())
    return tokens


def trained(policy: PreTrainedModel, kept: list[tuple[list[int], list[int]]]) -> None:
    """A forward and a backward pass over completions behind their prompts, the longest together."""
    for parameter in policy.parameters():
        parameter.grad = None
    ordered = sorted(kept, key=lambda pair: len(pair[0]) + len(pair[1]))
    for at in range(0, len(ordered), PADDED):
        batch = ordered[at : at + PADDED]
        ids, mask = padded([prompt + response for prompt, response in batch], 0, left=False)
        responses = torch.zeros(ids.shape, dtype=torch.bool)
        for row, (prompt, response) in zip(responses, batch, strict=True):
            row[len(prompt) : len(prompt) + len(response)] = True
        logits = policy(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][responses[:, 1:]]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[responses][:, None])
        (-logprobs.mean()).backward()


def speed(config: Config, steps: int, batches: list[int]) -> Iterator[tuple[str, Any]]:
    """The figures."""
    be_the_only_rank()
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    with ExitStack() as to_close:
        trainer = Trainer(config, world, to_close.enter_context(closing(RewardWorkers.of(config.reward))), to_close)
        trainer.sync(0)
        policy = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=config.model.torch_dtype)
        Step(trainer)
        found: list[Step] = []
        theirs: dict[int, list[float]] = {batch: [] for batch in batches}
        plain: list[float] = []
        for number in range(steps):
            found.append(step := Step(trainer))
            for batch, rates in theirs.items():
                seconds, tokens = busy(generated, policy, step.prompts, config, batch, number)
                rates.append(tokens / seconds)
            plain.append(step.trained / busy(trained, policy, step.kept)[0])
    shut_down()
    ours = [step.generated / step.rollout_s for step in found]
    packed = [step.trained / step.train_s for step in found]
    best = max(theirs, key=lambda batch: sum(theirs[batch]))
    pairs = {"rollout_over_generate": (ours, theirs[best]), "train_over_transformers": (packed, plain)}
    for name, pair in pairs.items():
        over = paired_ratio(*pair)
        yield name, over["ratio"]
        yield f"{name}_interval", over["interval"]
    yield "generate_batch", best
    for name, rates in {"rollout": ours, "generate": theirs[best], "train": packed, "transformers": plain}.items():
        yield f"{name}_tokens_per_second", sum(rates) / len(rates)
    for name in ("rollout_s", "train_s", "generated", "trained"):
        yield f"{name}_of_a_step", sum(getattr(step, name) for step in found) / steps


def main() -> None:
    parser = arguments(__doc__, folder=(Path("runs/smollm2"), "of policy and problems"), steps=4, batches=[4, 8, 16])
    parser.add_argument("--settings", nargs="+", default=[], help="of the training, such as model.dtype=fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as run:
        files = {"model.path": "policy", "data.train": "train.jsonl", "data.eval": "held_out.jsonl"}
        own = [f"{name}={options.folder / file}" for name, file in files.items()]
        own += [f"run.dir={run}/run", "layout.dp=1", "eval.problems=0", "run.export=false", "optimizer.warmup_steps=0"]
        config = load_config("configs/smollm2.yaml", [*own, *options.settings])
        start = time.perf_counter()
        figures = dict(speed(config, options.steps, options.batches))
    finish(figures | {"seconds": time.perf_counter() - start}, options)


if __name__ == "__main__":
    main()
