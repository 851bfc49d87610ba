"""Scoring that was killed goes on from its sums to the same scores, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.cli import main
from megatron_dppo.compress import calibration
from megatron_dppo.compress.calibration import Accumulator, Batch, batches, count_sequences
from megatron_dppo.compress.choose import shapley_values
from megatron_dppo.compress.reader import Reader, Whole, remove_greedily
from megatron_dppo.config import Config, LayoutConfig, ModelConfig, PackConfig
from megatron_dppo.data.prompts import WorkedAnswer
from megatron_dppo.models.shape import read_shape
from megatron_dppo.parallel.world import initialize
from megatron_dppo.trainer.assemble import assemble_frozen
from tests.commands import Command
from tests.ranks import RankPool

SMALL = 16
"""Tokens of a batch or a pack, of which the four sequences make two or more."""


class KilledError(Exception):
    pass


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are written after every batch."""
    monkeypatch.setattr(calibration, "KEEP_EVERY_S", 0.0)
    monkeypatch.setattr(calibration, "BATCH_TOKENS", SMALL)


def die_after(writes: int) -> None:
    """This process, or the second of the ranks that it starts, is killed while it writes sums for so manyth a time."""
    left, replacing_file = writes, calibration.replacing_file

    @contextmanager
    def dying(file: Path) -> Iterator[Path]:
        nonlocal left
        with replacing_file(file) as partial:
            yield partial
            left -= 1
            if left < 0 and os.environ.get("RANK") in (None, "1"):
                os.kill(os.getpid(), signal.SIGKILL)

    calibration.replacing_file, calibration.KEEP_EVERY_S, calibration.BATCH_TOKENS = dying, 0.0, SMALL


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sequences") / "sums.jsonl"
    rows = [{"prompt": f"{n}+{n}+{n}=", "response": f"{2 * n}+{n}={3 * n}#{3 * n}"} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def all_of(reader: Reader, measures: Sequence[Any] = ("loss", "logits")) -> dict[str, Any]:
    """All that scores are made of."""
    activity = reader.activity()
    found = {field.name: getattr(activity, field.name).tolist() for field in fields(activity)}
    found |= {measure: shapley_values(reader, measure, 0, seed=1) for measure in measures}
    said: list[str] = []
    removed = remove_greedily(reader, 2, "block", say=said.append)
    return found | {"greedy": removed, "said": said, "loss": reader.loss()}


def killed_after(count: int, of: Accumulator) -> Accumulator:
    def advance(_: float, __: str = "") -> None:
        nonlocal count
        count -= 1
        if count < 0:
            raise KilledError

    of.advance = advance
    return of


def test_every_score_goes_on_from_any_batch(
    model: Any, policy: Path, answers: list[WorkedAnswer], tmp_path: Path
) -> None:
    read = list(batches(answers, max_tokens=512, device=torch.device("cpu")))
    assert len(read) > 2

    def found(of: Accumulator) -> dict[str, Any]:
        return all_of(Whole(model, read_shape(policy), read, of))

    def attempt() -> dict[str, Any] | None:
        try:
            return found(killed_after(3, Accumulator(tmp_path / "sums")))
        except KilledError:
            return None

    whole = Accumulator()
    expected, attempts = found(whole), 1
    while (found_at_last := attempt()) is None:  # each goes on from the one before, and is killed three batches later
        attempts += 1
        assert attempts < whole.read
    assert found_at_last == expected and attempts > 10
    last = Accumulator(tmp_path / "sums")
    assert found(last) == expected
    assert last.read == whole.read, "none is counted twice"


def test_what_routers_do_goes_on_from_any_batch(mixture: Path, answers: list[WorkedAnswer], tmp_path: Path) -> None:
    model, shape = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval(), read_shape(mixture)
    read = list(batches(answers, max_tokens=512, device=torch.device("cpu")))
    expected = Whole(model, shape, read).activity()
    with pytest.raises(KilledError):
        Whole(model, shape, read, killed_after(1, Accumulator(tmp_path / "sums"))).activity()
    passes = Accumulator(tmp_path / "sums")
    assert 0 < passes.read < len(answers)
    found = Whole(model, shape, read, passes).activity()
    assert torch.equal(found.experts, expected.experts) and torch.equal(found.choices, expected.choices)


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("other options", "has sums of another --keep, which are not used"),
        ("torn", "has damaged sums, which are not used"),
        ("no folder", "sums cannot be kept"),
        ("full disk", "sums cannot be kept"),
    ],
)
def test_sums_that_are_of_no_use_are_said_to_be(
    model: Any, policy: Path, read: list[Batch], tmp_path: Path, capsys: pytest.CaptureFixture[str], why: str, said: str
) -> None:
    folder = tmp_path / "sums"
    if why == "no folder":
        folder.touch()
    elif why == "full disk":
        folder.mkdir()
        (folder / "rank-0.0.pt.partial").symlink_to("/dev/full")
    else:
        Whole(model, read_shape(policy), read, Accumulator(folder, {"--keep": 0.5})).loss()
    if why == "torn":
        for file in folder.iterdir():
            file.write_bytes(file.read_bytes()[:-9])
    again = Accumulator(folder, {"--keep": 0.75 if why == "other options" else 0.5})
    expected = Whole(model, read_shape(policy), read).loss()
    assert [Whole(model, read_shape(policy), read, again).loss() for _ in range(3)] == [expected] * 3
    assert again.read == 3 * count_sequences(read)
    assert capsys.readouterr().err.count(said) == 1
    assert not list(tmp_path.rglob("*.partial"))


