"""Settings of the loss, of the pruning and of the packs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from megatron_dppo.config.types import (
    AboveZero,
    AtLeastOne,
    Count,
    Fraction,
    Keep,
    NonNegative,
    Positive,
    Section,
    Share,
)
from megatron_dppo.errors import UserError


class DistillationConfig(Section):
    teacher: str | None = None
    """Hugging Face directory of a teacher with the policy's vocabulary, of any shape; or the URL of
    an SGLang or vLLM server, which returns the teacher's probabilities of sampled tokens. The
    policy's distribution at each token of its rollouts is drawn toward the teacher's. null: no
    teacher."""
    teacher_checkpoint: str | None = None
    """Checkpoint of this project with weights that replace the teacher directory's weights."""
    teachers: dict[str, str | None] = Field(default={})
    """Teachers by data source of the prompts, each in a form that ``teacher`` accepts: ``{math:
    DIRECTORY, code: http://HOST:PORT, chat: null}``; null: no distillation. Sources without an
    entry have ``teacher``, and are refused if ``teacher`` is null."""
    coef: AboveZero = 1.0
    """Weight of the divergence of policy and teacher, per token."""
    direction: Literal["reverse", "forward"] = "reverse"
    """Direction of the divergence, exact over the whole vocabulary unless the teacher is a server.
    ``reverse``: KL(policy || teacher), mode-seeking; ``forward``: KL(teacher || policy),
    mass-covering."""
    use_task_rewards: bool = True
    """Train on rewards as well. false: rewards are only measured, and every advantage is 0."""

    @property
    def named(self) -> tuple[str, ...]:
        """Teachers, without duplicates."""
        return tuple(
            dict.fromkeys(name for name in (self.teacher, *self.teachers.values()) if name)
        )

    @property
    def models(self) -> tuple[str, ...]:
        """Teachers that are directories, which the trainer itself runs."""
        return tuple(name for name in self.named if not is_server(name))

    @property
    def servers(self) -> tuple[str, ...]:
        """Teachers that are servers, by URL."""
        return tuple(name for name in self.named if is_server(name))

    def get_teacher(self, data_source: str) -> str | None:
        """Return the teacher of a data source; None: no distillation."""
        return self.teachers.get(data_source, self.teacher)

    def find_model_index(self, data_source: str) -> int:
        """Return the index in :attr:`models` of a data source's teacher; −1: no model."""
        name = self.get_teacher(data_source)
        return self.models.index(name) if name in self.models else -1

    def has_server(self, data_source: str) -> bool:
        return self.get_teacher(data_source) in self.servers

    def get_setting(self, teacher: str) -> str:
        return f"loss.distillation.teacher{'' if teacher == self.teacher else 's'}"

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """Check that each data source has a teacher, or is excluded by null.

        Raises:
            UserError: a source has no entry in ``teachers``, and ``teacher`` is None.
        """
        if self.teacher is not None or not self.teachers:
            return
        if unnamed := sorted(set(data_sources) - self.teachers.keys()):
            problem = f"names no teacher for prompts whose data_source is {unnamed[0]!r}"
            problem += f", nor for {len(unnamed) - 1} other sources" if len(unnamed) > 1 else ""
            remedy = (
                "Add a teacher, or null for no teacher; or set "
                "loss.distillation.teacher for all other sources"
            )
            raise UserError("loss.distillation.teachers", ", ".join(self.teachers), problem, remedy)


def is_server(teacher: str) -> bool:
    return teacher.startswith(("http://", "https://"))


class EntropyConfig(Section):
    coef: NonNegative = 0.0
    """Weight of the entropy of the policy's distribution at each token, which the loss rewards; at
    rollout.temperature. With ``target``: weight before the first step."""
    target: AboveZero | None = None
    """Target of the mean entropy, in nats per token, for an adaptive weight (Skywork-OR1). After an
    optimizer step with at most this entropy, the weight grows by ``delta`` and applies to the next
    step. After a step with more entropy, the weight shrinks by ``delta``, and the next step has no
    bonus. null: constant weight."""
    delta: AboveZero = 0.005
    """Change of an adaptive weight per optimizer step."""
    min_coef: NonNegative = 0.0
    """Smallest adaptive weight."""
    max_coef: NonNegative = 1.0
    """Largest adaptive weight."""

    @property
    def is_used(self) -> bool:
        """Whether a step may have an entropy bonus."""
        return self.coef > 0.0 or self.target is not None


