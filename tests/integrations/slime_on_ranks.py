"""Ranks of slime on gloo, with slime's conversion, schedule, ``train()``, losses and Megatron-Core's
data parallelism: ``test_slime.py`` starts them.

    SLIME=checkout python -m tests.integrations.slime_on_ranks WORLD CONTEXT RESULTS

- The policy is a table of next tokens.
- Modules of ``ABSENT`` are replaced, and so are Ray's store, CUDA's device and the optimizer. None
  computes a loss.
"""

from __future__ import annotations

import copy
import importlib.abc
import importlib.machinery
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

VOCABULARY, PROMPTS, SAMPLES = 11, 8, 4
ABSENT = (
    "datasets",
    "mbridge",
    "megatron.bridge",
    "megatron.training",
    "memray",
    "pybase64",
    "pylatexenc",
    "sglang",
    "sglang_router",
    "torch_memory_saver",
    "transformer_engine_torch",
    "wandb",
)
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"


@dataclass(frozen=True)
class Case:
    """A configuration of slime whose mean pruned gradient is compared with the whole one."""

    arguments: dict[str, Any] = field(default_factory=dict)
    world: int = 2
    context: int = 1
    siblings: int = 1
    """Samples of a rollout."""
    removes: bool = False
    """Whether a filter removes some samples."""
    has_fields: bool = False
    """Whether samples have teacher's log-probabilities, top-p tokens, experts and images."""
    logs: bool = False
    """Whether slime's metrics of rollouts run."""
    refused: str | None = None
    """Flag that the plug-in refuses; the gradient is measured without the refusal."""


HALF = {"pruning_budget": 0.4}
TOKEN = {**HALF, "calculate_per_token_loss": True}
TIS = {"use_tis": True, "use_rollout_logprobs": False}
CASES = {
    "grpo": Case(HALF),
    "grpo, auto": Case(),
    "grpo, auto where training is half": Case({"pruning_training_fraction": 0.5}),
    "grpo, auto, per token": Case({"calculate_per_token_loss": True}),
    "grpo, weights up to 1.5": Case({**HALF, "pruning_max_weight": 1.5}),
    "grpo, context parallel": Case(HALF, context=2),
    "grpo, 4 ranks, context parallel": Case(HALF, world=4, context=2),
    "grpo, per token": Case(TOKEN),
    "grpo, per token, context parallel": Case(TOKEN, context=2),
    "2 steps": Case({**HALF, "global_batch_size": 16}),
    "2 steps, per token": Case({**TOKEN, "global_batch_size": 16}),
    "3 steps, 2 rollouts left over": Case({**HALF, "global_batch_size": 10}),
    "dr. grpo, per token": Case({**TOKEN, "grpo_std_normalization": False}),
    "gspo": Case({**HALF, "advantage_estimator": "gspo"}),
    "gspo, context parallel": Case({**HALF, "advantage_estimator": "gspo"}, context=2),
    "cispo, per token": Case({**TOKEN, "advantage_estimator": "cispo"}),
    "tis": Case({**HALF, **TIS}),
    "icepop, per token": Case(
        {**TOKEN, **TIS, "tis_clip_low": 0.8, "custom_tis_function_path": ICEPOP}
    ),
    "dual clip": Case({**HALF, "eps_clip_c": 1.1}),
    "opsm": Case({**HALF, "use_opsm": True}),
    "2 samples a rollout": Case(HALF, siblings=2),
    "2 samples a rollout, per token": Case(TOKEN, siblings=2),
    "samples removed": Case(HALF, removes=True),
    "samples removed, per token": Case(TOKEN, removes=True),
    "balanced by operations": Case({**HALF, "balance_data": True}),
    "KL loss with coefficient 0": Case({**HALF, "use_kl_loss": True}),
    "slime's metrics, pass rate included": Case(HALF, logs=True),
    "top-p, experts, images, teacher": Case({**HALF, "rollout_top_p": 0.9}, has_fields=True),
    "fields, context parallel": Case({**HALF, "rollout_top_p": 0.9}, context=2, has_fields=True),
    "KL loss": Case({**HALF, "use_kl_loss": True, "kl_loss_coef": 0.1}, refused="--kl-loss-coef"),
    "entropy": Case({**HALF, "entropy_coef": 0.01}, refused="--entropy-coef"),
    "whitened advantages": Case(
        {**HALF, "normalize_advantages": True}, refused="--normalize-advantages"
    ),
    "loss reducer of the user": Case(
        {
            **HALF,
            "custom_pg_loss_reducer_function_path": (
                "tests.integrations.slime_on_ranks.make_reducer_of_kept"
            ),
        },
        refused="--custom-pg-loss-reducer-function-path",
    ),
}

