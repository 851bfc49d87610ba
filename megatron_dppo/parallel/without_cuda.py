"""Changes to Megatron and torch that let Megatron-Core run without CUDA.

No other file changes Megatron or torch. Megatron-Core refers to CUDA in places unrelated to
kernels: the device of a scalar, a barrier, the state of a generator. Each function below replaces
one kind of reference by the CPU's equivalent, on machines without CUDA only.

Two faults are fixed with and without CUDA:

- Megatron's distributed optimizer was written for the Adam of Transformer Engine or Apex, and
  restores the state of torch's Adam, used without CUDA or these packages, incorrectly.
- The router of experts needs Transformer Engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _device

CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Adapt this process, once, before any model-parallel group or model is created."""
    global _installed
    if _installed:
        return
    _installed = True
    if not torch.cuda.is_available():
        _patch_device_queries()
        _patch_tensor_factories()
        _patch_tensor_types()
        _patch_random_state()
        _patch_streams()
        _disable_compile()
        _patch_token_counts()
        _patch_all_gather()
        _patch_delta_rules()
        _patch_optimizer()
    _fix_torch_adam()
    _fix_router()


def _patch_device_queries() -> None:
    # Megatron uses ``device=torch.cuda.current_device()`` and ``.cuda()`` for the default device.
    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _patch_tensor_factories() -> None:
    """Move small tensors with a literal ``device="cuda"`` to the CPU."""
    # Fill torch's cached list of the functions affected by ``with torch.device("meta")`` with
    # torch's own functions first.
    _device._device_constructors()
    for name in ("tensor", "zeros", "ones", "empty", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _patch_tensor_types() -> None:
    # The optimizers sort parameters by ``param.type()`` and accept only the names of CUDA tensors.
    type_of = torch.Tensor.type

    def cuda_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return type_of(self, dtype, *args, **kwargs)
        return type_of(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = cuda_name


def _patch_random_state() -> None:
    """Use the CPU's random state in Megatron's tracker (initialisation, dropout, recompute)."""
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)
    # Replaced in the tracker's module, because these two use the default generators below
    # ``torch.cuda``.
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
        new_state
    )


class _InlineStream:
    """A stream with all work finished, because a CPU runs its program in order."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        # Waiting for an event is the same as waiting for a stream.
        return event or self

    def synchronize(self) -> None: ...


def _patch_streams() -> None:
    # Megatron counts tokens for experts on a separate stream, and from 0.17 on reduces gradient
    # buckets on another stream.
    program = _InlineStream()

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        yield

    torch.cuda.current_stream = lambda device=None: program
    torch.cuda.default_stream = lambda device=None: program
    torch.cuda.stream = on
    torch.cuda.Stream = _InlineStream


def _disable_compile() -> None:
    import torch._dynamo

    # Megatron wraps small functions in ``torch.compile``; on a CPU the first call would look for a
    # C++ compiler.
    torch._dynamo.config.disable = True


def _patch_token_counts() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    # Megatron converts token counts to numpy only when they leave a GPU. On a CPU the counts would
    # stay tensors, and torch's exchanges do not accept tensors as sizes.
    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _patch_all_gather() -> None:
    # Gloo gathers equal parts only, but each rank of tensor-parallel experts has its own number of
    # tokens.
    gather = dist.all_gather

    def all_gather(
        parts: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in parts}) == 1:
            return gather(parts, tensor, group=group, async_op=async_op)
        lengths = [len(part) for part in parts]
        received = tensor.new_empty([sum(lengths), *tensor.shape[1:]])
        sent = torch.cat([tensor] * len(parts))
        dist.all_to_all_single(received, sent, lengths, [len(tensor)] * len(parts), group=group)
        for part, came in zip(parts, received.split(lengths), strict=True):
            part.copy_(came)
        return None

    dist.all_gather = all_gather


def _patch_delta_rules() -> None:
    # Gated delta networks use functions of flash-linear-attention, which has no CPU version.
    # Megatron-Core has these networks over packs from 0.19 on.
    try:
        from megatron.core.ssm.gated_delta_net import common, gdn
    except ImportError:
        return
    from megatron_dppo.parallel import delta_rule

    common.HAVE_FLA = True
    common.l2norm = delta_rule.l2norm
    gdn.causal_conv1d = delta_rule.causal_conv1d
    gdn.chunk_gated_delta_rule = delta_rule.chunk_gated_delta_rule


def _patch_optimizer() -> None:
    from megatron.core import optimizer as chosen
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    # At import, Megatron-Core chooses Adam and norms of Transformer Engine or Apex if installed,
    # but both require CUDA: use torch's instead.
    chosen.Adam = torch.optim.AdamW
    chosen.SGD = torch.optim.SGD
    chosen.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.Adam = torch.optim.Adam
    distrib_optimizer.HAVE_APEX_OR_TE = False
    distrib_optimizer.USING_TE_OPTIMIZER = False
    distrib_optimizer.USING_APEX_OPTIMIZER = False
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale


def _fix_torch_adam() -> None:
    """Make the distributed optimizer restore the state of torch's Adam.

    Both faults are invisible in the first step after a resume.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer = distrib_optimizer.DistributedOptimizer
    load_state_dict = optimizer.load_state_dict

    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        shard = self.optimizer.param_groups[group]["params"][order]
        # The fp32 shard of a parameter requires a gradient, so that copying fails outside
        # ``no_grad``.
        with torch.no_grad():
            shard.copy_(tensors["param"])
            for name, value in self.optimizer.state[shard].items():
                # The step is restored with the parameter groups, in the common state.
                if name != "step":
                    value.copy_(tensors[name])

    def load_with_cloned_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            # All parameters got the same ``step`` tensor, and each would increment that tensor.
            state["step"] = state["step"].clone()

    optimizer._set_main_param_and_optimizer_states = set_states
    optimizer.load_state_dict = load_with_cloned_steps


def _fix_router() -> None:
    """Give the router Transformer Engine's matrix product, or disable that product without a
    GPU."""
    from megatron.core.transformer.moe import moe_utils

    # The router checks whether the name is None, but before Megatron-Core 0.17 the name is missing
    # without Transformer Engine.
    if not (moe_utils.HAVE_TE and torch.cuda.is_available()):
        moe_utils.te_general_gemm = None
    # None for versions of Transformer Engine that need no workspace from their caller.
    elif moe_utils.te_general_gemm is None:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        moe_utils.te_general_gemm = lambda a, b, out_dtype, **options: general_gemm(
            a, b, out_dtype=out_dtype, **options
        )
