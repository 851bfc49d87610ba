"""A user's own objective trains like a named one; unfit objectives and engines are refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from megatron_dppo.config import Config, LossConfig, RolloutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.plugins import load_function
from megatron_dppo.rl.losses import compute_token_losses
from megatron_dppo.rl.objectives import Objective
from megatron_dppo.trainer.functions import load_engine_factory, load_objective, register_functions
from tests.ranks import RankPool
from tests.small_runs import live, rows, small_run, write_run

FILE = """
import torch

def ppo(tokens):
    low, high = tokens.limits
    whole = tokens.ratio * tokens.advantage
    clipped = tokens.ratio.clamp(low, high) * tokens.advantage
    return torch.minimum(whole, clipped), clipped < whole

def plain(tokens):
    return tokens.ratio * tokens.advantage

def sequence_mean(tokens):
    return tokens.sequences.sums(tokens.logprobs - tokens.old, mean=True).exp() * tokens.advantage * tokens.logprobs

def of_the_pack(tokens):
    return tokens.ratio * (tokens.advantage - tokens.advantage.mean())


def mean_of_the_pack(tokens):
    value = tokens.ratio * tokens.advantage
    return value.mean().expand_as(value)


def centred_by_the_pack(tokens):
    value = tokens.ratio * tokens.advantage
    return value - value.mean()

def bonus(tokens):
    return tokens.ratio * tokens.advantage - 0.01 * tokens.logprobs

def total(tokens):
    return (tokens.ratio * tokens.advantage).sum()

def constant(tokens):
    return tokens.advantage

def root(tokens):
    return (tokens.logprobs - tokens.old).sqrt() * tokens.advantage

def mistaken(tokens):
    return tokens.ratios

def stumbles(tokens):
    if len(tokens.advantage) > 8:
        raise SystemExit("too many")
    return tokens.ratio * tokens.advantage

def no_engine(path, *, device, dtype, world):
    return path.no_such_thing

from megatron_dppo.rollout.engine import RolloutEngine

class Half(RolloutEngine):
    def __init__(self, path, *, device, dtype, world): ...
    def begin(self, prompts, sampling): ...
    def update_weights(self, source, version): ...
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(FILE)
    return file


def test_ppo_from_a_file_is_grpo(ranks: RankPool, own: Path, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "policy")
    settings = ("layout.tp=2", "run.steps=2", "loss.updates_per_rollout=2")
    named = small_run(folder, tmp_path / "named", *settings)
    given = small_run(folder, tmp_path / "given", *settings, f"loss.objective={own}:ppo")
    ranks.in_turn(2, (live, named), (live, given))
    assert rows(tmp_path / "given") == rows(tmp_path / "named")
    assert any(row.get("train/pg_clipfrac") for row in rows(tmp_path / "given"))


ADVANTAGES = """
import numpy as np

def per_token(rewards, columns, decay=1.0):
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return [[a * decay ** np.arange(n) for a, n in zip(*group)] for group in zip(centred, columns["lengths"])]

def decaying(rewards, columns):
    return per_token(rewards, columns, 0.5)
"""


def live_with_functions(rank: int, size: int, config: Config) -> None:
    register_functions(config)
    live(rank, size, config)


def test_advantages_of_tokens_reach_their_tokens(ranks: RankPool, tmp_path: Path) -> None:
    """Equal ones train as the completion's; others do not. Both are drawn alike: the tokens' norms
    are not known."""
    (file := tmp_path / "own.py").write_text(ADVANTAGES)
    folder = write_run(tmp_path / "policy")
    found = {}
    for name, own in {
        "group": "dr_grpo",
        "tokens": f"{file}:per_token",
        "decaying": f"{file}:decaying",
    }.items():
        config = small_run(
            folder, tmp_path / name, "run.steps=2", "loss.name=dr_grpo", f"loss.advantage={own}"
        )
        ranks.run(2, live_with_functions, config)
        found[name] = [
            row["train/grad_norm"] for row in rows(tmp_path / name) if "train/grad_norm" in row
        ]
    assert found["tokens"] == pytest.approx(found["group"], rel=1e-5)
    assert all(
        abs(one / other - 1.0) > 0.05
        for one, other in zip(found["decaying"], found["group"], strict=True)
    )


