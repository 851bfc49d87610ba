"""Pruning of completions in TRL's ``GRPOTrainer``; tested with TRL 1.16.0.

    trainer = PrunedGRPOTrainer(
        pruning=Pruning(budget=0.5), model=…, reward_funcs=…, args=GRPOConfig(…), …
    )

Generation, rewards and advantages are TRL's own. Each optimizer step draws completions to train on,
and weights their losses: the expected gradient is TRL's of the whole batch (arXiv:2603.04135).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.utils import broadcast, gather_object
from trl import GRPOTrainer
from trl.trainer.utils import pad

from megatron_dppo.errors import UserError
from megatron_dppo.integrations.settings import Pruning as Pruning
from megatron_dppo.rl.pruning import prune_candidates
from megatron_dppo.rl.pruning.completion_rules import CompletionCandidates

DIVIDED_BY_ROWS = frozenset({"grpo", "sapo", "dr_grpo", "luspo"})
"""Losses that TRL divides by the rows of a micro-batch."""
DIVIDED_BY_TOKENS = frozenset({"dapo", "cispo", "vespo"})
"""Losses that TRL divides by the tokens of the generation batch, counted before the draw."""
MEANS_OVER_TOKENS = frozenset({"grpo", "sapo"})
"""Losses that average over the tokens of a row; all other losses sum."""
SKIPS_PASSES = frozenset({DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU})
"""Distribution types that allow a rank to skip forward passes before a step's last. With all other
types, every micro-batch has a pass, over fewer rows."""
MOST_ROUNDING = 0.01
"""Upper bound of an |advantage| attributed to rounding; larger advantages are trained on."""
DEFAULT = Pruning()


@dataclass(frozen=True, slots=True)
class Row:
    """A completion without padding."""

    inputs: dict[str, torch.Tensor]
    """TRL's inputs by name: [tokens], [1] or []."""
    weight: float
    """0 for a completion excluded from training."""

    def __len__(self) -> int:
        return len(self.inputs["prompt_ids"]) + len(self.inputs["completion_ids"])

    def to(self, device: torch.device | str) -> Row:
        return Row({name: value.to(device) for name, value in self.inputs.items()}, self.weight)


class PrunedGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` that trains on a part of the completions, with an unbiased gradient.

    Subclasses can be pruned as well: ``class Mine(PrunedGRPOTrainer, YourTrainer): pass``.

    Args:
        pruning: see :class:`Pruning`; all other arguments are the trainer's.

    Raises:
        UserError: ``GRPOConfig`` has a term that no weight of completions keeps unbiased.
    """

    beta: float
    """TRL's coefficient of the KL term."""
    completion_inputs: ClassVar[Mapping[str, float]] = {
        "completion_mask": 0,
        "old_per_token_logps": 0.0,
        "ref_per_token_logps": 0.0,
        "sampling_per_token_logps": 0.0,
        "importance_sampling_ratio": 1.0,
        "tool_mask": 1,
    }
    """Padding values of inputs of shape [B, tokens of completions] or [B, 1]. A subclass adds its
    own inputs here."""

    def __init__(self, *args: Any, pruning: Pruning = DEFAULT, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pruning = pruning
        _check_loss_terms(self)
        self._candidates: CompletionCandidates
        self._generated = 0.0
        self._rounding: torch.Tensor
        self._pruned: deque[dict[str, torch.Tensor]] = deque()
        """Remaining micro-batches of the last draw. An empty micro-batch has no forward pass."""
        self._draws = self._passed = 0
        """Draws and micro-batches in this optimizer step."""
        self._drawn_at = -1

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        if self.model.training:
            weighted = rewards * self.reward_weights.to(rewards.device)
            # In a group of equal rewards the standard deviation is 0: TRL divides by 1e-4 alone.
            divisors = {"group": 1e-4, "batch": 1e-4 + float(weighted.nansum(dim=1).std())}
            self._rounding = compute_max_rounding(
                weighted, self.num_generations, divisors.get(self.scale_rewards, 1.0)
            )
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._check_prunable(batch)
            self._candidates = self._gather_candidates(batch)
            rows = len(batch["advantages"])
            first = self.accelerator.process_index * rows
            batch["row"] = first + torch.arange(rows, device=batch["advantages"].device)
        return batch

    def _check_prunable(self, batch: Mapping[str, Any]) -> None:
        known = {
            "prompt_ids",
            "prompt_mask",
            "completion_ids",
            "advantages",
            *self.completion_inputs,
        }
        if batch["advantages"].ndim != 1:
            shape = tuple(batch["advantages"].shape)
            raise UserError(
                "advantages", shape, "a completion has several", "return one for each completion"
            )
        for name, value in batch.items():
            if name not in known and not (isinstance(value, torch.Tensor) and value.ndim == 0):
                remedy = (
                    "train on text alone, or add tensors of [rows, tokens] to "
                    "completion_inputs in a subclass"
                )
                raise UserError("inputs", name, "rows of this input cannot be cut", remedy)

    def _gather_candidates(self, batch: Mapping[str, torch.Tensor]) -> CompletionCandidates:
        """Gather the completions of all ranks, [Q, G], in TRL's order of generation."""
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        logprobs = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
        norm = torch.ones_like(batch["advantages"])
        if logprobs is not None:
            # p − 1 is, up to the sign, the derivative of log p by the token's own logit.
            norm = (torch.expm1(logprobs.float().nan_to_num(0.0)) * mask).norm(dim=1)
        counts = (
            batch["prompt_mask"].sum(dim=1),
            batch["completion_mask"].sum(dim=1),
            mask.sum(dim=1),
        )
        local = torch.stack([each.float() for each in (batch["advantages"], norm, *counts)], dim=1)
        gathered = self.accelerator.gather(local).double().cpu().numpy()
        groups = gathered.reshape(-1, self.num_generations, 5)
        advantage, norms, prompts, completions, tokens = np.moveaxis(groups, -1, 0)
        self._generated = float(completions.sum())
        flat = np.abs(advantage).max(axis=1, keepdims=True) <= self._rounding.cpu().numpy()[:, None]
        divisor = np.maximum(tokens, 1.0) if self.loss_type in MEANS_OVER_TOKENS else 1.0
        # With a KL term, a completion without an advantage still has a gradient.
        return CompletionCandidates(
            advantage=advantage,
            score=np.abs(advantage) * norms / divisor,
            cost=prompts + completions,
            floor=np.full_like(tokens, 1.0 / self.pruning.max_weight),
            zero_advantage=(tokens == 0.0) | ((flat | (advantage == 0.0)) & (self.beta == 0.0)),
        )

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        is_complete = self._passed == self.current_gradient_accumulation_steps
        if is_complete or self._drawn_at != self.state.global_step:
            self._drawn_at = self.state.global_step
            self._draws = 0
            self._passed = 0
        if not self._pruned:
            position = self._step % self.args.steps_per_generation
            # A step may span two generation batches, with a separate draw from each.
            left = self.current_gradient_accumulation_steps - self._passed
            self._pruned.extend(self._prune(self._buffered_inputs[position : position + left]))
        self._passed += 1
        return self._pruned.popleft()

    def _prune(self, window: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Draw from the micro-batches of an optimizer step, taken from a single generation batch.

        Returns:
            As many micro-batches as ``window``, the empty first. All ranks have equal numbers of
            rows, since TRL's metrics gather rows; rows of weight 0 fill the gaps.
        """
        weights = self._draw_weights()
        rows = [row for batch in window for row in self._split_rows(batch, weights)]
        mine, most = self._balance_rows([row for row in rows if row.weight > 0.0])
        size = len(rows) / len(window)
        passes = len(window)
        if self.accelerator.distributed_type in SKIPS_PASSES:
            passes = max(1, math.ceil(most / size))
        # The shortest row is the cheapest filler. Sorting by length reduces padding.
        filler = Row(min(rows, key=len).inputs, weight=0.0)
        mine = sorted(mine + [filler] * (max(most, passes) - len(mine)), key=len)
        chunks = [
            mine[len(mine) * i // passes : len(mine) * (i + 1) // passes] for i in range(passes)
        ]
        shared = {name: value for name, value in window[0].items() if value.ndim == 0}
        return [{}] * (len(window) - passes) + [
            shared | self._pad_rows(chunk, size) for chunk in chunks
        ]

    def _draw_weights(self) -> list[float]:
        """Draw weights, [completions of all ranks]; 0 if excluded from training. All ranks receive
        rank 0's weights."""
        # Each step draws from the whole generation batch, with another random seed, because the
        # parameters depend on the last step's draw.
        candidates = self._candidates
        seed = (self.pruning.seed, self.state.global_step, self._draws)
        (mask, weights), inclusion = prune_candidates(
            candidates,
            self.pruning.budget,
            rule=self.pruning.rule,
            generated=self._generated,
            seed=seed,
        )
        self._draws += 1
        squares = candidates.score**2
        live = inclusion > 0.0
        noise = (
            (squares[live] / inclusion[live]).sum() / squares[live].sum()
            if squares[live].any()
            else 1.0
        )
        self._metrics["train"]["pruning/kept"].append(float(mask.mean()))
        self._metrics["train"]["pruning/kept_tokens"].append(
            float(candidates.cost[mask].sum() / candidates.cost.sum())
        )
        self._metrics["train"]["pruning/variance_inflation"].append(float(noise))
        own = torch.from_numpy(weights).flatten().to(self.accelerator.device)
        drawn: list[float] = broadcast(own).tolist()
        return drawn

    def _split_rows(
        self,
        batch: Mapping[str, torch.Tensor],
        weights: Sequence[float],
    ) -> Iterator[Row]:
        # Without rotary positions, cutting the left padding would shift the positions.
        rotary = getattr(self.model.config.get_text_config(), "rope_parameters", None) is not None
        width = batch["prompt_mask"].size(1)
        prompts = (
            batch["prompt_mask"].sum(dim=1).tolist() if rotary else [width] * len(batch["row"])
        )
        completions = batch["completion_mask"].sum(dim=1).clamp(min=1).tolist()
        places = batch["row"].tolist()
        for i, (place, prompt, completion) in enumerate(
            zip(places, prompts, completions, strict=True)
        ):
            inputs = {
                name: batch[name][i, width - prompt :] for name in ("prompt_ids", "prompt_mask")
            }
            for name in ("completion_ids", *self.completion_inputs):
                if name in batch:
                    inputs[name] = batch[name][i, :completion]
            yield Row(inputs | {"advantages": batch["advantages"][i]}, weights[place])

    def _balance_rows(self, rows: list[Row]) -> tuple[list[Row], int]:
        """Move rows between ranks until their numbers differ by at most one; return this rank's
        rows, and the largest number."""
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        counts = self.accelerator.gather(
            torch.tensor([len(rows)], device=self.accelerator.device)
        ).tolist()
        total = sum(counts)
        quotas = [(total + ranks - 1 - index) // ranks for index in range(ranks)]
        if counts != quotas:
            missing = [max(quota - count, 0) for quota, count in zip(quotas, counts, strict=True)]
            given = gather_object([row.to("cpu") for row in rows[quotas[rank] :]])
            arrived = given[sum(missing[:rank]) :][: missing[rank]]
            rows = rows[: quotas[rank]] + [row.to(self.accelerator.device) for row in arrived]
        return rows, quotas[0]

    def _pad_rows(self, rows: Sequence[Row], size: float) -> dict[str, torch.Tensor]:
        """Build a micro-batch. ``size``: TRL's divisor of the loss, in rows."""
        pad_id = self._tokenizer.pad_token_id
        fill = {
            "prompt_ids": pad_id,
            "prompt_mask": 0,
            "completion_ids": pad_id,
            **self.completion_inputs,
        }
        batch = {}
        for name in rows[0].inputs.keys() & fill.keys():
            values = [row.inputs[name] for row in rows]
            side = "left" if name.startswith("prompt") else "right"
            # A tensor of shape [1] belongs to the completion, not to a token.
            whole = max(map(len, values)) > 1
            batch[name] = pad(values, fill[name], side, self.pad_to_multiple_of if whole else None)
        advantages = torch.stack([row.inputs["advantages"] for row in rows])
        # These losses divide by the rows present: correct to ``size``.
        share = len(rows) / size if self.loss_type in DIVIDED_BY_ROWS else 1.0
        batch["weight"] = advantages.new_tensor([row.weight * share for row in rows])
        batch["advantages"] = advantages * batch["weight"]
        return batch

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        # An empty micro-batch has no loss, but backward() needs a gradient.
        if not inputs:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        loss: torch.Tensor = super().compute_loss(model, inputs, *args, **kwargs)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the loss, with the weights in the KL term. Policy terms are proportional to the
        advantages, which contain the weights."""
        beta = self.beta
        if beta and "weight" in inputs:
            self.beta = _RowCoefficient(beta, inputs["weight"])
        try:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        return loss


def compute_max_rounding(rewards: torch.Tensor, samples: int, divisor: float) -> torch.Tensor:
    """Return the largest |A| that rounding alone gives a group of equal rewards.

    The mean of G equal rewards r in fp32 has an error of at most G·u·|r|, with u = 2⁻²⁴. TRL
    divides r − mean by ``divisor``, hence |A| ≤ G·u·|r| / divisor.

    Args:
        rewards: [Q·G, functions], weighted; NaN if a function returned None.
        samples: G.
        divisor: the trainer's smallest divisor for a group of equal rewards.

    Returns:
        [Q]
    """
    # Without a bound, large rewards over a small divisor would drop real advantages.
    largest = rewards.abs().nansum(dim=1).view(-1, samples).amax(dim=1)
    return (largest * (samples * 2.0**-24 / divisor)).clamp(max=MOST_ROUNDING)


class _RowCoefficient(float):
    """Coefficient that also multiplies each row [B, tokens] by its weight [B]."""

    def __new__(cls, value: float, weight: torch.Tensor) -> _RowCoefficient:
        return super().__new__(cls, value)

    def __init__(self, value: float, weight: torch.Tensor) -> None:
        self._each = value * weight[:, None]

    def __mul__(self, rows: Any) -> Any:
        return self._each * rows


def _check_loss_terms(trainer: Any) -> None:
    args = trainer.args
    known = DIVIDED_BY_ROWS | DIVIDED_BY_TOKENS
    own = "divides by each micro-batch's own number of tokens"
    for setting, value, biased, problem, remedy in (
        (
            "loss_type",
            args.loss_type,
            args.loss_type not in known,
            f"it {own}" if args.loss_type == "bnpo" else "its divisor is unknown",
            f"choose one of {', '.join(sorted(known))}",
        ),
        (
            "top_entropy_quantile",
            args.top_entropy_quantile,
            args.top_entropy_quantile < 1.0,
            "the quantile would be that of the completions kept",
            "set it to 1.0",
        ),
        (
            "entropy_coef",
            args.entropy_coef,
            args.entropy_coef != 0.0,
            f"the bonus {own}",
            "set it to 0.0",
        ),
        (
            "use_adaptive_entropy",
            True,
            args.use_adaptive_entropy,
            f"the bonus {own}",
            "set it to False",
        ),
        (
            "router_aux_loss_coef",
            trainer.router_aux_loss_coef,
            trainer.aux_loss_enabled,
            "the load-balancing loss is not a sum over completions",
            "set it to 0.0",
        ),
    ):
        if biased:
            raise UserError(
                setting, value, f"under pruning the gradient would be biased: {problem}", remedy
            )
