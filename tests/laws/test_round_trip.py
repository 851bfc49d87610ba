"""Law 4: Hugging Face → Megatron in any layout → Hugging Face is the identity, bit by bit, on every
route."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron_dppo.bridge import chunks, torch_dist
from megatron_dppo.bridge.export import export_hf
from megatron_dppo.bridge.load import load_checkpoint
from megatron_dppo.bridge.mapping import expected_tensors
from megatron_dppo.bridge.safetensors_files import INDEX, check_weights
from megatron_dppo.config import Config, LayoutConfig, LossConfig, replace
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.bridge.conversions import contents, same, to_hf, to_megatron, weights
from tests.bridge.directories import FAMILIES, Sizes
from tests.bridge.on_ranks import assert_complete, size_of, stream_back
from tests.ranks import RankPool
from tests.steps import build, config_for


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    groups, queries = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Sizes(
        vocab_size=draw(st.integers(20, 300)),
        hidden_size=groups * queries * draw(st.integers(1, 5)),
        intermediate_size=draw(st.integers(1, 30)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=groups * queries,
        num_key_value_heads=groups,
        head_dim=2 * draw(st.integers(1, 4)),
        tie_word_embeddings=draw(st.booleans()),
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12, deadline=None)
@given(
    sizes=sizes(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shard_kb=st.sampled_from([2, 20, 10**6]),
    file_bytes=st.sampled_from([1, 20_000, torch_dist.FILE_BYTES]),
    buffer_bytes=st.sampled_from([1, 100, chunks.BUFFER_BYTES]),
    workers=st.integers(1, 3),
)
def test_files_there_and_back_are_the_same(
    family: str,
    sizes: Sizes,
    dtype: torch.dtype,
    shard_kb: int,
    file_bytes: int,
    buffer_bytes: int,
    workers: int,
) -> None:
    with (
        TemporaryDirectory() as folder,
        patch.object(torch_dist, "FILE_BYTES", file_bytes),
        patch.object(chunks, "BUFFER_BYTES", buffer_bytes),
    ):
        there, back, source = (Path(folder, name) for name in ("megatron", "back", "source"))
        shape = FAMILIES[family](source, sizes, dtype=dtype, shard_size=f"{shard_kb}KB")
        options = ["--workers", str(workers), "--verify", "tensors"]
        assert to_megatron(source, there, *options) == 0
        assert to_hf(there, back, "--shard-gb", str(shard_kb * 1e-6), *options) == 0
        assert same(weights(back), weights(source))
        check_weights(back, shape)
        shards = [load_file(file) for file in back.glob("*.safetensors")]
        assert (len(shards) > 1) == (back / INDEX).exists()
        assert all(
            sum(t.nbytes for t in s.values()) <= shard_kb * 1000 or len(s) == 1 for s in shards
        )


ONE, DP2 = LayoutConfig(dp=1), LayoutConfig(dp=2)
TP2PP2 = LayoutConfig(tp=2, pp=2, dp=1, sequence_parallel=True)
TP4 = LayoutConfig(tp=4, dp=1, sequence_parallel=True)
PP2VPP2 = LayoutConfig(pp=2, vpp=2, dp=1)
ROUTES = {
    "Qwen3": ("Qwen3", Sizes(), [ONE, DP2, TP2PP2, TP4]),
    "Qwen2.5 tied, a rank of mere padding": (
        "Qwen2.5",
        Sizes(vocab_size=50, tie_word_embeddings=True),
        [TP2PP2],
    ),
    "Qwen3-MoE": ("Qwen3-MoE", Sizes(), [TP2PP2]),
}
"""A family, its sizes, and the layouts that read what the tools have written, and write what they
read."""


def pass_on(rank: int, size: int, config: Config, converted: Path) -> list[str]:
    """Save and export what Megatron's own loader reads of a converted checkpoint.

    Returns:
        Parameters that differ from those of the loader of directories.
    """
    world, _, policy = build(config)
    (chunk,) = policy.actor.chunks
    expected = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
    for parameter in chunk.parameters():
        parameter.data.fill_(torch.nan)
    load_checkpoint([chunk], converted, world)
    Checkpoints(config, world).save(policy.actor, 3, {})
    source, out = Path(config.model.path), Path(config.run.dir, "exported")
    export_hf([chunk], world, source=source, out=out, max_shard_bytes=40_000, dtype=torch.float32)
    return [
        name
        for name, parameter in chunk.named_parameters()
        if not torch.equal(parameter, expected[name])
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_leads_back_to_the_directory(
    route: str, ranks: RankPool, tmp_path: Path
) -> None:
    family, sizes, layouts = ROUTES[route]
    policy, converted, exported = tmp_path / "policy", tmp_path / "megatron", []
    shape = FAMILIES[family](policy, sizes)
    assert to_megatron(policy, converted) == 0
    for number, layout in enumerate(layouts):
        run, count = tmp_path / str(number), size_of(layout)
        config = config_for(policy, layout, LossConfig(), 64, distributed=True)
        config = replace(config, run=replace(config.run, dir=str(run)))
        assert ranks.run(count, pass_on, config, converted) == [[]] * count
        assert to_hf(run / "checkpoints", run / "hf") == 0
        for back in (run / "hf", run / "exported"):
            assert same(weights(back), weights(policy))
            assert weights(back).keys() == expected_tensors(shape).keys()
        exported.append(contents(run / "exported"))
    assert all(files == exported[0] for files in exported), "the same bytes from every layout"


STREAMS = {
    "Qwen3": (torch.float32, {}, {}, [ONE, TP2PP2, PP2VPP2]),
    "Qwen2.5": (torch.bfloat16, {"vocab_size": 50, "tie_word_embeddings": True}, {}, [TP2PP2, TP4]),
    "Qwen3-MoE": (
        torch.bfloat16,
        {},
        {"experts": 6},
        [
            LayoutConfig(tp=2, etp=1, sequence_parallel=True),
            LayoutConfig(ep=2, tp=2, etp=1, sequence_parallel=True),
            LayoutConfig(ep=2, tp=2, dp=2, sequence_parallel=True),
            LayoutConfig(ep=2, pp=2, vpp=2, dp=2),
            LayoutConfig(ep=2, dp=4),
        ],
    ),
}
"""Type, sizes and experts of a family's policy, and layouts. With 50 tokens, a rank holds mere
padding."""


@pytest.mark.parametrize("family", STREAMS)
def test_a_stream_is_the_identity_in_every_layout(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    dtype, sizes, experts, layouts = STREAMS[family]
    shape = FAMILIES[family](tmp_path, Sizes(num_hidden_layers=4, **sizes), dtype=dtype, **experts)
    name = "bf16" if dtype is torch.bfloat16 else "fp32"
    for layout in layouts:
        assert_complete(
            ranks.run(size_of(layout), stream_back, tmp_path, layout, name), layout, shape
        )