def test_named_objective_gives_clips_and_ratio(own: Path) -> None:
    """GSPO's ratio is its sequence's; a clip of the run's settings holds."""
    logprobs, old = torch.tensor([-1.0, -0.6]), torch.tensor([-1.0, -1.0])
    for settings, loss in (
        ({"name": "gspo"}, [-1.0004, -1.0004]),
        ({"name": "gspo", "clip_high": 9.0}, [-1.2214, -1.2214]),
        ({"name": "dapo"}, [-1.0, -1.28]),
    ):
        objective = load_objective(LossConfig(objective=f"{own}:ppo", **settings))
        assert compute_losses(objective, logprobs, old).tolist() == pytest.approx(loss, abs=1e-4)
        assert objective.aggregation == load_objective(LossConfig(**settings)).aggregation


@pytest.mark.parametrize("name", ["plain", "sequence_mean"])
def test_means_and_sums_over_a_completion_are_accepted(name: str, own: Path) -> None:
    load_objective(LossConfig(objective=f"{own}:{name}"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("of_the_pack", "where another one is in the same pack"),
        ("mean_of_the_pack", "where another one is in the same pack"),
        ("centred_by_the_pack", "where another one is in the same pack"),
        ("bonus", "has a gradient where the advantage is 0"),
        ("total", r"it returned \[\] for 8 tokens"),
        ("constant", "does not require grad"),
        ("root", "a gradient that is not finite, for ratios between 0.4 and 2.5"),
        ("mistaken", "AttributeError: 'Tokens' object has no attribute 'ratios'"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_unfit_objective_is_refused(name: str, problem: str, own: Path) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        load_objective(LossConfig(objective=f"{own}:{name}"))
    assert (refused.value.setting, refused.value.value) == ("loss.objective", f"{own}:{name}")


def test_error_of_a_function_names_the_function(own: Path) -> None:
    """Of an objective that passes its trial and fails on a pack, and of an engine's constructor."""
    objective = load_objective(LossConfig(objective=f"{own}:stumbles"))
    long = torch.full((9,), -1.0)
    compute_losses(objective, long[:4], long[:4])
    with pytest.raises(
        UserError,
        match=r"loss\.objective = .*:stumbles: raised for 9 tokens:\n(.|\n)*SystemExit: too m",
    ):
        compute_losses(objective, long, long)
    make = load_engine_factory(Config(rollout=RolloutConfig(engine_function=f"{own}:no_engine")))
    assert make is not None
    with pytest.raises(UserError, match=r"rollout\.engine_function = (.|\n)*no_such_thing"):
        make("path", device=None, dtype=None, world=None)


def compute_losses(objective: Objective, logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return the losses of one completion with an advantage of one."""
    ones, sample = torch.ones_like(old), torch.zeros(len(old), dtype=torch.int64)
    behind = {
        "old_logprobs": old,
        "engine_logprobs": old,
        "reference_logprobs": None,
        "sample": sample,
    }
    return compute_token_losses(
        objective, logprobs=logprobs, advantage=ones, kl_coef=0.0, tis_cap=None, **behind
    )[0]


def test_own_engine_without_all_methods_is_refused(own: Path) -> None:
    make = load_engine_factory(Config(rollout=RolloutConfig(engine_function=f"{own}:Half")))
    assert make is not None
    with pytest.raises(
        UserError, match="made a Half, which lacks finish, sample_each, take_events"
    ):
        make("policy", device=None, dtype=None, world=None)


FORKS = """
import os

children = []

def fork():
    if child := os.fork():
        children.append(child)

def rule(candidates, keep):
    fork()
    return candidates.floor

def objective(tokens):
    fork()
    return tokens.ratio * tokens.advantage
"""


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rule_must_withstand_equal_rewards_in_all_groups(tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(
        "def rule(candidates, keep):\n    return keep * candidates.score / candidates.score.max()\n"
    )
    pruning = {"completions": {"function": f"{file}:rule", "keep": 0.5}}
    with pytest.raises(UserError, match="nan"):
        register_functions(Config.model_validate({"pruning": pruning}))


@pytest.mark.parametrize("use", ["import", "rule", "objective"])
def test_process_that_a_function_forks_ends(use: str, tmp_path: Path) -> None:
    """It would continue the run."""
    process, file = os.getpid(), tmp_path / "own.py"
    file.write_text(FORKS + "fork()\n" * (use == "import"))
    if use == "import":
        load_function("loss.objective", f"{file}:objective")
    elif use == "rule":
        register_functions(
            Config.model_validate(
                {"pruning": {"completions": {"function": f"{file}:rule", "keep": 0.5}}}
            )
        )
    else:
        load_objective(LossConfig(objective=f"{file}:objective"))
    if os.getpid() != process:
        os._exit(1)
    children = sys.modules["plugin_file_own"].children
    assert children and all(os.waitpid(child, 0)[1] == 0 for child in children)
