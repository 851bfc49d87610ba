"""A checkpoint that is not what was written is refused by name, or resumed as it was; nothing it asks for is run."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, FORMAT, METADATA, TRACKER, Block, Checksums, latest_step
from megatron_dppo.bridge.stored_policy import read_metadata
from megatron_dppo.bridge.torch_dist import COMMON
from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.checkpoint import Checkpoints
from megatron_dppo.trainer.writer import STATE
from tests.bridge.conversions import printed_error, to_hf
from tests.damage import DAMAGE, flip
from tests.policies import write_policy
from tests.ranks import RankPool
from tests.steps import build, held_by, plan_for, step_of_groups, weights_of
from tests.trainer.test_checkpoint import STATE as TRAINER_STATE
from tests.trainer.test_checkpoint import configure, replace_run, train


@pytest.fixture(scope="module")
def config(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a run with checkpoints after its first and second step, with an object among the shards."""
    folder = tmp_path_factory.mktemp("run")
    config = configure(write_policy(folder / "policy"), folder / "run", LayoutConfig(dp=1), fmt="dp_reshardable")
    ranks.run(1, train, config, 2, (1, 2))
    return config


def copied(config: Config, place: Path) -> Config:
    shutil.copytree(config.run.dir, place)
    return replace_run(config, place)


def newest(config: Config) -> Path:
    return Path(config.run.dir, "checkpoints/iter_0000002")


def load(rank: int, size: int, configs: list[Config]) -> list[tuple[str, Any]]:
    """What comes of loading each of these runs: the refusal, or the step and the weights after one more update."""
    world, learner, policy = build(configs[0])
    metadata, groups = step_of_groups(size)
    plan, held = plan_for(world, configs[0], metadata), held_by(rank, metadata, groups)
    found: list[tuple[str, Any]] = []
    for config in configs:
        for parameter in policy.actor.parameters():
            parameter.data.fill_(7.0)
        try:
            step, state = Checkpoints(config, world).load(policy.actor) or (0, {})
        except UserError as error:
            found.append((f"{error.setting} = {error.value}: {error.problem}. {error.remedy}", None))
            continue
        learner.learn(plan, held, step=step + 1, version=0)
        found.append((f"step {step}" + " with another state" * (state != TRAINER_STATE), weights_of(policy, world)))
    return found


@pytest.mark.parametrize("checked", [True, False], ids=["with checksums", "of an earlier version"])
def test_whatever_a_file_has_become_a_run_is_refused_with_its_name_or_goes_on_as_it_would_have(
    checked: bool, config: Config, ranks: RankPool, tmp_path: Path
) -> None:
    rng, cases, configs = random.Random(5), [], [copied(config, tmp_path / "whole")]
    earlier = copied(config, tmp_path / "earlier")
    (Path(earlier.run.dir) / "checkpoints" / TRACKER).write_text("1\n")
    configs.append(earlier)
    names = [path.name for path in newest(config).iterdir()]
    data = {name for name in names if name.endswith(".distcp")}  # Megatron-Core writes two files, from 0.19 on one
    assert data and {FORMAT, METADATA, COMMON, STATE, CHECKSUMS} == {*names} - data
    for name in sorted({*names, TRACKER} - ({CHECKSUMS} if not checked else set())):
        for damage in DAMAGE:
            for _ in range(3 if damage in ("flipped", "truncated") else 1):
                ours = copied(config, tmp_path / str(len(cases)))
                if not checked:
                    (newest(ours) / CHECKSUMS).unlink()
                file = Path(ours.run.dir) / "checkpoints" / TRACKER if name == TRACKER else newest(ours) / name
                DAMAGE[damage](file, rng)
                cases.append((name, damage))
                configs.append(ours)
    (_, whole), (_, before), *outcomes = ranks.run(1, load, configs)[0]
    for (name, damage), (said, weights) in zip(cases, outcomes, strict=True):
        if weights is None and not checked and damage == "flipped":
            continue  # another setting is read, perhaps, and refused under its own name
        if weights is None:
            assert said.startswith("run.dir = "), (name, damage, said)
            assert name in said or name == TRACKER or not checked, (name, damage, said)
            assert "Write " in said or "write 1 into" in said or "another" in said, (name, damage, said)
        elif checked:
            expected = {"step 2": whole, "step 1": before}[said]
            assert all(torch.equal(weights[tensor], expected[tensor]) for tensor in expected), (name, damage)


