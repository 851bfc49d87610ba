"""Real runs that write down which rollouts they ask for, keep and train on, for tests that kill parts of them."""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from typing import Any
from unittest import mock

from megatron_dppo.config import Config
from megatron_dppo.rl.types import Completion, StepPlan
from megatron_dppo.rollout.servers.batch import RequestBatch
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.train import Trainer, train
from tests.ledger import LEDGER, Groups


class Recorded(Trainer):
    """Says what it does."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        request, answered = self.collector.request, RequestBatch.prompt_ended

        def asked(pool: Any, rollouts: StepRollouts, again: int = 0) -> StepRollouts:
            if rollouts.partial is None:  # else what was broken off goes on
                self.note("asked", step=rollouts.step, prompts=rollouts.selection.prompt_ids.tolist())
            return request(pool, rollouts, again)

        def was_answered(batch: RequestBatch, index: int) -> None:
            if batch.sampling.samples == self.config.rollout.samples_per_prompt:  # else it is no rollout
                self.note("answered", prompt=batch.prompts[index].id)
            answered(batch, index)

        self.collector.request = asked  # type: ignore[method-assign]
        RequestBatch.prompt_ended = was_answered  # type: ignore[method-assign]
        self.note("began", step=self.step, in_flight=self._in_flight())

    def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
        metrics = super().train(plan, rollouts)
        self.note("trained", step=self.step, groups=self._groups(rollouts))
        return metrics

    def save(self) -> None:
        super().save()
        self.note("saved", step=self.step, in_flight=self._in_flight())

    def note(self, event: str, **what: Any) -> None:
        """For the leader, and all ranks that it has asked."""
        if self.world.leads:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LEDGER).open("ab", buffering=0) as ledger:
                ledger.write(json.dumps({"event": event, **what}).encode() + b"\n")

    def _in_flight(self) -> dict[str, Groups]:
        """What the next steps have already, by step. Collective."""
        return {str(each.step): self._groups(each.complete) for each in self.queue if each.complete is not None}

    def _groups(self, rollouts: CompleteRollouts) -> Groups:
        """What all ranks hold of a step. Collective."""
        mine = {str(g.prompt.id): [_described(c) for c in g.completions] for g in rollouts.held.values()}
        return dict(chain.from_iterable(part.items() for part in self.world.gather(mine)))


def _described(completion: Completion) -> dict[str, Any]:
    content = completion.token_ids.tobytes() + completion.logprobs.tobytes()
    return {
        "id": hashlib.sha256(content).hexdigest()[:16],
        "length": len(completion.token_ids),
        "versions": [span.version for span in completion.versions],
    }


def job(config: Config) -> None:
    """What each rank of such a run does."""
    with (
        mock.patch("megatron_dppo.train.Trainer", Recorded),
        mock.patch.object(RequestBatch, "prompt_ended", RequestBatch.prompt_ended),
    ):
        train(config)
