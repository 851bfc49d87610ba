"""Reward functions written for slime are imported with slime and without."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megatron_dppo.plugins import Sample, load_function


def test_an_installed_slime_keeps_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package := tmp_path / "slime" / "utils").mkdir(parents=True)
    (package / "types.py").write_text("class Sample: ...")
    (package / "misc.py").write_text("def bring_along(): return 7")
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("slime.utils.types")
    (tmp_path / "uses.py").write_text("""
from slime.utils.misc import bring_along
from slime.utils.types import Sample

def seven(): return bring_along(), Sample
""")
    assert load_function("reward.function", f"{tmp_path}/uses.py:seven")() == (7, Sample)
    assert sys.modules["slime.utils.types"] is sys.modules["slime.utils"].types is theirs
    assert "slime.utils.misc" not in sys.modules


def test_reward_beside_a_generate_function_of_slime_is_imported(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text("""
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample, sampling_params): return await post("http://a:1/generate", GenerateState(args))
async def reward(args, sample: Sample): return sample
""")
    load_function("reward.function", f"{tmp_path}/both.py:reward")
