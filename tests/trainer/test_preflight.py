"""Each thing that can be known to be wrong is found before a rank starts, and named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_dppo.bridge.checkpoint_folder import FORMAT, TRACKER, Checksums, iteration_name
from megatron_dppo.bridge.mapping import expected_tensors, parameters
from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.models.shape import PolicyShape, read_shape
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import OVERHEAD, check_config, disk_needed, preflight
from megatron_dppo.trainer.writer import STATE, Writer, read_state, write_state
from tests.bridge.directories import Sizes, write_qwen3_moe

SMALL = ["data.max_prompt_tokens=32", "rollout.max_response_tokens=32", "pack.max_tokens=64"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 directory whose every tensor has the right name and shape."""
    folder = tmp_path_factory.mktemp("policy")
    described = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "vocab_size": 64,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(described))
    shape = read_shape(folder)
    tensors = {name: np.zeros(size, np.float32) for name, size in expected_tensors(shape).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _config(policy: Path, tmp_path: Path, *overrides: str) -> Config:
    return load_config(None, [f"model.path={policy}", f"run.dir={tmp_path}/run", *SMALL, *overrides])


def _refusal(config: Config, command: str = "train") -> UserError:
    with pytest.raises(UserError) as caught:
        preflight(config, command)
    return caught.value


def test_a_good_configuration_passes_and_writes_nothing(policy: Path, tmp_path: Path) -> None:
    preflight(_config(policy, tmp_path), "train")
    preflight(_config(policy, tmp_path), "sft")
    assert list(tmp_path.iterdir()) == []


def test_folders_of_prompts_are_looked_at_before_a_rank_starts(policy: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "rows").mkdir()
    settings = [f"data.train={folder}", f"data.eval={{held: {folder}}}"]
    assert _refusal(_config(policy, tmp_path, *settings)).setting == "data.train"
    (folder / "a.jsonl").write_text('{"prompt": "a", "label": "1"}\n')
    preflight(_config(policy, tmp_path, *settings, "rollout.prompts_per_step=4"), "train")
    (folder / "b.jsonl").write_text('{"prompt": "a", "label": ""}\n')
    assert str(folder / "b.jsonl") in str(_refusal(_config(policy, tmp_path, *settings)))


def test_defaults_do_not_contradict_each_other() -> None:
    check_config(Config())


@pytest.mark.parametrize(
    ("overrides", "setting", "remedy"),
    [
        (["pack.max_tokens=63"], "pack.max_tokens", "to 64 or more"),
        (["pack.max_tokens=65", "rollout.max_response_tokens=33", "layout.tp=2", "layout.sequence_parallel=true"],
         "pack.max_tokens", "to 66 or more"),
        (["pack.max_tokens=65", "rollout.max_response_tokens=33", "layout.cp=4"], "pack.max_tokens", "to 72 or more"),
        (["loss.updates_per_rollout=8", "rollout.prompts_per_step=9"], "loss.updates_per_rollout", "keep"),
        (["pruning.prompts.floor=0.9"], "pruning.prompts.floor", "0.85 or less"),
        (["pruning.prompts.function=a.py:b", "pruning.prompts.floor=0.05"], "pruning.prompts.floor", "to 0.1 or more"),
        (["pruning.prompts.schedule.shape=linear", "pruning.prompts.schedule.off_last=0.9"],
         "pruning.prompts.schedule.ramp", "shares of the run"),
        (["loss.replay_routing=rollout"], "loss.replay_routing", "a mixture of experts"),
        (["model.checkpoint=/nowhere/checkpoints"], "model.checkpoint", "latest_checkpointed_iteration.txt"),
        (["reward.overlong_buffer=33"], "reward.overlong_buffer", "32 or less"),
        (["rollout.prompts_per_step=600"], "rollout.prompts_per_step", "512 or less"),
        (["rollout.max_response_tokens=120", "pack.max_tokens=500"], "rollout.max_response_tokens", "Lower"),
        (["layout.tp=4"], "layout.tp", "1, 2"),
        (["layout.pp=3"], "layout.pp", "1, 2"),
        (["model.path="], "model.path", ""),
        (["data.train=nowhere.jsonl"], "data.train", ""),
        (["data.eval=nowhere.jsonl"], "data.eval", ""),
        (["reward.function=nowhere.py:score"], "reward.function", ""),
        (["reward.function=maths"], "reward.function", "math"),
        (["run.dir=/dev/null/run"], "run.dir", "directory"),
    ],
)  # fmt: skip
def test_a_contradiction_names_the_setting_and_the_remedy(
    policy: Path, tmp_path: Path, overrides: list[str], setting: str, remedy: str
) -> None:
    error = _refusal(_config(policy, tmp_path, *overrides))
    assert error.setting == setting
    assert remedy in error.remedy


@pytest.mark.parametrize(
    ("row", "overrides", "words"),
    [
        ({"label": float("nan")}, [], "nan"),
        ({"label": ""}, [], "has an empty one"),
        ({"label": ""}, ["reward.function=exact"], "has an empty one"),
        ({"label": {"target": ["1"]}}, [], "is a dict"),
        ({"prompt": " "}, [], "empty prompt"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1"}]},
            [],
            "ends with an answer",
        ),
        ({"prompt": [{"role": "user", "content": "a"}]}, ["data.chat_template=false"], "chat_template=true"),
    ],
)
@pytest.mark.parametrize("setting", ["data.train", "data.eval"])
def test_a_bad_row_is_named_before_a_rank_starts(
    policy: Path, tmp_path: Path, row: dict[str, object], overrides: list[str], words: str, setting: str
) -> None:
    good, file = {"prompt": "a", "label": "1"}, tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (good, good | row)))
    error = _refusal(_config(policy, tmp_path, f"{setting}={file}", *overrides))
    assert f"{file}, line 2" in str(error) and words in str(error)


