"""Pruning of completions in verl 0.9: the actor trains on a weighted random part of a step's batch.

An environment variable makes verl import this module, which registers each of verl's trainers
with pruning as a ``trainer.v1.trainer_mode``, under verl's name after ``pruned_``::

    VERL_USE_EXTERNAL_MODULES=megatron_dppo.integrations.verl python -m verl.trainer.main_ppo \\
        trainer.v1.trainer_mode=pruned_sync +pruning.budget=0.5 ...

- The draw comes between verl's ``_compute_advantage`` and ``_update_actor``.
- A row's weight multiplies its advantages; the losses in ``PROPORTIONAL`` are proportional to them.
- Mini-batches shrink; the divisor ``global_batch_size`` stays.
- Log-probabilities and metrics still refer to the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.utils import need_critic
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from megatron_dppo.errors import UserError
from megatron_dppo.integrations.settings import Pruning
from megatron_dppo.rl.pruning import prune
from megatron_dppo.rl.types import Floats, Ints

PROPORTIONAL = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo", "bypass_mode")
"""Values of ``policy_loss.loss_mode`` with a row's loss proportional to its advantages, independent
of other rows."""


class Rows(NamedTuple):
    """Rows of a step in the driver's order, with N = ranks · mini-batches · rows per mini-batch and
    rank, and T tokens of a padded response.
    """

    groups: list[str]
    """[N], prompt of each row."""
    tokens: Ints
    """[N], tokens of prompt and response."""
    counted: Ints
    """[N], tokens in the divisor of ``token-mean``."""
    mask: torch.Tensor
    """[N, T], mask of the tokens in the loss."""
    advantages: torch.Tensor
    """[N, T]"""
    logprobs: torch.Tensor
    """[N, T], at sampling."""


class Draw(NamedTuple):
    """Rows for the actor: each rank's rows of all mini-batches, in verl's order of splitting."""

    order: Ints
    """[n], indices in the batch."""
    weights: Floats
    """[n], factors of the advantages; 0 for rows that only fill a mini-batch."""
    mini_batch: int
    """Rows of a mini-batch, over all ranks."""
    metrics: dict[str, float]


def draw_rows(
    rows: Rows,
    config: DictConfig,
    pruning: Pruning,
    *,
    ranks: int,
    step: list[int],
) -> Draw:
    """Draw the rows of a step.

    - A row stays in its mini-batch.
    - All mini-batches get the row count of the largest: the shortest rows that were not drawn fill
      smaller mini-batches, with weight 0.

    Args:
        rows: rows of the whole batch, balanced over ranks by verl.
        ranks: data-parallel size of the actor.
        step: seeds of the draw.
    """
    actor = config.actor_rollout_ref.actor
    samples = config.actor_rollout_ref.rollout.n
    # verl aggregates the sapo loss this way, regardless of loss_agg_mode.
    aggregation = (
        "seq-mean-token-mean" if actor.policy_loss.loss_mode == "sapo" else actor.loss_agg_mode
    )
    mask = rows.mask.bool()
    lengths = np.maximum(mask.sum(1).numpy(), 1)
    masked = torch.where(mask, rows.advantages, 0.0).double()
    # A row's advantage for the draw: root mean square over tokens, with the sign of the sum.
    sizes = np.sqrt((masked**2).sum(1).numpy() / lengths)
    advantages = np.where(masked.sum(1).numpy() < 0.0, -sizes, sizes)
    _, groups = np.unique(rows.groups, return_inverse=True)

    whole = actor.ppo_mini_batch_size * samples
    mini_batches = (
        np.arange(len(lengths)).reshape(ranks, -1, whole // ranks).swapaxes(0, 1).reshape(-1, whole)
    )
    weights = np.zeros(len(lengths))
    # Draw per mini-batch: updates on earlier draws have moved the parameters, and a draw must be
    # independent of the parameters.
    for number, members in enumerate(mini_batches):
        # Neighbours are rarely kept together: this order spreads the draw over prompts.
        members = members[np.lexsort((advantages[members], groups[members]))]
        column = members[:, None]
        logprobs: list[list[Any]] = []
        for row in members:
            own = rows.logprobs[row][mask[row]].double().numpy()
            logprobs.append([own if len(own) else [0.0]])
        kept = prune(
            lengths[column],
            np.zeros(column.shape),
            logprobs,
            pruning.budget,
            advantages=advantages[column],
            prompt_lengths=(rows.tokens - lengths)[members],
            rule=pruning.rule,
            sequence_mean=aggregation == "seq-mean-token-mean",
            max_weight=pruning.max_weight,
            seed=[pruning.seed, *step, number],
        )
        weights[members] = kept.weights[:, 0]

    multiple = ranks * _compute_row_multiple(actor)
    # The actor takes a single mini-batch size for the whole step.
    most = max(int((weights[mini_batches] > 0.0).sum(axis=1).max()), 1)
    mini_batch = min(math.ceil(most / multiple) * multiple, whole)
    parts: list[list[Ints]] = []
    metrics = {
        "prune/kept_completion_fraction": float((weights > 0.0).mean()),
        "prune/kept_token_fraction": float(rows.tokens[weights > 0.0].sum() / rows.tokens.sum()),
        "prune/max_weight": float(weights.max()),
    }
    for members in mini_batches:
        # Drawn rows first, then the shortest remaining rows.
        sent = members[np.lexsort((rows.tokens[members], weights[members] == 0.0))][:mini_batch]
        # The loss divides by the tokens sent: correct to the tokens of the whole mini-batch.
        if aggregation == "token-mean":
            weights[sent] *= rows.counted[sent].sum() / rows.counted[members].sum()
        shares = get_seqlen_balanced_partitions(
            rows.tokens[sent].tolist(), k_partitions=ranks, equal_size=True
        )
        parts.append([sent[share] for share in shares])
    order = np.concatenate([part[rank] for rank in range(ranks) for part in parts])
    return Draw(order, weights[order], mini_batch, metrics)


def _compute_row_multiple(actor: DictConfig) -> int:
    """Return the required divisor of a rank's rows in a mini-batch."""
    megatron = actor.get("megatron") or {}
    stages = (
        megatron["pipeline_model_parallel_size"]
        if megatron.get("virtual_pipeline_model_parallel_size")
        else 1
    )
    return int(stages * (1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu))


