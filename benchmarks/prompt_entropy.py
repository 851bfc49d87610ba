"""Prediction of prompts from the entropy of their last tokens, beside the usual features.

The entropy of the policy at a prompt's last tokens is known after a prefill, and depends on no
rollout (HIVE, arXiv:2603.25184): a draw by the entropy stays unbiased. During a training run with
the default pruning, a second predictor sees the same groups as the run's own, with ``FEATURES``
further features.

- ``brier``: Brier scores of both predictors, and the mean difference per group, over the steps
  after the first ``SKIPPED``. The interval is 95% (Student's t), over blocks of ``BLOCK`` steps,
  because successive steps are correlated.
- ``ratio``: E of the prompts' draw by the second predictor, over E by the first, at the stages and
  by the definition of ``efficiency.py``. Intervals are 95%, by leaving out each window in turn
  (jackknife). A prefill of the window is no part of the seconds.

    python benchmarks/prompt_entropy.py [--task smollm2_steps] [--windows 10] [--json]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from arms import UNPRUNED, neyman
from efficiency import (
    BASELINE,
    Costs,
    Step,
    Way,
    configured,
    costs_of,
    timed_steps,
    variance,
    with_interval,
)
from estimator import Window
from harness import finish, mean_and_reach
from training_stages import TASKS, draw_windows, measure, stage_arguments, visit_stages

from megatron_dppo.models.responses import Responses
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.pruning.forecast import (
    WIDEST,
    Outcomes,
    PromptFeatures,
    PromptForecast,
)
from megatron_dppo.rl.types import Floats, Ints
from megatron_dppo.train import Trainer

LAST = 8
"""Tokens of a prompt whose predictions count, with the prediction of the first response token."""
FEATURES = 3
"""Entropy at the last token, mean entropy, and mean log-probability of the prompt's last tokens."""
SKIPPED = 3
BLOCK = 4
ARMS = {
    BASELINE: UNPRUNED,
    "prompts 0.85 alone": neyman(0.85, None),
    "prompts 0.7 alone": neyman(0.7, None),
    "prompts 0.85, tokens auto, weights to 10": neyman(0.85, "auto"),
}


class EntropyFeatures(PromptFeatures):
    """Usual features of prompts, and the policy's features of the prompts that were read last."""

    size = PromptFeatures.size + FEATURES

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.pool)
        self._usual = PromptFeatures(trainer.pool)
        self._trainer = trainer
        self._read: dict[int, Floats] = {}
        self._moments: Floats | None = None

    def read(self, prompt_ids: Ints) -> None:
        """Read prompts with the present weights. The first prompts set the features' scale."""
        raw = read_prompts(self._trainer, prompt_ids)
        if self._moments is None:
            self._moments = np.array([raw.mean(axis=0), np.maximum(raw.std(axis=0), 1e-6)])
        scaled = np.clip((raw - self._moments[0]) / self._moments[1], -WIDEST, WIDEST)
        self._read = dict(zip(prompt_ids.tolist(), scaled, strict=True))

    def get(self, prompt_ids: Ints) -> Floats:
        usual = self._usual.get(prompt_ids)
        own = np.array([self._read[prompt_id] for prompt_id in prompt_ids.tolist()])
        return np.concatenate([usual, own.reshape(-1, FEATURES)], axis=1)


@torch.no_grad()
def read_prompts(trainer: Trainer, prompt_ids: Ints) -> Floats:
    """Return ``FEATURES`` of each prompt by one forward pass, [N, FEATURES]."""
    actor = trainer.policy.actor
    packs = []
    for prompt_id in prompt_ids.tolist():
        tokens = trainer.pool[prompt_id].token_ids
        last = min(LAST, len(tokens) - 1)
        # Any token will do as the first response token: only its distribution is read.
        response = np.append(tokens[len(tokens) - last :], tokens[:1])
        row = TrainingSample(
            prompt_ids=tokens[: len(tokens) - last],
            response_ids=response,
            engine_logprobs=np.zeros(len(response), np.float32),
            loss_mask=np.ones(len(response), np.bool_),
            advantage=0.0,
            scale=1.0,
            version=trainer.version,
        )
        packs.append(build_pack([row], len(tokens) + 1, trainer.policy.pad_id, align=1))

    def collect(responses: Responses) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = {"entropy": responses.entropy, "logprobs": responses.logprobs}
        return responses.logprobs.sum(), found

    outputs = actor._run(packs, collect, forward_only=True)
    rows = []
    for output in outputs:
        entropy = output["entropy"].float().numpy()
        rows.append([entropy[-1], entropy.mean(), output["logprobs"][:-1].float().mean().item()])
    return np.array(rows, np.float64)


