"""Mistakes that one process can find are refused before a rank starts."""

from __future__ import annotations

import gzip
import json
import resource
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.bridge.checkpoint_folder import (
    CHECKSUMS,
    FORMAT,
    TRACKER,
    Checksums,
    format_iteration_name,
)
from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import read_shape
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.fingerprints import compute_fingerprints
from megatron_dppo.trainer.preflight import (
    OVERHEAD,
    check_config,
    estimate_disk,
    find_mistakes,
    run_preflight,
)
from megatron_dppo.trainer.resume import record_settings
from megatron_dppo.trainer.writer import FILES, STATE, CheckpointFormat, write_state
from tests.bridge.directories import Sizes, write_qwen3_moe
from tests.commands import Command
from tests.small_runs import small_words, write_run


def config_of(policy: Path, tmp_path: Path, *overrides: str) -> Config:
    limits = ("data.max_prompt_tokens=32", "rollout.max_response_tokens=32", "pack.max_tokens=64")
    return load_config(
        None, [f"model.path={policy}", f"run.dir={tmp_path}/run", *limits, *overrides]
    )


def refuse(config: Config, command: str = "train") -> UserError:
    with pytest.raises(UserError) as caught:
        run_preflight(config, command)
    return caught.value


def test_fitting_configuration_passes_and_writes_nothing(policy: Path, tmp_path: Path) -> None:
    check_config(Config())
    for command in ("train", "sft"):
        run_preflight(config_of(policy, tmp_path), command)
    many = (
        "loss.updates_per_rollout=8",
        "rollout.prompts_per_step=10",
        "pruning.prompts.rule=none",
    )
    run_preflight(config_of(policy, tmp_path, *many), "train")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "overrides"),
    [
        (
            "pack.max_tokens",
            ("pack.max_tokens=65", "rollout.max_response_tokens=33", "layout.cp=4"),
        ),
        ("loss.updates_per_rollout", ("loss.updates_per_rollout=8", "rollout.prompts_per_step=9")),
        ("loss.replay_routing", ("loss.replay_routing=rollout",)),
        ("model.checkpoint", ("model.checkpoint=/nowhere/checkpoints",)),
        ("rollout.prompts_per_step", ("rollout.prompts_per_step=600",)),
        ("rollout.max_response_tokens", ("rollout.max_response_tokens=500", "pack.max_tokens=600")),
        ("layout.pp", ("layout.pp=3",)),
        ("data.train", ("data.train=nowhere.jsonl",)),
        ("reward.function", ("reward.function=maths",)),
        ("run.dir", ("run.dir=/dev/null/run",)),
        ("run.seed", ("run.seed=18446744073709551616",)),
        ("rollout.timeout_s", ("rollout.timeout_s=1e308",)),
        ("loss.clip_high", ("loss.clip_high=1e300",)),
    ],
)
def test_contradiction_is_refused_by_setting(
    setting: str, overrides: tuple[str, ...], policy: Path, tmp_path: Path
) -> None:
    assert refuse(config_of(policy, tmp_path, *overrides)).setting == setting


@pytest.mark.parametrize(
    ("row", "overrides", "problem"),
    [
        ({"label": ""}, ("reward.function=exact",), "has an empty one"),
        ({"prompt": " "}, (), "empty prompt"),
        (
            {"prompt": [{"role": "user", "content": "a"}]},
            ("data.chat_template=false",),
            "chat_template",
        ),
    ],
)
def test_bad_row_is_refused_with_line(
    policy: Path, tmp_path: Path, row: dict[str, object], overrides: tuple[str, ...], problem: str
) -> None:
    good, file = {"prompt": "a", "label": "1"}, tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (good, good | row)))
    for setting in ("data.train", "data.eval"):
        error = str(refuse(config_of(policy, tmp_path, f"{setting}={file}", *overrides)))
        assert f"{file}, line 2" in error
        assert problem in error


