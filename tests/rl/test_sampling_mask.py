"""Sampling masks in packs, in completions of parts, and with errors."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dppo.rl.pack import TrainingSample, build_pack
from megatron_dppo.rl.sampling_mask import MAX_KEPT, SamplingMask, find_mask_error, join_masks

KEPT = [[5, 9], [], [2], [7, 1, 3], [4, 8]]
TOKENS = np.array([9, 6, 2, 7, 8], np.int32)
SAMPLED = np.array([True, False, True, True, True])
MASK = SamplingMask.from_lists(KEPT)


def lists_of(mask: SamplingMask | None) -> list[list[int]]:
    assert mask is not None and mask.counts.dtype == mask.token_ids.dtype == np.int32
    parts = np.split(mask.token_ids, np.cumsum(mask.counts)[:-1])
    return [part.tolist() for part in parts] if len(mask.counts) else []


@pytest.mark.parametrize("tokens", [slice(5), slice(1, 4), slice(2, 2), np.array([4, 0, 1, 4])])
def test_a_part_of_a_mask_has_the_ids_of_its_tokens(tokens: slice | np.ndarray) -> None:
    chosen = np.arange(5)[tokens].tolist()
    assert lists_of(MASK.select(tokens)) == [KEPT[token] for token in chosen]


def test_tokens_without_kept_ids_are_counted_when_parts_are_joined() -> None:
    joined = join_masks([MASK, None, MASK.select(slice(2, 4))], [5, 2, 2])
    assert lists_of(joined) == [*KEPT, [], [], *KEPT[2:4]]
    assert join_masks([None, None], [3, 1]) is None
    assert join_masks([], []) is None


def sample_of(mask: SamplingMask | None, loss_mask: np.ndarray = SAMPLED) -> TrainingSample:
    prompt, nothing = np.array([3], np.int32), np.zeros(5, np.float32)
    return TrainingSample(
        prompt, TOKENS, nothing, loss_mask, 1.0, scale=1.0, version=0, sampling_mask=mask
    )


def test_a_pack_has_the_kept_ids_of_its_targets() -> None:
    other = SamplingMask.from_lists([[9], [1, 6], [2], [7], [8, 0]])
    samples = [sample_of(MASK), sample_of(other, np.array([True, True, False, False, True]))]
    pack = build_pack(samples, 12, pad_id=0, align=1)
    expected = [KEPT[0], *KEPT[2:], [9], [1, 6], [8, 0]]
    assert pack.kept_ids is not None and pack.kept_ids.shape == (7, 3)
    for row, target, kept in zip(pack.kept_ids.tolist(), pack.targets, expected, strict=True):
        assert row == kept + [target] * (3 - len(kept))
    assert build_pack([sample_of(None)], 8, pad_id=0, align=1).kept_ids is None
    with pytest.raises(ValueError, match="has no sampling mask"):
        build_pack([sample_of(MASK), sample_of(None)], 12, pad_id=0, align=1)


def test_a_mask_that_no_policy_could_have_is_described() -> None:
    many = SamplingMask.from_lists([[9], [], [2], [7], [8, *range(10, 10 + MAX_KEPT)]])
    missing = SamplingMask.from_lists([*KEPT[:3], [], KEPT[4]])
    elsewhere = SamplingMask.from_lists([*KEPT[:4], [9]])
    for mask, problem in (
        (None, "without them"),
        (MASK.select(slice(4)), "without them"),
        (missing, "without them"),
        (many, f"kept {MAX_KEPT + 1} ids"),
        (elsewhere, "outside its kept ids"),
    ):
        found = find_mask_error(mask, TOKENS, SAMPLED)
        assert found is not None and problem in found[0]
    assert find_mask_error(MASK, TOKENS, SAMPLED) is None
    assert find_mask_error(None, TOKENS, np.zeros(len(TOKENS), bool)) is None
