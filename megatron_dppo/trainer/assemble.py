"""Build the parts of a run on this rank, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from megatron_dppo.bridge.export import (
    check_adapter_destination,
    check_destination,
    export_adapter,
    export_hf,
)
from megatron_dppo.bridge.hf_directory import plan_adapter_file, plan_files
from megatron_dppo.bridge.load import init_adapters, load_checkpoint, load_policy
from megatron_dppo.bridge.stream import adapter_stream, weight_stream
from megatron_dppo.config import Config, LoraConfig, replace
from megatron_dppo.data.date import with_date
from megatron_dppo.data.offline import OfflineGroup, load_offline
from megatron_dppo.data.prompts import PromptPool, load_prompts
from megatron_dppo.data.tokenizer import (
    Tokenizer,
    load_tokenizer,
    pad_token_id,
    stop_note,
    stop_token_ids,
)
from megatron_dppo.evaluation.evaluator import EvalProblem, load_problems
from megatron_dppo.models.actor import Actor, Policy
from megatron_dppo.models.frozen import BasePolicy, Reference, Teacher
from megatron_dppo.models.policy import PolicyModel
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.observe.console import Console
from megatron_dppo.parallel.layout import resolve_layout
from megatron_dppo.parallel.world import World
from megatron_dppo.process.files import FolderLock
from megatron_dppo.process.streams import print_message
from megatron_dppo.rewards.workers import RewardWorkers
from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.packing import pack_sequences
from megatron_dppo.rl.types import Pack, RoutingShape
from megatron_dppo.rollout.collect import Collector
from megatron_dppo.rollout.conversation_functions import load_rollout_function
from megatron_dppo.rollout.engine import RolloutEngine, WeightSource
from megatron_dppo.rollout.local import LocalEngine
from megatron_dppo.rollout.local_conversations import LocalConversations
from megatron_dppo.rollout.teachers import TeacherServers
from megatron_dppo.trainer.functions import load_engine_factory
from megatron_dppo.trainer.preflight import make_label_check

P_co = TypeVar("P_co", bound=Policy, covariant=True)
FrozenT = TypeVar("FrozenT", bound=Policy)


@dataclass(frozen=True, slots=True)
class PolicyParts(Generic[P_co]):
    """The policy on this rank, with or without an optimizer, and the ways out for the weights."""

    config: Config
    world: World
    shape: PolicyShape
    actor: P_co
    tokenizer: Tokenizer
    pad_id: int
    stop_ids: tuple[int, ...]

    @property
    def routing(self) -> RoutingShape | None:
        """Shape of the engine's routing; ``None``: no routing."""
        return self.shape.routing if self.config.loss.replay_routing == "rollout" else None

    @property
    def source(self) -> WeightSource:
        """Weights for engines: the actor's, or only the adapters."""
        stream = adapter_stream if self.config.rollout.sync.adapter else weight_stream
        return partial(stream, self.actor.chunks, self.world)

    def sync(self, engine: RolloutEngine[Any], version: int) -> None:
        """Stream :attr:`source` to an engine, which then generates with ``version``. Collective."""
        engine.pause()
        # Servers need room for their weights.
        self._release_memory()
        engine.update_weights(self.source, version)
        # Freed buckets make room for the servers' cache.
        self._release_memory()
        engine.resume()

    def build_engine(self) -> RolloutEngine[Any]:
        """Return this rank's engine, without weights until the first sync."""
        model = self.config.model
        rollout = self.config.rollout
        if rollout.served:
            from megatron_dppo.rollout.servers.engine import ServerEngine

            log = partial(Console(self.config.run.steps).print_note, repeat=True)
            # A server measures the free memory at its start.
            self._release_memory()
            engine = ServerEngine(self.config, self.world, self.shape, log)
            # Pause, because a checkpoint may still have to be loaded.
            engine.pause()
            return engine
        make = self.world.run_on_all_ranks(
            lambda: load_engine_factory(self.config), description="import of an engine"
        )
        if make is not None:
            return make(
                model.folder, device=self.world.device, dtype=model.torch_dtype, world=self.world
            )
        function = self.world.run_on_all_ranks(
            lambda: load_rollout_function(self.config), description="import of a rollout function"
        )
        conversations = None
        if function is not None:
            limits = {"timeout_s": rollout.request_timeout_s, "end_s": rollout.timeout_s}
            limits["late_s"] = self.config.run.stall_warning_s
            conversations = LocalConversations(function, attempts=rollout.attempts, **limits)
        return LocalEngine(
            model.folder,
            device=self.world.device,
            dtype=model.torch_dtype,
            max_batch=rollout.max_batch,
            world=self.world,
            conversations=conversations,
        )

    def _release_memory(self) -> None:
        if self.config.rollout.colocated:
            self.actor.release_memory()

    def build_collector(
        self,
        engine: RolloutEngine[Any],
        workers: RewardWorkers,
        offline: Mapping[int, OfflineGroup] | None = None,
    ) -> Collector:
        """Return the collector of rollouts to train on. Collective."""
        config = self.config
        world = self.world
        teachers = (
            TeacherServers(config, world, self.tokenizer)
            if config.loss.distillation.servers
            else None
        )
        parts = self.tokenizer, self.stop_ids, self.routing, offline, teachers
        return Collector(config, world, engine, workers, *parts)

    def build_collectors(
        self,
        engine: RolloutEngine[Any],
        workers: Mapping[str, RewardWorkers],
    ) -> dict[str, Collector]:
        """Return a collector per verifier, for evaluations."""
        parts = self.tokenizer, self.stop_ids
        return {
            v: Collector(self.config, self.world, engine, each, *parts)
            for v, each in workers.items()
        }

    def load_reference(self) -> Reference | BasePolicy:
        """Load the initial policy, frozen, as the reference of the KL term. Collective."""
        config = self.config
        # With adapters the actor's own weights are frozen, and need no copy.
        if config.model.lora.rank:
            return BasePolicy(self.actor)
        reference = _load_frozen(
            Reference, config, self.world, config.rollout.temperature, self.shape
        )
        if config.model.reference_on_host:
            name = "model.reference_on_host"
            reference.offload_weights(name, "true", f"set {name}=false")
        return reference

    def load_teachers(self) -> list[Teacher]:
        """Load the models of ``loss.distillation``, in the policy's layout. Collective."""
        found = []
        for path in self.config.loss.distillation.models:
            config = make_teacher_config(self.config, path)
            shape = self.world.run_on_all_ranks(partial(read_shape, config.model.folder))
            found.append(
                _load_frozen(Teacher, config, self.world, config.rollout.temperature, shape)
            )
            # Several teachers wait in host memory, and only the active one is on the device.
            if len(self.config.loss.distillation.models) > 1:
                found[-1].offload_weights("loss.distillation.teachers", path, "name fewer teachers")
        return found

    def pack(
        self,
        samples: Sequence[TrainingSample],
        *,
        replicas: int = 1,
        min_per_rank: int = 1,
    ) -> list[tuple[Sequence[int], Pack]]:
        """Pack samples for this replica, and return each pack with the indices of its samples.

        Args:
            samples: samples, the same on every rank.
            replicas: replicas that share the samples; 1: every replica packs all samples.
            min_per_rank: fewest packs per replica.
        """
        layout = self.config.layout
        most = self.config.pack.max_tokens
        packing = pack_sequences(
            np.array([len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]),
            ranks=replicas,
            max_tokens=most,
            align=layout.row_multiple,
            capacity_multiple=self.world.compute_capacity_multiple(layout, most),
            window=self.config.pack.window,
            min_per_rank=min_per_rank,
            least_per_rank=layout.min_packs,
        )
        packed: list[tuple[Sequence[int], Pack]] = []
        for rows in packing.packs[self.world.dp_rank % replicas]:
            held = [samples[i] for i in rows]
            pack = build_pack(held, packing.capacity, self.pad_id, align=layout.row_multiple)
            packed.append((rows, pack))
        return packed

    def check_export(self, out: Path, *, setting: str) -> None:
        """Check now that ``export`` can write to ``out`` after the last step. Collective."""
        size = plan_files(self.shape, self.config.model.torch_dtype).total_bytes
        self.world.broadcast(
            lambda: check_destination(self.config.model.folder, out, size, setting)
        )

    def export(self, out: Path, *, setting: str) -> None:
        """Write the actor as a Hugging Face directory; errors name ``setting``. Collective."""
        model = self.config.model
        chunks = self.actor.chunks
        export_hf(
            chunks,
            self.world,
            source=model.folder,
            out=out,
            dtype=model.torch_dtype,
            setting=setting,
        )

    def check_export_run(self) -> None:
        folder = Path(self.config.run.dir)
        model = self.config.model
        self.check_export(folder / "hf", setting="run.dir")
        if model.lora.rank:
            plan = plan_adapter_file(self.shape, model.lora, model.torch_dtype)
            self.world.broadcast(lambda: check_adapter_destination(folder / "adapter", plan))

    def export_run(self) -> None:
        """Write the final result into the run's folder: policy, and adapters, if any."""
        folder = Path(self.config.run.dir)
        model = self.config.model
        self.export(folder / "hf", setting="run.dir")
        if model.lora.rank:
            base = model.checkpoint or model.path
            out = folder / "adapter"
            export_adapter(
                self.actor.chunks, self.world, base=base, out=out, dtype=model.torch_dtype
            )


