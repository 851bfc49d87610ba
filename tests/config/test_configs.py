"""Every file in configs/ is a configuration; files of published models fit the machines that they
name."""

from pathlib import Path

import pytest

from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import resolve_shape
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.estimate.search import SPARE, search
from megatron_dppo.models.shape import PUBLISHED, check_layout
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config

FILES = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.yaml"))
PUBLISHED_FILES = [file for file in FILES if file.stem.startswith("qwen3_")]


def stem(file: Path) -> str:
    return file.stem


@pytest.mark.parametrize("file", FILES, ids=stem)
def test_a_shipped_file_has_no_contradiction(file: Path) -> None:
    check_config(load_config(str(file), []))


def test_every_published_shape_has_a_file() -> None:
    paths = [load_config(str(file), []).model.path or "" for file in PUBLISHED_FILES]
    assert {Path(path).name.lower() for path in paths} == set(PUBLISHED)


@pytest.mark.parametrize("file", PUBLISHED_FILES, ids=stem)
def test_a_published_model_s_file_fits_and_is_nearly_fastest(file: Path) -> None:
    config = load_config(str(file), [])
    check_layout(resolve_shape(config.model.path), config.layout)
    plan = make_plan(config, Assumptions())
    assert plan.fits, plan.remedies
    apart = 0 if plan.placement.shared else plan.placement.ranks
    assert apart + sum(plan.placement.servers) == plan.placement.gpus, "no GPU is idle"
    assert plan.actor.total <= (1 - SPARE) * plan.actor.room
    fastest = search(config, Assumptions(), plan.placement.gpus).fastest
    assert fastest is not None
    assert fastest.seconds <= 1.0001 * plan.pruned.seconds <= 1.05 * fastest.seconds
