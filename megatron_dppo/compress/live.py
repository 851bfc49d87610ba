"""Scores of a policy that lies in shards on many ranks: the trainer's own, under any layout.

Each rank sums what its shard does on its replica's packs. Of units and heads a tensor-parallel rank has its own; of
tokens a context-parallel rank has its share, with sequence parallelism a part of it; of layers a stage has its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp

from megatron_dppo.compress.asking import Asking
from megatron_dppo.compress.calibration import Accumulator, Sums
from megatron_dppo.compress.cut import Cut
from megatron_dppo.compress.reader import Activity, Measure, narrowed, stacked
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.errors import UserError
from megatron_dppo.models.actor import Policy
from megatron_dppo.models.context import held_positions
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.rl.numbers import without_rounding
from megatron_dppo.rl.pack import TrainingSample
from megatron_dppo.rl.types import Pack
from megatron_dppo.trainer.assemble import PolicyParts

NORMS = ("attention norm", "feed-forward norm")
"""Norms of a layer whose outputs are summed."""
STRETCH = 4
"""A pipeline of pp stages reads at least STRETCH · pp packs between two looks at whether sums are to be kept. It is
drained there: each stage waits for the time of pp − 1 packs, less than a quarter of the time that a stretch takes."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Which of a pack's T tokens are of a sequence, on this rank. Padding is of none."""

    sequence: torch.Tensor
    """[T / cp] int64, the sequence's number in the pack, −1 for padding."""
    last: torch.Tensor
    """[T / cp] bool, the last token of a sequence."""
    lengths: torch.Tensor
    """[sequences] int64, in tokens, over all ranks."""


