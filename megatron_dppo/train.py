"""A run of DPPO: select, roll out, score, plan, train, sync, until the last step. Start reading
here.

Every rank runs this same program. Rank 0, the leader, also selects prompts, plans, logs and prints.

With ``rollout.ahead: n`` the prompts of the n-th step from now are selected as soon as a step is
planned, and servers roll them out while it and those between are trained: with weights that are n
updates old at most. Steps are trained on in the order in which they were asked for, whichever is
answered first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_dppo.bridge.checkpoint_folder import TRACKER, build_corruption_error
from megatron_dppo.config import Config
from megatron_dppo.data.prompts import PromptPool
from megatron_dppo.estimate.assumptions import GPUS
from megatron_dppo.estimate.memory import count_parameter_kinds
from megatron_dppo.evaluation.evaluator import Evaluator, evaluate, start_verifiers
from megatron_dppo.models.actor import Actor
from megatron_dppo.models.layer_specs import choose_sharing
from megatron_dppo.observe.timers import PhaseTimers, Profiler, Usage
from megatron_dppo.observe.watchdog import Watchdog
from megatron_dppo.parallel.world import World, initialize, shutdown
from megatron_dppo.process import lifetime
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.types import StepMetadata, StepPlan
from megatron_dppo.rollout.metadata import compute_staleness
from megatron_dppo.rollout.step_rollouts import (
    CompleteRollouts,
    StepRollouts,
    read_in_flight,
    write_in_flight,
)
from megatron_dppo.trainer.agreement import check_agreement
from megatron_dppo.trainer.assemble import (
    PolicyParts,
    acquire_run_lock,
    assemble_policy,
    load_pools,
)
from megatron_dppo.trainer.checkpoint import Checkpoints
from megatron_dppo.trainer.collapse import CollapseGuard
from megatron_dppo.trainer.functions import register_functions
from megatron_dppo.trainer.learner import Learner
from megatron_dppo.trainer.prompt_sampler import PromptSampler
from megatron_dppo.trainer.resume import PROMPTS, SEGMENTS, is_unchanged
from megatron_dppo.trainer.run_logger import RunLogger


def train(config: Config) -> None:
    """Train from the last checkpoint in ``run.dir``, or from the initial policy if there is none,
    to ``run.steps``.

    Raises:
        UserError: on every rank, for what the user can mend, and where a loss or a gradient is not
            finite.
        StoppedError: on every rank, once the run is saved, because one of them was asked to stop.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    with ExitStack() as to_close:  # also when the run fails
        workers = to_close.enter_context(closing(RewardWorkers.from_config(config.reward)))
        Trainer(config, world, workers, to_close).run()
    shutdown()


