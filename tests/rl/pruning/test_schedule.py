import pytest

from megatron_dppo.config import ScheduleConfig
from megatron_dppo.rl.pruning.schedule import scheduled_keep


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ScheduleConfig(), [0.4] * 10),
        (ScheduleConfig(shape="adaptive", off_last=0.1), [0.4] * 9 + [1.0]),
        (ScheduleConfig(shape="linear", ramp=0.4), [1.0, 0.85, 0.7, 0.55] + [0.4] * 6),
        (ScheduleConfig(shape="cosine", ramp=0.4), [1.0, 0.912132, 0.7, 0.487868] + [0.4] * 6),
        (ScheduleConfig(shape="linear", ramp=0.0), [0.4] * 10),
        (ScheduleConfig(off_last=0.3), [0.4] * 7 + [1.0] * 3),
        (ScheduleConfig(shape="linear", ramp=1.0, off_last=1.0), [1.0] * 10),
    ],
)
def test_the_kept_share_follows_the_schedule(schedule: ScheduleConfig, expected: list[float]):
    assert [scheduled_keep(0.4, schedule, step, 10) for step in range(10)] == pytest.approx(expected, abs=1e-6)
