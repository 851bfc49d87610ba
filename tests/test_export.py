"""What a run hands to others is whole, says what the run came to, and tells nothing of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from megatron_dppo.bridge.hf_directory import adapter_config
from megatron_dppo.cli import main
from megatron_dppo.config.run import LoraConfig
from megatron_dppo.report.card import model_card
from megatron_dppo.report.run import read_run
from megatron_dppo.settings import as_yaml, load_config
from tests.bridge.conversions import same, to_megatron, weights
from tests.report.made_up import write_run
from tests.small_runs import write_run as write_with_tokenizer

PRIVATE = (
    "model.path=/home/somebody/models/Qwen3-4B",
    "data.train=[{path: /home/somebody/my problems/train.jsonl, weight: 3}, {path: more.jsonl}]",
    "data.verifiers.arguments={judge_api_key: sk-1}",
    "loss.distillation.teachers={math: http://u:pw@10.1.2.3:3, code: /home/somebody/coder}",
    "data.eval={hard: ~/secret place/hard.jsonl}",
    "reward.function=/home/somebody/reward.py:score",
    "rollout.engine=sglang",
    "rollout.servers=[http://10.1.2.3:30000]",
    "rollout.launch.env=[HF_TOKEN=hf_abc]",
    "cluster.account=our-account",
    "loss.name=dapo",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, the last checkpoint after the fourth; a policy that no step has made stands for its weights."""
    folder = write_run(tmp_path_factory.mktemp("export") / "run")
    source = write_with_tokenizer(folder / "initial") / "hf"
    assert to_megatron(source, folder / "checkpoints") == 0
    (folder / "checkpoints/release").rename(folder / "checkpoints/iter_0000004")
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    (folder / "config.yaml").write_text(as_yaml(load_config(None, [*PRIVATE, f"run.dir={folder}", "run.steps=6"])))
    return folder


def test_an_export_is_the_last_checkpoint_with_a_card_of_what_it_came_to(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--card"]) == 0
    assert same(weights(out), weights(run / "initial/hf"))
    AutoModelForCausalLM.from_pretrained(out)
    _, head, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["base_model"] == "Qwen/Qwen3-4B"
    assert "`Qwen/Qwen3-4B`, trained for 4 steps of reinforcement learning on `train.jsonl, more.jsonl`" in text
    assert [line for line in text.splitlines() if "(step " in line] == [
        "| hard.jsonl | 50 | 25.0% | 58.3% [44.6, 70.9] (step 4) |"
    ]
    for name, value in (("loss.name", "dapo"), ("reward.function", "reward.py:score"), ("model.path", "Qwen3-4B")):
        assert f"| `{name}` | `{value}` |" in text
    assert "megatron-core " in text


def test_a_card_tells_nothing_of_the_machine(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--card"]) == 0
    card = (tmp_path / "out/README.md").read_text()
    for secret in ("/", "~"):
        assert not any(f"`{secret}" in line or f" {secret}" in line for line in card.splitlines()), secret
    for secret in (
        "somebody",
        "10.1.2.3",
        "u:pw",
        "sk-1",
        "hf_abc",
        "our-account",
        str(tmp_path),
        str(run),
        os.uname().nodename,
    ):
        assert secret not in card


def test_another_export_takes_the_place_of_ours_and_of_nobody_else_s(run: Path, tmp_path: Path) -> None:
    out, command = tmp_path / "out", ["export", str(run), str(tmp_path / "out"), "--card"]
    assert main(command) == 0
    assert main(command) == 2, "it is there already"
    assert main([*command, "--overwrite"]) == 0
    (out / "README.md").write_text("Somebody's own words.")
    assert main([*command, "--overwrite"]) == 2
    assert (out / "README.md").read_text() == "Somebody's own words."


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": True}, {"ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_a_hub_that_is_not_reached_is_said_before_anything_is_written(
    run: Path,
    tmp_path: Path,
    offline: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in offline.items():  # read from the environment as the client is imported
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    assert main(["export", str(run), str(tmp_path / "out"), "--push", "me/sums"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --push = me/sums\n"), said
    assert "leave --push out" in " ".join(said.split()) and "hf_abc" not in said
    assert not (tmp_path / "out").exists()


def test_names_on_a_card_are_words_and_no_places(tmp_path: Path) -> None:
    """Paths with a space, and names that Markdown or HTML would take for their own."""
    folder = write_run(tmp_path / "run")
    words = ["data.train=my problems/<b>new|er</b>.jsonl", "model.path=my models/`x`\n# y"]
    (folder / "config.yaml").write_text(as_yaml(load_config(None, [*words, f"run.dir={folder}", "run.steps=6"])))
    _, head, text = model_card(read_run(folder, "run"), step=4, name="a\n<script>_b_").split("---\n", 2)
    assert text.startswith("# a \\<script\\>\\_b\\_\n") and "my problems" not in text and "my models" not in text
    assert [line for line in text.splitlines() if line.startswith("# ")] == ["# a \\<script\\>\\_b\\_"]
    (result,) = yaml.safe_load(head)["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "accuracy", "name": "held-out accuracy", "value": 0.583333}]
    (folder / "config.yaml").write_text(as_yaml(load_config(None, ["model.path=models/policy", f"run.dir={folder}"])))
    assert (
        yaml.safe_load(model_card(read_run(folder, "r"), step=4, name="r").split("---\n")[1])["base_model"]
        == "models/policy"
    )


def test_an_adapter_names_its_base_by_a_path_that_holds_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "policy").mkdir(parents=True)
    named = [adapter_config(base, LoraConfig(rank=4))["base_model_name_or_path"] for base in ("models/policy", "a/b")]
    assert named == [str(tmp_path / "models" / "policy"), "a/b"]