def assemble_policy(config: Config, world: World, *, temperature: float) -> PolicyParts[Actor]:
    """Build the actor with the initial policy's weights."""

    def actor(shape: PolicyShape) -> Actor:
        layout = resolve_layout(config.layout, world.size)
        load = partial(_load, config=config, shape=shape, world=world)
        return Actor(
            shape, config.model, layout, config.optimizer, world, temperature=temperature, load=load
        )

    return _assemble(config, world, actor)


def assemble_frozen(config: Config, world: World, *, temperature: float) -> PolicyParts[Policy]:
    """Build the policy like :func:`assemble_policy`, without gradients and optimizer."""
    return _assemble(config, world, partial(_load_frozen, Policy, config, world, temperature))


def _assemble(
    config: Config,
    world: World,
    make: Callable[[PolicyShape], P_co],
) -> PolicyParts[P_co]:
    folder = config.model.folder
    run_dir = Path(config.run.dir)
    config = replace(config, data=world.broadcast(lambda: with_date(config.data, folder, run_dir)))
    shape = world.run_on_all_ranks(lambda: read_shape(folder))
    tokenizer = world.run_on_all_ranks(lambda: load_tokenizer(folder))
    stops = config.rollout.stop_token_ids or stop_token_ids(folder, tokenizer)
    has_default_stops = config.rollout.stop_token_ids is None
    if world.is_rank0 and has_default_stops and (note := stop_note(folder, tokenizer)):
        print_message(note)
    policy = make(shape)
    if config.loss.replay_routing != "none":
        policy.enable_routing_replay()
    return PolicyParts(
        config, world, shape, policy, tokenizer, pad_token_id(tokenizer), tuple(stops)
    )


