import pytest
import torch
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dppo.config import LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.parallel.layout import (
    compute_capacity_multiple,
    count_interleaved_packs,
    list_stage_layers,
    resolve_layout,
)


@pytest.mark.parametrize(
    ("cp", "max_tokens", "cuda", "multiple"),
    [
        (1, 4096, False, 1),
        (1, 4096, True, 128),
        (3, 4096, False, 6),
        (3, 3840, True, 384),
        # 4,096 is no multiple of 384, and packs of 3,840 might not hold the longest sequence.
        (3, 4096, True, 6),
    ],
)
def test_packs_on_gpus_are_whole_tiles_where_the_limit_allows(cp, max_tokens, cuda, multiple):
    assert compute_capacity_multiple(LayoutConfig(cp=cp), max_tokens, cuda=cuda) == multiple


@pytest.mark.parametrize(
    ("layers", "layout"),
    [
        (12, LayoutConfig(pp=2, vpp=3)),
        (94, LayoutConfig(pp=8, first_stage_layers=11, last_stage_layers=11)),
        (12, LayoutConfig(pp=3, vpp=2, first_stage_layers=2, last_stage_layers=6)),
        (11, LayoutConfig(pp=3, last_stage_layers=3)),
        (10, LayoutConfig(pp=3, first_stage_layers=2)),
    ],
)
def test_stages_have_the_layers_of_megatron(layers, layout):
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        pipeline_dtype=torch.float32,
    )
    placed: list[int] = []
    for stage in range(layout.pp):
        chunks = list_stage_layers(layers, stage, layout)
        assert len(chunks) == layout.vpp
        for turn, chunk in enumerate(chunks):
            place = {"vp_stage": turn if layout.vpp > 1 else None, "pp_rank": stage}
            assert chunk.start == get_transformer_layer_offset(config, **place)
            assert len(chunk) == get_num_layers_to_build(config, **place)
            placed += chunk
    assert sorted(placed) == list(range(layers))


@pytest.mark.parametrize(
    "layout",
    [
        LayoutConfig(pp=5),
        LayoutConfig(pp=2, vpp=4),
        LayoutConfig(pp=2, first_stage_layers=5, last_stage_layers=6),
    ],
)
def test_indivisible_layers_are_refused(layout):
    with pytest.raises(ValueError, match="12 layers"):
        list_stage_layers(12, 0, layout)


@pytest.mark.parametrize(("packs", "stages", "size"), [(3, 2, 3), (4, 2, 2), (5, 2, 3), (9, 4, 5)])
def test_interleaved_packs_leave_no_group_below_the_stages(packs, stages, size):
    assert count_interleaved_packs(packs, stages) == size


@pytest.mark.parametrize(
    ("layout", "ranks", "setting", "multiple"),
    [
        (LayoutConfig(ep=4, dp=2), 2, "layout.ep", 4),
        (LayoutConfig(etp=2, dp=1), 1, "layout.etp", 2),
        (LayoutConfig(tp=2, ep=4, etp=1, pp=2), 12, "layout.ep", 2),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(layout, ranks, setting, multiple):
    with pytest.raises(UserError, match=f"layout.dp to a multiple of {multiple}") as caught:
        resolve_layout(layout, ranks)
    assert caught.value.setting == setting
    assert resolve_layout(replace(layout, dp=None), layout.min_ranks).dp is not None
