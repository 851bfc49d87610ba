"""What a run has asked for, kept and trained on, from the ledger that ``tests/recorded.py`` keeps over its lives.

    python -m tests.ledger a.b=c …

trains as ``megatron-dppo train`` does, and keeps one: ``ledger.jsonl`` in ``run.dir``. Each line is an event, and is
there whatever is killed next.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.launch.start import ranks_to_start, start_ranks
from megatron_dppo.settings import load_config

LEDGER = "ledger.jsonl"
DISTINCT = 8
"""Tokens from which on a policy that has not learned does not write the same twice."""
Event = dict[str, Any]
Groups = dict[str, list[dict[str, Any]]]
"""Completions by prompt."""


def events(run: Path) -> list[Event]:
    """What a run has written down; a line that a kill has cut is left out."""
    file = run / LEDGER
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def trained(ledger: Sequence[Event]) -> dict[int, Groups]:
    """The steps that the weights of the last life have gone through, with what each was trained on, in their order.

    What was trained after the checkpoint that a life began with is not in its weights.
    """
    steps: dict[int, Groups] = {}
    for event in ledger:
        if event["event"] == "began":
            steps = {step: groups for step, groups in steps.items() if step < event["step"]}
        elif event["event"] == "trained":
            steps.pop(event["step"], None)
            steps[event["step"]] = event["groups"]
    return steps


def asked_again(ledger: Sequence[Event]) -> int:
    """Prompts of steps that were asked for once more by a later life."""
    times = Counter(event["step"] for event in ledger if event["event"] == "asked")
    size = {event["step"]: len(event["prompts"]) for event in ledger if event["event"] == "asked"}
    return sum((count - 1) * size[step] for step, count in times.items())


def faults(ledger: Sequence[Event], order: Sequence[Sequence[int]], samples: int) -> Iterator[str]:
    """What is wrong with a run that has come to its end, in words; nothing, where all is well.

    Args:
        ledger: of all of its lives.
        order: the prompts of each step, from an undisturbed run.
        samples: completions that each prompt is to have.
    """
    steps = trained(ledger)
    if list(steps) != list(range(len(order))):
        yield f"trained steps {list(steps)}"
    for step, groups in steps.items():
        if sorted(map(int, groups)) != sorted(order[step]):
            lost, new = set(order[step]) - set(map(int, groups)), set(map(int, groups)) - set(order[step])
            yield f"step {step} lost the prompts {sorted(lost)}, and has others: {sorted(new)}"
        if any(len(group) != samples for group in groups.values()):
            yield f"step {step} has groups of {[len(group) for group in groups.values()]}"
    twice = Counter(c["id"] for g in steps.values() for group in g.values() for c in group if c["length"] >= DISTINCT)
    yield from (f"completion {one} was trained {times} times" for one, times in twice.items() if times > 1)
    yield from _not_handed_on(ledger, steps)


def _not_handed_on(ledger: Sequence[Event], steps: dict[int, Groups]) -> Iterator[str]:
    """Steps that were asked for again though their rollouts were there, or were trained on others than these."""
    saved: dict[int, dict[str, Groups]] = {}
    kept: dict[int, Groups] = {}
    asked: Counter[int] = Counter()
    for event in ledger:
        if event["event"] == "saved":
            saved[event["step"]] = event["in_flight"]
        elif event["event"] == "asked":
            asked[event["step"]] += 1
        elif event["event"] == "began":
            begun, has = event["step"], event["in_flight"]
            if has != saved.get(begun, has):  # a kill may have come between a checkpoint and its line
                yield f"a life began at step {begun} with other rollouts than were saved there"
            for lost in [step for step in asked if step >= begun and str(step) not in has]:
                del asked[lost]
            kept = {step: groups for step, groups in kept.items() if step < begun}
            kept |= {int(step): groups for step, groups in has.items()}
    yield from (f"step {step} was asked for {times} times" for step, times in asked.items() if times > 1)
    yield from (f"step {step} has other rollouts than were kept" for step, g in kept.items() if steps.get(step) != g)


def main(words: Sequence[str]) -> int:
    config = load_config(None, words)
    return start_ranks("tests.recorded:job", config, ranks_to_start("train", config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
