"""``PrunedGRPOTrainer`` against TRL's own trainer: the same rollouts, losses and gradients.

Law 2 is integrated and never sampled: over every outcome of the draw, the mean pruned gradient is
the gradient of the trainer without pruning.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip(
    "trl", reason="TRL is not installed: bash scripts/test.sh --trl runs these tests"
)

from trl import GRPOTrainer

from megatron_dppo.config import EntropyConfig
from megatron_dppo.errors import UserError
from megatron_dppo.integrations import trl as integration
from megatron_dppo.integrations.trl import PrunedGRPOTrainer, Pruning
from megatron_dppo.rl.advantages import compute_gdpo
from megatron_dppo.rl.objectives import EntropyBonus
from tests.integrations.trl_steps import (
    ACCUMULATED,
    LONGEST,
    ROWS,
    SAMPLES,
    WORDS,
    long,
    odd,
    relative_error,
    trained,
    trainer,
    write_policy,
)

Inputs = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


class Engine:
    """The calls that TRL makes to vLLM, answered at random."""

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        rng = np.random.RandomState(0)
        completions = [
            rng.randint(1, len(WORDS), size=rng.randint(1, LONGEST + 1)).tolist() for _ in prompts
        ]
        return (
            prompts,
            completions,
            [[[np.log(rng.uniform(0.05, 0.1))] for _ in each] for each in completions],
            None,
        )


def use_engine(made: GRPOTrainer) -> None:
    made.use_vllm, made.vllm_generation, made._last_loaded_step = True, Engine(), -1


def call_tools(prompts: list[str], made: GRPOTrainer) -> dict[str, Any]:
    """Return completions of which every third token is a tool's."""
    ids = [made._tokenizer(text)["input_ids"] for text in prompts]
    _, completions, logprobs, _ = Engine().generate(ids)
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": [[each[0] for each in row] for row in logprobs],
        "env_mask": [[int(i % 3 != 1) for i in range(len(row))] for row in completions],
    }


CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"loss_type": name}
        for name in sorted(integration.DIVIDED_BY_ROWS | integration.DIVIDED_BY_TOKENS)
    },
    "half of the generated rows": {
        "loss_type": "dr_grpo",
        "steps_per_generation": 6,
        "num_iterations": 1,
    },
    "KL": {"loss_type": "grpo", "beta": 0.3},
    "KL over tokens, corrected": {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "truncated completions masked": {
        "loss_type": "dr_grpo",
        "mask_truncated_completions": True,
        "budget": 0.2,
    },
    "several rewards": {"loss_type": "dapo", "rewards": [odd, long], "reward_weights": [1.0, 0.7]},
    "rewards normalised one by one": {
        "loss_type": "grpo",
        "rewards": [odd, long],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "large rewards": {
        "loss_type": "dapo",
        "rewards": lambda completions, **_: [1e4 + each for each in odd(completions)],
    },
    "padded": {"loss_type": "dapo", "pad_to_multiple_of": 4},
    "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.01},
    "tokens of tools": {"loss_type": "grpo", "rollout_func": call_tools},
    "tokens of tools over all": {"loss_type": "dapo", "rollout_func": call_tools},
}


@pytest.mark.parametrize("name", CASES)
def test_mean_pruned_gradient_is_that_of_trl(policy, tmp_path, name):
    assert relative_error(policy, tmp_path, **{"num_iterations": 2} | CASES[name]) < 1e-6


class GivenRewards(GRPOTrainer):
    """Trainer with the rewards of ``given`` [completions, functions]."""

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.given


def test_advantages_of_several_rewards_are_those_of_trl(policy, tmp_path):
    """GDPO of this project, on random rewards with equal and missing ones; rewards and weights are
    large, so that the 1e-4 which TRL adds to deviations are rounding."""
    rng = np.random.default_rng(0)
    rewards = np.round(rng.random((2, ROWS * ACCUMULATED // SAMPLES, SAMPLES)), 1)
    rewards[1, 0, 1], rewards[0, 1] = np.nan, 0.5
    made = trainer(
        policy,
        tmp_path,
        GivenRewards,
        rewards=[odd, long],
        reward_weights=[1e6, 0.5e6],
        multi_objective_aggregation="normalize_then_sum",
    )
    made.given = torch.from_numpy(1e6 * rewards.reshape(2, -1).T)
    batch = made._generate_and_score_completions(next(iter(made.get_train_dataloader())))
    columns = {
        "inclusion": np.ones(rewards.shape[1]),
        "present": np.ones(rewards.shape[1:], bool),
        "compared": rewards,
        "weights": np.array([1.0, 0.5]),
    }
    found = compute_gdpo(rewards[0], columns).ravel()
    # TRL's deviation of the batch is over one completion less.
    expected = batch["advantages"].numpy() * (found.size / (found.size - 1)) ** 0.5
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert np.abs(found).max() > 1.0


def test_adaptive_weight_of_the_entropy_is_that_of_trl(policy, tmp_path):
    """The rule of this project, on the entropies of a run that cross the target."""
    plain = trainer(policy, tmp_path, max_steps=10)
    plain.train()
    entropies = [row["entropy"] for row in plain.state.log_history if "entropy" in row]
    bounds = {"coef": 0.02, "delta": 0.01, "min_coef": 0.01, "max_coef": 0.04}
    bounds["target"] = float(np.median(entropies))
    made = trainer(
        policy,
        tmp_path,
        max_steps=10,
        use_adaptive_entropy=True,
        entropy_coef=bounds["coef"],
        entropy_target=bounds["target"],
        entropy_coef_delta=bounds["delta"],
        entropy_coef_min=bounds["min_coef"],
        entropy_coef_max=bounds["max_coef"],
    )
    made.train()
    rows = [row for row in made.state.log_history if "entropy_coef" in row]
    bonus, found = EntropyBonus(EntropyConfig(**bounds)), []
    for row in rows:
        bonus.update(row["entropy"])
        found.append(bonus.state_dict()["entropy_coef"])
    np.testing.assert_allclose(found, [row["entropy_coef"] for row in rows], atol=1e-9)
    assert {row["entropy"] <= bounds["target"] for row in rows} == {True, False}


class BatchBaseline(GRPOTrainer):
    """Trainer of a user's, whose groups of equal rewards have advantages."""

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.rewards = super()._calculate_rewards(*args, **kwargs)
        return self.rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"advantages": (self.rewards - self.rewards.mean()).squeeze(1)}


def test_groups_of_equal_rewards_keep_a_batchs_advantages(policy, tmp_path):
    def first_group(completions: list[str], **_: Any) -> list[float]:
        return [float(place < SAMPLES) for place in range(len(completions))]

    case = {
        "kind": BatchBaseline,
        "rewards": first_group,
        "loss_type": "dr_grpo",
        "num_iterations": 2,
    }
    assert relative_error(policy, tmp_path, **case) < 1e-6


@pytest.mark.parametrize("samples", [2, 3, 16])
def test_advantages_of_equal_rewards_are_within_rounding(samples):
    rewards = torch.logspace(-3, 1, 5000)[:, None].expand(-1, samples)
    mean, deviation = rewards.mean(dim=1, keepdim=True), rewards.std(dim=1, keepdim=True)
    advantages = ((rewards - mean) / (deviation + 1e-4)).abs().amax(dim=1)
    bound = integration.compute_max_rounding(rewards.reshape(-1, 1), samples, divisor=1e-4)
    assert ((advantages <= bound) | (bound == integration.MOST_ROUNDING)).all()
    assert (bound <= 0.01).all() and bound[0] < 1e-5


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Inputs]:
    """The inputs of all forward passes."""
    inputs_of_passes: list[Inputs] = []
    own = GRPOTrainer._compute_loss

    def watch(self: GRPOTrainer, model: Any, inputs: Inputs) -> torch.Tensor:
        inputs_of_passes.append(inputs)
        return own(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watch)
    return inputs_of_passes


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_mean_gradient_with_ratios_of_vllm_is_that_of_trl(policy, tmp_path, seen, mode):
    case = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.5}
    assert (
        relative_error(policy, tmp_path, use_engine, loss_type="dr_grpo", num_iterations=2, **case)
        < 1e-6
    )
    for inputs in seen:
        rows, tokens = inputs["completion_ids"].shape
        assert inputs["importance_sampling_ratio"].shape == (
            rows,
            tokens if mode == "token_truncate" else 1,
        )
        assert (
            inputs["sampling_per_token_logps"].shape
            == inputs["old_per_token_logps"].shape
            == (rows, tokens)
        )
    assert {len(inputs["completion_ids"]) for inputs in seen} - {ROWS}


def logged(made: GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in made.state.log_history if name in row]


def test_pruned_steps_take_fewer_and_narrower_passes(policy, tmp_path, seen):
    made = trainer(
        policy,
        tmp_path,
        PrunedGRPOTrainer,
        pruning=Pruning(budget=0.4),
        gradient_accumulation_steps=6,
    )
    trained(made)
    assert 4 <= len(seen) <= 4 * 4
    assert max(logged(made, "pruning/kept_tokens")) < 0.5
    assert min(logged(made, "pruning/variance_inflation")) >= 1.0
    assert 0.2 < np.mean(logged(made, "pruning/kept")) < 0.5
    for inputs in seen:
        assert inputs["prompt_mask"][:, 0].any()
        assert inputs["completion_mask"][:, -1].any()
        assert inputs["prompt_ids"].shape == inputs["prompt_mask"].shape
        assert len(inputs["completion_ids"]) <= ROWS


def test_equal_rewards_take_one_pass_and_no_step(policy, tmp_path, seen):
    """The mean of three times 0.11 is not 0.11, and TRL's own advantages are rounding in place of
    0."""
    options = {
        "num_generations": 3,
        "per_device_train_batch_size": 3,
        "rewards": lambda completions, **_: [0.11] * 9,
    }
    made = trainer(policy, tmp_path, PrunedGRPOTrainer, **options)
    before = torch.cat(
        [parameter.detach().clone().flatten() for parameter in made.model.parameters()]
    )
    assert torch.equal(trained(made), before)
    assert any(made._logs["advantages"])
    assert len(seen) == 4
    assert logged(made, "pruning/kept") == [0.0] * 4


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    ],
)
def test_each_draw_has_a_seed_of_its_own(policy, tmp_path, monkeypatch, options):
    seeds, own = [], np.random.default_rng
    made = trainer(policy, tmp_path, PrunedGRPOTrainer, pruning=Pruning(seed=7), **options)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or own(seed))
    trained(made)
    assert len(set(seeds)) == len(seeds) >= 4


