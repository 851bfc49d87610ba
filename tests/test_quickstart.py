"""The examples are copied whole or not at all, and the quickstart repeats no finished part."""

from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.config import Config


def test_examples_replace_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["configs", "--copy", str(tmp_path)]
    assert main(command) == main(command) == 0
    (tmp_path / "configs/quickstart.yaml").unlink()
    (tmp_path / "scripts/slurm/job.sh").write_text("mine\n")
    assert main(command) == 2
    assert "job.sh\n  problem  is there already, and differs\n" in capsys.readouterr().err
    assert not (tmp_path / "configs/quickstart.yaml").exists()


def test_the_warm_up_is_repeated_until_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in records what would be trained; tests/test_wheel.py trains, scripts/quickstart.sh
    also warms up."""
    codes, begun = [1, 0, 0, 0], list[tuple[str, Config]]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "megatron_dppo.launch.start.run", lambda *given: begun.append(given) or codes.pop(0)
    )
    words = ["quickstart", "loss.name=dapo", "sft.steps=9"]
    assert main(words) == 1 and main(words) == 0
    assert [command for command, _ in begun] == ["sft", "sft", "train"]
    warm_up, train = begun[1][1], begun[2][1]
    assert (warm_up.sft.steps, warm_up.loss.name, train.loss.name) == (9, "grpo", "dapo")
    assert (Path(str(warm_up.model.path)) / "model.safetensors").is_file()
    assert warm_up.sft.out == train.model.path == "runs/quickstart/warm"
    Path("runs/quickstart/warm").mkdir()
    Path("runs/quickstart/warm/config.json").touch()
    assert main(words) == 0 and [command for command, _ in begun[2:]] == ["train", "train"]


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (4, 2)])
def test_one_gpu_gets_one_rank(
    gpus: int, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Config]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(
        "megatron_dppo.launch.start.run", lambda command, config: started.append(config) or 0
    )
    assert main(["quickstart"]) == main(["quickstart", "layout.tp=4"]) == 0
    warm_up, train, *_, given = (config.layout for config in started)
    assert (warm_up.tp, warm_up.dp, train.tp, given.tp) == (1, ranks, ranks, 4)
