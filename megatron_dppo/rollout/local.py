"""The policy generates in the trainer's own process: Hugging Face's forward, on weights that the bridge streams.

Slower than a server, but it needs none, it can be seeded, and it runs wherever torch does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.bridge.stream import Consumers
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.world import World
from megatron_dppo.rl.types import Completion, Prompt, Routing, VersionSpan
from megatron_dppo.rollout.cache import Departure, RolloutCache
from megatron_dppo.rollout.engine import Completions, RolloutEngine, Sampling, WeightSource
from megatron_dppo.rollout.routers import Routers
from megatron_dppo.rollout.tree import Entropies, Stem, TreePath, forks_of, grown, leaves_of, root_of, wants_entropies

Part = tuple[Completion, Entropies | None]
"""What was decoded after a stem, and where they are asked for the entropies of its tokens."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What came of asking: the groups, or why there are none."""

    groups: Completions
    failure: Exception | None = None

    def result(self) -> Completions:
        if self.failure is not None:
            raise self.failure
        return self.groups


class LocalEngine(RolloutEngine[Generated]):
    """A rollout engine on one device of this process. It generates when it is asked, before ``begin`` returns.

    Args:
        path: Hugging Face directory; only config.json is read.
        device: where the weights, the cache and the forward are.
        dtype: of weights and cache; log-probabilities are fp32.
        max_batch: completions decoded at once. Groups stay together, so it must hold one.
        world: the ranks that have an engine each and meet where the protocol says so; None: this process is alone.

    Raises:
        UserError: there is no config.json, or the model has layers with a sliding window.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_batch: int,
        world: World | None = None,
    ) -> None:
        self._device, self._max_batch, self._world = device, max_batch, world
        self._model = _empty_model(Path(path), device, dtype)
        self._weights = _weights_by_name(self._model)
        self._routers = Routers(self._model)
        self._version: int | None = None
        self._paused = False

    def health(self) -> str | None:
        if self._paused:
            return "the engine is paused"
        return "no weights have arrived, or their last update failed" if self._version is None else None

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def take_events(self) -> tuple[dict[str, float], tuple[str, ...]]:
        return {}, ()

    def close(self) -> None:
        pass

    @torch.no_grad()
    def update_weights(self, source: WeightSource, version: int) -> None:
        """Copy the weights into the model, in place.

        Raises:
            ValueError: a tensor is missing, unknown, repeated or of the wrong shape; the message names each. It is
                raised after the end of the stream, and nothing can be generated until an update succeeds.
        """
        self._version = None
        absent = dict(self._weights)
        known, problems = set(absent), []
        for bucket in source(to=Consumers.EVERYONE):
            for name, tensor in bucket.items():
                parameter = absent.pop(name, None)
                if parameter is None:
                    problems.append(f"{name} came twice" if name in known else f"{name} is not in the model")
                elif parameter.shape != tensor.shape:
                    problems.append(f"{name} has shape {list(tensor.shape)}, not {list(parameter.shape)}")
                else:
                    parameter.copy_(tensor)
        problems += [f"{name} is missing" for name in absent]
        if problems:
            raise ValueError(f"The weights of version {version} do not fit the rollout model: {'; '.join(problems)}.")
        self._version = version

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling) -> Generated:
        """See the protocol. The same call gives the same bits. What fails here is raised by ``finish``."""
        try:
            return Generated(self._generate(prompts, sampling))
        except Exception as error:
            return Generated([], error)

    def finish(self, pending: Generated) -> Completions:
        """
        Raises:
            UserError: ``max_batch`` does not hold one prompt's samples.
            ValueError: a prompt has no tokens.
            RuntimeError: the engine is paused or has no weights, or a log-probability is not finite.
        """
        return pending.result() if self._world is None else self._world.together(pending.result, what="rollouts")

    def sample_each(self, prompts: Sequence[Prompt], sampling: Sampling) -> dict[str, Completions]:
        """Every rank's engine has weights of its own, and counts as a server."""
        groups = self.finish(self.begin(prompts, sampling))
        if self._world is None:
            return {"local": groups}
        return {f"local, rank {rank}": each for rank, each in enumerate(self._world.gather(groups))}

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Completions:
        version, problem = self._version, self.health()
        if version is None or problem is not None:
            raise RuntimeError(f"The local engine cannot generate: {problem}.")
        if sampling.samples > self._max_batch:
            problem = f"one prompt has {sampling.samples} completions, which are decoded together"
            raise UserError("rollout.max_batch", self._max_batch, problem, f"Set it to {sampling.samples} or more")
        if empty := [prompt.id for prompt in prompts if not len(prompt.token_ids)]:
            raise ValueError(f"Prompts without a token cannot be continued: {empty}.")
        return self._grow(prompts, sampling, version)

    def _grow(self, prompts: Sequence[Prompt], sampling: Sampling, version: int) -> Completions:
        """The groups, level by level: what begins at the prompts, then what continues after the forks of a level."""
        branches = sampling.branches
        trees: list[list[TreePath]] = [[] for _ in prompts]
        roots = [root_of(prompt, sampling.count(index), branches) for index, prompt in enumerate(prompts)]
        stems = list(zip(trees, roots, strict=True))
        while stems:
            # Together: those of the first level that there is, with as many continuations each.
            alike = min((len(stem.forks), len(stem.slots)) for _, stem in stems)
            now = [each for each in stems if (len(each[1].forks), len(each[1].slots)) == alike]
            stems = [each for each in stems if (len(each[1].forks), len(each[1].slots)) != alike]
            every = self._continue([stem for _, stem in now], sampling, version)
            for (tree, stem), parts in zip(now, every, strict=True):
                for slot, (part, entropies) in zip(stem.slots, parts, strict=True):
                    tree.append(path := grown(stem, slot, part, entropies, branches))
                    stems += [(tree, fork) for fork in forks_of(path, branches, sampling.seed)]
        return [leaves_of(tree, branches) for tree in trees]

    def _continue(self, stems: Sequence[Stem], sampling: Sampling, version: int) -> list[list[Part]]:
        """Continuations of stems that have equally many of them each."""
        parts: list[list[Part]] = [[]] * len(stems)
        each = len(stems[0].slots)
        for batch in _batches([len(stem.token_ids) for stem in stems], self._max_batch // each):
            decoded = self._decode([stems[index] for index in batch], sampling, version)
            for index, group in zip(batch, decoded, strict=True):
                parts[index] = group
        return parts

    @torch.inference_mode()
    def _decode(self, stems: Sequence[Stem], sampling: Sampling, version: int) -> list[list[Part]]:
        """The continuations of one batch, decoded together.

        ``tokens``, ``logprobs``, ``entropies``, ``lengths`` and ``stopped`` have a row per completion. All else shrinks
        as completions end, ``rows`` saying which completion stands where.
        """
        samples = len(stems[0].slots)
        limits = [sampling.max_tokens - stem.length for stem in stems]
        count, limit = len(stems) * samples, max(limits)
        uniforms = torch.from_numpy(_uniforms(stems, sampling, limit)).to(self._device)
        stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self._device)
        tokens = torch.zeros(count, limit, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(count, limit, dtype=torch.float32, device=self._device)
        entropies = torch.zeros_like(logprobs) if wants_entropies(sampling.branches) else None
        lengths = torch.tensor(limits, device=self._device).repeat_interleave(samples)
        stopped = torch.zeros(count, dtype=torch.bool, device=self._device)

        record = self._routers.listen(sampling.routing, [len(stem.token_ids) for stem in stems], samples, limit)
        logits, cache, masks, positions = self._prefill(stems, limit)
        if record is not None:
            record.prefilled()
        rows = torch.arange(count, device=self._device)
        for step in range(limit):
            drawn, drawn_logprobs = draw_tokens(logits, uniforms[rows, step], sampling.temperature)
            tokens[rows, step], logprobs[rows, step] = drawn, drawn_logprobs
            if entropies is not None:
                entropies[rows, step] = entropies_of(logits, sampling.temperature)
            ends = torch.isin(drawn, stop)
            stopped[rows[ends]] = True
            leaves = ends | (lengths[rows] == step + 1)
            if leaves.any():
                lengths[rows[leaves]] = step + 1
                departure = Departure.of(leaves)
                rows, drawn, masks, positions = map(departure.apply, (rows, drawn, masks, positions))
                cache.depart(departure)
            if not len(rows):
                break
            logits = self._model(
                input_ids=drawn[:, None],
                # Of four dimensions, so that it is taken as it is: making one anew at every token costs 4% of the time.
                attention_mask=masks[:, None, None, : cache.get_seq_length() + 1],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
            positions += 1
            if record is not None:
                record.read(rows, step)
        if not torch.isfinite(logprobs).all():
            raise RuntimeError(f"The weights of version {version} give log-probabilities that are not finite.")
        parts = _cut_to_length(
            tokens.to(torch.int32).cpu().numpy(),
            logprobs.cpu().numpy(),
            entropies.cpu().numpy() if entropies is not None else [None] * count,
            lengths.tolist(),
            stopped.tolist(),
            record.of_rows(lengths.tolist()) if record is not None else [None] * count,
            version=version,
        )
        return [parts[start : start + samples] for start in range(0, count, samples)]

    def _prefill(
        self, stems: Sequence[Stem], limit: int
    ) -> tuple[torch.Tensor, RolloutCache, torch.Tensor, torch.Tensor]:
        """Run every stem once, padded on the left, and repeat what follows from it for each of its continuations.

        Returns:
            the next token's logits, [rows, vocabulary]; the cache, which has room for ``limit`` more tokens; the
            additive attention masks, [rows, capacity]; and the positions of the next tokens, [rows, 1].
        """
        each, samples = [stem.token_ids for stem in stems], len(stems[0].slots)
        width = max(map(len, each))
        ids = np.zeros((len(stems), width), dtype=np.int64)
        real = np.zeros((len(stems), width), dtype=bool)
        for row, token_ids in enumerate(each):
            start = width - len(token_ids)
            ids[row, start:], real[row, start:] = token_ids, True
        attended = torch.from_numpy(real).to(self._device)
        capacity = width + limit - 1  # the last token is sampled but never read
        cache = RolloutCache(self._model.config.num_hidden_layers, samples, capacity)
        logits = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            attention_mask=attended,
            position_ids=(attended.cumsum(dim=-1) - 1).clamp_(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        masks = torch.zeros(len(stems), capacity, dtype=self._model.dtype, device=self._device)
        masks[:, :width].masked_fill_(~attended, float("-inf"))
        once = (logits, masks, attended.sum(dim=-1, keepdim=True))
        logits, masks, positions = (tensor.repeat_interleave(samples, dim=0) for tensor in once)
        return logits, cache, masks, positions


def _cut_to_length(
    tokens: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    entropies: Sequence[Entropies | None] | Entropies,
    lengths: Sequence[int],
    stopped: Sequence[bool],
    routing: Sequence[Routing | None],
    *,
    version: int,
) -> list[Part]:
    """What was decoded in rows ([rows, most tokens]) of these lengths."""
    parts: list[Part] = []
    for row, (length, ended, table) in enumerate(zip(lengths, stopped, routing, strict=True)):
        part = Completion(
            token_ids=tokens[row, :length].copy(),
            logprobs=logprobs[row, :length].copy(),
            loss_mask=np.ones(length, bool),
            versions=(VersionSpan(version, length),),
            finish_reason="stop" if ended else "length",
            routing=table,
        )
        own = entropies[row]
        parts.append((part, None if own is None else own[:length].copy()))
    return parts


def _empty_model(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model of undefined weights. It is laid out without memory first: no time goes into random weights, and torch's
    random state, which is the trainer's, stays as it is."""
    if not (path / "config.json").is_file():
        raise UserError("model.path", path, "there is no config.json in it", "Name a Hugging Face directory")
    config = AutoConfig.from_pretrained(path)
    if config.use_sliding_window:
        problem, remedy = "sliding windows are not implemented", "Use a Qwen model without them"
        raise UserError(f"{path / 'config.json'}: use_sliding_window", True, problem, remedy)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def _weights_by_name(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What is to be filled, under the stream's names.

    Tied embeddings are one parameter here, under the name of the embedding. The experts of a layer are two parameters,
    of which each expert's tensors are views.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        experts, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, fused in enumerate(parameter):
                gate, up = fused.chunk(2)
                weights |= {f"{experts}.{expert}.gate_proj.weight": gate, f"{experts}.{expert}.up_proj.weight": up}
        elif kind == "down_proj":
            weights |= {f"{experts}.{expert}.down_proj.weight": down for expert, down in enumerate(parameter)}
        else:
            weights[name] = parameter
    return weights


def _batches(lengths: Sequence[int], groups: int) -> list[list[int]]:
    """Indices of the prompts, in batches of at most ``groups``: alike in prompt length, to pad little, and in size."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    count = -(-len(order) // groups)
    return [part.tolist() for part in np.array_split(np.array(order, dtype=np.int64), count)] if order else []


def _uniforms(stems: Sequence[Stem], sampling: Sampling, limit: int) -> NDArray[np.float64]:
    """[rows, limit], of the continuations of each stem in turn. Nothing is drawn for greedy decoding.

    A token's uniform is that of its leaf and its place in the response, also where its path began after a fork.
    """
    uniforms = np.zeros((sum(len(stem.slots) for stem in stems), limit))
    if sampling.temperature == 0:
        return uniforms
    each = [(stem, slot) for stem in stems for slot in stem.slots]
    for row, (stem, slot) in zip(uniforms, each, strict=True):
        own = completion_uniforms(sampling.seed, stem.prompt.id, slot, sampling.max_tokens)
        row[: sampling.max_tokens - stem.length] = own[stem.length :]
    return uniforms


def completion_uniforms(seed: int, prompt_id: int, sample: int, count: int) -> NDArray[np.float64]:
    """Uniforms in [0, 1) for the first ``count`` positions of one completion.

    They are Philox's stream under a key hashed from the three numbers, so that a completion's luck depends neither on
    the batch it is decoded in nor on what was generated before. A longer row begins with the shorter one.

    Returns:
        [count]
    """
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)


def draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary]
        uniforms: [rows], fp64 in [0, 1); not read at temperature 0.
        temperature: 0 takes the likeliest token, and then gives log-probabilities at temperature 1.

    Returns:
        [rows] int64 tokens, and [rows] fp32 log-probabilities of them under the temperature-scaled distribution.
    """
    logits = logits.float()
    logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature > 0:
        # fp32 would lose the far tokens of a vocabulary of 150,000 in the rounding of the sum.
        cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
        # Out of range only where logits are not numbers, which the caller reports once the batch has ended.
        tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    else:
        tokens = logits.argmax(dim=-1, keepdim=True)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def entropies_of(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[rows] fp32, nats, of the distributions that :func:`draw_tokens` draws from; logits are [rows, vocabulary]."""
    logits = logits.float()
    return torch.special.entr(torch.softmax(logits / temperature if temperature > 0 else logits, dim=-1)).sum(dim=-1)
