"""The trained policy on this rank: shard, optimizer, and passes over packs.

Gradients are sums, so that a plan gives the same gradient in every layout. The plan divides the
loss of a token by the minibatch's normaliser. ``calculate_per_token_loss`` turns off Megatron's
division by microbatches or replicas, and the finalize step gets no token count.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_dppo.config import LayoutConfig, ModelConfig, OptimizerConfig
from megatron_dppo.errors import UserError
from megatron_dppo.models.context import PackShare, compute_share
from megatron_dppo.models.layer_specs import add_to_main_gradients, check_attention
from megatron_dppo.models.lora import add_expert_gradients
from megatron_dppo.models.optimizer import (
    OffloadedState,
    compute_gradient_squares,
    list_optimizers,
    prepare_adam_state,
)
from megatron_dppo.models.policy import PolicyModel, build_packed_sequence, build_policy
from megatron_dppo.models.prefix_attention import build_shared_prefixes
from megatron_dppo.models.responses import Responses, to_device
from megatron_dppo.models.routing import ExpertLoad, RoutingReplay
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.parallel.layout import count_interleaved_packs
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Pack

Sums = dict[str, torch.Tensor]


Loss = Callable[[Responses], tuple[torch.Tensor, Sums]]
"""Map a pack's responses to the pack's part of the minibatch's loss (a sum) and to sums for
metrics."""
Reduce = Callable[
    [Pack, dict[str, torch.Tensor], tuple[torch.Tensor, ...]], tuple[torch.Tensor, Sums]
]
"""Same as :data:`Loss`, from a pack, its arrays on the device, and the last stage's outputs."""
Function = TypeVar("Function", bound=Callable[..., Any])


def with_gradients(function: Function) -> Function:
    """Run a function with gradients enabled."""
    # A user's file may have disabled gradients for this thread: many judge scripts begin with
    # ``torch.set_grad_enabled(False)``.
    return torch.inference_mode(False)(torch.enable_grad()(function))


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Result of one optimizer step.

        UpdateResult(sums={"train/loss": -0.02, "tokens": 512.0}, grad_norm=0.31, expert_load={})

    is a step on 512 tokens.
    """

    sums: dict[str, float]
    """Sums of the loss over all targets of the minibatch, on every rank."""
    grad_norm: float
    expert_load: dict[str, float]
    """Metrics of :class:`ExpertLoad`; empty without experts."""


class Policy:
    """Shard of the policy with forward passes; frozen unless an :class:`Actor` adds an
    optimizer."""

    trained = False

    def __init__(
        self,
        shape: PolicyShape,
        model: ModelConfig,
        layout: LayoutConfig,
        world: World,
        *,
        temperature: float,
    ) -> None:
        self.world = world
        self.shape = shape
        self.chunks = build_policy(shape, model, layout, temperature=temperature)
        """Unwrapped model, a chunk for each virtual pipeline stage."""
        check_attention(shape, model, layout, training=self.trained)
        self.config = self.chunks[0].config
        """Megatron's configuration, shared by all chunks."""
        self.modules: list[Any] = [chunk.to(world.device) for chunk in self.chunks]
        """Chunks in the wrappers that Megatron runs."""
        if model.dtype == "bf16":
            self.modules = [Float16Module(self.config, chunk) for chunk in self.modules]
        self.routing: RoutingReplay | None = None
        """Replay of experts, if enabled; see :meth:`enable_routing_replay`."""

    def enable_routing_replay(self) -> None:
        """Replay packs' recorded experts from the next pass on."""
        self.routing = RoutingReplay(self.chunks, self.world, self.shape.routing)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return chain.from_iterable(chunk.parameters() for chunk in self.chunks)

    @torch.no_grad()
    def log_probabilities(self, packs: Sequence[Pack]) -> list[np.ndarray | None]:
        """Return [R] float32 for each pack on ranks of the last stage, else None. Collective
        over the replica."""

        def collect(responses: Responses) -> tuple[torch.Tensor, Sums]:
            return responses.logprobs.sum(), {"logprobs": responses.logprobs}

        for module in self.modules:
            module.eval()
        outputs = self._run(packs, collect, forward_only=True)
        if not self.world.is_last_stage:
            return [None] * len(packs)
        logprobs = [output["logprobs"].float() for output in outputs]
        lengths = [len(part) for part in logprobs]
        # Copy once, because the host waits for each copy.
        values = torch.cat(logprobs).cpu()
        return [part.numpy() for part in values.split(lengths)]

    def release_memory(self) -> None:
        """Return the device's cached memory, for servers on the same device."""
        if self.world.device.type == "cuda":
            # Tensors in a reference cycle keep memory until the cycle is collected.
            gc.collect()
            # Tensors passed to a server keep memory until this check finds that the server is done.
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _compute_share(self, pack: Pack) -> PackShare | None:
        """Return this rank's share of a pack, on the host; None: the whole pack."""
        cp = self.world.layout.cp
        if cp == 1:
            return None
        lengths = np.diff(pack.cu_seqlens).tolist()
        return compute_share(lengths, torch.from_numpy(pack.predictors), self.world.cp_rank, cp)

    def _build_packed_sequence(
        self,
        pack: Pack,
        device_cu_seqlens: torch.Tensor,
    ) -> PackedSeqParams:
        if pack.parents is None:
            return build_packed_sequence(
                pack.cu_seqlens,
                pack.max_seqlen,
                device_cu_seqlens.device,
                device_cu_seqlens=device_cu_seqlens,
            )
        return build_shared_prefixes(
            pack, device_cu_seqlens.device, self.world.cp_rank, self.world.layout.cp
        )

    def _run(self, packs: Sequence[Pack], loss: Loss, *, forward_only: bool) -> list[Sums]:
        def reduce(
            pack: Pack,
            arrays: dict[str, torch.Tensor],
            output: tuple[torch.Tensor, ...],
        ) -> tuple[torch.Tensor, Sums]:
            logprobs, entropy, *more = output
            return loss(Responses(pack, arrays, logprobs, entropy, *more))

        return self._run_pass(packs, reduce, forward_only=forward_only)

    def _run_pass(
        self,
        packs: Sequence[Pack],
        reduction: Reduce,
        *,
        forward_only: bool,
        states: bool = False,
    ) -> list[Sums]:
        device = self.world.device

        def forward(
            batches: Iterator[Pack], module: torch.nn.Module
        ) -> tuple[Any, Callable[..., Any]]:
            pack = next(batches)
            share = self._compute_share(pack)
            arrays, share_there = to_device(pack, device, share)
            replay = (
                self.routing.apply(self.modules.index(module), pack, share)
                if self.routing
                else nullcontext()
            )
            with replay:
                output = module(
                    arrays["token_ids"][None],
                    arrays["position_ids"][None],
                    packed_seq_params=self._build_packed_sequence(pack, arrays["cu_seqlens"]),
                    predictors=arrays["predictors"],
                    targets=arrays["targets"],
                    kept_ids=arrays.get("kept_ids"),
                    share=share_there,
                    teachers=pack.teachers,
                    states=states,
                )

            def reduce(output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, Sums]:
                value, sums = reduction(pack, arrays, output)
                # Megatron's division by tokens is off: a placeholder is enough.
                tokens = torch.zeros((), dtype=torch.int, device=device)
                return value, tokens, sums

            return output, reduce

        if self.routing:
            self.routing.clear()
        interleaved = len(self.modules) > 1
        layout = self.world.layout
        if interleaved:
            self.config.microbatch_group_size_per_vp_stage = count_interleaved_packs(
                len(packs), layout.pp
            )
        description = "a forward pass" if forward_only else "forward and backward passes"
        with self.world.training(description):
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[iter(packs) for _ in self.modules] if interleaved else iter(packs),
                model=self.modules,
                num_microbatches=len(packs),
                seq_length=len(packs[0].token_ids),
                micro_batch_size=1,
                forward_only=forward_only,
            )


