"""Law 5: after a sync, every server's log-probabilities are the actor's, and its tokens say so by their version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.packing import pack_sequences
from megatron_dppo.rl.seeds import Purpose, sequence
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.engine import RolloutEngine, Sampling
from megatron_dppo.trainer.assemble import PolicyParts
from megatron_dppo.trainer.disagreement import Compared, check_disagreement

PROMPTS, SAMPLES, MAX_TOKENS = 4, 2, 32
"""What every server is asked: so many prompts, of so many completions, of so many tokens each."""
Stats = dict[str, tuple[float, float, float]]
"""Mean and largest |Δ log p|, and mean exp |Δ log p|, by server."""


def check_agreement(
    policy: PolicyParts, engine: RolloutEngine[Any], pool: Sequence[Prompt], *, version: int
) -> dict[str, float]:
    """Hold completions of every server against the actor. Collective; nothing that training depends on changes.

    Args:
        policy: whose weights the engine was given last.
        engine: with them.
        pool: prompts; others of them are taken for each version.
        version: of that sync.

    Returns:
        ``rollout/agreement_max_diff`` and ``rollout/agreement_mean_diff``, of the server that is furthest off.

    Raises:
        UserError: on every rank, if a server is further from the actor than precision explains, or generates with
            other weights by its own account. The message names it.
    """
    config, world = policy.config, policy.world
    count = min(PROMPTS, len(pool))
    prompts = [pool[(version * count + i) % len(pool)] for i in range(count)]
    sampling = Sampling(
        samples=SAMPLES,
        max_tokens=min(MAX_TOKENS, config.rollout.max_response_tokens),
        temperature=config.rollout.temperature,
        stop_token_ids=policy.stop_ids,
        seed=int(sequence(config.run.seed, version, Purpose.AGREEMENT).generate_state(1)[0]),
    )
    answers = [
        Compared(
            source=server,
            prompt_ids=prompt.token_ids,
            response_ids=completion.token_ids,
            trainer=np.zeros(0, np.float32),
            engine=completion.logprobs,
            versions=tuple(span.version for span in completion.versions),
        )
        for server, groups in engine.sample_each(prompts, sampling).items()
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]
    _check_versions(answers, version, config.rollout.engine)
    compared = _scored(policy, answers)
    parts = [stats for stats in world.gather(_stats(compared)) if stats]
    if not parts:
        return {}
    worst = {server: tuple(np.max([stats[server] for stats in parts], axis=0).tolist()) for server in parts[0]}
    for server, (mean, _, error) in worst.items():
        check_disagreement(
            config,
            world,
            who=f"the server {server}",
            when=f"after the sync to version {version}",
            difference=mean,
            error=error,
            compared=partial(_from, compared, server),
            name=f"sync_{version:07d}",
        )
    means, largest, _ = zip(*worst.values(), strict=True)
    return {"rollout/agreement_mean_diff": max(means), "rollout/agreement_max_diff": max(largest)}


def _from(compared: Sequence[Compared], server: str) -> list[Compared]:
    return [each for each in compared if each.source == server]


def _check_versions(answers: Sequence[Compared], version: int, engine: str) -> None:
    for each in answers:
        if set(each.versions) != {version}:
            raise UserError(
                "rollout.engine",
                engine,
                f"the server {each.source} was given weights of version {version}, and says that version "
                f"{', '.join(map(str, each.versions))} made its tokens",
                "See whether somebody else sends it weights; another value of rollout.sync.transport may reach it",
            )


def _scored(policy: PolicyParts, answers: Sequence[Compared]) -> list[Compared]:
    """The answers with the actor's log-probabilities, on one rank of each replica; none on the others."""
    config, world, layout = policy.config, policy.world, policy.config.layout
    if not answers:
        return []
    packing = pack_sequences(
        np.array([len(each.prompt_ids) + len(each.response_ids) for each in answers]),
        ranks=1,  # every replica has the whole policy, and does the same
        max_tokens=config.pack.max_tokens,
        align=layout.row_multiple,
        capacity_multiple=world.capacity_multiple(layout, config.pack.max_tokens),
        window=config.pack.window,
    )
    packs = [
        build_pack([_row(answers[i]) for i in rows], packing.capacity, policy.pad_id, align=layout.row_multiple)
        for rows in packing.packs[0]
    ]
    logprobs = policy.actor.log_probabilities(packs)
    if world.tp_rank or world.cp_rank:
        return []
    return [
        replace(answers[i], trainer=scores[pack.sample == row])
        for rows, pack, scores in zip(packing.packs[0], packs, logprobs, strict=True)
        if scores is not None
        for row, i in enumerate(rows)
    ]


def _row(each: Compared) -> TrainingSample:
    return TrainingSample(
        prompt_ids=each.prompt_ids.astype(np.int32),
        response_ids=each.response_ids.astype(np.int32),
        engine_logprobs=each.engine,
        loss_mask=np.ones(len(each.response_ids), bool),
        advantage=0.0,
        scale=0.0,
        version=min(each.versions),
    )


def _stats(compared: Sequence[Compared]) -> Stats:
    stats: Stats = {}
    for server in dict.fromkeys(each.source for each in compared):
        differences = np.concatenate([each.differences for each in compared if each.source == server])
        error = np.exp(np.minimum(differences, 50.0)).mean()
        stats[server] = (float(differences.mean()), float(differences.max()), float(error))
    return stats
