"""The types of a step, in plain NumPy. The examples follow one step: a window of N = 2 candidate prompts, Q = 1 of them
rolled out with G = 2 completions. L is the number of tokens of a response.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.census import PruningStats
from megatron_dppo.rl.score import Score

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Routing = NDArray[np.unsignedinteger[Any]]
"""[tokens, layers, k], the experts of every token in every layer, from 0; see :class:`RoutingShape`."""
Segments = NDArray[np.void]
"""[…, S], of dtype :data:`SEGMENT`: the parts of a completion that have an advantage each."""
SEGMENT = np.dtype([("tokens", "i8"), ("square", "f8"), ("reward", "f8"), ("logprob", "f8")])
"""``tokens``: number of them. ``square``: squared norm of their score. ``reward``: the segment's own, penalties
included. ``logprob``: of its tokens."""
Label = str | dict[str, Any] | list[Any]
"""A reference answer: a text, or what a data set keeps in its place, such as the tests that a program has to pass."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem, as the data set gave it and as the policy reads it.

        Prompt(id=7, token_ids=np.array([12, 4], np.int32), text="2+3=", label="5")

    is row 7 of the pool, which the policy reads as two tokens.
    """

    id: int
    """Row in the pool: the key of pruning history, order and seeds."""
    token_ids: NDArray[np.int32]
    """[P], with the chat template applied."""
    text: str
    """The rendered prompt, for logs."""
    label: Label
    data_source: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)
    asked: str | list[Mapping[str, Any]] = ""
    """The prompt as the data set has it: a text, or chat messages."""
    place: str = ""
    """File and row, for error messages."""

    @property
    def label_text(self) -> str:
        """The label as people and logs read it."""
        return self.label if isinstance(self.label, str) else json.dumps(self.label, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """How a policy's choice of experts is written down: in as few bytes as leave a number for "not known".

        RoutingShape(layers=48, per_token=8, experts=128)

    takes 384 bytes a token.
    """

    layers: int
    per_token: int
    """k"""
    experts: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(np.uint8) if self.experts <= 255 else np.dtype(np.uint16)


def unknown_expert(dtype: np.dtype[Any]) -> int:
    """Placeholder for the experts of a token whose routing is unknown."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class Completion:
    """One response. The arrays have its length L, the stop token included if there was one.

        Completion(token_ids=[5, 9, 2], logprobs=[-0.7, 0, -0.3], loss_mask=[True, False, True],
                   versions=[3, 3, 3], finish_reason="stop")

    is three tokens. The weights of version 3 sampled 5 and 2, and a tool said 9. The lists stand for arrays.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """The engine's, of each token under the temperature-scaled distribution; not read where ``loss_mask`` is False."""
    loss_mask: Bools
    """True for tokens that the policy sampled, which are trained on; False for what it was given, as by a tool."""
    versions: NDArray[np.int32]
    """[L], version of the weights that sampled each token. Tokens that the policy did not sample have the version of
    the policy's next turn."""
    finish_reason: Literal["stop", "length"]
    routing: Routing | None = None
    """Experts of the first P + L − 1 tokens of prompt and response, in all layers (no engine reads the last token), or
    of fewer if the policy read less. None if not requested."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[L], what a server that is this prompt's teacher gives the tokens, at temperature 1; None where none teaches."""
    segments: NDArray[np.int8] | None = None
    """[L], the segment of each token, from 0; −1 where ``loss_mask`` is False. In a conversation of several roles it is
    the place among ``rollout.roles`` of the one that sampled the token; in a tree the number of forks before the token.
    None: all tokens have one advantage."""
    starts: tuple[int, ...] = ()
    """In a conversation of several sequences: where those after the first begin, see ``rl/sequences.py``."""

    @property
    def oldest_version(self) -> int:
        """The version of the oldest weights that made any of the tokens."""
        return int(self.versions.min())


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt with its G completions and their rewards. Advantages are always computed on the whole group.

        Group(prompt, (right, wrong), rewards=np.array([1.0, 0.0]))

    has the advantages 1 and −1 under GRPO.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Floats
    """[G], penalties included; those of completions whose scoring failed are not a number."""
    scores: tuple[Score, ...] = ()
    """G scores of the verifier; empty in groups from a checkpoint."""
    texts: tuple[str, ...] = ()
    """G texts without special tokens, as scored by the verifier; empty for offline rollouts."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The prompts of one step, drawn before anything is generated.

        Selection(prompt_ids=np.array([7]), inclusion=np.array([0.5]), window=2)

    kept prompt 7, which had a chance of one half, out of two candidates.
    """

    prompt_ids: Ints
    """[Q], in the order in which they are asked: longest expected first, else in the epoch's order."""
    inclusion: Floats
    """[Q], the probability with which each prompt was selected; 1 where nothing was pruned."""
    window: int
    """N, the number of candidates."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """All that the planner knows of a step: no tokens. Groups are sorted by prompt id.

    The example's group has ``prompt_ids`` [7], ``prompt_inclusion`` [0.5], ``prompt_lengths`` [2],
    ``response_lengths`` and ``sampled_lengths`` [[2, 3]], ``shared_lengths`` [[0, 2]], ``rewards`` [[1, 0]], ``owners``
    [0] if rank 0 generated it, and ``window`` 2.
    """

    prompt_ids: Ints
    """[Q]"""
    prompt_inclusion: Floats
    """[Q]"""
    prompt_lengths: Ints
    """[Q], tokens."""
    response_lengths: Ints
    """[Q, G], all tokens of a response."""
    shared_lengths: Ints
    """[Q, G], tokens of prompt and response that a completion has in common with the one before it; 0 for the first."""
    sampled_lengths: Ints
    """[Q, G], the tokens among them that the policy sampled: L of the loss."""
    further_lengths: Ints
    """[Q, G, S], those of each sequence after a completion's first, 0 where there is none; see ``rl/sequences.py``."""
    rewards: Floats
    """[Q, G], from ``without_rounding``: ``==`` compares the rewards of a group."""
    score_norms: Floats
    """[Q, G], a proxy of the norm of each score ∇ log π: √Σ_t (1 − p_t)², p_t the engine's; ones without these."""
    log_ratios: Floats
    """[Q, G, 2], mean and deviation over a completion's tokens of log q/p, the teacher's to the engine's probability of
    each, weighted by (1 − p_t)². For a teacher whose whole distribution is compared it is not known yet, and taken for
    (0, 1); (0, 0): none teaches."""
    teacher: Ints
    """[Q], whose whole distribution is compared: a place among ``loss.distillation.models``; −1: nobody's."""
    segments: Segments
    """[Q, G, S]; S = 0 where a completion has one advantage."""
    versions: Ints
    """[Q, G], the oldest weights that made any of a completion's tokens."""
    truncated: Bools
    """[Q, G], True for completions that ended at the response limit."""
    owners: Ints
    """[Q], the rank that holds the group's tokens."""
    window: float
    """N, without the share of the groups that left because their scoring failed."""
    parts: Mapping[str, Floats] = field(default_factory=dict)
    """[Q, G] by the name of a metric. ``reward/NAME``: metrics of the reward function, NaN if missing. ``rollout/…``:
    see ``rollout/collect.py``."""

    @property
    def tokens(self) -> Ints:
        """[Q, G], what each completion takes up in a pack by itself: the tokens of its prompt and of its response."""
        return self.prompt_lengths[:, None] + self.response_lengths


