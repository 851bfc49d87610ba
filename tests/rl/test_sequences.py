"""Completions of several sequences: what a plan makes of them, and what knows no more than one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_dppo.config import Config, LossConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.rl import plan as planning
from megatron_dppo.rl.advantages import advantages_of_segments
from megatron_dppo.rl.objectives import objective_for
from megatron_dppo.rl.plan import gather_metadata, plan_step
from megatron_dppo.rl.sequences import check_sequences, further_lengths, longest_response, spoken
from megatron_dppo.rl.types import Completion, Prompt, StepMetadata, StepPlan, VersionSpan
from tests.rl.integration import FixedOffset, outcomes
from tests.rl.plans import step_config, step_metadata

TWO = Completion(
    np.array([1, 2, 5, 5, 5, 3], np.int32),
    np.zeros(6, np.float32),
    np.array([True, True, False, False, False, True]),
    (VersionSpan(0, 6),),
    "stop",
    starts=(2,),
)
ONE = dataclasses.replace(TWO, starts=())
PROMPTS = [Prompt(number, np.array([7, 8], np.int32), "", "") for number in range(2)]


def step_of_sequences(groups: int, samples: int) -> tuple[StepMetadata, np.ndarray]:
    """Completions of one to three sequences, and a score, the sum over sampled tokens, of each sequence."""
    rng = np.random.default_rng(3)
    made = step_metadata(groups, samples, seed=3)
    further = rng.integers(2, 40, (groups, samples, 2)) * (rng.random((groups, samples, 1)) < 0.6)
    further[..., 1] *= rng.random((groups, samples)) < 0.5
    lengths = made.response_lengths + further.sum(axis=2)
    made = dataclasses.replace(made, response_lengths=lengths, further_lengths=further)
    return made, rng.normal(size=(groups, samples, 3)) * np.concatenate([np.ones((groups, samples, 1)), further > 0], 2)


def plan(metadata: StepMetadata, config: Config) -> StepPlan:
    return plan_step(metadata, config, replicas=2, align=1, capacity_multiple=1, step=0, pipeline=1)


def test_every_sequence_of_a_kept_completion_is_in_one_pack_with_its_completions_factors() -> None:
    metadata, _ = step_of_sequences(12, 6)
    [minibatch] = plan(metadata, step_config()).minibatches
    rows = minibatch.samples
    assert sorted(k for replica in minibatch.packs for pack in replica for k in pack) == list(range(len(rows.group)))
    kept = {(q, i) for q, i in zip(rows.group.tolist(), rows.completion.tolist(), strict=True)}
    assert 0 < len(kept) < metadata.rewards.size
    for q, i in kept:
        mine = (rows.group == q) & (rows.completion == i)
        further = metadata.further_lengths[q, i][metadata.further_lengths[q, i] > 0]
        assert rows.sequence[mine].tolist() == list(range(1 + len(further)))
        first = metadata.prompt_lengths[q] + metadata.response_lengths[q, i] - further.sum()
        assert rows.lengths[mine].tolist() == [first, *further]
        for name in ("advantage", "weight", "scale", "version", "owner"):
            assert len(np.unique(getattr(rows, name)[mine])) == 1, name
        assert rows.lengths[mine].sum() == metadata.tokens[q, i], "what it costs is what is trained on"
    firsts = np.flatnonzero(rows.sequence == 0)
    assert (rows.shared_length[rows.sequence > 0] == 0).all() and rows.shared_length[firsts].any()


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_over_all_draws_the_gradient_is_that_of_all_sequences(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata, scores = step_of_sequences(4, 4)
    config = step_config(name=loss)

    def gradient(config: Config) -> float:
        [minibatch] = plan(metadata, config).minibatches
        rows = minibatch.samples
        return float((rows.scale * rows.advantage[:, 0] * scores[rows.group, rows.completion, rows.sequence]).sum())

    inclusion: list[np.ndarray] = []
    draw = planning.prune_minibatch

    def remembered(*args: object, **more: object) -> object:
        inclusion.append((drawn := draw(*args, **more)).inclusion)  # type: ignore[arg-type]
        return drawn

    monkeypatch.setattr(planning, "prune_minibatch", remembered)
    whole = gradient(step_config(name=loss, rule="none"))
    gradient(config)
    expected = 0.0
    order = np.lexsort((plan_advantages(metadata, config).ravel(), np.repeat(np.arange(4), 4)))
    for offset, probability in outcomes(inclusion[-1].ravel()[order]):
        monkeypatch.setattr(planning, "generator", lambda *_, at=offset: FixedOffset(at))
        expected += probability * gradient(config)
    assert expected == pytest.approx(whole, rel=1e-6) and whole != 0.0


def plan_advantages(metadata: StepMetadata, config: Config) -> np.ndarray:
    return advantages_of_segments(metadata, config, objective_for(config.loss))[..., 0]


def test_ranks_with_more_and_with_fewer_sequences_are_gathered() -> None:
    assert further_lengths([[ONE, TWO], [ONE]], 2).tolist() == [[[0], [4]], [[0], [0]]]
    none, some = step_metadata(2, 3, seed=1), step_of_sequences(2, 3)[0]
    gathered = gather_metadata([none, some], window=4.0)
    assert gathered.further_lengths.shape == (4, 3, 2)
    for row, prompt in enumerate(gathered.prompt_ids.tolist()):
        known = some.further_lengths[some.prompt_ids == prompt]
        assert gathered.further_lengths[row].tolist() == (known[0].tolist() if len(known) else [[0, 0]] * 3)


def test_a_verifier_is_shown_no_context_twice() -> None:
    assert [of.tolist() for of in spoken(TWO)] == [[1, 2, 3], [True, True, True]]
    assert [of.tolist() for of in spoken(ONE)] == [[1, 2, 5, 5, 5, 3], [True, True, False, False, False, True]]
    assert [longest_response(prompt, TWO) for prompt in (1, 2, 3)] == [3, 2, 2]


@pytest.mark.parametrize(
    ("loss", "setting"),
    [
        (LossConfig(name="gspo"), "loss.name"),
        (LossConfig(name="gmpo"), "loss.name"),
        (LossConfig(tis_level="sequence", tis_cap=2.0), "loss.tis_level"),
        (LossConfig(replay_routing="rollout"), "loss.replay_routing"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_is_of_a_whole_sequence_is_refused_where_there_are_several(loss: LossConfig, setting: str) -> None:
    check_sequences(replace(Config(), loss=loss), PROMPTS, [[ONE], [ONE, ONE]])
    with pytest.raises(UserError, match="came in 2 sequences") as raised:
        check_sequences(replace(Config(), loss=loss), PROMPTS, [[ONE], [ONE, TWO]])
    assert raised.value.setting == setting
    check_sequences(Config(), PROMPTS[:1], [[TWO]])


def test_whatever_engine_made_them_sequences_are_looked_at() -> None:
    sampled = dataclasses.replace(TWO, loss_mask=np.ones(6, bool))
    with pytest.raises(UserError, match="for prompt 0 it returned a sequence 1 that does not begin with token ids"):
        check_sequences(Config(), PROMPTS[:1], [[sampled]])
