"""Adapters (model.lora): law 1 holds of the merged weights; the base stays as it is, and is the
KL's reference."""

import dataclasses
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from megatron_dppo import cli
from megatron_dppo.bridge import chunks
from megatron_dppo.bridge.load import (
    bind_adapters,
    bind_parameters,
    fill_parameter,
    get_shard_index,
)
from megatron_dppo.bridge.mapping import get_adapter_names
from megatron_dppo.bridge.stored_policy import read_metadata
from megatron_dppo.bridge.stream import adapter_stream
from megatron_dppo.config import Config, LayoutConfig, LoraConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.frozen import Reference
from megatron_dppo.parallel.world import World
from megatron_dppo.trainer.assemble import PolicyParts
from megatron_dppo.trainer.checkpoint import Checkpoints
from megatron_dppo.trainer.learner import Learner
from tests.bridge.conversions import contents, weights
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.laws.test_split_invariance import GRPO, HYBRID, HYBRID_EXPERTS, LAYOUTS, ONE, SP
from tests.policies import trains, write_policy
from tests.ranks import RankPool
from tests.steps import (
    VOCAB,
    Weights,
    build,
    config_for,
    held_by,
    plan_for,
    run_in_layouts,
    step_of_groups,
    weights_of,
)
from tests.trainer.test_checkpoint import configure, replace_run, train

LORA = LoraConfig(rank=3, alpha=6.0)
SOME = ("q_proj", "v_proj", "up_proj")


def write_experts(path: Path) -> Path:
    write_qwen3_moe(path, Sizes(vocab_size=VOCAB), experts=4)
    return path


def with_lora(config: Config, lora: LoraConfig = LORA, **model: Any) -> Config:
    return replace(config, model=replace(config.model, lora=lora, **model))


def make(
    path: Path, layout: LayoutConfig, lora: LoraConfig = LORA, *, distributed: bool = True
) -> Config:
    return with_lora(config_for(path, layout, GRPO, 64, distributed), lora)


def stirred(config: Config) -> tuple[World, Learner, PolicyParts]:
    """Build a policy whose adapters are not zero, the same in every layout. With B = 0, A has no
    gradient."""
    world, learner, policy = build(config)
    for entry, parameter in bind_adapters(policy.actor.chunks, world).items():
        ((name, size),) = entry.tensors.items()
        whole = 0.2 * torch.randn(
            size, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
        )
        fill_parameter(
            entry,
            parameter.data,
            {name: whole},
            get_shard_index(entry, world),
            entry.count_parts(world.layout),
        )
    return world, learner, policy


def learned(
    rank: int, size: int, config: Config
) -> tuple[dict[str, float], Weights, Weights, bool]:
    """Return metrics of an update, the merged weights before and after it, and whether the base has
    the same bits."""
    world, learner, policy = stirred(config)
    metadata, groups = step_of_groups(size)
    base = {
        entry: parameter.clone()
        for entry, parameter in bind_parameters(policy.actor.chunks, world).items()
    }
    before = weights_of(policy, world)
    metrics = learner.train(
        plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0
    )
    frozen = all(
        torch.equal(base[entry], now)
        for entry, now in bind_parameters(policy.actor.chunks, world).items()
    )
    return metrics, before, weights_of(policy, world), frozen


