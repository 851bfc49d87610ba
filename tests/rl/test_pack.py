from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rl.pack import TrainingSample, build_pack, path_to

PAD = 999


def sample(
    prompt: int, response: int, first: int = 0, advantage: float = 1.0, scale: float = 1.0, version: int = 0
) -> TrainingSample:
    """Prompt tokens first, first + 1, …, then response tokens from 100 + first on."""
    return TrainingSample(
        prompt_ids=np.arange(first, first + prompt, dtype=np.int32),
        response_ids=np.arange(100 + first, 100 + first + response, dtype=np.int32),
        engine_logprobs=-np.arange(1, response + 1, dtype=np.float32),
        loss_mask=np.ones(response, bool),
        advantage=advantage,
        scale=scale,
        version=version,
    )


def test_a_pack_of_two_samples_written_out():
    pack = build_pack(
        [sample(2, 3, advantage=0.5, scale=0.1), sample(1, 2, first=10, version=3)], capacity=12, pad_id=PAD, align=2
    )
    assert pack.token_ids.tolist() == [0, 1, 100, 101, 102, PAD, 10, 110, 111, PAD, 0, 1]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1]
    assert pack.cu_seqlens.tolist() == [0, 6, 10, 12]
    assert pack.max_seqlen == 6
    assert pack.predictors.tolist() == [1, 2, 3, 6, 7]
    assert pack.targets.tolist() == [100, 101, 102, 110, 111]
    assert pack.sample.tolist() == [0, 0, 0, 1, 1]
    assert pack.advantage.tolist() == [0.5, 0.5, 0.5, 1.0, 1.0]
    assert pack.scale.tolist() == [0.1, 0.1, 0.1, 1.0, 1.0]
    assert pack.engine_logprobs.tolist() == [-1, -2, -3, -1, -2]
    assert pack.versions.tolist() == [0, 0, 0, 3, 3]


def test_what_the_policy_was_given_is_read_and_not_trained_on():
    given = replace(sample(2, 4), loss_mask=np.array([True, False, False, True]))
    pack = build_pack([given, sample(1, 2, first=10)], capacity=9, pad_id=PAD, align=1)
    assert pack.token_ids.tolist() == [0, 1, 100, 101, 102, 103, 10, 110, 111]
    assert pack.predictors.tolist() == [1, 4, 6, 7]
    assert pack.targets.tolist() == [100, 103, 110, 111]
    assert pack.sample.tolist() == [0, 0, 1, 1]
    assert pack.engine_logprobs.tolist() == [-1, -4, -1, -2]


samples = st.lists(st.builds(sample, st.integers(1, 9), st.integers(1, 9), st.integers(0, 50)), max_size=6)


