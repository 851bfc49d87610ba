"""Adapters (model.lora): law 1 holds of the merged weights; the base stays as it was, and is the KL's reference."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from megatron_dppo import cli
from megatron_dppo.bridge import chunks
from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, Block, Checksums
from megatron_dppo.bridge.load import bind, bind_adapters, fill_parameter, part_of
from megatron_dppo.bridge.mapping import adapters_of_tensor
from megatron_dppo.bridge.stored_policy import read_metadata
from megatron_dppo.bridge.stream import adapter_stream
from megatron_dppo.config import Config, LayoutConfig, LoraConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.models.frozen import Reference
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.parallel.world import World
from megatron_dppo.trainer.assemble import PolicyParts
from megatron_dppo.trainer.checkpoint import Checkpoints
from megatron_dppo.trainer.learner import Learner
from megatron_dppo.trainer.preflight import disk_needed
from megatron_dppo.trainer.writer import STATE
from tests.bridge.conversions import contents, weights
from tests.bridge.directories import SMOLLM2, Sizes, write_llama, write_qwen3_moe
from tests.laws.test_split_invariance import GRPO, ONE
from tests.policies import trains, write_family, write_policy
from tests.ranks import RankPool
from tests.steps import VOCAB, Weights, build, config_for, held_by, plan_for, size_of, step_of_groups, weights_of
from tests.trainer.test_checkpoint import configure, ranks_in, replace_run, train

THREE = {"tp3 sp": LayoutConfig(tp=3, dp=1, sequence_parallel=True)}
LORA = LoraConfig(rank=3, alpha=6.0)


def with_lora(config: Config, lora: LoraConfig = LORA, **model: Any) -> Config:
    return replace(config, model=replace(config.model, lora=lora, **model))


def stirred(config: Config) -> tuple[World, Learner, PolicyParts]:
    """Adapters of which B is not zero either: A would have no gradient. The same in every layout."""
    world, learner, policy = build(config)
    for entry, parameter in bind_adapters(policy.actor.chunks, world).items():
        ((name, size),) = entry.tensors.items()
        whole = 0.2 * torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))

        def read(_: str, axis: int, start: int, stop: int, whole: torch.Tensor = whole) -> torch.Tensor:
            return whole.narrow(axis, start, stop - start)

        fill_parameter(entry, parameter.data, read, part_of(entry, world), entry.parts(world.layout))
    return world, learner, policy


def learned(rank: int, size: int, config: Config) -> tuple[dict[str, float], Weights, Weights, bool]:
    """Metrics of one update, the merged weights before it and after it, and whether the base is bit by bit the same."""
    world, learner, policy = stirred(config)
    metadata, groups = step_of_groups(size)
    chunks = policy.actor.chunks
    base = {entry: parameter.clone() for entry, parameter in bind(chunks, world).items()}
    start = weights_of(policy, world)
    metrics = learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)
    frozen = all(torch.equal(base[entry], now) for entry, now in bind(chunks, world).items())
    weights = weights_of(policy, world)
    return metrics, start if rank == 0 else {}, weights if rank == 0 else {}, frozen


SP = partial(LayoutConfig, tp=2, sequence_parallel=True)
LAYOUTS = {
    "dense": {
        "one": ONE,
        "tp2": LayoutConfig(tp=2, dp=1),
        "tp2 sp": SP(dp=1),
        "cp2": LayoutConfig(cp=2, dp=1),
        "pp2 vpp2": LayoutConfig(pp=2, vpp=2, dp=1),
        "dp2": LayoutConfig(dp=2),
    },
    "experts": {
        "one": ONE,
        "ep2 dp2": LayoutConfig(ep=2, dp=2),
        "dp2 etp2": LayoutConfig(etp=2, dp=2),
        "ep2 tp2 etp1": SP(ep=2, etp=1, dp=1),
        "ep2 tp2 etp2": SP(ep=2, etp=2, dp=2),
    },
    "SmolLM2": {"one": ONE, **THREE},
    "Qwen3.5": {"one": ONE, "tp2 sp": SP(dp=1), "cp2": LayoutConfig(cp=2, dp=1)},
    "Qwen3.5-MoE": {"one": ONE, "tp2 sp": SP(dp=1), "ep2 tp2 etp1": SP(ep=2, etp=1, dp=1)},
}
ALL, SOME = LORA.targets, ("q_proj", "v_proj", "up_proj")


@pytest.mark.parametrize("family", LAYOUTS)
def test_an_update_of_adapters_depends_on_no_layout(family: str, ranks: RankPool, tmp_path: Path) -> None:
    if family == "dense":
        write_policy(tmp_path)
    elif family == "experts":
        write_qwen3_moe(tmp_path, Sizes(vocab_size=VOCAB), experts=4)
    elif family == "SmolLM2":
        write_llama(tmp_path, SMOLLM2)
    elif not trains(write_family(tmp_path, f"Qwen3_5{'Moe' * ('MoE' in family)}ForCausalLM")):
        pytest.skip("this Megatron-Core cannot train it")
    layouts = LAYOUTS[family]
    configs = {name: with_lora(config_for(tmp_path, of, GRPO, 64, True)) for name, of in layouts.items()}
    configs["plain optimizer"] = with_lora(config_for(tmp_path, ONE, GRPO, 64, False))
    configs["recomputed"] = with_lora(configs["one"], recompute="selective" if family == "experts" else "full")
    found = {}
    for size in {size_of(of.layout) for of in configs.values()}:
        names = [name for name, of in configs.items() if size_of(of.layout) == size]
        results = ranks.in_turn(size, *((learned, configs[name]) for name in names))
        assert all(frozen for of_call in results for *_, frozen in of_call)
        found |= {name: of_ranks[0] for name, of_ranks in zip(names, results, strict=True)}
    metrics, start, weights, _ = found["one"]
    moved = {name for name in start if not torch.equal(start[name], weights[name])}
    assert moved == {name for name in start if name.split(".")[-2] in ALL}
    for where, (ours, before, after, _) in found.items():
        assert ours["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=1e-5), where
        assert ours["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-4, abs=1e-5), where
        for name in start:
            assert (before[name] - start[name]).norm() <= 1e-6 * start[name].norm(), (where, name)
            expected = weights[name] - start[name]
            error = after[name] - before[name] - expected
            assert error.norm() <= 1e-5 * expected.norm() + 2e-7 * start[name].norm(), (where, name)


def kl_of(rank: int, size: int, config: Config, copied: bool) -> dict[str, float]:
    """Of an update of adapters that are away from zero already; ``copied``: against a second policy without any."""
    world, learner, policy = stirred(config)
    if copied:
        plain = dataclasses.replace(policy, config=with_lora(config, LoraConfig()))
        learner.reference = plain.reference()
        assert isinstance(learner.reference, Reference)
    metadata, groups = step_of_groups(size)
    return learner.learn(plan_for(world, config, metadata), held_by(rank, metadata, groups), step=1, version=0)


def test_the_reference_is_the_policy_without_its_adapters(ranks: RankPool, tmp_path: Path) -> None:
    config = with_lora(config_for(write_policy(tmp_path), ONE, GRPO, 64, True))
    [ours], [copied] = ranks.in_turn(1, (kl_of, config, False), (kl_of, config, True))
    assert ours["train/kl_loss"] > 0.01
    assert ours == copied


def resumable(policy: Path, run: Path, layout: LayoutConfig, **settings: Any) -> Config:
    return with_lora(configure(policy, run, layout, **settings))


@pytest.mark.parametrize("kind", ["dense", "experts", "experts, plain, bf16"])
def test_a_checkpoint_of_adapters_resumes_bit_for_bit_and_crosses_layouts(
    kind: str, ranks: RankPool, tmp_path: Path
) -> None:
    path = tmp_path / "policy"
    if "dense" in kind:
        write_policy(path, kv_heads=4)
        first, others = LayoutConfig(tp=2, dp=1), (ONE, LayoutConfig(pp=2, vpp=2, dp=1))
    else:
        write_qwen3_moe(path, Sizes(vocab_size=VOCAB), experts=4)
        first, others = LayoutConfig(etp=2, dp=2), (ONE, LayoutConfig(ep=2, dp=2))
    settings: dict[str, Any] = {"distributed": "plain" not in kind, "dtype": "bf16" if "bf16" in kind else "fp32"}
    config = resumable(path, tmp_path / "run", first, **settings)
    [(expected, losses), _], _, [(resumed, _), _] = ranks.in_turn(
        2, (train, replace_run(config, tmp_path / "whole"), 4, ()), (train, config, 2, (2,)), (train, config, 4, ())
    )
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []
    stored = read_metadata(tmp_path / "run/checkpoints/iter_0000002").state_dict_metadata
    tensors = [key for key, value in stored.items() if isinstance(value, TensorStorageMetadata)]
    assert tensors and all(".lora." in key for key in tensors)
    if "bf16" in kind:
        return
    for other in others:
        ours, after = ranks.run(ranks_in(other), train, replace(config, layout=other), 4, ())[0]
        torch.testing.assert_close(after, losses[2:], rtol=1e-5, atol=0.0)
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=0.0, atol=1e-5 * float(value.abs().max()))


def refused_anywhere(rank: int, size: int, config: Config) -> UserError:
    """When the policy is built, or when its checkpoint is loaded."""
    with pytest.raises(UserError) as caught:
        world, _, policy = build(config)
        Checkpoints(config, world).load(policy.actor)
    return caught.value


def test_a_checkpoint_goes_on_with_the_adapters_and_the_policy_that_it_was_written_with(
    ranks: RankPool, tmp_path: Path
) -> None:
    policy, other = write_policy(tmp_path / "policy"), write_policy(tmp_path / "other", seed=8)
    adapted = resumable(policy, tmp_path / "adapted", ONE)
    whole = configure(policy, tmp_path / "whole", ONE)
    ranks.in_turn(1, (train, adapted, 1, (1,)), (train, whole, 1, (1,)))
    stored = str(tmp_path / "adapted/checkpoints")
    changed = {
        "model.lora.rank=3": with_lora(adapted, LoraConfig()),
        "model.lora.rank=3,": with_lora(adapted, replace(LORA, rank=4)),
        "model.lora.alpha=6,": with_lora(adapted, replace(LORA, alpha=7.0)),
        "model.lora.targets=[down_proj,gate_proj,": with_lora(adapted, replace(LORA, targets=SOME)),
        f"model.path={policy}": replace(adapted, model=replace(adapted.model, path=str(other))),
        "model.lora.rank=0": with_lora(whole),
        "RUN/hf": replace(adapted, model=replace(adapted.model, checkpoint=stored)),
    }
    results = ranks.in_turn(1, *((refused_anywhere, config) for config in changed.values()))
    for (remedy, config), [error] in zip(changed.items(), results, strict=True):
        assert remedy in error.remedy, (config, error)
        assert error.setting == ("model.checkpoint" if remedy == "RUN/hf" else remedy.partition("=")[0])


def exported(rank: int, size: int, config: Config) -> None:
    """At the end of a run, whose last checkpoint is there too."""
    world, _, policy = stirred(config)
    policy.check_export_run()
    policy.export_run()
    Checkpoints(config, world).save(policy.actor, 1, {})


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """By name; each ``run.dir`` is a folder of that name in the same place."""
    place = tmp_path_factory.mktemp("exports")
    dense, experts, llama = write_policy(place / "policy"), place / "experts", place / "llama"
    write_qwen3_moe(experts, Sizes(vocab_size=VOCAB), experts=4)
    write_llama(llama, SMOLLM2)
    calls = {}
    for name, path, lora, layout in (
        ("one", dense, LORA, ONE),
        ("some", dense, replace(LORA, targets=SOME), ONE),
        ("cut", dense, LORA, SP(pp=2, dp=1)),
        ("experts cut", experts, LORA, SP(ep=2, etp=1, pp=2, dp=1)),
        ("SmolLM2 cut", llama, LORA, THREE["tp3 sp"]),
    ):
        config = with_lora(config_for(path, layout, GRPO, 64, True), lora)
        calls[name] = replace_run(config, place / name)
    for size, names in (1, ("one", "some")), (3, ("SmolLM2 cut",)), (4, ("cut", "experts cut")):
        ranks.in_turn(size, *((exported, calls[name]) for name in names))
    for name in calls:
        (place / name / "metrics.jsonl").write_text('{"step": 0}\n')
    return calls


def test_what_a_run_exports_is_one_policy_merged_and_for_peft(runs: dict[str, Config]) -> None:
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
    assert contents(Path(runs["one"].run.dir, "adapter")) == contents(Path(runs["cut"].run.dir, "adapter"))


@pytest.mark.parametrize("name", ["one", "some", "cut", "experts cut", "SmolLM2 cut"])
def test_a_checkpoint_of_adapters_is_exported_for_peft_or_merged(
    name: str, runs: dict[str, Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "BUFFER_BYTES", 512)  # a few rows, as of a large policy's tensors
    config = runs[name]
    run, alone, merged = Path(config.run.dir), tmp_path / "alone", tmp_path / "merged"
    assert cli.main(["export", str(run), str(alone), "--card"]) == 0
    assert cli.main(["export", str(run), str(merged), "--merge", "--card"]) == 0
    adapters, theirs = (load_file(of / "adapter_model.safetensors") for of in (alone, run / "adapter"))
    assert adapters.keys() == theirs.keys() and all(torch.equal(adapters[of], theirs[of]) for of in theirs)
    ours, of_the_run = (json.loads((of / "adapter_config.json").read_text()) for of in (alone, run / "adapter"))
    assert ours | {"target_modules": set(ours["target_modules"])} == of_the_run | {
        "target_modules": set(of_the_run["target_modules"])
    }
    before, after = weights(Path(config.model.path)), weights(merged)
    assert before.keys() == after.keys()
    for tensor, weight in before.items():
        a, b = map(adapters.get, adapters_of_tensor(tensor))
        expected = weight if a is None or b is None else weight + 2.0 * b @ a  # alpha 6 over rank 3
        torch.testing.assert_close(after[tensor], expected, rtol=0.0, atol=1e-6)
    assert "library_name: peft" in (alone / "README.md").read_text()
    assert "library_name: transformers" in (merged / "README.md").read_text()


def test_adapters_are_merged_into_no_other_policy(
    runs: dict[str, Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(runs["one"].run.dir, tmp_path / "run")
    state = run / "checkpoints/iter_0000001" / STATE
    state.write_text(state.read_text().replace("policy", "other"))
    listed = json.loads((state.parent / CHECKSUMS).read_text())["files"]
    kept = {name: [Block(*block) for block in blocks] for name, blocks in listed.items() if name != STATE}
    Checksums(state.parent, kept).write()
    write_policy(runs_other := Path(runs["one"].model.path).with_name("other"), seed=8)
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--merge"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"model.path = {runs_other}" in said and "other weights than the adapters" in said
    shutil.rmtree(runs_other)
    assert cli.main(["export", str(run), str(tmp_path / "out")]) == 0, "which are whole without it"


def drawn(rank: int, size: int, config: Config) -> Weights:
    """The adapters of a policy that has not been trained, whole, on the leader."""
    world, _, policy = build(config)
    stream = adapter_stream(policy.actor.chunks, world) if world.in_first_copy else ()
    return {name: tensor.clone() for bucket in stream for name, tensor in bucket.items()}


def test_adapters_begin_the_same_in_every_layout_and_add_nothing(ranks: RankPool, tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path, Sizes(vocab_size=VOCAB), experts=4)
    layouts = (SP(ep=2, etp=1, dp=1), LayoutConfig(pp=2, dp=1), LayoutConfig(etp=2, dp=2))
    one, *cut = (with_lora(config_for(tmp_path, layout, GRPO, 64, True)) for layout in (ONE, *layouts))
    seeds = (replace(one, run=replace(one.run, seed=seed)) for seed in (one.run.seed, one.run.seed + 1))
    [expected], [other] = ranks.in_turn(1, *((drawn, config) for config in seeds))
    for ours, *_ in ranks.in_turn(2, *((drawn, config) for config in cut)):
        assert ours.keys() == expected.keys()
        assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    for name, tensor in expected.items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound
            assert not torch.equal(tensor, other[name])
    firsts = [tuple(tensor.flatten()[:2].tolist()) for name, tensor in expected.items() if "lora_A" in name]
    assert len(set(firsts)) == len(firsts), "each has draws of its own"


def test_the_disk_is_asked_for_adapters_alone() -> None:
    shape = PUBLISHED["qwen3-4b"]
    bare = replace(Config(), run=replace(Config().run, export=False))
    whole, adapters = (disk_needed(config, shape).total for config in (bare, with_lora(bare)))
    assert adapters < 0.01 * whole
