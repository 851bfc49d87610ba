"""The learner of a step, from plan and groups to updated weights: deliver, pack, score, update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron_dppo.config import Config
from megatron_dppo.config import replace as with_values
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor, Sums, compute_learning_rate, with_gradients
from megatron_dppo.models.frozen import BasePolicy, Reference, Teacher
from megatron_dppo.models.responses import Responses
from megatron_dppo.models.teacher_head import TeacherHead
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.parallel.exchange import exchange_samples
from megatron_dppo.rl.losses import FRESH_TOKENS, MISMATCH, compute_token_losses
from megatron_dppo.rl.objectives import EntropyBonus, Objective
from megatron_dppo.rl.pack import build_pack
from megatron_dppo.rl.types import Group, Ints, MinibatchPlan, Pack, StepPlan
from megatron_dppo.trainer.agreement import (
    ComparedCompletion,
    check_disagreement,
    collect_comparisons,
    logprob_limit,
)
from megatron_dppo.trainer.assemble import PolicyParts
from megatron_dppo.trainer.functions import load_objective

DIVERGENCE = "train/distillation_kl"
ENTROPY = "train/entropy"
SCALES = "scales"
"""Sum: divisor of ``ENTROPY``."""
TIS_CAP = 2.0
"""Default cap of the truncated importance weights, for rollouts that are ahead or of another
policy."""


def get_importance_cap(config: Config) -> float | None:
    """Return the cap of the importance weights, policy over engine; ``None``: no truncation."""
    loss = config.loss
    unbounded = loss.trust_region == "none" and loss.mask_above is None
    others = config.rollout.ahead or config.data.rollouts
    return loss.tis_cap or (TIS_CAP if others and unbounded else None)


def describe_weight_bound(config: Config) -> str:
    """Describe the bound of the importance weights."""
    if cap := get_importance_cap(config):
        return f"{cap:g} at most"
    loss = config.loss
    if loss.mask_above:
        return f"0 above {loss.mask_above:g}"
    return f"within loss.trust_region = {loss.trust_region}"


class PolicyLoss:
    """The loss of a step's packs under an objective: Σ scale · token loss, without division.

    Args:
        tis_cap: cap of the truncated importance weights.
        version: version of the weights at the start of the step. The trainer is compared with the
            engine on tokens of this version.
        distillation_coef: weight of a token's divergence from the teacher.
        entropy_coef: weight of a token's entropy; None: no bonus, and no sums of the entropy.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        kl_coef: float,
        tis_cap: float | None,
        version: int,
        distillation_coef: float = 0.0,
        entropy_coef: float | None = None,
    ) -> None:
        self._objective = objective
        self._kl_coef = kl_coef
        self._tis_cap = tis_cap
        self._version = version
        self._distillation_coef = distillation_coef
        self.entropy_coef = entropy_coef
        self._scored: list[tuple[Pack, torch.Tensor]] | None = []

    def take_scored(self) -> list[tuple[Pack, torch.Tensor]]:
        """Return the recorded packs with initial log-probabilities, [R]; stop recording."""
        scored = self._scored or []
        self._scored = None
        return scored

    def __call__(self, responses: Responses) -> tuple[torch.Tensor, Sums]:
        logprobs = responses.logprobs
        pack = responses.pack
        columns = responses.columns
        if self._scored is not None:
            self._scored.append((pack, columns.get("old_logprobs", logprobs.detach())))
        advantage = columns["advantage"]
        extra = {}
        if "teacher_logprobs" in columns:
            # With a teacher on a server, the advantage of a sampled token gets distillation_coef ·
            # log q/p (q: teacher, p: policy), a constant to the gradient.
            log_ratio = columns["teacher_logprobs"] - logprobs.detach()
            # NaN marks tokens without a teacher server: leave the advantage unchanged.
            log_ratio = torch.where(log_ratio.isnan(), 0.0, log_ratio)
            advantage = advantage + self._distillation_coef * log_ratio
            extra = {DIVERGENCE: -log_ratio.sum()}
        # Without old log-probabilities the ratio is taken against the policy itself.
        token_loss, sums = compute_token_losses(
            self._objective,
            logprobs=logprobs,
            old_logprobs=columns.get("old_logprobs"),
            engine_logprobs=columns["engine_logprobs"],
            reference_logprobs=columns.get("reference_logprobs"),
            advantage=advantage,
            kl_coef=self._kl_coef,
            tis_cap=self._tis_cap,
            sample=columns["sample"],
            samples=int(pack.sample.max(initial=-1)) + 1,
            fresh=columns["versions"] == self._version,
        )
        if responses.divergence is not None:
            token_loss = token_loss + self._distillation_coef * responses.divergence
            extra[DIVERGENCE] = extra.get(DIVERGENCE, 0.0) + responses.divergence.detach().sum()
        entropy = responses.entropy.detach()
        if self.entropy_coef is not None:
            # Importance weight and clip do not apply to the bonus, as to the KL.
            token_loss = token_loss - self.entropy_coef * responses.entropy
            # The scale has the pruning weight, so that the mean is an estimate for the window.
            extra[ENTROPY] = (entropy * columns["scale"]).sum()
            extra[SCALES] = columns["scale"].sum()
        loss = (token_loss * columns["scale"]).sum()
        of_pack = {
            "train/loss": loss.detach(),
            "train/entropy_loss": entropy.sum(),
            "tokens": torch.full_like(loss, float(logprobs.numel())),
        }
        return loss, sums | extra | of_pack


