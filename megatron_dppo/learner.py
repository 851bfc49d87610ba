"""From a step's plan and the groups that ranks hold to updated weights: deliver, pack, score, update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor, Microbatch, Policy, Responses, Sums, learning_rate
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.parallel.exchange import deliver
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.hosts import Host, host_for
from megatron_dppo.rl.losses import token_losses
from megatron_dppo.rl.pack import build_pack
from megatron_dppo.rl.types import Group, MinibatchPlan, Pack, StepPlan

MAX_LOGPROB_DIFF = {"fp32": 1e-3, "bf16": 0.1}
"""Mean |log p(trainer) − log p(engine)| per token past which something other than rounding is at work."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a step's updates did; the same on every rank."""

    updated: bool
    """False where the plan kept nothing: no weight has moved."""
    metrics: dict[str, float]
    """``train/…``"""


class PolicyLoss:
    """The loss of a pack's responses under one host: Σ scale · token loss, nothing divided."""

    def __init__(self, host: Host, *, kl_coef: float, tis_cap: float | None) -> None:
        self._host, self._kl_coef, self._tis_cap = host, kl_coef, tis_cap

    def __call__(self, responses: Responses) -> tuple[torch.Tensor, Sums]:
        losses = token_losses(
            self._host,
            logprobs=responses.logprobs,
            old_logprobs=responses.old_logprobs,
            engine_logprobs=responses.engine_logprobs,
            reference_logprobs=responses.reference_logprobs,
            advantage=responses.advantage,
            kl_coef=self._kl_coef,
            tis_cap=self._tis_cap,
        )
        loss = (losses.loss * responses.scale).sum()
        sums = {
            **losses.sums,
            "train/loss": loss.detach(),
            "train/entropy_loss": responses.entropy.sum(),
            "tokens": torch.tensor(float(responses.logprobs.numel())),
        }
        return loss, sums


class Learner:
    """The actor, the frozen reference where the loss has a KL term, and the step between a plan and new weights."""

    def __init__(
        self, config: Config, world: World, actor: Actor, reference: Policy | None, *, pad_id: int, timers: PhaseTimers
    ) -> None:
        self._config, self._world, self._actor = config, world, actor
        self.reference = reference
        self._pad_id, self._timers = pad_id, timers
        loss = config.loss
        self._loss = PolicyLoss(host_for(loss), kl_coef=loss.kl_coef, tis_cap=loss.tis_cap)

    def learn(self, plan: StepPlan, held: Mapping[int, Group], step: int) -> Learned:
        """Train on a plan: one optimizer step per minibatch that kept anything. Collective.

        Raises:
            UserError: on every rank, if trainer and engine disagree on the rollouts' log-probabilities, or a loss or a
                gradient is not finite.
        """
        with self._timers("deliver"):
            packs = {i: self._packs(m, held) for i, m in enumerate(plan.minibatches) if m.capacity}
        with self._timers("log_probs"):
            microbatches = {i: self._microbatches(p) for i, p in packs.items()}
        totals: dict[str, float] = {}
        norms = []
        for i, batch in microbatches.items():
            with self._timers("actor_train"):
                updates = self._config.loss.updates_per_rollout
                lr = learning_rate(self._config.optimizer, step * updates + i, self._config.run.steps * updates)
                result = self._actor.update(batch, self._loss, lr=lr)
            if not norms:
                self._check_start(result.sums, step)
            norms.append(result.grad_norm)
            for name, value in result.sums.items():
                totals[name] = totals.get(name, 0.0) + value
        metrics = {"train/no_op_updates": float(len(plan.minibatches) - len(packs))}
        if norms:
            tokens, loss = totals.pop("tokens"), totals.pop("train/loss")
            metrics |= {name: value / tokens for name, value in totals.items()}
            metrics |= {"train/loss": loss / len(norms), "train/grad_norm": sum(norms) / len(norms), "train/lr": lr}
            metrics["train/tokens"] = float(
                sum((m.rows.prompt_length + m.rows.response_length).sum() for m in plan.minibatches)
            )
        return Learned(bool(norms), metrics)

    def _packs(self, minibatch: MinibatchPlan, held: Mapping[int, Group]) -> list[Pack]:
        return [
            build_pack(rows, capacity=minibatch.capacity, pad_id=self._pad_id, align=1)
            for rows in deliver(self._world, minibatch, held)
        ]

    def _microbatches(self, packs: list[Pack]) -> list[Microbatch]:
        """With one update per rollout the ratio is 1 against the policy itself, and no pass for old values is made."""
        nothing = [None] * len(packs)
        several = self._config.loss.updates_per_rollout > 1
        old = self._actor.log_probabilities(packs) if several else nothing
        reference = self.reference.log_probabilities(packs) if self.reference else nothing
        return [Microbatch(*parts) for parts in zip(packs, old, reference, strict=True)]

    def _check_start(self, sums: Mapping[str, float], step: int) -> None:
        """Before the first update of a step trainer, engine and, at step 0, reference are one and the same policy."""
        limit = self._config.rollout.max_logprob_diff
        limit = MAX_LOGPROB_DIFF[self._config.model.dtype] if limit is None else limit
        difference = sums["train/rollout_logprob_abs_diff"] / max(sums["tokens"], 1.0)
        if difference > limit:
            raise UserError(
                "rollout.max_logprob_diff",
                f"{limit:g}",
                f"trainer and engine disagree on the rollouts' log-probabilities by {difference:.3g} on average in "
                f"step {step + 1}: the engine holds other weights, another temperature or another tokenizer",
                "find the cause; raise rollout.max_logprob_diff only for a difference that precision explains",
            )
        kl = sums.get("train/kl_loss", 0.0) / max(sums["tokens"], 1.0)
        if step == 0 and kl > limit:
            raise UserError(
                "loss.kl_coef",
                self._config.loss.kl_coef,
                f"policy and reference differ before the first update (KL {kl:.3g} per token)",
                "check that model.path is complete and that nothing writes to it during the run",
            )
