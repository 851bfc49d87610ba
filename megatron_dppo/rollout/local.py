"""Rollout engine in the trainer's process, with weights streamed by the bridge: slower than a
server, but reproducible from a seed, and on every platform of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from megatron_dppo.bridge.mapping import describe_mismatch
from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout.decoder import Decoder, Routers, empty_model
from megatron_dppo.rollout.decoding import Decoding
from megatron_dppo.rollout.engine import (
    Completions,
    GroupCallback,
    RolloutEngine,
    Sampling,
    WeightSource,
)
from megatron_dppo.rollout.local_conversations import LocalConversations
from megatron_dppo.rollout.tree import TreePath, list_leaves, make_root


class LocalEngine(RolloutEngine[Completions]):
    """Rollout engine on one device of this process. ``begin`` returns after the generation.

    Args:
        path: Hugging Face directory; only config.json is read.
        dtype: type of weights and cache; log-probabilities are fp32.
        max_batch: most completions decoded at once; at least the completions of one prompt, which
            begin together.
        world: ranks with one engine each; None: single process.
        conversations: replacement of single continuations.

    Raises:
        UserError: see :func:`empty_model`.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        world: World | None = None,
        conversations: LocalConversations | None = None,
    ) -> None:
        self._max_batch = max_batch
        self._world = world
        self._conversations = conversations
        self._path = Path(path)
        model = empty_model(self._path, device, dtype)
        self._shape = read_shape(path)
        self._weights = _map_weights_by_name(model, self._shape.family.body)
        self._decoder = Decoder(model)
        self._routers = Routers(model)
        self._version: int | None = None
        self._paused = False

    def health(self) -> str | None:
        if self._paused:
            return "the engine is paused"
        if self._version is None:
            return "no weights have arrived, or their last update failed"
        return None

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
        return {}, ()

    def close(self) -> None:
        if self._conversations is not None:
            self._conversations.close()

    @torch.no_grad()
    def update_weights(self, source: WeightSource, version: int) -> None:
        """Copy the weights into the model, in place.

        Raises:
            ValueError: a tensor is missing, unknown, repeated or of the wrong shape. Generation is
                then impossible until an update succeeds.
        """
        # After a failed update, no version describes the weights.
        self._version = None
        shapes = _get_shapes(self._weights)
        repeated = []
        found: dict[str, tuple[int, ...]] = {}
        # No error before the end of the stream, because reading is collective.
        for bucket in source(to=Consumers.EVERYONE):
            repeated += [f"{name} was received twice" for name in bucket if name in found]
            found |= _get_shapes(bucket)
            for name, tensor in bucket.items():
                if found[name] == shapes.get(name):
                    self._weights[name].copy_(tensor)
        if problems := [*filter(None, [describe_mismatch(self._shape, shapes, found)]), *repeated]:
            raise ValueError(
                f"The weights of version {version} do not fit the rollout model: "
                f"{'; '.join(problems)}."
            )
        self._decoder.refresh()
        self._version = version

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Completions:
        """Generate all completions. The same call returns the same bits. Collective.

        Raises, on every rank:
            UserError: ``max_batch`` is less than the samples of one prompt; a log-probability is
                not finite; or as :meth:`LocalConversations.generate`.
            ValueError: a prompt has no tokens.
            RuntimeError: the engine is paused or has no weights.
        """
        return self._run_on_all_ranks(prompts, sampling, self._conversations)

    def finish(self, pending: Completions, callback: GroupCallback | None = None) -> Completions:
        return pending

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        # Each rank has separate weights, and counts as a server.
        groups = self._run_on_all_ranks(prompts, sampling, None)
        if self._world is None:
            return {"local": groups}
        return {f"local, rank {rank}": each for rank, each in enumerate(self._world.gather(groups))}

    def _run_on_all_ranks(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        conversations: LocalConversations | None,
    ) -> Completions:
        generate = partial(self._generate, prompts, sampling, conversations)
        if self._world is None:
            return generate()
        return self._world.run_on_all_ranks(generate, description="rollouts")

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        conversations: LocalConversations | None,
    ) -> Completions:
        version = self._version
        problem = self.health()
        if version is None or problem is not None:
            raise RuntimeError(f"The local engine cannot generate: {problem}.")
        if sampling.samples > self._max_batch:
            problem = f"one prompt has {sampling.samples} completions, which are decoded together"
            remedy = f"Set it to {sampling.samples} or more"
            raise UserError("rollout.max_batch", self._max_batch, problem, remedy)
        if empty := [prompt.id for prompt in prompts if not len(prompt.token_ids)]:
            raise ValueError(f"Prompts without a token cannot be continued: {empty}.")
        if conversations is not None:
            return conversations.generate(
                prompts, sampling, partial(self._extend_prefixes, version=version)
            )
        return self._generate_trees(prompts, sampling, version)

    def _generate_trees(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        version: int,
    ) -> Completions:
        """Generate trees, level by level: the paths from the prompts, then all forks, and so on."""
        branches = sampling.branches
        trees: list[list[TreePath]] = [[] for _ in prompts]
        roots = [make_root(prompt, sampling.samples, branches) for prompt in prompts]
        prefixes = list(zip(trees, roots, strict=True))
        while prefixes:
            now = prefixes
            prefixes = []
            every = self._extend_prefixes([prefix for _, prefix in now], sampling, version)
            for (tree, _), paths in zip(now, every, strict=True):
                tree += paths
                prefixes += [(tree, fork) for path in paths for fork in path.fork(branches)]
        return [list_leaves(tree, branches) for tree in trees]

    @torch.inference_mode()
    def _extend_prefixes(
        self,
        prefixes: Sequence[TreePath],
        sampling: Sampling,
        version: int,
    ) -> list[list[TreePath]]:
        """Return the path of each continuation, by prefix."""
        decoding = Decoding(
            self._decoder, self._routers, prefixes, sampling, max_rows=self._max_batch
        )
        decoding.run()
        try:
            return decoding.build_paths(version)
        except FloatingPointError as error:
            remedy = (
                "Look in model.path for weights that are not finite or too large; if earlier "
                "steps went well, lower optimizer.lr and resume from the last checkpoint"
            )
            raise UserError("model.path", self._path, str(error), remedy) from error


def _get_shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: (*tensor.shape,) for name, tensor in tensors.items()}


def _map_weights_by_name(model: PreTrainedModel, body: str) -> dict[str, torch.Tensor]:
    """Map names of the weight stream to parameters of the model.

    - Tied embeddings are one parameter, under the embedding's name.
    - A layer's experts are two parameters; an expert's tensors are views.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        # A text model's own names lack this part.
        name = name.replace("model.", f"model.{body}", 1)
        experts, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, fused in enumerate(parameter):
                gate, up = fused.chunk(2)
                weights |= {
                    f"{experts}.{expert}.gate_proj.weight": gate,
                    f"{experts}.{expert}.up_proj.weight": up,
                }
        elif kind == "down_proj":
            weights |= {
                f"{experts}.{expert}.down_proj.weight": down
                for expert, down in enumerate(parameter)
            }
        else:
            weights[name] = parameter
    return weights