def read_pruning_settings(config: DictConfig) -> Pruning:
    """Read ``pruning`` from verl's configuration.

    Raises:
        UserError: a setting of ``pruning`` is wrong, or a setting of verl biases the gradient.
    """
    given = dict(config.get("pruning") or {})
    known = [field.name for field in fields(Pruning)]
    for name in given:
        if name not in known:
            raise UserError(
                f"pruning.{name}", given[name], "is no setting", f"Choose from {', '.join(known)}"
            )
    pruning = Pruning(**given)
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    model = config.actor_rollout_ref.model
    mode = actor.policy_loss.loss_mode
    corrections = [
        section.get("rollout_correction") or {} for section in (algorithm, actor.policy_loss)
    ]
    bypassed = mode == "bypass_mode" or corrections[0].get("bypass_mode")
    normalised = bypassed and any(
        correction.get("rollout_is_batch_normalize") for correction in corrections
    )
    unscaled = actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None
    its_term = "adds a term to the loss that no weight reaches"
    refused = [
        (pruning.rule != "neyman", "pruning.rule", pruning.rule,
         "is not available here", "Set it to neyman"),
        (need_critic(config), "algorithm.adv_estimator", algorithm.adv_estimator,
         "trains a critic, which is not pruned",
         "Choose an estimator without a critic, such as grpo"),
        (actor.use_kl_loss, "actor.use_kl_loss", True,
         its_term, "Set algorithm.use_kl_in_reward=true in its place"),
        (actor.entropy_coeff != 0.0, "actor.entropy_coeff", actor.entropy_coeff,
         its_term, "Set it to 0"),
        ((config.get("distillation") or {}).get("enabled"), "distillation.enabled", True,
         its_term, "Set it to false"),
        ((model.get("mtp") or {}).get("enable_train"), "model.mtp.enable_train", True,
         its_term, "Set it to false"),
        (mode not in PROPORTIONAL, "actor.policy_loss.loss_mode", mode,
         "is not known to be proportional to advantages",
         f"Choose from {', '.join(PROPORTIONAL)}"),
        (normalised, "rollout_correction.rollout_is_batch_normalize", True,
         "normalises over a micro-batch, whose rows are drawn", "Set it to false"),
        (unscaled, "actor.loss_scale_factor", None,
         "divides by the longest response of a micro-batch",
         "Set it to data.max_response_length"),
        (actor.ppo_epochs != 1, "actor.ppo_epochs", actor.ppo_epochs,
         "trains several times on one draw",
         "Set it to 1, and actor.ppo_mini_batch_size lower for more updates"),
        (actor.shuffle, "actor.shuffle", True,
         "moves rows to other mini-batches after the draw", "Set it to false"),
    ]  # fmt: skip
    for wrong, setting, value, problem, remedy in refused:
        if wrong:
            raise UserError(setting, value, problem, remedy)
    return pruning