def test_resumed_training_has_the_same_parameters(policy, tmp_path):
    options = {
        "save_strategy": "steps",
        "save_steps": 2,
        "pruning": Pruning(budget=0.4),
        "num_iterations": 2,
    }
    whole = trained(trainer(policy, tmp_path, PrunedGRPOTrainer, **options))
    resumed = trainer(policy, tmp_path, PrunedGRPOTrainer, **options)
    assert torch.equal(
        trained(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-2")), whole
    )
    other = trainer(
        policy, tmp_path / "other", PrunedGRPOTrainer, **options | {"pruning": Pruning(0.4, seed=1)}
    )
    assert not torch.equal(trained(other), whole)


def test_evaluation_is_not_pruned(policy, tmp_path, seen):
    made = trainer(policy, tmp_path, PrunedGRPOTrainer)
    made.eval_dataset = made.train_dataset.select(range(2))
    made.evaluate()
    assert sum(len(inputs["advantages"]) for inputs in seen) == 2 * SAMPLES


class Twice(GRPOTrainer):
    """Trainer of a user's, with an input of its own."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"twice": 2.0 * batch["completion_mask"]}


class PrunedTwice(PrunedGRPOTrainer, Twice):
    completion_inputs = PrunedGRPOTrainer.completion_inputs | {"twice": 0.0}


def test_inputs_of_a_users_trainer_are_cut_or_refused(policy, tmp_path, seen):
    trained(trainer(policy, tmp_path, PrunedTwice))
    for inputs in seen:
        assert torch.equal(inputs["twice"], 2.0 * inputs["completion_mask"])
    unknown = trainer(policy, tmp_path, type("Unknown", (PrunedGRPOTrainer, Twice), {}))
    with pytest.raises(UserError, match=r"inputs = twice: .*completion_inputs"):
        trained(unknown)


@pytest.mark.parametrize(
    ("experts", "setting", "value"),
    [
        (0, "loss_type", "bnpo"),
        (0, "top_entropy_quantile", 0.5),
        (0, "entropy_coef", 0.01),
        (0, "use_adaptive_entropy", True),
        (2, "router_aux_loss_coef", 0.001),
    ],
)
def test_terms_without_an_unbiased_weight_are_refused(tmp_path, experts, setting, value):
    policy = write_policy(tmp_path / "policy", experts=experts)
    with pytest.raises(UserError, match=f"{setting} = {value}: .*biased"):
        trainer(policy, tmp_path, PrunedGRPOTrainer, **{setting: value})
    if experts:
        trainer(policy, tmp_path, PrunedGRPOTrainer, router_aux_loss_coef=0.0)


@pytest.mark.parametrize(
    "pruning", [Pruning(budget="auto"), Pruning(rule="threshold"), Pruning(rule="none")]
)
def test_other_rules_train(policy, tmp_path, pruning):
    made = trainer(policy, tmp_path, PrunedGRPOTrainer, pruning=pruning)
    trained(made)
    assert all(0.0 < kept <= 1.0 for kept in logged(made, "pruning/kept"))


def test_trl_needs_neither_megatron_nor_the_configuration():
    code = (
        "import sys, megatron_dppo.integrations.trl; print(*(m for m in sys.modules if "
        "m.startswith('megatron')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "megatron_dppo.integrations.trl" in loaded
    assert {name.split(".")[1] for name in loaded if "." in name} == {
        "errors",
        "integrations",
        "rl",
    }


def test_two_ranks_have_the_gradient_of_trl_on_two_ranks(policy, tmp_path):
    """Ranks also take as many passes each, whatever each has drawn: see ``trl_on_ranks.py``."""
    words = (
        "-m torch.distributed.run --standalone --nproc-per-node 2 -m "
        "tests.integrations.trl_on_ranks"
    )
    command = [sys.executable, *words.split(), str(policy), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("as expected") == 2


def test_program_of_the_page_trains(policy, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "recipes" / "other_trainers.md").read_text()
    program = page.split('title="grpo.py"\n')[1].split("```")[0]
    assert "python grpo.py" in page
    small = "max_steps=2, max_completion_length=8"
    for shown, given in (("Qwen/Qwen3-0.6B", str(policy)), ("max_steps=10", small)):
        assert shown in program
        program = program.replace(shown, given)
    (tmp_path / "grpo.py").write_text(program)
    done = subprocess.run([sys.executable, "grpo.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pruning/kept" in done.stdout
