"""A checkpoint holds all that later updates depend on, whatever the optimizer, the precision and the next layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from transformers import AutoConfig, AutoTokenizer

from megatron_dppo.bridge.checkpoint_folder import TRACKER, latest_step
from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.policies import trains, write_family, write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, Weights, build, config_for, held_by, plan_for, step_of_groups, weights_of

STATE = {"float": 0.1 + 0.2}
Losses = list[tuple[float, float]]


def configure(
    policy: Path,
    run: Path,
    layout: LayoutConfig,
    *,
    distributed: bool = True,
    dtype: str = "fp32",
    fmt: str = "fully_reshardable",
    offload: bool = False,
    lr: float = 1e-2,
) -> Config:
    """With an ``eps`` of about the size of the gradients, so that every part of Adam's state moves the weights."""
    config = config_for(policy, layout, LossConfig(), 128, distributed)
    adam = replace(config.optimizer, lr=lr, eps=1e-2, clip_grad=1.0, weight_decay=0.1)
    adam = replace(adam, checkpoint_format=fmt, offload=offload)
    return replace(
        config, run=replace(config.run, dir=str(run)), model=replace(config.model, dtype=dtype), optimizer=adam
    )


def train(rank: int, size: int, config: Config, stop: int, save: tuple[int, ...]) -> tuple[Weights, Losses]:
    """Updates up to ``stop``, from the last checkpoint if there is one; the weights, each loss and gradient norm."""
    world, learner, policy = build(config)
    checkpoints = Checkpoints(config, world)
    found = checkpoints.load(policy.actor)
    assert found is None or found[1] == STATE
    first = found[0] if found else 0
    metadata, groups = step_of_groups(size)
    held = held_by(rank, metadata, groups)
    losses = []
    for step in range(first, stop + 1):
        if step in save and (step, STATE) != found:
            checkpoints.save(policy.actor, step, STATE)
        if step < stop:
            metrics = learner.learn(plan_for(world, config, metadata), held, step=step + 1, version=0)
            losses.append((metrics["train/loss"], metrics["train/grad_norm"]))
    return weights_of(policy, world), losses


