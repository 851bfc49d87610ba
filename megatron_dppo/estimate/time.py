"""Seconds of a step, phase by phase, and the speed-ups of settings that make a run faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_dppo.config import Config
from megatron_dppo.config.loss import ScheduleConfig
from megatron_dppo.estimate.kernels import Passes, Seconds, optimizer_seconds, reduction_seconds, stage_passes
from megatron_dppo.estimate.memory import cache_bytes, parameters_of, shape_of
from megatron_dppo.estimate.workload import Setup, Work, packs_of, work_of
from megatron_dppo.models.shape import PolicyShape

BINS = 64
"""Into so many stretches a response is cut. In each, the number of completions still decoding counts as constant."""


UPDATE = ("training", "messages", "token exchange", "pipeline bubble")
"""Phases of an update's passes."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A mean step of the run."""

    work: Work
    phases: dict[str, float]
    """Seconds by phase."""
    seconds: float
    """Seconds of the step, less than the sum of the phases if generation runs ahead."""
    packs: int
    """Packs of a minibatch on each replica."""
    bubble: float
    """Share of the trainer's passes in which a pipeline stage waits."""
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """Time of the decoding, over its time if all responses had the mean length."""
    model_flops_share: float
    """MFU of the update: useful FLOPs, without recomputation and padding, over what the data sheet promises."""


def step_time(setup: Setup, *, concurrency: int) -> StepTime:
    """The time of a step's phases, if a server decodes at most ``concurrency`` completions at once."""
    config, work, packs = setup.config, work_of(setup), packs_of(setup)
    rolled, trainer = generation(setup, work, most=concurrency), trainer_phases(setup)
    phases = {
        "generation": 0.0 if config.data.rollouts else rolled.seconds,
        **trainer,
        "weight sync": _sync_seconds(setup),
        "overhead": setup.assume.overhead_s,
    }
    seconds = sum(phases.values())
    if config.rollout.ahead:
        seconds = max(phases["generation"] + phases["weight sync"], seconds - phases["generation"])
    useful = 3.0 * (sum(layer_flops(setup)) * work.trained + head_flops(setup.shape) * work.responses)
    passing = sum(trainer[phase] for phase in UPDATE)
    return StepTime(
        work=work,
        phases=phases,
        seconds=seconds,
        packs=packs,
        bubble=_waits(setup) / (1 + _waits(setup)),
        batch=rolled.batch,
        long_tail=rolled.long_tail,
        model_flops_share=useful / (setup.placement.ranks * setup.rate * passing),
    )


def trainer_phases(setup: Setup) -> dict[str, float]:
    """Seconds of a step's phases on the trainer's GPUs."""
    config, work, through = setup.config, work_of(setup), stage_passes(setup)
    packs, stages = packs_of(setup) * work.updates, range(setup.placement.layout.pp)
    train = slowest(each.update for each in through).times(packs / setup.assume.busy_share)
    forward = _scoring(setup, through, packs)
    teachers = [replace(setup, shape=shape_of(teacher)) for teacher in config.loss.distillation.models]
    seen = work.seen / work.trained if work.trained else 0.0
    return {
        "score norms": forward * seen if config.pruning.completions.score == "head" else 0.0,
        "old log-probabilities": forward if work.updates > 1 else 0.0,
        "reference log-probabilities": forward if config.loss.kl_coef > 0 else 0.0,
        # as if each had sequences in all packs
        "teacher": sum(_scoring(theirs, stage_passes(theirs), packs) for theirs in teachers),
        "training": train.kernels,
        "messages": train.messages,
        "token exchange": train.exchange,
        "pipeline bubble": train.total * _waits(setup),
        "gradient reduction": max(reduction_seconds(setup, stage) for stage in stages) * work.updates,
        "optimizer": max(optimizer_seconds(setup, stage) for stage in stages) * work.updates,
    }


def _waits(setup: Setup) -> float:
    """Time that a stage waits in a pass over all packs, over the time that it works."""
    layout = setup.placement.layout
    return (layout.pp - 1) / (layout.vpp * packs_of(setup))


