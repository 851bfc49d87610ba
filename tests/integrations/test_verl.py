"""Pruning in verl: its trainers, TransferQueue, mini-batches, micro-batches and losses, on a policy
that is a table.

The rest of an actor's workers, FSDP and Megatron, requires GPUs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="requires verl: scripts/test.sh --verl")

import ray
import transfer_queue as tq
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.base.decorator import _split_args_kwargs_data_proto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.transferqueue_utils import _meta_to_realdata
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.losses import ppo_loss

from megatron_dppo.errors import UserError
from megatron_dppo.integrations import verl as integration
from megatron_dppo.rl import pruning
from tests.rl.integration import FixedOffset, outcomes

PROMPTS, SAMPLES, RANKS, VOCABULARY = 8, 4, 2, 11
LONGEST = {"prompt": 4, "response": 9}
SETTINGS = (
    "trainer.v1.trainer_mode=pruned_sync",
    "algorithm.adv_estimator=grpo",
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 2}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.actor.loss_scale_factor=9",
    "+pruning.budget=0.4",
)


def configure(*settings: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[*SETTINGS, *settings])


class Workers:
    """Data-parallel ranks, one after the other. Their policy is never updated; the gradients are
    kept."""

    def __init__(self, config: Any) -> None:
        self.actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self._dispatch_info = {"actor": list(range(RANKS))}
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(
            VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True
        )
        self.gradients: list[torch.Tensor] = []
        self.rows: list[int] = []

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """[sequence], of the next token at each place."""
        return self.table[ids].log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]

    def update_actor(self, batch: Any) -> TensorDict:
        (shards,), _ = _split_args_kwargs_data_proto(RANKS, batch)
        if isinstance(batch, TensorDict):
            shards = [
                shard.clone() for shard in shards
            ]  # as a process would receive them, which may change them
        else:
            shards = [_meta_to_realdata(shard) for shard in shards]
        self.gradients, self.rows = [], []
        iterators = []
        for shard in shards:
            rows = tu.pop(shard, key="mini_batch_size")
            assert rows % RANKS == 0
            iterators.append(
                tu.make_iterator(shard, rows // RANKS, epochs=tu.pop(shard, key="epochs"))
            )
        for mini_batches in zip(*iterators, strict=True):
            self.table.grad = None
            counted = sum(mini_batch["loss_mask"].sum().item() for mini_batch in mini_batches)
            self.rows.append(sum(len(mini_batch) for mini_batch in mini_batches))
            for mini_batch in mini_batches:
                size = {
                    "use_dynamic_bsz": False,
                    "micro_batch_size_per_gpu": self.actor.ppo_micro_batch_size_per_gpu,
                }
                tu.assign_non_tensor(mini_batch, batch_num_tokens=counted, dp_size=RANKS, **size)
                for data in prepare_micro_batches(mini_batch)[0]:
                    ids = data["input_ids"]
                    scored = self.log_probs(ids.values())
                    output = {
                        "log_probs": torch.nested.nested_tensor_from_jagged(scored, ids.offsets())
                    }
                    loss, _ = ppo_loss(self.actor, output, data)
                    (loss / RANKS).backward()  # data parallelism averages over its ranks
            assert self.table.grad is not None
            self.gradients.append(self.table.grad)
        return tu.get_tensordict({}, {"metrics": {"mfu": [0.0], "rows": self.rows}})


def make_rows(workers: Workers) -> list[dict[str, Any]]:
    """Make prompts and responses of several lengths. The policy has moved since sampling: some
    ratios are clipped."""
    rng, rows = np.random.default_rng(0), []
    for prompt in range(PROMPTS):
        asked = torch.from_numpy(
            rng.integers(0, VOCABULARY, rng.integers(1, LONGEST["prompt"] + 1))
        )
        for _ in range(SAMPLES):
            length = int(rng.integers(2, LONGEST["response"] + 1))
            response = torch.from_numpy(rng.integers(0, VOCABULARY, length))
            ids, mask = torch.cat([asked, response]), torch.ones(length, dtype=torch.int64)
            mask[1 : 1 + length // 3] = 0  # tokens of a tool
            score = torch.zeros(length)
            score[-1] = float(rng.random() < 0.4) if prompt else 1.0
            with torch.no_grad():
                now = workers.log_probs(ids)[-length - 1 : -1]
            rows.append(
                {
                    "uid": f"prompt{prompt}",
                    "prompts": asked,
                    "responses": response,
                    "input_ids": ids,
                    "attention_mask": torch.ones_like(ids),
                    "position_ids": torch.arange(len(ids)),
                    "response_mask": mask,
                    "loss_mask": mask,
                    "rm_scores": score,
                    "rollout_log_probs": now,
                    "old_log_probs": now + torch.from_numpy(rng.normal(0.0, 0.3, length)),
                }
            )
    return rows


@pytest.fixture(scope="module")
def queue() -> Iterator[None]:
    """TransferQueue, whose controller and storage are actors of Ray."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "RAY_AUTH_TOKEN", secrets.token_hex(32)
        )  # Ray would keep one in the user's home
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        tq.init()
        yield
        tq.close()
        ray.shutdown()


