"""A damaged checkpoint is refused by name or resumed as it was; nothing in a checkpoint is
executed."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dppo.bridge.checkpoint_folder import (
    CHECKSUMS,
    METADATA,
    TRACKER,
    Checksums,
    find_latest_step,
)
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

pytestmark = pytest.mark.xdist_group("trainer/test_damaged_checkpoints.py")


@pytest.fixture(scope="module")
def config(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a run with checkpoints after its first and second step."""
    folder = tmp_path_factory.mktemp("run")
    policy = write_policy(folder / "policy", layers=2)
    config = configure(policy, folder / "run", LayoutConfig(dp=1))
    ranks.run(1, train, config, 2, (1, 2))
    return config


def copy_run(config: Config, place: Path) -> Config:
    shutil.copytree(config.run.dir, place)
    return replace_run(config, place)


def newest(config: Config) -> Path:
    return Path(config.run.dir, "checkpoints/iter_0000002")


def load(rank: int, size: int, configs: list[Config]) -> list[tuple[str, Any]]:
    """Load each run; return the refusal, or the step and the weights after one more update."""
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
            found.append(
                (f"{error.setting} = {error.value}: {error.problem}. {error.remedy}", None)
            )
            continue
        learner.train(plan, held, step=step + 1, version=0)
        found.append(
            (
                f"step {step}" + " with another state" * (state != TRAINER_STATE),
                weights_of(policy, world),
            )
        )
    return found


def test_damaged_file_is_refused_by_name_or_changes_nothing(
    config: Config, ranks: RankPool, tmp_path: Path
) -> None:
    rng, cases = random.Random(5), []
    earlier = copy_run(config, tmp_path / "earlier")
    (Path(earlier.run.dir) / "checkpoints" / TRACKER).write_text("1\n")
    configs = [config, earlier]
    for name in sorted([TRACKER, *(path.name for path in newest(config).iterdir())]):
        for damage in DAMAGE:
            ours = copy_run(config, tmp_path / str(len(cases)))
            DAMAGE[damage](
                newest(ours).parent / TRACKER if name == TRACKER else newest(ours) / name, rng
            )
            cases.append((name, damage))
            configs.append(ours)
    (_, whole), (_, before), *outcomes = ranks.run(1, load, configs)[0]
    for (name, damage), (message, weights) in zip(cases, outcomes, strict=True):
        if weights is None:
            assert message.startswith("run.dir = "), (name, damage, message)
            assert name in message or name == TRACKER, (name, damage, message)
        else:
            expected = {"step 2": whole, "step 1": before}[message]
            assert all(torch.equal(weights[tensor], expected[tensor]) for tensor in expected), (
                name,
                damage,
            )


