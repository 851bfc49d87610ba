"""Distillation from a teacher of another shape: the update is the formula's in every layout, and
scores count it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_dppo.config import Config, DistillationConfig, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.rl.advantages import compute_group_advantages
from megatron_dppo.rl.objectives import resolve_objective
from megatron_dppo.rl.pruning.draw import compute_completion_terms
from megatron_dppo.rl.types import Group, StepMetadata
from megatron_dppo.rollout.metadata import build_metadata
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import run_preflight
from tests.laws.test_formula import (
    TIS_CAP,
    assert_moved,
    chosen,
    log_distributions,
    objective,
    update,
)
from tests.laws.test_split_invariance import LAYOUTS
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import SAMPLES, VOCAB, config_for, step_of_groups

COEF = 0.7
SERVER = "http://teacher:30000"
Policies = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    """A student, a teacher with more layers, another width and tied weights, and a small one."""
    folder = tmp_path_factory.mktemp("distillation")
    teacher = write_policy(folder / "teacher", tied=True, layers=8, hidden=64, ffn=96, seed=11)
    return (
        write_policy(folder / "student"),
        teacher,
        write_policy(folder / "small", hidden=32, seed=12),
    )


def configure(
    policies: Policies, layout: LayoutConfig, *, several: bool = False, **distillation: object
) -> Config:
    """Return settings with one teacher, or with ``several``: two, a server for a third source, none
    for a fourth."""
    student, teacher, small = map(str, policies)
    given = DistillationConfig(teacher=teacher, coef=COEF, **distillation)
    if several:
        given = replace(
            given, teacher=None, teachers={"a": teacher, "b": small, "c": SERVER, "d": None}
        )
    return config_for(
        Path(student), layout, LossConfig(distillation=given, tis_cap=TIS_CAP), 64, distributed=True
    )


def taught_step(distillation: DistillationConfig, ranks: int) -> tuple[StepMetadata, list[Group]]:
    """Return ``step_of_groups`` with four sources in turn, and made-up log-probabilities of a
    server."""
    metadata, groups = step_of_groups(ranks)
    rng = np.random.default_rng(3)
    for row, group in enumerate(groups):
        prompt = dataclasses.replace(group.prompt, data_source="abcd"[row % 4])
        completions = []
        for each in group.completions:
            given = rng.normal(-3.0, 1.0, len(each.token_ids)).astype(np.float32)
            served = distillation.has_server(prompt.data_source)
            completions.append(
                dataclasses.replace(each, teacher_logprobs=given if served else None)
            )
        groups[row] = dataclasses.replace(group, prompt=prompt, completions=tuple(completions))
    known = build_metadata(groups, metadata.prompt_inclusion, SAMPLES, 0, 0, distillation)
    return dataclasses.replace(metadata, log_ratios=known.log_ratios, teacher=known.teacher), groups


@pytest.mark.parametrize(
    ("direction", "several", "layout"),
    [("forward", False, LAYOUTS["tp2 sp pp2 vpp2"]), ("reverse", True, LayoutConfig(cp=2, dp=2))],
    ids=["one teacher alone, forward", "several and a server, added to rewards"],
)
def test_distilled_update_equals_the_formula(
    direction: str, several: bool, layout: LayoutConfig, ranks: RankPool, policies: Policies
) -> None:
    """Written out by autograd on transformers' models, with whole distributions, and sampled tokens
    for the server."""
    config = configure(
        policies, layout, direction=direction, use_task_rewards=several, several=several
    )
    step = partial(taught_step, config.loss.distillation)
    metrics, moved, plan = ranks.run(4, update, config, 1.0, step)[0]
    student, *teachers = (
        Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32) for path in policies
    )
    metadata, groups = step(4)
    advantage = compute_group_advantages(metadata.rewards, normalise=True) * several
    divergences = []
    assert len(np.unique(metadata.teacher[plan.minibatches[0].group])) == (3 if several else 1)

    def terms(row: int, sample: int, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        completion, source = groups[row].completions[sample], groups[row].prompt.data_source
        pull, divergence = torch.zeros(len(own)), torch.zeros(len(own))
        if several and source == "c":
            pull = torch.from_numpy(completion.teacher_logprobs) - chosen(own, completion).detach()
        elif not several or source != "d":
            other = log_distributions(
                teachers[several and source == "b"], groups[row], sample
            ).detach()
            of, to = (own, other) if direction == "reverse" else (other, own)
            divergence = (of.exp() * (of - to)).sum(dim=1)
        divergences.append((divergence - pull)[torch.from_numpy(completion.loss_mask)].detach())
        return advantage[row, sample] + COEF * pull, COEF * divergence

    expected = objective(plan, metadata, groups, student, terms)
    expected.backward()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert metrics["train/distillation_kl"] == pytest.approx(
        torch.cat(divergences).mean().item(), rel=1e-4
    )
    assert_moved(moved, student)


def test_scores_of_a_server_are_norms_of_token_advantages() -> None:
    """√Σ_t (A + β log q_t/p_t)² (1 − p_t)² over the sampled tokens."""
    given = DistillationConfig(
        teachers={"a": None, "b": SERVER, "c": SERVER, "d": SERVER}, coef=COEF
    )
    config = Config(loss=LossConfig(name="dr_grpo", distillation=given))
    objective = resolve_objective(config.loss)
    metadata, groups = taught_step(given, 1)
    norms = build_metadata(groups, metadata.prompt_inclusion, SAMPLES, 0, 0, given).score_norms
    metadata = dataclasses.replace(metadata, score_norms=norms)
    candidates, *_ = compute_completion_terms(metadata, config, objective)
    for row, group in enumerate(groups):
        for sample, c in enumerate(group.completions):
            a = group.rewards[sample] - group.rewards.mean()
            pull = 0.0 if c.teacher_logprobs is None else COEF * (c.teacher_logprobs - c.logprobs)
            terms = (a + pull) * (1.0 - np.exp(c.logprobs.astype(np.float64)))
            expected = np.linalg.norm(terms[c.loss_mask]) / metadata.prompt_inclusion[row]
            assert candidates.score[row, sample] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_teacher_that_cannot_teach_is_refused(policies: Policies, tmp_path: Path) -> None:
    student, teacher, _ = policies
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "1+1=", "label": "2", "data_source": "{name}"}}\n' for name in "abc")
    )
    other = write_policy(tmp_path / "other", vocab=VOCAB + 1)
    uneven = write_policy(tmp_path / "uneven", layers=3)
    renamed = write_policy(tmp_path / "renamed")
    file = renamed / "tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"seven"'))
    one, several = "loss.distillation.teacher", "loss.distillation.teachers"
    for words, setting, problem in (
        (
            (f"{several}={{a: {teacher}, c: null}}", f"data.train={rows}", "data.eval=null"),
            several,
            "'b'",
        ),
        ((f"{one}={other}",), one, str(VOCAB + 1)),
        ((f"{one}={renamed}",), one, "'seven'"),
        ((f"{one}={uneven}", "layout.pp=2"), "layout.pp", "teacher"),
    ):
        given = (
            f"model.path={student} run.dir={tmp_path}/run data.train=arithmetic "
            "data.max_prompt_tokens=16"
        )
        with pytest.raises(UserError) as error:
            run_preflight(
                load_config(None, [*given.split(), "rollout.max_response_tokens=16", *words]),
                "train",
            )
        assert error.value.setting == setting, words
        assert problem in error.value.problem, words
