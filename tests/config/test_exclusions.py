"""Each row of the table of exclusions refuses the smallest configuration that meets its terms, and
nothing smaller."""

import re
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest

from megatron_dppo.config import Config, ModelConfig
from megatron_dppo.config.exclusions import (
    Condition,
    Exclusion,
    build_checks,
    format_value,
    get_value,
    load_exclusions,
    load_idle_rows,
)
from megatron_dppo.config.types import Command
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape
from megatron_dppo.settings import get_settings, load_config
from megatron_dppo.trainer.preflight import check_config, run_checks

DENSE = PolicyShape(2, 64, 8, 4, 32, 128, 64, True, 1e6, 1e-6, 1536)
POLICY = {
    "policy.experts": replace(DENSE, experts=4, experts_per_token=2),
    "policy.shared_ffn": replace(DENSE, experts=4, experts_per_token=2, shared_ffn=64),
    "policy.hybrid": replace(
        DENSE, architecture="Qwen3_5ForCausalLM", attention_interval=2, delta_keys=8
    ),
}
"""Policies by the condition that they meet. ``DENSE`` has as many positions as the default settings
take."""
NAMES = {
    "data.chat_template_kwargs": "{enable_thinking: false}",
    "data.date": "2026-01-31",
    "data.rollouts": "rollouts.jsonl",
    "rollout.servers": "[http://a:1]",
    "rollout.tree.branches": "[{at: 2}]",
    "rollout.tree.depths": "[0]",
    "rollout.roles": "[solver]",
    "rollout.launch.tp": "[1,2]",
    "loss.mask_below": "0.5",
    "rollout.top_p": "0.5",
    "eval.top_p": "0.5",
}
"""Values of settings that no word will do for."""
MEET = {
    "usable_pack<longest": ["pack.max_tokens=1535"],
    "layout.pack_multiple>1": ["layout.cp=2"],
    "loss.distillation.servers": ["loss.distillation.teacher=http://a:1"],
    "loss.distillation.models": ["loss.distillation.teacher=dir"],
    "loss.distillation.named": ["loss.distillation.teacher=dir"],
    "rollout.tree.deepest>rollout.tree.levels": ["rollout.tree.depths=[0,2]"],
    "rollout.tree.last_fork>=rollout.max_response_tokens": ["rollout.max_response_tokens=2"],
    "rollout.samples_per_prompt!=rollout.tree_leaves": ["rollout.samples_per_prompt=9"],
    "loss.updates_per_rollout>kept_prompts": ["loss.updates_per_rollout=65"],
    "kept_prompts=rollout.prompts_per_step": ["pruning.prompts.rule=none"],
    "pruning.prompts.floor<pruning.least_inclusion": ["pruning.prompts.floor=0.09"],
    "pruning.prompts.keep<pruning.least_inclusion": ["pruning.prompts.keep=0.09"],
    "pruning.prompts.schedule.spent>1": ["pruning.prompts.schedule.off_last=0.9"],
    "pruning.completions.schedule.spent>1": ["pruning.completions.schedule.off_last=0.9"],
    "reward.functions=reasoning_gym": ["reward.function=reasoning_gym"],
    "reward.functions=agent": ["reward.function=agent"],
    "reward.functions=verifiers": ["reward.function=verifiers"],
    "data.names=reasoning_gym": ["data.train=reasoning_gym"],
    "data.names=verifiers": ["data.train=verifiers"],
    "rollout.launch.sizes>0": ["rollout.launch.tp=[1,2]"],
    "rollout.launch.sizes!=rollout.launch.count": ["rollout.launch.count=3"],
    "rollout.launch.last_port>65535": ["rollout.launch.first_port=65000"],
    "rollout.timeout_s<rollout.sync.patience_s": ["rollout.timeout_s=239"],
    "rollout.launch.ports<rollout.launch.count": [
        "rollout.launch.ports=1",
        "rollout.launch.count=2",
    ],
    "rollout.max_batch<eval.samples": ["rollout.max_batch=1", "eval.samples=2"],
    "data.max_prompt_tokens>policy.max_positions": ["data.max_prompt_tokens=1537"],
    "longest>policy.max_positions": ["rollout.max_response_tokens=1025"],
    "longest_context>policy.max_positions": ["eval.max_response_tokens=1025"],
    "pruning.prompts.floor>pruning.prompts.keep": ["pruning.prompts.floor=0.86"],
}
"""Overrides that meet conditions on properties, and on two settings."""


def term_text(term: Condition) -> str:
    return f"{term.key}{term.order or ''}{'|'.join(term.words)}"


def meeting_overrides(terms: tuple[Condition, ...]) -> list[str]:
    """The fewest overrides that meet conditions, as the head of ``exclusions.yaml`` explains
    them."""
    found: dict[str, str] = {}
    for term in terms:
        if term_text(term) in MEET:
            found |= {each.partition("=")[0]: each for each in MEET[term_text(term)]}
        elif term.key in get_settings().keys() - found and not term.matches(Config(), None):
            found[term.key] = f"{term.key}={value_for(term)}"
    return list(found.values())


