"""Ledger of a run over its lives: requests, rollouts in flight, and the completions that steps were
trained on.

    python -m tests.chaos.ledger a.b=c …

trains like ``megatron-dppo train``, and writes ``ledger.jsonl`` in ``run.dir``: an event a line,
durable before a kill.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.launch.start import resolve_rank_count, start_ranks
from megatron_dppo.rl.types import Completion, StepPlan
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.settings import load_config
from megatron_dppo.train import Trainer, train

LEDGER = "ledger.jsonl"
DISTINCT = 8
"""Tokens from which on an untrained policy does not repeat a completion by chance."""
Event = dict[str, Any]
Groups = dict[str, list[dict[str, Any]]]
"""Completions by prompt."""


class Recorded(Trainer):
    """A trainer that writes a ledger."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        request = self.collector.request

        def note_request(pool: Any, rollouts: StepRollouts, again: int = 0) -> StepRollouts:
            if rollouts.partial is None:  # else partial rollouts resume
                self.note(
                    "asked", step=rollouts.step, prompts=rollouts.selection.prompt_ids.tolist()
                )
            return request(pool, rollouts, again)

        self.collector.request = note_request  # type: ignore[method-assign]
        self.note("began", step=self.step, in_flight=self._in_flight())

    def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
        metrics = super().train(plan, rollouts)
        self.note("trained", step=self.step, groups=self._groups(rollouts))
        return metrics

    def save(self) -> None:
        super().save()
        self.note("saved", step=self.step, in_flight=self._in_flight())

    def note(self, event: str, **values: Any) -> None:
        if self.world.is_rank0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LEDGER).open("ab", buffering=0) as ledger:
                ledger.write(json.dumps({"event": event, **values}).encode() + b"\n")

    def _in_flight(self) -> dict[str, Groups]:
        """Return complete rollouts of the next steps, by step. Collective."""
        return {
            str(each.step): self._groups(each.complete)
            for each in self.queue
            if each.complete is not None
        }

    def _groups(self, rollouts: CompleteRollouts) -> Groups:
        """Return the groups of all ranks. Collective."""
        mine = {
            str(g.prompt.id): [_describe(c) for c in g.completions] for g in rollouts.held.values()
        }
        return dict(chain.from_iterable(part.items() for part in self.world.gather(mine)))


def _describe(completion: Completion) -> dict[str, Any]:
    content = completion.token_ids.tobytes() + completion.logprobs.tobytes()
    versions = np.unique(completion.versions).tolist()
    return {
        "id": hashlib.sha256(content).hexdigest()[:16],
        "length": len(completion.token_ids),
        "versions": versions,
    }


def job(config: Config) -> None:
    """Train with a ledger, on each rank."""
    with mock.patch("megatron_dppo.train.Trainer", Recorded):
        train(config)


def events(run: Path) -> list[Event]:
    """Read a run's ledger, without a line that a kill has cut."""
    file = run / LEDGER
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def trained(ledger: Sequence[Event]) -> dict[int, Groups]:
    """Return the steps of the last life's weights with their completions, in their order: without
    the steps after the checkpoint that a life began with."""
    steps: dict[int, Groups] = {}
    for event in ledger:
        if event["event"] == "began":
            steps = {step: groups for step, groups in steps.items() if step < event["step"]}
        elif event["event"] == "trained":
            steps.pop(event["step"], None)
            steps[event["step"]] = event["groups"]
    return steps


def find_faults(
    ledger: Sequence[Event], order: Sequence[Sequence[int]], samples: int
) -> Iterator[str]:
    """Describe the faults of a finished run.

    Args:
        ledger: of all lives.
        order: prompts of each step of an undisturbed run.
        samples: completions of each prompt.
    """
    steps = trained(ledger)
    if list(steps) != list(range(len(order))):
        yield f"trained steps {list(steps)}"
    for step, groups in steps.items():
        if sorted(map(int, groups)) != sorted(order[step]):
            yield (
                f"step {step} has the prompts {sorted(map(int, groups))}, and not "
                f"{sorted(order[step])}"
            )
        if any(len(group) != samples for group in groups.values()):
            yield f"step {step} has groups of {[len(group) for group in groups.values()]}"
    times = Counter(
        c["id"]
        for g in steps.values()
        for group in g.values()
        for c in group
        if c["length"] >= DISTINCT
    )
    yield from (
        f"completion {name} was trained {count} times" for name, count in times.items() if count > 1
    )
    yield from _find_lost_rollouts(ledger, steps)


def _find_lost_rollouts(ledger: Sequence[Event], steps: dict[int, Groups]) -> Iterator[str]:
    """Find steps that were requested again though their rollouts were kept, or trained on other
    rollouts."""
    saved: dict[int, dict[str, Groups]] = {}
    kept: dict[int, Groups] = {}
    requests: Counter[int] = Counter()
    for event in ledger:
        step = event.get("step", 0)
        if event["event"] == "saved":
            saved[step] = event["in_flight"]
        elif event["event"] == "asked":
            requests[step] += 1
        elif event["event"] == "began":
            has = event["in_flight"]
            if has != saved.get(step, has):  # a kill may come between a checkpoint and its line
                yield f"a life began at step {step} with other rollouts than were saved there"
            for lost in [asked for asked in requests if asked >= step and str(asked) not in has]:
                del requests[lost]
            kept = {number: groups for number, groups in kept.items() if number < step}
            kept |= {int(number): groups for number, groups in has.items()}
    yield from (
        f"step {step} was requested {count} times" for step, count in requests.items() if count > 1
    )
    yield from (
        f"step {step} has other rollouts than were kept"
        for step, g in kept.items()
        if steps.get(step) != g
    )


if __name__ == "__main__":
    config = load_config(None, sys.argv[1:])
    sys.exit(start_ranks("tests.chaos.ledger:job", config, resolve_rank_count("train", config)))