@pytest.mark.parametrize(
    ("write", "layouts", "recompute"),
    [
        (write_policy, ("tp2 sp", "cp2", "pp2 vpp2"), "full"),
        (write_experts, ("ep2 dp2", "dp2 etp2", "ep2 tp2 sp etp1"), "selective"),
        (HYBRID, ("tp2 sp", "cp2"), "full"),
        (HYBRID_EXPERTS, ("ep2 tp2 sp etp1",), "full"),
    ],
    ids=["dense", "experts", "Qwen3.5", "Qwen3.5-MoE"],
)
def test_update_of_adapters_depends_on_no_layout(
    write: Callable[[Path], object],
    layouts: tuple[str, ...],
    recompute: str,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    write(tmp_path)
    if not trains(tmp_path):
        pytest.skip("this Megatron-Core cannot train it")
    alone = make(tmp_path, ONE)
    configs = {name: make(tmp_path, LAYOUTS[name]) for name in layouts}
    configs |= {"plain optimizer": make(tmp_path, ONE, distributed=False)}
    configs |= {"alone": alone, "recomputed": with_lora(alone, recompute=recompute)}
    found = run_in_layouts(ranks, {name: (learned, config) for name, config in configs.items()})
    assert all(frozen for results in found.values() for *_, frozen in results)
    metrics, start, end, _ = found["alone"][0]
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {name for name in start if name.split(".")[-2] in LORA.targets}
    for where, ((ours, before, after, _), *_) in found.items():
        assert ours["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-5), where
        assert ours["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-4, abs=1e-5), where
        for name in start:
            assert (before[name] - start[name]).norm() <= 1e-6 * start[name].norm(), (where, name)
            expected = end[name] - start[name]
            error = after[name] - before[name] - expected
            assert error.norm() <= 1e-5 * expected.norm() + 2e-7 * start[name].norm(), (where, name)


def learned_with_reference(rank: int, size: int, config: Config, copied: bool) -> dict[str, float]:
    """Return metrics of an update; with ``copied``, the reference is a second policy without
    adapters."""
    world, learner, policy = stirred(config)
    if copied:
        learner.reference = dataclasses.replace(
            policy, config=with_lora(config, LoraConfig())
        ).load_reference()
        assert isinstance(learner.reference, Reference)
    metadata, groups = step_of_groups(size)
    return learner.train(
        plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0
    )


def test_reference_is_the_policy_without_adapters(ranks: RankPool, policy: Path) -> None:
    config = make(policy, ONE)
    calls = ((learned_with_reference, config, copied) for copied in (False, True))
    [ours], [copied] = ranks.in_turn(1, *calls)
    assert ours["train/kl_loss"] > 0.01
    assert ours == copied


@pytest.mark.parametrize(
    ("write", "before", "after", "settings"),
    [
        (write_policy, "tp2", "pp2 vpp2", {}),
        (write_experts, "dp2 etp2", "ep2 dp2", {"distributed": False}),
    ],
    ids=["dense", "experts, plain optimizer"],
)
def test_checkpoint_of_adapters_resumes_and_crosses_layouts(
    write: Callable[[Path], Path],
    before: str,
    after: str,
    settings: dict[str, Any],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """Resume bit for bit in the same layout, and to 1e-5 in another."""
    path, other = write(tmp_path / "policy"), LAYOUTS[after]
    config = with_lora(configure(path, tmp_path / "run", LAYOUTS[before], **settings))
    whole, resumed = ranks.in_turn(2, (train, config, 4, (2,)), (train, config, 4, ()))
    moved = ranks.run(2, train, replace(config, layout=other), 4, ())
    (expected, losses), *_ = whole
    (same, _), *_ = resumed
    assert [name for name in expected if not torch.equal(expected[name], same[name])] == []
    stored = read_metadata(tmp_path / "run/checkpoints/iter_0000002").state_dict_metadata
    tensors = [key for key, value in stored.items() if isinstance(value, TensorStorageMetadata)]
    assert tensors and all(".lora." in key for key in tensors)
    (ours, resumed_losses), *_ = moved
    torch.testing.assert_close(resumed_losses, losses[2:], rtol=1e-5, atol=0.0)
    for name, value in expected.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0.0, atol=1e-5 * float(value.abs().max())
        )


def refuse(rank: int, size: int, config: Config) -> UserError:
    with pytest.raises(UserError) as caught:
        world, _, policy = build(config)
        Checkpoints(config, world).load(policy.actor)
    return caught.value


def test_checkpoint_of_other_adapters_is_refused(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    other = write_policy(tmp_path / "other", seed=8)
    whole = configure(policy, tmp_path / "whole", ONE)
    adapted = with_lora(replace_run(whole, tmp_path / "adapted"))
    ranks.in_turn(1, (train, adapted, 1, (1,)), (train, whole, 1, (1,)))
    changed = {
        "model.lora.rank=3": with_lora(adapted, LoraConfig()),
        "model.lora.alpha=6,": with_lora(adapted, replace(LORA, alpha=7.0)),
        f"model.path={policy}": replace(adapted, model=replace(adapted.model, path=str(other))),
        "model.lora.rank=0": with_lora(whole),
    }
    results = ranks.in_turn(1, *((refuse, config) for config in changed.values()))
    for remedy, [error] in zip(changed, results, strict=True):
        assert remedy in error.remedy, error
        assert error.setting == remedy.partition("=")[0]


def export(rank: int, size: int, config: Config) -> None:
    """Write an export and a checkpoint, as at the end of a run."""
    world, _, policy = stirred(config)
    policy.check_export_run()
    policy.export_run()
    Checkpoints(config, world).save(policy.actor, 1, {})


@pytest.fixture(scope="module")
def runs(
    ranks: RankPool, policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Config]:
    """Runs by the name of their folder."""
    place = tmp_path_factory.mktemp("exports")
    dense, experts, some = (
        shutil.copytree(policy, place / "policy"),
        place / "experts",
        replace(LORA, targets=SOME),
    )
    write_experts(experts)
    configs = {
        "one": make(dense, ONE, some),
        "cut": make(dense, SP(pp=2, dp=1), some),
        "experts cut": make(experts, SP(ep=2, etp=1, pp=2, dp=1)),
    }
    configs = {name: replace_run(config, place / name) for name, config in configs.items()}
    run_in_layouts(ranks, {name: (export, config) for name, config in configs.items()})
    for name in configs:
        (place / name / "metrics.jsonl").write_text('{"step": 0}\n')
    return configs


def test_exports_merged_and_for_peft_are_one_policy(runs: dict[str, Config]) -> None:
    from peft import PeftModel

    ids = torch.arange(3, 60)[None]
    for config in runs.values():
        run, base = Path(config.run.dir), AutoModelForCausalLM.from_pretrained(config.model.path)
        with torch.no_grad():
            merged = AutoModelForCausalLM.from_pretrained(run / "hf")(ids).logits
            before = base(ids).logits
            adapted = PeftModel.from_pretrained(base, run / "adapter")(ids).logits
        assert (merged - before).abs().max() > 0.1
        torch.testing.assert_close(adapted, merged, rtol=0.0, atol=1e-5 * float(merged.abs().max()))
    assert contents(Path(runs["one"].run.dir, "adapter")) == contents(
        Path(runs["cut"].run.dir, "adapter")
    )


@pytest.mark.parametrize("name", ["one", "experts cut"])
def test_checkpoint_of_adapters_is_exported_for_peft_or_merged(
    name: str, runs: dict[str, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "BUFFER_BYTES", 512)  # a few rows, as of a large policy's tensors
    config = runs[name]
    run, alone, merged = Path(config.run.dir), tmp_path / "alone", tmp_path / "merged"
    assert cli.main(["export", str(run), str(alone)]) == 0
    assert cli.main(["export", str(run), str(merged), "--merge"]) == 0
    adapters, theirs = (
        load_file(of / "adapter_model.safetensors") for of in (alone, run / "adapter")
    )
    assert adapters.keys() == theirs.keys() and all(
        torch.equal(adapters[of], theirs[of]) for of in theirs
    )
    before, after = weights(Path(config.model.path)), weights(merged)
    assert before.keys() == after.keys()
    for tensor, weight in before.items():
        a, b = map(adapters.get, get_adapter_names(tensor))
        expected = weight if a is None or b is None else weight + 2.0 * b @ a  # alpha 6 over rank 3
        torch.testing.assert_close(after[tensor], expected, rtol=0.0, atol=1e-6)


def test_adapters_are_merged_into_no_other_policy(
    runs: dict[str, Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, policy = runs["one"].run.dir, Path(runs["one"].model.path)
    own = policy.rename(policy.with_name("own"))
    write_policy(policy, seed=8)
    assert cli.main(["export", run, str(tmp_path / "out"), "--merge"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"model.path = {policy}" in error and "other weights than the policy" in error
    shutil.rmtree(policy)
    assert cli.main(["export", run, str(tmp_path / "out")]) == 0, (
        "adapters are whole without the policy"
    )
    own.rename(policy)


def draw(rank: int, size: int, config: Config) -> Weights:
    """Return the whole adapters of an untrained policy on rank 0."""
    world, _, policy = build(config)
    stream = adapter_stream(policy.actor.chunks, world) if world.is_in_first_shard_group else ()
    return {name: tensor.clone() for bucket in stream for name, tensor in bucket.items()}


def test_adapters_begin_the_same_in_every_layout_and_add_nothing(
    ranks: RankPool, tmp_path: Path
) -> None:
    one, *cut = (
        make(write_experts(tmp_path), layout)
        for layout in (ONE, LAYOUTS["ep2 tp2 sp etp1"], LAYOUTS["pp2"])
    )
    [expected] = ranks.run(1, draw, one)
    for ours, *_ in ranks.in_turn(2, *((draw, config) for config in cut)):
        assert ours.keys() == expected.keys()
        assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    for name, tensor in expected.items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound
    firsts = [
        tuple(tensor.flatten()[:2].tolist())
        for name, tensor in expected.items()
        if "lora_A" in name
    ]
    assert len(set(firsts)) == len(firsts), "each tensor has draws of its own"
