"""Which experts the local engine's model chooses, heard from its routers while a batch of completions is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_dppo.rl.types import Routing, RoutingShape


class Routers:
    """Hears the routers of a model, in the order of their layers, for as long as somebody records."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._heard: list[torch.Tensor] | None = None
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(self._hear)

    def _hear(self, router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        if self._heard is not None:
            self._heard.append(output[2])

    def listen(self, shape: RoutingShape | None, count: int, width: int) -> RoutingRecord | None:
        """Begin to record what is decoded next; None if its routing is not asked for.

        Args:
            shape: of the routing that is asked for.
            count: continuations that are decoded.
            width: most tokens of one of them.
        """
        self._heard = None if shape is None else []
        return None if shape is None else RoutingRecord(self, shape, count, width)

    def take(self) -> torch.Tensor:
        """[tokens, layers, k] int16, of the forward since the last call."""
        assert self._heard is not None
        table = torch.stack(self._heard, dim=1).to(torch.int16)
        self._heard.clear()
        return table


class RoutingRecord:
    """The routing of what is decoded, [continuations, tokens], and of what they go on from."""

    def __init__(self, routers: Routers, shape: RoutingShape, count: int, width: int) -> None:
        self._routers, self._shape = routers, shape
        self._stems: list[np.ndarray] = [np.zeros((0, shape.layers, shape.per_token), np.int16)] * count
        self._read: torch.Tensor | None = None
        self._size = count, width

    def prefilled(self, lengths: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """The model has read stems of these lengths, padded to the longest; each has some of the continuations."""
        heard = self._routers.take()
        if self._read is None:
            self._read = heard.new_zeros(*self._size, self._shape.layers, self._shape.per_token)
        of_stems = heard.unflatten(0, (len(lengths), -1)).cpu().numpy()
        for stem, length, own in zip(of_stems, lengths, continuations, strict=True):
            for continuation in own:
                self._stems[continuation] = stem[:length]

    def read(self, continuations: torch.Tensor, tokens: torch.Tensor) -> None:
        """The model has read n ``tokens`` ([rows, n], their numbers) of each of these continuations ([rows, 1])."""
        assert self._read is not None
        self._read[continuations, tokens] = self._routers.take().unflatten(0, tokens.shape)

    def of_rows(self, lengths: Sequence[int]) -> list[Routing]:
        """Routing of each stem and continuation, without a continuation's last token, which is never read."""
        assert self._read is not None
        read = self._read.cpu().numpy()
        return [
            np.concatenate([stem, read[row, : length - 1]]).astype(self._shape.dtype)
            for row, (stem, length) in enumerate(zip(self._stems, lengths, strict=True))
        ]
