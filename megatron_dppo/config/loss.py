"""The loss, what is pruned from it, and how the rest is packed."""

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
    """Hugging Face directory of a teacher with the policy's vocabulary, of any shape: the policy's
    distribution at each token of its own rollouts is drawn toward the teacher's. Or the URL of an
    SGLang or vLLM server, which says how likely the sampled tokens are to it. null: none."""
    teacher_checkpoint: str | None = None
    """A checkpoint of this project, for the weights of the teacher in place of the directory's."""
    teachers: dict[str, str | None] = Field(default={})
    """Teachers of prompts by their data source, each as in ``teacher``: ``{math: DIRECTORY, code:
    http://HOST:PORT, chat: null}``; null: not taught. Sources that are not named have ``teacher``,
    and are refused without one."""
    coef: AboveZero = 1.0
    """Weight of the divergence of policy and teacher, per token."""
    direction: Literal["reverse", "forward"] = "reverse"
    """Direction of the divergence, which is exact over the whole vocabulary unless a server
    teaches. ``reverse``: KL(policy || teacher), mode-seeking; ``forward``: KL(teacher || policy),
    mass-covering."""
    use_task_rewards: bool = True
    """Whether rewards are trained on as well. Without, they are measured and shown, and every
    advantage is 0."""

    @property
    def named(self) -> tuple[str, ...]:
        """Teachers, each once."""
        return tuple(
            dict.fromkeys(name for name in (self.teacher, *self.teachers.values()) if name)
        )

    @property
    def models(self) -> tuple[str, ...]:
        """The directories among them: models that the trainer runs itself."""
        return tuple(name for name in self.named if not is_server(name))

    @property
    def servers(self) -> tuple[str, ...]:
        """Servers among the teachers, by URL."""
        return tuple(name for name in self.named if is_server(name))

    def get_teacher(self, data_source: str) -> str | None:
        """A prompt's teacher; None: it is not taught."""
        return self.teachers.get(data_source, self.teacher)

    def find_model_index(self, data_source: str) -> int:
        """The place of a prompt's teacher among :attr:`models`; −1: it has none there."""
        name = self.get_teacher(data_source)
        return self.models.index(name) if name in self.models else -1

    def has_server(self, data_source: str) -> bool:
        """Whether a prompt's teacher is a server."""
        return self.get_teacher(data_source) in self.servers

    def get_setting(self, teacher: str) -> str:
        """The setting that names it."""
        return f"loss.distillation.teacher{'' if teacher == self.teacher else 's'}"

    def check_sources(self, data_sources: Iterable[str]) -> None:
        """
        Raises:
            UserError: prompts of a source have no teacher, and nothing says that they shall have
                none.
        """
        if self.teacher is not None or not self.teachers:
            return
        if unnamed := sorted(set(data_sources) - self.teachers.keys()):
            problem = f"names no teacher for prompts whose data_source is {unnamed[0]!r}"
            problem += f", nor for {len(unnamed) - 1} other sources" if len(unnamed) > 1 else ""
            remedy = (
                "Add one, or null if they shall not be taught; or set "
                "loss.distillation.teacher, for all others"
            )
            raise UserError("loss.distillation.teachers", ", ".join(self.teachers), problem, remedy)