class LossConfig(Section):
    name: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gmpo",
        "sapo",
    ] = "grpo"
    """Objective. grpo: mean over each sequence, then over sequences; dr_grpo: sums over one
    constant, advantages not divided by the standard deviation; dapo: mean over tokens, a higher
    upper clip; gspo: one ratio per sequence; cispo: the clipped ratio is a weight of the
    log-probability, so that every token keeps a gradient; rloo: rewards compared with the rest of
    the group, no clip; reinforce_pp: rewards compared with the whole minibatch, and divided by its
    standard deviation; reinforce_pp_baseline: compared with the group, and divided by the
    minibatch's standard deviation; gmpo: geometric mean of a sequence's clipped ratios; sapo: a
    smooth gate replaces the clip."""
    objective: str | None = None
    """User-defined objective, ``file.py:function`` or ``module:function``: a function of each
    token's ratio and advantage, which replaces the function of ``name``. ``name`` still defines
    advantages, ratio, clips and mean."""
    advantage: str | None = None
    """Advantages from rewards r. null: the method of ``name``; grpo: (r - mean)/std of the group,
    with the standard deviation over the G rewards; grpo_sample: over G - 1, as in verl, TRL, slime
    and SkyRL, which gives advantages sqrt((G - 1)/G) times as large; dr_grpo: r - mean of the
    group; rloo: r - mean of the group's other rewards; reinforce_pp: (r - mean)/std of the
    minibatch; reinforce_pp_baseline: r - mean of the group, divided by the minibatch's standard
    deviation; gdpo: (r - mean)/std of the group for each of several rewards, summed by weight, then
    divided by the minibatch's standard deviation; or a user-defined function, ``file.py:function``
    or ``module:function``."""
    reward_weights: dict[str, float] = Field(default={})
    """Weights of the rewards under ``advantage: gdpo``, by the name of the metric ``reward/NAME``:
    ``{correct: 1, format: 0.5}``. {}: the weights of the functions in ``reward.function``."""
    clip_low: NonNegative | None = None
    """Clip of the ratio below 1; null: the objective's clip (0.2; gspo 3e-4; gmpo 0.33; cispo and
    rloo no clip). With a trust_region, largest divergence of a token with a negative advantage;
    null: 0.15 for tv, 0.05 for kl."""
    clip_high: NonNegative | None = None
    """Clip of the ratio above 1; null: the objective's clip (0.2; dapo and cispo 0.28; gspo 4e-4;
    gmpo 0.49; rloo no clip). With a trust_region, largest divergence of a token with a positive
    advantage; null: as for clip_low."""
    trust_region: Literal["none", "tv", "kl"] = "none"
    """Trust region that replaces the clip (Divergence PPO). A token is left out if the update would
    move its probability further away from the engine's, and the two have diverged by more than a
    bound. The divergence is between the two-way distributions of this token and any other token: by
    total variation (``tv``) or KL (``kl``). The ratio is policy over engine, and needs no other
    correction."""
    kl_coef: NonNegative = 0.0
    """Weight of the k3 estimate of KL(policy || initial policy), per token; 0 keeps no reference
    model."""
    entropy: EntropyConfig = EntropyConfig()
    tis_cap: AtLeastOne | None = None
    """Cap of the truncated importance weight, policy over engine; null: no cap, or 2 with
    rollout.ahead or data.rollouts, unless a trust_region or mask_above bounds the weight."""
    tis_level: Literal["token", "prefix", "sequence"] = "token"
    """Importance weight and its masks are computed for each ``token``; for each ``prefix``, as the
    product over the sequence's tokens up to the token; or for each ``sequence``, as the product
    over its tokens."""
    mask_below: Share | None = None
    """Tokens with an importance weight (policy over engine) below this bound are left out (IcePop:
    0.5); null: no bound."""
    mask_above: AtLeastOne | None = None
    """Tokens with an importance weight above this bound are left out (IcePop: 5); null: no bound.
    Without tis_cap, weights between the two bounds are used unchanged."""
    mask_truncated: bool = False
    """Mask completions that ended at rollout.max_response_tokens, including the KL and distillation
    terms (DAPO's overlong filtering). Their rewards and tokens still count in the groups'
    advantages and in the divisor."""
    updates_per_rollout: Positive = 1
    """Optimizer steps per rollout. The window is split into this number of minibatches of whole
    groups."""
    distillation: DistillationConfig = DistillationConfig()
    replay_routing: Literal["none", "rollout"] = "none"
    """Mixtures of experts: choice of experts in the updates. ``rollout``: the engine's, for each
    token in each layer, so that ratios compare the same experts."""

    @property
    def distillation_coef(self) -> float:
        """Weight of the divergence from a teacher; 0 without a teacher."""
        return self.distillation.coef if self.distillation.named else 0.0


