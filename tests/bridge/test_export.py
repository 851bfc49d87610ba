"""An export loads with stock transformers, and is there whole or not at all."""

import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.bridge.export import check_destination, export_hf, write_stream
from megatron_dppo.bridge.hf_directory import add_stop_tokens, copy_config_and_tokenizer, plan_files
from megatron_dppo.bridge.safetensors_files import INDEX
from megatron_dppo.config import LayoutConfig
from megatron_dppo.data.tokenizer import NAMED_TEMPLATES, load_tokenizer
from megatron_dppo.errors import UserError
from tests.bridge.conversions import contents
from tests.bridge.directories import Sizes, assert_same_for_transformers, logits, write_qwen3
from tests.bridge.on_ranks import loaded_policy
from tests.ranks import RankPool
from tests.rollout.scripted import world_of
from tests.small_runs import write_run

TP2 = LayoutConfig(tp=2)
SHARD_BYTES, LARGE = 40_000, 10**9


def export(
    rank: int,
    size: int,
    source: Path,
    out: Path,
    layout: LayoutConfig,
    shard_bytes: int,
    dtype: torch.dtype,
) -> None:
    model, _, world = loaded_policy(source, layout)
    export_hf(model, world, source=source, out=out, max_shard_bytes=shard_bytes, dtype=dtype)


def test_transformers_loads_an_export_and_a_later_export(ranks: RankPool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "run" / "hf"
    write_qwen3(source, Sizes())
    ranks.run(2, export, source, out, TP2, SHARD_BYTES, torch.float32)
    assert_same_for_transformers(out, source)
    assert (out / INDEX).exists()
    draft = out.with_name(".hf.writing")
    draft.mkdir()
    (draft / "left by a kill").touch()
    ranks.run(2, export, source, out, TP2, LARGE, torch.bfloat16)
    assert [file.name for file in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["hf"]
    written, stored = (load_file(folder / "model.safetensors") for folder in (out, source))
    assert all(torch.equal(written[name], stored[name].bfloat16()) for name in stored)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert logits(out).dtype == torch.bfloat16


def test_an_export_lists_the_tokenizers_end_of_turn(tmp_path: Path) -> None:
    source = write_run(tmp_path / "run") / "hf"
    (source / NAMED_TEMPLATES).mkdir()
    (source / NAMED_TEMPLATES / "tool_use.jinja").write_text("{{ tools }}")
    config, end = (
        json.loads((source / "config.json").read_text()),
        load_tokenizer(source).eos_token_id,
    )
    tokenizer = (source / "tokenizer.json").read_bytes()
    for number, (stops, settings, readable, listed) in enumerate(
        (
            (7, {"top_k": 5, "eos_token_id": 8}, True, [8, end]),
            (7, {"top_k": 5, "eos_token_id": [end, 8]}, True, [end, 8]),
            (7, None, True, [7, end]),
            (None, {"top_k": 5}, True, [end]),
            (7, {"top_k": 5, "eos_token_id": 8}, False, 8),
        )
    ):
        (source / "config.json").write_text(json.dumps(config | {"eos_token_id": stops}))
        (source / "generation_config.json").unlink(missing_ok=True)
        if settings is not None:
            (source / "generation_config.json").write_text(json.dumps(settings))
        (source / "tokenizer.json").write_bytes(tokenizer if readable else b"{")
        (out := tmp_path / str(number)).mkdir()
        copy_config_and_tokenizer(source, out, torch.float32)
        add_stop_tokens(out)
        file = "config.json" if settings is None else "generation_config.json"
        written = json.loads((out / file).read_text())
        assert written["eos_token_id"] == listed and (settings is None or written["top_k"] == 5)
        assert (out / NAMED_TEMPLATES / "tool_use.jinja").read_text() == "{{ tools }}"
    check_destination(source, out, 0)


def export_in_little_room(
    rank: int, size: int, source: Path, out: Path, layout: LayoutConfig
) -> str:
    """Export where rank 0 may write no file beyond 20 kB, as on a full disk. Returns the error."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError) as caught:
            export(rank, size, source, out, layout, LARGE, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(caught.value)


def test_a_failure_is_raised_on_every_rank_and_changes_nothing(
    ranks: RankPool, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_qwen3(source, Sizes())
    ranks.run(1, export, source, out, LayoutConfig(), LARGE, torch.float32)
    before = contents(tmp_path)
    errors = ranks.run(
        4, export_in_little_room, source, out, LayoutConfig(tp=2, dp=2), timeout=60.0
    )
    assert len({*errors}) == 1
    assert errors[0].startswith(f"run.dir = {out}: was not written ([Errno 27] File too large)")
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"out", "source"}


def test_an_impossible_destination_is_refused_beforehand(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/thesis.tex").touch()
    refusals = (
        (tmp_path, 1, "is read from there"),
        (tmp_path / "hf", 10**18, "GiB free"),
        (tmp_path / "work", 1, "is there already and is no model directory"),
    )
    for out, size, problem in refusals:
        with pytest.raises(UserError, match=problem) as caught:
            check_destination(tmp_path, out, size)
        assert caught.value.setting == "run.dir"


def test_a_failing_writer_takes_the_stream_to_its_end(tmp_path: Path) -> None:
    """Other ranks take part in the stream, and would wait."""
    shape = write_qwen3(tmp_path / "source", Sizes())
    (tmp_path / "file").touch()
    buckets = iter([{}, {}, {}])
    plan = plan_files(shape, torch.float32)
    with pytest.raises(UserError, match="Not a directory"):
        write_stream(
            buckets, world_of(1, 0), plan, tmp_path / "file" / "hf", lambda draft: None, "run.dir"
        )
    assert not [*buckets]
