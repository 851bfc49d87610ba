"""Which experts the local engine's model chooses, heard from its routers while a batch of completions is decoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from megatron_dppo.rl.types import Routing, RoutingShape


class Routers:
    """Hears the routers of a model, in the order of their layers, for as long as somebody records."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._heard: list[torch.Tensor] | None = None
        for module in model.modules():
            if isinstance(module, Qwen3MoeTopKRouter):
                module.register_forward_hook(self._hear)

    def _hear(self, router: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        if self._heard is not None:
            self._heard.append(output[2])

    def listen(
        self, shape: RoutingShape | None, lengths: Sequence[int], samples: int, limit: int
    ) -> RoutingRecord | None:
        """Begin to record the batch that is decoded next; None if its routing is not asked for.

        Args:
            shape: of the routing that is asked for.
            lengths: of what is prefilled.
            samples: completions of each.
            limit: most tokens of one of them.
        """
        self._heard = None if shape is None else []
        return None if shape is None else RoutingRecord(self, shape, lengths, samples, limit)

    def take(self) -> torch.Tensor:
        """[tokens, layers, k] int16, of the forward since the last call."""
        assert self._heard is not None
        table = torch.stack(self._heard, dim=1).to(torch.int16)
        self._heard.clear()
        return table


class RoutingRecord:
    """The routing of a batch of completions, [rows, tokens], of prompts that are padded on the left."""

    def __init__(self, routers: Routers, shape: RoutingShape, lengths: Sequence[int], samples: int, limit: int) -> None:
        self._routers, self._shape = routers, shape
        self._lengths, self._samples, self._limit = lengths, samples, limit
        self._read: torch.Tensor
        self._of_prompts: np.ndarray

    def prefilled(self) -> None:
        """The model has read all prompts."""
        heard = self._routers.take()
        self._of_prompts = heard.unflatten(0, (len(self._lengths), -1)).cpu().numpy()
        rows = len(self._lengths) * self._samples
        self._read = heard.new_zeros(rows, self._limit, self._shape.layers, self._shape.per_token)

    def read(self, rows: torch.Tensor, step: int) -> None:
        """The model has read token ``step`` of the completions ``rows``."""
        self._read[rows, step] = self._routers.take()

    def of_rows(self, lengths: Sequence[int]) -> list[Routing]:
        """Of each row's prompt and of its completion but for the last token, which is never read."""
        read, tables = self._read.cpu().numpy(), []
        for row, length in enumerate(lengths):
            prompt = row // self._samples
            own = self._of_prompts[prompt, -self._lengths[prompt] :]
            tables.append(np.concatenate([own, read[row, : length - 1]]).astype(self._shape.dtype))
        return tables
