"""Plan of a step: trained completions, weights and packs.

The plan is a pure function of metadata, configuration and step, made on one rank for all ranks, so
that no decision depends on the distribution of tokens over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.rl.advantages import find_estimator
from megatron_dppo.rl.objectives import Objective, resolve_objective
from megatron_dppo.rl.pack import count_common_tokens, expand_prompt_lengths, select_shared_lengths
from megatron_dppo.rl.packing import (
    HIDDEN,
    Packing,
    compute_pack_metrics,
    pack_sequences,
    resolve_min_packs,
)
from megatron_dppo.rl.pruning.completion_rules import find_completion_rule
from megatron_dppo.rl.pruning.draw import (
    PruningDraw,
    compute_prune_metrics,
    compute_pruning_stats,
    make_empty_draw,
    prune_minibatch,
)
from megatron_dppo.rl.pruning.prompt_rules import find_prompt_rule
from megatron_dppo.rl.pruning.schedule import (
    compute_window_size,
    find_nonzero_variance_groups,
    scheduled_keep,
    uses_resampling,
)
from megatron_dppo.rl.seeds import Purpose, make_generator
from megatron_dppo.rl.sequences import make_empty_lengths, pad_to_longest, sort_sequences
from megatron_dppo.rl.trees import find_biased_settings
from megatron_dppo.rl.types import (
    Ints,
    MinibatchPlan,
    Selection,
    StepMetadata,
    StepPlan,
    make_empty_segments,
)

ARRAYS = [field.name for field in fields(StepMetadata) if field.name not in ("window", "parts")]
"""Fields of StepMetadata with a value for each group."""


def build_default_fields(prompt_lengths: Ints, samples: int) -> dict[str, Any]:
    """Return default StepMetadata fields for groups of ``samples`` completions of one sequence.

    A group shares the prompt, without tree, roles, teacher or truncated completions.

    Args:
        prompt_lengths: [Q], tokens.
        samples: completions per group.
    """
    prompts = len(prompt_lengths)
    shape = (prompts, samples)
    return {
        "shared_lengths": expand_prompt_lengths(prompt_lengths, samples),
        "further_lengths": make_empty_lengths(shape),
        "log_ratios": np.zeros((*shape, 2)),
        "teacher": np.full(prompts, -1),
        "segments": make_empty_segments(shape),
        "truncated": np.zeros(shape, np.bool_),
    }


def plan_step(
    metadata: StepMetadata,
    config: Config,
    *,
    replicas: int,
    align: int,
    capacity_multiple: int,
    step: int,
    pipeline: int,
    hidden: float = HIDDEN,
    prompts: Sequence[NDArray[np.int32]] = (),
) -> StepPlan:
    """Plan one step: split it into minibatches; prune, weigh and pack each.

    Args:
        metadata: all groups that were rolled out and scored.
        config: configuration of the run.
        replicas: data-parallel replicas.
        align: padding multiple of a sequence in a pack (tensor and context parallelism).
        capacity_multiple: divisor of a pack's capacity (sequence parallelism).
        step: index from 0; with ``run.seed``, the seed of every draw.
        pipeline: pipeline stages; several stages need several packs.
        hidden: hidden size of the policy, used to balance replicas.
        prompts: tokens of each group's prompt, so that packs store common beginnings once,
            such as a system message; empty: prompts share no tokens.

    Raises:
        UserError: a kept sequence is longer than ``pack.max_tokens``.
    """
    objective = resolve_objective(config.loss)
    pack = partial(
        pack_sequences,
        ranks=replicas,
        max_tokens=config.pack.max_tokens,
        share=config.pack.share_prefixes,
        align=align,
        capacity_multiple=capacity_multiple,
        window=config.pack.window,
        hidden=hidden,
        min_per_rank=resolve_min_packs(config.pack.min_per_rank, pipeline),
        least_per_rank=config.layout.min_packs,
    )
    # With resampling, groups without variance are not trained on.
    usable = (
        find_nonzero_variance_groups(metadata, config)
        if uses_resampling(config.pruning)
        else np.arange(len(metadata.prompt_ids))
    )
    parts: list[tuple[StepMetadata, PruningDraw]] = []
    packings: list[Packing] = []
    minibatches: list[MinibatchPlan] = []
    for groups, part, pruned in draw_minibatches(metadata, usable, config, objective, step):
        drawn = build_minibatch_plan(part, groups, pruned)
        packing = pack(
            drawn.lengths,
            shared=drawn.shared_length,
            between=compute_prompt_overlaps(drawn, prompts),
        )
        shared = np.array(packing.shared, np.int64)
        parts.append((part, pruned))
        packings.append(packing)
        minibatches.append(
            replace(drawn, shared_length=shared, capacity=packing.capacity, packs=packing.packs)
        )
    discarded = np.setdiff1d(np.arange(len(metadata.prompt_ids)), usable)
    # Discarded groups count in the metrics, with an empty draw.
    if len(discarded):
        rest = select_groups(metadata, discarded)
        parts.append((rest, make_empty_draw(rest)))
    biased = bool(find_prompt_rule(config.pruning.prompts.named).biased)
    return StepPlan(
        minibatches=tuple(minibatches),
        metrics=compute_prune_metrics(metadata.window, parts, biased_prompts=biased)
        | {"prune/discarded_groups": float(len(discarded))}
        | compute_pack_metrics(packings),
        notes=tuple(
            build_notes(metadata, config, objective, minibatches, num_usable=len(usable), step=step)
        ),
        census=compute_pruning_stats(parts),
    )


def draw_minibatches(
    metadata: StepMetadata,
    usable_groups: Ints,
    config: Config,
    objective: Objective,
    step: int,
) -> Iterator[tuple[Ints, StepMetadata, PruningDraw]]:
    """Yield minibatches of ``usable_groups``: indices in ``metadata``, metadata, pruning draw."""
    pruning = config.pruning.completions
    keep = scheduled_keep(pruning.share, pruning.schedule, step, config.run.steps)
    draws = make_generator(config.run.seed, step, Purpose.COMPLETIONS)
    split = make_generator(config.run.seed, step, Purpose.MINIBATCHES)
    count = max(1, min(config.loss.updates_per_rollout, len(usable_groups)))
    for groups in split_groups(usable_groups, count, split):
        part = select_groups(metadata, groups)
        yield groups, part, prune_minibatch(part, config, objective, keep=keep, rng=draws)


def split_groups(groups: Ints, minibatches: int, rng: np.random.Generator) -> list[Ints]:
    """Partition groups at random into ascending parts of equal size, to within one."""
    if minibatches == 1:
        return [groups]
    return [np.sort(part) for part in np.array_split(rng.permutation(groups), minibatches)]


def select_groups(metadata: StepMetadata, groups: Ints) -> StepMetadata:
    """Return the metadata of ``groups``, with a part of the window."""
    # Proportional to the rolled-out groups, so that the expectation of each minibatch over the
    # permutation equals the estimate of the whole window, even for unequal minibatches.
    arrays = {name: getattr(metadata, name)[groups] for name in ARRAYS}
    parts = {name: values[groups] for name, values in metadata.parts.items()}
    return StepMetadata(
        **arrays,
        window=metadata.window * len(groups) / max(1, len(metadata.prompt_ids)),
        parts=parts,
    )


def build_minibatch_plan(part: StepMetadata, groups: Ints, draw: PruningDraw) -> MinibatchPlan:
    """Return the plan of a minibatch without packs: kept sequences with factors.

    Args:
        part: metadata of the minibatch.
        groups: [Q], index of each group in the step's metadata.
        draw: pruning draw of the minibatch.
    """
    group, completion = np.nonzero(draw.kept)
    further = part.further_lengths[group, completion]
    response = part.response_lengths[group, completion]
    first = response - further.sum(axis=1)
    # A completion of one sequence has a sample, even without a token.
    begins = (first > 0) | ~further.any(axis=1)
    shared = np.zeros(len(group), np.int64)
    shared[begins] = select_shared_lengths(part.shared_lengths, group[begins], completion[begins])
    rows, sequence = sort_sequences(np.column_stack([begins, further]), group, completion)
    group = group[rows]
    completion = completion[rows]
    later = sequence > 0
    weight = draw.weight[group, completion]
    # The first token of a further sequence replaces the prompt.
    lengths = np.column_stack([first, further - 1])[rows]
    return MinibatchPlan(
        group=groups[group],
        completion=completion,
        sequence=sequence,
        owner=part.owners[group],
        version=part.versions[group, completion],
        prompt_length=np.where(later, 1, part.prompt_lengths[group]),
        response_length=lengths[np.arange(len(rows)), sequence],
        shared_length=np.where(later, 0, shared[rows]),
        advantage=draw.segments[group, completion],
        teacher=part.teacher[group],
        weight=weight,
        scale=weight * draw.coefficient[group, completion] / draw.normaliser,
        normaliser=draw.normaliser,
    )


def compute_prompt_overlaps(samples: MinibatchPlan, prompts: Sequence[NDArray[np.int32]]) -> Ints:
    """Return the tokens [K] that the prompt of a group's first sample shares with the previous
    prompt."""
    between = np.zeros(len(samples.group), np.int64)
    # Further sequences begin with a context of the conversation, and not with the prompt.
    first_sequences = (samples.sequence[1:] == 0) & (samples.sequence[:-1] == 0)
    starts = np.flatnonzero((samples.group[1:] != samples.group[:-1]) & first_sequences) + 1
    for k in starts.tolist() if len(prompts) else ():
        between[k] = count_common_tokens(prompts[samples.group[k - 1]], prompts[samples.group[k]])
    return between


def build_notes(
    metadata: StepMetadata,
    config: Config,
    objective: Objective,
    minibatches: Sequence[MinibatchPlan],
    *,
    num_usable: int,
    step: int,
) -> Iterator[str]:
    """Yield log messages of a step with ``num_usable`` groups that may be trained on."""
    pruning = config.pruning
    prompt_rule = find_prompt_rule(pruning.prompts.named)
    completion_rule = find_completion_rule(pruning.completions.named)
    has_pruned_prompts = bool((metadata.prompt_inclusion < 1.0).any())
    for level, rule, biased in (
        ("prompts", pruning.prompts.rule, prompt_rule.biased),
        ("completions", pruning.completions.rule, completion_rule.biased),
    ):
        if biased:
            yield f"pruning.{level}.rule = {rule} is biased: {biased}"
    for setting, why in find_biased_settings(config.rollout.tree):
        yield f"{setting} is biased: {why}"
    if config.rollout.roles:
        yield (
            "rollout.roles: each role has the gradient of its own reward by its own tokens, with "
            "the other roles as a changing environment: the sum is not the gradient of one "
            "objective"
        )
    if objective.aggregation == "token_mean" and has_pruned_prompts:
        yield (
            f"loss.name = {objective.name} divides by the tokens of all prompts, which are "
            "estimated if prompts are pruned: the gradient has a bias of O(1/prompts), which grpo "
            "and dr_grpo do not have"
        )
    if find_estimator(objective.advantage).batch_moments and has_pruned_prompts:
        yield (
            f"advantages by {objective.advantage} with pruned prompts: the minibatch's moments, "
            "by which rewards become advantages, are estimated, and the gradient is a ratio (bias "
            "O(1/prompts))"
        )
    # The factor 1 + 1e-9 allows for rounding.
    heaviest = max(minibatch.weight.max(initial=0.0) for minibatch in minibatches)
    if heaviest > pruning.max_weight * (1.0 + 1e-9) and not completion_rule.biased:
        yield (
            f"a weight of {heaviest:.2f} exceeds pruning.max_weight = {pruning.max_weight:g}: "
            "its prompt was kept with a probability below 1/max_weight"
        )
    for number, minibatch in enumerate(minibatches, start=1):
        if minibatch.capacity == 0:
            place = f" of minibatch {number} of {len(minibatches)}" if len(minibatches) > 1 else ""
            yield f"nothing{place} was kept: no optimizer step"
    if uses_resampling(pruning) and num_usable < compute_window_size(config):
        yield (
            "a step trains on fewer groups than its window has prompts: no more groups of "
            f"non-zero variance were found in pruning.max_rounds = {pruning.max_rounds} rounds, or "
            "in the whole pool"
        )


def compute_remaining_window(selection: Selection, parts: Sequence[StepMetadata]) -> float:
    """Return N of a selection without the prompts whose scoring failed.

    Args:
        selection: all prompts that were requested.
        parts: one per rank, without the failed prompts.
    """
    if sum(len(part.prompt_ids) for part in parts) == len(selection.prompt_ids):
        return float(selection.window)
    left = sum((1.0 / part.prompt_inclusion).sum() for part in parts)
    # A fraction, because N minus the failed prompts' Σ 1/π could reach zero: the kept prompts' Σ
    # 1/π equals N in expectation only.
    return float(selection.window * left / (1.0 / selection.inclusion).sum())


def gather_metadata(parts: Sequence[StepMetadata], *, window: float) -> StepMetadata:
    """Return the metadata of all ranks as one, sorted by prompt id.

    Args:
        parts: one per rank, in the order of ranks; parts may have no group.
        window: N of the whole step; the windows of ``parts`` are not used.
    """
    parts = [part for part in parts if len(part.prompt_ids)] or list(parts[:1])
    # Sort by prompt id, so that the plan does not depend on the assignment of groups to ranks.
    order = np.argsort(np.concatenate([part.prompt_ids for part in parts]), kind="stable")
    columns = {}
    for name in ARRAYS:
        columns[name] = [getattr(part, name) for part in parts]
    columns["further_lengths"] = pad_to_longest(columns["further_lengths"])
    names = sorted({name for part in parts for name in part.parts})
    metrics = {}
    # A metric is NaN on ranks that did not report the metric.
    for name in names:
        values = [part.parts.get(name, np.full(part.rewards.shape, np.nan)) for part in parts]
        metrics[name] = np.concatenate(values)[order]
    return StepMetadata(
        **{name: np.concatenate(values)[order] for name, values in columns.items()},
        window=window,
        parts=metrics,
    )