class ScheduleConfig(Section):
    shape: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the kept fraction from 1 to ``keep``: at once, along a line, or half a cosine."""
    ramp: Share = 0.2
    """Fraction of the run until a linear or cosine schedule reaches ``keep``."""
    off_last: Share = 0.0
    """Fraction of the run, at its end, without pruning (as in InfoBatch)."""

    @property
    def spent(self) -> float:
        """Fractions of the run that ramp and off_last take together."""
        return self.ramp + self.off_last


class PromptPruningConfig(Section):
    rule: Literal[
        "none", "threshold", "neyman", "threshold_deterministic", "greso", "dynamic_sampling"
    ] = "neyman"
    """Rule of the pruning. Unbiased: ``none``, threshold (the paper's), neyman (smallest variance).
    Biased: threshold_deterministic (the paper's Appendix A), greso (skips prompts that repeatedly
    gave equal rewards), dynamic_sampling (DAPO's: replaces groups of equal reward)."""
    function: str | None = None
    """User-defined rule, ``file.py:function`` or ``module:function``, which replaces ``rule``: a
    function from candidates with reward histories, and ``keep``, to inclusion probabilities."""
    keep: Fraction = 0.85
    """neyman: fraction of the window to roll out, measured by expected tokens; threshold and
    threshold_deterministic: 1 − r, the probability or fraction of low-scored prompts. greso and
    dynamic_sampling have no budget and ignore this."""
    floor: Fraction = 0.2
    """neyman, function: smallest inclusion probability of a prompt."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """``systematic``: the number of kept prompts is fixed to within 1; ``bernoulli``: each prompt
    is drawn independently; null: threshold and greso bernoulli, neyman systematic."""
    schedule: ScheduleConfig = ScheduleConfig()

    @property
    def named(self) -> str:
        """Name of the rule, as in the table of rules; or the user-defined function."""
        return self.function or self.rule


class CompletionPruningConfig(Section):
    rule: Literal["none", "threshold", "neyman", "threshold_deterministic", "top_k", "extremes"] = (
        "neyman"
    )
    """Rule of the pruning. Unbiased: ``none``, threshold (the paper's), neyman (smallest variance).
    Biased: threshold_deterministic (the paper's Appendix A), top_k (CPPO's: the largest
    advantages), extremes (BranchGRPO's: the best and the worst of a group)."""
    function: str | None = None
    """User-defined rule, as in pruning.prompts.function: from candidates and ``keep`` to inclusion
    probabilities."""
    keep: Keep = "auto"
    """neyman: fraction of the rolled-out tokens to train on; top_k, extremes: fraction of the
    completions; threshold and threshold_deterministic: 1 − r, the probability or fraction of
    low-scored completions. ``auto``: under neyman, at each step, the fraction that minimises the
    gradient's estimated variance times the step's tokens, generated and trained on; else 0.5."""
    score: Literal["engine", "advantage"] = "engine"
    """neyman's proxy for a completion's gradient norm. ``engine``: the advantage times √Σ(1 − p)²
    over rollout probabilities p, at no cost; ``advantage``: the advantage alone, for engines
    without log-probabilities."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """As in pruning.prompts.draw; null: threshold bernoulli, neyman systematic."""
    normaliser: Literal["full", "kept"] = "full"
    """Divisor of the loss under top_k. ``full``: the whole minibatch; ``kept``: the kept part, as
    in CPPO (the more is pruned, the larger the update)."""
    schedule: ScheduleConfig = ScheduleConfig()

    @property
    def named(self) -> str:
        """Name of the rule, as in the table of rules; or the user-defined function."""
        return self.function or self.rule

    @property
    def share(self) -> Keep:
        """``keep``, with the meaning of ``auto`` under rules other than neyman."""
        return 0.5 if self.keep == "auto" and self.named != "neyman" else self.keep


class PruningConfig(Section):
    prompts: PromptPruningConfig = PromptPruningConfig()
    completions: CompletionPruningConfig = CompletionPruningConfig()
    max_weight: AtLeastOne = 10.0
    """Bound on the weight 1/(π_prompt·π_completion). A floor on the completions' probabilities
    keeps this bound; weights are never clipped."""
    resample: Literal["none", "prompts"] = "none"
    """greso: ``prompts`` rolls out more prompts until the window is full of groups with non-zero
    variance of the rewards (GRESO's adaptive batch), as dynamic_sampling always does."""
    target_noise: AboveZero | None = None
    """Estimated variance of a step's gradient, relative to ``rollout.prompts_per_step`` unpruned
    prompts. If pruning has made earlier steps noisier by a factor, a step considers more prompts by
    the same factor. 1: as noisy as without pruning; 2: as half of the prompts without pruning.
    null: a step considers ``rollout.prompts_per_step`` prompts."""
    max_rounds: Positive = 10
    """greso with pruning.resample, and dynamic_sampling: number of times that a step rolls out
    prompts before it trains on the groups at hand."""

    @property
    def least_inclusion(self) -> float:
        """The inclusion probability that corresponds to the weight pruning.max_weight."""
        return (1.0 - 1e-9) / self.max_weight


class PackConfig(Section):
    max_tokens: Positive = 4096
    """Largest number of tokens in a pack (one microbatch). A step's capacity is chosen below this
    limit, so that packs are full."""
    window: Positive = 64
    """Number of the longest unpacked sequences that the packer considers."""
    share_prefixes: Literal["auto", "on", "off"] = "auto"
    """Store once in a pack the tokens that its completions have in common: the prompt, the common
    beginning of different prompts, and of responses to a prompt. ``auto``: if a step becomes
    cheaper, but not with model.spec = te, because this was never measured with Transformer Engine's
    kernels; ``on``: always if possible; ``off``: each completion has a copy of the prompt."""
    min_per_rank: Count = 0
    """Smallest number of packs per data-parallel rank, if the sequences suffice; 0: twice the
    pipeline stages, or 1 without stages."""
