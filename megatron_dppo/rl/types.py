"""Types of a training step, in plain NumPy.

The examples follow one step: N = 2 candidate prompts (the window), Q = 1 prompt rolled out, G = 2
completions. L: tokens of a response.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.rl.census import PruningStats
from megatron_dppo.rl.sampling_mask import SamplingMask
from megatron_dppo.rl.score import Score

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Routing = NDArray[np.unsignedinteger[Any]]
"""[tokens, layers, k], experts of every token in every layer, from 0."""
Segments = NDArray[np.void]
"""[…, S], of dtype :data:`SEGMENT`: parts of a completion, with an advantage each."""
SEGMENT = np.dtype([("tokens", "i8"), ("square", "f8"), ("reward", "f8"), ("logprob", "f8")])
"""``tokens``: number of sampled tokens. ``square``: Σ (1 − p)² over the tokens, a proxy of the
squared norm of the score ∇ log π. ``reward``: reward of the segment, penalties included.
``logprob``: log-probability of the tokens."""
Label = str | dict[str, Any] | list[Any]
"""Reference answer: a text, or an object of the data set, such as a program's tests."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Problem, as stored in the data set and as read by the policy.

        Prompt(id=7, token_ids=np.array([12, 4], np.int32), text="2+3=", label="5")

    is row 7 of the pool.
    """

    id: int
    """Row in the pool: the key of pruning history, order and seeds."""
    token_ids: NDArray[np.int32]
    """[P], with the chat template applied."""
    text: str
    """Rendered prompt, for logs."""
    label: Label
    data_source: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)
    raw_prompt: str | list[Mapping[str, Any]] = ""
    """Prompt as stored in the data set: a text, or chat messages."""
    place: str = ""
    """File and row, for error messages."""

    @property
    def label_text(self) -> str:
        if isinstance(self.label, str):
            return self.label
        return json.dumps(self.label, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """Format of a policy's chosen experts."""

    layers: int
    per_token: int
    """k"""
    experts: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        # The smallest type with a spare number for "not known": a token takes 384 bytes
        # with 48 layers and 8 of 128 experts.
        return np.dtype(np.uint8) if self.experts <= 255 else np.dtype(np.uint16)


def get_unknown_expert(dtype: np.dtype[Any]) -> int:
    """Return the placeholder for unknown routing."""
    return int(np.iinfo(dtype).max)


@dataclass(frozen=True, slots=True)
class Completion:
    """Response to a prompt. The arrays have the response's length L, which includes a stop token.

        Completion(token_ids=[5, 9, 2], logprobs=[-0.7, 0, -0.3], loss_mask=[True, False, True],
                   versions=[3, 3, 3], finish_reason="stop")

    is three tokens: 5 and 2 from the weights of version 3, and 9 from a tool. The fields are
    arrays, not lists.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """[L], from the engine, under the temperature-scaled distribution, over the kept ids of
    ``sampling_mask``; not read if ``loss_mask`` is False."""
    loss_mask: Bools
    """[L], True for tokens that the policy sampled, which are trained on; False for all other
    tokens, such as a tool's."""
    versions: NDArray[np.int32]
    """[L], version of the weights that sampled each token. Tokens not sampled have the version of
    the policy's next turn, or of the last turn if no turn follows."""
    finish_reason: Literal["stop", "length"]
    routing: Routing | None = None
    """Experts of the first P + L − 1 tokens of prompt and response, because no engine reads the
    last token. Fewer if the response ends with tokens that the policy never read, such as a tool's.
    None if not requested."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[L], from the prompt's teacher server, at temperature 1; None without a teacher server."""
    segments: NDArray[np.int8] | None = None
    """[L], segment of each token, from 0; −1 if ``loss_mask`` is False. In conversations of several
    roles: index of the role in ``rollout.roles``. In a tree: number of forks before the token.
    None: one advantage for all tokens."""
    starts: tuple[int, ...] = ()
    """Starts of the sequences after the first; see ``rl/sequences.py``."""
    sampling_mask: SamplingMask | None = None
    """Mask of L tokens; None: log-probabilities are of the whole vocabulary."""
    score: Score | None = None
    """Score by an agent, or the failure of an agent; None: ``reward.function`` scores."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that made a token."""
        return int(self.versions.min())


