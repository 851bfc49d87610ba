"""Where the trainer and what generates disagree on log-probabilities: how far they may, and what is kept if they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError

if TYPE_CHECKING:  # a report reads the limits where there is no torch
    from megatron_dppo.parallel.world import World
    from megatron_dppo.rl.types import Pack

MAX_LOGPROB_DIFF = {"fp32": 1e-4, "bf16": 0.1}
"""Mean |log p(trainer) − log p(engine)| per token past which something other than rounding is at work."""
MAX_PROB_ERROR = {"fp32": 1.001, "bf16": 1.2}
"""Mean exp |log p(trainer) − log p(engine)| per token, which a few tokens that are far off move more."""
MOST_COMPLETIONS = 8
"""How many completions, the worst ones, are kept as evidence."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A completion with the L tokens that both have scored."""

    source: str
    """What generated it."""
    prompt_ids: NDArray[np.integer]
    """[P]"""
    response_ids: NDArray[np.integer]
    """[L], those that were sampled."""
    trainer: NDArray[np.float32]
    """[L], log-probabilities."""
    engine: NDArray[np.float32]
    """[L]"""
    versions: tuple[int, ...]
    """Of the weights that generated it."""

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


def compared_rows(pack: Pack, trainer: NDArray[np.float32], version: int) -> Iterator[Compared]:
    """The completions of a pack that ``version`` has made, as the trainer ([R]) and the engine have scored them."""
    for row in np.unique(pack.sample[pack.versions == version]):
        (targets,) = np.nonzero(pack.sample == row)
        start, end = pack.cu_seqlens[row], pack.predictors[targets[0]] + 1
        yield Compared(
            source="rollouts",
            prompt_ids=pack.token_ids[start:end],
            response_ids=pack.targets[targets],
            trainer=trainer[targets],
            engine=pack.engine_logprobs[targets],
            versions=(version,),
        )


def logprob_limit(config: Config) -> float:
    """``rollout.max_logprob_diff``, or what takes its place."""
    limit = config.rollout.max_logprob_diff
    return MAX_LOGPROB_DIFF[config.model.dtype] if limit is None else limit


def check_disagreement(
    config: Config,
    world: World,
    *,
    who: str,
    when: str,
    difference: float,
    error: float,
    compared: Callable[[], Sequence[Compared]],
    name: str,
) -> None:
    """Stop the run where trainer and engine are further apart than precision explains. Collective.

    Args:
        who: generated: "the engine", a server's name.
        when: "in step 3".
        difference: mean |Δ log p|, the same on every rank; so is
        error: the mean of exp |Δ log p|.
        compared: gives what this rank has of the completions; the rank that has the worst one writes the evidence.
        name: of the file of evidence, in ``RUN/disagreement``.

    Raises:
        UserError: on every rank, past a limit. Numbers that are not finite are past every limit.
    """
    rollout = config.rollout
    error_limit = MAX_PROB_ERROR[config.model.dtype] if rollout.max_prob_error is None else rollout.max_prob_error
    for setting, measured, limit, what in (
        ("rollout.max_logprob_diff", difference, logprob_limit(config), "|log p difference|"),
        ("rollout.max_prob_error", error, error_limit, "exp |log p difference|"),
    ):
        if measured <= limit:
            continue
        facts = {"who": who, "when": when, "mean_abs_diff": difference, "mean_prob_error": error}
        file = _keep(world, Path(config.run.dir) / "disagreement" / f"{name}.json", facts, compared())
        raise UserError(
            setting,
            f"{limit:g}",
            f"trainer and {who} disagree on the log-probabilities of the same tokens {when}: the mean {what} is "
            f"{measured:.4g}. {who[0].upper()}{who[1:]} may hold other weights (another model, an update that did not "
            "arrive whole), score at another temperature or with top-p, top-k or a penalty, or compute in another "
            f"precision (a quantised model or cache). The worst completions are in {file}",
            f"Find the cause; raise {setting} only for a difference that precision explains",
        )


def _keep(world: World, file: Path, facts: dict[str, Any], compared: Sequence[Compared]) -> Path:
    """Have the rank with the worst completion write its worst ones."""
    worst = sorted(compared, key=lambda each: np.nan_to_num(each.mean, nan=np.inf), reverse=True)[:MOST_COMPLETIONS]
    heights = world.gather(float(np.nan_to_num(worst[0].mean, nan=np.inf)) if worst else -1.0)

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(facts | {"completions": [each.as_json() for each in worst]}, indent=1))

    holder = max(range(world.size), key=heights.__getitem__)
    world.together(lambda: write() if world.rank == holder else None, what="evidence")
    return file