def slowest(stages: Iterable[Seconds]) -> Seconds:
    """The stage that the others wait for."""
    return max(stages, key=lambda seconds: seconds.total)


def _scoring(setup: Setup, through: Iterable[Passes], packs: float) -> float:
    """Seconds of forward passes of log-probabilities over so many packs."""
    return slowest(each.forward for each in through).total * packs / setup.assume.busy_share * (1 + _waits(setup))


def layer_flops(setup: Setup) -> tuple[float, float]:
    """FLOPs of a token's forward pass through all layers: two for each weight that it meets, and causal attention's
    products with half of its sequence. Those of the feed-forward parts, or of its experts, come second."""
    shape, context = setup.shape, work_of(setup).context
    feed_forward = 6.0 * shape.hidden * shape.ffn * (shape.experts_per_token or 1) * shape.num_layers
    attention = 2.0 * shape.heads * shape.head_dim * context * shape.num_layers
    return 2.0 * parameters_of(shape).matrices - feed_forward + attention, feed_forward


def head_flops(shape: PolicyShape) -> float:
    """FLOPs of a response token's forward pass through the head."""
    return 2.0 * parameters_of(shape).head


def _sync_seconds(setup: Setup) -> float:
    """Seconds to bring the weights to all servers, over a node's links, over the network, or by disk."""
    size, rollout, cluster = parameters_of(setup.shape).total * setup.width, setup.config.rollout, setup.config.cluster
    if rollout.served and rollout.sync.transport == "disk":
        return size / (setup.assume.sync_copy_gb_s * 1e9)
    near = not rollout.served or (cluster.nodes == 1 and not cluster.server_nodes)
    return size / ((setup.gpu.nvlink if near else setup.gpu.network) * setup.assume.sync_network_share)


@dataclass(frozen=True, slots=True)
class Generation:
    """How long a step's rollouts take."""

    seconds: float
    batch: float
    """Completions that a server decodes at once, at most."""
    long_tail: float
    """Time of the decoding, over its time if all responses had the mean length; at least 1."""


def generation(setup: Setup, work: Work, *, most: int) -> Generation:
    """The time of the rollouts: of all decode steps until the longest completion is done, and of the prefill.

    The GPUs of the servers share the prompts equally. All servers are taken to be like the one with the fewest ranks.

    Args:
        setup: of the run.
        work: of a step.
        most: completions that a server holds at once.
    """
    tp, gpus, rollout = min(setup.placement.servers), sum(setup.placement.servers), setup.config.rollout
    lengths, prompt = setup.lengths, setup.prompt
    each = work.completions * tp / gpus
    batch = max(min(each, most, rollout.samples_per_prompt * rollout.max_in_flight * gpus), 1.0)
    decode = _until_done(setup, tp, each, batch)
    alike = each * lengths.mean / batch * _decode_step(setup, tp, batch, prompt + lengths.mean / 2)
    tokens = work.prompts * prompt * tp / gpus  # each prompt once: the cache shares it among its completions
    rate = tp * setup.rate * setup.assume.decode_flops_share
    prefill = 2.0 * parameters_of(setup.shape).active * tokens / rate
    return Generation(decode + prefill, batch, max(decode / alike, 1.0))


def _until_done(setup: Setup, tp: int, completions: float, batch: float) -> float:
    """Seconds of decoding: with a full batch while completions wait, then with those that are left."""
    lengths, prompt = setup.lengths, setup.prompt
    waiting = max(completions - batch, 0.0)
    seconds = waiting * lengths.mean / batch * _decode_step(setup, tp, batch, prompt + lengths.typical / 2)
    width = lengths.limit / BINS
    for i in range(BINS):
        middle = (i + 0.5) * width
        active = batch * lengths.longer_than(middle)
        if active < 0.5:  # the longest of them is done
            break
        seconds += width * _decode_step(setup, tp, max(active, 1.0), prompt + middle)
    return seconds


