"""Sends a minibatch's tokens from the ranks that generated them to the ranks that train on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_dppo.parallel.world import World
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.sequences import split_prompt_and_response
from megatron_dppo.rl.types import (
    Completion,
    Floats,
    Group,
    Ints,
    MinibatchPlan,
    Routing,
    RoutingShape,
)


def exchange_samples(
    world: World,
    plan: MinibatchPlan,
    groups: Mapping[int, Group],
    routing: RoutingShape | None = None,
    layers: Sequence[Ints] = (),
) -> list[list[TrainingSample]]:
    """Send the training samples of a minibatch to their replicas. Collective over all ranks.

    Args:
        world: this rank's place.
        plan: the same on every rank.
        groups: the groups that this rank generated, by their index in the step's metadata.
        routing: shape of the samples' routing; None: samples are sent without routing.
        layers: by rank, the layers whose routing the rank gets, ascending: those of its pipeline
            stage.

    Returns:
        The samples of each pack that this rank trains on, in the plan's order.
    """
    outgoing = []
    for rank, replica in enumerate(world.replica_of):
        wanted = [k for pack in plan.packs[replica] for k in pack if plan.owner[k] == world.rank]
        of_rank = layers[rank] if routing is not None else None
        outgoing.append({k: _build_sample(plan, k, groups, routing, of_rank) for k in wanted})
    received = {k: sample for samples in world.exchange(outgoing) for k, sample in samples.items()}
    return [[received[k] for k in pack] for pack in plan.packs[world.dp_rank]]


def _build_sample(
    plan: MinibatchPlan,
    k: int,
    groups: Mapping[int, Group],
    routing: RoutingShape | None,
    layers: Ints | None,
) -> TrainingSample:
    """Return sample ``k`` with its tokens, and with its routing in ``layers``."""
    group = groups[int(plan.group[k])]
    completion = group.completions[int(plan.completion[k])]
    prompt, of = split_prompt_and_response(
        group.prompt.token_ids, completion, int(plan.sequence[k])
    )
    table: Routing | None = None
    if routing is not None:
        if completion.routing is None:
            raise ValueError(
                "a completion without routing is to be trained on with loss.replay_routing = "
                "rollout"
            )
        read = len(prompt) + len(completion.token_ids[of]) - 1  # no engine reads the last token
        table = completion.routing[:read, layers].astype(routing.dtype)
    return TrainingSample(
        prompt_ids=prompt,
        response_ids=completion.token_ids[of],
        engine_logprobs=completion.logprobs[of],
        teacher_logprobs=None
        if completion.teacher_logprobs is None
        else completion.teacher_logprobs[of],
        loss_mask=completion.loss_mask[of],
        advantage=_select_advantages(plan.advantage[k], completion, of),
        scale=float(plan.scale[k]),
        version=int(plan.version[k]),
        shared=int(plan.shared_length[k]),
        routing=table,
    )


def _select_advantages(advantage: Floats, completion: Completion, span: slice) -> Floats | float:
    """Return the advantages of some of a completion's tokens: of their segments, or each its own,
    or one of all."""
    if completion.segments is not None:
        return advantage[completion.segments[span]]
    return advantage[span] if len(advantage) > 1 else float(advantage[0])
