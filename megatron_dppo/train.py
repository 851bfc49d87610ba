"""A run of DPPO: select, roll out, score, plan, train, sync, until the last step. Start reading here.

Every rank runs this same program. Rank 0, the leader, also selects prompts, plans, logs and prints.
"""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.assemble import assemble_learner, assemble_policy, load_pools
from megatron_dppo.checkpoint import Checkpoints
from megatron_dppo.config import Config
from megatron_dppo.curriculum import Curriculum
from megatron_dppo.evaluate import evaluate
from megatron_dppo.journal import Journal
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.parallel.world import World, initialize, shut_down
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.packing import CostModel
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.types import Selection, StepPlan
from megatron_dppo.rollout.collect import Collected


def train(config: Config) -> None:
    """Train from the last checkpoint in ``run.dir``, or from the initial policy if there is none, to ``run.steps``.

    Raises:
        UserError: on every rank, for what the user can mend, and where a loss or a gradient is not finite.
    """
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    workers = RewardWorkers(config.reward.function, workers=config.reward.workers, timeout_s=config.reward.timeout_s)
    try:
        Trainer(config, world, workers).run()
    finally:
        workers.close()
    shut_down()


class Trainer:
    """The parts of a run, and the order in which a step uses them."""

    def __init__(self, config: Config, world: World, workers: RewardWorkers) -> None:
        self.config, self.world, self.timers = config, world, PhaseTimers()
        world.together(workers.wait_ready)
        self.policy = assemble_policy(config, world, temperature=config.rollout.temperature)
        self.learner = assemble_learner(self.policy, self.timers)
        self.engine = self.policy.engine()
        self.collector = self.policy.collector(self.engine, workers)
        self.pool, self.held_out = load_pools(self.policy)
        self.curriculum = Curriculum(config, len(self.pool))
        self.folder = Path(config.run.dir)
        self.checkpoints = Checkpoints(config, world)
        if config.run.export:
            self.policy.check_export(self.folder / "hf", setting="run.dir")
        self.step = self._resume()
        self.journal = Journal(config, leads=world.leads, step=self.step, dropped_prompts=self.pool.dropped)

    def run(self) -> None:
        """All the steps that are left."""
        last = self.config.run.steps
        self.sync()
        if self.step == 0:
            self.evaluate()
        while self.step < last:
            with self.timers("step"):
                selection = self.select()
                rollouts = self.roll_out(selection)
                plan = self.plan(rollouts)
                metrics = self.train(plan, rollouts)
            self.step += 1
            self.journal.record(rollouts, plan, metrics | self.timers.take())
            if self.step == last or _due(self.step, self.config.eval.every):
                self.evaluate()
            self.journal.write(self.step)
            if self.step == last or _due(self.step, self.config.run.checkpoint_every):
                self.checkpoints.save(self.policy.actor, self.step, self.curriculum.state_dict())
        if self.config.run.export:
            self.policy.export(self.folder / "hf", setting="run.dir")
        self.journal.finish()

    def select(self) -> Selection:
        """Draw this step's prompts from the next window of candidates; the draw's probabilities come with them."""
        return self.world.from_leader(lambda: self.curriculum.select(self.step))

    def roll_out(self, selection: Selection) -> Collected:
        """Generate and score; every rank its own share."""
        with self.timers("rollout"):
            return self.collector.collect(self.pool, selection, self.step)

    def plan(self, rollouts: Collected) -> StepPlan:
        """Decide on one rank, from lengths and rewards alone, what is trained on, with which weight, and where."""
        layout = self.config.layout

        def decide() -> StepPlan:
            plan = plan_step(
                rollouts.metadata,
                self.config,
                replicas=self.world.dp,
                align=1,
                capacity_multiple=layout.tp if layout.sequence_parallel else 1,
                step=self.step,
                pipeline=layout.pp,
                costs=CostModel.of_width(self.policy.shape.hidden),
            )
            self.curriculum.remember(rollouts.metadata)
            return plan

        with self.timers("plan"):
            return self.world.from_leader(decide)

    def train(self, plan: StepPlan, rollouts: Collected) -> dict[str, float]:
        """Update the actor as planned, and the engine with it. A plan that keeps nothing changes neither."""
        learned = self.learner.learn(plan, rollouts.held, self.step)
        if learned.updated:
            with self.timers("update_weights"):
                self.sync(version=self.step + 1)
        return learned.metrics

    def sync(self, version: int | None = None) -> None:
        """Stream the actor's weights to the engine."""
        self.policy.sync(self.engine, self.step if version is None else version)

    def evaluate(self) -> None:
        """Answer the held-out problems greedily."""
        if self.held_out:
            with self.timers("eval"):
                result = evaluate(self.world, self.collector, self.held_out, show=self.config.eval.show)
            self.journal.evaluated(self.step, result, self.timers.take())
            if self.step == 0:
                self.journal.write(0)

    def _resume(self) -> int:
        found = self.checkpoints.load(self.policy.actor)
        if found is None:
            return 0
        step, state = found
        self.curriculum.load_state_dict(state)
        return step


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
