"""``megatron-dppo probe-batch``: does a smaller batch suffice, do smaller groups, and which pruning
is best?

Unpruned steps at fixed weights give the gradient's noise scale (from the norms on all prompts of a
step and on each half), the same with half of each group's completions, the seconds per token, and
groups for pruning draws. No file is written.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron_dppo.config import Config, ScheduleConfig, replace
from megatron_dppo.config.types import Keep
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.layer_specs import choose_sharing
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.observe.watchdog import Watchdog
from megatron_dppo.parallel.world import initialize, shutdown
from megatron_dppo.process.streams import print_message
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.advantages import compute_advantages
from megatron_dppo.rl.intervals import Estimate, compute_student_t
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.plan import ARRAYS, select_groups
from megatron_dppo.rl.pruning.completion_rules import find_completion_rule
from megatron_dppo.rl.pruning.draw import estimate_gradient_noise, prune_minibatch
from megatron_dppo.rl.pruning.prompt_rules import find_prompt_rule, select
from megatron_dppo.rl.pruning.schedule import find_nonzero_variance_groups
from megatron_dppo.rl.types import Floats, Group, Selection, StepMetadata
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.train import make_planner
from megatron_dppo.trainer.agreement import check_agreement
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy, load_training_pool
from megatron_dppo.trainer.functions import register_functions
from megatron_dppo.trainer.learner import Learner
from megatron_dppo.trainer.prompt_sampler import PromptSampler

LEARNING_STEPS = 4
"""Steps that train the prompt predictor before the draws."""
DRAWS = 8
SHARES: tuple[tuple[float, ...], tuple[Keep, ...]] = (1.0, 0.85, 0.7, 0.5), (1.0, "auto", 0.5, 0.3)
"""Kept fractions: of prompts, of completions' tokens."""
Pair = tuple[float, Keep]
Samples = list[tuple[float, float]]
UNPRUNED: Pair = (1.0, 1.0)


