"""Every setting of a run, with its meaning. Imports neither torch nor Megatron, so any machine can check a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from megatron_dppo.config.data import ArithmeticConfig, DataConfig, ReasoningGymConfig, RewardConfig, VerifiersConfig
from megatron_dppo.config.loss import (
    CompletionPruningConfig,
    DistillationConfig,
    LossConfig,
    PackConfig,
    PromptPruningConfig,
    PruningConfig,
    ScheduleConfig,
)
from megatron_dppo.config.model import (
    DTYPES,
    HEAD_CHUNK_MIB,
    WEIGHT_BYTES,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
)
from megatron_dppo.config.rollout import (
    BranchConfig,
    LaunchConfig,
    RolloutConfig,
    SyncConfig,
    TreeConfig,
)
from megatron_dppo.config.run import ClusterConfig, EvalConfig, ProbeConfig, RunConfig, SftConfig
from megatron_dppo.config.types import Command, Section, replace
from megatron_dppo.errors import UserError


class Config(Section):
    """A whole run. ``megatron-dppo train FILE a.b=c`` reads FILE over these defaults, then the overrides."""

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
    probe: ProbeConfig = ProbeConfig()
    cluster: ClusterConfig = ClusterConfig()

    def check(self, command: Command = "train") -> None:
        """Hold the settings against each other; looks at nothing outside of them.

        Raises:
            UserError: for the first contradiction.
        """
        for check in self.checks(command):
            check()

    def checks(self, command: Command) -> Iterator[Callable[[], None]]:
        """The parts of :meth:`check`, each of which raises UserError for the first contradiction that it finds."""
        yield self._check_finite
        yield self.model.check
        if command != "eval":
            yield self.optimizer.check
        limit = self.rollout.max_response_tokens
        if command in ("train", "probe-tree"):
            longest = self.data.max_prompt_tokens + limit
            yield partial(self.pack.check, longest, self.layout.pack_multiple)
        if command == "train":
            yield partial(self.reward.check, limit)
            yield self.loss.check
            yield self._check_distillation
            if self.rollout.tree.branches:
                yield partial(self.rollout.tree.check, self.rollout.samples_per_prompt, limit)
                yield self._check_tree
            yield self._check_roles
            yield self._check_updates
            yield partial(self.data.check, self.rollout.prompts_per_step)
            if self.data.rollouts is not None:
                yield self._check_offline
            yield self.pruning.check
            yield self._check_ahead
        if command in ("sft", "probe-tree", "compress"):
            yield partial(self._check_problems, command)
        if command == "probe-tree":
            yield self._check_forks
        elif command != "sft":
            yield self.eval.check
            yield self._check_batch

    def _check_finite(self) -> None:
        for key, value in self.leaves():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(key, value, "is not a finite number", f"Give {key} a finite value")

    def _check_problems(self, command: Command) -> None:
        if self.data.rollouts is not None:
            problem = f"holds completions for train, and {command} wants problems"
            raise UserError("data.rollouts", self.data.rollouts, problem, f"Give {command} data.rollouts=null")

    def _check_tree(self) -> None:
        score = self.pruning.completions.score
        if self.loss.name != "dr_grpo":
            problem = (
                "divides by lengths or by deviations, which a fork cannot know beforehand: the gradient of "
                "rollout.tree would be biased"
            )
            raise UserError("loss.name", self.loss.name, problem, "Set loss.name=dr_grpo, or rollout.tree.branches=[]")
        self._check_forks()
        if score == "head":
            problem = "measures whole completions, and those of rollout.tree have an advantage for each segment"
            remedy = "Set it to engine or advantage"
            raise UserError("pruning.completions.score", score, problem, remedy)

    def _check_roles(self) -> None:
        rollout, pruning = self.rollout, self.pruning
        if not (roles := rollout.roles):
            return
        if rollout.conversation is None:
            problem = "speak in a conversation, and rollout.conversation names none"
            raise UserError("rollout.roles", list(roles), problem, "Name one, or set rollout.roles=[]")
        if len(set(roles)) < len(roles) or not all(roles):
            raise UserError("rollout.roles", list(roles), "are to have a name of their own each", "Rename them")
        one_reward = "knows one reward of a completion, and those of rollout.roles have one for each role"
        for setting, value, refused, remedy in (
            ("pruning.prompts.rule", pruning.prompts.rule, ("greso", "dynamic_sampling"), "Set it to neyman or none"),
            ("pruning.completions.score", pruning.completions.score, ("head",), "Set it to engine or advantage"),
        ):
            if value in refused:
                raise UserError(setting, value, one_reward, f"{remedy}, or rollout.roles=[]")

    def _check_distillation(self) -> None:
        if not self.loss.distillation_coef:
            return
        prompts, completions = self.pruning.prompts, self.pruning.completions
        if (servers := self.loss.distillation.servers) and self.rollout.temperature != 1.0:
            problem = f"and the server {servers[0]}, a teacher, tells of its distributions at temperature 1 alone"
            remedy = "Set it to 1, or name the teacher's directory"
            raise UserError("rollout.temperature", self.rollout.temperature, problem, remedy)
        if not self.loss.distillation.use_task_rewards:
            ranked = "ranks by rewards, which loss.distillation.use_task_rewards = false leaves out"
            for level, rule, useful in (
                ("prompts", prompts.named, ("none", "neyman")),
                ("completions", completions.named, ("none", "neyman", "threshold")),
            ):
                if rule not in useful:
                    raise UserError(f"pruning.{level}.rule", rule, ranked, f"Set it to {' or '.join(useful)}")
        if prompts.rule == "neyman" and prompts.predictor == "record":
            problem = "knows a prompt's rewards alone, and with loss.distillation its gradient is the teacher's as well"
            raise UserError("pruning.prompts.predictor", "record", problem, "Set it to auto or model")

    def _check_forks(self) -> None:
        rollout = self.rollout
        for setting, value in (
            ("rollout.conversation", rollout.conversation),
            ("rollout.custom_generate", rollout.custom_generate),
        ):
            if value is not None:
                problem = "makes whole completions by itself, which cannot fork as those of a tree do"
                raise UserError(setting, value, problem, "Leave it out, or grow no trees: rollout.tree.branches=[]")

    def _check_offline(self) -> None:
        rollout = self.rollout
        for setting, value, allowed, remedy in (
            ("rollout.ahead", rollout.ahead, (0,), "Set it to 0"),
            ("rollout.conversation", rollout.conversation, (None,), "Leave it out"),
            ("rollout.custom_generate", rollout.custom_generate, (None,), "Leave it out"),
            ("rollout.tree.branches", rollout.tree.branches, ((),), "Set it to []"),
            ("loss.replay_routing", self.loss.replay_routing, ("none", "update"), "Set it to none or update"),
        ):
            if value not in allowed:
                problem = "says how completions are generated, and those of data.rollouts are there already"
                raise UserError(setting, value, problem, f"{remedy}, or data.rollouts=null")

    def _check_ahead(self) -> None:
        rule, refill = self.pruning.prompts.rule, self.pruning.refill
        if self.rollout.ahead > 1 and (rule == "dynamic_sampling" or (rule == "greso" and refill == "prompts")):
            problem = f"asks for later steps before pruning.prompts.rule = {rule} knows which groups it replaces"
            raise UserError("rollout.ahead", self.rollout.ahead, problem, "Set it to 1 or 0, or take another rule")

    def _check_updates(self) -> None:
        prompts, keep = self.rollout.prompts_per_step, self.pruning.prompts.keep
        kept = self.pruning.prompts.kept(prompts)
        if self.loss.updates_per_rollout > kept:
            pruned = "" if kept == prompts else f", of which pruning.prompts.keep = {keep:g} leaves {kept}"
            problem = f"is more than there are groups to split: rollout.prompts_per_step = {prompts}{pruned}"
            remedy = "Lower it, or raise rollout.prompts_per_step" + (" or pruning.prompts.keep" if pruned else "")
            raise UserError("loss.updates_per_rollout", self.loss.updates_per_rollout, problem, remedy)

    def _check_batch(self) -> None:
        samples, batch = self.eval.samples, self.rollout.max_batch
        if not self.rollout.served and self.rollout.engine_function is None and samples > batch:
            problem = f"cannot hold the eval.samples = {samples} of a single problem"
            raise UserError("rollout.max_batch", batch, problem, f"Raise it to {samples} or more")
