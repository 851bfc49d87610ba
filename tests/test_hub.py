"""Published models and data sets are found in the hub's cache by id; a missing one is named with
its download."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from huggingface_hub import constants

from megatron_dppo.cli import main
from megatron_dppo.config import DataConfig
from megatron_dppo.data.prompts import PromptPool, load_prompts
from megatron_dppo.data.tokenizer import Tokenizer, load_tokenizer
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.memory import resolve_shape
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
    """An empty cache of the hub, on a machine that is offline, and a working directory of its
    own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def rows(count: int) -> bytes:
    return b"".join(
        json.dumps({"question": f"{i}+1=", "answer": str(i + 1)}).encode() + b"\n"
        for i in range(count)
    )


def test_a_run_is_checked_with_ids_and_no_network(
    cache: Path, model_files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    publish(cache, "model", "Org/Tiny", model_files)
    publish(cache, "dataset", "org/sums", {"train.jsonl": rows(9), "test.jsonl": rows(3)})
    words = """
    model.path=Org/Tiny data.train=org/sums data.eval=org/sums data.prompt_key=question data.label_key=answer
    rollout.prompts_per_step=8 data.max_prompt_tokens=32 rollout.max_response_tokens=16 --check=1
    """
    assert main(["train", *words.split()]) == 0
    assert "0 of 100 steps are done" in capsys.readouterr().out


def test_a_policy_is_named_by_id_folder_or_run(
    cache: Path, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    snapshot = publish(cache, "model", "Org/Tiny", model_files)
    assert policy_folder("Org/Tiny") == snapshot
    assert (
        resolve_shape("Org/Tiny").num_layers == 2
        and len(load_tokenizer(policy_folder("Org/Tiny"))) > 9
    )
    (tmp_path / "run").mkdir()
    assert policy_folder("run") == Path("run")
    (tmp_path / "run" / "hf").symlink_to(snapshot)
    assert policy_folder("run") == Path("run/hf") and policy_folder("run/hf") == Path("run/hf")
    paths = ("/a/b", "./a/b", "a", "a/b/c", "data/rows.parquet")
    assert not any(map(is_id, paths)) and is_id("openai/gsm8k")


def test_an_absent_folder_is_named_with_its_download(cache: Path) -> None:
    """Shipped configurations name such folders."""
    with pytest.raises(UserError) as caught:
        policy_folder("models/Qwen3-4B")
    assert "`hf download Qwen/Qwen3-4B --local-dir models/Qwen3-4B`" in caught.value.remedy
    with pytest.raises(UserError, match="no directory"):
        policy_folder("a" * 5000)  # longer than any name of a file


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_an_unfinished_policy_is_named_with_its_download(
    cache: Path, model_files: dict[str, bytes], missing: str
) -> None:
    publish(
        cache,
        "model",
        "Org/Tiny",
        {name: content for name, content in model_files.items() if name != missing},
    )
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set") as caught:
        policy_folder("Org/Tiny", "loss.distillation.teacher")
    assert (caught.value.setting, caught.value.value) == ("loss.distillation.teacher", "Org/Tiny")
    assert "`hf download Org/Tiny`" in caught.value.remedy
    if missing == "model.safetensors":
        assert policy_folder("Org/Tiny", weights=False).is_dir()


def test_a_missing_shard_is_noticed(cache: Path, model_files: dict[str, bytes]) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    parts = {
        "config.json": model_files["config.json"],
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    publish(cache, "model", "Org/Cut", {**parts, "model-1.safetensors": b""})
    with pytest.raises(UserError, match="is incomplete"):
        policy_folder("Org/Cut")
    publish(
        cache, "model", "Org/All", {**parts, "model-1.safetensors": b"", "model-2.safetensors": b""}
    )
    assert policy_folder("Org/All").is_dir()


def test_a_data_set_is_read_by_its_id(cache: Path, tokenizer: Tokenizer) -> None:
    files = {
        f"main/{split}-0000{i}-of-00002.jsonl": rows(2 + i)
        for split in ("train", "test")
        for i in range(2)
    }
    files |= {"README.md": GSM8K.encode(), "socratic/train-00000-of-00001.jsonl": rows(1)}
    snapshot = publish(cache, "dataset", "openai/gsm8k", files)

    def load(name: str, split: str) -> PromptPool:
        named = {"prompt_key": "question", "label_key": "answer", "chat_template": False}
        return load_prompts(DataConfig(train=name, eval=name, **named), tokenizer, split=split)

    pool = load("openai/gsm8k:main", "train")
    assert [prompt.text for prompt in pool] == ["0+1=", "1+1=", "0+1=", "1+1=", "2+1="]
    assert pool[2].place == f"{snapshot}/main/train-00001-of-00002.jsonl, line 1"
    assert "/main/test-00000" in load("openai/gsm8k:main", "eval")[0].place
    for name, words in (
        ("openai/gsm8k", "several configurations"),
        ("openai/gsm8k:maine", "configuration 'maine'"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            data_files(name, "data.train", split="train")
        assert "main, socratic" in caught.value.remedy
    with pytest.raises(UserError, match="HF_HUB_OFFLINE") as caught:
        data_files("openai/gsm8k:main:validation", "data.eval", split="test")
    assert caught.value.setting == "data.eval"
    (snapshot / "main/train-00001-of-00002.jsonl").unlink()
    with pytest.raises(UserError, match="is incomplete") as caught:
        data_files("openai/gsm8k:main", "data.train", split="train")
    assert "`hf download openai/gsm8k --repo-type dataset`" in caught.value.remedy


BOTH = b"---\nconfigs:\n- {config_name: both, data_files: '*/train-*.jsonl'}\n---\n"


@pytest.mark.parametrize(
    ("name", "files", "found"),
    [
        (
            "org/parted::test",
            {"data/train-0.jsonl": b"", "data/test.jsonl": b""},
            ["data/test.jsonl"],
        ),
        (
            "org/named:de:test",
            {"en/test.jsonl": b"", "de/test.jsonl": b"", "de/training.txt": b""},
            ["de/test.jsonl"],
        ),
        (
            "org/both",
            {"README.md": BOTH, "en/train-0.jsonl": b"", "fr/train-0.jsonl": b""},
            ["en/train-0.jsonl", "fr/train-0.jsonl"],
        ),
    ],
)
def test_an_undeclared_data_set_is_read_by_file_names(
    name: str, files: dict[str, bytes], found: list[str], cache: Path
) -> None:
    snapshot = publish(cache, "dataset", name.partition(":")[0], files)
    assert [
        str(file.relative_to(snapshot)) for file in data_files(name, "data.train", split="train")
    ] == found