def is_server(teacher: str) -> bool:
    """Whether a teacher is a URL, and no directory."""
    return teacher.startswith(("http://", "https://"))


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
    """The objective. grpo: mean over each sequence, then over sequences; dr_grpo: sums over one
    constant, advantages not divided by their deviation; dapo: mean over tokens, a higher upper
    clip; gspo: one ratio for a sequence; cispo: the clipped ratio weighs the log-probability, so
    that no token loses its gradient; rloo: held against the others of the group, no clip;
    reinforce_pp: held against the whole minibatch and divided by its deviation;
    reinforce_pp_baseline: held against the group, divided by the minibatch's deviation; gmpo: the
    geometric mean of a sequence's clipped ratios; sapo: a smooth gate in place of the clip."""
    objective: str | None = None
    """An objective of your own, ``file.py:function`` or ``module:function``: what is made of each
    token's ratio and advantage, in place of what ``name`` makes of them. All else stays as ``name``
    has it: how rewards become advantages, the ratio, the clips and the mean. null: none."""
    advantage: str | None = None
    """How rewards become advantages. null: as ``name`` has it; grpo: (r - mean)/std of the group,
    the deviation over its G rewards; grpo_sample: the deviation over G - 1, as in verl, TRL, slime
    and SkyRL, which gives advantages sqrt((G - 1)/G) times as large; dr_grpo: r - mean of the
    group; rloo: r - mean of the others; reinforce_pp: (r - mean)/std of the minibatch;
    reinforce_pp_baseline: r - mean of the group, over the minibatch's deviation; or a function of
    your own, ``file.py:function`` or ``module:function``."""
    clip_low: NonNegative | None = None
    """Clip of the ratio below 1; null: the objective's (0.2; gspo 3e-4; gmpo 0.33; cispo and rloo
    none). With a trust_region how far a token may diverge where its advantage is negative; null:
    0.15 for tv, 0.05 for kl."""
    clip_high: NonNegative | None = None
    """Clip of the ratio above 1; null: the objective's (0.2; dapo and cispo 0.28; gspo 4e-4; gmpo
    0.49; rloo none). With a trust_region how far a token may diverge where its advantage is
    positive; null: as for clip_low."""
    trust_region: Literal["none", "tv", "kl"] = "none"
    """In place of the clip (Divergence PPO): a token is left out where its update would move its
    probability further away from the engine's, and the two have diverged by more than a bound. What
    is compared is how likely this token is, and how likely any other: by total variation, or by KL.
    The ratio is that of policy over engine, and needs no other correction."""
    kl_coef: NonNegative = 0.0
    """Weight of the k3 estimate of KL(policy || initial policy), per token; 0 keeps no reference
    model."""
    tis_cap: AtLeastOne | None = None
    """Cap of the truncated importance weight of policy over engine; null: off, or 2 with
    rollout.ahead or data.rollouts, unless a trust_region or mask_above bounds the weight."""
    tis_level: Literal["token", "sequence"] = "token"
    """Whether that weight, and what masks it, is each token's own, or the product over the tokens
    of its sequence."""
    mask_below: Share | None = None
    """Tokens whose weight of policy over engine is below this are left out (IcePop: 0.5); null:
    none."""
    mask_above: AtLeastOne | None = None
    """Tokens whose weight of policy over engine is above this are left out (IcePop: 5); null: none.
    Without tis_cap what is between the two has its weight as it is."""
    mask_truncated: bool = False
    """Mask completions that ended at rollout.max_response_tokens, whole, with their KL and
    distillation terms (DAPO's overlong filtering). Their rewards and tokens still count in the
    advantages of their groups and in the divisor."""
    updates_per_rollout: Positive = 1
    """Optimizer steps per rollout: the window is split into so many minibatches of whole groups."""
    distillation: DistillationConfig = DistillationConfig()
    replay_routing: Literal["none", "rollout"] = "none"
    """Mixtures of experts: whose choice of experts the updates take over, so that ratios compare
    the same experts. ``rollout``: the engine's, of each token in each layer."""

    @property
    def distillation_coef(self) -> float:
        """The weight of the divergence from a teacher; 0 without any."""
        return self.distillation.coef if self.distillation.named else 0.0


class ScheduleConfig(Section):
    shape: Literal["constant", "linear", "cosine"] = "constant"
    """How the kept share moves from 1 at the first step to ``keep``: at once, or along a line or
    half a cosine."""
    ramp: Share = 0.2
    """Share of the run over which a linear or cosine schedule gets there."""
    off_last: Share = 0.0
    """Share of the run, at its end, without pruning (as InfoBatch does)."""

    @property
    def spent(self) -> float:
        """Shares of the run that ramp and off_last take together."""
        return self.ramp + self.off_last


class PromptPruningConfig(Section):
    rule: Literal["none", "threshold", "neyman", "greso", "dynamic_sampling"] = "neyman"
    """Unbiased: none, threshold (the paper's), neyman (least variance). Biased: greso (skips
    prompts that gave equal rewards again and again), dynamic_sampling (DAPO's: groups of equal
    reward are replaced)."""
    function: str | None = None
    """A rule of your own, ``file.py:function`` or ``module:function``, in the place of ``rule``:
    from candidates, of which earlier visits are known, and ``keep`` to inclusion probabilities."""
    keep: Fraction = 0.85
    """neyman: share of the window that is rolled out, by the tokens that its prompts are expected
    to take; threshold: 1 − r, the chance of a low-scored prompt. greso and dynamic_sampling have no
    budget and do not look at it."""
    floor: Fraction = 0.2
    """neyman, function: least inclusion probability of a prompt."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """``systematic``: the number kept is fixed to within one; ``bernoulli``: each prompt by
    itself; null: the rule's (threshold and greso by themselves, neyman systematic)."""
    schedule: ScheduleConfig = ScheduleConfig()

    @property
    def named(self) -> str:
        """The rule's name in the table, or that of the user's own."""
        return self.function or self.rule


