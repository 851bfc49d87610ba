"""Mean rewards of a policy that lacks some layers: it answers training prompts by the run's own engine, and is scored.

An engine has its own copy of the weights, and knows nothing of layers that are left out. A layer whose output
projections are zeros adds nothing to the residual stream, and so the engine is sent zeros for those. This works with
the local engine and with servers, under any layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import torch

from megatron_dppo.compress.calibration import Accumulator, Sums, tell
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.evaluation.evaluator import EvalProblem, Evaluator, open_verifiers
from megatron_dppo.models.actor import Policy
from megatron_dppo.rollout.scoring import Failures
from megatron_dppo.trainer.assemble import PolicyParts, load_training_pool

WRITE = (".linear_proj.weight", ".linear_fc2.weight")
"""Ends of the names of weights that write to the residual stream; of an expert's, its number follows."""


def prompts_to_ask(parts: PolicyParts[Policy], count: int, seed: int) -> list[EvalProblem]:
    """``count`` prompts of the training pool, or all if it has fewer. Held-out problems stay for what comes after."""
    pool, verifier = load_training_pool(parts), parts.config.reward.spec
    chosen = np.random.default_rng(seed).permutation(len(pool))[:count].tolist()
    return [EvalProblem("", place, pool[place], verifier) for place in sorted(chosen)]


def digest_of_task(problems: Sequence[EvalProblem], functions: Sequence[str]) -> str:
    """Digest of prompts with their labels, and of the files of the reward functions, if they name some."""
    asked = [(problem.prompt.token_ids.tolist(), problem.prompt.label_text) for problem in problems]
    seen = hashlib.sha256(repr(asked).encode())
    for file in (Path(function.rpartition(":")[0]) for function in functions):
        if file.is_file():
            seen.update(file.read_bytes())
    return seen.hexdigest()


class Asking:
    """The engine and the reward workers of one scoring. Collective.

    Args:
        config: with ``eval.samples`` answers to a prompt, ``eval.batch`` prompts at a time.
        to_close: closes both.
    """

    def __init__(
        self, config: Config, parts: PolicyParts[Policy], problems: Sequence[EvalProblem], to_close: ExitStack
    ) -> None:
        self._samples, size = config.eval.samples, config.eval.batch
        self._batches = [problems[at : at + size] for at in range(0, len(problems), size)]
        self._parts, self._problems, self._version = parts, len(problems), 0
        workers = open_verifiers(config, parts.world, problems, to_close, {})
        self._engine = to_close.enter_context(closing(parts.engine()))
        self._evaluator = Evaluator(config, parts.world, parts.collectors(self._engine, workers))

    def reward(self, absent: Collection[int], passes: Accumulator) -> float:
        """Mean reward of the answers of the policy without these layers, over those that could be scored. Every policy
        draws by the same seeds.

        Raises:
            UserError: on every rank, if more than ``reward.max_failures`` of the answers could not be scored, or none.
        """
        sums: Sums = {name: torch.zeros(2, dtype=torch.float64) for name in ("rewards", "failures")}
        of_all = self._samples * self._problems
        asked = False
        with ExitStack() as until_answered:
            for batch in passes.over(self._batches, sums, sequences=self._problems):
                if not asked:  # of a pass that has been done no answer is needed
                    self._begin_without(absent, until_answered)
                    asked = True
                found = self._evaluator.answer(batch, keep=0, of_all=of_all)
                scores = [answer.score.reward for of in found.answers for answer in of if answer.score]
                sums["rewards"] += torch.tensor([sum(scores), len(scores)], dtype=torch.float64)
                failures = found.failures
                sums["failures"] += torch.tensor([failures.timeouts, failures.errors], dtype=torch.float64)
                for text in failures.tracebacks:
                    tell(text, self._parts.world)
                timeouts, errors = map(int, sums["failures"].tolist())
                self._evaluator.check_failures([Failures(timeouts, errors, failures.tracebacks)], of_all)
        (total, count), failed = sums["rewards"].tolist(), int(sums["failures"].sum())
        if not count:
            function = self._parts.config.reward.spec
            raise UserError("reward.function", function, "could score none of the answers", "Mend the function")
        lacks = f"without layer {', '.join(map(str, absent))}" if absent else "whole policy"
        unscored = f"; {failed} of {of_all} answers could not be scored" if failed else ""
        tell(f"{lacks}: mean reward {total / count:.4f}{unscored}", self._parts.world)
        return float(total / count)

    def _begin_without(self, absent: Collection[int], until_answered: ExitStack) -> None:
        """Send the engine the policy without these layers. It stays so until the answers are there, since servers that
        come back are sent it again."""
        until_answered.enter_context(writing_nothing(self._parts.actor, absent))
        self._parts.sync(self._engine, self._version)
        until_answered.callback(self._engine.pause)  # colocated servers sleep while the trainer reads
        self._version += 1


@contextmanager
@torch.no_grad()
def writing_nothing(policy: Policy, layers: Collection[int]) -> Iterator[None]:
    """Within the block, the weights by which these layers write to the residual stream are zeros."""
    kept = {}
    for layer in (layer for chunk in policy.chunks for layer in chunk.decoder.layers):
        if layer.layer_number - 1 in layers:
            for name, weight in layer.named_parameters():
                if name.rstrip("0123456789").endswith(WRITE):
                    kept[weight] = weight.to("cpu", copy=True)
                    weight.zero_()
    try:
        yield
    finally:
        for weight, before in kept.items():
            weight.copy_(before)
