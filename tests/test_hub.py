"""What the hub publishes is found in the hub's own cache by its id; what is not there is said with what fetches it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants

from megatron_dppo.config import DataConfig
from megatron_dppo.data.prompts import load_prompts
from megatron_dppo.data.tokenizer import load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.memory import shape_of
from megatron_dppo.hub import data_files, is_id, policy_folder
from megatron_dppo.init import write_model

REVISION = "0123456789abcdef0123456789abcdef01234567"
GSM8K = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
# GSM8K
"""


def publish(cache: Path, kind: str, repo: str, files: Mapping[str, bytes]) -> Path:
    """A snapshot as the hub's client lays it down."""
    folder = cache / f"{kind}s--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    for name, content in files.items():
        file = folder / "snapshots" / REVISION / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder / "snapshots" / REVISION


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model") / "hf"
    write_model(folder, hidden=16, layers=2, heads=2, kv_heads=2, head_dim=8, ffn=16)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, on a machine that is offline, and a working directory of its own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def rows(count: int) -> bytes:
    return b"".join(json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}).encode() + b"\n" for i in range(count))


def test_a_run_is_checked_with_ids_of_the_hub_and_no_network(tmp_path: Path, model_files: dict[str, bytes]) -> None:
    publish(tmp_path / "hub", "model", "Org/Tiny", model_files)
    publish(tmp_path / "hub", "dataset", "org/sums", {"train.jsonl": rows(9), "test.jsonl": rows(3)})
    words = ["model.path=Org/Tiny", "data.train=org/sums", "data.eval=org/sums", "data.prompt_key=question"]
    words += ["data.label_key=answer", "rollout.prompts_per_step=8", "data.max_prompt_tokens=16"]
    command = [sys.executable, "-m", "megatron_dppo", "train", *words, "rollout.max_response_tokens=16", "--check=1"]
    environ = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "0 of 100 steps are done" in done.stdout, done.stderr