def flip_tensor(place: Path, kind: str) -> str:
    """Flip a bit in the middle of a stored tensor, and return the name of its file."""
    stored = read_metadata(place).storage_data.items()
    where = next(where for index, where in stored if kind in index.fqn)
    flip(place / where.relative_path, 8 * (where.offset + where.length // 2))
    return where.relative_path


@pytest.mark.parametrize("kind", [".param", ".exp_avg", "output_layer.weight"])
def test_flipped_bit_is_refused_with_a_whole_checkpoint(
    kind: str, config: Config, ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run and a verified conversion refuse any damaged file; a conversion refuses those that hold
    weights."""
    ours = copy_run(config, tmp_path / "run")
    place = newest(ours)
    file = flip_tensor(place, kind)
    [(message, weights)] = ranks.run(1, load, [ours])[0]
    assert weights is None
    assert f"{place}: {file} is damaged" in message
    assert "iter_0000001 beside it is complete" in message
    options = () if kind == "output_layer.weight" else ("--verify",)
    assert to_hf(place.parent, tmp_path / "hf", *options) == 2
    assert f"{file} is damaged" in printed_error(capsys)
    assert not (tmp_path / "hf").exists()


class Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def saved(thing: object) -> bytes:
    data = io.BytesIO()
    torch.save(thing, data)
    return data.getvalue()


def plant_in_index(place: Path, payload: Payload) -> None:
    metadata = read_metadata(place)
    metadata.planner_data = payload
    (place / METADATA).write_bytes(pickle.dumps(metadata))


def plant_in_common(place: Path, payload: Payload) -> None:
    (place / COMMON).write_bytes(saved({**torch.load(place / COMMON), "payload": payload}))


def plant_in_shards(place: Path, payload: Payload, *, kind: str) -> None:
    """Append the payload to a file of shards, and point the index there."""
    metadata = read_metadata(place)
    # The optimizer's keys contain those of weights, and the order of writing differs from run to
    # run.
    index = min(
        (index for index in metadata.storage_data if kind in index.fqn),
        key=lambda index: len(index.fqn),
    )
    where, data = metadata.storage_data[index], saved(payload)
    file = place / where.relative_path
    metadata.storage_data[index] = dataclasses.replace(
        where, offset=file.stat().st_size, length=len(data)
    )
    file.write_bytes(file.read_bytes() + data)
    (place / METADATA).write_bytes(pickle.dumps(metadata))


SHARDS = "exp_avg.output_layer", "final_layernorm"
"""Of the optimizer, and a weight."""
PLANTS: dict[str, Callable[[Path, Payload], None]] = {
    METADATA: plant_in_index,
    COMMON: plant_in_common,
    **{kind: partial(plant_in_shards, kind=kind) for kind in SHARDS},
}
"""Ways of a payload into a checkpoint, by the word of the refusal."""
OF_WEIGHTS = METADATA, "final_layernorm"
"""Reached by the weights alone."""


def start_from(rank: int, size: int, config: Config) -> str:
    with pytest.raises(UserError) as caught:
        build(config)
    return str(caught.value)


def test_no_checkpoint_is_executed(
    config: Config, ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a resume, a start from the weights or a conversion, with checksums that fit."""
    mark = tmp_path / "executed"
    runs = {
        word: copy_run(config, tmp_path / str(number))
        for number, word in enumerate([*PLANTS, CHECKSUMS])
    }
    places = {word: newest(ours) for word, ours in runs.items()}
    for word, place in places.items():
        if word in PLANTS:
            PLANTS[word](place, Payload(mark))
        (place / CHECKSUMS).unlink()
        if word in PLANTS:
            Checksums(place, {}).write()  # whoever plants a payload can compute checksums, too
    for word, (message, weights) in zip(runs, ranks.run(1, load, [*runs.values()])[0], strict=True):
        assert weights is None
        assert word in message
    starts = [
        replace(config, model=replace(config.model, checkpoint=str(places[word])))
        for word in OF_WEIGHTS
    ]
    calls = [(start_from, replace_run(start, tmp_path / "another")) for start in starts]
    for word, [message] in zip(OF_WEIGHTS, ranks.in_turn(1, *calls), strict=True):
        assert word in message
        place = places[word]
        assert to_hf(place, tmp_path / "hf", "--hf", str(place.parent / "hf")) == 2
        assert word in printed_error(capsys)
    assert not mark.exists()


def test_index_cannot_change_classes_of_torch(tmp_path: Path) -> None:
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


def test_foreign_files_stay_beside_checkpoints(
    config: Config, ranks: RankPool, tmp_path: Path
) -> None:
    ours = copy_run(config, tmp_path / "run")
    folder = newest(ours).parent
    shutil.copytree(folder / "iter_0000001", folder / "iter_0000003.bak")
    folders = {"iter_", "iter_12", "iter_best", ".iter_notes", "iter_0000001 (copy)"}
    for name in folders:
        (folder / name).mkdir()
    for name in ("iter_0000009", "iter_0000003", ".iter_0000003.partial", "notes.txt"):
        (folder / name).write_text("a file")
    assert find_latest_step(folder) == 2
    ranks.in_turn(1, (save_again, ours, 3), (save_again, ours, 4))
    foreign = folders | {"iter_0000003.bak", "iter_0000009", "notes.txt"}
    assert {path.name for path in folder.iterdir()} == foreign | {
        "hf",
        TRACKER,
        "iter_0000003",
        "iter_0000004",
    }


def test_run_without_a_tracker_resumes_from_the_newest_whole(
    config: Config, ranks: RankPool, tmp_path: Path
) -> None:
    """Or is refused: it never starts again."""
    whole, torn, none = (copy_run(config, tmp_path / name) for name in ("whole", "torn", "none"))
    for ours in (whole, torn, none):
        (newest(ours).parent / TRACKER).unlink()
    (newest(torn) / STATE).unlink()
    for place in newest(none).parent.glob("iter_*"):
        (data := max(place.glob("*.distcp"))).unlink()
    (kept, _), (earlier, _), (message, weights) = ranks.run(1, load, [whole, torn, none])[0]
    assert (kept, earlier, weights) == ("step 2", "step 1", None)
    assert f"no complete checkpoint (iter_0000002: {data.name} is missing)" in message
    assert find_latest_step(tmp_path / "nowhere") is None