def _decode_step(setup: Setup, tp: int, active: float, context: float) -> float:
    """Seconds of one decode step: the longer of reading and multiplying, then all-reduces and the overhead.

    Args:
        setup: of the run.
        tp: tensor-parallel ranks of the server.
        active: completions in the batch.
        context: their mean length so far, prompts included, tokens.
    """
    shape, assume, weights = setup.shape, setup.assume, parameters_of(setup.shape)
    unread = 0.0
    if shape.experts:  # those that no token of the batch goes to
        unread = (weights.total - weights.active) * (1 - shape.experts_per_token / shape.experts) ** (active - 1)
    read = (weights.total - unread) * setup.width / tp + active * context * cache_bytes(shape, tp, setup.width)
    moved = read / (setup.gpu.bandwidth * assume.decode_bandwidth_share)
    multiplied = 2.0 * weights.active * active / tp / (setup.rate * assume.decode_flops_share)
    reduced = 2e-6 * shape.num_layers * assume.all_reduce_us if tp > 1 else 0.0
    return max(moved, multiplied) + reduced + assume.decode_step_ms / 1e3


SHARES = (0.35, 0.65, 0.75)
"""Shares of a step that rollouts take: short answers on a few machines, long ones, and long ones with tools."""


@dataclass(frozen=True, slots=True)
class Levers:
    """Settings that make a run faster.

        Levers(prompts=0.7, completions=0.5, faster=2.0)

    rolls out 0.7 of the prompts on an engine twice as fast, and trains on half of their completions' tokens. Where
    rollouts take 65% of a step and 60% of the groups are mixed, it takes 0.65·0.7/2 + 0.35·0.7·(0.5/0.6) = 0.43 of
    the time.
    """

    prompts: float = 1.0
    """``pruning.prompts.keep``."""
    completions: float = 1.0
    """``pruning.completions.keep``, a share of the tokens that were rolled out."""
    faster: float = 1.0
    """Times as many tokens per second from the rollout engine."""
    ahead: bool = False
    """Rollouts run ahead (``rollout.ahead`` of 1 or more), on machines of their own."""

    @property
    def words(self) -> str:
        """For a table."""
        pruned = {"prompts": self.prompts, "completions": self.completions}
        parts = [f"{name} {keep:g}" for name, keep in pruned.items() if keep < 1.0]
        parts += [f"rollouts {self.faster:g}x"] if self.faster > 1.0 else []
        parts += ["ahead"] if self.ahead else []
        return ", ".join(parts) or "none"


TABLE = (
    Levers(completions=0.5),
    Levers(completions=0.3),
    Levers(prompts=0.7),
    Levers(prompts=0.5),
    Levers(prompts=0.7, completions=0.5),
    Levers(prompts=0.5, completions=0.3),
    Levers(prompts=0.4, completions=0.3),
    Levers(faster=1.5),
    Levers(faster=2.0),
    Levers(ahead=True),
    Levers(prompts=0.7, completions=0.5, faster=2.0),
    Levers(prompts=0.4, completions=0.3, faster=2.0),
    Levers(prompts=0.7, completions=0.5, ahead=True),
    Levers(prompts=0.7, completions=0.5, faster=2.0, ahead=True),
)
"""The rows that ``megatron-dppo plan`` prints and docs/scaling.md shows."""


class Price(NamedTuple):
    """Measured price of pruning in steps."""

    prompts: float
    completions: float
    steps_ratio: float
    """Steps without pruning over steps with it, to the same accuracy; below 1 where pruning costs steps."""
    interval: tuple[float, float] | None
    """95% interval; None if there are too few seeds for one."""
    seeds: int
    share: float
    """Share of a step without pruning that rollouts took."""


PRICES = (
    Price(1.0, 0.3, 0.98, (0.93, 1.04), 3, 0.34),
    Price(0.7, 0.5, 0.92, (0.89, 0.94), 5, 0.45),
    Price(0.7, 0.3, 0.88, None, 2, 0.34),
    Price(0.5, 0.3, 0.76, (0.65, 0.90), 5, 0.45),
    Price(0.4, 0.3, 0.84, (0.76, 0.93), 5, 0.45),
)
"""All that was measured of ``neyman`` (docs/pruning_measured.md, "Time to an accuracy"). Newer figures go in here; the
tables follow."""


