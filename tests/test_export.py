"""An export is whole, its card reports the run's results, and holds nothing of the machine."""

import os
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS
from megatron_dppo.bridge.hf_directory import build_adapter_config
from megatron_dppo.cli import main
from megatron_dppo.config.run import LoraConfig
from megatron_dppo.settings import as_yaml, load_config
from megatron_dppo.trainer.writer import CheckpointFormat, write_state
from tests.bridge.conversions import same, to_megatron, weights
from tests.report.made_up import write_run
from tests.small_runs import write_run as write_with_tokenizer

PRIVATE = (
    "model.path=/home/somebody/models/Qwen3-4B",
    "data.train=[{path: /home/somebody/my problems/train.jsonl, weight: 3}, {path: more.jsonl}]",
    "data.verifiers.arguments={judge_api_key: sk-1}",
    "data.chat_template_kwargs={enable_thinking: false, auth: sk-2}",
    "loss.distillation.teachers={math: http://u:pw@10.1.2.3:3, code: /home/somebody/coder}",
    "data.eval={hard: ~/secret place/hard.jsonl}",
    "reward.function=/home/somebody/reward.py:score",
    "loss.objective=secret place/clip.py:clip",
    "rollout.engine=sglang",
    "rollout.servers=[http://10.1.2.3:30000]",
    "rollout.launch.env=[HF_TOKEN=hf_abc]",
    "cluster.account=our-account",
    "loss.name=dapo",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with its last checkpoint after the fourth, whose weights are an untrained
    policy's."""
    folder = write_run(tmp_path_factory.mktemp("export") / "run")
    source = write_with_tokenizer(folder / "initial") / "hf"
    assert to_megatron(source, folder / "checkpoints") == 0
    (folder / "checkpoints/release").rename(folder / "checkpoints/iter_0000004")
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    (folder / "config.yaml").write_text(
        as_yaml(load_config(None, [*PRIVATE, f"run.dir={folder}", "run.steps=6"]))
    )
    return folder


def test_an_export_is_the_last_checkpoint_with_a_card(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--card"]) == 0
    assert same(weights(out), weights(run / "initial/hf"))
    AutoModelForCausalLM.from_pretrained(out)
    card = (out / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    found = yaml.safe_load(head)
    assert found["base_model"] == "Qwen/Qwen3-4B"
    assert found["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.583333
    assert (
        "`Qwen/Qwen3-4B`, trained for 4 steps of reinforcement learning on `train.jsonl, "
        "more.jsonl`" in text
    )
    measured = [line for line in text.splitlines() if "(step " in line]
    assert measured == ["| hard.jsonl | 50 | 25.0% | 58.3% [44.6, 70.9] (step 4) |"]
    for row in (
        "`loss.name` | `dapo`",
        "`reward.function` | `reward.py:score`",
        "`loss.objective` | `clip.py:clip`",
        "`model.path` | `Qwen3-4B`",
        "`data.chat_template_kwargs` | `{'auth': '…', 'enable_thinking': False}`",
    ):
        assert f"| {row} |" in text
    assert not [
        line
        for line in card.splitlines()
        for place in "/~"
        if f"`{place}" in line or f" {place}" in line
    ]
    secrets = "somebody 10.1.2.3 u:pw sk-1 sk-2 hf_abc our-account"
    assert not [
        secret
        for secret in (*secrets.split(), str(tmp_path), str(run), os.uname().nodename)
        if secret in card
    ]


def test_a_checkpoint_of_an_earlier_version_is_exported(run: Path, tmp_path: Path) -> None:
    """Its checksums have another form, so that nothing is checked."""
    old = shutil.copytree(run, tmp_path / "old")
    place = old / "checkpoints/iter_0000004"
    write_state(place, {}, CheckpointFormat("fp32", "fully_reshardable"))
    (place / CHECKSUMS).write_text('{"format": 1, "files": {}}')
    assert main(["export", str(old), str(tmp_path / "out")]) == 0
    assert same(weights(tmp_path / "out"), weights(run / "initial/hf"))


def test_an_export_replaces_only_an_earlier_export(run: Path, tmp_path: Path) -> None:
    out, command = tmp_path / "out", ["export", str(run), str(tmp_path / "out"), "--card"]
    assert main(command) == 0
    assert main(command) == 2, "out exists"
    assert main([*command, "--overwrite"]) == 0
    (out / "README.md").write_text("Somebody's own words.")
    assert main([*command, "--overwrite"]) == 2
    assert (out / "README.md").read_text() == "Somebody's own words."


def test_an_unreachable_hub_is_refused_before_writing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    assert main(["export", str(run), str(tmp_path / "out"), "--push", "me/sums"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --push = me/sums\n") and "hf_abc" not in said, said
    assert not (tmp_path / "out").exists()


def test_an_adapter_names_its_base_by_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "policy").mkdir(parents=True)
    named = [
        build_adapter_config(base, LoraConfig(rank=4))["base_model_name_or_path"]
        for base in ("models/policy", "a/b")
    ]
    assert named == [str(tmp_path / "models" / "policy"), "a/b"]