@dataclass(frozen=True, slots=True)
class Group:
    """Prompt with G completions and rewards; advantages are always computed on the whole group."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: Floats
    """[G], penalties included; NaN for completions whose scoring failed."""
    scores: tuple[Score, ...] = ()
    """G scores of the verifier; empty in groups from a checkpoint."""
    texts: tuple[str, ...] = ()
    """G texts without special tokens, as scored; empty for offline rollouts."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Prompts of one step, drawn before generation starts.

        Selection(prompt_ids=np.array([7]), inclusion=np.array([0.5]), window=2)

    kept prompt 7 with probability one half, out of two candidates.
    """

    prompt_ids: Ints
    """[Q], in the order of the requests: longest expected first, or in the epoch's order."""
    inclusion: Floats
    """[Q], inclusion probabilities; 1 without pruning."""
    window: int
    """N, candidates."""


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Complete input of the planner for one step, without tokens. Groups are sorted by prompt id.

    The example's group has ``prompt_ids`` [7], ``prompt_inclusion`` [0.5], ``prompt_lengths`` [2],
    ``response_lengths`` and ``sampled_lengths`` [[2, 3]], ``shared_lengths`` [[0, 2]],
    ``rewards`` [[1, 0]], ``owners`` [0] if rank 0 generated it, and ``window`` 2.
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
    """[Q, G], tokens of prompt and response shared with the previous completion; 0 for the
    first."""
    sampled_lengths: Ints
    """[Q, G], tokens that the policy sampled. This number is L in the formulas of the loss;
    elsewhere in this file, L counts all tokens of a response."""
    further_lengths: Ints
    """[Q, G, S], all tokens of each sequence after a completion's first; 0: no sequence. See
    ``rl/sequences.py``."""
    rewards: Floats
    """[Q, G], from ``round_rewards``, so that ``==`` compares rewards."""
    score_norms: Floats
    """[Q, G], proxy of the norm of each score ∇ log π: √Σ_t (1 − p_t)², with p_t, the engine's
    probability of token t; 1 if the probabilities are not given."""
    log_ratios: Floats
    """[Q, G, 2], mean and deviation of log q/p over a completion's tokens, weighted by (1 − p_t)²,
    with the teacher's q and the engine's p. (0, 1) for a teacher compared by the full distribution,
    because its q is not known yet; (0, 0) without a teacher."""
    teacher: Ints
    """[Q], index in ``loss.distillation.models`` of a teacher compared by the full distribution;
    −1: no model."""
    segments: Segments
    """[Q, G, S]; S = 0 if a completion has one advantage."""
    versions: Ints
    """[Q, G], version of the oldest weights that made a token."""
    truncated: Bools
    """[Q, G], True: ended at the response limit."""
    owners: Ints
    """[Q], rank that holds the group's tokens."""
    window: float
    """N, reduced by the fraction of Σ 1/π in groups dropped because scoring failed."""
    parts: Mapping[str, Floats] = field(default_factory=dict)
    """[Q, G] by metric. ``reward/NAME``: of the reward function, NaN if missing. ``rollout/…``: see
    ``rollout/collect.py``."""

    @property
    def tokens(self) -> Ints:
        """[Q, G], tokens of prompt and response: size in a pack without shared prefixes."""
        return self.prompt_lengths[:, None] + self.response_lengths