def ranks_in(layout: LayoutConfig) -> int:
    return layout.tp * layout.pp * layout.cp * layout.dp


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Untied and tied, which TP 2 and PP 2 divide."""
    folder = tmp_path_factory.mktemp("policies")
    return {tied: write_policy(folder / f"tied-{tied}", tied=tied, layers=2) for tied in (False, True)}


@pytest.fixture(scope="module")
def deep_policies(tmp_path_factory: pytest.TempPathFactory) -> dict[bool | str, Path]:
    """Untied and tied, which TP 4 and PP 4 divide, one with experts, one with gated delta networks, one with both."""
    folder = tmp_path_factory.mktemp("deep-policies")
    write_qwen3_moe(folder / "experts", Sizes(vocab_size=VOCAB, num_hidden_layers=4), experts=4)
    dense = {tied: write_policy(folder / f"tied-{tied}", tied=tied, kv_heads=4) for tied in (False, True)}
    hybrid = write_family(folder / "hybrid", "Qwen3_5ForCausalLM")
    mixture = write_family(folder / "mixture", "Qwen3_5MoeForCausalLM")
    return {**dense, "experts": folder / "experts", "hybrid": hybrid, "mixture": mixture}


SAME = {
    "tp2 distributed optimizer as it lies in its buffers": (LayoutConfig(tp=2, dp=1), {"fmt": "dp_reshardable"}),
    "dp2 distributed optimizer bf16, on the host": (LayoutConfig(dp=2), {"dtype": "bf16", "offload": True}),
    "dp2 distributed optimizer on the host, as it lies in its buffers": (
        LayoutConfig(dp=2),
        {"fmt": "dp_reshardable", "offload": True},
    ),
    "tp2 plain optimizer": (LayoutConfig(tp=2, dp=1), {"distributed": False}),
    "tp2 pp2 tied": (LayoutConfig(tp=2, pp=2, dp=1), {}),
    "cp2": (LayoutConfig(cp=2, dp=1), {}),
    "ep2 bf16 experts": (LayoutConfig(ep=2, dp=2), {"dtype": "bf16"}),
    "ep2 pp2 vpp2 experts, as it lies in its buffers": (
        LayoutConfig(ep=2, pp=2, vpp=2, dp=2),
        {"fmt": "dp_reshardable"},
    ),
    "tp2 bf16 hybrid": (LayoutConfig(tp=2, dp=1, sequence_parallel=True), {"dtype": "bf16"}),
    "ep2 tp2 bf16 mixture": (LayoutConfig(ep=2, tp=2, etp=1, dp=1, sequence_parallel=True), {"dtype": "bf16"}),
}


@pytest.mark.parametrize("name", SAME)
def test_resumed_updates_are_those_of_an_undisturbed_run(
    name: str, policies: dict[bool, Path], deep_policies: dict[bool | str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    layout, settings = SAME[name]
    kind = next((kind for kind in ("experts", "hybrid", "mixture") if kind in name), None)
    policy = deep_policies[kind] if kind else policies["tied" in name]
    if not trains(policy):
        pytest.skip("this Megatron-Core cannot train it")
    config = configure(policy, tmp_path / "run", layout, **settings)
    whole = configure(policy, tmp_path / "whole", layout, **{**settings, "offload": False})
    ((expected, _), *_), _ = ranks.in_turn(ranks_in(layout), (train, whole, 4, ()), (train, config, 2, (1, 2)))
    ours, _ = ranks.run(ranks_in(layout), train, config, 4, (3, 4))[0]
    assert [tensor for tensor in expected if not torch.equal(ours[tensor], expected[tensor])] == []
    assert latest_step(tmp_path / "run/checkpoints") == 4
    left = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["hf", "iter_0000003", "iter_0000004", TRACKER]
    assert next(tmp_path.rglob("iter_0000004/common.pt")).is_file()  # which Megatron before 0.19 looks for


def replace_run(config: Config, folder: Path) -> Config:
    return replace(config, run=replace(config.run, dir=str(folder)))


TP2_PP2, CP2 = LayoutConfig(tp=2, pp=2, dp=1), LayoutConfig(cp=2, dp=1)
TP2 = LayoutConfig(tp=2, dp=1, sequence_parallel=True)
PP2_VPP2 = LayoutConfig(pp=2, vpp=2, dp=1)
EP2, EP2_TP2 = LayoutConfig(ep=2, dp=2), LayoutConfig(ep=2, tp=2, etp=1, dp=1, sequence_parallel=True)
EP2_PP2_VPP2 = LayoutConfig(ep=2, pp=2, vpp=2, dp=2)
OTHERS = (LayoutConfig(dp=1), LayoutConfig(tp=4, dp=1), LayoutConfig(pp=4, dp=1), LayoutConfig(dp=2))
CHANGED = {
    "tied": (TP2_PP2, OTHERS, True, {}),
    "plain optimizer": (TP2_PP2, (LayoutConfig(tp=4, dp=1), LayoutConfig(dp=2)), True, {"distributed": False}),
    "from one rank": (LayoutConfig(dp=1), (TP2_PP2, LayoutConfig(cp=2, pp=2, dp=1)), False, {}),
    "from context-parallel ranks": (CP2, (LayoutConfig(dp=1), LayoutConfig(cp=2, dp=2)), True, {}),
    "to virtual stages, plain optimizer": (CP2, (PP2_VPP2,), False, {"distributed": False}),
    "from virtual stages": (PP2_VPP2, (LayoutConfig(dp=1), TP2_PP2), True, {}),
    "hybrid": (TP2, (LayoutConfig(dp=1), CP2, PP2_VPP2), "hybrid", {}),
    # At the others' rate rounding grows to 1e-3 of the gradient's norm in four updates of any two layouts.
    "mixture": (EP2_TP2, (LayoutConfig(dp=1), TP2, PP2_VPP2), "mixture", {"lr": 1e-3}),
    "from experts": (EP2, (TP2, PP2_VPP2, EP2_TP2), "experts", {}),
    "to experts": (LayoutConfig(dp=1), (EP2_TP2, EP2_PP2_VPP2), "experts", {}),
    "to other experts, plain optimizer": (EP2, (EP2_TP2, EP2_PP2_VPP2), "experts", {"distributed": False}),
    "replicas in dp_reshardable": (
        LayoutConfig(dp=2),
        (LayoutConfig(dp=1), LayoutConfig(dp=3)),
        False,
        {"fmt": "dp_reshardable"},
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_run_goes_on_in_another_layout_as_it_would_have_in_its_own(
    name: str, deep_policies: dict[bool | str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    layout, others, tied, settings = CHANGED[name]
    if not trains(deep_policies[tied]):
        pytest.skip("this Megatron-Core cannot train it")
    config = configure(deep_policies[tied], tmp_path, layout, **settings)
    expected, losses = ranks.run(ranks_in(layout), train, config, 4, (2,))[0]
    goes_on: list[tuple[Weights, Losses]] = []
    for size in {ranks_in(other) for other in others}:
        calls = [(train, replace(config, layout=each), 4, ()) for each in others if ranks_in(each) == size]
        goes_on += [results[0] for results in ranks.in_turn(size, *calls)]
    for ours, resumed in goes_on:
        assert len(resumed) == 2
        torch.testing.assert_close(resumed, losses[2:], rtol=1e-5, atol=0.0)
        for tensor, value in expected.items():
            torch.testing.assert_close(ours[tensor], value, rtol=0.0, atol=1e-5 * float(value.abs().max()))


def contents(rank: int, size: int, place: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Every tensor in a checkpoint, and the steps that its optimizer says it has made."""
    common = dist_checkpointing.load_common_state_dict(str(place))["optimizer"]
    inner = common.get("optimizer", common)
    steps = [group.get("step") for group in inner["param_groups"]]
    stored = dist_checkpointing.load_plain_tensors(str(place))
    return {key: stored[key] for key in stored if key not in ("model", "optimizer")}, [
        *steps,
        inner.get("state", {}).get("common_step"),
    ]


