"""Seeds of a run are the same in every version, so that a run can be repeated."""

from megatron_dppo.rl.seeds import Purpose, derive_engine_seed


def test_engine_seed_without_an_attempt_is_that_of_the_first() -> None:
    seeds = [derive_engine_seed(1, 2, Purpose.EVALUATION, attempt) for attempt in (0, 1)]
    assert derive_engine_seed(1, 2, Purpose.EVALUATION) == seeds[0] != seeds[1]
