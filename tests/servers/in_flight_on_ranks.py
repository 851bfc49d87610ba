"""What ranks run against servers that have requests in flight when an update comes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import Completions, Sampling
from megatron_dppo.rollout.servers.launch import SECRET
from tests.servers.on_ranks import PROMPTS, SAMPLES, Rig, prompt_of

LONG = 256
"""Tokens of a completion that an update finds unfinished."""


def in_flight(rank: int, size: int, settings: Sequence[str], secret: str) -> dict[str, Any]:
    """Rollouts that an update finds unfinished: the first such of a few, since a server may be done before the update.

    Returns:
        On the leader: how many samples there are of each prompt; the versions of each completion's tokens, 0 before the
        update and 1 after it; the mean |log p| difference to the actor, with the weights after the update, of tokens
        that say they were made by them, NaN without any.
    """
    os.environ[SECRET] = secret
    rig = Rig(settings)
    try:
        rig.sync(0)
        for old in range(5):
            found = _updated_in_flight(rig, rank, size, old)
            if (0, 1) in found["versions"]:
                break
    finally:
        rig.engine.close()
    return found


def _updated_in_flight(rig: Rig, rank: int, size: int, old: int) -> dict[str, Any]:
    prompts = [prompt_of(i) for i in range(PROMPTS)][rank::size]
    rig.change(1.03)
    half, sampling = len(prompts) // 2, Sampling(SAMPLES, LONG, 1.0, (), seed=3)
    pending = [rig.engine.begin(prompts[:half], sampling)]
    rig.world.wait_for_all("beginning")
    # Once a prompt that was asked later has some tokens, those have some, too, however busy the machine is.
    later = [prompt_of(PROMPTS)], Sampling(1, LONG // 8, 1.0, (), seed=3)
    rig.world.from_leader(lambda: rig.engine.begin(*later).wait(60.0))
    pending.append(rig.engine.begin(prompts[half:], sampling))  # the pause finds these arriving
    rig.sync(old + 1)
    groups = [group for batch in pending for group in rig.engine.finish(batch)]
    versions = [tuple(span.version - old for span in c.versions) for group in groups for c in group]
    difference = _after_the_update(rig, prompts, groups)
    parts = rig.world.gather(([len(group) for group in groups], versions))
    return {
        "samples": [count for part in parts for count in part[0]],
        "versions": [each for part in parts for each in part[1]],
        "difference": difference,
    }


def _after_the_update(rig: Rig, prompts: Sequence[Prompt], groups: Completions) -> float:
    """Mean |log p| difference of actor and engine, of tokens that say they were made by the new weights. Collective."""
    mine = [
        (prompt, completion)
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
        if len(completion.versions) == 2
    ]
    mixed = [each for part in rig.world.gather(mine[:4]) for each in part]
    if not mixed:
        return float("nan")
    packs = [
        build_pack(
            [TrainingSample(prompt.token_ids, c.token_ids, c.logprobs, c.loss_mask, 0.0, 0.0, version=0)],
            capacity=len(prompt.token_ids) + len(c.token_ids),
            pad_id=0,
            align=1,
        )
        for prompt, c in mixed
    ]
    scores = rig.policy.actor.log_probabilities(packs)
    differences = [
        np.abs(score - completion.logprobs)[completion.versions[0].count :]
        for (_, completion), score in zip(mixed, scores, strict=True)
    ]
    return float(np.concatenate(differences).mean())
