"""Settings of a run. Does not import torch or Megatron, so that any machine can check a settings
file."""

from __future__ import annotations

import math

from megatron_dppo.config.loss import (
    CompletionPruningConfig,
    DistillationConfig,
    EntropyConfig,
    LossConfig,
    PackConfig,
    PromptPruningConfig,
    PruningConfig,
    ScheduleConfig,
)
from megatron_dppo.config.reward import RewardConfig, WeightedReward
from megatron_dppo.config.rollout import (
    ArithmeticConfig,
    BranchConfig,
    DataConfig,
    LaunchConfig,
    ReasoningGymConfig,
    RolloutConfig,
    SyncConfig,
    TreeConfig,
    VerifiersConfig,
)
from megatron_dppo.config.run import (
    DTYPES,
    HEAD_CHUNK_MIB,
    WEIGHT_BYTES,
    ClusterConfig,
    EvalConfig,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SftConfig,
)
from megatron_dppo.config.types import Section, replace


class Config(Section):
    """Settings of a whole run. ``megatron-dppo train FILE a.b=c`` replaces defaults by the settings
    in FILE, then by the overrides."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    layout: LayoutConfig = LayoutConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    loss: LossConfig = LossConfig()
    pruning: PruningConfig = PruningConfig()
    pack: PackConfig = PackConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    sft: SftConfig = SftConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: prompt and response at their limits."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_answer_tokens(self) -> int:
        """Largest number of tokens in an answer of an evaluation."""
        return self.eval.max_response_tokens or self.rollout.max_response_tokens

    @property
    def longest_context(self) -> int:
        """Tokens of the longest sequence that an engine generates, evaluations included."""
        return self.data.max_prompt_tokens + max(
            self.rollout.max_response_tokens, self.max_answer_tokens
        )

    @property
    def compared_rewards(self) -> tuple[tuple[str, float], ...]:
        """Names and weights of the rewards that GDPO normalises one by one, without weights of 0;
        empty for other advantages."""
        if self.loss.advantage != "gdpo":
            return ()
        weights = self.loss.reward_weights
        if not weights and not isinstance(self.reward.function, str):
            weights = {each.metric: each.weight for each in self.reward.function}
        return tuple((name, weight) for name, weight in weights.items() if weight)

    @property
    def usable_pack(self) -> int:
        """Tokens of the largest pack in this layout: ``pack.max_tokens``, rounded down."""
        return self.pack.max_tokens // self.layout.pack_multiple * self.layout.pack_multiple

    @property
    def least_pack(self) -> int:
        """Tokens of the smallest pack, in this layout, that has room for the longest sequence."""
        return math.ceil(self.longest / self.layout.pack_multiple) * self.layout.pack_multiple

    @property
    def kept_prompts(self) -> int:
        """Estimated prompts of a window to roll out, if all prompts have equal numbers of tokens.

        - Pruning rule with a budget: the fraction ``pruning.prompts.keep``, rounded down.
        - Other rules: all prompts.
        """
        prompts = self.rollout.prompts_per_step
        rule = self.pruning.prompts
        # Only these two rules have a budget.
        return math.floor(prompts * rule.keep) if rule.named in ("threshold", "neyman") else prompts