MOVED = {
    "bf16, distributed optimizer": (TP2_PP2, LayoutConfig(dp=2), {"dtype": "bf16"}),
    "bf16, plain optimizer": (TP2_PP2, LayoutConfig(dp=2), {"dtype": "bf16", "distributed": False}),
    "another padding of the vocabulary": (LayoutConfig(tp=3, dp=1), LayoutConfig(tp=2, dp=1), {"dtype": "bf16"}),
    "another padding, plain optimizer": (LayoutConfig(tp=3, dp=1), LayoutConfig(dp=1), {"distributed": False}),
    "no update made yet, plain optimizer": (LayoutConfig(dp=1), LayoutConfig(tp=3, dp=1), {"distributed": False}),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_checkpoint_moved_to_another_layout_and_back_is_the_same_bit_by_bit(
    name: str, ranks: RankPool, tmp_path: Path
) -> None:
    first, second, settings = MOVED[name]
    updates = 0 if "no update" in name else 2
    policy = write_policy(tmp_path / "policy", tied=True, layers=2, heads=6, kv_heads=6, ffn=96)
    config = configure(policy, tmp_path / "run", first, **settings)
    ranks.run(ranks_in(first), train, config, updates, (updates,))
    checkpoints = tmp_path / "run" / "checkpoints"
    saved = [checkpoints / f"iter_{updates:07d}"]
    for layout in (second, first):
        # saved again as it was loaded, under the number of the next step
        ranks.run(ranks_in(layout), save_as_next, replace(config, layout=layout))
        saved.append(checkpoints / f"iter_{updates + len(saved):07d}")
    [(before, steps)], [(after, steps_after)] = ranks.in_turn(1, (contents, saved[0]), (contents, saved[-1]))
    assert before.keys() == after.keys() and steps == steps_after
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in before)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