def no_segments(completions: tuple[int, ...]) -> Segments:
    """The segments of completions of this shape that have one advantage each: none."""
    return np.zeros((*completions, 0), SEGMENT)


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer step: training samples, their factors, and their replicas.

    The K kept completions, or their sequences, are its samples, sorted by (group, sequence, completion). If the example
    keeps its second completion with probability 1, then K = 1, ``group`` is [0], ``completion`` [1], ``advantage``
    [[−1]] and ``weight`` [1 / 0.5] = [2]. With c = 1/3 and Z = N·G = 4 ``scale`` is [2 · 1/3 / 4] = [1/6]. With the
    ``packs`` (((0,),),) it is in the only pack of the only replica.
    """

    group: Ints
    """[K], index of the group in StepMetadata."""
    completion: Ints
    """[K], index of the completion in its group."""
    sequence: Ints
    """[K], index of the sequence in its completion."""
    owner: Ints
    """[K], the rank that holds the tokens."""
    version: Ints
    """[K], as in StepMetadata."""
    prompt_length: Ints
    response_length: Ints
    shared_length: Ints
    """[K], tokens that the pack holds already with the sample before; 0 where it holds all of them anew."""
    advantage: Floats
    """[K, S], of each segment or token; S = 1 where a completion has one advantage."""
    teacher: Ints
    """[K], as in StepMetadata."""
    weight: Floats
    """[K], 1/(π_prompt·π_completion), the Horvitz-Thompson weight."""
    scale: Floats
    """[K], weight · c / Z: the sum of a sample's token losses is multiplied by this, and by nothing else."""
    normaliser: float
    """Z of the full, unpruned minibatch."""
    capacity: int = 0
    """Tokens per pack, the same for all; 0 where nothing was kept."""
    packs: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """packs[d][k] are the samples in pack k of data-parallel replica d, in order; every d has equally many packs."""

    @property
    def lengths(self) -> Ints:
        """[K], tokens of prompt and response."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that a step trains on, decided by one rank and known to all.

        StepPlan((minibatch,), {"prune/kept_completion_fraction": 0.5, "pack/fill": 0.625, ...})

    makes one optimizer step, on half of the completions.
    """

    minibatches: tuple[MinibatchPlan, ...]
    metrics: Mapping[str, float]
    """``prune/…`` and ``pack/…``, computed where the numbers are known."""
    notes: tuple[str, ...] = ()
    """Messages for the log: a biased rule, an estimated normaliser, a step that kept nothing."""
    census: PruningStats | None = None

    @property
    def updates(self) -> bool:
        """Whether anything was kept; if not, no weight moves."""
        return any(minibatch.capacity for minibatch in self.minibatches)