@given(samples, st.sampled_from([1, 2, 4]), st.integers(0, 20))
def test_each_predictor_sees_its_own_sample_up_to_the_token_before_its_target(samples, align, spare):
    needed = sum(-(-(len(r.prompt_ids) + len(r.response_ids)) // align) * align for r in samples)
    pack = build_pack(samples, max(1, needed + spare), PAD, align)
    for predictor, target, index in zip(pack.predictors, pack.targets, pack.sample, strict=True):
        start = pack.cu_seqlens[np.searchsorted(pack.cu_seqlens, predictor, side="right") - 1]
        sequence = np.concatenate([samples[index].prompt_ids, samples[index].response_ids])
        np.testing.assert_array_equal(pack.token_ids[start : predictor + 1], sequence[: predictor - start + 1])
        assert sequence[predictor - start + 1] == target
    assert len(pack.targets) == sum(len(r.response_ids) for r in samples)
    assert PAD not in pack.targets


@given(samples, st.sampled_from([1, 2, 4]), st.integers(0, 20))
def test_segments_tile_the_pack_and_positions_restart_in_each(samples, align, spare):
    needed = sum(-(-(len(r.prompt_ids) + len(r.response_ids)) // align) * align for r in samples)
    capacity = max(1, needed + spare)
    pack = build_pack(samples, capacity, PAD, align)
    assert (pack.cu_seqlens[0], pack.cu_seqlens[-1]) == (0, capacity)
    segments = np.diff(pack.cu_seqlens)
    assert (segments > 0).all()
    np.testing.assert_array_equal(pack.position_ids, np.concatenate([np.arange(n) for n in segments]))
    assert pack.max_seqlen == segments.max()
    assert pack.max_seqlen < capacity or len(segments) == 1


def test_what_samples_share_is_there_once_and_predicts_for_each_of_them():
    """A prompt of 3 tokens. The second response goes on from the first one's second token."""
    first, second, third = sample(3, 3), replace(sample(3, 4), shared=5), replace(sample(3, 1), shared=3)
    second = replace(second, response_ids=np.array([100, 101, 7, 8], np.int32))
    third = replace(third, response_ids=np.array([9], np.int32), loss_mask=np.array([True]))
    pack = build_pack([first, second, third, sample(1, 1, first=10)], capacity=14, pad_id=PAD, align=1)
    assert pack.token_ids.tolist() == [0, 1, 2, 100, 101, 102, 7, 8, 9, 10, 110, 0, 1, 2]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 3, 0, 1, 0, 1, 2]
    assert pack.cu_seqlens.tolist() == [0, 3, 5, 6, 8, 9, 11, 14]
    assert (pack.tree.parents.tolist(), pack.tree.tokens.tolist()) == ([-1, 0, 1, 1, 0, -1, -1], [3, 2, 1, 2, 1, 2, 3])
    assert pack.max_seqlen == 7
    assert pack.predictors.tolist() == [2, 3, 4, 2, 3, 4, 6, 2, 9]
    assert pack.targets.tolist() == [100, 101, 102, 100, 101, 7, 8, 9, 110]
    assert pack.sample.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 3]
    assert path_to(pack, 7).tolist() == [0, 1, 2, 3, 4, 6, 7]
    assert path_to(pack, 10).tolist() == [9, 10]


def test_segments_of_a_tree_are_padded_each():
    pack = build_pack([sample(3, 1), replace(sample(3, 2, scale=2.0), shared=3)], capacity=12, pad_id=PAD, align=4)
    assert pack.token_ids.tolist() == [0, 1, 2, PAD, 100, PAD, PAD, PAD, 100, 101, PAD, PAD]
    assert pack.position_ids.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 3, 4, 5, 6]
    assert pack.tree.tokens.tolist() == [3, 1, 2]
    assert (pack.predictors.tolist(), pack.scale.tolist()) == ([2, 2, 8], [1.0, 2.0, 2.0])


def test_of_two_routings_of_a_shared_token_the_first_counts():
    tables = [np.full((4, 1, 1), value, np.uint8) for value in (1, 2)]
    first, second = (
        replace(sample(2, 3), routing=tables[0]),
        replace(sample(2, 3, first=0), shared=2, routing=tables[1]),
    )
    pack = build_pack([first, second], capacity=8, pad_id=PAD, align=1)
    assert pack.routing[:, 0, 0].tolist() == [1, 1, 1, 1, 255, 2, 2, 255]


def test_routing_lies_beside_its_tokens_and_the_rest_is_not_known():
    """A sample of which less is known than was read, one whose last token nobody has read, and one without any."""
    first = replace(sample(2, 3), routing=np.array([[[1, 2]], [[3, 4]]], np.uint8))
    second = replace(sample(1, 2), routing=np.array([[[5, 6]], [[7, 8]]], np.uint8))
    pack = build_pack([first, second, sample(1, 1)], capacity=13, pad_id=PAD, align=2)
    assert pack.routing[:, 0, 0].tolist() == [1, 3, *[255] * 4, 5, 7, *[255] * 5]
    assert pack.routing[:, 0, 1].tolist() == [2, 4, *[255] * 4, 6, 8, *[255] * 5]
    assert build_pack([sample(1, 1)], capacity=4, pad_id=PAD, align=2).routing is None


def test_a_pack_without_samples_is_all_padding():
    pack = build_pack([], capacity=8, pad_id=2, align=1)
    assert pack.token_ids.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert pack.cu_seqlens.tolist() == [0, 8]
    assert len(pack.targets) == len(pack.engine_logprobs) == len(pack.scale) == 0


def test_samples_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="samples of 6 tokens do not fit into a pack of 5"):
        build_pack([sample(2, 3)], capacity=5, pad_id=PAD, align=2)
