"""Every file in configs/ is a configuration; those of published models fit the machines that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dppo.config import Config
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.memory import shape_of
from megatron_dppo.estimate.plan import make_plan
from megatron_dppo.estimate.search import SPARE, search
from megatron_dppo.models.shape import PUBLISHED, check_layout
from megatron_dppo.settings import load_config
from megatron_dppo.trainer.preflight import check_config, preflight
from tests.policies import write_policy

FILES = sorted(Path(__file__).parents[1].joinpath("configs").glob("*.yaml"))
PUBLISHED_FILES = [file for file in FILES if file.stem.startswith("qwen3_")]


def of(file: Path, *overrides: str) -> Config:
    return load_config(str(file), overrides)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_settings_do_not_contradict_each_other(file: Path) -> None:
    check_config(of(file))


def test_every_published_shape_has_a_file() -> None:
    assert {Path(of(file).model.path).name.lower() for file in PUBLISHED_FILES} == set(PUBLISHED)


@pytest.mark.parametrize("file", PUBLISHED_FILES, ids=lambda file: file.stem)
def test_a_published_model_fits_the_machines_its_file_names(file: Path) -> None:
    config = of(file)
    check_layout(shape_of(config.model.path), config.layout)
    plan = make_plan(config, Assumptions())
    assert plan.fits, plan.remedies
    apart = 0 if plan.placement.shared else plan.placement.ranks
    assert apart + sum(plan.placement.servers) == plan.placement.gpus, "no GPU is idle"


@pytest.mark.parametrize("file", PUBLISHED_FILES, ids=lambda file: file.stem)
def test_a_published_model_s_file_is_nearly_the_fastest_on_its_gpus(file: Path) -> None:
    config = of(file)
    plan = make_plan(config, Assumptions())
    fastest = search(config, Assumptions(), plan.placement.gpus).fastest
    assert fastest is not None and plan.pruned.seconds <= 1.05 * fastest.seconds, fastest
    assert plan.actor.total <= (1 - SPARE) * plan.actor.room


def test_an_absent_benchmark_is_named_with_what_to_do(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "policy")
    present = tmp_path / "train.jsonl"
    present.write_text('{"prompt": "1+1=", "label": "2"}\n')
    absent = tmp_path / "aime24.jsonl"
    overrides = (f"model.path={policy}", f"data.train={present}", "data.max_prompt_tokens=32", "pack.max_tokens=128",
                 "rollout.max_response_tokens=32", f"run.dir={tmp_path}/run")  # fmt: skip
    with pytest.raises(UserError) as caught:
        preflight(load_config(None, [*overrides, f"data.eval={{amc23: {present}, aime24: {absent}}}"]), "train")
    assert (caught.value.setting, caught.value.value) == ("data.eval", str(absent))
    assert "prompt and label" in caught.value.remedy
    preflight(load_config(None, [*overrides, f"data.eval={{amc23: {present}}}"]), "train")
    with pytest.raises(UserError, match="another metric"):
        preflight(load_config(None, [*overrides, f"data.eval={{accuracy: {present}}}"]), "train")
    with pytest.raises(UserError, match="Put its 30 problems there as they are published"):
        preflight(load_config(None, [*overrides, "eval.benchmarks=[aime24]", f"eval.folder={tmp_path}"]), "train")