class CompletionPruningConfig(Section):
    rule: Literal["none", "threshold", "neyman", "threshold_deterministic", "top_k", "extremes"] = (
        "neyman"
    )
    """Unbiased: none, threshold (the paper's), neyman (least variance). Biased:
    threshold_deterministic (the paper's Appendix A), top_k (CPPO's: the largest advantages),
    extremes (BranchGRPO's: the best and the worst of a group)."""
    function: str | None = None
    """A rule of your own, ``file.py:function`` or ``module:function``, in the place of ``rule``:
    from candidates and ``keep`` to inclusion probabilities."""
    keep: Keep = "auto"
    """neyman: share of the rolled-out tokens that is trained on; top_k, extremes: of the
    completions; threshold and threshold_deterministic: 1 − r, the chance or share of the low-scored
    ones. ``auto``: under neyman at each step the share at which the gradient's estimated variance
    times the step's tokens, generated and trained on, is least; 0.5 under other rules."""
    score: Literal["engine", "advantage"] = "engine"
    """Proxy in neyman for a completion's gradient norm. ``engine``: the advantage times √Σ(1 − p)²
    of the tokens' rollout probabilities p, for free; ``advantage``: the advantage alone, for
    engines without log-probabilities."""
    draw: Literal["systematic", "bernoulli"] | None = None
    """As at the level of prompts; null: the rule's own (threshold by themselves, neyman
    systematic)."""
    normaliser: Literal["full", "kept"] = "full"
    """top_k: what the loss is divided by: the whole minibatch, or what is kept of it, as CPPO has
    it (which makes steps longer, the more is pruned)."""
    schedule: ScheduleConfig = ScheduleConfig()

    @property
    def named(self) -> str:
        """The rule's name in the table, or that of the user's own."""
        return self.function or self.rule

    @property
    def share(self) -> Keep:
        """``keep``, as the rule understands it."""
        return 0.5 if self.keep == "auto" and self.named != "neyman" else self.keep


class PruningConfig(Section):
    prompts: PromptPruningConfig = PromptPruningConfig()
    completions: CompletionPruningConfig = CompletionPruningConfig()
    max_weight: AtLeastOne = 10.0
    """Bound on 1/(π_prompt·π_completion), kept by a floor on the completions' probabilities; no
    weight is cut off."""
    refill: Literal["none", "prompts"] = "none"
    """greso: ``prompts`` rolls out more prompts, until the window is full of groups of mixed reward
    (its adaptive batch), as dynamic_sampling always does."""
    noise: AboveZero | None = None
    """Estimated variance of a step's gradient over that of ``rollout.prompts_per_step`` unpruned
    prompts. A step considers as many more prompts as pruning has made earlier ones noisier. 1: as
    noisy as without pruning; 2: as half of the prompts without pruning; null: a step considers
    ``rollout.prompts_per_step`` prompts."""
    max_rounds: Positive = 10
    """greso with refill, and dynamic_sampling: how often a step rolls out prompts before it trains
    on what it has."""

    @property
    def least_inclusion(self) -> float:
        """The inclusion probability whose weight is pruning.max_weight."""
        return (1.0 - 1e-9) / self.max_weight


class PackConfig(Section):
    max_tokens: Positive = 4096
    """Most tokens in a pack (one microbatch); a step's capacity is chosen below it so that packs
    are full."""
    window: Positive = 64
    """How many of the longest unpacked sequences the packer looks at."""
    share_prefixes: Literal["auto", "on", "off"] = "auto"
    """Whether what completions have in common is in a pack once, where they are in the same pack:
    the prompt, what different prompts begin with, what responses to a prompt do. ``auto``: where it
    makes a step cheaper, and not with model.spec = te, with whose kernels it has never been
    measured; ``on``: wherever it can be; ``off``: each completion has a prompt of its own."""
    min_per_rank: Count = 0
    """Fewest packs per data-parallel rank, as long as sequences suffice; 0: twice the pipeline
    stages, or 1 without."""
