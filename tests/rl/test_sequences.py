"""Completions of several sequences in a plan, and the settings that take one sequence alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_dppo.config import Config, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.rl.plan import gather_metadata
from megatron_dppo.rl.sequences import (
    check_sequences,
    compute_further_lengths,
    compute_longest_response,
    strip_contexts,
)
from megatron_dppo.rl.types import Completion, Prompt, StepMetadata, StepPlan
from tests.rl.integration import all_plans
from tests.rl.plans import plan, step_config, step_metadata

TWO = Completion(
    np.array([1, 2, 5, 5, 5, 3], np.int32),
    np.zeros(6, np.float32),
    np.array([True, True, False, False, False, True]),
    np.full(6, 0, np.int32),
    "stop",
    starts=(2,),
)
ONE = dataclasses.replace(TWO, starts=())
PROMPTS = [Prompt(number, np.array([7, 8], np.int32), "", "") for number in range(2)]


def step_of_sequences(groups: int, samples: int) -> tuple[StepMetadata, np.ndarray]:
    """Return completions of one to three sequences, the first of which may be empty, and the score
    of each sequence, a sum over its sampled tokens."""
    rng = np.random.default_rng(3)
    made = step_metadata(groups, samples, seed=3)
    further = rng.integers(2, 40, (groups, samples, 2)) * (rng.random((groups, samples, 1)) < 0.6)
    further[..., 1] *= rng.random((groups, samples)) < 0.5
    first = made.response_lengths * ((rng.random((groups, samples)) < 0.7) | ~further.any(axis=2))
    lengths = first + further.sum(axis=2)
    made = dataclasses.replace(made, response_lengths=lengths, further_lengths=further)
    return made, rng.normal(size=(groups, samples, 3)) * np.concatenate(
        [first[..., None] > 0, further > 0], 2
    )


def test_sequences_of_a_kept_completion_have_its_factors() -> None:
    metadata, _ = step_of_sequences(12, 6)
    [minibatch] = plan(metadata, step_config(), replicas=2).minibatches
    rows = minibatch
    assert sorted(k for replica in minibatch.packs for pack in replica for k in pack) == list(
        range(len(rows.group))
    )
    kept = {(q, i) for q, i in zip(rows.group.tolist(), rows.completion.tolist(), strict=True)}
    assert 0 < len(kept) < metadata.rewards.size
    empty = 0
    for q, i in kept:
        mine = (rows.group == q) & (rows.completion == i)
        further = metadata.further_lengths[q, i][metadata.further_lengths[q, i] > 0]
        first = metadata.response_lengths[q, i] - further.sum()
        prompt = metadata.prompt_lengths[q]
        lengths = [*([prompt + first] if first else []), *further]
        empty += not first
        assert rows.sequence[mine].tolist() == list(range(not first, 1 + len(further)))
        assert rows.lengths[mine].tolist() == lengths
        for name in ("advantage", "weight", "scale", "version", "owner"):
            assert len(np.unique(getattr(rows, name)[mine])) == 1, name
        assert rows.lengths[mine].sum() == metadata.tokens[q, i] - (0 if first else prompt), (
            "what it costs is what is trained on"
        )
    assert empty > 0
    firsts = np.flatnonzero(rows.sequence == 0)
    begins = np.flatnonzero(np.diff(rows.group[firsts], prepend=-1))
    assert (rows.shared_length[firsts[begins]] == 0).all()
    assert (rows.shared_length[rows.sequence > 0] == 0).all() and rows.shared_length[firsts].any()


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_expected_gradient_is_that_of_all_sequences(loss: str) -> None:
    metadata, scores = step_of_sequences(4, 4)

    def gradient(step: StepPlan) -> float:
        rows = step.minibatches[0]
        return float(
            (
                rows.scale
                * rows.advantage[:, 0]
                * scores[rows.group, rows.completion, rows.sequence]
            ).sum()
        )

    whole = gradient(plan(metadata, step_config(name=loss, rule="none")))
    expected = sum(
        probability * gradient(step)
        for step, probability in all_plans(metadata, step_config(name=loss))
    )
    assert expected == pytest.approx(whole, rel=1e-6) and whole != 0.0


def test_metadata_of_unequal_numbers_of_sequences_is_gathered() -> None:
    assert compute_further_lengths([[ONE, TWO], [ONE]], 2).tolist() == [[[0], [4]], [[0], [0]]]
    none, some = step_metadata(2, 3, seed=1), step_of_sequences(2, 3)[0]
    gathered = gather_metadata([none, some], window=4.0)
    assert gathered.further_lengths.shape == (4, 3, 2)
    for row, prompt in enumerate(gathered.prompt_ids.tolist()):
        known = some.further_lengths[some.prompt_ids == prompt]
        assert gathered.further_lengths[row].tolist() == (
            known[0].tolist() if len(known) else [[0, 0]] * 3
        )


def test_verifier_is_shown_no_context_twice() -> None:
    assert [of.tolist() for of in strip_contexts(TWO)] == [[1, 2, 3], [True, True, True]]
    assert [of.tolist() for of in strip_contexts(ONE)] == [
        [1, 2, 5, 5, 5, 3],
        [True, True, False, False, False, True],
    ]
    assert [compute_longest_response(prompt, TWO) for prompt in (1, 2, 3)] == [3, 2, 2]


@pytest.mark.parametrize(
    ("loss", "setting"),
    [
        (LossConfig(name="gmpo"), "loss.name"),
        (LossConfig(tis_level="sequence", tis_cap=2.0), "loss.tis_level"),
        (LossConfig(tis_level="prefix", tis_cap=2.0), "loss.tis_level"),
        (LossConfig(replay_routing="rollout"), "loss.replay_routing"),
    ],
)
def test_setting_of_one_sequence_is_refused_for_several(loss: LossConfig, setting: str) -> None:
    check_sequences(replace(Config(), loss=loss), PROMPTS, [[ONE], [ONE, ONE]])
    with pytest.raises(UserError, match="has 2 sequences") as raised:
        check_sequences(replace(Config(), loss=loss), PROMPTS, [[ONE], [ONE, TWO]])
    assert raised.value.setting == setting
    check_sequences(Config(), PROMPTS[:1], [[TWO]])


def test_malformed_sequences_are_refused() -> None:
    sampled = dataclasses.replace(TWO, loss_mask=np.ones(6, bool))
    with pytest.raises(UserError, match="prompt 0 it returned a sequence 1 that does not begin"):
        check_sequences(Config(), PROMPTS[:1], [[sampled]])
    short = dataclasses.replace(TWO, starts=(1,), loss_mask=np.arange(6) % 5 == 0)
    check_sequences(Config(), PROMPTS[:1], [[short]])
    own = dataclasses.replace(TWO, starts=(0,), loss_mask=np.arange(6) % 5 == 4)
    check_sequences(Config(), PROMPTS[:1], [[own]])
    with pytest.raises(UserError, match="begin at"):
        check_sequences(Config(), PROMPTS[:1], [[dataclasses.replace(own, starts=(0, 0))]])
    assert [of.tolist() for of in strip_contexts(own)] == [[5, 3], [True, False]]