def _load_frozen(
    kind: type[FrozenT],
    config: Config,
    world: World,
    temperature: float,
    shape: PolicyShape,
) -> FrozenT:
    policy = kind(
        shape,
        config.model,
        resolve_layout(config.layout, world.size),
        world,
        temperature=temperature,
    )
    _load(policy.chunks, config, shape, world)
    return policy


def make_teacher_config(config: Config, path: str) -> Config:
    """Return the run's configuration with a teacher instead of the policy."""
    given = config.loss.distillation
    checkpoint = given.teacher_checkpoint if path == given.teacher else None
    model = {"path": path, "checkpoint": checkpoint, "lora": LoraConfig()}
    return replace(config, model=replace(config.model, **model))


def load_pools(
    parts: PolicyParts[Any],
) -> tuple[PromptPool, list[EvalProblem], dict[int, OfflineGroup] | None]:
    """Load the prompts and problems of a run. Collective.

    Returns:
        Training pool; held-out problems; and this rank's part of ``data.rollouts``, if any.
    """
    config = parts.config
    world = parts.world
    shape = parts.shape
    tokenizer = parts.tokenizer
    offline: dict[int, OfflineGroup] | None = None
    if config.data.rollouts is None:
        train = load_training_pool(parts)
    else:
        share = {"rank": world.rank, "ranks": world.size}
        load = partial(load_offline, config, tokenizer, shape.vocab_size, parts.stop_ids, **share)
        train, offline = world.run_on_all_ranks(load)
        world.run_on_all_ranks(lambda: config.loss.distillation.check_sources(train.data_sources))
    problems = world.run_on_all_ranks(
        lambda: load_problems(config, tokenizer, max_positions=shape.max_positions)
    )
    # Accuracy on problems from the training data would be too high.
    count, where = 0, ""
    if world.is_rank0:
        count, where = train.find_overlap([problem.prompt for problem in problems])
    if count:
        overlap = (
            f"{count} of {len(problems)} held-out problems are also in the training data: {where}"
        )
        Console(config.run.steps).print_note(
            f"{overlap}; their accuracy does not measure unseen problems"
        )
    return train, problems, offline


def load_training_pool(parts: PolicyParts[Any]) -> PromptPool:
    """Load the training prompts, with labels that the reward can read. Collective."""
    data = parts.config.data
    check = make_label_check(parts.config)
    taught = parts.config.loss.distillation

    def load() -> PromptPool:
        pool = load_prompts(data, parts.tokenizer, split="train", check=check)
        taught.check_sources(pool.data_sources)
        return pool

    return parts.world.run_on_all_ranks(load)


def _load(chunks: Sequence[PolicyModel], config: Config, shape: PolicyShape, world: World) -> None:
    if config.model.checkpoint is not None:
        load_checkpoint(chunks, Path(config.model.checkpoint), world)
    else:
        world.run_on_all_ranks(lambda: load_policy(chunks, config.model.folder, world))
    # Frozen policies without adapters are unaffected.
    init_adapters(chunks, world, seed=config.run.seed)


def acquire_run_lock(config: Config, world: World, to_close: ExitStack) -> Callable[[], None]:
    """Lock ``run.dir`` for all ranks; rank 0 holds the lock. Collective.

    Returns:
        Check that raises, on rank 0, after another run has taken the lock.

    Raises:
        UserError: on every rank, if another run holds the lock.
    """
    log = partial(print, flush=True)
    folder = Path(config.run.dir)

    def take() -> Callable[[], None]:
        check = to_close.enter_context(closing(FolderLock(folder, "run.dir", log))).check
        with_date(config.data, config.model.folder, folder, keep=True)
        return check

    return world.run_on_all_ranks(
        lambda: take() if world.is_rank0 else lambda: None,
        description="look at the lock of run.dir",
    )
