"""Law 5: after a sync, the engine's log-probabilities are the actor's, and the versions of the
tokens show the sync.

Defines the largest allowed difference, and the evidence stored beyond the limit. The import needs
no torch, because a report reads the limits.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.rl.pack import TrainingSample, find_path
from megatron_dppo.rl.seeds import Purpose, derive_engine_seed

if TYPE_CHECKING:
    from megatron_dppo.parallel.world import World
    from megatron_dppo.rl.sampling_mask import SamplingMask
    from megatron_dppo.rl.types import Ints, Pack, Prompt, Routing
    from megatron_dppo.rollout.engine import RolloutEngine
    from megatron_dppo.trainer.assemble import PolicyParts

MAX_LOGPROB_DIFF = {"fp32": 1e-4, "bf16": 0.1}
"""Limit of mean |log p(trainer) − log p(engine)| per token, which rounding alone does not
exceed."""
MAX_PROB_ERROR = {"fp32": 1.001, "bf16": 1.2}
"""Limit of mean exp |log p(trainer) − log p(engine)| per token: more sensitive to few large
differences."""
MOST_COMPLETIONS = 8
"""Worst completions stored as evidence."""
PROMPTS = 4
SAMPLES = 2
MAX_TOKENS = 32
"""Request to every server: number of prompts, completions per prompt, tokens per completion."""


@dataclass(frozen=True, slots=True)
class ComparedCompletion:
    """A completion with L tokens, scored by trainer and engine."""

    source: str
    """Engine or server that generated the completion."""
    prompt_ids: NDArray[np.integer]
    """[P]"""
    response_ids: NDArray[np.integer]
    """[L], sampled token ids."""
    trainer: NDArray[np.float32]
    """[L], log-probabilities by the trainer."""
    engine: NDArray[np.float32]
    """[L], log-probabilities by the engine."""
    versions: tuple[int, ...]
    """Versions of the weights that generated the tokens."""
    routing: Routing | None = None
    sampling_mask: SamplingMask | None = None

    @property
    def differences(self) -> NDArray[np.float64]:
        """[L]"""
        return np.abs(self.trainer.astype(np.float64) - self.engine)

    @property
    def mean(self) -> float:
        return float(self.differences.mean())

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "versions": list(self.versions),
            "mean_abs_diff": self.mean,
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "trainer_logprobs": self.trainer.tolist(),
            "engine_logprobs": self.engine.tolist(),
        }


def collect_comparisons(
    pack: Pack,
    trainer: NDArray[np.float32],
    version: int,
) -> Iterator[ComparedCompletion]:
    """Yield the completions of a pack with tokens of ``version``; ``trainer``: [R],
    log-probabilities."""
    for row in np.unique(pack.sample[pack.versions == version]):
        (targets,) = np.nonzero(pack.sample == row)
        yield ComparedCompletion(
            source="rollouts",
            prompt_ids=pack.token_ids[find_path(pack, int(pack.predictors[targets[0]]))],
            response_ids=pack.targets[targets],
            trainer=trainer[targets],
            engine=pack.engine_logprobs[targets],
            versions=(version,),
        )


def logprob_limit(config: Config) -> float:
    """Return ``rollout.max_logprob_diff``, or the default for the model's dtype."""
    limit = config.rollout.max_logprob_diff
    return MAX_LOGPROB_DIFF[config.model.dtype] if limit is None else limit


