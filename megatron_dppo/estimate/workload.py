"""Which GPUs train and which generate, and how much there is to do in a step."""

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
    """How the GPUs of the cluster are used."""

    layout: LayoutConfig
    """With ``dp`` filled in."""
    ranks: int
    """Ranks of the trainer."""
    servers: tuple[int, ...]
    """Tensor-parallel ranks of each server. With the local engine, each rank of the trainer is a
    server of one rank."""
    shared: bool
    """Whether servers and the trainer are on the same GPUs."""
    gpus: int
    """All GPUs that are paid for."""

    @property
    def replica(self) -> int:
        """Number of ranks that share the optimizer's state of the same weights, but for experts."""
        return (self.layout.dp or 1) * self.layout.cp

    @property
    def expert_replica(self) -> int:
        """The same for the weights of experts."""
        return self.replica * self.layout.tp // (self.layout.expert_tp * self.layout.ep)


def assign_gpus(config: Config, shape: PolicyShape) -> Placement:
    """Give the cluster's GPUs to the trainer and the servers, as a run does.

    Raises:
        UserError: for a layout that does not divide the policy or the cluster, and servers that do
            not fit a node.
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
    """Tensor-parallel ranks of each server. On Slurm, each server node has as many servers as
    fit."""
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
    """How long responses are, in tokens: P(longer than s) = (1 - s/limit)^a, where the mean
    determines a.

    If the mean is near the limit, most responses are cut off there. If it is small, few come near
    the limit.
    """

    mean: float
    limit: int

    @property
    def exponent(self) -> float:
        return self.limit / self.mean - 1.0

    def compute_tail_fraction(self, tokens: float) -> float:
        """Share of the responses that are longer."""
        return max(1.0 - tokens / self.limit, 0.0) ** self.exponent

    @property
    def token_weighted_mean(self) -> float:
        """Mean over tokens of the length of their response: E[l²]/E[l]."""
        return 2.0 * self.limit / (self.exponent + 2.0)


@dataclass(frozen=True, slots=True)
class Work:
    """How much there is to do in a step, on average over the run."""

    prompts: float
    """Prompts rolled out."""
    completions: float
    """Completions rolled out."""
    generated: float
    """Tokens rolled out, without prompts."""
    kept: float
    """Completions trained on."""
    trained: float
    """Tokens trained on, prompts included; those that a pack holds once count once."""
    context: float
    """Tokens of their sequence, mean over those trained on; they see half of it."""
    responses: float
    """Tokens trained on, without prompts."""
    updates: int


class MeanPack(NamedTuple):
    """A pack of an update, on average over the run, as one rank has it."""

    tokens: int
    """Slots of its context-parallel part, padding included."""
    pairs: float
    """Σ n² over its sequences of n tokens; causal attention computes half of these pairs."""
    responses: float
    """Tokens that go through the head."""


@dataclass(frozen=True)
class Setup:
    """Input of every estimate: a run, its policy, its machines, and the assumptions."""

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
        """Products and sums per second of one GPU, by its data sheet."""
        return self.gpu.get_peak_flops(self.config.model.dtype)

    @property
    def width(self) -> int:
        """Bytes of a weight, and of an activation."""
        return WEIGHT_BYTES[self.config.model.dtype]

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert-parallel rank, over their mean."""
        return self.assume.expert_imbalance if self.placement.layout.ep > 1 else 1.0

    @property
    def prompt(self) -> float:
        """Mean tokens of a prompt."""
        return min(self.assume.prompt_tokens, self.config.data.max_prompt_tokens)

    @property
    def lengths(self) -> Lengths:
        limit = self.config.rollout.max_response_tokens
        return Lengths(min(self.assume.response_share, 0.999) * limit, limit)

    @cached_property
    def unpruned(self) -> Setup:
        """The setup of the same run without pruning."""
        return dataclasses.replace(self, config=disable_pruning(self.config))

    @cached_property
    def work(self) -> Work:
        """The work of a step, on average over the run."""
        config = self.config
        assume = self.assume
        mean = self.lengths.mean
        prompt = self.prompt
        steps = config.run.steps
        samples = config.rollout.samples_per_prompt
        schedules = {config.pruning.prompts.schedule, config.pruning.completions.schedule}
        constant = {schedule.shape for schedule in schedules} == {"constant"} and not any(
            s.off_last for s in schedules
        )
        every = (
            steps if constant else max(steps // 1000, 1)
        )  # a thousand steps show the schedules of a million
        shares = [_compute_shares(config, step, assume) for step in range(0, steps, every)]
        prompts, kept = (sum(values) / len(shares) for values in zip(*shares, strict=True))
        completions = prompts * samples
        alone = kept * samples * (prompt + mean)
        shared = _count_shared_prompts(self, prompts, kept * samples) * prompt
        pairs = alone * (prompt + self.lengths.token_weighted_mean) - shared * prompt
        return Work(
            prompts=prompts,
            completions=completions,
            generated=completions * mean,
            kept=kept * samples,
            trained=alone - shared,
            context=pairs / (alone - shared)
            if alone
            else prompt + self.lengths.token_weighted_mean,
            responses=kept * samples * mean,
            updates=config.loss.updates_per_rollout,
        )

    @cached_property
    def packs(self) -> int:
        """Packs of a minibatch on a replica. The packer makes as few as it can, but enough for the
        pipeline; sequences longer than half a pack are in packs of their own."""
        config = self.config
        layout = self.layout
        work = self.work
        tokens = work.trained / work.updates
        replicas = layout.dp or 1
        most = config.pack.max_tokens
        sequences = work.kept / work.updates / replicas
        full = ceil(tokens / (replicas * most * self.assume.pack_fill))
        alone = ceil(sequences * self.lengths.compute_tail_fraction(most / 2 - self.prompt))
        wanted = min(resolve_min_packs(config.pack.min_per_rank, layout.pp), int(sequences))
        return max(full, alone, wanted, layout.min_packs)

    @cached_property
    def mean_pack(self) -> MeanPack:
        """The pack of which ``packs`` makes an update. Its capacity is what its
        tokens, or the longest sequence, need."""
        config = self.config
        layout = self.layout
        work = self.work
        share = 1.0 / (work.updates * (layout.dp or 1) * self.packs)
        multiple = compute_capacity_multiple(layout, config.pack.max_tokens, cuda=True)
        longest = self.prompt + self.lengths.limit
        slots = (
            ceil(max(work.trained * share / self.assume.pack_fill, longest) / multiple) * multiple
        )
        slots = min(slots, config.pack.max_tokens // multiple * multiple)
        return MeanPack(
            slots // layout.cp,
            work.trained * share * work.context,
            work.responses * share / layout.cp,
        )


def disable_pruning(config: Config) -> Config:
    """The same run without pruning. Every prompt is rolled out, every completion with a gradient is
    trained on."""
    off = replace(
        config.pruning,
        prompts=PromptPruningConfig(rule="none"),
        completions=CompletionPruningConfig(rule="none"),
        resample="none",
    )
    return replace(config, pruning=off)


def _count_shared_prompts(setup: Setup, prompts: float, kept: float) -> float:
    """How many of the kept completions' prompts a pack holds already. On GPUs
    ``pack.share_prefixes`` = ``auto`` shares nothing. A family is cut where it does not fit into a
    pack."""
    config = setup.config
    if config.pack.share_prefixes != "on" or not kept:
        return 0.0
    samples = config.rollout.samples_per_prompt
    trained_on = prompts * (1.0 - max(1.0 - kept / (prompts * samples), 0.0) ** samples)
    family = setup.prompt + kept / trained_on * setup.lengths.mean
    return max(kept - trained_on * ceil(family / config.pack.max_tokens), 0.0)


def _compute_shares(config: Config, step: int, assume: Assumptions) -> tuple[float, float]:
    """Prompts that are rolled out in a step, and completions that are trained on, in groups of G.

    Without a KL term, groups of equal reward have no gradient: they are not trained on, whatever
    the rule.
    """
    pruning = config.pruning
    total = config.run.steps
    window = float(compute_window_size(config))
    keep = scheduled_keep(pruning.prompts.keep, pruning.prompts.schedule, step, total)
    threshold = 1.0 - assume.low_share
    estimator = ESTIMATORS.get(resolve_objective(config.loss).advantage)
    equal_idle = estimator is None or estimator.zero_if_equal  # the user's is not loaded
    rewards_alone = config.loss.kl_coef == config.loss.distillation_coef == 0.0
    live = assume.mixed_share if equal_idle and rewards_alone else 1.0
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
        case "threshold":
            rolled = usable = window * (threshold + assume.low_share * keep)
        case rule:
            rolled = usable = window * (keep if rule == "neyman" else 1.0)
    match (
        pruning.completions.named,
        scheduled_keep(pruning.completions.share, pruning.completions.schedule, step, total),
    ):
        case "none", _:
            kept = live
        case _, "auto":
            kept = live * assume.efficient_share
        case "threshold" | "threshold_deterministic", keep:
            kept = live * (threshold + assume.low_share * keep)
        case _, keep:  # a budget of the tokens that were rolled out
            kept = min(keep, live)
    return rolled, usable * kept
