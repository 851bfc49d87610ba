"""``megatron-dppo compress`` on ranks: what reads or answers is in the trainer's own shards, and the leader writes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_dppo.compress.asking import Asking, digest_of_task, prompts_to_ask
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.live import Live
from megatron_dppo.compress.passes import Accumulator, forget
from megatron_dppo.compress.reader import Reader
from megatron_dppo.compress.work import CompressionJob
from megatron_dppo.config import Config
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World, initialize, shut_down
from megatron_dppo.trainer.assemble import assemble_frozen
from megatron_dppo.trainer.resume import flat


def compress_in_shards(chosen: argparse.Namespace, config: Config) -> None:
    """One rank's part; the leader writes. Collective.

    Raises:
        UserError: on every rank.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    work = world.together(lambda: CompressionJob.of(chosen))
    world.from_leader(work.check_out)
    scored, others = world.together(work.calibration)
    if not scored and not chosen.config:
        raise UserError(
            "--layout", chosen.layout, "shards what reads sequences, and none are given", "Give --calibrate"
        )
    if chosen.dry_run:
        world.from_leader(work.say_what_would_be_done)
    else:
        with ExitStack() as to_close:
            cut, losses = _score_in_shards(work, config, world, scored, others, to_close)
        world.from_leader(lambda: work.write(cut, losses, of_others=bool(others)))
        forget(chosen.out)  # on every rank, since its sums may lie on a disk of its own machine
    shut_down()


def _score_in_shards(
    work: CompressionJob,
    config: Config,
    world: World,
    scored: Sequence[WorkedAnswer],
    others: Sequence[WorkedAnswer],
    to_close: ExitStack,
) -> tuple[Cut, dict[str, float]]:
    """As :meth:`CompressionJob.score`. Collective."""
    chosen = work.chosen
    parts = assemble_frozen(config, world, temperature=1.0)
    problems = prompts_to_ask(parts, chosen.sequences, chosen.seed) if chosen.config else []
    asking = Asking(config, parts, problems, to_close) if problems else None

    def reader(answers: Sequence[WorkedAnswer], passes: Accumulator) -> Reader:
        return Live(parts, answers, chosen.max_tokens, passes, asking)

    depends_on = world.from_leader(lambda: work.depends_on(scored, others, config.model.dtype, world.layout))
    if chosen.config:
        task = world.from_leader(lambda: digest_of_task(problems, config.reward.function))
        depends_on |= {"--config": str(sorted(flat(config).items())), "task of --config": task}
    return work.score(reader, scored, others, depends_on, world, asked=len(problems) or None)
