"""Assignment of GPUs to training and generation, and the work of a step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megatron_dppo.config import (
    WEIGHT_BYTES,
    CompletionPruningConfig,
    Config,
    LayoutConfig,
    PromptPruningConfig,
    replace,
)
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import GPUS, Assumptions, Gpu
from megatron_dppo.models.shape import PolicyShape, check_layout
from megatron_dppo.parallel.layout import compute_capacity_multiple, resolve_layout
from megatron_dppo.rl.advantages import ESTIMATORS
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.packing import resolve_min_packs
from megatron_dppo.rl.pruning.schedule import compute_window_size, scheduled_keep
from megatron_dppo.rollout.servers.launch import tensor_parallel


@dataclass(frozen=True, slots=True)
class Placement:
    """Use of the cluster's GPUs."""

    layout: LayoutConfig
    """The run's layout, with ``dp`` set."""
    ranks: int
    servers: tuple[int, ...]
    """Tensor-parallel ranks of each server. Each rank is a server under the local engine."""
    shared: bool
    """Whether servers and trainer are on the same GPUs."""
    gpus: int
    """Number of paid GPUs."""

    @property
    def replica(self) -> int:
        """Ranks that share the optimizer's state of the same weights, except experts."""
        return (self.layout.dp or 1) * self.layout.cp

    @property
    def expert_replica(self) -> int:
        """Ranks that share the optimizer's state of the same experts."""
        return self.replica * self.layout.tp // (self.layout.expert_tp * self.layout.ep)


def assign_gpus(config: Config, shape: PolicyShape) -> Placement:
    """Assign GPUs to the trainer and the servers, as a run does.

    Raises:
        UserError: the layout does not divide the policy or the cluster, or a server does not fit a
            node.
    """
    check_layout(shape, config.layout)
    cluster = config.cluster
    rollout = config.rollout
    actors = cluster.nodes * cluster.gpus_per_node
    extra = cluster.server_nodes * cluster.gpus_per_node
    shared = not rollout.served or rollout.colocated
    servers = _list_server_sizes(config, shape)
    beside = sum(servers) if rollout.launch.count and not shared else 0
    if beside >= actors:
        problem = (
            f"its servers take {beside} of the {actors} GPUs of cluster.nodes = {cluster.nodes}"
        )
        raise UserError(
            "rollout.launch.count",
            rollout.launch.count,
            problem,
            "Lower it, or raise cluster.nodes",
        )
    layout = config.layout
    ranks = actors - beside
    model = layout.tp * layout.pp * layout.cp
    dp = layout.dp or ranks // model
    if model * dp != ranks or not dp:
        given = f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} x dp {layout.dp or 'any'}"
        of_nodes = f"cluster.nodes = {cluster.nodes} with {cluster.gpus_per_node} each"
        problem = f"does not divide the {ranks} GPUs that the trainer has of {of_nodes}"
        remedy = (
            f"Give the trainer a multiple of {model * (layout.dp or 1)} GPUs, or lower "
            "layout.tp, pp, cp or dp"
        )
        raise UserError("layout", given, problem, remedy)
    layout = resolve_layout(layout, ranks)
    return Placement(
        layout, ranks, servers if rollout.served else (1,) * ranks, shared, actors + extra
    )