def in_shards(
    rank: int, size: int, path: Path, layout: LayoutConfig, answers: list[WorkedAnswer], folder: Path
) -> None:
    from megatron_dppo.compress import live

    calibration.KEEP_EVERY_S, live.STRETCH = 0.0, 1
    config = Config(model=ModelConfig(path=str(path)), layout=layout, pack=PackConfig(max_tokens=SMALL))
    world = initialize(layout, seed=1, timeout_s=60.0)
    parts = assemble_frozen(config, world, temperature=1.0)

    def found(of: Accumulator) -> str:
        return str(all_of(live.Live(parts, answers, 15, of), ["loss"]))  # a text, since nan is not equal to itself

    whole = Accumulator()
    expected = found(whole)
    for count in (1, 7):
        with pytest.raises(KilledError):
            found(killed_after(count, Accumulator(folder, {}, world)))
        if rank == 1:  # killed while the other had written already
            max(folder.glob("rank-1.*.pt"), key=lambda file: file.stat().st_mtime_ns).unlink()
    resumed = Accumulator(folder, {}, world)
    assert 0 < resumed.read < whole.read
    assert found(resumed) == expected
    assert resumed.read == whole.read


def test_ranks_go_on_together_where_one_has_written_less(
    ranks: RankPool, policy: Path, answers: list[WorkedAnswer], tmp_path: Path
) -> None:
    layouts = LayoutConfig(tp=2, dp=1), LayoutConfig(pp=2, vpp=2, dp=1)
    ranks.in_turn(2, *((in_shards, policy, layout, answers, tmp_path / f"pp{layout.pp}") for layout in layouts))


def read_by(said: str) -> tuple[int, int]:
    """Sequences that were read before, and by the command that said so."""
    before = re.search(r"goes on from the sums of ([\d,]+) sequences", said)
    (read,) = re.findall(r"^sequences: ([\d,]+) in", said, re.MULTILINE)
    return (int(before[1]) if before else 0), int(read)


TWO_STAGES = ("--method", "2ssp", "--keep", "0.6", "--multiple", "8", "--zero-attention")


def command(policy: Path, out: Path, sequences: Path, words: Sequence[str] = TWO_STAGES) -> list[str]:
    return ["compress", str(policy), str(out), "--calibrate", str(sequences), "--sequences", "2", *words]


def made(out: Path) -> tuple[bytes, bytes]:
    return (out / "compress.json").read_bytes(), (out / "model.safetensors").read_bytes()


def test_a_command_that_was_killed_goes_on(
    policy: Path, sequences: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """2ssp has passes of activity, of losses without attention that depend on each other, and of two losses."""
    ours = shutil.copytree(policy, tmp_path / "policy")
    assert main(command(ours, tmp_path / "whole", sequences)) == 0
    _, all_read = read_by(capfd.readouterr().err)
    typed = ["megatron-dppo", *command(ours, tmp_path / "out", sequences)]
    assert Command(typed, tmp_path / "log", before=partial(die_after, 9)).exit_code() == -signal.SIGKILL
    folder = tmp_path / ".out.scoring"
    assert folder.is_dir() and not (tmp_path / "out").exists()
    shutil.copytree(folder, tmp_path / ".other.scoring")
    capfd.readouterr()
    assert main(command(ours, tmp_path / "out", sequences)) == 0
    before, read = read_by(capfd.readouterr().err)
    assert before > 0 and before + read == all_read
    assert made(tmp_path / "out") == made(tmp_path / "whole")
    assert not folder.exists(), "they are of no use any more"

    weights = ours / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # which may be others
    assert main(command(ours, tmp_path / "other", sequences)) == 0
    said = capfd.readouterr().err
    assert "has sums of another MODEL, which are not used" in said and f"\nsequences: {all_read} in" in said


def test_ranks_that_were_killed_go_on_to_what_one_process_writes(
    policy: Path, sequences: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command(policy, tmp_path / "whole", sequences)) == 0
    whole = json.loads((tmp_path / "whole" / "compress.json").read_text())
    _, all_read = read_by(capfd.readouterr().err)
    typed = ["megatron-dppo", *command(policy, tmp_path / "out", sequences), "--layout", "tp=2,dp=1"]
    assert Command(typed, tmp_path / "killed", before=partial(die_after, 4)).exit_code() == 137
    log = tmp_path / "log"
    assert Command(typed, log).exit_code() == 0, log.read_text()
    before, read = read_by(log.read_text())
    assert before > 0 and before + read == all_read
    shards = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert shards == {
        name: pytest.approx(value, rel=1e-5) if name.startswith("loss") else value for name, value in whole.items()
    }
    assert made(tmp_path / "out")[1] == made(tmp_path / "whole")[1]
    assert not (tmp_path / ".out.scoring").exists()