def test_worked_answers_are_read_for_sft(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    config = config_of(policy, tmp_path, f"data.train={file}", "data.response_key=worked")
    file.write_text('{"prompt": "a", "label": "", "worked": "1"}\n')
    run_preflight(config, "sft")
    file.write_text('{"prompt": "a", "label": "1", "worked": ""}\n')
    assert "line 1: has an empty answer" in str(refuse(config, "sft"))


def test_truncated_weights_are_refused(policy: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(policy, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    error = refuse(config_of(broken, tmp_path))
    assert error.setting == "model.path"
    assert "not a complete safetensors file" in error.problem


def write_marks(config: Config, step: int, state: Mapping[str, Any] | None = None) -> Path:
    """Write the marks of a run's checkpoint, without weights."""
    place = Path(config.run.dir) / "checkpoints" / format_iteration_name(step)
    place.mkdir(parents=True, exist_ok=True)
    (place / FORMAT).write_text("{}")
    (place.parent / TRACKER).write_text(str(step))
    write_state(place, dict(state or {}), CheckpointFormat.from_config(config))
    Checksums(place, {}).write()
    return place


def test_checkpoint_replaces_the_weights_of_a_policy(policy: Path, tmp_path: Path) -> None:
    """A run's own checkpoint is refused."""
    place = write_marks(config_of(policy, tmp_path / "before"), 3)
    (bare := tmp_path / "bare").mkdir()
    shutil.copyfile(policy / "config.json", bare / "config.json")
    assert refuse(config_of(bare, tmp_path)).setting == "model.path"
    for named in (place, place.parent):
        run_preflight(config_of(bare, tmp_path, f"model.checkpoint={named}"), "train")
    own = refuse(config_of(bare, tmp_path / "before", f"model.checkpoint={place}"))
    assert own.setting == "model.checkpoint"
    assert "of the same run" in own.problem


@pytest.mark.parametrize(
    ("written", "resumed", "setting"),
    [
        ("optimizer.distributed=false", "layout.pp=1", "optimizer.distributed"),
        ("model.dtype=bf16", "layout.pp=1", "model.dtype"),
        ("model.lora.rank=2", "layout.pp=1", "model.lora.rank"),
        ("layout.pp=1", "model.lora.rank=2", "model.lora.rank"),
    ],
)
def test_unfit_resume_is_refused(
    policy: Path, tmp_path: Path, written: str, resumed: str, setting: str
) -> None:
    before, after = config_of(policy, tmp_path, written), config_of(policy, tmp_path, resumed)
    place = write_marks(before, 3)
    run_preflight(before, "train")
    assert refuse(after).setting == setting
    run_preflight(after, "sft")
    (place / STATE).write_text("{}")
    assert refuse(before).setting == "run.dir"
    (place / STATE).unlink()
    assert "is no checkpoint of a run" in refuse(before).problem


@pytest.mark.parametrize("name", ["mistyped.jsonl", "rows.jsonl.gz"])
def test_unreadable_data_of_a_resumed_run_is_the_only_mistake(
    name: str, policy: Path, tmp_path: Path
) -> None:
    """Its files are not compared with those of the checkpoint."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "1"}\n' * 4)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    own = "rollout.prompts_per_step=4", "eval.problems=0"
    config, other = (
        config_of(policy, tmp_path, f"data.train={tmp_path / n}", *own)
        for n in ("rows.jsonl", name)
    )
    write_marks(config, 3, {FILES: compute_fingerprints(config)})
    record_settings(Path(config.run.dir), 0, config)
    assert [*find_mistakes(config, "train")] == []
    assert [mistake.setting for mistake in find_mistakes(other, "train")] == ["data.train"]


def test_checkpoint_of_an_earlier_version_is_refused_by_its_name(
    policy: Path, tmp_path: Path
) -> None:
    config = config_of(policy, tmp_path)
    place = write_marks(config, 3)
    (place / CHECKSUMS).write_text('{"format": 1, "files": {}}')
    assert "of an earlier version" in refuse(config).problem
    (place / CHECKSUMS).unlink()
    assert "checksums.json is missing" in refuse(config).problem


def test_missing_room_on_the_disk_is_found(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that checkpoints take already is not needed again."""
    config = config_of(policy, tmp_path)
    needed = estimate_disk(config, read_shape(policy)).total
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    assert refuse(config).setting == "run.dir"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    run_preflight(config, "train")
    (write_marks(config, 1) / "shard").write_bytes(b"x" * 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1000))
    run_preflight(config, "train")


@pytest.mark.parametrize(
    ("overrides", "per_weight"),
    [
        (("run.checkpoint_every=50",), 2 * (4 + 12)),  # no more than are ever written
        (
            ("run.checkpoint_every=10", "model.dtype=bf16"),
            4 * (2 + 12),
        ),  # kept ones, best and new one
        (("run.checkpoint_every=0", "run.export=true"), 4 + 12 + 4),
    ],
)
def test_checkpoint_is_weights_and_three_fp32_copies(
    policy: Path, overrides: tuple[str, ...], per_weight: int
) -> None:
    shape = read_shape(policy)
    needed = estimate_disk(load_config(None, ["run.export=false", *overrides]), shape)
    assert needed.total - OVERHEAD == count_parameters(shape) * per_weight


DISK = ("rollout.engine=sglang", "rollout.sync.transport=disk")
LORA = ("model.lora.rank=2", "rollout.sync.adapter=true")


@pytest.mark.parametrize(
    ("overrides", "weights", "adapters"),
    [
        (("rollout.engine=sglang",), 0, 0),
        ((*DISK, "model.lora.rank=2"), 1, 0),  # merged
        (("rollout.engine=vllm", *LORA), 0, 1),
        (("rollout.engine=sglang", *LORA), 0, 0),  # in a request
        ((*DISK, "rollout.sync.folder=/dev/shm/run"), 0, 0),
    ],
)
def test_files_for_servers_lie_on_the_runs_disk(
    policy: Path, overrides: tuple[str, ...], weights: int, adapters: int
) -> None:
    """Except in a folder of their own."""
    config, shape = load_config(None, overrides), read_shape(policy)
    found = estimate_disk(config, shape)
    assert found.sync == 4 * (
        weights * count_parameters(shape) + adapters * count_parameters(shape, config.model.lora)
    )


def test_adapters_unknown_to_peft_are_refused(tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path / "policy", Sizes())
    asked = ("model.lora.rank=2", "model.lora.targets=[q_proj,up_proj]")
    error = refuse(config_of(tmp_path / "policy", tmp_path, *asked))
    assert (error.setting, error.value) == ("model.lora.targets", "[q_proj,up_proj]")
    run_preflight(config_of(tmp_path / "policy", tmp_path, *asked, "run.export=false"), "train")


@pytest.mark.parametrize("command", ["train", "sft", "eval", "probe-batch"])
def test_tokens_outside_the_embedding_are_refused(
    command: str, policy: Path, tmp_path: Path
) -> None:
    benchmarks = "eval.benchmarks=arithmetic"
    stops = refuse(
        config_of(policy, tmp_path, "rollout.stop_token_ids=[3, 131]", benchmarks), command
    )
    assert stops.setting == "rollout.stop_token_ids"
    assert "token id 131, and the embedding has 131 rows" in stops.problem
    other = shutil.copytree(policy, tmp_path / "other")
    added = [{"content": "<last>", "id": 140}]
    (other / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 130}}, "added_tokens": added})
    )
    refused = refuse(config_of(other, tmp_path, benchmarks), command)
    assert refused.setting == "model.path"
    assert "tokenizer.json has the token id 140" in refused.problem


def limit_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


@pytest.mark.parametrize("count", [24, 128])
def test_too_few_open_files_are_named(tmp_path: Path, count: int) -> None:
    words = small_words(
        write_run(tmp_path / "policy"), tmp_path / "run", "run.steps=1", "layout.dp=1"
    )
    command = Command(
        ["megatron-dppo", "train", *words], tmp_path / "log", before=partial(limit_files, count)
    )
    code, log = command.exit_code(), (tmp_path / "log").read_text()
    assert "Traceback" not in log, log
    assert code == 0 or (code == 2 and f"error: ulimit -n = {count}" in log), log