@dataclass(frozen=True, slots=True)
class Pack:
    """One microbatch in THD form: T tokens of S segments back to back, R of which are responses to be scored.

    The last segment is padding if the pack was not full; it has no targets. A prompt of 2 tokens p, a response of 3
    tokens r and a capacity of 8 give

        token_ids     p p r r r . . .
        position_ids  0 1 2 3 4 0 1 2      cu_seqlens [0, 5, 8], predictors [1, 2, 3], sample [0, 0, 0]

    Another response s of 2 tokens to the same prompt makes a tree of it: the prompt's last token predicts two tokens.

        token_ids     p p r r r s s .
        position_ids  0 1 2 3 4 2 3 0      cu_seqlens [0, 2, 5, 7, 8], predictors [1, 2, 3, 1, 5]
        parents -1 0 0 -1, tokens 2 3 2 1
    """

    token_ids: Ints
    """[T]"""
    position_ids: Ints
    """[T], from 0 in every segment; in a tree they go on from the parent's."""
    cu_seqlens: NDArray[np.int32]
    """[S + 1], where segments start; ends with T."""
    max_seqlen: int
    """The longest segment, in a tree the longest path. Without a tree it is T only if there is one segment: where it is
    T, Megatron's rotary positions do not start anew in each segment."""
    predictors: Ints
    """[R], positions in the pack whose *next* token is a response token."""
    targets: Ints
    """[R], those next tokens."""
    sample: Ints
    """[R], which of the pack's training samples (0 to their number − 1) a target belongs to."""
    advantage: Floats
    """[R], of the target's segment. ``scale`` and ``versions`` are those of its sample."""
    scale: Floats
    """[R]"""
    engine_logprobs: NDArray[np.float32]
    """[R]"""
    versions: Ints
    """[R]"""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[R], as in Completion, and NaN of completions that no server teaches; None where none has a teacher there."""
    old_logprobs: NDArray[np.float32] | None = None
    """[R], of the policy before the rollout's first update; None: not needed, or on another stage than the last."""
    reference_logprobs: NDArray[np.float32] | None = None
    """[R], of the policy that KL is measured to; None as for ``old_logprobs``."""
    teachers: tuple[Any, ...] = ()
    """``TeacherHead`` of ``models/teacher_head.py``, each of some of the targets."""
    parents: Ints | None = None
    """[S], parent of each segment, −1 for segments without a parent; None if no segment has a parent. A segment attends
    to its ancestors and to itself. A segment's descendants come directly after the segment."""
    tokens: Ints | None = None
    """[S], tokens of each segment without padding. Descendants do not attend to padding. None as ``parents``."""
    routing: Routing | None = None
    """[T, layers of this rank's stage, k]; ``unknown_expert`` where it is not known, and in padding."""