class Tokenizer:
    eos_token_id = 0


def v1(config: Any) -> tuple[Any, Any, Workers]:
    """Return a trainer after its advantages, its batch, and its workers."""
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    workers = trainer.actor_rollout_wg = Workers(config)
    trainer.global_steps, trainer.tokenizer = 1, Tokenizer()
    rows = make_rows(workers)
    keys = [f"{row['uid']}_{place % SAMPLES}_0" for place, row in enumerate(rows)]
    tags = [{"seq_len": len(row["input_ids"])} for row in rows]
    batch = tq.kv_batch_put(
        keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags
    )
    batch = trainer._balance_batch(batch, metrics={})
    return trainer, trainer._compute_advantage(batch, metrics={}), workers


def legacy(config: Any) -> tuple[Any, Any, Workers]:
    trainer = object.__new__(integration.PrunedRayPPOTrainer)  # its constructor looks for GPUs
    workers = trainer.actor_rollout_wg = Workers(config)
    trainer.config, trainer.pruning, trainer.global_steps = (
        config,
        integration.read_pruning_settings(config),
        1,
    )
    rows = make_rows(workers)

    def padded(name: str, before: int = 0) -> torch.Tensor:
        """A prompt is padded on its left, a response on its right."""
        width = before and LONGEST["prompt"]
        values = [
            torch.nn.functional.pad(row[name], (width and width - len(row["prompts"]), 0))
            for row in rows
        ]
        width += LONGEST["response"]
        return torch.stack(
            [torch.nn.functional.pad(value, (0, width - len(value))) for value in values]
        )

    tensors = {name: padded(name, 1) for name in ("input_ids", "attention_mask", "position_ids")}
    names = ("responses", "response_mask", "rm_scores", "old_log_probs")
    tensors |= {name: padded(name) for name in names} | {
        "prompts": tensors["input_ids"][:, : LONGEST["prompt"]]
    }
    scores = tensors["rm_scores"].sum(1).view(PROMPTS, SAMPLES)
    advantages = (
        (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    ).view(-1, 1)
    tensors["advantages"] = advantages * tensors["response_mask"]
    batch = DataProto.from_dict(
        tensors, {"uid": np.array([row["uid"] for row in rows], dtype=object)}
    )
    batch.meta_info["global_token_num"] = tensors["attention_mask"].sum(1).tolist()
    return trainer, batch, workers


def update(trainer: Any, batch: Any, cls: Any = None) -> dict[str, Any]:
    """Update by the trainer itself, or by its base class. Returns the metrics."""
    metrics: dict[str, Any] = {}
    function = (cls or type(trainer))._update_actor
    output = (
        function(trainer, batch)
        if isinstance(batch, DataProto)
        else function(trainer, batch, metrics)
    )
    return output.meta_info["metrics"] if isinstance(batch, DataProto) else metrics


def error_of_mean(
    monkeypatch: pytest.MonkeyPatch, trainer: Any, batch: Any, workers: Workers, base: Any
) -> float:
    """Compare each mini-batch's mean gradient over all offsets of its own draw with that of verl's
    own update.

    The other mini-batches keep their draws, so each mini-batch is unbiased whatever the earlier
    ones have drawn.
    """
    update(trainer, batch, base)
    full = workers.gradients
    assert workers.rows == [PROMPTS * SAMPLES // 2] * 2
    offsets = [0.5, 0.5]
    inclusions: list[np.ndarray] = []

    def fixed(rule: str, candidates: Any, probabilities: Any, rng: Any) -> Any:
        inclusions.append(probabilities.ravel())
        return original(rule, candidates, probabilities, FixedOffset(offsets[len(inclusions) - 1]))

    def update_with(number: int, offset: float) -> torch.Tensor:
        inclusions.clear()
        offsets[number] = offset
        update(trainer, batch)
        assert len(inclusions) == 2 and max(workers.rows) < PROMPTS * SAMPLES // 2
        return workers.gradients[number]

    original = pruning.draw_completions
    monkeypatch.setattr(pruning, "draw_completions", fixed)
    errors = []
    for number, expected in enumerate(full):
        update_with(number, 0.5)
        parts = [
            share * update_with(number, offset)
            for offset, share in list(outcomes(inclusions[number]))
        ]
        errors.append(float((sum(parts) - expected).norm() / expected.norm()))
    return max(errors)


MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@pytest.mark.parametrize("mode", MODES)
def test_mean_gradient_of_the_legacy_trainer_is_that_of_verl(mode, monkeypatch):
    made = legacy(configure(f"actor_rollout_ref.actor.loss_agg_mode={mode}"))
    assert error_of_mean(monkeypatch, *made, RayPPOTrainer) < 1e-6


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_mean_gradient_of_the_v1_trainer_is_that_of_verl(mode, monkeypatch):
    made = v1(configure(f"actor_rollout_ref.actor.loss_agg_mode={mode}"))
    assert error_of_mean(monkeypatch, *made, PPOTrainerSync) < 1e-6


@pytest.mark.parametrize("loss", integration.PROPORTIONAL)
def test_accepted_loss_is_proportional_to_its_advantages(loss, monkeypatch):
    made = legacy(configure(f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"))
    assert error_of_mean(monkeypatch, *made, RayPPOTrainer) < 1e-6


@pytest.mark.usefixtures("queue")
def test_step_continues_with_the_whole_batch_and_its_advantages():
    made, batch, workers = v1(configure())

    def advantages() -> torch.Tensor:
        found = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["advantages"])
        return found["advantages"].values().clone()

    before, metrics = advantages(), {}
    after = made._update_actor(batch, metrics)
    assert after.keys == batch.keys
    assert sum(workers.rows) < len(batch)
    torch.testing.assert_close(advantages(), before, rtol=0, atol=0)
    assert 0.2 < metrics["prune/kept_token_fraction"] < 0.6
    assert made.config.trainer.v1.trainer_mode == made.replay_buffer.trainer_mode == "sync"


def test_each_optimizer_step_has_a_seed_of_its_own(monkeypatch):
    seeds, own = [], np.random.default_rng
    trainer, batch, _ = legacy(configure("+pruning.seed=7"))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or own(seed))
    update(trainer, batch)
    assert seeds == [[7, 1, 0], [7, 1, 1]]


@pytest.mark.usefixtures("queue")
def test_draw_depends_on_the_step_alone():
    made, batch, workers = v1(configure())

    def gradients(step: int) -> torch.Tensor:
        made.global_steps = step
        update(made, batch)
        return torch.stack(workers.gradients)

    first = gradients(1)
    assert not torch.equal(gradients(2), first)
    assert torch.equal(gradients(1), first)


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("+pruning.budgett=0.5", "budgett"),
        ("pruning.budget=2", "pruning.budget = 2"),
        ("+pruning.rule=threshold", "pruning.rule"),
        ("algorithm.adv_estimator=gae", "critic"),
        (f"{ACTOR}.use_kl_loss=true", "use_kl_in_reward"),
        (f"{ACTOR}.entropy_coeff=0.01", "entropy_coeff"),
        (f"{ACTOR}.ppo_epochs=2", "ppo_epochs"),
        (f"{ACTOR}.shuffle=true", "shuffle"),
        ("actor_rollout_ref.model.mtp.enable_train=true", "mtp"),
        ("distillation.enabled=true", "distillation"),
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", "kl_cov"),
        (
            f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm {ACTOR}.loss_scale_factor=null",
            "max_response_length",
        ),
        (
            "++algorithm.rollout_correction={bypass_mode:true,rollout_is_batch_normalize:true}",
            "rollout_is_batch_normalize",
        ),
    ],
)
def test_settings_that_bias_the_gradient_are_refused(settings, named):
    config = configure(*settings.split())
    with pytest.raises(UserError, match=named):
        get_trainer_cls("pruned_sync")(config=config)