def test_worked_answers_are_read_before_a_rank_starts(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "label": "", "worked": "1"}\n')
    preflight(_config(policy, tmp_path, f"data.train={file}", "data.response_key=worked"), "sft")
    file.write_text('{"prompt": "a", "label": "1", "worked": ""}\n')
    assert "line 1: has an empty answer" in str(
        _refusal(_config(policy, tmp_path, f"data.train={file}", "data.response_key=worked"), "sft")
    )


def test_updates_are_counted_against_all_prompts_where_none_are_pruned(policy: Path, tmp_path: Path) -> None:
    many = ("loss.updates_per_rollout=8", "rollout.prompts_per_step=10")
    preflight(_config(policy, tmp_path, *many, "pruning.prompts.rule=none"), "train")


def test_an_empty_dataset_is_refused(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert _refusal(_config(policy, tmp_path, f"data.train={tmp_path}/empty.jsonl")).setting == "data.train"


def test_a_truncated_weight_file_is_refused(policy: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(policy, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    error = _refusal(_config(broken, tmp_path))
    assert error.setting == "model.path"
    assert "truncated" in error.problem


def _checkpoint(config: Config, step: int) -> Path:
    """The marks of a run's checkpoint, without weights."""
    place = Path(config.run.dir) / "checkpoints" / iteration_name(step)
    place.mkdir(parents=True)
    (place / FORMAT).write_text("{}")
    (place.parent / TRACKER).write_text(str(step))
    write_state(place, {}, Writer.of(config, "torch"))
    Checksums(place, {}).write()
    return place


def test_a_policy_s_own_weights_are_not_asked_for_where_a_checkpoint_s_replace_them(
    policy: Path, tmp_path: Path
) -> None:
    place = _checkpoint(_config(policy, tmp_path / "before"), 3)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(policy / "config.json", bare / "config.json")
    assert _refusal(_config(bare, tmp_path)).setting == "model.path"
    for named in (place, place.parent):
        preflight(_config(bare, tmp_path, f"model.checkpoint={named}"), "train")
    own = _refusal(_config(bare, tmp_path / "before", f"model.checkpoint={place}"))
    assert own.setting == "model.checkpoint" and "this very run" in own.problem


@pytest.mark.parametrize(
    ("written", "resumed", "setting", "remedy"),
    [
        (["optimizer.checkpoint_format=dp_reshardable"], ["layout.pp=2"], "layout", "layout.tp=1 layout.pp=1"),
        (["optimizer.distributed=false"], [], "optimizer.distributed", "optimizer.distributed=false"),
        (["model.dtype=bf16"], [], "model.dtype", "model.dtype=bf16"),
    ],
)
def test_a_run_that_cannot_go_on_is_told_so_before_a_rank_starts(
    policy: Path, tmp_path: Path, written: list[str], resumed: list[str], setting: str, remedy: str
) -> None:
    before = _config(policy, tmp_path, *written)
    place = _checkpoint(before, 3)
    preflight(before, "train")
    error = _refusal(_config(policy, tmp_path, *resumed))
    assert error.setting == setting
    assert remedy in error.remedy
    preflight(_config(policy, tmp_path, *resumed), "sft")
    (place / STATE).write_text("{}")
    assert _refusal(before).setting == "run.dir"
    (place / STATE).unlink()
    assert "is no checkpoint of a run" in _refusal(before).problem


def test_buffers_with_the_parameters_in_another_order_are_refused(policy: Path, tmp_path: Path) -> None:
    config = _config(policy, tmp_path, "optimizer.checkpoint_format=dp_reshardable")
    place = _checkpoint(config, 3)
    read_state(place, Writer.of(config, "torch"))
    with pytest.raises(UserError, match=r"model\.spec = te: .* written at model\.spec = torch"):
        read_state(place, Writer.of(config, "te"))


def test_a_checkpoint_written_parameter_by_parameter_resumes_anywhere(policy: Path, tmp_path: Path) -> None:
    _checkpoint(_config(policy, tmp_path, "layout.tp=2"), 3)
    preflight(_config(policy, tmp_path, "layout.pp=2", "optimizer.checkpoint_format=dp_reshardable"), "train")


def test_no_room_on_the_disk_is_found_before_the_run(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(policy, tmp_path)
    needed = disk_needed(config, read_shape(policy)).total
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1))
    error = _refusal(config)
    assert error.setting == "run.dir"
    assert "run.keep_checkpoints" in error.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed))
    preflight(config, "train")


