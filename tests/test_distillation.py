"""Distillation from a teacher of another shape: the update is the formula's, in every layout, and pruned as scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_dppo.config import Config, DistillationConfig, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.rl.objectives import advantages, objective_for
from megatron_dppo.rl.pruning.minibatch import advantages_of_segments, completion_candidates
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config, preflight
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import SAMPLES, VOCAB, config_for, step_of_groups
from tests.test_formula import TEMPERATURE, update
from tests.test_split_invariance import LAYOUTS, ONE, assert_same_update, learned, size_of

COEF = 0.7


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student, and a teacher with more layers, another width and tied weights."""
    folder = tmp_path_factory.mktemp("distillation")
    teacher = write_policy(folder / "teacher", tied=True, layers=8, hidden=64, ffn=96, seed=11)
    return write_policy(folder / "student"), teacher


def configure(
    policies: tuple[Path, Path], layout: LayoutConfig, *, name: str = "grpo", **distillation: object
) -> Config:
    student, teacher = policies
    given = DistillationConfig(teacher=str(teacher), coef=COEF, **distillation)
    return config_for(student, layout, LossConfig(name=name, distillation=given), 64, distributed=True)


def log_distributions(model: Qwen3ForCausalLM, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """[tokens of the response, vocabulary]"""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()
    return torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE, dim=-1)


@pytest.mark.parametrize(
    ("direction", "rewards", "layout"),
    [("reverse", False, LAYOUTS["tp2 sp"]), ("forward", True, LAYOUTS["cp2"])],
    ids=["reverse alone", "forward added to rewards"],
)
def test_update_is_that_of_the_formula(
    direction: str, rewards: bool, layout: LayoutConfig, ranks: RankPool, policies: tuple[Path, Path]
) -> None:
    """Written out by autograd on transformers' models, with whole distributions."""
    config = configure(policies, layout, direction=direction, use_task_rewards=rewards)
    metrics, moved, plan = ranks.run(2, update, config, 1.0)[0]
    student, teacher = (Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32) for path in policies)
    metadata, groups = step_of_groups(2)
    advantage = advantages(metadata.rewards, normalise=True) * rewards
    z, (minibatch,) = metadata.window * SAMPLES, plan.minibatches
    expected, divergences = torch.zeros(()), []
    kept = minibatch.samples
    assert 0 < len(kept.group) < metadata.rewards.size
    for row, sample, weight in zip(kept.group, kept.completion, kept.weight, strict=True):
        completion = groups[row].completions[sample]
        own = log_distributions(student, groups[row].prompt.token_ids, completion.token_ids)
        with torch.no_grad():
            other = log_distributions(teacher, groups[row].prompt.token_ids, completion.token_ids)
        of, to = (own, other) if direction == "reverse" else (other, own)
        divergence = (of.exp() * (of - to)).sum(dim=1)
        chosen = own[torch.arange(len(own)), torch.from_numpy(completion.token_ids).long()]
        term = (chosen - chosen.detach()).exp() * advantage[row, sample] - COEF * divergence
        sampled = torch.from_numpy(completion.loss_mask)
        expected = expected - weight / metadata.sampled_lengths[row, sample] / z * term[sampled].sum()
        divergences.append(divergence[sampled].detach())
    expected.backward()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["train/distillation_kl"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-4)
    for name, parameter in student.named_parameters():
        step = -parameter.grad / (parameter.grad.abs() + 1)
        assert (moved[name] - step).norm() <= 1e-4 * step.norm() + 2e-7 * parameter.norm(), name


def test_an_update_toward_a_teacher_depends_on_no_layout(ranks: RankPool, policies: tuple[Path, Path]) -> None:
    alone = configure(policies, ONE)
    calls = {"start": replace(alone, optimizer=replace(alone.optimizer, lr=1e-30)), "reference": alone}
    calls |= {
        name: configure(policies, LAYOUTS[name]) for name in ("tp2", "cp2", "pp2", "dp2", "pp2 vpp2", "cp2 tp2 sp")
    }
    found = {}
    for size in (1, 2, 4):
        names = [name for name, config in calls.items() if size_of(config.layout) == size]
        each = ((learned, calls[name], False) for name in names)
        found |= {name: of_ranks[0] for name, of_ranks in zip(names, ranks.in_turn(size, *each), strict=True)}
    (_, start), reference = found.pop("start"), found.pop("reference")
    for name, made in found.items():
        kl = reference[0]["train/distillation_kl"]
        assert made[0]["train/distillation_kl"] == pytest.approx(kl, rel=1e-5), name
        assert_same_update(made, reference, start, name)


def test_scores_count_the_teacher() -> None:
    """Alone it gives every completion the score of an advantage of its weight; beside rewards the two add up."""
    metadata, _ = step_of_groups(1)
    scores = {}
    for rewards in (False, True):
        config = Config(loss=LossConfig(distillation=DistillationConfig(teacher="T", use_task_rewards=rewards)))
        objective = objective_for(config.loss)
        segments = advantages_of_segments(metadata, config, objective)
        candidates = completion_candidates(metadata, config, objective, segments)
        assert not candidates.zero_advantage.any()
        scores[rewards] = candidates.score
    unit = metadata.score_norms / metadata.sampled_lengths / metadata.prompt_inclusion[:, None]
    np.testing.assert_allclose(scores[False], unit)
    squares = advantages(metadata.rewards, normalise=True) ** 2
    np.testing.assert_allclose(scores[True], unit * np.sqrt(squares + 1.0))


TAUGHT = "loss.distillation.teacher=T"
ALONE = f"{TAUGHT} loss.distillation.use_task_rewards=false"


@pytest.mark.parametrize(
    ("setting", "overrides"),
    [
        ("loss.distillation.use_task_rewards", "loss.distillation.use_task_rewards=false"),
        ("loss.distillation.teacher_checkpoint", "loss.distillation.teacher_checkpoint=c"),
        ("pruning.prompts.rule", f"{ALONE} pruning.prompts.rule=greso"),
        ("pruning.completions.rule", f"{ALONE} pruning.completions.rule=top_k"),
        ("pruning.prompts.predictor", f"{TAUGHT} pruning.prompts.predictor=record"),
    ],
)
def test_what_lacks_a_teacher_or_ranks_by_rewards_left_out_is_refused(setting: str, overrides: str) -> None:
    with pytest.raises(UserError) as error:
        check_config(load_config(None, overrides.split()))
    assert error.value.setting == setting


def test_a_teacher_that_cannot_teach_is_named_before_anything_starts(
    policies: tuple[Path, Path], tmp_path: Path
) -> None:
    def said(teacher: Path, *more: str) -> UserError:
        given = (f"model.path={policies[0]}", f"loss.distillation.teacher={teacher}", f"run.dir={tmp_path}/run")
        short = ("data.max_prompt_tokens=16", "rollout.max_response_tokens=16", "data.train=arithmetic")
        with pytest.raises(UserError) as error:
            preflight(load_config(None, [*given, *short, *more]), "train")
        return error.value

    absent = said(tmp_path / "absent")
    assert absent.setting == "loss.distillation.teacher"
    other = said(write_policy(tmp_path / "other", vocab=VOCAB + 1))
    assert (other.setting, str(VOCAB + 1) in other.problem) == ("loss.distillation.teacher", True)
    renamed = write_policy(tmp_path / "renamed")
    file = renamed / "tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"seven"'))
    assert "'seven'" in said(renamed).problem
    uneven = said(write_policy(tmp_path / "uneven", layers=3), "layout.pp=2")
    assert (uneven.setting, "teacher" in uneven.problem) == ("layout.pp", True)
