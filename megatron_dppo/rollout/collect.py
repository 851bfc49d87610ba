"""Rollouts from selected prompts to scored groups. Each rank generates and scores a part of the
prompts, and keeps the part's tokens.

- Metadata for the planner (lengths and rewards, no tokens) is gathered on every rank.
- Requesting and waiting are two calls, so that servers can generate during training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from megatron_dppo.config import Config
from megatron_dppo.data.offline import OfflineGroup, is_on_rank
from megatron_dppo.data.prompts import PromptPool
from megatron_dppo.data.tokenizer import Tokenizer
from megatron_dppo.errors import StandstillError, UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.objectives import compute_overlong_penalty, resolve_objective
from megatron_dppo.rl.plan import compute_remaining_window, gather_metadata
from megatron_dppo.rl.pruning.schedule import find_nonzero_variance_groups
from megatron_dppo.rl.sampling_mask import find_mask_error
from megatron_dppo.rl.score import Score, collect_tracebacks, count_failures
from megatron_dppo.rl.seeds import Purpose, derive_engine_seed
from megatron_dppo.rl.sequences import check_sequences, compute_longest_response
from megatron_dppo.rl.types import (
    Completion,
    Floats,
    Group,
    Ints,
    Prompt,
    RoutingShape,
    Selection,
    StepMetadata,
)
from megatron_dppo.rollout.engine import RolloutEngine, Sampling
from megatron_dppo.rollout.metadata import build_metadata, compute_role_rewards
from megatron_dppo.rollout.scoring import (
    GroupScoring,
    build_group,
    check_failures,
    find_failed_scores,
)
from megatron_dppo.rollout.step_rollouts import CompleteRollouts, StepRollouts
from megatron_dppo.rollout.teachers import TeacherQuery, TeacherServers
from megatron_dppo.rollout.tree import count_unique_tokens

COUNTS = ("rollout/dropped_groups", "reward/timeouts", "reward/errors")
"""Metrics summed over the rounds of a step."""


class Collector:
    """Generation with an engine and scoring with workers, on every generating rank."""

    def __init__(
        self,
        config: Config,
        world: World,
        engine: RolloutEngine[Any],
        workers: RewardWorkers,
        tokenizer: Tokenizer,
        stop_token_ids: tuple[int, ...],
        routing: RoutingShape | None = None,
        offline: Mapping[int, OfflineGroup] | None = None,
        teachers: TeacherServers | None = None,
    ) -> None:
        """
        Args:
            routing: shape of the routing to request, see :class:`Sampling`.
            offline: this rank's groups by prompt id, to replace the engine's rollouts.
            teachers: servers to read all completions.
        """
        self._config = config
        self._world = world
        self._engine = engine
        self.workers = workers
        self._tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self._routing = routing
        self._offline = offline
        self._teachers = teachers

    def request(self, pool: PromptPool, rollouts: StepRollouts, attempt: int = 0) -> StepRollouts:
        """Request this rank's part of a step's rollouts, or only the missing part of partial
        rollouts.

        Args:
            attempt: number of earlier selections of the step.
        """
        selection = rollouts.selection
        rollout = self._config.rollout
        rows = self._find_local_rows(selection)
        prompts = [pool[int(prompt)] for prompt in selection.prompt_ids[rows]]
        rollouts.prompts = prompts
        rollouts.inclusion = selection.inclusion[rows]
        if self._offline is not None:
            return rollouts
        sampling = Sampling(
            samples=rollout.samples_per_prompt,
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            stop_token_ids=self.stop_token_ids,
            seed=derive_engine_seed(
                self._config.run.seed, rollouts.step, Purpose.SAMPLING, attempt
            ),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            sampling_mask=rollout.top_k is not None,
            routing=self._routing,
            branches=rollout.tree.branches,
        )
        if rollouts.partial is None:
            rollouts.pending = self.submit(prompts, sampling)
        else:
            rollouts.pending = self._engine.resume_partial(prompts, sampling, rollouts.partial)
        return rollouts

    def interrupt(self, running: Sequence[StepRollouts]) -> bool:
        """Interrupt rollouts, and store the partial rollouts. Collective.

        Returns:
            False if unsupported: the caller must finish the rollouts.
        """
        of_engine = running if self._offline is None else ()
        pending = [each.pending for each in of_engine]
        progress = self._engine.interrupt(pending) if pending else None
        for rollouts, partial in zip(running, progress or (), strict=progress is not None):
            rollouts.reset()
            rollouts.partial = partial
        return progress is not None

    def finish(self, rollouts: StepRollouts) -> CompleteRollouts:
        """Wait for requested rollouts, and score the completions. Collective.

        Raises:
            UserError: on every rank: more scores failed than ``reward.max_failures`` permits.
        """
        selection = rollouts.selection
        prompts = rollouts.prompts
        inclusion = rollouts.inclusion
        assert prompts is not None and inclusion is not None, "they are requested first"
        total = len(selection.prompt_ids) * self._config.rollout.samples_per_prompt
        score = self._wait_for_rollouts(prompts, rollouts.pending, total=total)
        # A rank that raised here would leave the other ranks waiting.
        result: Any
        try:
            part, groups, failures = self._build_local_batch(score(), inclusion)
            result = part, failures
        except (Exception, StandstillError) as error:
            result = error
        gathered = self._world.gather_results(result, description="scores")
        parts = [metadata for metadata, _ in gathered]
        failed = [failure for _, failures in gathered for failure in failures]
        check_failures(self._config.reward, failed, total)
        metadata = gather_metadata(parts, window=compute_remaining_window(selection, parts))
        dropped = len(selection.prompt_ids) - len(metadata.prompt_ids)
        timeouts, errors = map(float, count_failures(failed))
        counts = dict(zip(COUNTS, (float(dropped), timeouts, errors), strict=True))
        notes: tuple[str, ...] = ()
        if dropped:
            note = "groups whose scoring failed were dropped from their step; the other groups "
            notes = (note + "represent the window",)
        metrics = self._compute_metrics(metadata) | counts
        return CompleteRollouts(
            _index_by_row(metadata, groups), metadata, metrics, collect_tracebacks(failed) + notes
        )

    def merge(self, rounds: Sequence[CompleteRollouts]) -> CompleteRollouts:
        """Merge all rollouts of a step, from one or more rounds. Not collective."""
        if len(rounds) == 1:
            return rounds[0]
        metadata = gather_metadata(
            [r.metadata for r in rounds], window=sum(r.metadata.window for r in rounds)
        )
        groups = [group for each in rounds for group in each.held.values()]
        counts: dict[str, float] = {}
        for name in COUNTS:
            counts[name] = sum(each.metrics[name] for each in rounds)
        notes = dict.fromkeys(note for each in rounds for note in each.notes)
        return CompleteRollouts(
            _index_by_row(metadata, groups),
            metadata,
            self._compute_metrics(metadata) | counts,
            tuple(notes),
        )

    def close(self) -> None:
        """Close the connections to the teacher servers. Not collective."""
        if self._teachers is not None:
            self._teachers.close()

    def _find_local_rows(self, selection: Selection) -> Ints:
        rank = self._world.rank
        ranks = self._world.size
        if self._offline is not None:
            return np.flatnonzero(is_on_rank(rank, ranks, selection.prompt_ids))
        return np.arange(rank, len(selection.prompt_ids), ranks)

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling) -> Any:
        """Request completions of this rank's prompts, for :meth:`collect_groups`."""
        return self._engine.begin(prompts, sampling)

    def collect_groups(self, prompts: Sequence[Prompt], pending: Any, *, total: int) -> list[Group]:
        """Wait for completions, scored and read by teachers in the order of arrival. Collective.

        Args:
            total: completions of all ranks. After more failures than ``reward.max_failures``
                permits, no further completion is scored, because :func:`check_failures` will stop
                the run.
        """
        return self._world.run_on_all_ranks(
            self._wait_for_rollouts(prompts, pending, total=total), description="scores"
        )

    def _wait_for_rollouts(
        self,
        prompts: Sequence[Prompt],
        pending: Any,
        *,
        total: int,
    ) -> Callable[[], list[Group]]:
        """Wait for completions and teachers, while completions are scored. Collective.

        Returns:
            Function, not collective, that finishes the scoring and returns the groups.
        """
        query = TeacherQuery(self._teachers, prompts)
        if (offline := self._offline) is not None:
            held = [offline[prompt.id] for prompt in prompts]
            completions = [group.completions for group in held]
            scores = [group.scores for group in held]
            query.wait(completions, self._world)
            return lambda: list(map(build_group, prompts, query.add_logprobs(completions), scores))
        max_failures = math.floor(self._config.reward.max_failures * total)
        scoring = GroupScoring(self.workers, self._tokenizer, prompts, max_failures)

        def process_groups(complete: Iterable[tuple[int, tuple[Completion, ...]]]) -> bool:
            groups = list(complete)
            query.submit_groups(groups)
            return scoring.process_groups(groups)

        try:
            completions = self._engine.finish(pending, process_groups)
            query.wait(completions, self._world)
            return lambda: scoring.finish(query.add_logprobs(completions))
        except BaseException:
            scoring.cancel()
            query.cancel()
            raise

    def _check(self, groups: Sequence[Group]) -> None:
        rollout = self._config.rollout
        # Completions have several sequences only with a user's conversation or engine.
        if rollout.has_turns or rollout.engine_function:
            prompts = [group.prompt for group in groups]
            completions = [group.completions for group in groups]
            check_sequences(self._config, prompts, completions)
        if self._routing is not None:
            self._check_routing(groups)
        if rollout.top_k is not None:
            self._check_masks(groups)
        if rollout.tree.branches:
            self._check_forks(groups)
        if rollout.roles:
            self._check_roles(groups)

    def _check_routing(self, groups: Sequence[Group]) -> None:
        # Only a completion built by a user's conversation can lack the routing.
        if any(completion.routing is None for group in groups for completion in group.completions):
            rollout = self._config.rollout
            problem = "requires the experts of every token, and a completion has none"
            remedy = (
                f"Have {rollout.conversation or rollout.engine} return the turns of "
                "client.generate unchanged"
            )
            raise UserError(
                "loss.replay_routing", self._config.loss.replay_routing, problem, remedy
            )

    def _check_masks(self, groups: Sequence[Group]) -> None:
        rollout = self._config.rollout
        for completion in chain.from_iterable(group.completions for group in groups):
            found = find_mask_error(
                completion.sampling_mask, completion.token_ids, completion.loss_mask
            )
            if found is not None:
                source = rollout.conversation or rollout.engine_function or rollout.engine
                problem = f"requires the kept ids of sampled tokens, and {source} {found[0]}"
                raise UserError("rollout.top_k", rollout.top_k, problem, found[1])

    def _check_forks(self, groups: Sequence[Group]) -> None:
        # Only an engine without support for trees returns completions without forks.
        rollout = self._config.rollout
        if any(completion.segments is None for group in groups for completion in group.completions):
            levels = len(rollout.tree.branches)
            problem = (
                f"has {levels} levels, and the engine {rollout.engine} returned completions "
                "without forks"
            )
            remedy = (
                "Support Sampling.branches in the engine (rollout/tree.py), or set "
                "rollout.tree.branches=[]"
            )
            raise UserError("rollout.tree.branches", levels, problem, remedy)

    def _check_roles(self, groups: Sequence[Group]) -> None:
        roles = self._config.rollout.roles
        function = self._config.reward.spec
        if any(completion.segments is None for group in groups for completion in group.completions):
            problem = "require the role of every token, and a completion has none"
            remedy = "Return roles from the engine's conversations"
            raise UserError("rollout.roles", list(roles), problem, remedy)
        rewarded = (role for group in groups for score in group.scores for role in score.roles)
        if unknown := next((role for role in rewarded if role not in roles), None):
            problem = (
                f"gave a reward to the role {unknown!r}, and rollout.roles has {', '.join(roles)}"
            )
            remedy = "Return the names of rollout.roles"
            raise UserError("reward.function", function, problem, remedy)

    def _build_local_batch(
        self,
        scored: Sequence[Group],
        inclusions: Floats,
    ) -> tuple[StepMetadata, list[Group], list[Score]]:
        """Return the metadata of this rank's groups, the groups with penalties, and the failed
        scores of dropped groups.

        Raises:
            UserError: a completion does not match the settings.
        """
        self._check(scored)
        rollout = self._config.rollout
        groups = []
        inclusion = []
        numbers: list[list[Mapping[str, float]]] = []
        of_roles: list[Floats] = []
        for group, pi in zip(scored, inclusions, strict=True):
            # A group needs the rewards of all completions.
            if any(score.failure for score in group.scores):
                continue
            penalty = self._compute_penalty(group.prompt, group.completions)
            unique = count_unique_tokens(group.completions, rollout.tree.branches)
            scored_completions = zip(group.completions, group.scores, unique, strict=True)
            numbers.append([_compute_completion_metrics(*each) for each in scored_completions])
            groups.append(replace(group, rewards=group.rewards + penalty))
            inclusion.append(pi)
            if rollout.roles:
                # A role without a separate reward gets the reward of the completion.
                by_role: list[list[float]] = []
                for score in group.scores:
                    by_role.append([score.roles.get(r, score.reward) for r in rollout.roles])
                of_roles.append(np.array(by_role) + penalty[:, None])
        shape = rollout.samples_per_prompt, rollout.segments, self._world.rank
        distillation = self._config.loss.distillation
        part = build_metadata(groups, np.array(inclusion), *shape, distillation, of_roles, numbers)
        return part, groups, find_failed_scores(scored)

    def _compute_penalty(self, prompt: Prompt, completions: Sequence[Completion]) -> np.ndarray:
        limit = self._config.rollout.max_response_tokens
        buffer = self._config.reward.overlong_buffer
        if buffer is None:
            buffer = round(resolve_objective(self._config.loss).overlong_share * limit)
        lengths = [
            compute_longest_response(len(prompt.token_ids), completion)
            for completion in completions
        ]
        return compute_overlong_penalty(lengths, limit=limit, buffer=buffer)

    def _compute_metrics(self, metadata: StepMetadata) -> dict[str, float]:
        lengths = metadata.response_lengths
        groups = len(metadata.prompt_ids)
        sampled = float(metadata.sampled_lengths.sum())
        count = max(lengths.size, 1)
        # NaN: a completion without the part.
        sums = {name: float(np.nansum(values)) for name, values in metadata.parts.items()}
        means = {
            name: total / max(int((~np.isnan(metadata.parts[name])).sum()), 1)
            for name, total in sums.items()
        }
        zero_std = groups - len(find_nonzero_variance_groups(metadata, self._config))
        return {
            **dict.fromkeys(("rollout/raw_reward", "rollout/accuracy"), 0.0),
            **means,
            "rollout/reward": float(metadata.rewards.sum()) / count,
            "rollout/response_len/mean": float(lengths.sum()) / count,
            "rollout/response_len/max": float(lengths.max(initial=0)),
            "rollout/truncated_ratio": float(metadata.truncated.sum()) / count,
            "rollout/zero_std/ratio": zero_std / max(groups, 1),
            "rollout/generated_tokens": sampled,
            "rollout/unique_tokens": sums.get("rollout/unique_tokens", 0.0),
            "rollout/entropy": sums.get("rollout/entropy", 0.0) / max(sampled, 1.0),
            **compute_role_rewards(metadata, self._config.rollout.roles),
        }


def _compute_completion_metrics(
    completion: Completion,
    score: Score,
    unique: int,
) -> dict[str, float]:
    """Compute the ``parts`` of a completion's metadata."""
    # Σ −log p of the sampled tokens is an unbiased estimate of the sum of the entropies.
    return {
        **{f"reward/{name}": value for name, value in score.metrics.items()},
        "rollout/raw_reward": score.reward,
        "rollout/accuracy": float(score.correct),
        "rollout/entropy": -float(completion.logprobs[completion.loss_mask].sum(dtype=np.float64)),
        "rollout/unique_tokens": float(unique),
    }


def _index_by_row(metadata: StepMetadata, groups: Sequence[Group]) -> dict[int, Group]:
    rows = {int(prompt): row for row, prompt in enumerate(metadata.prompt_ids)}
    return {rows[group.prompt.id]: group for group in groups}