class Companion:
    """Second predictor, which learns from the groups of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.features = EntropyFeatures(trainer)
        objective = resolve_objective(trainer.config.loss)
        self.forecast = PromptForecast(self.features, objective.advantage)
        self.scores: list[tuple[float, float]] = []
        """Brier scores of each step: the run's predictor, and this one."""
        history = trainer.sampler.history
        update = history.evaluate_and_update

        def update_both(visits: Outcomes) -> dict[str, float]:
            found = update(visits)
            if len(visits.prompt_ids):
                self.features.read(visits.prompt_ids)
                own = self.forecast.evaluate_and_update(visits)
                self.scores.append((found["prune/brier_model"], own["prune/brier_model"]))
            return found

        history.evaluate_and_update = update_both  # type: ignore[method-assign]

    def compare_scores(self) -> dict[str, Any]:
        scores = np.array(self.scores[SKIPPED:])
        count = len(scores) // BLOCK
        blocks = scores[: count * BLOCK].reshape(count, BLOCK, 2).mean(axis=1)
        difference, reach = mean_and_reach((blocks[:, 1] - blocks[:, 0]).tolist())
        usual, own = scores.mean(axis=0).tolist()
        return {"usual": usual, "entropy": own, "difference": difference, "reach": reach}


def visited(trainer: Trainer, name: str, options: Any, companions: list[Companion]) -> Any:
    """Measure the arms under both predictors at a stage."""
    companion = companions[0]
    histories = {"usual": trainer.sampler.history, "entropy": companion.forecast}
    steps: dict[tuple[str, str], list[Step]] = {}
    for number, prompt_ids in enumerate(draw_windows(trainer, options.windows)):
        stride = TASKS[options.task].stride
        stage = measure(trainer, name, prompt_ids, 1 + number, stride)
        window = Window(stage, trainer.config.loss.name)
        companion.features.read(prompt_ids)
        for arm, settings in ARMS.items():
            for key, history in histories.items():
                way = Way(configured(trainer, *settings), history, stage.metadata)
                step = way.step(window, options.draws)
                steps.setdefault((arm, key), []).append(step)
        print(f"{name}: window {number + 1} of {options.windows}", file=sys.stderr, flush=True)
    return {"stage": name, "step": trainer.step, "steps": steps, "timed": timed_steps(trainer, 8)}


def judge(steps: dict[tuple[str, str], list[Step]], costs: Costs) -> dict[str, Any]:
    """Return the ratio of E, by arm."""
    base = steps[BASELINE, "usual"]

    def worth(own: Sequence[Step], chosen: Sequence[int]) -> float:
        these = [own[i] for i in chosen]
        unpruned = [base[i] for i in chosen]
        return costs.of(unpruned) * variance(unpruned) / (costs.of(these) * variance(these))

    table = {}
    for arm in ARMS:
        usual = steps[arm, "usual"]
        own = steps[arm, "entropy"]

        def ratio(
            chosen: Sequence[int], own: Sequence[Step] = own, usual: Sequence[Step] = usual
        ) -> float:
            return worth(own, chosen) / worth(usual, chosen)

        everything = range(len(base))
        table[arm] = {
            "usual": worth(usual, everything),
            "entropy": worth(own, everything),
            "ratio": with_interval(ratio, len(base)),
            "generated": statistics.fmean(s.generated for s in own)
            / statistics.fmean(s.generated for s in base),
        }
    return table


def main() -> None:
    options = stage_arguments(__doc__).parse_args()
    companions: list[Companion] = []
    visits = visit_stages(
        options,
        partial(visited, options=options, companions=companions),
        lambda trainer: companions.append(Companion(trainer)),
    )
    costs = costs_of([row for each in visits for row in each["timed"]])
    found = {
        "task": options.task,
        "seconds": asdict(costs),
        "brier": companions[0].compare_scores(),
        "stages": [
            {"stage": each["stage"], "step": each["step"], "arms": judge(each["steps"], costs)}
            for each in visits
        ],
    }
    finish(found, options)


if __name__ == "__main__":
    main()
