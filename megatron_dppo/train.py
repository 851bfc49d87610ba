"""Run DPPO: select, roll out, score, plan, train, sync, until the last step. Start reading here.

Every rank runs this program. Rank 0 also selects prompts, plans, logs and prints.

With ``rollout.ahead: n``, servers roll out the next n steps during training, with weights at most n
updates old. Steps are trained in request order.
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
    """Train to ``run.steps`` from the last checkpoint in ``run.dir``, else the initial policy.

    Raises:
        UserError: on every rank, if the user can mend the cause, or a loss or gradient is not
            finite.
        StoppedError: on every rank, after the run is saved, if any rank was requested to stop.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    # Close the parts also if the run fails.
    with ExitStack() as to_close:
        workers = to_close.enter_context(closing(RewardWorkers.from_config(config.reward)))
        Trainer(config, world, workers, to_close).run()
    shutdown()


class Trainer:
    """Parts of a run."""

    def __init__(
        self,
        config: Config,
        world: World,
        workers: RewardWorkers,
        to_close: ExitStack,
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
        # Read the data before any server starts, so that a bad row fails early.
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
        self._resume()
        self.logger = RunLogger(config, world, step=self.step, dropped_prompts=self.pool.dropped)
        to_close.callback(self.logger.close)

    def run(self) -> None:
        last = self.config.run.steps
        if self.step >= last:
            self._print_result()
            return
        self.sync(self.version)
        agreement = self.check_agreement()
        # A resumed run has these rows already.
        if self.step == 0:
            self.logger.add(agreement)
            self.evaluate()
        while self.step < last:
            with self.profile(self.step + 1), self.timers("step"):
                rollouts = self.roll_out(
                    self.queue.popleft() if self.queue else self.select(self.step)
                )
                # Engine and actor share the GPU's memory.
                if self.config.rollout.colocated:
                    self.engine.pause()
                plan = self.plan(rollouts)
                # Request before training, so that servers work during the update.
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
            # Decide on all ranks together, because a checkpoint is collective.
            state = lifetime.is_stop_requested(), self.checkpoints.is_written()
            states = self.world.gather(state)
            if all(written for _, written in states):
                self.checkpoints.finish()
            is_requested = any(requested for requested, _ in states)
            stopping = self.step < last and (is_requested or self.guard.is_collapsed)
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
        """Print the result of a finished run."""
        exported = self.folder / "hf" / "config.json"
        tracker = self.folder / "checkpoints" / TRACKER
        # A kill after the last step may have left the export missing or old.
        due = partial(_is_older, exported, tracker)
        if self.config.run.export and self.world.broadcast(due):
            self.policy.export_run()
        self.logger.finish()

    def select(self, step: int) -> StepRollouts:
        """Draw a step's prompts, with probabilities, from the next window of candidates."""
        return StepRollouts(self.world.broadcast(lambda: self.sampler.select(step)), step)

    def request_ahead(self) -> None:
        """Request the next ``rollout.ahead`` steps without waiting."""
        for place in range(min(self.config.rollout.ahead, self.config.run.steps - self.step - 1)):
            if place == len(self.queue):
                self.queue.append(self.select(self.step + 1 + place))
            with self.timers("rollout"):
                self.request(self.queue[place])

    def request(self, rollouts: StepRollouts) -> None:
        """Request a step's rollouts, or the rest."""
        if not rollouts.is_pending and rollouts.complete is None:
            self.collector.request(self.pool, rollouts)

    def roll_out(self, rollouts: StepRollouts) -> CompleteRollouts:
        """Generate and score, each rank a part."""
        with self.timers("rollout"):
            self.request(rollouts)
            return self.collect_rollouts(rollouts)

    def collect_rollouts(self, rollouts: StepRollouts) -> CompleteRollouts:
        """Wait for a step's rollouts; replace useless prompts if configured."""
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
        """Decide on rank 0 which sequences are trained, with weights and ranks."""
        config = self.learner.set_entropy_coef(choose_sharing(self.config, self.policy.shape))
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
        """Update the actor, then the engine. An empty plan keeps the version."""
        colocated = self.config.rollout.colocated
        every = self.config.rollout.sync.check_every
        metrics = compute_staleness(
            rollouts.metadata, self.version, bound=self.config.rollout.ahead
        )
        learned = self.learner.train(plan, rollouts.held, self.step, version=self.version)
        has_gradient = learned.get("train/grad_norm", 0.0) > 0.0
        self.guard.record_step(updated=has_gradient, reward=rollouts.metrics["rollout/raw_reward"])
        # A colocated engine has freed its weights, so sync even without an update.
        if plan.updates or colocated:
            with self.timers("update_weights"):
                # Count one version per update: the staleness bound is in updates.
                self.sync(self.version + plan.updates)
        if plan.updates and _is_due(self.version, every):
            metrics |= self.check_agreement()
        return metrics | learned

    def sync(self, version: int) -> None:
        """Stream the actor's weights to the engine, as ``version`` of new tokens."""
        self.policy.sync(self.engine, version)
        self.version = version

    def check_agreement(self) -> dict[str, float]:
        """Compare rollout log-probabilities with the actor's."""
        return check_agreement(self.policy, self.engine, self.pool, version=self.version)

    def evaluate(self) -> None:
        if self.held_out:
            with self.timers("eval"):
                result = evaluate(self.evaluator, self.held_out, self.config)
            self.guard.record_evaluation(result.metrics.get("eval/accuracy"))
            self.logger.add_evaluation(self.step, result, self.timers.take())
            # The loop of ``run`` writes all later rows.
            if self.step == 0:
                self.logger.write(0)

    def save(self) -> None:
        """Write a checkpoint with partial rollouts."""
        under_way = [rollouts for rollouts in self.queue if rollouts.is_pending]
        # Keep partial rollouts: restarting would favour short completions, because an unfinished
        # batch nearly always has a long completion.
        broken_off = self.collector.interrupt(under_way)
        for rollouts in under_way:
            self.request(rollouts) if broken_off else self.collect_rollouts(rollouts)
        steps = list(self.queue)
        write = partial(write_in_flight, steps=steps, world=self.world) if steps else None
        best = self.guard.update_best(self.step)
        state = {
            "version": self.version,
            **self.guard.state_dict(),
            **self.learner.bonus.state_dict(),
            **self.sampler.state_dict(),
        }
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
            self.learner.bonus.load_state_dict(state)
            same_prompts, same_segments = self.world.broadcast(
                lambda: [
                    is_unchanged(self.folder, self.step, self.config, keys)
                    for keys in (PROMPTS, SEGMENTS)
                ]
            )
            # With run.resume=force and other prompts, the old order and reward history do not
            # apply.
            if not same_prompts:
                return
            self.sampler.load_state_dict(state)
            steps = read_in_flight(place, self.pool, self.world, self.step)
        # Without checksums a damaged state is noticed only here.
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise build_corruption_error(
                place, "run.dir", f"does not hold a run's state ({error!r})"
            ) from error
        self.queue.extend(steps)
        for later, rollouts in enumerate(steps):
            # Each earlier step may update the weights, so `later` updates may come first.
            oldest = self.version + later - self.config.rollout.ahead
            routed = self.policy.routing is not None
            fits = same_segments and rollouts.can_resume(
                self.config, min_version=oldest, needs_routing=routed
            )
            if not all(self.world.gather(fits)):
                rollouts.reset()


def make_planner(
    parts: PolicyParts[Actor],
    pool: PromptPool,
    metadata: StepMetadata,
    step: int,
) -> Callable[[Config], StepPlan]:
    """Return ``plan_step`` of a step's groups as a function of a configuration; rank 0 only."""
    config = choose_sharing(parts.config, parts.shape)
    world = parts.world
    # Only prefix sharing reads the prompts' tokens.
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
    """Return whether ``file`` is absent or older."""
    return not file.exists() or file.stat().st_mtime < reference.stat().st_mtime


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