DEFAULTS = {
    "advantage_estimator": "grpo",
    "align_grad_reduce": False,
    "align_param_gather": False,
    "allgather_cp": False,
    "balance_by_flops": False,
    "balance_data": False,
    "calculate_per_token_loss": False,
    "check_for_nan_in_loss_and_grad": True,
    "ci_load_grad_norm": None,
    "ci_save_grad_norm": None,
    "ci_test": False,
    "custom_advantage_function_path": None,
    "custom_config_path": None,
    "custom_megatron_before_train_step_hook_path": None,
    "custom_pg_loss_reducer_function_path": None,
    "custom_reward_post_process_path": None,
    "custom_tis_function_path": None,
    "data_pad_size_multiplier": 8,
    "decoder_seq_length": None,
    "enable_mtp_training": False,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "eps_clip_high": 0.28,
    "ffn_hidden_size": 32,
    "first_k_dense_replace": 0,
    "get_mismatch_metrics": False,
    "global_batch_size": PROMPTS * SAMPLES,
    "grpo_std_normalization": True,
    "hidden_size": 8,
    "keep_old_actor": False,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "low_var_kl",
    "kv_channels": 8,
    "kv_lora_rank": None,
    "log_correct_samples": False,
    "log_multi_turn": False,
    "log_passrate": True,
    "log_probs_chunk_size": -1,
    "loss_type": "policy_loss",
    "manual_gc": False,
    "max_tokens_per_gpu": 24,
    "micro_batch_size": 1,
    "moe_aux_loss_coeff": 0.0,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": None,
    "moe_router_topk": 1,
    "moe_shared_expert_intermediate_size": None,
    "n_samples_per_prompt": SAMPLES,
    "normalize_advantages": False,
    "num_attention_heads": 1,
    "num_experts": None,
    "num_layers": 1,
    "num_query_groups": 1,
    "num_steps_per_rollout": None,
    "opsm_delta": 1e-4,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "q_lora_rank": None,
    "qkv_format": "thd",
    "recompute_loss_function": False,
    "reset_optimizer_states": False,
    "reward_key": None,
    "rewards_normalization": True,
    "rollout_batch_size": PROMPTS,
    "rollout_data_transport": "object-store",
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "save_debug_train_data": None,
    "seq_length": 64,
    "swiglu": True,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "tis_level": "token",
    "use_critic": False,
    "use_distributed_optimizer": False,
    "use_dynamic_batch_size": True,
    "use_kl_loss": False,
    "use_opd": False,
    "use_opsm": False,
    "use_rollout_logprobs": True,
    "use_rollout_routing_replay": False,
    "use_routing_replay": False,
    "use_tis": False,
    "use_unbiased_kl": False,
    "vocab_size": VOCABULARY,
    "wandb_always_use_train_step": False,
}
"""slime's defaults of the arguments that its conversion, schedule and losses read."""


def make_reducer_of_kept(total: Any, lengths: Any, masks: list[torch.Tensor], *_: Any) -> Any:
    """Return a loss reducer that divides by the samples with a loss, in place of the whole step's."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        kept = [
            (row * mask).sum() / mask.sum()
            for row, mask in zip(values.split(lengths), masks, strict=True)
            if mask.any()
        ]
        return torch.stack(kept).mean() if kept else 0.0 * values.sum()

    return reduce


class Replaced(mock.MagicMock):
    """Module that slime imports and no loss reads."""

    __path__: ClassVar[list[str]] = []
    __spec__ = None

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class ReplacingFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, absent: tuple[str, ...]) -> None:
        self.absent = absent

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if any(name == top or name.startswith(f"{top}.") for top in self.absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = Replaced(name=spec.name)
        module.__name__, module.__path__ = spec.name, []
        return module

    def exec_module(self, module: Any) -> None:
        pass


def import_sources(variable: str, absent: tuple[str, ...] = ABSENT) -> None:
    """Make the checkout that an environment variable names importable."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.path.insert(0, os.environ[variable])
    sys.meta_path.insert(0, ReplacingFinder(absent))