def test_a_policy_is_what_its_id_its_folder_or_its_run_names(
    cache: Path, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    snapshot = publish(cache, "model", "Org/Tiny", model_files)
    assert policy_folder("Org/Tiny") == snapshot
    assert shape_of("Org/Tiny").num_layers == 2 and len(load_tokenizer(policy_folder("Org/Tiny"))) > 9
    (tmp_path / "run").mkdir()
    assert policy_folder("run") == Path("run")
    (tmp_path / "run" / "hf").symlink_to(snapshot)
    assert policy_folder("run") == Path("run/hf") and policy_folder("run/hf") == Path("run/hf")
    assert (
        not is_id("run/nothing") and not is_id("/a/b") and not is_id("./a/b") and not is_id("a") and not is_id("a/b/c")
    )


def test_a_folder_that_is_not_there_is_fetched_by_a_command_that_works(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the shipped configurations name them; a file of data is no data set of the hub."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        policy_folder("models/Qwen3-4B")
    assert "`hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B`" in caught.value.remedy
    with pytest.raises(UserError, match="no directory"):
        policy_folder("a" * 5000)  # longer than any name of a file
    assert not is_id("data/dapo-math-17k.jsonl") and not is_id("data/rows.parquet") and is_id("openai/gsm8k")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_policy_that_was_not_fetched_to_its_end_is_named_with_what_fetches_it(
    cache: Path, model_files: dict[str, bytes], missing: str
) -> None:
    publish(cache, "model", "Org/Tiny", {name: content for name, content in model_files.items() if name != missing})
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set") as caught:
        policy_folder("Org/Tiny", "loss.distillation.teacher")
    assert (caught.value.setting, caught.value.value) == ("loss.distillation.teacher", "Org/Tiny")
    assert "`hf download Org/Tiny`" in caught.value.remedy
    if missing == "model.safetensors":
        assert policy_folder("Org/Tiny", weights=False).is_dir()


def test_a_shard_that_is_missing_is_missed(cache: Path, model_files: dict[str, bytes]) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    parts = {"config.json": model_files["config.json"], "model.safetensors.index.json": json.dumps(index).encode()}
    publish(cache, "model", "Org/Cut", {**parts, "model-1.safetensors": b""})
    with pytest.raises(UserError, match="is not whole"):
        policy_folder("Org/Cut")
    publish(cache, "model", "Org/All", {**parts, "model-1.safetensors": b"", "model-2.safetensors": b""})
    assert policy_folder("Org/All").is_dir()


def test_a_data_set_is_read_by_its_id(cache: Path, model_files: dict[str, bytes]) -> None:
    files = {f"main/{split}-0000{i}-of-00002.jsonl": rows(2 + i) for split in ("train", "test") for i in range(2)}
    files |= {"README.md": GSM8K.encode(), "socratic/train-00000-of-00001.jsonl": rows(1)}
    snapshot = publish(cache, "dataset", "openai/gsm8k", files)
    publish(cache, "model", "Org/Tiny", model_files)
    tokenizer = load_tokenizer(policy_folder("Org/Tiny"))
    named = {"prompt_key": "question", "label_key": "answer", "chat_template": False}
    data = DataConfig(train="openai/gsm8k:main", eval="openai/gsm8k:main", **named)
    pool = load_prompts(data, tokenizer, split="train")
    assert [prompt.text for prompt in pool] == ["0+1=", "1+1=", "0+1=", "1+1=", "2+1="]
    assert pool[2].place == f"{snapshot}/main/train-00001-of-00002.jsonl, line 1"
    assert "/main/test-00000" in load_prompts(data, tokenizer, split="eval")[0].place
    assert len(load_prompts(DataConfig(train="openai/gsm8k:socratic", **named), tokenizer, split="train")) == 1
    for name, words in (("openai/gsm8k", "several configurations"), ("openai/gsm8k:maine", "configuration 'maine'")):
        with pytest.raises(UserError, match=words) as caught:
            data_files(name, "data.train", split="train")
        assert "main, socratic" in caught.value.remedy
    with pytest.raises(UserError, match="HF_HUB_OFFLINE") as caught:
        data_files("openai/gsm8k:main:validation", "data.eval", split="test")
    assert caught.value.setting == "data.eval"
    (snapshot / "main/train-00001-of-00002.jsonl").unlink()
    with pytest.raises(UserError, match="is not whole") as caught:
        data_files("openai/gsm8k:main", "data.train", split="train")
    assert "`hf download openai/gsm8k --repo-type dataset`" in caught.value.remedy


def test_a_data_set_that_declares_nothing_is_read_by_the_names_of_its_files(cache: Path) -> None:
    publish(cache, "dataset", "org/plain", {"rows.jsonl": rows(1)})
    publish(cache, "dataset", "org/parted", {"data/train-00000-of-00001.jsonl": rows(1), "data/test.jsonl": rows(1)})
    publish(cache, "dataset", "org/named", {"en/test.jsonl": rows(1), "de/test.jsonl": rows(1), "de/training.txt": b""})
    declared = b"---\nconfigs:\n- {config_name: both, data_files: '*/train-*.jsonl'}\n---\n"
    parts = {f"{place}/train-00000-of-00001.jsonl": rows(1) for place in ("en", "fr")}
    publish(cache, "dataset", "org/both", {"README.md": declared, **parts})
    found = {
        name: [file.as_posix().partition(REVISION)[2] for file in data_files(name, "data.train", split="train")]
        for name in ("org/plain", "org/parted", "org/parted::test", "org/named:de:test", "org/both")
    }
    assert found == {
        "org/plain": ["/rows.jsonl"],
        "org/parted": ["/data/train-00000-of-00001.jsonl"],
        "org/parted::test": ["/data/test.jsonl"],
        "org/named:de:test": ["/de/test.jsonl"],
        "org/both": ["/en/train-00000-of-00001.jsonl", "/fr/train-00000-of-00001.jsonl"],
    }
