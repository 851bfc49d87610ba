"""A checkpoint holds all that later updates depend on, whatever the optimizer, the precision and
the next layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.bridge.checkpoint_folder import TRACKER, find_latest_step, format_iteration_name
from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.checkpoint import Checkpoints, _PendingCheckpoint
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.laws.test_split_invariance import LAYOUTS, ONE
from tests.policies import trains, write_family, write_policy
from tests.ranks import RankPool
from tests.rollout.scripted import world_of
from tests.steps import (
    VOCAB,
    Weights,
    build,
    config_for,
    held_by,
    plan_for,
    step_of_groups,
    weights_of,
)

STATE = {"float": 0.1 + 0.2}
Losses = list[tuple[float, float]]


def configure(
    policy: Path,
    run: Path,
    layout: LayoutConfig,
    *,
    distributed: bool = True,
    dtype: str = "fp32",
    offload: bool = False,
    lr: float = 1e-2,
) -> Config:
    """Return settings with an ``eps`` of about the gradients' size, so that all of Adam's state
    moves the weights."""
    config = config_for(policy, layout, LossConfig(), 128, distributed)
    adam = replace(
        config.optimizer, lr=lr, eps=1e-2, clip_grad=1.0, weight_decay=0.1, offload=offload
    )
    model = replace(config.model, dtype=dtype)
    return replace_run(replace(config, model=model, optimizer=adam), run)


def replace_run(config: Config, folder: Path) -> Config:
    return replace(config, run=replace(config.run, dir=str(folder)))


def train(
    rank: int, size: int, config: Config, stop: int, save: tuple[int, ...]
) -> tuple[Weights, Losses]:
    """Update up to ``stop``, from the last checkpoint if there is one.

    Returns:
        The weights; the loss and gradient norm of each update.
    """
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
            metrics = learner.train(
                plan_for(world, config, metadata), held, step=step + 1, version=0
            )
            losses.append((metrics["train/loss"], metrics["train/grad_norm"]))
    return weights_of(policy, world), losses


def ranks_in(layout: LayoutConfig) -> int:
    return layout.tp * layout.pp * layout.cp * layout.dp


def write_kind(folder: Path, kind: str) -> Path:
    """Write a policy that two stages of two virtual stages divide."""
    if kind == "experts":
        write_qwen3_moe(folder, Sizes(vocab_size=VOCAB, num_hidden_layers=4), experts=4)
        return folder
    if kind == "mixture":
        return write_family(folder, "Qwen3_5MoeForCausalLM")
    if kind == "three heads":
        return write_policy(folder, heads=6, kv_heads=6, ffn=96, tied=True)
    return write_policy(folder, tied=kind == "tied")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return {
        kind: write_kind(folder / kind, kind)
        for kind in ("untied", "tied", "three heads", "experts", "mixture")
    }


MIXTURE = "ep2 tp2 sp etp1"
SAME = (
    ("tied", "dp2", {"dtype": "bf16", "offload": True}),
    pytest.param("untied", "tp2", {"distributed": False}, marks=pytest.mark.quick),
    ("experts", "ep2 pp2 vpp2", {}),
    ("mixture", MIXTURE, {"dtype": "bf16"}),
)
"""Policies, layouts and settings."""


@pytest.mark.parametrize(("kind", "layout", "settings"), SAME)
def test_resumed_updates_equal_undisturbed_updates(
    kind: str,
    layout: str,
    settings: dict[str, Any],
    policies: dict[str, Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    if not trains(policies[kind]):
        pytest.skip("this Megatron-Core cannot train it")
    config = configure(policies[kind], tmp_path / "run", LAYOUTS[layout], **settings)
    whole = configure(
        policies[kind], tmp_path / "whole", LAYOUTS[layout], **{**settings, "offload": False}
    )
    size = ranks_in(config.layout)
    ((expected, _), *_), _ = ranks.in_turn(size, (train, whole, 4, ()), (train, config, 2, (1, 2)))
    ours, _ = ranks.run(size, train, config, 4, (3, 4))[0]
    assert [tensor for tensor in expected if not torch.equal(ours[tensor], expected[tensor])] == []
    left = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["hf", "iter_0000003", "iter_0000004", TRACKER]
    assert next(
        tmp_path.rglob("iter_0000004/common.pt")
    ).is_file()  # Megatron before 0.19 reads the file


CHANGED: tuple[tuple[str, str, tuple[str, ...], int, dict[str, Any]], ...] = (
    ("tied", "cp2 pp2", ("one", "dp2"), 2, {}),
    ("untied", "cp2", ("pp2 vpp2",), 0, {"distributed": False}),
    ("three heads", "tp3 sp", ("tp2",), 2, {}),  # with another padding of the vocabulary
    ("experts", "ep2 dp2", (MIXTURE, "pp2 vpp2"), 2, {}),
    # At the others' rate rounding grows to 1e-3 of the gradient's norm in four updates of any two
    # layouts.
    ("mixture", MIXTURE, ("one", "pp2 vpp2"), 2, {"lr": 1e-3}),
)
"""Policies, layouts before and after, updates before the checkpoint, and settings."""


@pytest.mark.parametrize(("kind", "before", "after", "saved", "settings"), CHANGED)
def test_run_resumes_in_another_layout(
    kind: str,
    before: str,
    after: tuple[str, ...],
    saved: int,
    settings: dict[str, Any],
    policies: dict[str, Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    if not trains(policies[kind]):
        pytest.skip("this Megatron-Core cannot train it")
    layouts = {"one": ONE, **LAYOUTS}
    config = configure(policies[kind], tmp_path, layouts[before], **settings)
    expected, losses = ranks.run(ranks_in(config.layout), train, config, 4, (saved,))[0]
    for name in after:
        other = configure(policies[kind], tmp_path, layouts[name], **settings)
        ours, resumed = ranks.run(ranks_in(other.layout), train, other, 4, ())[0]
        assert len(resumed) == 4 - saved
        torch.testing.assert_close(resumed, losses[saved:], rtol=1e-5, atol=0.0)
        for tensor, value in expected.items():
            torch.testing.assert_close(
                ours[tensor], value, rtol=0.0, atol=1e-5 * float(value.abs().max())
            )


def refuse(rank: int, size: int, config: Config) -> UserError:
    world, _, policy = build(config)
    with pytest.raises(UserError) as caught:
        Checkpoints(config, world).load(policy.actor)
    return caught.value


def test_unfit_checkpoint_is_refused_on_every_rank(
    policies: dict[str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    """Refusals leave the checkpoint as it is."""
    config = configure(policies["untied"], tmp_path / "run", LAYOUTS["pp2"])
    deeper = write_policy(tmp_path / "deeper", layers=6)
    ranks.run(2, train, config, 1, (1,))
    errors = ranks.run(2, refuse, configure(deeper, tmp_path / "run", LAYOUTS["pp2"]))
    assert len({str(error) for error in errors}) == 1
    assert errors[0].setting == "run.dir"
    assert len(ranks.run(2, train, config, 2, ())[0][1]) == 1


def read_groups(rank: int, size: int, config: Config) -> list[dict[str, Any]]:
    world, _, policy = build(config)
    Checkpoints(config, world).load(policy.actor)
    return [
        {k: v for k, v in group.items() if k != "params"}
        for group in policy.actor.optimizer.param_groups
    ]


def test_optimizer_has_the_settings_of_the_resume(
    policies: dict[str, Path], ranks: RankPool, tmp_path: Path
) -> None:
    config = configure(policies["untied"], tmp_path, ONE)
    other = replace(
        config, optimizer=replace(config.optimizer, beta1=0.5, eps=0.1, weight_decay=0.2)
    )
    _, [groups] = ranks.in_turn(1, (train, config, 1, (1,)), (read_groups, other))
    for group in groups:
        decay = 0.2 * group["wd_mult"]
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.5, 0.95), 0.1, decay)
        assert repr(group["step"]) == "1", "Transformer Engine's Adam takes no float"


def save_without_room(rank: int, size: int, config: Config) -> str:
    world, _, policy = build(config)
    checkpoints = Checkpoints(config, world)
    checkpoints.save(policy.actor, 1, {})
    world.broadcast(lambda: Path(config.run.dir, "ballast").write_bytes(bytes(6 * 2**20)))
    with pytest.raises(UserError) as error:
        checkpoints.save(policy.actor, 2, {})
    return str(error.value)


def test_full_disk_costs_no_checkpoint(ranks: RankPool, policy: Path, small_disk: Path) -> None:
    for message in ranks.run(2, save_without_room, configure(policy, small_disk, LAYOUTS["tp2"])):
        assert message.startswith(f"run.dir = {small_disk}: a checkpoint could not be written")
        assert "MiB needed" in message, "the disk is asked before the writing"
    assert find_latest_step(small_disk / "checkpoints") == 1


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


def test_checkpoint_has_the_files_of_every_rank(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    """If a rank cannot write its files, there is no checkpoint."""
    for message in ranks.run(2, save_more, configure(policy, tmp_path, LAYOUTS["tp2"])):
        assert "a checkpoint could not be written" in message
    assert find_latest_step(tmp_path / "checkpoints") == 1
    assert sorted(path.name for path in (tmp_path / "checkpoints/iter_0000001").glob("more-*")) == [
        "more-0",
        "more-1",
    ]


def save_and_watch(rank: int, size: int, config: Config) -> list[tuple[str, list[str]]]:
    """Return each name that a save gives in the folder of checkpoints, with what was not flushed by
    then.

    The files and folders with the name are to be flushed, before the tracker the folder of
    checkpoints as well, and at the end that folder.
    """
    world, _, policy = build(config)
    folder, flushed, named = Path(config.run.dir, "checkpoints"), set[int](), []
    fsync = os.fsync

    def flush(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def unflushed(*paths: Path) -> list[str]:
        return [path.name for path in paths if path.stat().st_ino not in flushed]

    def watched(rename: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def call(source: str, target: str) -> None:
            path, to = Path(source), Path(target)
            if to.parent == folder:
                more = [folder] if to.name == TRACKER else []
                named.append((to.name, unflushed(path, *path.rglob("*"), *more)))
                flushed.discard(folder.stat().st_ino)
            rename(source, target)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flush)
        for name in ("rename", "replace"):
            patch.setattr(os, name, watched(getattr(os, name)))
        Checkpoints(config, world).save(policy.actor, 1, STATE)
    return [*named, ("", unflushed(folder))]


def test_checkpoint_is_flushed_before_it_counts(
    ranks: RankPool, policy: Path, tmp_path: Path
) -> None:
    [named] = ranks.run(1, save_and_watch, configure(policy, tmp_path, ONE))
    assert named == [(name, []) for name in ("hf", format_iteration_name(1), TRACKER, "")]


def test_newest_checkpoint_stays_beside_later_numbers(policy: Path, tmp_path: Path) -> None:
    """Later numbers are of another life of the run; of the earlier ones the latest and the best
    stay."""
    folder = tmp_path / "checkpoints"
    for name in (*map(format_iteration_name, (2, 3, 4, 9, 10)), ".iter_0000005.partial", "hf"):
        (folder / name).mkdir(parents=True)
    partial = folder / ".iter_0000005.partial"
    (partial / "common.pt").touch()
    config = load_config(
        None, [f"model.path={policy}", f"run.dir={tmp_path}", "run.keep_checkpoints=1"]
    )
    written = _PendingCheckpoint(SimpleNamespace(folder=partial), 5, {}, needed=0, also_keep=3)
    Checkpoints(config, world_of(1, 0))._put_in_place(written, {})
    assert {path.name for path in folder.glob("iter_*")} == {
        format_iteration_name(step) for step in (3, 5, 9, 10)
    }
    assert find_latest_step(folder) == 5