def check_disagreement(
    config: Config,
    world: World,
    *,
    source: str,
    context: str,
    difference: float,
    error: float,
    collect: Callable[[], Sequence[ComparedCompletion]],
    name: str,
) -> None:
    """Stop the run if trainer and engine differ more than rounding explains. Collective.

    Args:
        source: generator of the tokens in the message: "the engine", or a server's name.
        context: time in the message: "in step 3".
        difference: mean |Δ log p|, the same on every rank.
        error: mean exp |Δ log p|, the same on every rank.
        collect: function that returns this rank's completions.
        name: name of the evidence file in ``RUN/disagreement``, without extension.

    Raises:
        UserError: on every rank, beyond a limit, or if a number is not finite.
    """
    rollout = config.rollout
    error_limit = (
        MAX_PROB_ERROR[config.model.dtype]
        if rollout.max_prob_error is None
        else rollout.max_prob_error
    )
    for setting, measured, limit, statistic in (
        ("rollout.max_logprob_diff", difference, logprob_limit(config), "|log p difference|"),
        ("rollout.max_prob_error", error, error_limit, "exp |log p difference|"),
    ):
        # NaN is not <= limit, and therefore fails the check.
        if measured <= limit:
            continue
        facts = {
            "who": source,
            "when": context,
            "mean_abs_diff": difference,
            "mean_prob_error": error,
        }
        file = Path(config.run.dir) / "disagreement" / f"{name}.json"
        _write_evidence(world, file, facts, collect())
        problem = (
            f"trainer and {source} disagree on the log-probabilities of the same tokens {context}: "
            f"the mean {statistic} is {measured:.4g}. {source[0].upper()}{source[1:]} may hold "
            "other weights (another model, an incomplete update), score at another temperature or "
            "with top-p, top-k or a penalty, or compute in another precision (a quantised model or "
            f"cache). The worst completions are in {file}"
        )
        remedy = f"Find the cause; raise {setting} only for a difference that precision explains"
        raise UserError(setting, f"{limit:g}", problem, remedy)


def _write_evidence(
    world: World,
    file: Path,
    facts: dict[str, Any],
    completions: Sequence[ComparedCompletion],
) -> None:
    """Write the worst completions of the rank with the worst completion."""
    # NaN counts as the largest difference.
    worst = sorted(
        completions, key=lambda each: np.nan_to_num(each.mean, nan=np.inf), reverse=True
    )[:MOST_COMPLETIONS]
    heights = world.gather(float(np.nan_to_num(worst[0].mean, nan=np.inf)) if worst else -1.0)

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps(facts | {"completions": [each.as_json() for each in worst]}, indent=1)
        )

    holder = max(range(world.size), key=heights.__getitem__)
    world.run_on_all_ranks(
        lambda: write() if world.rank == holder else None, description="evidence"
    )


def check_agreement(
    policy: PolicyParts[Any],
    engine: RolloutEngine[Any],
    pool: Sequence[Prompt],
    *,
    version: int,
) -> dict[str, float]:
    """Compare completions of every server with the actor. Collective.

    Args:
        policy: policy of the engine's last sync.
        engine: engine with the synchronized weights.
        pool: pool of prompts; each version takes different prompts.
        version: version of the sync.

    Returns:
        ``rollout/agreement_max_diff`` and ``rollout/agreement_mean_diff``, the largest over the
        servers.

    Raises:
        UserError: on every rank, naming the server, if a server differs from the actor by more than
            rounding explains, or reports another version for the tokens.
    """
    config = policy.config
    world = policy.world
    answers = _generate_completions(policy, engine, pool, version)
    _check_versions(answers, version, config.rollout.engine)
    by_server = defaultdict[str, list[ComparedCompletion]](list)
    for each in _score_completions(policy, answers):
        by_server[each.source].append(each)
    own_stats = {name: _compute_stats(completions) for name, completions in by_server.items()}
    parts = [stats for stats in world.gather(own_stats) if stats]
    if not parts:
        return {}
    # Take the largest over the replicas, because each replica scores the same completions.
    worst: dict[str, list[float]] = {}
    for server in parts[0]:
        of_replicas = [stats[server] for stats in parts]
        worst[server] = np.max(of_replicas, axis=0).tolist()
    for server, (mean, _, error) in worst.items():
        check_disagreement(
            config,
            world,
            source=f"the server {server}",
            context=f"after the sync to version {version}",
            difference=mean,
            error=error,
            collect=partial(by_server.__getitem__, server),
            name=f"sync_{version:07d}",
        )
    return {
        "rollout/agreement_mean_diff": max(mean for mean, _, _ in worst.values()),
        "rollout/agreement_max_diff": max(largest for _, largest, _ in worst.values()),
    }