def probe_batch(config: Config, *, steps: int, as_json: bool = False) -> None:
    """Print the noise scale, seconds per token, and gains of pruning by fractions. Collective.

    Args:
        steps: unpruned steps to measure, at least ``LEARNING_STEPS`` + 2.

    Raises:
        UserError: on every rank, if the user can mend the cause, or no gradient is finite and above
            0.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    with ExitStack() as to_close:
        timers = PhaseTimers()
        to_close.enter_context(closing(Watchdog.from_config(config, world, timers)))
        workers = to_close.enter_context(closing(RewardWorkers.from_config(config.reward)))
        world.run_on_all_ranks(workers.wait_ready)
        world.run_on_all_ranks(lambda: register_functions(config))
        parts = assemble_policy(
            configure_pruning(config, UNPRUNED), world, temperature=config.rollout.temperature
        )
        engine = to_close.enter_context(closing(parts.build_engine()))
        probe = _BatchProbe(config, parts, engine, workers, timers)
        for step in range(steps):
            if world.is_rank0:
                print_message(f"step {step + 1} of {steps}")
            probe.step(step)
        found = world.broadcast(probe.report)
        if world.is_rank0:
            print(json.dumps(found.as_json()) if as_json else found)
    shutdown()


def configure_pruning(config: Config, pair: Pair) -> Config:
    """Return rule ``neyman`` at these fractions; at 1, rule ``none``."""
    prompts, completions = map(_make_pruning_settings, pair)
    of_prompts = replace(config.pruning.prompts, **prompts)
    of_completions = replace(config.pruning.completions, **completions, normaliser="full")
    pruning = replace(
        config.pruning,
        prompts=of_prompts,
        completions=of_completions,
        target_noise=None,
        resample="none",
    )
    return replace(config, pruning=pruning)


def _make_pruning_settings(keep: Keep) -> dict[str, Any]:
    rule = "none" if keep == 1.0 else "neyman"
    return {"rule": rule, "function": None, "keep": keep, "schedule": ScheduleConfig()}


def get_configured_pair(config: Config) -> Pair | None:
    """Return the configured fractions; None under other rules."""
    prompts = config.pruning.prompts
    completions = config.pruning.completions
    if not {prompts.named, completions.named} <= {"neyman", "none"}:
        return None
    kept_prompts = 1.0 if prompts.rule == "none" else prompts.keep
    return kept_prompts, 1.0 if completions.rule == "none" else completions.share


def make_own_config(config: Config) -> Config | None:
    """Return the configured rules at constant fractions; None for ``neyman``, which the pairs have,
    and for biased rules, whose variance is unknown."""
    pruning = config.pruning
    rules = (
        find_prompt_rule(pruning.prompts.named),
        find_completion_rule(pruning.completions.named),
    )
    if get_configured_pair(config) or any(rule.biased for rule in rules):
        return None
    constant = ScheduleConfig()
    share = pruning.completions.share
    own = replace(
        pruning,
        prompts=replace(pruning.prompts, schedule=constant),
        completions=replace(pruning.completions, keep=share, schedule=constant),
        target_noise=None,
        resample="none",
    )
    return replace(config, pruning=own)


def compute_jackknife(statistic: Callable[[list[int]], float], count: int) -> tuple[float, float]:
    """Return a statistic of ``count`` items, and half of the 95% Student's t interval.

    ``statistic`` takes indices.
    """
    everything = list(range(count))
    value = statistic(everything)
    without = []
    for left in everything:
        without.append(statistic([i for i in everything if i != left]))
    # Tukey's pseudo-values are nearly independent, unlike the statistics without an item.
    pseudo = count * value - (count - 1) * np.array(without)
    return value, compute_student_t(count - 1) * float(pseudo.std(ddof=1)) / math.sqrt(count)


def estimate_noise_scale(whole: ArrayLike, halves: ArrayLike, batch: int) -> Estimate:
    """Return the simple noise scale B = S/|G|² in prompts (McCandlish et al., arXiv:1812.06162,
    appendix A.1).

    G is the true gradient, S the trace of a prompt's covariance: E|g|² = |G|² + S/b for the mean g
    over b prompts. The interval inverts the interval of |G|²/S; a bound is infinite if |G|² ≤ 0.

    Args:
        whole: [n], squared gradient norms over ``batch`` prompts.
        halves: [n], mean squared gradient norms over the two halves of the prompts.
        batch: prompts.
    """
    signal, noise = split_squares(whole, halves, batch)
    # The noise may be 0 or negative by chance, and must not be a divisor.
    least = 1e-9 * float(np.sum(whole))
    ratio, reach = compute_jackknife(
        lambda rows: float(signal[rows].sum() / max(noise[rows].sum(), least)), len(signal)
    )
    bounds = []
    for each in (ratio, ratio + reach, ratio - reach):
        bounds.append(1.0 / each if each > 0.0 else math.inf)
    return Estimate(*bounds)


def split_squares(whole: ArrayLike, halves: ArrayLike, batch: int) -> tuple[Floats, Floats]:
    """Return unbiased estimates of |G|² and S by step, [n] each; see
    :func:`estimate_noise_scale`."""
    big = np.asarray(whole, np.float64)
    small = np.asarray(halves, np.float64)
    # Solve E|g|² = |G|² + S/b for S and |G|², from b = batch and b = batch/2.
    return 2.0 * big - small, (small - big) * batch


def estimate_half_group_gain(
    noise: ArrayLike, half_noise: ArrayLike, *, advantages: float, time: float
) -> Estimate:
    """Return the worth of half groups beside groups, at equally many completions a step.

    The worth is noise × seconds of groups over noise × seconds of half groups. Noise is S/|G|².
    Half groups have a shorter G, because their baselines are noisier. Lengths of G are assumed to
    be proportional to mean |A|, because :func:`split_squares` estimates |G|² with a larger error.

    Args:
        noise: [n], S of a prompt's group.
        half_noise: [n], S of half a group.
        advantages: mean |A| in half groups, divided by mean |A| in groups.
        time: seconds with groups, divided by the seconds with half groups.
    """
    pairs = np.stack([noise, half_noise], axis=1).astype(np.float64)

    def gain(rows: list[int]) -> float:
        whole, half = pairs[rows].sum(axis=0).tolist()
        return 2.0 * time * advantages**2 * whole / half if half > 0.0 else math.nan

    value, reach = compute_jackknife(gain, len(pairs))
    return Estimate(value, value - reach, value + reach)


def estimate_cost_line(tokens: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """Return fixed seconds and seconds per token: the line through two medians.

    The medians are of the small and the large sizes.
    """
    sizes = np.asarray(tokens, np.float64)
    taken = np.asarray(seconds, np.float64)
    large = sizes > (sizes.min() + sizes.max()) / 2.0
    if not large.any():
        return float(np.median(taken)), 0.0
    few = float(np.median(sizes[~large]))
    many = float(np.median(sizes[large]))
    short = float(np.median(taken[~large]))
    long = float(np.median(taken[large]))
    proportional = long / many
    per_token = proportional
    # Within a factor of 1.3, noise would decide the slope: assume no fixed seconds.
    # A line that is negative at 0 becomes proportional, too.
    if many >= 1.3 * few:
        per_token = min(max((long - short) / (many - few), 0.0), proportional)
    return long - per_token * many, per_token


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step. ``Costs(0.1, 0.1, 1e-4, 2e-4)``: 3.2 s for 10,000 tokens, all trained
    on."""

    rollout: float
    """Fixed, of rollouts."""
    rest: float
    """Other fixed: planning, weight sync, part of training."""
    generated: float
    """Per generated token."""
    trained: float
    """Per trained token."""

    def estimate_seconds(self, generated: float, trained: float) -> float:
        return self.rollout + self.rest + self.generated * generated + self.trained * trained


