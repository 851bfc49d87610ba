"""Continuous decoding: prefixes wait for room in a batch, and ended continuations leave the batch.

- Tokens are drawn and written on the device.
- The host checks for ended rows after every token on a CPU, and after every few tokens on a GPU,
  which waits for each check. Tokens past the end of a row are cut off.
- One uniform number per completion and position selects the token.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from megatron_dppo.process.streams import record_progress
from megatron_dppo.rl.sampling_mask import SamplingMask
from megatron_dppo.rl.types import Completion, Routing
from megatron_dppo.rollout.decoder import Decoder, Routers, RowCompaction, copy_async
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.rollout.tree import TreePath

PREFILL_TOKENS = 16384
"""Most tokens of prefixes read at once, padding included."""
BLOCK = 128
"""Tokens in a block of :func:`invert_cdf`; divides the size of many vocabularies."""
ROUND = {"cpu": 1, "cuda": 16}
"""Tokens between two checks for ended rows, by device type."""
COMPLETION, TOKEN, POSITION, MADE, LIMIT, ENDED, FIELDS = range(7)
"""Columns of the row state.

- ``COMPLETION``: number of the generated completion.
- ``TOKEN``, ``POSITION``: last token, not read by the decoder yet, and its position.
- ``MADE``, ``LIMIT``: generated tokens and most tokens of the completion.
- ``ENDED``: nonzero if the completion has ended.
"""


class Decoding:
    """Generation of continuations of prefixes.

    Args:
        routers: routers of the decoder's model.
        prefixes: paths to continue, once per slot, in this order.
        max_rows: most continuations in the batch; at least the slots of any prefix.
    """

    def __init__(
        self,
        decoder: Decoder,
        routers: Routers,
        prefixes: Sequence[TreePath],
        sampling: Sampling,
        *,
        max_rows: int,
    ) -> None:
        self._decoder = decoder
        self._prefixes = prefixes
        self._sampling = sampling
        slots = [len(prefix.slots) for prefix in prefixes]
        limits = [prefix.max_new_tokens(sampling.max_tokens) for prefix in prefixes]
        self._ends = np.cumsum(slots)
        self._limits_of = np.repeat(limits, slots)
        device = decoder.device
        count = int(self._ends[-1])
        # Rows continue past their end until the check.
        self._round = ROUND[device.type]
        width = max(limits) + self._round
        rows = min(count, max_rows)
        longest = max(
            len(prefix.token_ids) + limit for prefix, limit in zip(prefixes, limits, strict=True)
        )
        self._uniforms = copy_async(build_uniforms(prefixes, sampling, width), device)
        self._tokens = torch.zeros(count, width, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(count, width, dtype=torch.float32, device=device)
        self._entropies = torch.zeros_like(self._logprobs) if sampling.needs_entropies else None
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None
        """Kept ids of each token, the likeliest first, and their number."""
        if sampling.sampling_mask and sampling.top_k is not None:
            ids = self._tokens.new_zeros((count, width, sampling.top_k), dtype=torch.int32)
            self._kept = ids, ids.new_zeros((count, width))
        self._stops = copy_async(np.array(sampling.stop_token_ids, np.int64), device)
        self._record = routers.start_recording(sampling.routing, count, width)
        self._cache = decoder.new_cache(rows, longest + self._round)
        self._rows = torch.zeros(rows, FIELDS, dtype=torch.int64, device=device)
        self._waiting = deque(range(len(prefixes)))
        self._active = 0
        """Active rows."""
        self._reach = 0
        """Exclusive upper bound of the positions of the rows' last tokens."""

    def run(self) -> None:
        """Generate until every continuation has ended."""
        while self._waiting or self._active:
            record_progress()
            if lump := self._take_prefixes():
                self._admit(lump)
            else:
                for _ in range(self._round):
                    self._step()
            self._remove_ended()

    def _take_prefixes(self) -> list[int]:
        """Remove and return the waiting prefixes to admit now."""
        lump: list[int] = []
        room = len(self._rows) - self._active
        longest = 0
        # Wait until a quarter of the rows is free, because reading many prefixes at once is faster.
        if self._active and room < len(self._rows) // 4:
            return lump
        while self._waiting:
            prefix = self._prefixes[self._waiting[0]]
            room -= len(prefix.slots)
            longest = max(longest, len(prefix.token_ids))
            if room < 0 or (lump and longest * (len(lump) + 1) > PREFILL_TOKENS):
                break
            lump.append(self._waiting.popleft())
        return lump

    def _admit(self, indices: Sequence[int]) -> None:
        """Read prefixes, padded on the right, and draw the first token of each continuation."""
        prefixes = [self._prefixes[index] for index in indices]
        first = self._active
        lengths = np.array([len(prefix.token_ids) for prefix in prefixes])
        ids = np.zeros((len(prefixes), int(lengths.max())), np.int64)
        for row, prefix in enumerate(prefixes):
            ids[row, : lengths[row]] = prefix.token_ids
        tokens = self._to_device(ids)
        positions = torch.arange(ids.shape[1], device=tokens.device).expand(tokens.shape)
        real = self._to_device(lengths)
        hidden = self._decoder.read(
            self._cache, tokens, positions, first=first, width=ids.shape[1], real=real
        )
        ends = self._ends[indices].tolist()
        continuations = [
            range(end - len(prefix.slots), end) for prefix, end in zip(prefixes, ends, strict=True)
        ]
        if self._record is not None:
            self._record.record_prefixes(lengths.tolist(), continuations)
        source = np.repeat(np.arange(len(prefixes)), [len(each) for each in continuations])
        new = np.zeros((len(source), FIELDS), np.int64)
        new[:, COMPLETION], new[:, POSITION] = np.concatenate(continuations), lengths[source] - 1
        new[:, LIMIT] = self._limits_of[np.concatenate(continuations)]
        self._active, self._reach = first + len(source), max(self._reach, ids.shape[1] + 1)
        self._rows[first : self._active] = self._to_device(new)
        # Each continuation needs its own copy of the prefix's cache.
        of_prefix = self._to_device(source)
        self._cache.copy(of_prefix + first, first, ids.shape[1])
        last = hidden[torch.arange(len(prefixes), device=tokens.device), real - 1]
        self._sample_tokens(first, self._decoder.compute_logits(last)[of_prefix])

    def _step(self) -> None:
        """Read the last token of each row, and draw the next token."""
        rows = self._rows[: self._active]
        tokens = rows[:, TOKEN, None]
        positions = rows[:, POSITION, None]
        hidden = self._decoder.read(self._cache, tokens, positions, first=0, width=self._reach)
        if self._record is not None:
            self._record.record_tokens(rows[:, COMPLETION, None], rows[:, MADE, None] - 1)
        self._reach += 1
        self._sample_tokens(0, self._decoder.compute_logits(hidden[:, 0]))

    def _sample_tokens(self, first: int, logits: torch.Tensor) -> None:
        """Draw the next token of rows from ``first`` on, for logits [rows, vocabulary]."""
        rows = self._rows[first : first + len(logits)]
        sampling = self._sampling
        place = (rows[:, COMPLETION], rows[:, MADE])
        temperature = sampling.temperature
        drawn, self._logprobs[place], kept = sample_tokens(
            logits, self._uniforms[place], temperature, sampling.top_p, sampling.top_k
        )
        if self._kept is not None and kept is not None:
            ids, counts = self._kept
            ids[..., : kept[0].shape[-1]][place] = kept[0].int()
            counts[place] = kept[1].int()
        self._tokens[place] = rows[:, TOKEN] = drawn
        if self._entropies is not None:
            self._entropies[place] = compute_entropies(logits, temperature)
        rows[:, MADE] += 1
        rows[:, POSITION] += 1
        rows[:, ENDED] |= torch.isin(drawn, self._stops) | (rows[:, MADE] >= rows[:, LIMIT])

    def _remove_ended(self) -> None:
        """Remove ended rows from the batch."""
        rows = self._rows[: self._active]
        # The only wait of the host.
        seen = rows.cpu().numpy()
        ended = seen[:, ENDED] != 0
        last = seen[~ended, POSITION].max(initial=-1)
        if ended.any():
            compaction = RowCompaction.from_mask(ended, rows.device)
            compaction.apply(rows)
            self._cache.remove_rows(compaction, self._reach)
            self._active = compaction.remaining
        self._reach = int(last) + 1

    def build_paths(self, version: int) -> list[list[TreePath]]:
        """Return the path of each continuation, by prefix.

        Args:
            version: version of the weights.

        Raises:
            FloatingPointError: a log-probability is not finite.
        """
        limits = self._limits_of
        # The extra column stops rows without a stop token.
        stopping = torch.isin(self._tokens, self._stops)
        never = torch.full((len(limits), 1), True, device=stopping.device)
        first_stop = torch.cat([stopping, never], dim=1).int().argmax(dim=1).cpu().numpy()
        lengths = np.minimum(first_stop + 1, limits)
        tokens = self._tokens.to(torch.int32).cpu().numpy()
        logprobs = self._logprobs.cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the weights of version {version} give log-probabilities that are not finite"
            )
        entropies = None if self._entropies is None else self._entropies.cpu().numpy()
        masks: Sequence[SamplingMask | None] = [None] * len(limits)
        if self._kept is not None:
            ids, counts = (each.cpu().numpy() for each in self._kept)
            masks = list(map(_build_mask, ids, counts, lengths.tolist()))
        routing: Sequence[Routing | None] = [None] * len(limits)
        if self._record is not None:
            routing = self._record.get_rows(lengths.tolist())

        def build_path(prefix: TreePath, slot: int, row: int) -> TreePath:
            length = int(lengths[row])
            part = Completion(
                token_ids=tokens[row, :length].copy(),
                logprobs=logprobs[row, :length].copy(),
                loss_mask=np.ones(length, bool),
                versions=np.full(length, version, np.int32),
                finish_reason="stop" if first_stop[row] < limits[row] else "length",
                routing=routing[row],
                sampling_mask=masks[row],
            )
            own = None if entropies is None else entropies[row, :length].copy()
            return prefix.extend(slot, [part], own)

        rows = iter(range(len(limits)))
        paths = []
        for prefix in self._prefixes:
            paths.append([build_path(prefix, slot, next(rows)) for slot in prefix.slots])
        return paths

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return copy_async(array, self._rows.device)