class Live:
    """A policy's shard on this rank, with this replica's packs of the sequences."""

    def __init__(
        self,
        parts: PolicyParts[Policy],
        answers: Sequence[WorkedAnswer],
        max_tokens: int,
        passes: Accumulator | None = None,
        asking: Asking | None = None,
    ) -> None:
        self.shape: PolicyShape = parts.shape
        self._policy, self._world, self._asking = parts.actor, parts.world, asking
        samples = [_sample(answer, max_tokens) for answer in answers]
        made = parts.pack(samples, replicas=parts.world.dp) if samples else []
        lengths = [len(sample.prompt_ids) + len(sample.response_ids) for sample in samples]
        stages = parts.world.layout.pp
        count = max(1, len(made) // (STRETCH * stages if stages > 1 else 1))
        self._passes = passes or Accumulator()
        self._stretches: list[list[tuple[Pack, _Tokens]]] = []
        for places in np.array_split(np.arange(len(made)), count):
            of = [made[place] for place in places]
            read = [(pack, self._tokens_of(pack, [lengths[row] for row in rows])) for rows, pack in of]
            self._stretches.append(read)
        self._sequences, self._all_tokens = len(samples), sum(lengths)
        self._layers = {
            layer.layer_number - 1: layer for chunk in self._policy.chunks for layer in chunk.decoder.layers
        }

    def _tokens_of(self, pack: Pack, lengths: Sequence[int]) -> _Tokens:
        sequence, last = np.full(len(pack.token_ids), -1), np.zeros(len(pack.token_ids), bool)
        for number, (start, length) in enumerate(zip(pack.cu_seqlens, lengths, strict=False)):
            sequence[start : start + length] = number
            last[start + length - 1] = True
        cp = self._world.layout.cp
        held = held_positions(np.diff(pack.cu_seqlens).tolist(), self._world.cp_rank, cp)
        numbers, ends = (torch.from_numpy(each)[held].to(self._world.device) for each in (sequence, last))
        return _Tokens(numbers, ends, torch.tensor(lengths, device=self._world.device))

    def loss(self) -> float:
        world = self._world
        speaks = world.last_stage and world.tp_rank == 0 and world.cp_rank == 0
        mine: Sums = {"logprobs": torch.zeros(2, dtype=torch.float64)}  # their sum, and how many they are
        for stretch in self._passes.over(self._stretches, mine, sequences=self._sequences):
            for of in self._policy.log_probabilities([pack for pack, _ in stretch]):
                if speaks and of is not None:
                    mine["logprobs"] += torch.tensor([of.sum(dtype=np.float64), len(of)], dtype=torch.float64)
        total, count = torch.stack(world.gather(mine["logprobs"])).sum(0).tolist()
        return -float(total / count)

    def costs(self, measure: Measure, absent: Sequence[Collection[int]]) -> list[float]:
        if measure == "logits":
            problem = "compares all logits, which no rank has under a layout"
            raise UserError("--score", "shapley-logits", problem, "Give shapley-loss, or no --layout")
        if measure == "reward":
            assert self._asking is not None
            rewards = [self._asking.reward(blocks, self._passes) for blocks in absent]
            if len(rewards) > len(np.unique(without_rounding(np.array([rewards])))) == 1:
                problem = f"tells nothing: with and without layers the mean reward is {rewards[0]:.4g}"
                raise UserError("--score", "shapley-reward", problem, "Give another --score, or more --sequences")
            return [-reward for reward in rewards]
        costs = []
        for blocks in absent:
            with self.without(blocks=blocks):
                costs.append(self.loss())
        return costs

    @contextmanager
    def without(self, *, blocks: Collection[int] = (), attention: Collection[int] = ()) -> Iterator[None]:
        def unchanged(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
            return (arguments[0] if arguments else keywords["hidden_states"], *output[1:])

        def nothing(_: Any, __: Any, output: Any) -> Any:
            return (torch.zeros_like(output[0]), *output[1:])

        with ExitStack() as hooks:
            for number in self._layers.keys() & set(blocks):
                hooks.callback(self._layers[number].register_forward_hook(unchanged, with_kwargs=True).remove)
            for number in self._layers.keys() & set(attention):
                hooks.callback(self._layers[number].self_attention.register_forward_hook(nothing).remove)
            yield

    @contextmanager
    def as_cut(self, cut: Cut) -> Iterator[None]:
        gone = set(range(self.shape.num_layers)) - set(cut.layers)
        with ExitStack() as hooks:
            hooks.enter_context(self.without(blocks=gone, attention=cut.silenced))
            for number, layer in self._layers.items():
                if cut.neurons is not None:
                    hooks.callback(self._keep(layer.mlp.linear_fc2, cut.neurons[number], self.shape.ffn))
                if cut.groups is not None:
                    linear = layer.self_attention.linear_proj
                    hooks.callback(self._keep(linear, cut.groups[number], self.shape.kv_heads))
                if cut.experts is not None:
                    hooks.callback(self._choose_of(layer.mlp.router, cut.experts[number]))
            if cut.channels is not None:
                last = [chunk.decoder.final_layernorm for chunk in self._policy.chunks]
                norms = [norm for layer in self._layers.values() for _, norm, _ in _norms(layer)]
                for norm in (*norms, *(norm for norm in last if norm is not None)):
                    hooks.callback(narrowed(norm, cut.channels, self.shape.hidden))
            yield

    def _keep(self, linear: Any, kept: Sequence[int], of: int) -> Any:
        """Let a row-parallel layer see these runs of its inputs alone, of so many over all ranks."""
        mask = torch.zeros(of, device=self._world.device)
        mask[list(kept)] = 1
        mine = mask.chunk(self._world.layout.tp)[self._world.tp_rank]

        def hook(_: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            inputs = arguments[0]
            runs = inputs.unflatten(-1, (len(mine), -1)) * mine[:, None].to(inputs.dtype)
            return (runs.flatten(-2), *arguments[1:])

        return linear.register_forward_pre_hook(hook).remove

    def _choose_of(self, router: Any, kept: Sequence[int]) -> Any:
        """Let a router choose of these experts alone."""
        gone = torch.ones(self.shape.experts, dtype=torch.bool, device=self._world.device)
        gone[list(kept)] = False
        gating = router.gating
        router.gating = lambda states: gating(states).masked_fill(gone, -torch.inf)

        return lambda: delattr(router, "gating")

    def weights_of_neurons(self) -> tuple[torch.Tensor, torch.Tensor]:
        mlps = [layer.mlp for layer in self._layers.values()]
        found = stacked([(*mlp.linear_fc1.weight.chunk(2), mlp.linear_fc2.weight) for mlp in mlps])
        sums: Sums = {}
        if self._world.dp_rank == self._world.cp_rank == 0:
            for number, squares, columns in zip(self._layers, *found, strict=True):
                sums |= {("squares", number): squares, ("columns", number): columns}
        kinds = ("squares", "columns")
        total = self._gathered(sums, dict.fromkeys(kinds, self.shape.ffn), cut=kinds)
        return total["squares"], total["columns"]

    def activity(self) -> Activity:
        """:class:`Activity`, of whose ``cosines`` only those of neighbours are known here: others are no numbers."""
        sums: Sums = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        with ExitStack() as hooks:
            watch = _Watch(self, sums)
            for number, layer in self._layers.items():
                attention, mlp = layer.self_attention.linear_proj, layer.mlp
                hooks.callback(layer.register_forward_hook(watch.residual(number), with_kwargs=True).remove)
                hooks.callback(attention.register_forward_pre_hook(watch.attention(number)).remove)
                for kind, norm, weight in _norms(layer):
                    hooks.callback(norm.register_forward_pre_hook(watch.norm(kind, number, weight)).remove)
                if self.shape.experts:
                    hooks.callback(mlp.router.register_forward_hook(watch.router(number)).remove)
                else:
                    hooks.callback(mlp.linear_fc2.register_forward_pre_hook(watch.feed_forward(number)).remove)
            for stretch in self._passes.over(self._stretches, sums, sequences=self._sequences):
                with ExitStack() as turns:
                    for chunk in self._policy.chunks:
                        turns.callback(chunk.register_forward_pre_hook(watch.begin(stretch)).remove)
                    self._policy.log_probabilities([pack for pack, _ in stretch])
        width = 0 if self.shape.experts else self.shape.ffn
        sizes = {"norms": width, "squares": width, "groups": self.shape.kv_heads, "streams": 4}
        sizes |= {"experts": self.shape.experts, "choices": self.shape.experts}
        sizes |= dict.fromkeys(NORMS, self.shape.hidden)
        found = self._gathered(dict(sums), sizes, cut=("norms", "squares", "groups"))
        streams, layers = found["streams"], self.shape.num_layers
        cosines = torch.full((layers + 1, layers + 1), torch.nan, dtype=torch.float64)
        for diagonal, of in ((0, torch.tensor(self._all_tokens)), (1, streams[:, 0]), (-1, streams[:, 0])):
            cosines.diagonal(diagonal).copy_(of)
        found |= {"channels": torch.stack([found[kind] for kind in NORMS]), "cosines": cosines}
        found |= {"last": streams[:, 1], "relative": streams[:, 2:].T}
        return Activity.of(found, self._sequences, self._all_tokens)

    def _gathered(self, mine: Sums, sizes: dict[str, int], *, cut: Sequence[str]) -> dict[str, torch.Tensor]:
        """[L, size] fp64 of each kind of sum, over all ranks; kinds in ``cut`` are cut over tensor-parallel ranks."""
        total = {kind: torch.zeros(self.shape.num_layers, size, dtype=torch.float64) for kind, size in sizes.items()}
        for tp_rank, sums in self._world.gather((self._world.tp_rank, mine)):
            for (kind, layer), part in sums.items():
                row = total[kind][layer]
                row = row.chunk(self._world.layout.tp)[tp_rank] if kind in cut else row
                row += part
        return total


class _Watch:
    """Hooks that add to a rank's sums."""

    def __init__(self, live: Live, sums: Sums) -> None:
        self._world, self._shape, self._sums = live._world, live.shape, sums
        layout = self._world.layout
        self._sequence_parallel = layout.sequence_parallel and layout.tp > 1
        self._group = parallel_state.get_context_parallel_group() if layout.cp > 1 else None
        self._stream_group = (
            parallel_state.get_tensor_and_context_parallel_group() if self._sequence_parallel else self._group
        )
        self._of_tokens: _Tokens

    def begin(self, stretch: Sequence[tuple[Pack, _Tokens]]) -> Any:
        """Before a chunk reads a pack. Chunks take turns, and each reads the packs in their order."""
        packs = iter(stretch)

        def hook(_: Any, __: Any) -> None:
            self._of_tokens = next(packs)[1]

        return hook

    def attention(self, layer: int) -> Any:
        groups = self._shape.kv_heads // self._world.layout.tp

        def hook(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            inside = self._of_tokens.sequence >= 0
            outputs = arguments[0].flatten(0, -2)[inside].float().unflatten(-1, (groups, -1))
            self._add("groups", layer, outputs.norm(dim=-1).double().sum(0))

        return hook

    def feed_forward(self, layer: int) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            tokens = self._of_tokens
            inside = tokens.sequence >= 0
            inputs = arguments[0].flatten(0, -2)[inside].float().square()
            squares = inputs.new_zeros(len(tokens.lengths), inputs.shape[-1], dtype=torch.float64)
            squares.index_add_(0, tokens.sequence[inside], inputs.double())
            if self._group is not None:  # a sequence's norm is of all its tokens
                dist.all_reduce(squares, group=self._group)
            if self._world.cp_rank == 0:
                self._add("norms", layer, squares.sqrt().sum(0))
                self._add("squares", layer, squares.sum(0))

        return hook

    def norm(self, kind: str, layer: int, weight: torch.Tensor) -> Any:
        def hook(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            if self._elsewhere:
                return
            lengths, (sequence, _) = self._of_tokens.lengths, self._on_stream()
            inside = sequence >= 0
            stream = arguments[0].flatten(0, -2)[inside].float()  # a fused norm does not show its output
            normed = torch.nn.functional.rms_norm(stream, stream.shape[-1:], weight.float(), self._shape.rms_eps)
            means = normed.new_zeros(len(lengths), normed.shape[-1], dtype=torch.float64)
            means.index_add_(0, sequence[inside], normed.abs().double())
            if self._stream_group is not None:  # a sequence's mean is of all its tokens
                dist.all_reduce(means, group=self._stream_group)
            if self._world.cp_rank == self._world.tp_rank == 0:
                self._add(kind, layer, (means / lengths[:, None]).square().sum(0))

        return hook

    def router(self, layer: int) -> Any:
        def hook(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            if self._elsewhere:
                return
            inside = self._on_stream()[0] >= 0
            for kind, each in zip(("experts", "choices"), output, strict=True):
                self._add(kind, layer, each[inside].double().sum(0))

        return hook

    def residual(self, layer: int) -> Any:
        def hook(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if self._elsewhere:
                return
            sequence, last = self._on_stream()
            inside = sequence >= 0
            streams = arguments[0] if arguments else keywords["hidden_states"], output[0]
            before, after = (stream.flatten(0, -2)[inside].float() for stream in streams)
            cosines = (_unit(before) * _unit(after)).sum(-1)
            update = after - before
            relative = [update.norm(order, dim=-1) / after.norm(order, dim=-1) for order in (1, 2)]
            sums = [cosines, cosines * last[inside], *relative]
            self._add("streams", layer, torch.stack(sums).double().sum(-1))

        return hook

    @property
    def _elsewhere(self) -> bool:
        """Whether this rank's part of the residual stream counts on another, which has the same."""
        return not self._sequence_parallel and self._world.tp_rank > 0

    def _on_stream(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``sequence`` and ``last`` of the tokens whose residual stream this rank has."""
        sequence, last = self._of_tokens.sequence, self._of_tokens.last
        if self._sequence_parallel:
            tp = self._world.layout.tp
            sequence, last = (each.chunk(tp)[self._world.tp_rank] for each in (sequence, last))
        return sequence, last

    def _add(self, kind: str, layer: int, part: torch.Tensor) -> None:
        self._sums[kind, layer] = self._sums[kind, layer] + part.cpu()


def _norms(layer: Any) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Name of each norm of a layer, the module that normalises, and the norm's weight.

    A linear layer of Transformer Engine has its norm in it, and an identity stands in the norm's place.
    """
    for kind, norm in zip(NORMS, (layer.input_layernorm, layer.pre_mlp_layernorm), strict=True):
        if not isinstance(norm, IdentityOp):
            yield kind, norm, norm.weight
            continue
        linear = layer.self_attention.linear_qkv if kind == NORMS[0] else layer.mlp.linear_fc1
        yield kind, linear, linear.layer_norm_weight


def _unit(stream: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(stream, dim=-1, eps=0.0)


def _sample(answer: WorkedAnswer, max_tokens: int) -> TrainingSample:
    prompt = answer.prompt_ids[:max_tokens]
    response = answer.response_ids[: max_tokens - len(prompt)]
    return TrainingSample(
        prompt_ids=prompt,
        response_ids=response,
        engine_logprobs=np.zeros(len(response), np.float32),  # no engine made these tokens
        loss_mask=np.ones(len(response), bool),
        advantage=0.0,
        scale=0.0,
        version=0,
    )