def measured_price(levers: Levers) -> Price | None:
    """Measured price of the same pruning, or else of the least that prunes as much or more; None if there is none.

    Faster rollouts have no price. That of rolling out ahead has not been measured, and counts as none.
    """
    if levers.prompts == levers.completions == 1.0:
        return Price(1.0, 1.0, 1.0, (1.0, 1.0), 0, 0.0)
    found = [p for p in PRICES if p.prompts <= levers.prompts and p.completions <= levers.completions]
    return max(found, default=None, key=lambda price: (price.prompts, price.completions))


def step_speed_up(levers: Levers, share: float, *, fixed: float = 0.0, mixed: float = 1.0) -> float:
    """Seconds of a step without the levers over those with them: Amdahl's law.

    A step without pruning takes the time 1: ``r`` of it for rollouts, ``f`` for what no lever shortens (the weights'
    way to the servers, scoring, the sum of gradients over replicas), and the rest for training. With a share ``q`` of
    the prompts kept, a share ``c`` of the tokens that are trained on kept, and rollouts ``x`` times as fast, it takes

        f + r·q/x + (1 − r − f)·q·c              one after the other,
        f + max(r·q/x, (1 − r − f)·q·c)          rolled out ahead (``rollout.ahead`` of 1 or more).

    Groups of equal reward have no gradient, and a step without pruning leaves them out, too. If the share ``m`` of the
    groups is mixed, keeping ``k`` of the tokens that were rolled out is thus c = min(k, m)/m of those that are trained
    on. The formula knows no long tail of the rollouts and no bubble of a pipeline: :func:`step_time` does.

    Args:
        levers: that are pulled.
        share: r, of a step without them that rollouts take.
        fixed: f, of it that no lever shortens.
        mixed: m, of the groups that have a gradient; 1 where all have one, as with a KL term.
    """
    rollouts = share * levers.prompts / levers.faster
    training = (1.0 - share - fixed) * levers.prompts * min(levers.completions, mixed) / mixed
    return 1.0 / (fixed + (max(rollouts, training) if levers.ahead else rollouts + training))


class Gain(NamedTuple):
    """Speed-up by levers."""

    step: float
    """Times as many steps in the same time."""
    accuracy: float | None
    """Times as fast to the same accuracy: ``step`` times what they cost in steps; None if that is not known."""


@dataclass(frozen=True, slots=True)
class LeverRow:
    """One row of the table."""

    levers: Levers
    steps_ratio: float | None
    """See :class:`Price`; None if nothing was measured that prunes as much."""
    exact: bool
    """Whether that was measured of this very pruning, and not of one that prunes more."""
    gains: tuple[Gain, ...]
    """For each share of rollouts."""


def lever_table(
    shares: Sequence[tuple[float, float]], *, mixed: float, table: Sequence[Levers] = TABLE
) -> Iterator[LeverRow]:
    """Speed-ups of each row of levers.

    Args:
        shares: r and f of :func:`step_speed_up`, for each column.
        mixed: its m.
        table: the rows.
    """
    for levers in table:
        price = measured_price(levers)
        ratio = price and price.steps_ratio
        steps = [step_speed_up(levers, share, fixed=fixed, mixed=mixed) for share, fixed in shares]
        yield LeverRow(
            levers,
            ratio,
            exact=price is not None and (price.prompts, price.completions) == (levers.prompts, levers.completions),
            gains=tuple(Gain(step, step * ratio if ratio else None) for step in steps),
        )


def pruning_of(config: Config) -> Levers | None:
    """The pruning of a run; None if its rules are not those whose price in steps was measured."""
    pruning = config.pruning
    kept = []
    for level in (pruning.prompts, pruning.completions):
        if level.named not in ("none", "neyman") or level.schedule != ScheduleConfig():
            return None
        kept.append(level.keep if level.named == "neyman" else 1.0)
    return Levers(prompts=kept[0], completions=kept[1]) if pruning.refill == "none" else None