def _generate_completions(
    policy: PolicyParts[Any],
    engine: RolloutEngine[Any],
    pool: Sequence[Prompt],
    version: int,
) -> list[ComparedCompletion]:
    """Return completions of every server for the same prompts, not yet scored by the actor."""
    # The module imports torch, and a report imports the present module without torch.
    from megatron_dppo.rollout.engine import Sampling

    config = policy.config
    # Move through the pool with the version.
    count = min(PROMPTS, len(pool))
    prompts = [pool[(version * count + i) % len(pool)] for i in range(count)]
    sampling = Sampling(
        samples=SAMPLES,
        max_tokens=min(MAX_TOKENS, config.rollout.max_response_tokens),
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        sampling_mask=config.rollout.top_k is not None,
        stop_token_ids=policy.stop_ids,
        seed=derive_engine_seed(config.run.seed, version, Purpose.AGREEMENT),
        routing=policy.routing,
    )
    return [
        ComparedCompletion(
            source=server,
            prompt_ids=prompt.token_ids,
            response_ids=completion.token_ids,
            trainer=np.zeros(0, np.float32),
            engine=completion.logprobs,
            versions=tuple(np.unique(completion.versions).tolist()),
            routing=completion.routing,
            sampling_mask=completion.sampling_mask,
        )
        for server, groups in engine.sample_each(prompts, sampling).items()
        for prompt, group in zip(prompts, groups, strict=True)
        for completion in group
    ]


def _check_versions(answers: Sequence[ComparedCompletion], version: int, engine: str) -> None:
    for each in answers:
        if set(each.versions) != {version}:
            problem = (
                f"the server {each.source} was given weights of version {version}, and reports "
                f"tokens of version {', '.join(map(str, each.versions))}"
            )
            remedy = (
                "Check whether another run sends weights to the server; try another value of "
                "rollout.sync.transport"
            )
            raise UserError("rollout.engine", engine, problem, remedy)


def _score_completions(
    policy: PolicyParts[Any], answers: Sequence[ComparedCompletion]
) -> list[ComparedCompletion]:
    """Return the completions with the actor's log-probabilities."""
    if not answers:
        return []
    layers = policy.actor.routing.layers if policy.actor.routing else None
    packed = policy.pack([_build_sample(each, layers) for each in answers])
    rows = [held for held, _ in packed]
    packs = [pack for _, pack in packed]
    logprobs = policy.actor.log_probabilities(packs)
    # Only the first rank of each replica returns completions, because all its ranks compute the
    # same.
    if policy.world.tp_rank or policy.world.cp_rank:
        return []
    return [
        replace(answers[i], trainer=scores[pack.sample == row])
        for held, pack, scores in zip(rows, packs, logprobs, strict=True)
        if scores is not None
        for row, i in enumerate(held)
    ]


def _build_sample(completion: ComparedCompletion, layers: Ints | None) -> TrainingSample:
    routing = None
    if completion.routing is not None and layers is not None:
        routing = completion.routing[:, layers]
    return TrainingSample(
        prompt_ids=completion.prompt_ids.astype(np.int32),
        response_ids=completion.response_ids.astype(np.int32),
        engine_logprobs=completion.engine,
        loss_mask=np.ones(len(completion.response_ids), bool),
        advantage=0.0,
        scale=0.0,
        version=min(completion.versions),
        routing=routing,
        sampling_mask=completion.sampling_mask,
    )


def _compute_stats(completions: Sequence[ComparedCompletion]) -> tuple[float, float, float]:
    """Return mean and largest |Δ log p|, and mean exp |Δ log p|."""
    differences = np.concatenate([each.differences for each in completions])
    # Cap the exponent, to avoid an overflow.
    error = np.exp(np.minimum(differences, 50.0)).mean()
    return float(differences.mean()), float(differences.max()), float(error)