def save_as_next(rank: int, size: int, config: Config) -> None:
    config = replace(config, run=replace(config.run, keep_checkpoints=3))
    world, learner, policy = build(config)
    checkpoints = Checkpoints(config, world)
    step, state = checkpoints.load(policy.actor)
    checkpoints.save(policy.actor, step + 1, state)
    metadata, groups = step_of_groups(size)
    learner.learn(
        plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0
    )  # and it can go on


def refused(rank: int, size: int, config: Config) -> UserError:
    world, _, policy = build(config)
    with pytest.raises(UserError) as caught:
        Checkpoints(config, world).load(policy.actor)
    return caught.value


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


PP2 = LayoutConfig(pp=2, dp=1)
Refusal = tuple[dict[str, Any], str, str]
"""What is changed, the setting that is named, and the remedy."""
REFUSED: dict[str, tuple[dict[str, Any], tuple[Refusal, ...]]] = {
    "as it lies in its buffers": (
        {"fmt": "dp_reshardable"},
        (
            ({"layout": LayoutConfig(tp=2, dp=1)}, "layout", "layout.tp=1 layout.pp=2"),
            ({"layout": LayoutConfig(dp=2)}, "layout", "layout.tp=1 layout.pp=2"),
        ),
    ),
    "parameter by parameter": (
        {},
        (
            ({"distributed": False}, "optimizer.distributed", "optimizer.distributed=true"),
            ({"dtype": "bf16"}, "model.dtype", "model.dtype=fp32"),
            ({"policy": "of more layers"}, "run.dir", "config.json"),
        ),
    ),
    "plain optimizer": (
        {"distributed": False},
        (({"distributed": True}, "optimizer.distributed", "optimizer.distributed=false"),),
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_resumed_is_refused_on_every_rank_and_nothing_is_lost(
    kind: str, policies: dict[bool, Path], ranks: RankPool, tmp_path: Path
) -> None:
    written, refusals = REFUSED[kind]
    run = tmp_path / "run"
    ours = configure(policies[False], run, PP2, **written)
    ranks.run(2, train, ours, 1, (1,))
    before = files_of(run)
    deeper = write_policy(tmp_path / "other", layers=4)
    configs = []
    for changes, _, _ in refusals:
        settings = {**written, "layout": PP2, **changes}
        path = deeper if settings.pop("policy", None) else policies[False]
        configs.append(configure(path, run, **settings))
    results = ranks.in_turn(2, *((refused, config) for config in configs))
    for errors, (_, setting, remedy) in zip(results, refusals, strict=True):
        assert len({str(error) for error in errors}) == 1
        assert errors[0].setting == setting and remedy in errors[0].remedy
    assert files_of(run) == before
    assert len(ranks.run(2, train, ours, 2, ())[0][1]) == 1


def train_with_one_optimizer(rank: int, size: int, config: Config) -> None:
    """As versions did that marked no experts."""
    with mock.patch("megatron_dppo.models.policy._mark_experts"):
        train(rank, size, config, 1, (1,))


def test_the_state_of_experts_of_an_earlier_version_is_refused_by_name(
    deep_policies: dict[bool | str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    config = configure(deep_policies["experts"], tmp_path, TP2)
    _, refusals = ranks.in_turn(2, (train_with_one_optimizer, config), (refused, config))
    for refusal in refusals:
        assert refusal.setting == "run.dir" and "model.checkpoint=" in refusal.remedy


def test_the_format_may_change_between_runs(policies: dict[bool, Path], ranks: RankPool, tmp_path: Path) -> None:
    config = configure(policies[False], tmp_path, LayoutConfig(tp=2, dp=1), fmt="dp_reshardable")
    expected, _ = ranks.run(2, train, config, 3, (1,))[0]
    free = replace(config, optimizer=replace(config.optimizer, checkpoint_format="fully_reshardable"))
    ranks.run(2, train, free, 2, (2,))
    ours, _ = ranks.run(1, train, replace(free, layout=LayoutConfig(dp=1)), 3, ())[0]
    for tensor, value in expected.items():
        torch.testing.assert_close(ours[tensor], value, rtol=0.0, atol=1e-5 * float(value.abs().max()))


def groups_after_resume(rank: int, size: int, config: Config) -> list[dict[str, Any]]:
    world, _, policy = build(config)
    Checkpoints(config, world).load(policy.actor)
    return [{k: v for k, v in group.items() if k != "params"} for group in policy.actor.optimizer.param_groups]


@pytest.mark.parametrize("distributed", [True, False])
def test_the_optimizer_keeps_the_settings_of_the_command_that_resumes(
    distributed: bool, policies: dict[bool, Path], ranks: RankPool, tmp_path: Path
) -> None:
    config = configure(policies[False], tmp_path, LayoutConfig(dp=1), distributed=distributed)
    ranks.run(1, train, config, 1, (1,))
    other = replace(config, optimizer=replace(config.optimizer, beta1=0.5, eps=0.1, weight_decay=0.2))
    for group in ranks.run(1, groups_after_resume, other)[0]:
        decay = 0.2 * group["wd_mult"]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.95), 0.1, decay)
        assert not distributed or repr(group["step"]) == "1", "Transformer Engine's Adam takes no float"


def test_the_policy_s_configuration_and_tokenizer_lie_beside_its_checkpoints(
    policies: dict[bool, Path], ranks: RankPool, tmp_path: Path
) -> None:
    config = configure(policies[True], tmp_path, LayoutConfig(dp=1), dtype="bf16")
    ranks.run(1, train, config, 3, (1, 2, 3))
    beside = tmp_path / "checkpoints" / "hf"
    assert AutoConfig.from_pretrained(beside).tie_word_embeddings
    assert AutoTokenizer.from_pretrained(beside)("1+1")["input_ids"]
    assert not list(beside.glob("*.safetensors"))
    (beside / "generation_config.json").write_text(json.dumps({"top_k": 1}))
    ranks.run(1, train, config, 4, (4,))
    assert json.loads((beside / "generation_config.json").read_text()) == {"top_k": 1}, "it was written twice"


def save_without_room(rank: int, size: int, config: Config) -> str:
    world, _, policy = build(config)
    checkpoints = Checkpoints(config, world)
    checkpoints.save(policy.actor, 1, {})
    world.from_leader(lambda: Path(config.run.dir, "ballast").write_bytes(bytes(6 * 2**20)))
    with pytest.raises(UserError) as error:
        checkpoints.save(policy.actor, 2, {})
    return str(error.value)


def test_full_disk_is_told_on_every_rank_and_costs_no_checkpoint(
    ranks: RankPool, tmp_path: Path, small_disk: Path
) -> None:
    config = configure(write_policy(tmp_path), small_disk, LayoutConfig(tp=2, dp=1))
    for message in ranks.run(2, save_without_room, config):
        assert message.startswith(f"run.dir = {small_disk}: a checkpoint could not be written")
        assert "MiB needed" in message, "it was begun"
    assert latest_step(small_disk / "checkpoints") == 1


def save_more(rank: int, size: int, config: Config) -> str:
    world, _, policy = build(config)
    checkpoints = Checkpoints(config, world)

    def write(place: Path) -> None:
        (place / f"more-{rank}").write_text("more")

    def fail(place: Path) -> None:
        if rank == 1:
            raise OSError("no room")

    checkpoints.save(policy.actor, 1, {}, write)
    with pytest.raises(UserError) as error:
        checkpoints.save(policy.actor, 2, {}, fail)
    return str(error.value)


def test_what_ranks_add_is_in_the_checkpoint_or_there_is_none(ranks: RankPool, tmp_path: Path) -> None:
    config = configure(write_policy(tmp_path), tmp_path, LayoutConfig(tp=2, dp=1))
    for message in ranks.run(2, save_more, config):
        assert "a checkpoint could not be written" in message
    assert latest_step(tmp_path / "checkpoints") == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints/iter_0000001").glob("more-*")) == ["more-0", "more-1"]