def import_slime() -> SimpleNamespace:
    """Import the parts of slime that compute a step."""
    import_sources("SLIME")
    import ray

    ray.put, ray.get = (lambda value, **_: value), (lambda value: value)
    import slime.utils.accelerator as accelerator

    accelerator.device = lambda index=None: torch.device("cpu")
    accelerator.current_device = lambda: "cpu"
    from slime.backends.megatron_utils import actor, cp_utils, data, loss, model
    from slime.observability import train_metric_utils
    from slime.ray.rollout import RolloutManager
    from slime.utils.types import Sample

    model.logging_utils.log = lambda *_, **__: None
    return SimpleNamespace(
        actor=actor.MegatronTrainRayActor,
        cp=cp_utils,
        data=data,
        loss=loss,
        manager=RolloutManager.__ray_metadata__.modified_class,
        metrics=train_metric_utils,
        model=model,
        sample=Sample,
    )


def make_table(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator)


def make_policy(config: Any) -> Any:
    """Return a policy whose only parameter is a table, and which counts the tokens it reads."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer import MegatronModule

    class Table(MegatronModule):
        def __init__(self) -> None:
            super().__init__(config)
            self.model_type = ModelType.encoder_or_decoder
            self.table = torch.nn.Parameter(make_table(0))
            self.tokens = 0

        def set_input_tensor(self, tensor: Any) -> None:
            pass

        def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
            self.tokens += input_ids.numel()
            return self.table[input_ids]

    return Table()


def score(table: torch.Tensor, ids: torch.Tensor, length: int) -> list[float]:
    """Return log-probabilities of the last ``length`` tokens."""
    logprobs = table[ids].log_softmax(-1)[:-1]
    return logprobs.gather(-1, ids[1:, None])[-length:, 0].tolist()


def make_samples(case: Case, sample: Any) -> list[Any]:
    """Make rollouts of an older policy: some ratios are clipped. The first prompt has equal
    rewards."""
    rng = np.random.default_rng(0)
    old = make_table(0) + 0.15 * make_table(1)
    samples: list[Any] = []
    for prompt in range(PROMPTS):
        asked = rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist()
        for rollout in range(SAMPLES):
            reward = float(rng.random() < 0.4) if prompt else 1.0
            for _ in range(case.siblings):
                length = int(rng.integers(2, 10))
                ids = torch.tensor(asked + rng.integers(0, VOCABULARY, length).tolist())
                mask = [1] * length
                mask[1 : 1 + length // 3] = [0] * (length // 3)  # tokens of a tool
                made = sample(
                    group_index=prompt,
                    index=len(samples),
                    tokens=ids.tolist(),
                    response_length=length,
                    reward=reward,
                    loss_mask=mask,
                    rollout_log_probs=score(old, ids, length),
                    status=sample.Status.COMPLETED,
                    remove_sample=case.removes and rng.random() < 0.2,
                )
                if case.siblings > 1:
                    made.rollout_id = prompt * SAMPLES + rollout
                if case.has_fields:
                    made.teacher_log_probs = [-1.0] * length
                    made.rollout_top_p_token_ids = list(range(VOCABULARY)) * length
                    made.rollout_top_p_token_offsets = [VOCABULARY * i for i in range(length + 1)]
                    made.rollout_routed_experts = torch.ones(len(ids) - 1, 1, 1, dtype=torch.int32)
                    made.multimodal_train_inputs = {"pixels": torch.ones(3)}
                samples.append(made)
    return samples


@dataclass
class Step:
    """Result of training on one rollout batch."""

    gradients: torch.Tensor
    """[steps, V, V]"""
    tokens: float
    """Tokens that the policy read on all ranks."""
    increments: list[int]
    """Rollouts by which each step moved the schedule of the learning rate."""


class Trainer:
    """slime's training step with a case's arguments, on this rank."""

    def __init__(self, slime: SimpleNamespace, case: Case) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        self.slime, self.case = slime, case
        self.args = SimpleNamespace(**(DEFAULTS | case.arguments))
        slime.model.get_args = lambda: self.args
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            calculate_per_token_loss=self.args.calculate_per_token_loss,
            context_parallel_size=case.context,
        )
        reduction = DistributedDataParallelConfig(
            overlap_grad_reduce=False, average_in_collective=False
        )
        self.policy = make_policy(config)
        self.model = DistributedDataParallel(config, reduction, self.policy)
        self.samples = make_samples(case, slime.sample)

    def step(self, hook: Any = None) -> Step:
        """Train on all samples, or on those that the hook keeps."""
        gradients = []

        def record() -> tuple[bool, float, int]:
            gradients.append(self.policy.table.main_grad.detach().double().clone())
            return True, 0.0, 0

        optimizer = SimpleNamespace(
            scale_loss=None, zero_grad=lambda: None, step=record, param_groups=[]
        )
        increments: list[int] = []
        scheduler = SimpleNamespace(
            step=lambda increment: increments.append(increment), get_lr=lambda group: 0.0
        )
        rollout = self._convert(hook)
        iterator = self.slime.data.get_data_iterator(rollout)
        self.slime.loss.compute_advantages_and_returns(self.args, rollout)
        if self.case.logs:
            self.slime.metrics.log_rollout_data(0, self.args, rollout)
        self.policy.tokens = 0
        self.slime.model.train(
            0,
            [self.model],
            optimizer,
            scheduler,
            iterator,
            rollout["num_microbatches"],
            rollout["global_batch_sizes"],
        )
        tokens = torch.tensor(float(self.policy.tokens))
        dist.all_reduce(tokens)
        return Step(torch.stack(gradients), tokens.item(), increments)

    def _convert(self, hook: Any) -> Any:
        manager = object.__new__(self.slime.manager)
        manager.args = self.args
        manager.custom_convert_samples_to_train_data_func = None
        manager.custom_reward_post_process_func = hook
        manager.train_parallel_config = {
            "dp_size": self.case.world // self.case.context,
            "cp_size": self.case.context,
            "vpp_size": 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        data = manager._convert_samples_to_train_data(copy.deepcopy(self.samples))
        boxes = manager._split_train_data_by_dp(data)
        rollout = self.slime.actor._get_rollout_data(SimpleNamespace(args=self.args), boxes)
        if self.args.use_kl_loss:
            rollout["ref_log_probs"] = [
                self._score_reference(index, total, length)
                for index, total, length in zip(
                    rollout["sample_indices"],
                    rollout["total_lengths"],
                    rollout["response_lengths"],
                    strict=True,
                )
            ]
        return rollout

    def _score_reference(self, index: int, total: int, length: int) -> torch.Tensor:
        table = make_table(0) + 0.3 * make_table(2)
        sample = self.samples[index]
        logprobs = score(table, torch.tensor(sample.tokens), sample.response_length)
        return self.slime.cp.slice_log_prob_with_cp(torch.tensor(logprobs[:length]), total, length)


@contextmanager
def fixed_draws(offset: float, recorded: list[Any]) -> Iterator[None]:
    """Replace the random generator of each draw by ``offset``; record the probabilities."""
    from megatron_dppo.rl import pruning
    from megatron_dppo.rl.pruning.completion_rules import draw_completions
    from tests.rl.integration import FixedOffset

    def draw(rule: str, candidates: Any, inclusion: Any, rng: Any) -> Any:
        recorded.append(inclusion.ravel())
        return draw_completions(rule, candidates, inclusion, FixedOffset(offset))

    with mock.patch.object(pruning, "draw_completions", draw):
        yield


def compare_gradients(trainer: Trainer) -> dict[str, float]:
    """Integrate the pruned gradient over all outcomes of the draw, and compare the mean with the
    whole batch's gradient."""
    from megatron_dppo.integrations.slime import prune_rewards
    from tests.rl.integration import outcomes_of_all

    whole = trainer.step()
    probabilities: list[Any] = []
    with fixed_draws(0.5, probabilities):
        trainer.step(prune_rewards)
    mean, tokens = torch.zeros_like(whole.gradients), 0.0
    for offset, length in outcomes_of_all(probabilities):
        with fixed_draws(offset, []):
            pruned = trainer.step(prune_rewards)
        mean += length * pruned.gradients
        tokens += length * pruned.tokens
        assert pruned.increments == whole.increments, "the schedule does not change"
    error = (mean - whole.gradients).norm() / whole.gradients.norm()
    every = np.concatenate(probabilities)
    return {
        "error": error.item(),
        "tokens": tokens / whole.tokens,
        "kept": float(every.mean()),
        "steps": float(len(whole.gradients)),
    }


def run_rank(rank: int, world: int, context: int, store: str, results: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    from megatron_dppo.parallel import without_cuda

    without_cuda.install()
    slime = import_slime()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    from megatron.core import mpu

    from megatron_dppo.integrations import slime as plugin

    mpu.initialize_model_parallel(context_parallel_size=context)
    read = plugin.read_pruning_settings
    measured = {}
    for name, case in CASES.items():
        if (case.world, case.context) == (world, context):
            if case.refused:
                settings = plugin.SlimePruning(case.arguments["pruning_budget"])
                plugin.read_pruning_settings = lambda args, settings=settings: settings
            measured[name] = compare_gradients(Trainer(slime, case))
            plugin.read_pruning_settings = read
    if rank == 0:
        Path(results).write_text(json.dumps(measured), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    world, context = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, context, f"{folder}/store", sys.argv[3])
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=world)