class Actor(Policy):
    """Policy with gradients and an optimizer; ``load`` fills the chunks' weights at
    construction."""

    trained = True

    def __init__(
        self,
        shape: PolicyShape,
        model: ModelConfig,
        layout: LayoutConfig,
        optimizer: OptimizerConfig,
        world: World,
        *,
        temperature: float,
        load: Callable[[Sequence[PolicyModel]], None],
    ) -> None:
        super().__init__(shape, model, layout, world, temperature=temperature)
        self._expert_load = ExpertLoad(self.chunks, shape, world) if shape.experts else None
        # Load weights before the optimizer copies them to its master weights.
        load(self.chunks)
        self._settings = optimizer
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=optimizer.distributed,
            overlap_grad_reduce=optimizer.overlap,
            # Weights go to the engine right after a step, and no forward pass could hide
            # their gathering.
            overlap_param_gather=False,
            average_in_collective=False,
        )
        self.modules = [
            # The backward pass of the first chunk comes last; in the meantime the gradients of the
            # remaining chunks are summed, in one bucket for each chunk.
            DistributedDataParallel(self.config, ddp, module, disable_bucketing=i > 0)
            for i, module in enumerate(self.modules)
        ]
        for chunk in self.chunks:
            add_to_main_gradients(chunk)
        self.config.finalize_model_grads_func = _sum_gradients
        # With overlap, each chunk's gradients are summed at the chunk's last microbatch.
        if optimizer.overlap:
            no_sync = [module.no_sync for module in self.modules]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.optimizer = get_megatron_optimizer(
            _build_optimizer_config(optimizer, model), self.modules
        )
        # Megatron's scheduler would set the weight decay, but no run has that scheduler.
        for group in self.optimizer.param_groups:
            group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]
        prepare_adam_state(self.optimizer)
        self._offloaded = (
            OffloadedState(self.optimizer, self.parameters(), world.device)
            if optimizer.offload
            else None
        )
        self.offload()

    def offload(self) -> None:
        """Move the optimizer's state to the host if ``optimizer.offload`` is set; a step moves
        it back."""
        if self._offloaded is not None:
            self._offloaded.offload()

    @with_gradients
    def update(self, packs: Sequence[Pack], loss: Loss, *, lr: float) -> UpdateResult:
        """Make one optimizer step on a minibatch. Collective; every rank has the same number of
        packs.

        Raises:
            UserError: on every rank, before any weight changes, if the loss or the gradient is not
                finite.
        """
        outputs = self.accumulate(packs, loss)
        with self.world.training("an optimizer step"):
            mine, grad_norm, counts = self._read(outputs)
        sums = self._sum_over_replicas(mine)
        load = self._expert_load.compute_metrics(counts) if self._expert_load else {}
        with self.world.training("an optimizer step"):
            self._step(sums, grad_norm, lr)
        return UpdateResult(sums, grad_norm, load)

    def _step(self, sums: dict[str, float], grad_norm: float, lr: float) -> None:
        bad = sorted(name for name, value in sums.items() if not math.isfinite(value))
        if bad or not math.isfinite(grad_norm):
            parts = ", ".join(bad) or "the gradient"
            problem = f"not finite: {parts} (gradient norm {grad_norm}); no weight was changed"
            remedy = "Lower optimizer.lr or optimizer.clip_grad and resume from the last checkpoint"
            remedy += "; if that fails at once, look for weights in model.path that are not finite"
            raise UserError("optimizer.lr", f"{lr:g}", problem, remedy)
        max_norm = self._settings.clip_grad
        if max_norm > 0:
            # Clip all gradients by a single norm, also if experts have a separate optimizer.
            for part in list_optimizers(self.optimizer):
                parameters = part.get_parameters()
                clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step_with_ready_grads()
        self.offload()

    def accumulate(self, packs: Sequence[Pack], loss: Loss) -> list[Sums]:
        """Run forward and backward over the packs; gradients, summed over all ranks, stay in DDP's
        buffers."""
        for module in self.modules:
            module.train()
            # No effect unless release_memory has released the buffers.
            module.restore_grad_buffers(synchronize=False)
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._run(packs, loss, forward_only=False)

    def compute_gradient_norm(self, packs: Sequence[Pack], loss: Loss) -> float:
        """Return the gradient norm of all ranks; no weight changes. Collective."""
        self.accumulate(packs, loss)
        _, norm, _ = self._read([])
        self.offload()
        return norm

    def release_memory(self) -> None:
        """Keep only weights and, unless offloaded, the optimizer's state on the device.

        The next update allocates the gradients again, behind the same views.
        """
        self.optimizer.zero_grad()
        for module in self.modules:
            module.offload_grad_buffers(
                synchronize=self.world.device.type == "cuda", empty_cache=False
            )
        super().release_memory()

    def _read(self, outputs: list[Sums]) -> tuple[dict[str, float], float, torch.Tensor]:
        """Read an update's results.

        Returns:
            This rank's sums over packs, the norm of all ranks' gradients, and the counts of
            :class:`ExpertLoad` ([layers, experts] fp64; empty without experts).
        """
        if self._offloaded is not None:
            self._offloaded.onload()
        self.optimizer.prepare_grads()
        has_sums = self.world.is_last_stage and self.world.tp_rank == 0 and self.world.cp_rank == 0
        sums = [*outputs] if has_sums else []
        named = [each for output in sums for each in output.items()]
        squares = compute_gradient_squares(self.optimizer, self.world.device)
        counts = self._expert_load.take() if self._expert_load else squares.new_empty(0)
        parts = [squares, counts, *(part for _, part in named)]
        # Copy once, because the host waits for each copy.
        values = torch.cat([part.reshape(-1).double() for part in parts]).cpu()
        norms, load, numbers = values.split([squares.numel(), counts.numel(), len(named)])
        mine: dict[str, float] = {}
        for (name, _), value in zip(named, numbers.tolist(), strict=True):
            mine[name] = mine.get(name, 0.0) + value
        return mine, float(norms.sum()) ** 0.5, load.view(counts.shape)

    def _sum_over_replicas(self, local: dict[str, float]) -> dict[str, float]:
        """Add up sums over replicas."""
        # In the same order on every rank, so that metrics repeat bit by bit.
        total: dict[str, float] = {}
        for part in self.world.gather(local):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total


def _sum_gradients(
    model: list[torch.nn.Module],
    num_tokens: object = None,
    **arguments: Any,
) -> None:
    """Reduce gradients over replicas, norms and tied embeddings."""
    # Without a token count, because Megatron would divide by tokens.
    finalize_model_grads(model, None, **arguments)
    add_expert_gradients(model)


def _build_optimizer_config(
    settings: OptimizerConfig, model: ModelConfig
) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=model.dtype == "bf16",
        params_dtype=model.torch_dtype,
        use_distributed_optimizer=settings.distributed,
    )


def compute_learning_rate(settings: OptimizerConfig, update: int, updates: int) -> float:
    """Return the learning rate of a step, counted from 0, of a run of ``updates`` steps."""
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = (update - settings.warmup_steps) / max(1, updates - 1 - settings.warmup_steps)
    cosine = math.cos(math.pi * min(1.0, progress))
    return settings.min_lr + 0.5 * (settings.lr - settings.min_lr) * (1 + cosine)
