"""Weight loading in a running vLLM worker: flat buckets from process groups, or a directory.

Extension of vLLM's workers, loaded by vLLM's flag ``--worker-extension-cls``, not one of vLLM's
weight transfer engines:

- A weight transfer engine reports a failure by raising. From then on vLLM's executor reads the
  answers of all ranks except rank 0 with a delay of one call: a refusal passes for a success, and a
  success for a refusal.
- This extension's methods always answer.

vLLM's layerwise reload loads the weights, because a plain ``load_weights`` would skip the
processing of a loaded layer: on CPU, linears are prepacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import safetensors
import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from megatron_dppo_vllm.group import ReceiverGroup

logger = init_logger("vllm.megatron_dppo")

ORDERS = frozenset(
    {"join", "leave", "begin", "update_from_distributed", "update_from_disk", "end", "abandon"}
)


class WorkerExtension:
    """Mixin for the server's workers."""

    def megatron_dppo(self, order: str, **arguments: Any) -> dict[str, str] | None:
        """Execute an order, one of ``ORDERS``, in the worker's :class:`Receiver`.

        Returns:
            None on success, otherwise ``{"problem": …}``.
        """
        if not hasattr(self, "_megatron_dppo_receiver"):
            self._megatron_dppo_receiver = Receiver(self)
        try:
            if order not in ORDERS:
                raise ValueError(f"no such order; there are {sorted(ORDERS)}")
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                return getattr(self._megatron_dppo_receiver, order)(**arguments)
        except Exception as error:
            logger.exception("%s failed", order)
            return {"problem": f"{type(error).__name__}: {error}"}


class Receiver:
    """Handlers of a worker's orders.

    Order of an update: ``begin``, any number of ``update_from_distributed`` (or a single
    ``update_from_disk``), ``end``. A partially failed update is closed by ``abandon``, or by the
    next ``begin``.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._groups = dict[str, ReceiverGroup]()

    def join(
        self,
        *,
        name: str,
        host: str,
        port: int,
        backend: str,
        offset: int,
        size: int,
        timeout_s: float,
    ) -> None:
        """Join a group, one for each pipeline stage of the trainer; see :class:`ReceiverGroup`.

        Args:
            offset: group rank of the server's first rank.
        """
        self.leave(name=name)
        rank = offset + self._rank
        device = self._worker.device if backend == "nccl" else torch.device("cpu")
        self._groups[name] = ReceiverGroup(
            name=name,
            host=host,
            port=port,
            backend=backend,
            rank=rank,
            size=size,
            timeout_s=timeout_s,
            device=device,
        )

    def leave(self, *, name: str) -> None:
        """Leave a group, if joined."""
        if group := self._groups.pop(name, None):
            group.close()

    def begin(self) -> None:
        # Close a partially failed update first.
        self.abandon()
        initialize_layerwise_reload(self._model)

    def update_from_distributed(
        self,
        *,
        group: str,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
    ) -> None:
        """Load a bucket broadcast by the group's rank 0: concatenated tensors, without gaps."""
        if group not in self._groups:
            raise ValueError(f"no group named {group} was joined; there are {sorted(self._groups)}")
        types = [getattr(torch, name) for name in dtypes]
        flat = self._groups[group].receive(_compute_size(types, shapes)).to(self._worker.device)
        self._load(_split_flat(flat, names, types, shapes))

    def update_from_disk(self, *, folder: str) -> None:
        """Load a Hugging Face directory."""
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise ValueError(f"there are no safetensors files in {folder}")
        self._load(_read_tensors(files))

    def end(self) -> None:
        """End the update.

        Raises:
            ValueError: a layer received no weights (vLLM would only warn).
        """
        missing, tied = self._find_unloaded_layers()
        if missing:
            raise ValueError(
                f"the update is incomplete: {len(missing)} layers got no weights, such as "
                f"{missing[0]}"
            )
        self._finalize()
        # vLLM skips tied layers: on CPU, a tied head would keep the old packed embeddings.
        for layer in tied:
            layer.quant_method.process_weights_after_loading(layer)

    def abandon(self) -> None:
        """Restore the old tensors in every incompletely loaded layer."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights = []
                info.load_numel = 0
        self._finalize()

    @property
    def _rank(self) -> int:
        """Rank among all of the server's workers."""
        parallel = self._worker.parallel_config
        return parallel.data_parallel_index * parallel.world_size + self._worker.rank

    @property
    def _model(self) -> torch.nn.Module:
        return self._worker.get_model()

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if not any(get_layerwise_info(layer).can_load() for layer in self._model.modules()):
            raise ValueError("no update was begun")
        last = "nothing"

        def marked() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for name, tensor in tensors:
                last = f"{name} of shape {list(tensor.shape)}"
                yield name, tensor

        try:
            self._model.load_weights(marked())
        # Name the last tensor, because errors of vLLM's loaders do not.
        except Exception as error:
            raise ValueError(f"the server cannot load {last}: {error!r}") from error
        if self._worker.device.type != "cpu":
            # The sender may reuse the buffer, and the next step uses the new weights.
            torch.accelerator.synchronize()

    def _finalize(self) -> None:
        finalize_layerwise_reload(self._model, self._worker.model_config)

    def _find_unloaded_layers(self) -> tuple[list[str], list[torch.nn.Module]]:
        """Return names of layers with missing weights, and layers that share loaded weights (tied
        heads)."""
        layers = [
            (name, layer, get_layerwise_info(layer)) for name, layer in self._model.named_modules()
        ]
        loaded: set[int] = set()
        for _, layer, info in layers:
            if not info.can_load():
                loaded.update(map(id, layer.parameters(recurse=False)))
            elif info.load_numel > 0:
                loaded.update(map(id, info.kernel_tensors[0].values()))
        without = [
            (name, layer, info.kernel_tensors[0]) for name, layer, info in layers if info.can_load()
        ]
        missing = [name for name, _, own in without if not loaded.issuperset(map(id, own.values()))]
        return missing, [
            layer for _, layer, own in without if own and get_layerwise_info(layer).load_numel == 0
        ]


def _read_tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safetensors.safe_open(file, framework="pt") as content:
            for name in content.offset_keys():
                yield name, content.get_tensor(name)


def _compute_size(dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> int:
    return sum(prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True))


def _split_flat(
    flat: torch.Tensor,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a bucket into tensors."""
    # Clone at odd offsets, because a view of a wider dtype needs an aligned start.
    start = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        end = start + prod(shape) * dtype.itemsize
        piece = flat[start:end] if start % dtype.itemsize == 0 else flat[start:end].clone()
        yield name, piece.view(dtype).view(tuple(shape))
        start = end