class Trainer:
    """The parts of a run, and the order in which a step uses them."""

    def __init__(
        self, config: Config, world: World, workers: RewardWorkers, to_close: ExitStack
    ) -> None:
        self.config = config
        self.world = world
        self.timers = PhaseTimers()
        self.folder = Path(config.run.dir)
        on_cuda = world.device.type == "cuda"
        self.profile = Profiler(
            self.folder, config.run.profile, rank=world.rank, on_cuda=on_cuda, timers=self.timers
        )
        self.check_lock = acquire_run_lock(config, world, to_close)
        to_close.enter_context(closing(Watchdog.from_config(config, world, self.timers)))
        world.run_on_all_ranks(workers.wait_ready)
        self.policy = assemble_policy(config, world, temperature=config.rollout.temperature)
        # A bad row is named before any server is started.
        self.pool, self.held_out, offline = load_pools(self.policy)
        world.run_on_all_ranks(
            lambda: register_functions(config), description="import of functions"
        )
        self.learner = Learner(self.policy, self.timers)
        weights = count_parameter_kinds(self.policy.shape)
        gpu = GPUS[config.cluster.gpu]
        self.usage = Usage(
            world,
            self.policy.shape,
            weights.matrices,
            weights.head,
            gpu.get_peak_flops(config.model.dtype),
            frozen=config.model.lora.rank > 0,
        )
        self.engine = to_close.enter_context(closing(self.policy.build_engine()))
        self.collector = to_close.enter_context(
            closing(self.policy.build_collector(self.engine, workers, offline))
        )
        verifiers = start_verifiers(
            config, world, self.held_out, to_close, {config.reward.spec: workers}
        )
        self.evaluator = Evaluator(
            config, world, self.policy.build_collectors(self.engine, verifiers)
        )
        self.sampler = PromptSampler(config, self.pool)
        self.checkpoints = Checkpoints(config, world)
        self.guard = CollapseGuard(config.run)
        if config.run.export:
            self.policy.check_export_run()
        self.step = 0
        self.version = 0
        self.queue: deque[StepRollouts] = deque()
        """The next steps, in their order."""
        self._resume()
        self.logger = RunLogger(config, world, step=self.step, dropped_prompts=self.pool.dropped)
        to_close.callback(self.logger.close)

    def run(self) -> None:
        """All the steps that are left."""
        last = self.config.run.steps
        if self.step >= last:
            self._print_result()
            return
        self.sync(self.version)
        agreement = self.check_agreement()
        if self.step == 0:  # a resumed run's rows are those of one that never stopped
            self.logger.add(agreement)
            self.evaluate()
        while self.step < last:
            with self.profile(self.step + 1), self.timers("step"):
                rollouts = self.roll_out(
                    self.queue.popleft() if self.queue else self.select(self.step)
                )
                if self.config.rollout.colocated:
                    self.engine.pause()
                plan = self.plan(rollouts)
                self.request_ahead()
                metrics = self.train(plan, rollouts)
            self.step += 1
            events, notes = self.engine.take_events()
            notes = (*notes, *lifetime.list_replaced_handlers())
            seconds = self.timers.take()
            usage = self.usage.measure(plan, seconds)
            self.logger.record(rollouts, plan, metrics | events | seconds | usage, notes)
            if self.step == last or _is_due(self.step, self.config.eval.every):
                self.evaluate()
            self.world.broadcast(self.check_lock)
            self.logger.write(self.step)
            state = lifetime.is_stop_requested(), self.checkpoints.is_written()
            stop_requested, written = zip(*self.world.gather(state), strict=True)
            if all(written):
                self.checkpoints.finish()
            stopping = self.step < last and (any(stop_requested) or self.guard.is_collapsed)
            if (
                stopping
                or self.step == last
                or _is_due(self.step, self.config.run.checkpoint_every)
            ):
                self.save()
            if stopping:
                self.checkpoints.finish()
                raise (
                    self.guard.build_error()
                    if self.guard.is_collapsed
                    else lifetime.StoppedError(self.step)
                )
        self.checkpoints.finish()
        if self.config.run.export:
            self.policy.export_run()
        self.logger.finish(self.guard.best)

    def _print_result(self) -> None:
        """Show the final result of a finished run, and write only files that a kill has left
        out."""
        exported = self.folder / "hf" / "config.json"
        tracker = self.folder / "checkpoints" / TRACKER
        due = partial(_is_older, exported, tracker)
        if self.config.run.export and self.world.broadcast(due):
            self.policy.export_run()
        self.logger.finish()

    def select(self, step: int) -> StepRollouts:
        """Draw a step's prompts from the next window of candidates; the draw's probabilities come
        with them."""
        return StepRollouts(self.world.broadcast(lambda: self.sampler.select(step)), step)

    def request_ahead(self) -> None:
        """Ask for the rollouts of the next ``rollout.ahead`` steps, and wait for nothing."""
        for place in range(min(self.config.rollout.ahead, self.config.run.steps - self.step - 1)):
            if place == len(self.queue):
                self.queue.append(self.select(self.step + 1 + place))
            with self.timers("rollout"):
                self.request(self.queue[place])

    def request(self, rollouts: StepRollouts) -> None:
        """Ask for a step's rollouts, or for the rest of them, if that is not done."""
        if not rollouts.is_pending and rollouts.complete is None:
            self.collector.request(self.pool, rollouts)

    def roll_out(self, rollouts: StepRollouts) -> CompleteRollouts:
        """Generate and score; every rank its own share."""
        with self.timers("rollout"):
            self.request(rollouts)
            return self.collect_rollouts(rollouts)

    def collect_rollouts(self, rollouts: StepRollouts) -> CompleteRollouts:
        """Wait for a step's rollouts; where its rule replaces prompts that are of no use, roll out
        more of them."""
        if rollouts.complete is not None:
            return rollouts.complete
        rounds = [self.collector.finish(rollouts)]
        step = rollouts.step
        collected = self.collector.merge(rounds)
        select_more = self.sampler.select_round
        while more := self.world.broadcast(
            partial(select_more, step, collected.metadata, len(rounds))
        ):
            request = self.collector.request(
                self.pool, StepRollouts(more, step), attempt=len(rounds)
            )
            rounds.append(self.collector.finish(request))
            collected = self.collector.merge(rounds)
        rollouts.finish(collected)
        return collected

    def plan(self, rollouts: CompleteRollouts) -> StepPlan:
        """Decide on one rank what is trained on, with which weight, and where: from lengths and
        rewards, and from the prompts for what packs share."""
        config = choose_sharing(self.config, self.policy.shape)
        metadata = rollouts.metadata
        plan_with = make_planner(self.policy, self.pool, metadata, self.step)

        def decide() -> StepPlan:
            plan = plan_with(config)
            inflation = plan.metrics.get("prune/variance_inflation", 1.0)
            return replace(
                plan, metrics={**plan.metrics, **self.sampler.update_history(metadata, inflation)}
            )

        with self.timers("plan"):
            return self.world.broadcast(decide)

    def train(self, plan: StepPlan, rollouts: CompleteRollouts) -> dict[str, float]:
        """Update the actor as planned, and the engine with it. A plan that keeps nothing leaves
        their version alone."""
        colocated = self.config.rollout.colocated
        every = self.config.rollout.sync.check_every
        metrics = compute_staleness(
            rollouts.metadata, self.version, bound=self.config.rollout.ahead
        )
        learned = self.learner.train(plan, rollouts.held, self.step, version=self.version)
        has_gradient = learned.get("train/grad_norm", 0.0) > 0.0
        self.guard.record_step(updated=has_gradient, reward=rollouts.metrics["rollout/raw_reward"])
        if plan.updates or colocated:  # an engine that gave its memory back has no weights left
            with self.timers("update_weights"):
                self.sync(
                    self.version + plan.updates
                )  # one step's update is one version: the bound counts them
        if plan.updates and _is_due(self.version, every):
            metrics |= self.check_agreement()
        return metrics | learned

    def sync(self, version: int) -> None:
        """Stream the actor's weights to the engine; what it generates then carries their
        version."""
        self.policy.sync(self.engine, version)
        self.version = version

    def check_agreement(self) -> dict[str, float]:
        """Hold what the engine says of its tokens against the actor, of the same weights."""
        return check_agreement(self.policy, self.engine, self.pool, version=self.version)

    def evaluate(self) -> None:
        """Answer the held-out problems."""
        if self.held_out:
            with self.timers("eval"):
                result = evaluate(self.evaluator, self.held_out, self.config)
            self.guard.record_evaluation(result.metrics.get("eval/accuracy"))
            self.logger.add_evaluation(self.step, result, self.timers.take())
            if self.step == 0:
                self.logger.write(0)

    def save(self) -> None:
        """Write a checkpoint. Partial rollouts are part of it, and resume at once. Restarting them
        would favour short completions: a batch is rarely unfinished without a long completion."""
        under_way = [rollouts for rollouts in self.queue if rollouts.is_pending]
        broken_off = self.collector.interrupt(under_way)
        for rollouts in under_way:
            self.request(rollouts) if broken_off else self.collect_rollouts(rollouts)
        steps = list(self.queue)
        write = partial(write_in_flight, steps=steps, world=self.world) if steps else None
        best = self.guard.update_best(self.step)
        state = {"version": self.version, **self.guard.state_dict(), **self.sampler.state_dict()}
        with self.timers("save"):
            self.checkpoints.save(self.policy.actor, self.step, state, write, also_keep=best)

    def _resume(self) -> None:
        found = self.checkpoints.load(self.policy.actor)
        if found is None:
            return
        self.step, state = found
        place = self.checkpoints.path(self.step)
        try:
            self.version = state.get("version", self.step)
            self.guard.load_state_dict(state)
            same_prompts, same_segments = self.world.broadcast(
                lambda: [
                    is_unchanged(self.folder, self.step, self.config, keys)
                    for keys in (PROMPTS, SEGMENTS)
                ]
            )
            if not same_prompts:
                # Other prompts (run.resume=anyway) have a new order and an empty reward history.
                return
            self.sampler.load_state_dict(state)
            steps = read_in_flight(place, self.pool, self.world, self.step)
        except (
            KeyError,
            IndexError,
            TypeError,
            ValueError,
            AttributeError,
        ) as error:  # Without checksums, damage is found only here.
            raise build_corruption_error(
                place, "run.dir", f"does not hold a run's state ({error!r})"
            ) from error
        self.queue.extend(steps)
        for later, rollouts in enumerate(
            steps
        ):  # each step that is trained before may update the weights
            oldest = self.version + later - self.config.rollout.ahead
            routed = self.policy.routing is not None
            fits = same_segments and rollouts.can_resume(
                self.config, min_version=oldest, needs_routing=routed
            )
            if not all(self.world.gather(fits)):
                rollouts.reset()


def make_planner(
    parts: PolicyParts[Actor], pool: PromptPool, metadata: StepMetadata, step: int
) -> Callable[[Config], StepPlan]:
    """Return ``plan_step`` of a configuration for a step's groups on these ranks. Only the leader
    may call it."""
    config = choose_sharing(parts.config, parts.shape)
    world = parts.world
    shares = world.is_rank0 and config.pack.share_prefixes != "off"
    return partial(
        plan_step,
        metadata,
        replicas=world.dp,
        align=config.layout.row_multiple,
        capacity_multiple=world.compute_capacity_multiple(config.layout, config.pack.max_tokens),
        step=step,
        pipeline=config.layout.pp,
        hidden=parts.shape.hidden,
        prompts=[pool[int(row)].token_ids for row in metadata.prompt_ids] if shares else (),
    )


def _is_older(file: Path, reference: Path) -> bool:
    """Also where there is none."""
    return not file.exists() or file.stat().st_mtime < reference.stat().st_mtime


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