def value_for(term: Condition) -> str:
    setting = get_settings()[term.key]
    word = term.words[0] if term.words else None
    match term.order:
        case "=":
            return str(word).replace("*", "")
        case ">" if word in get_settings():
            return str(get_settings()[word].default + 1)
        case "<" if word in get_settings():
            return str(get_settings()[word].default - 1)
        case ">" | ">=":
            return str(int(str(word)) + 1)
        case "!=" if isinstance(setting.default, tuple):
            return format_value(tuple(each for each in setting.default if each not in term.words))
        case "!=" if setting.choices:
            return next(choice for choice in setting.choices if choice not in term.words)
    kinds = {bool: "true", int: "2", float: "2"}
    numbers = [
        kinds[kind] for kind in kinds if kind is setting.type or kind in get_args(setting.type)
    ]
    return (
        NAMES.get(term.key)
        or (numbers or ["2" if "Annotated" in str(setting.type) else "own.py:name"])[0]
    )


def find_refusal(row: Exclusion, words: list[str]) -> UserError | None:
    """Return a row's own refusal by the last of its commands."""
    policy = next(
        (POLICY[term_text(term)] for term in row.terms if term_text(term) in POLICY), DENSE
    )
    config = load_config(None, words)
    own = [str(error) for error in run_checks([partial(row.check, config, policy)])]
    found = run_checks(
        build_checks(config, row.commands[-1], policy if row.needs_policy_shape else None)
    )
    return next((error for error in found if str(error) in own), None)


@pytest.mark.parametrize(
    "row", load_exclusions(), ids=lambda row: " ".join(map(term_text, row.terms))
)
def test_a_row_refuses_the_smallest_configuration(row: Exclusion) -> None:
    words = meeting_overrides(row.terms)
    error = find_refusal(row, words)
    assert error is not None, f"{words} is not refused"
    assert (error.setting, error.value) == (
        row.terms[0].key,
        format_value(get_value(error.setting, load_config(None, words))),
    )
    assert error.problem and error.remedy and "{" not in error.problem + error.remedy
    for word in words:
        rest = [each for each in words if each is not word]
        assert find_refusal(row, rest) is None, f"{rest} suffice"
    for way in re.findall(r"(?<!\S)[a-z_]+(?:\.[a-z_]+)+=(?:\[[^\]]*\]|[^\s,;]+)", error.remedy):
        assert find_refusal(row, [*words, way]) is None, f"{words} are still refused after {way}"


def test_refused_mappings_are_shown_by_their_names() -> None:
    """Their values may be keys."""
    config = load_config(
        None, ["data.chat_template=false", "data.chat_template_kwargs={my_key: s3cret, b: 1}"]
    )
    [error] = run_checks(build_checks(config, "train"))
    assert error.value == "{my_key: …, b: …}"


def test_every_command_takes_the_defaults() -> None:
    for command in get_args(Command):
        check_config(Config(), command)
    tree = ["rollout.tree.branches=[{at: 200}]", "loss.name=grpo"]
    check_config(load_config(None, tree), "eval")  # only training refuses this loss with trees


@pytest.mark.parametrize(
    ("term", "meet", "fail"),
    [
        ("rollout.ahead>1", "rollout.ahead=2", "rollout.ahead=1"),
        ("loss.clip_low>=1", "loss.clip_low=1", "loss.clip_low=0.99"),
        ("optimizer.min_lr>optimizer.lr", "optimizer.min_lr=1.0000001e-6", "optimizer.min_lr=1e-6"),
        ("loss.distillation.teacher=http://*", "loss.distillation.teacher=http://a:1",
        "run.seed=2"),
        ("model.lora.targets=q_proj|k_proj", "model.lora.targets=[v_proj,k_proj]",
        "model.lora.targets=[v_proj]"),
        ("model.lora.targets!=q_proj|k_proj", "model.lora.targets=[v_proj]",
        "model.lora.targets=[v_proj,k_proj]"),
        ("data.names!=[verifiers]", "data.train=[{path: verifiers},{path: a.jsonl}]",
        "data.train=verifiers"),
        ("reward.functions=math", "reward.function=[{function: math},{function: a.py:f}]",
        "reward.function=a.py:math"),
    ],
)  # fmt: skip
def test_a_condition_is_met_as_the_table_explains(term: str, meet: str, fail: str) -> None:
    assert [
        Condition.parse(term).matches(load_config(None, [word]), None) for word in (meet, fail)
    ] == [
        True,
        False,
    ]


def test_a_star_in_a_user_s_value_is_no_pattern() -> None:
    """A star of the table stands for any text, one of a user's only for itself."""
    term = Condition.parse("model.path=model.checkpoint")
    same, other = (
        Config(model=ModelConfig(path=path, checkpoint="runs/*/hf"))
        for path in ("runs/*/hf", "runs/a/hf")
    )
    assert term.matches(same, None) and not term.matches(other, None)


def test_idle_rows_name_settings() -> None:
    for row in load_idle_rows():
        for term in row["when"].split():
            get_value(Condition.parse(term).key, Config())
        for key in row["keys"].split():
            assert any(setting.startswith(key) for setting in get_settings())