def _list_server_sizes(config: Config, shape: PolicyShape) -> tuple[int, ...]:
    """List the tensor-parallel ranks of each server. On Slurm, servers fill every server node."""
    rollout = config.rollout
    cluster = config.cluster
    if not rollout.served:
        return ()
    tp = rollout.launch.tp if isinstance(rollout.launch.tp, int) else rollout.launch.tp[0]
    count = len(rollout.servers)
    if rollout.servers == "slurm":
        if not cluster.server_nodes:
            problem = (
                "rollout.servers = slurm runs servers on the nodes of a second component, "
                "and there are none"
            )
            raise UserError("cluster.server_nodes", 0, problem, "Set it to 1 or more")
        count = cluster.server_nodes * max(cluster.gpus_per_node // tp, 1)
    sizes = tensor_parallel(rollout) if rollout.launch.count else (tp,) * count
    for size in sizes:
        if size > cluster.gpus_per_node:
            problem = (
                f"is more than the {cluster.gpus_per_node} GPUs of a node (cluster.gpus_per_node)"
            )
            raise UserError(
                "rollout.launch.tp", size, problem, f"Lower it to {cluster.gpus_per_node} or less"
            )
        if shape.heads % size:
            problem = f"does not divide the policy's {shape.heads} query heads"
            raise UserError(
                "rollout.launch.tp", size, problem, "Set it to a power of two, as GPUs go"
            )
    return sizes


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response lengths in tokens: P(longer than s) = (1 - s/limit)^a, with a by the mean.

    - Mean near the limit: most responses are cut off at the limit.
    - Small mean: few responses are near the limit.
    """

    mean: float
    limit: int

    @property
    def exponent(self) -> float:
        return self.limit / self.mean - 1.0

    def compute_tail_fraction(self, tokens: float) -> float:
        return max(1.0 - tokens / self.limit, 0.0) ** self.exponent

    @property
    def token_weighted_mean(self) -> float:
        """E[l²]/E[l], the mean over tokens of their response's length."""
        return 2.0 * self.limit / (self.exponent + 2.0)


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a step, on average over the run."""

    prompts: float
    completions: float
    generated: float
    """Tokens rolled out, without prompts."""
    kept: float
    trained: float
    """Tokens trained on, prompts included; shared tokens of a pack count once."""
    context: float
    """Length of a token's sequence, mean over tokens trained on; causal attention covers half on
    average."""
    responses: float
    """Tokens trained on, without prompts."""
    updates: int


class MeanPack(NamedTuple):
    """An update's pack on one rank, on average over the run."""

    tokens: int
    """Slots of the context-parallel part, padding included."""
    pairs: float
    """Σ n² over sequences of n tokens; causal attention computes half of these pairs."""
    responses: float
    """Tokens that enter the head."""


@dataclass(frozen=True)
class Setup:
    config: Config
    shape: PolicyShape
    placement: Placement
    assume: Assumptions

    @property
    def layout(self) -> LayoutConfig:
        return self.placement.layout

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.config.cluster.gpu]

    @property
    def rate(self) -> float:
        """Data sheet's operations per second of one GPU."""
        return self.gpu.get_peak_flops(self.config.model.dtype)

    @property
    def width(self) -> int:
        """Bytes of a weight, and of an activation."""
        return WEIGHT_BYTES[self.config.model.dtype]

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert-parallel rank / the mean of the ranks."""
        return self.assume.expert_imbalance if self.placement.layout.ep > 1 else 1.0

    @property
    def prompt(self) -> float:
        """Mean tokens."""
        return min(self.assume.prompt_tokens, self.config.data.max_prompt_tokens)

    @property
    def lengths(self) -> Lengths:
        limit = self.config.rollout.max_response_tokens
        return Lengths(min(self.assume.response_share, 0.999) * limit, limit)

    @cached_property
    def unpruned(self) -> Setup:
        return dataclasses.replace(self, config=disable_pruning(self.config))

    @cached_property
    def work(self) -> Work:
        config = self.config
        assume = self.assume
        mean = self.lengths.mean
        prompt = self.prompt
        steps = config.run.steps
        samples = config.rollout.samples_per_prompt
        schedules = {config.pruning.prompts.schedule, config.pruning.completions.schedule}
        constant = all(
            schedule.shape == "constant" and not schedule.off_last for schedule in schedules
        )
        # A thousand steps sample the schedules of a million.
        every = steps if constant else max(steps // 1000, 1)
        shares = [_compute_shares(config, step, assume) for step in range(0, steps, every)]
        prompts = sum(rolled for rolled, _ in shares) / len(shares)
        kept = sum(trained for _, trained in shares) / len(shares)
        completions = prompts * samples
        alone = kept * samples * (prompt + mean)
        shared = _count_shared_prompts(self, prompts, kept * samples) * prompt
        mean_context = prompt + self.lengths.token_weighted_mean
        pairs = alone * mean_context - shared * prompt
        return Work(
            prompts=prompts,
            completions=completions,
            generated=completions * mean,
            kept=kept * samples,
            trained=alone - shared,
            context=pairs / (alone - shared) if alone else mean_context,
            responses=kept * samples * mean,
            updates=config.loss.updates_per_rollout,
        )

    @cached_property
    def packs(self) -> int:
        """Packs of a minibatch on a replica."""
        config = self.config
        layout = self.layout
        work = self.work
        tokens = work.trained / work.updates
        replicas = layout.dp or 1
        most = config.pack.max_tokens
        sequences = work.kept / work.updates / replicas
        # The packer makes the fewest packs, but enough for the pipeline. Each sequence longer than
        # half a pack has a pack alone.
        full = ceil(tokens / (replicas * most * self.assume.pack_fill))
        alone = ceil(sequences * self.lengths.compute_tail_fraction(most / 2 - self.prompt))
        wanted = min(resolve_min_packs(config.pack.min_per_rank, layout.pp), int(sequences))
        return max(full, alone, wanted, layout.min_packs)

    @cached_property
    def mean_pack(self) -> MeanPack:
        """Mean of an update's packs. Capacity: the mean pack's tokens, or the longest sequence."""
        config = self.config
        layout = self.layout
        work = self.work
        share = 1.0 / (work.updates * (layout.dp or 1) * self.packs)
        multiple = compute_capacity_multiple(layout, config.pack.max_tokens, cuda=True)
        longest = self.prompt + self.lengths.limit
        needed = max(work.trained * share / self.assume.pack_fill, longest)
        slots = ceil(needed / multiple) * multiple
        slots = min(slots, config.pack.max_tokens // multiple * multiple)
        return MeanPack(
            slots // layout.cp,
            work.trained * share * work.context,
            work.responses * share / layout.cp,
        )


def disable_pruning(config: Config) -> Config:
    """Return the configuration without pruning."""
    off = replace(
        config.pruning,
        prompts=PromptPruningConfig(rule="none"),
        completions=CompletionPruningConfig(rule="none"),
        resample="none",
    )
    return replace(config, pruning=off)


def _count_shared_prompts(setup: Setup, prompts: float, kept: float) -> float:
    """Count prompts of kept completions already in their pack."""
    config = setup.config
    # On GPUs ``pack.share_prefixes`` = ``auto`` shares no prefixes.
    if config.pack.share_prefixes != "on" or not kept:
        return 0.0
    samples = config.rollout.samples_per_prompt
    trained_on = prompts * (1.0 - max(1.0 - kept / (prompts * samples), 0.0) ** samples)
    # A prefix group larger than a pack is split, and its prompt stored again.
    group = setup.prompt + kept / trained_on * setup.lengths.mean
    return max(kept - trained_on * ceil(group / config.pack.max_tokens), 0.0)


def _compute_shares(config: Config, step: int, assume: Assumptions) -> tuple[float, float]:
    """Return a step's prompts rolled out, and completions trained on in groups of G."""
    pruning = config.pruning
    total = config.run.steps
    window = float(compute_window_size(config))
    keep = scheduled_keep(pruning.prompts.keep, pruning.prompts.schedule, step, total)
    threshold = 1.0 - assume.low_share
    # Without a KL term or an entropy bonus, groups of equal reward have no gradient, and no rule
    # trains on them. A user's estimator is not loaded, and assumed to do the same.
    estimator = ESTIMATORS.get(resolve_objective(config.loss).advantage)
    equal_idle = estimator is None or estimator.zero_if_equal
    others = config.loss.kl_coef or config.loss.distillation_coef or config.loss.entropy.is_used
    live = assume.mixed_share if equal_idle and not others else 1.0
    match pruning.prompts.named:
        case "dynamic_sampling":
            rolled = window / assume.mixed_share
            usable = window
            live = 1.0
        case "greso":
            refilled = pruning.resample == "prompts"
            rolled = window if refilled else window * assume.mixed_share
            usable = rolled
            live = 1.0
        case "threshold" | "threshold_deterministic":
            rolled = usable = window * (threshold + assume.low_share * keep)
        case rule:
            rolled = usable = window * (keep if rule == "neyman" else 1.0)
    completions = pruning.completions
    share = scheduled_keep(completions.share, completions.schedule, step, total)
    match completions.named, share:
        case "none", _:
            kept = live
        case _, "auto":
            kept = live * assume.efficient_share
        case "threshold" | "threshold_deterministic", keep:
            kept = live * (threshold + assume.low_share * keep)
        # The budget is a fraction of the tokens rolled out.
        case _, keep:
            kept = min(keep, live)
    return rolled, usable * kept