def test_room_that_checkpoints_already_take_is_not_asked_for_again(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(policy, tmp_path)
    needed = disk_needed(config, read_shape(policy)).total
    (_checkpoint(config, 1) / "shard").write_bytes(b"x" * 1000)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - 1000))
    preflight(config, "train")


def test_a_checkpoint_is_weights_and_three_fp32_copies(policy: Path) -> None:
    shape: PolicyShape = read_shape(policy)
    weights = parameters(shape)

    def size(*overrides: str) -> int:
        return disk_needed(load_config(None, ["run.export=false", *overrides]), shape).total - OVERHEAD

    assert size("run.checkpoint_every=0") == weights * (4 + 12)  # only the last
    assert size("run.checkpoint_every=50") == weights * 2 * (4 + 12)  # no more than are ever written
    assert size("run.checkpoint_every=10", "model.dtype=bf16") == weights * 4 * (2 + 12)  # kept ones, best and new one
    assert size("run.checkpoint_every=0", "run.export=true") == weights * (4 + 12 + 4)


@pytest.mark.parametrize(
    ("overrides", "weights", "adapters"),
    [
        (["rollout.engine=sglang"], 0, 0),
        (["rollout.engine=sglang", "rollout.sync.transport=disk"], 1, 0),
        (["rollout.engine=sglang", "rollout.sync.transport=disk", "model.lora.rank=2"], 1, 0),  # merged ones
        (["rollout.engine=vllm", "model.lora.rank=2", "rollout.sync.adapter=true"], 0, 1),
        (["rollout.engine=sglang", "model.lora.rank=2", "rollout.sync.adapter=true"], 0, 0),  # in a request
        (["rollout.engine=sglang", "rollout.sync.transport=disk", "rollout.sync.folder=/dev/shm/run"], 0, 0),
    ],
)
def test_what_servers_read_back_lies_on_the_runs_disk_unless_it_has_a_folder_of_its_own(
    policy: Path, overrides: list[str], weights: int, adapters: int
) -> None:
    config, shape = load_config(None, overrides), read_shape(policy)
    found = disk_needed(config, shape)
    assert found.sync == 4 * (weights * parameters(shape) + adapters * parameters(shape, config.model.lora))
    assert found.total == found.checkpoint * found.checkpoints + found.export + found.sync + OVERHEAD


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused(policy: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert _refusal(_config(policy, tmp_path)).setting == "run.dir"


def test_adapters_that_peft_could_not_load_are_refused_before_the_run(tmp_path: Path) -> None:
    write_qwen3_moe(tmp_path / "policy", Sizes())
    asked = ("model.lora.rank=2", "model.lora.targets=[q_proj,up_proj]")
    error = _refusal(_config(tmp_path / "policy", tmp_path, *asked))
    assert (error.setting, error.value) == ("model.lora.targets", "[q_proj,up_proj]")
    preflight(_config(tmp_path / "policy", tmp_path, *asked, "run.export=false"), "train")


@pytest.mark.parametrize("command", ["train", "sft", "eval", "probe-tree", "probe-batch"])
def test_tokens_that_the_embedding_has_no_row_for_are_refused_for_every_command(
    command: str, policy: Path, tmp_path: Path
) -> None:
    stops = _refusal(_config(policy, tmp_path, "rollout.stop_token_ids=[3, 64]", "eval.benchmarks=arithmetic"), command)
    assert stops.setting == "rollout.stop_token_ids" and "token id 64, and the embedding has 64 rows" in stops.problem
    other = tmp_path / "other"
    shutil.copytree(policy, other)
    added = [{"content": "<last>", "id": 70}]
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 63}}, "added_tokens": added}))
    refused = _refusal(_config(other, tmp_path, "eval.benchmarks=arithmetic"), command)
    assert refused.setting == "model.path" and "tokenizer.json has the token id 70" in refused.problem