def make_empty_segments(completions: tuple[int, ...]) -> Segments:
    return np.zeros((*completions, 0), SEGMENT)


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """Optimizer step: training samples, with factors and replicas.

    The samples are the K kept completions, or the sequences of kept completions, sorted by (group,
    sequence, completion). If the example keeps the second completion with probability 1, then K =
    1, ``advantage`` is [[−1]] and ``weight`` [1 / 0.5] = [2]. With c = 1/3 and Z = N·G = 4,
    ``scale`` is [2 · 1/3 / 4] = [1/6].
    """

    group: Ints
    """[K], index in StepMetadata."""
    completion: Ints
    """[K], index in the group."""
    sequence: Ints
    """[K], index in the completion."""
    owner: Ints
    """[K], rank with the tokens."""
    version: Ints
    """[K], as in StepMetadata."""
    prompt_length: Ints
    response_length: Ints
    shared_length: Ints
    """[K], tokens that the pack stores once with the previous sample; 0 if the pack stores all
    tokens again."""
    advantage: Floats
    """[K, S], advantage of each segment of a completion, or of each token if the completion has no
    segments; S = 1 if a completion has one advantage."""
    teacher: Ints
    """[K], as in StepMetadata."""
    weight: Floats
    """[K], Horvitz-Thompson weight 1/(π_prompt·π_completion)."""
    scale: Floats
    """[K], weight · c / Z, the only factor of token losses. c: coefficient of the aggregation, see
    ``compute_coefficients``."""
    normaliser: float
    """Z of the full, unpruned minibatch."""
    capacity: int = 0
    """Tokens per pack, equal for all packs; 0 if no completion was kept."""
    packs: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """``packs[d][k]``: samples in pack k of data-parallel replica d, in order; equal numbers of
    packs for all replicas."""

    @property
    def lengths(self) -> Ints:
        """[K], tokens of prompt and response."""
        return self.prompt_length + self.response_length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Complete plan of a step's training, made on one rank and shared with all ranks."""

    minibatches: tuple[MinibatchPlan, ...]
    metrics: Mapping[str, float]
    """``prune/…`` and ``pack/…``, computed by the planner."""
    notes: tuple[str, ...] = ()
    """Log messages: a biased rule, an estimated normaliser, a step without kept completions."""
    census: PruningStats | None = None

    @property
    def updates(self) -> bool:
        """Whether any completion was kept; if not, no weight changes."""
        return any(minibatch.capacity for minibatch in self.minibatches)


@dataclass(frozen=True, slots=True)
class Pack:
    """Microbatch in THD form: T tokens of S segments back to back. The loss needs the
    log-probabilities of R response tokens, the targets.

    If the pack is not full, the last segment is padding, without targets. A prompt of 2 tokens p, a
    response of 3 tokens r and a capacity of 8 give

        token_ids     p p r r r . . .
        position_ids  0 1 2 3 4 0 1 2      cu_seqlens [0, 5, 8], predictors [1, 2, 3],
                                           sample [0, 0, 0]

    With a second response s of 2 tokens, the pack is a tree: the prompt's last token predicts two
    tokens.

        token_ids     p p r r r s s .
        position_ids  0 1 2 3 4 2 3 0      cu_seqlens [0, 2, 5, 7, 8], predictors [1, 2, 3, 1, 5],
                                           parents [-1, 0, 0, -1], tokens [2, 3, 2, 1]
    """

    token_ids: Ints
    """[T]"""
    position_ids: Ints
    """[T], from 0 in every segment; in a tree, continued from the parent's positions."""
    cu_seqlens: NDArray[np.int32]
    """[S + 1], starts of the segments; ends with T."""
    max_seqlen: int
    """Length of the longest segment, or of a tree's longest path. T only for a single segment
    without a tree, because with T Megatron's rotary positions do not restart in each segment."""
    predictors: Ints
    """[R], positions whose *next* token is a response token."""
    targets: Ints
    """[R], next token of each predictor."""
    sample: Ints
    """[R], training sample of each target: index in the pack."""
    advantage: Floats
    """[R], of the target's segment."""
    scale: Floats
    """[R], of the target's sample."""
    engine_logprobs: NDArray[np.float32]
    """[R]"""
    versions: Ints
    """[R], of the target's sample."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """[R], as in Completion; NaN: no teacher server. None: no completion has a teacher server."""
    old_logprobs: NDArray[np.float32] | None = None
    """[R], before the rollout's first update; None: not needed, or not on the last stage."""
    reference_logprobs: NDArray[np.float32] | None = None
    """[R], under the reference policy of the KL; None as for ``old_logprobs``."""
    teachers: tuple[Any, ...] = ()
    """``TeacherHead`` objects (``models/teacher_head.py``), each for a part of the targets."""
    parents: Ints | None = None
    """[S], parent of each segment, −1: no parent; None: no segment has a parent. A segment attends
    to itself and its ancestors, and is directly followed by its descendants."""
    tokens: Ints | None = None
    """[S], tokens of each segment, padding excluded. Descendants do not attend to padding. None as
    ``parents``."""
    routing: Routing | None = None
    """[T, layers of this rank's stage, k]; ``get_unknown_expert`` for unknown routing and
    padding."""
    kept_ids: Ints | None = None
    """[R, K], kept ids of each target, see :meth:`SamplingMask.pad`; None: the whole
    vocabulary."""