@contextmanager
def _override_mini_batch_size(workers: Any, rows: int) -> Iterator[None]:
    """Make the actor's workers use ``rows`` rows per mini-batch."""
    # verl's ``_update_actor`` sets another number.
    update = workers.update_actor

    def update_with(batch: Any) -> Any:
        if isinstance(batch, tq.KVBatchMeta):
            batch.extra_info["mini_batch_size"] = rows
        else:
            tu.assign_non_tensor(batch, mini_batch_size=rows)
        return update(batch)

    workers.update_actor = update_with
    try:
        yield
    finally:
        workers.update_actor = update


def _count_ranks(workers: Any) -> int:
    ranks = workers._dispatch_info.get("actor") or workers._query_dispatch_info("actor")
    return int(max(ranks)) + 1


class PrunedTrainer(PPOTrainer):
    """Mixin for a trainer of verl's v1: ``class Mine(PrunedTrainer, PPOTrainerSync)``.

    Raises:
        UserError: see :func:`read_pruning_settings`.
    """

    def __init__(self, config: DictConfig) -> None:
        self.pruning = read_pruning_settings(config)
        # verl chooses its replay buffer and its section of settings by this name.
        config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removeprefix("pruned_")
        super().__init__(config)

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        names = ["uid", "response_mask", "loss_mask", "advantages", "old_log_probs"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=names
        )
        groups = data.pop("uid").tolist()
        advantages = data["advantages"].unbind()
        padded = data.to_padded_tensor()
        rows = Rows(
            groups,
            np.array([tag["seq_len"] for tag in batch.tags]),
            padded["loss_mask"].sum(1).numpy(),
            padded["response_mask"],
            padded["advantages"],
            padded["old_log_probs"],
        )
        workers = self.actor_rollout_wg
        step = [self.global_steps, self.local_trigger_step]
        drawn = draw_rows(rows, self.config, self.pruning, ranks=_count_ranks(workers), step=step)
        metrics.update(drawn.metrics)
        sent = batch.select_keys([batch.keys[row] for row in drawn.order])
        own = [advantages[row] for row in drawn.order]
        _put_advantages(
            sent, [row * weight for row, weight in zip(own, drawn.weights.tolist(), strict=True)]
        )
        with _override_mini_batch_size(workers, drawn.mini_batch):
            super()._update_actor(sent, metrics)
        # verl's metrics use the unweighted advantages.
        _put_advantages(sent, own)
        return batch


def _put_advantages(batch: Any, advantages: list[torch.Tensor]) -> None:
    nested = torch.nested.as_nested_tensor(advantages, layout=torch.jagged)
    values = TensorDict({"advantages": nested}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=values)


@register_trainer("pruned_sync")
class PrunedPPOTrainerSync(PrunedTrainer, PPOTrainerSync):
    """verl's synchronous trainer, with pruning."""


@register_trainer("pruned_colocate_async")
class PrunedPPOTrainerColocateAsync(PrunedTrainer, PPOTrainerColocateAsync):
    """verl's asynchronous trainer with rollouts on the policy's GPUs, with pruning."""


@register_trainer("pruned_separate_async")
class PrunedPPOTrainerSeparateAsync(PrunedTrainer, PPOTrainerSeparateAsync):
    """verl's asynchronous trainer with rollouts on separate GPUs, with pruning."""


class PrunedRayPPOTrainer(RayPPOTrainer):
    """verl's legacy trainer (``trainer.use_v1=false``), with pruning, which no setting selects:
    construct it in a script."""

    def __init__(self, config: DictConfig, *args: Any, **options: Any) -> None:
        self.pruning = read_pruning_settings(config)
        super().__init__(config, *args, **options)

    def _update_actor(self, batch: DataProto) -> DataProto:
        mask = batch.batch["response_mask"]
        rows = Rows(
            batch.non_tensor_batch["uid"].tolist(),
            batch.batch["attention_mask"].sum(1).numpy(),
            mask.sum(1).numpy(),
            mask,
            batch.batch["advantages"],
            batch.batch["old_log_probs"],
        )
        workers = self.actor_rollout_wg
        drawn = draw_rows(
            rows, self.config, self.pruning, ranks=_count_ranks(workers), step=[self.global_steps]
        )
        sent = batch.select_idxs(drawn.order)
        sent.batch["advantages"] = (
            sent.batch["advantages"] * torch.from_numpy(drawn.weights)[:, None]
        ).float()
        with _override_mini_batch_size(workers, drawn.mini_batch):
            output = super()._update_actor(sent)
        output.meta_info["metrics"].update({name: [value] for name, value in drawn.metrics.items()})
        return output
