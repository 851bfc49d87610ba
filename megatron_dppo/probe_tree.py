"""``megatron-dppo probe-tree``: would completions that share beginnings be worth more than others?

A few prompts get responses that are continued several times from each place in question. The norms of their gradients,
one by one and summed, say how much of the gradient's variance arises after that place. Nothing is trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing

import numpy as np
import torch

from megatron_dppo.config import BranchConfig, Config, DistillationConfig, TreeConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Actor, Sums
from megatron_dppo.models.microbatch import Microbatch, Responses
from megatron_dppo.observe.console import Console
from megatron_dppo.observe.timers import PhaseTimers
from megatron_dppo.observe.watchdog import Watchdog
from megatron_dppo.parallel.world import initialize, shut_down
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.trees import ForkStatistics, interval, variance_parts
from megatron_dppo.rl.types import Completion, Group, Selection
from megatron_dppo.rollout.engine import RolloutEngine
from megatron_dppo.rollout.step_rollouts import StepRollouts
from megatron_dppo.trainer.agreement import check_agreement
from megatron_dppo.trainer.assemble import PolicyParts, assemble_policy, load_training_pool
from megatron_dppo.trainer.prompt_sampler import order_of

HEADER = "fork after  tokens after it  variance after it  best tree  gain per generated token"


def probe_tree(config: Config) -> None:
    """Print for each place of ``probe.at`` where the variance arises, and what the best tree gains.

    Raises:
        UserError: on every rank, for what the user can mend, and where no prompt has a gradient.
    """
    config = replace(config, loss=replace(config.loss, distillation=DistillationConfig()))  # no teacher is asked
    world = initialize(config.layout, seed=config.run.seed, timeout_s=config.rollout.timeout_s)
    console = Console(0) if world.leads else None
    with ExitStack() as to_close:
        to_close.enter_context(closing(Watchdog.of(config, world, PhaseTimers())))
        workers = to_close.enter_context(closing(RewardWorkers.of(config.reward)))
        world.together(workers.wait_ready)
        parts = assemble_policy(config, world, temperature=config.rollout.temperature)
        engine = to_close.enter_context(closing(parts.engine()))
        probe = _Probe(parts, engine, workers)
        length = probe.flat_groups()
        places = sorted({max(1, round(share * length)) for share in config.probe.at})
        found = []
        for place in places:
            if console:
                console.note(f"a response has {length:.0f} tokens; some are continued after {place}", again=True)
            found.append(probe.fork_after(place))
        if console:
            leaves = config.rollout.samples_per_prompt
            rows = [_row(place, each, leaves) for place, each in zip(places, found, strict=True)]
            console.banner([HEADER, *rows, "", _verdict(places, found, leaves)])
    shut_down()


class _Probe:
    """A policy, some prompts, and what their responses are held against."""

    def __init__(self, parts: PolicyParts[Actor], engine: RolloutEngine, workers: RewardWorkers) -> None:
        self._parts, self._engine, self._workers = parts, engine, workers
        config = parts.config
        self._pool = load_training_pool(parts)
        parts.sync(engine, 0)
        check_agreement(parts, engine, self._pool, version=0)
        if config.probe.prompts > len(self._pool):
            problem = f"is more than the {len(self._pool)} prompts of the pool"
            raise UserError("probe.prompts", config.probe.prompts, problem, "Lower it, or give more prompts")
        self._prompts = np.sort(order_of(self._pool, config.run.seed).next_window(config.probe.prompts))
        self._baselines: dict[int, float] = {}

    def flat_groups(self) -> float:
        """Have a flat group say each prompt's baseline. Returns the mean length of a response. Collective."""
        groups = self._generate(TreeConfig(), self._parts.config.rollout.samples_per_prompt, 0)
        self._baselines = {prompt: float(group.rewards.mean()) for prompt, group in groups.items()}
        return float(np.mean([len(path.token_ids) for group in groups.values() for path in group.completions]))

    def fork_after(self, place: int) -> ForkStatistics:
        """Continue responses after so many tokens, and measure their gradients. Collective.

        Raises:
            UserError: on every rank, if all of them are 0.
        """
        probe = self._parts.config.probe
        shape = probe.roots, probe.continuations
        tree = TreeConfig(branches=(BranchConfig(at=place, children=probe.continuations),))
        groups = self._generate(tree, probe.roots * probe.continuations, place)
        known = [prompt for prompt in groups if prompt in self._baselines]
        paths, responses, prompts = (np.zeros((len(known), *shape[:n])) for n in (2, 1, 0))
        rewards, length, before = np.zeros((len(known), *shape)), np.zeros(len(known)), np.zeros(len(known))
        for p, prompt in enumerate(known):
            group = groups[prompt]
            samples = [self._sample(group, slot) for slot in range(len(group.completions))]
            for k in range(probe.roots):
                each = samples[k * probe.continuations : (k + 1) * probe.continuations]
                ended = len(each[0].response_ids) <= place  # one path in the place of all continuations
                paths[p, k] = self._square(each[:1]) if ended else [self._square([sample]) for sample in each]
                responses[p, k] = self._square(each)
            prompts[p] = self._square(samples)
            rewards[p] = group.rewards.reshape(shape)
            lengths = np.array([len(path.token_ids) for path in group.completions])
            length[p], before[p] = lengths.mean(), np.minimum(lengths, place).mean()
        if not paths.any():
            problem = f"gives all {probe.prompts} prompts equal rewards: no gradient, and nothing to compare"
            remedy = "Raise probe.prompts, or take data that the policy can do in part"
            raise UserError("reward.function", self._parts.config.reward.function, problem, remedy)
        of_rewards = variance_parts(rewards**2, rewards.sum(axis=2) ** 2, rewards.sum(axis=(1, 2)) ** 2)
        return ForkStatistics(*variance_parts(paths, responses, prompts), *of_rewards, length, before)

    def _generate(self, tree: TreeConfig, samples: int, step: int) -> Mapping[int, Group]:
        """The groups of all prompts, on every rank; without those whose scoring failed."""
        config = self._parts.config
        rollout = replace(config.rollout, tree=tree, samples_per_prompt=samples)
        parts = dataclasses.replace(self._parts, config=replace(config, rollout=rollout))
        selection = Selection(self._prompts, np.ones(len(self._prompts)), window=len(self._prompts))
        collector = parts.collector(self._engine, self._workers)
        mine = collector.finish(collector.request(self._pool, StepRollouts(selection, step))).groups
        groups = [group for of_rank in self._parts.world.gather(mine) for group in of_rank]
        return {group.prompt.id: group for group in sorted(groups, key=lambda group: group.prompt.id)}

    def _sample(self, group: Group, slot: int) -> TrainingSample:
        path: Completion = group.completions[slot]
        return TrainingSample(
            prompt_ids=group.prompt.token_ids,
            response_ids=path.token_ids,
            engine_logprobs=path.logprobs,
            loss_mask=path.loss_mask,
            advantage=float(group.rewards[slot]) - self._baselines[group.prompt.id],
            scale=1.0 / self._parts.config.rollout.max_response_tokens,
            version=path.oldest_version,
        )

    def _square(self, samples: Sequence[TrainingSample]) -> float:
        """‖Σ g‖², up to a factor that all have. Collective."""
        samples = [sample for sample in samples if sample.advantage]
        if not samples:
            return 0.0
        packs = self._parts.pack(samples, replicas=self._parts.world.dp)
        return self._parts.actor.gradient_norm([Microbatch(pack) for _, pack in packs], _policy_gradient) ** 2


def _policy_gradient(responses: Responses) -> tuple[torch.Tensor, Sums]:
    arrays = responses.arrays
    return -(responses.logprobs * arrays.advantage * arrays.scale).sum(), {}


def _row(place: int, found: ForkStatistics, leaves: int) -> str:
    everyone = np.arange(len(found.within))
    variance = interval(found.variance_after, len(everyone))
    roots, children, gain = found.best(leaves)
    tokens = float(found.tokens_after(everyone))
    return f"{place:10}  {tokens:15.2f}  {variance!s:>17}  {f'{roots} × {children}':>9}  {gain!s:>24}"


def _verdict(places: Sequence[int], found: Sequence[ForkStatistics], leaves: int) -> str:
    """Recommendation in one line: a tree is named if its gain's interval is above 1."""
    best = [(place, *each.best(leaves)) for place, each in zip(places, found, strict=True)]
    place, roots, children, gain = max(best, key=lambda each: each[-1].low)
    if gain.low <= 1.0:
        return "flat: no tree is worth more per generated token than completions that are sampled by themselves"
    tree = f"rollout.tree.branches=[{{at: {place}, children: {children}}}] with {roots} roots"
    return f"{tree} is worth {gain} times what flat groups are, per generated token"
