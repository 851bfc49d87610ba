"""Arms of the benchmarks are called by their settings, and take nothing of pruning from a default."""

import re
from collections.abc import Iterator

import pytest

from megatron_dppo.config import PruningConfig
from megatron_dppo.settings import load_config
from tests.docs.documents import ROOT

ELSEWHERE = (
    "pruning.prompts.rule=dynamic_sampling",
    "pruning.prompts.keep=0.31",
    "pruning.prompts.floor=0.37",
    "pruning.prompts.schedule.off_last=0.11",
    "pruning.completions.rule=top_k",
    "pruning.completions.keep=0.33",
    "pruning.completions.score=advantage",
    "pruning.completions.normaliser=kept",
    "pruning.completions.schedule.ramp=0.4",
    "pruning.max_weight=7",
    "pruning.max_rounds=3",
)
"""Other pruning than the quickstart's, and other than the package's."""
PAPERS = r"(?:(?:GRPO|CPPO|GRESO|DPPO|DAPO)(?:, 2 updates)?: |GSPO, 2 updates: )?"
FRACTION = r"(?:, half of the prompts|, a quarter)?"
SUFFIX = r"(?:, \d+ prompts(?: × \d|, all epochs)?)?"


@pytest.fixture(scope="module", autouse=True)
def _benchmarks_are_modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


def list_arms() -> dict[str, tuple[str, ...]]:
    """Return the settings of all arms, by benchmark and name."""
    import efficiency
    import group_size
    import paper_table
    import real_curves
    import time_to_accuracy as times

    arms = {}
    for module in (efficiency.ARMS, efficiency.PAPER, group_size.ARMS):
        arms |= {name: (settings, None) for name, settings in module.items()}
    for name, arm in times.ARMS.items():
        assert ("× 4" in name) == (arm.samples == 4), name
    for table in (times.ARMS, paper_table.ARMS, paper_table.list_losses()):
        arms |= {name: (arm.settings, arm.prompts) for name, arm in table.items()}
    for name, arm in real_curves.ARMS.items():
        if arm.settings:
            arms[name] = (arm.settings, 16 if real_curves.SIXTEEN in arm.settings else 32)
    return arms


def resolve(*words: str) -> PruningConfig:
    return load_config(str(ROOT / "configs/quickstart.yaml"), words).pruning


def test_names_of_arms_say_their_settings() -> None:
    from arms import describe

    for name, (settings, prompts) in list_arms().items():
        said = re.fullmatch(f"{PAPERS}(.*?){FRACTION}{SUFFIX}", name)
        assert said, name
        assert said[1] == describe(resolve(*settings)), name
        if count := re.search(r"(\d+) prompts", name):
            assert int(count[1]) == prompts, name


def test_nothing_of_an_arm_is_a_default() -> None:
    for name, (settings, _) in list_arms().items():
        assert resolve(*ELSEWHERE, *settings) == resolve(*settings), name


def test_a_name_tells_every_setting_of_its_rules() -> None:
    from arms import describe, neyman, pruning, threshold

    arms = [
        neyman(0.7, 0.5),
        neyman(0.7, 0.3),
        neyman(0.85, 0.5),
        neyman(0.7, 0.5, max_weight=5.0),
        neyman(0.7, 0.5, floor=0.1),
        neyman(0.7, 0.5, target_noise=1.0),
        neyman(0.7, None),
        neyman(None, 0.5),
        threshold(0.3, 0.5),
        threshold(0.5, 0.5),
        threshold(0.5, 0.5, "threshold_deterministic"),
        pruning("threshold", "threshold", keep=(0.5, 0.5)),
        pruning(completions="top_k", keep=(1.0, 0.5)),
        pruning(completions="top_k", keep=(1.0, 0.25)),
        pruning(completions="top_k", keep=(1.0, 0.5), normaliser="kept"),
        pruning("greso", keep=(0.5, 1.0)),
        pruning("greso", keep=(0.5, 1.0), resample="prompts"),
        pruning("dynamic_sampling"),
        pruning(),
    ]
    names = {describe(resolve(*settings)) for settings in arms}
    assert len(names) == len(arms)