class Learner:
    """The actor, the frozen models of the loss, and the phases between a plan and new weights."""

    def __init__(self, parts: PolicyParts[Actor], timers: PhaseTimers) -> None:
        """Load the reference and the teachers that the loss needs. Collective."""
        self._config = parts.config
        self._world = parts.world
        self._actor = parts.actor
        # Reference and teachers route experts independently of the rollouts.
        self.reference: Reference | BasePolicy | None = (
            parts.load_reference() if parts.config.loss.kl_coef > 0 else None
        )
        self.teachers: list[Teacher] = parts.load_teachers()
        self._pad_id = parts.pad_id
        self._timers = timers
        self._objective = self._world.run_on_all_ranks(
            lambda: load_objective(parts.config.loss), description="import of an objective"
        )
        self.bonus = EntropyBonus(parts.config.loss.entropy)
        routed = self._actor.routing if parts.routing else None
        self._routing = parts.routing
        self._layers = self._world.gather(routed.layers) if routed else []

    @with_gradients
    def train(
        self,
        plan: StepPlan,
        groups_by_row: Mapping[int, Group],
        step: int,
        *,
        version: int,
    ) -> dict[str, float]:
        """Train on a plan: an optimizer step per minibatch with kept completions. Collective.

        Args:
            plan: plan of the step, the same on every rank.
            groups_by_row: this rank's groups, by row of the step's metadata.
            step: index of the step, from 0.
            version: version of the actor's weights.

        Returns:
            Metrics ``train/…``, the same on every rank.

        Raises:
            UserError: on every rank, if trainer and engine disagree on the rollouts'
                log-probabilities, or a loss or a gradient is not finite.
        """
        with self._timers("deliver"):
            packs = {
                i: self._build_packs(m, groups_by_row)
                for i, m in enumerate(plan.minibatches)
                if m.capacity
            }
        with self._timers("log_probs"):
            scored = {i: self._score_packs(plan.minibatches[i], p) for i, p in packs.items()}
        loss = self._build_loss(version)
        totals: dict[str, float] = {}
        norms: list[float] = []
        loads: list[dict[str, float]] = []
        for i, batch in scored.items():
            with self._timers("actor_train"):
                updates = self._config.loss.updates_per_rollout
                lr = compute_learning_rate(
                    self._config.optimizer, step * updates + i, self._config.run.steps * updates
                )
                loss.entropy_coef = self._entropy_coef
                result = self._actor.update(batch, loss, lr=lr)
            # Check after the first minibatch, whose log-probabilities are of the initial weights.
            if not norms:
                self._check_start(result.sums, step, version, loss.take_scored())
            norms.append(result.grad_norm)
            loads.append(result.expert_load)
            if self._entropy_coef is not None:
                self.bonus.update(result.sums[ENTROPY] / result.sums[SCALES])
            for name, value in result.sums.items():
                totals[name] = totals.get(name, 0.0) + value
        metrics = {"train/no_op_updates": float(len(plan.minibatches) - len(packs))}
        if norms:
            tokens, fresh, total = (
                totals.pop(name) for name in ("tokens", FRESH_TOKENS, "train/loss")
            )
            mismatch = {name: totals.pop(name) for name in MISMATCH}
            if loss.entropy_coef is not None:
                metrics[ENTROPY] = totals.pop(ENTROPY) / totals.pop(SCALES)
                metrics["train/entropy_coef"] = loss.entropy_coef
            metrics |= {name: value / tokens for name, value in totals.items()}
            metrics |= {name: value / fresh for name, value in mismatch.items() if fresh}
            metrics |= {
                "train/loss": total / len(norms),
                "train/grad_norm": sum(norms) / len(norms),
                "train/lr": lr,
            }
            metrics["train/tokens"] = float(
                sum(minibatch.lengths.sum() for minibatch in plan.minibatches)
            )
            for name in loads[0]:
                metrics[name] = sum(load[name] for load in loads) / len(loads)
        return metrics

    def set_entropy_coef(self, config: Config) -> Config:
        """Return the configuration with the entropy's present weight as ``loss.entropy.coef``."""
        if config.loss.entropy.target is None:
            return config
        entropy = with_values(config.loss.entropy, coef=self.bonus.weight)
        return with_values(config, loss=with_values(config.loss, entropy=entropy))

    @with_gradients
    def compute_gradient_norm(
        self,
        minibatch: MinibatchPlan,
        groups_by_row: Mapping[int, Group],
        *,
        version: int,
    ) -> float:
        """Return the norm of a minibatch's gradient, before clipping; 0 if empty. Collective.

        Weights do not change. Arguments are as for :meth:`train`.
        """
        if minibatch.capacity == 0:
            return 0.0
        with self._timers("deliver"):
            packs = self._build_packs(minibatch, groups_by_row)
        with self._timers("log_probs"):
            packs = self._score_packs(minibatch, packs)
        with self._timers("actor_train"):
            return self._actor.compute_gradient_norm(packs, self._build_loss(version))

    @property
    def _entropy_coef(self) -> float | None:
        """Weight of the entropy in the next optimizer step; None: never a bonus."""
        return self.bonus.weight if self._config.loss.entropy.is_used else None

    def _build_loss(self, version: int) -> PolicyLoss:
        settings = self._config.loss
        return PolicyLoss(
            self._objective,
            kl_coef=settings.kl_coef,
            tis_cap=get_importance_cap(self._config),
            version=version,
            distillation_coef=settings.distillation_coef,
            entropy_coef=self._entropy_coef,
        )

    def _build_packs(
        self,
        minibatch: MinibatchPlan,
        groups_by_row: Mapping[int, Group],
    ) -> list[Pack]:
        return [
            build_pack(
                samples, minibatch.capacity, self._pad_id, align=self._config.layout.row_multiple
            )
            for samples in exchange_samples(
                self._world, minibatch, groups_by_row, self._routing, self._layers
            )
        ]

    def _score_packs(self, minibatch: MinibatchPlan, packs: list[Pack]) -> list[Pack]:
        """Add log-probabilities of actor and reference, and teachers' heads, to the packs."""
        # With a single update per rollout the ratio is 1, without a separate pass for old values.
        nothing = [None] * len(packs)
        old = (
            self._actor.log_probabilities(packs)
            if self._config.loss.updates_per_rollout > 1
            else nothing
        )
        reference = self.reference.log_probabilities(packs) if self.reference else nothing
        taught = self._compute_heads(minibatch, packs)
        return [
            replace(pack, old_logprobs=before, reference_logprobs=base, teachers=heads)
            for pack, before, base, heads in zip(packs, old, reference, taught, strict=True)
        ]

    def _compute_heads(
        self,
        minibatch: MinibatchPlan,
        packs: list[Pack],
    ) -> list[tuple[TeacherHead, ...]]:
        found: list[tuple[TeacherHead, ...]] = [() for _ in packs]
        teacher_of = minibatch.teacher
        of_replicas: list[list[Ints]] = []
        for replica in minibatch.packs:
            of_replicas.append([teacher_of[np.array(rows, np.int64)] for rows in replica])
        mine = of_replicas[self._world.dp_rank]
        # The teachers take turns. Every replica passes a pack to a teacher if the pack of any
        # replica has a sequence of the teacher, because expert parallelism may span replicas.
        for number, teacher in enumerate(self.teachers):
            read = []
            for k in range(len(packs)):
                if any((replica[k] == number).any() for replica in of_replicas):
                    read.append(k)
            # Virtual pipeline stages require the full number of packs.
            if read and self._config.layout.vpp > 1:
                read = list(range(len(packs)))
            if not read:
                continue
            taught = [(mine[k] == number)[packs[k].sample] for k in read]
            heads = teacher.compute_heads(
                [packs[k] for k in read], taught, self._config.loss.distillation.direction
            )
            for k, head in zip(read, heads, strict=True):
                found[k] += (head,) if head else ()
        return found

    def _check_start(
        self,
        sums: Mapping[str, float],
        step: int,
        version: int,
        scored: Sequence[tuple[Pack, torch.Tensor]],
    ) -> None:
        """Check that trainer, engine, and at step 0 the reference, agree before the first
        update."""

        def collect() -> list[ComparedCompletion]:
            return [
                row
                for pack, scores in scored
                for row in collect_comparisons(pack, scores.float().cpu().numpy(), version)
            ]

        # Tokens of older versions differ legitimately.
        if fresh := sums[FRESH_TOKENS]:
            difference, error = (sums[name] / fresh for name in MISMATCH)
            check_disagreement(
                self._config,
                self._world,
                source="the engine",
                context=f"in step {step + 1}",
                difference=difference,
                error=error,
                collect=collect,
                name=f"step_{step + 1:07d}",
            )
        kl = sums.get("train/kl_loss", 0.0) / max(sums["tokens"], 1.0)
        # With replayed routing they may differ, because the reference routes experts independently.
        same_experts = self._config.loss.replay_routing != "rollout"
        if step == 0 and same_experts and kl > logprob_limit(self._config):
            problem = f"policy and reference differ before the first update (KL {kl:.3g} per token)"
            remedy = (
                "check that model.path is complete and that nothing writes to it during the run"
            )
            raise UserError("loss.kl_coef", self._config.loss.kl_coef, problem, remedy)