def estimate_gain(pruning: ArrayLike, unpruned: ArrayLike, costs: Costs) -> Estimate:
    """Return unpruned over pruned variance × seconds, with an interval over windows.

    A smaller batch gains 1 if no seconds are fixed.

    Args:
        pruning: [n, 4], means over a window's draws: variance of sampling, variance with pruning
            (both by ``estimate_gradient_noise``), tokens generated, tokens trained on.
        unpruned: [n, 4], the same without pruning.
        costs: assumed exact.
    """

    def product(windows: Floats) -> float:
        sampling, noise, generated, trained = windows.mean(axis=0).tolist()
        inflation = noise / sampling if sampling > 0.0 else 1.0
        return inflation * costs.estimate_seconds(generated, trained)

    full = np.asarray(unpruned, np.float64)
    pruned = np.asarray(pruning, np.float64)
    value, reach = compute_jackknife(
        lambda rows: product(full[rows]) / product(pruned[rows]), len(full)
    )
    return Estimate(value, value - reach, value + reach)


@dataclass(frozen=True, slots=True)
class Report:
    """Result per unpruned step."""

    batch: int
    """Prompts of an optimizer step."""
    noise: Estimate
    """In prompts."""
    costs: Costs
    generated: float
    trained: float
    mixed: float
    """Fraction of groups with non-zero variance."""
    gains: dict[Pair, Estimate]
    configured: Pair | None
    prompts: int
    """Prompts of a step."""
    size: int
    """Completions per prompt."""
    half_groups: Estimate | None
    """Worth of half groups beside groups; None if unknown."""
    own: Estimate | None = None
    """Worth of the configured rules; None for ``neyman`` and for biased rules."""

    @property
    def seconds(self) -> float:
        return self.costs.estimate_seconds(self.generated, self.trained)

    @property
    def rollout_share(self) -> float:
        return 1.0 - (self.costs.rest + self.costs.trained * self.trained) / self.seconds

    @property
    def best(self) -> Pair:
        return max(self.gains, key=lambda pair: self.gains[pair].value)

    def estimate_half_batch(self) -> tuple[float, float]:
        """Return steps and time for half of the prompts, relative to all prompts."""
        # Steps are proportional to 1 + B/batch (section 2.2 of McCandlish et al.). For unknown B,
        # double.
        known = math.isfinite(self.noise.value)
        steps = 1.0 + self.noise.value / (self.batch + self.noise.value) if known else 2.0
        seconds = self.costs.estimate_seconds(self.generated / 2, self.trained / 2)
        return steps, steps * seconds / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Return plain numbers; null for an infinite bound."""
        noise = {}
        for name, value in asdict(self.noise).items():
            noise[name] = value if math.isfinite(value) else None
        gains = [
            {"prompts": p, "completions": c, **asdict(each)} for (p, c), each in self.gains.items()
        ]
        computed = {
            name: getattr(self, name)
            for name in ("seconds", "rollout_share", "best", "conclusion", "group_advice")
        }
        half = dict(zip(("steps", "time"), self.estimate_half_batch(), strict=True))
        return asdict(self) | computed | {"noise": noise, "gains": gains, "half": half}

    def __str__(self) -> str:
        costs = self.costs
        noise = self.noise
        prompts = list(dict.fromkeys(p for p, _ in self.gains))
        completions = list(dict.fromkeys(c for _, c in self.gains))
        marks = {
            pair: "*" * (pair == self.best) + "+" * (pair == self.configured) for pair in self.gains
        }
        rows = []
        for p in prompts:
            cells = [f"{self.gains[p, c].value:8.2f}{marks[p, c]:2}" for c in completions]
            rows.append(f"{p:7g}" + "".join(cells))
        interval = (
            f"{noise.low:.3g} to {noise.high:.3g}"
            if math.isfinite(noise.high)
            else f"{noise.low:.3g} or more"
        )
        legend = "+ configured" if self.configured else "the configured rules are biased"
        if self.own:
            legend = f"the configured rules are worth {self.own}"
        lines = [
            f"seconds of an unpruned step     {self.seconds:.2f}",
            f"  fixed                         {costs.rollout + costs.rest:.2f}",
            f"  per 1000 tokens generated     {1000 * costs.generated:.3f}",
            f"  per 1000 tokens trained on    {1000 * costs.trained:.3f}",
            f"rollouts' share                 {self.rollout_share:.0%}",
            f"mixed groups                    {self.mixed:.0%}",
            f"batch, prompts                  {self.batch}",
            f"noise scale, prompts            {noise.value:.3g}, 95% interval {interval}",
            "",
            "worth of a smaller batch under neyman, in variance x seconds; rows: share of prompts, "
            "columns: of completions' tokens",
            " " * 7 + "".join(f"{c:>8}  " for c in completions).rstrip(),
            *map(str.rstrip, rows),
            f"* best, {legend}",
            "Variance is estimated as prune/variance_inflation, which was up to 1.3 times too high "
            "early in training.",
            "",
            self.conclusion,
            *filter(None, [self.group_advice]),
        ]
        return "\n".join(lines)

    @property
    def group_advice(self) -> str:
        """Sentence about half groups; empty if their worth is unknown."""
        found = self.half_groups
        if found is None:
            return ""
        half = self.size // 2
        advice = "no difference was found"
        if found.low > 1.0:
            prompts = self.prompts * 2
            advice = f"set rollout.samples_per_prompt={half} and rollout.prompts_per_step={prompts}"
        elif found.high < 1.0:
            advice = f"keep groups of {self.size}"
        return (
            f"Twice as many groups of {half} are worth {found} of groups of {self.size}: {advice}."
        )

    @property
    def conclusion(self) -> str:
        """Closing sentence; a second one for an unbounded noise scale."""
        noise = self.noise.value
        steps, time = self.estimate_half_batch()
        of_best = (
            f"pruning at {self.best[0]:g} / {self.best[1]} is worth {self.gains[self.best]} "
            "of a smaller batch"
        )
        if self.best == UNPRUNED:
            of_best = "no measured pruning is worth more than a smaller batch"
        elif self.configured:
            own = (
                f", at the configured {self.configured[0]:g} / {self.configured[1]} "
                f"{self.gains[self.configured]}"
            )
            of_best += ", as configured" if self.configured == self.best else own
        remedy = "raise --steps or rollout.prompts_per_step"
        if not math.isfinite(noise):
            return f"The gradient cannot be distinguished from noise: {remedy}; {of_best}."
        ratio = self.batch / noise
        verdict = (
            "a smaller batch would lose little" if ratio >= 1.0 else "noise dominates the step"
        )
        half = (
            f"half of the batch would need {steps:.1f} times as many steps and {time:.2f} of "
            "the time"
        )
        scale = (
            f"A step of {self.batch} prompts is {ratio:.2g} of the noise scale ({noise:.3g} "
            f"prompts), so {verdict}"
        )
        doubt = (
            " At 95% the gradient could be 0, so the noise scale is known only from below: "
            f"{remedy}."
        )
        return f"{scale}: {half}; {of_best}.{'' if math.isfinite(self.noise.high) else doubt}"


def take_completions(metadata: StepMetadata, columns: slice) -> StepMetadata:
    """Return the metadata of groups that have only the completions in ``columns``."""
    arrays = {}
    for name in ARRAYS:
        values = getattr(metadata, name)
        arrays[name] = values if values.ndim == 1 else values[:, columns]
    # The first completion of a group shares no tokens with an earlier one.
    arrays["shared_lengths"] = arrays["shared_lengths"].copy()
    arrays["shared_lengths"][:, :1] = 0
    parts = {name: values[:, columns] for name, values in metadata.parts.items()}
    return StepMetadata(**arrays, window=metadata.window, parts=parts)


def _take(group: Group, columns: slice) -> Group:
    return Group(
        group.prompt,
        group.completions[columns],
        group.rewards[columns],
        group.scores[columns],
        group.texts[columns],
    )


class _BatchProbe:
    """Measurements at fixed weights; times of this rank."""

    def __init__(
        self,
        config: Config,
        parts: PolicyParts[Actor],
        engine: RolloutEngine[Any],
        workers: RewardWorkers,
        timers: PhaseTimers,
    ) -> None:
        self._parts = parts
        self._engine = engine
        self._timers = timers
        self._pool = load_training_pool(parts)
        self._collector = parts.build_collector(engine, workers)
        self._learner = Learner(parts, timers)
        self._sampler = PromptSampler(parts.config, self._pool)
        parts.sync(engine, 0)
        check_agreement(parts, engine, self._pool, version=0)
        self._configured = get_configured_pair(config)
        prompts, completions = self._configured or UNPRUNED
        known = {c for c in (*SHARES[1], completions) if c != "auto"}
        columns: list[Keep] = [1.0, "auto", *sorted(known - {1.0}, reverse=True)]
        rows = sorted({*SHARES[0], prompts}, reverse=True)
        self._configs = {
            pair: configure_pruning(config, pair) for pair in itertools.product(rows, columns)
        }
        self._windows: dict[Pair, list[Floats]] = {pair: [] for pair in self._configs}
        self._own = make_own_config(config)
        self._own_windows: list[Floats] = []
        self._rng = np.random.default_rng(config.run.seed)
        self._squares = Samples()
        size = config.rollout.samples_per_prompt
        # A half needs a baseline, half of a tree is no tree, and a teacher's gradient has no A.
        can_halve = size >= 4 and size % 2 == 0
        can_halve &= not config.rollout.tree.branches and not config.loss.distillation.named
        self._halves = (slice(size // 2), slice(size // 2, size)) if can_halve else ()
        self._half_squares = Samples()
        self._half_trained = Samples()
        """Tokens trained on in groups, and in half groups."""
        self._advantages = Samples()
        """Sum of |A| in groups, and in half groups."""
        self._generated = Samples()
        self._trained = Samples()
        self._fixed = list[float]()
        self._mixed = list[float]()

    def step(self, step: int) -> None:
        """Roll out, measure gradients, update the predictor. Collective."""
        parts = self._parts
        timers = self._timers
        rollouts, generated = self._roll_out(step)
        metadata = rollouts.metadata
        if parts.config.rollout.colocated:
            self._engine.pause()
        squares, trained, fixed = self._compute_squares(metadata, rollouts.held, step)
        self._squares.append(squares)
        if self._halves:
            whole = trained[0][0]
            half_squares, half_trained = self._compute_half_groups(rollouts, step)
            self._half_squares.append(half_squares)
            self._half_trained.append((whole, half_trained))
        with timers("update_weights"):
            parts.sync(self._engine, 0)
        # Skip the first step, which warms up.
        if step:
            self._generated += generated
            self._trained += trained
            self._fixed.append(fixed + sum(timers.take().values()))
        parts.world.broadcast(lambda: self._record_window(metadata, step))

    def _compute_half_groups(
        self, rollouts: CompleteRollouts, step: int
    ) -> tuple[tuple[float, float], float]:
        """Return the squared norms for groups of half the size, mean of both halves of each group,
        and the tokens trained on. Collective."""
        squares = []
        tokens = 0.0
        for columns in self._halves:
            held = {row: _take(group, columns) for row, group in rollouts.held.items()}
            metadata = take_completions(rollouts.metadata, columns)
            found, trained, _ = self._compute_squares(metadata, held, step)
            squares.append(found)
            tokens += trained[0][0]
        whole, halves = np.mean(squares, axis=0).tolist()
        return (whole, halves), tokens

    def _compute_squares(
        self, metadata: StepMetadata, held: dict[int, Group], step: int
    ) -> tuple[tuple[float, float], Samples, float]:
        """Return squared gradient norms, tokens and seconds of each gradient, and seconds of a
        plan. Collective.

        The norms are of the gradient on all prompts, and on each half of the prompts (mean).
        """
        parts = self._parts
        timers = self._timers
        plan_with = make_planner(parts, self._pool, metadata, step)
        config = choose_sharing(parts.config, parts.shape)
        loss = config.loss
        # A single update gives the gradient of all prompts, two updates give both halves.
        one = replace(config, loss=replace(loss, updates_per_rollout=1))
        two = replace(config, loss=replace(loss, updates_per_rollout=2))
        with timers("plan"):
            whole = parts.world.broadcast(lambda: plan_with(one))
        halves = parts.world.broadcast(lambda: plan_with(two))
        fixed = sum(timers.take().values())
        squares = []
        trained = []
        for minibatch in (*whole.minibatches, *halves.minibatches):
            squares.append(self._learner.compute_gradient_norm(minibatch, held, version=0) ** 2)
            trained.append((float(minibatch.lengths.sum()), sum(timers.take().values())))
        if not np.isfinite(squares).all():
            remedy = "Look for weights in model.path that are not finite, or set model.dtype=fp32"
            raise UserError(
                "model.path", parts.config.model.path, "gives a gradient that is not finite", remedy
            )
        return (squares[0], float(np.mean(squares[1:]))), trained, fixed

    def _roll_out(self, step: int) -> tuple[CompleteRollouts, Samples]:
        """Return a window's rollouts, and the tokens and seconds of each round."""
        # Learning steps have two rounds of half the prompts, to time two sizes.
        selection = self._parts.world.broadcast(lambda: self._sampler.select(step))
        ids = selection.prompt_ids
        rounds = []
        taken = []
        for number, chosen in enumerate([ids[::2], ids[1::2]] if step < LEARNING_STEPS else [ids]):
            part = Selection(chosen, np.ones(len(chosen)), window=len(chosen))
            with self._timers("rollout"):
                request = self._collector.request(
                    self._pool, StepRollouts(part, step), attempt=number
                )
                rounds.append(self._collector.finish(request))
            tokens = float(rounds[-1].metadata.response_lengths.sum())
            taken.append((tokens, self._timers.take()["perf/rollout_time"]))
        return self._collector.merge(rounds), taken

    def _record_window(self, metadata: StepMetadata, step: int) -> None:
        """Prune the window on rank 0, then update the predictor."""
        self._mixed.append(
            len(find_nonzero_variance_groups(metadata, self._parts.config))
            / max(len(metadata.prompt_ids), 1)
        )
        # The predictor must not have seen the window, as in a run.
        if step >= LEARNING_STEPS:
            for pair, config in self._configs.items():
                self._windows[pair].append(self._average_draws(metadata, config))
            if self._own:
                self._own_windows.append(self._average_draws(metadata, self._own))
        if self._halves:
            halves = [take_completions(metadata, columns) for columns in self._halves]
            in_halves = sum(map(self._sum_advantages, halves))
            self._advantages.append((self._sum_advantages(metadata), in_halves))
        self._sampler.update_history(metadata)

    def _sum_advantages(self, metadata: StepMetadata) -> float:
        config = self._parts.config
        name = resolve_objective(config.loss).advantage
        return float(np.abs(compute_advantages(metadata, config, name)).sum())

    def _average_draws(self, metadata: StepMetadata, config: Config) -> Floats:
        return np.mean([self._draw(metadata, config) for _ in range(DRAWS)], axis=0)

    def _draw(self, metadata: StepMetadata, config: Config) -> tuple[float, float, int, int]:
        """Return a draw's row for ``estimate_gain``."""
        objective = resolve_objective(config.loss)
        prompts = config.pruning.prompts
        ids = metadata.prompt_ids
        size = metadata.rewards.shape[1]
        selection = select(
            ids, self._sampler.history, prompts, group_size=size, keep=prompts.keep, rng=self._rng
        )
        order = np.argsort(selection.prompt_ids)
        groups = np.searchsorted(metadata.prompt_ids, selection.prompt_ids[order])
        part = dataclasses.replace(
            select_groups(metadata, groups),
            prompt_inclusion=selection.inclusion[order],
            window=metadata.window,
        )
        drawn = prune_minibatch(
            part, config, objective, keep=config.pruning.completions.keep, rng=self._rng
        )
        noise = estimate_gradient_noise([(part, drawn)])
        return noise[0], sum(noise), part.response_lengths.sum(), part.tokens[drawn.kept].sum()

    def report(self) -> Report:
        """
        Raises:
            UserError: if no step has a gradient.
        """
        config = self._parts.config
        whole, halves = np.array(self._squares).T
        if not whole.any():
            problem = (
                f"gives all groups of {len(whole)} steps equal rewards: no gradient, and "
                "nothing to compare"
            )
            remedy = (
                "Raise --steps or rollout.samples_per_prompt, or use data that the policy solves "
                "in part"
            )
            raise UserError("reward.function", config.reward.function, problem, remedy)
        rolling, per_generated = estimate_cost_line(*np.array(self._generated).T)
        training, per_trained = estimate_cost_line(*np.array(self._trained).T)
        costs = Costs(rolling, training + float(np.median(self._fixed)), per_generated, per_trained)
        unpruned = np.array(self._windows[UNPRUNED])
        generated, trained = unpruned[:, 2:].mean(axis=0).tolist()
        return Report(
            batch=config.rollout.prompts_per_step // config.loss.updates_per_rollout,
            noise=estimate_noise_scale(whole, halves, config.rollout.prompts_per_step),
            costs=costs,
            generated=generated,
            trained=trained,
            mixed=float(np.mean(self._mixed)),
            gains={
                pair: estimate_gain(windows, unpruned, costs)
                for pair, windows in self._windows.items()
            },
            configured=self._configured,
            own=estimate_gain(self._own_windows, unpruned, costs) if self._own else None,
            prompts=config.rollout.prompts_per_step,
            size=config.rollout.samples_per_prompt,
            half_groups=self._estimate_half_groups(costs, generated),
        )

    def _estimate_half_groups(self, costs: Costs, generated: float) -> Estimate | None:
        if not self._halves:
            return None
        advantages, half_advantages = np.sum(self._advantages, axis=0).tolist()
        tokens, half_tokens = np.mean(self._half_trained, axis=0).tolist()
        noises = []
        for squares in (self._squares, self._half_squares):
            whole, halves = np.array(squares).T
            _, noise = split_squares(whole, halves, batch=1)
            noises.append(noise)
        seconds = costs.estimate_seconds(generated, tokens)
        half_seconds = costs.estimate_seconds(generated, half_tokens)
        found = estimate_half_group_gain(
            *noises,
            advantages=half_advantages / advantages if advantages else math.nan,
            time=seconds / half_seconds,
        )
        return found if math.isfinite(found.low) else None
