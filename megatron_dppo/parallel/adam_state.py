"""Adam's state: made before the first step, as zeros, and restored where it lies.

Adam creates its state lazily, and the distributed optimizer can neither describe it for a checkpoint nor load it before
it exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer


def prepare_adam_state(optimizer: Any) -> None:
    """Create the Adam state of a Megatron optimizer now instead of in its first step; existing state stays.

    Call this before ``sharded_state_dict`` on an optimizer that may not have stepped. Without it Megatron makes the
    state when it loads, from ``torch.empty``. That is right only where a checkpoint is then read into it.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned.
    """
    for part in optimizer_parts(optimizer):
        inner = part.optimizer
        part.init_state_fn(inner, part.config)
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            _restore_in_place(inner)
            continue
        for state in inner.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers of which Megatron made one: dense parameters and experts have one each, where a rank has any."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if part.optimizer is not None]


def _restore_in_place(inner: torch.optim.Optimizer) -> None:
    """Have a fused Adam copy what it loads into the state that it has.

    Transformer Engine's ``load_state_dict`` makes new tensors for all of it while the old ones are still there: of a 4B
    policy's moments that is another 30 GiB, each time that Megatron describes or loads a checkpoint.
    """
    kept: dict[torch.Tensor, Any] = {}

    def before(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, tensors in _by_parameter(optimizer, loaded):
                if "step" in tensors:  # of torch's Adam, which counts for each parameter
                    _set_step(loaded, int(tensors.pop("step")))
                for name, tensor in tensors.items():
                    if tensor is not optimizer.state[parameter][name]:
                        optimizer.state[parameter][name].copy_(tensor)
        loaded["state"].clear()  # the same object as the caller's, who then finds nothing left to make tensors for
        kept.update(optimizer.state)

    def after(optimizer: torch.optim.Optimizer) -> None:
        optimizer.state.update(kept)
        kept.clear()

    inner.register_load_state_dict_pre_hook(before)
    inner.register_load_state_dict_post_hook(after)


def _set_step(loaded: dict[str, Any], step: int) -> None:
    for group in loaded["param_groups"]:
        group["step"] = step


def _by_parameter(
    optimizer: torch.optim.Optimizer, loaded: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    numbers = chain.from_iterable(group["params"] for group in loaded["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        yield parameter, loaded["state"].get(number, {})