def test_a_flipped_bit_of_the_optimizer_s_state_is_refused_and_the_checkpoint_before_it_named(
    config: Config, ranks: RankPool, tmp_path: Path
) -> None:
    ours = copied(config, tmp_path / "run")
    place = newest(ours)
    places = {index.fqn: where for index, where in read_metadata(place).storage_data.items()}
    kinds = [".param", ".exp_avg", ".exp_avg_sq"]
    for kind in kinds:
        where = next(where for key, where in places.items() if key.startswith("optimizer.") and key.endswith(kind))
        bit = 8 * (where.offset + where.length // 2)
        flip(place / where.relative_path, bit)
        [(said, weights)] = ranks.run(1, load, [ours])[0]
        assert weights is None and f"{place}: {where.relative_path} is damaged" in said
        assert f"write 1 into {place.parent / TRACKER}: iter_0000001 beside it is whole" in said
        flip(place / where.relative_path, bit)
    assert to_hf(place.parent, tmp_path / "hf") == 0


def test_conversion_refuses_damaged_weights_and_with_verify_anything_damaged(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = copied(config, tmp_path / "run")
    place = newest(ours)
    places = {index.fqn: where for index, where in read_metadata(place).storage_data.items()}
    for key, options in (("output_layer.weight", []), (next(k for k in places if "exp_avg" in k), ["--verify"])):
        where = places[key]
        flip(place / where.relative_path, 8 * (where.offset + where.length // 2))
        assert to_hf(place.parent, tmp_path / "hf", *options) == 2
        said = printed_error(capsys)
        assert f"{where.relative_path} is damaged" in said and "iter_0000001 beside it is whole" in said
        assert not (tmp_path / "hf").exists()
        flip(place / where.relative_path, 8 * (where.offset + where.length // 2))


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def saved(thing: object) -> bytes:
    data = io.BytesIO()
    torch.save(thing, data)
    return data.getvalue()


def in_the_index(place: Path, mark: Path) -> None:
    (place / METADATA).write_bytes(pickle.dumps(Payload(mark)))


def within_the_index(place: Path, mark: Path) -> None:
    metadata = read_metadata(place)
    metadata.planner_data = Payload(mark)
    (place / METADATA).write_bytes(pickle.dumps(metadata))


def in_common(place: Path, mark: Path) -> None:
    common = torch.load(place / COMMON)
    (place / COMMON).write_bytes(saved({**common, "payload": Payload(mark)}))


def among_the_shards(place: Path, mark: Path, *, kind: str) -> None:
    """Behind all that is in a file, and the index points there."""
    metadata = read_metadata(place)
    index = next(index for index in metadata.storage_data if kind in index.fqn)
    where, payload = metadata.storage_data[index], saved(Payload(mark))
    file = place / where.relative_path
    metadata.storage_data[index] = dataclasses.replace(where, offset=file.stat().st_size, length=len(payload))
    file.write_bytes(file.read_bytes() + payload)
    (place / METADATA).write_bytes(pickle.dumps(metadata))


def in_an_object(place: Path, mark: Path) -> None:
    among_the_shards(place, mark, kind="optimizer/shard_")


def in_a_weight(place: Path, mark: Path) -> None:
    among_the_shards(place, mark, kind="final_layernorm")


MALICE = {
    "the index itself": (in_the_index, METADATA, True),
    "a part of the index": (within_the_index, METADATA, True),
    "common.pt": (in_common, COMMON, False),
    "an object among the shards": (in_an_object, "optimizer/shard_", False),
    "a weight": (in_a_weight, "final_layernorm", True),
}
"""How a payload gets into a checkpoint, what the refusal names, and whether the weights alone lie behind it."""
AMONG_SHARDS = ("an object among the shards", "a weight")
"""Where the index can still be read."""


def start_from(rank: int, size: int, config: Config) -> str:
    with pytest.raises(UserError) as caught:
        build(config)
    return str(caught.value)


@pytest.mark.parametrize("checked", [True, False], ids=["with checksums that fit", "without checksums"])
def test_no_checkpoint_gets_anything_run(
    checked: bool, config: Config, ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, mark = {}, tmp_path / "it-was-run"
    for where, (plant, _, _) in MALICE.items():
        runs[where] = copied(config, tmp_path / where)
        place = newest(runs[where])
        plant(place, mark)
        (place / CHECKSUMS).unlink()
        if checked:  # whoever plants one can count as well
            Checksums(place, blocks_of_shards(place) if where in AMONG_SHARDS else {}).write()
    for (where, _), (said, weights) in zip(runs.items(), ranks.run(1, load, [*runs.values()])[0], strict=True):
        refusal = MALICE[where][1] if checked else CHECKSUMS  # a run does not resume without
        assert weights is None and refusal in said, (where, said)
    starts = {
        where: replace(ours, model=replace(ours.model, checkpoint=str(newest(ours))))
        for where, ours in runs.items()
        if MALICE[where][2]
    }
    calls = [(start_from, replace_run(start, tmp_path / "another")) for start in starts.values()]
    for where, [said] in zip(starts, ranks.in_turn(1, *calls), strict=True):
        place, name = newest(runs[where]), MALICE[where][1]
        assert name in said, (where, said)
        assert to_hf(place, tmp_path / "hf", "--hf", str(place.parent / "hf")) == 2
        assert name in printed_error(capsys), where
    assert not mark.exists()


def blocks_of_shards(place: Path) -> dict[str, list[Block]]:
    stored = read_metadata(place).storage_data.values()
    offsets = {
        file: {0, *(p.offset for p in stored if p.relative_path == file.name)} for file in place.glob("*.distcp")
    }
    return {file.name: blocks_of(file, sorted(starts)) for file, starts in offsets.items()}


def blocks_of(file: Path, starts: list[int]) -> list[Block]:
    data, ends = file.read_bytes(), [*starts[1:], file.stat().st_size]
    return [Block(end, zlib.crc32(data[start:end])) for start, end in zip(starts, ends, strict=True)]


def test_an_index_cannot_change_what_torch_is_made_of(tmp_path: Path) -> None:
    """The class itself, on the unpickler's stack, is given an attribute."""
    (tmp_path / METADATA).write_bytes(
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x04\x00\x00\x00evilK\x01s\x86b."
    )
    with pytest.raises(pickle.UnpicklingError, match="it changes Metadata"):
        read_metadata(tmp_path)
    assert not hasattr(torch.distributed.checkpoint.metadata.Metadata, "evil")


def save_again(rank: int, size: int, config: Config, step: int) -> None:
    world, _, policy = build(config)
    Checkpoints(config, world).save(policy.actor, step, TRAINER_STATE)


def test_what_is_not_the_run_s_stays_in_the_folder_and_in_nobody_s_way(
    config: Config, ranks: RankPool, tmp_path: Path
) -> None:
    ours = copied(config, tmp_path / "run")
    folder = newest(ours).parent
    shutil.copytree(folder / "iter_0000001", folder / "iter_0000003.bak")
    folders = {"iter_", "iter_12", "iter_best", ".iter_notes", "iter_0000001 (copy)"}
    for name in folders:
        (folder / name).mkdir()
    for name in ("iter_0000009", "iter_0000003", ".iter_0000003.partial", "notes.txt"):
        (folder / name).write_text("a file")
    assert latest_step(folder) == 2
    for step in (3, 4):
        ranks.run(1, save_again, ours, step)
    left = {path.name for path in folder.iterdir()}
    foreign = {
        "iter_0000003.bak",
        "iter_",
        "iter_12",
        "iter_best",
        ".iter_notes",
        "iter_0000001 (copy)",
        "iter_0000009",
    }
    assert left == foreign | {"notes.txt", "hf", TRACKER, "iter_0000003", "iter_0000004"}


def test_without_a_tracker_a_run_goes_on_from_the_newest_whole_checkpoint_and_never_anew(
    config: Config, ranks: RankPool, tmp_path: Path
) -> None:
    whole, torn, none = (copied(config, tmp_path / name) for name in ("whole", "torn", "none"))
    for ours in (whole, torn, none):
        (newest(ours).parent / TRACKER).unlink()
    (newest(torn) / STATE).unlink()
    for place in newest(none).parent.glob("iter_*"):
        (data := max(place.glob("*.distcp"))).unlink()
    (kept, _), (earlier, _), (said, weights) = ranks.run(1, load, [whole, torn, none])[0]
    assert (kept, earlier, weights) == ("step 2", "step 1", None)
    assert f"has no {TRACKER}, and no whole checkpoint (iter_0000002: {data.name} is missing)" in said
    assert latest_step(tmp_path / "nowhere") is None