def _build_mask(ids: NDArray[np.int32], counts: NDArray[np.int32], length: int) -> SamplingMask:
    """Build the mask of the first tokens from ids [width, k], the likeliest first, and the counts
    of kept ids [width]."""
    own = counts[:length].copy()
    return SamplingMask(own, ids[:length][np.arange(ids.shape[1]) < own[:, None]])


def build_uniforms(
    prefixes: Sequence[TreePath],
    sampling: Sampling,
    width: int,
) -> NDArray[np.float64]:
    """Return uniforms [rows, width] of each prefix's continuations in turn; 0 past the end of a
    continuation, or if greedy.

    A token's uniform depends on the slot and on the position in the response, not on forks.
    """
    uniforms = np.zeros((sum(len(prefix.slots) for prefix in prefixes), width))
    if sampling.temperature == 0:
        return uniforms
    each = [(prefix, slot) for prefix in prefixes for slot in prefix.slots]
    for row, (prefix, slot) in zip(uniforms, each, strict=True):
        count = prefix.max_new_tokens(sampling.max_tokens)
        of_response = generate_uniforms(
            sampling.seed, prefix.prompt.id, slot, prefix.length + count
        )
        row[:count] = of_response[prefix.length :]
    return uniforms


def generate_uniforms(seed: int, prompt_id: int, sample: int, count: int) -> NDArray[np.float64]:
    """Generate uniforms in [0, 1) for a completion's first ``count`` positions, [count].

    A longer result begins with the shorter result.
    """
    # A counter-based generator with a hash as key, so that the uniforms do not depend on the batch,
    # or on earlier completions.
    digest = hashlib.blake2b(f"{seed}/{prompt_id}/{sample}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count)


def sample_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: float,
    top_p: float | None = None,
    top_k: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Sample one token per row.

    Args:
        logits: [rows, vocabulary]
        uniforms: [rows], fp64 in [0, 1); not read at temperature 0.
        temperature: 0: likeliest token, with log-probabilities at temperature 1.
        top_p, top_k: truncation as in :class:`Sampling`; ``top_k`` is applied first, and keeps
            exactly this number of tokens.

    Returns:
        - [rows] int64 tokens.
        - [rows], fp32 log-probabilities under the temperature-scaled and truncated distribution.
        - Ids of tokens, [rows, k], the likeliest first, and the number of kept ids, [rows]; None
          without truncation.
    """
    scaled = logits.float() / temperature if temperature not in (0, 1) else logits.float()
    kept = None
    ids = None
    if temperature != 0 and (top_p is not None or top_k is not None):
        size = scaled.shape[-1]
        scaled, ids = scaled.topk(min(top_k or size, size))
        if top_p is not None:
            shares = torch.softmax(scaled, dim=-1)
            scaled[shares.cumsum(dim=-1) - shares >= top_p] = -torch.inf
        kept = ids, (scaled > -torch.inf).sum(dim=-1)
    largest = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - largest).exp_()
    if temperature == 0:
        places = logits.argmax(dim=-1, keepdim=True)
    else:
        places = invert_cdf(weights, uniforms)
    # Without log_softmax, which would need two more passes over the vocabulary.
    logprobs = scaled.gather(-1, places) - largest - weights.sum(dim=-1, keepdim=True).log_()
    tokens = places if ids is None else ids.gather(-1, places)
    return tokens[:, 0], logprobs[:, 0], kept


def invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return each row's first token, [rows, 1], with a cumulative weight above ``uniforms`` times
    the row's total weight.

    Args:
        weights: [rows, vocabulary], fp32.
        uniforms: [rows], fractions, fp64.
    """
    # Find the token's block first. In fp64, because fp32 would lose the last tokens of a vocabulary
    # of 150,000.
    lacking = -weights.shape[-1] % BLOCK
    blocks = (F.pad(weights, (0, lacking)) if lacking else weights).unflatten(-1, (-1, BLOCK))
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    wanted = uniforms[:, None] * ends[:, -1:]
    # Out of range only if logits are not finite, reported by the caller at the end of the batch.
    block = torch.searchsorted(ends, wanted, right=True).clamp_(max=blocks.shape[1] - 1)
    row_ids = torch.arange(len(blocks), device=blocks.device)
    own = blocks[row_ids, block[:, 0]].double().cumsum(dim=-1)
    before = F.pad(ends, (1, 0)).gather(-1, block)
    # The fp32 sum of the block may be slightly above the fp64 sum.
    below = own[:, -1:].nextafter(own.new_zeros(()))
    place = torch.searchsorted(own, torch.minimum(wanted - before, below), right=True)
    return (block * BLOCK + place).clamp_(max=weights.shape[-1] - 1)


def compute_entropies(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the entropies, [rows] fp32 in nats, of :func:`sample_tokens`' distributions for logits
    [rows, vocabulary]."""
    scaled = logits.float() / temperature if temperature > 0 else logits.float()
    return torch.special.entr(torch.softmax(scaled, dim=-1)).sum(dim=-1)
