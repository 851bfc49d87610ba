"""Pruning in slime and miles.

With a checkout in ``SLIME`` or ``MILES``, their own code runs; the commits that were run are in
``slime_contract.json``; ``pip install ray httpx`` is required. Without a checkout, the plug-in meets
stand-ins that have the recorded names alone.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.integrations import slime as plugin
from megatron_dppo.rl import pruning
from tests.integrations import miles_sums
from tests.integrations.slime_on_ranks import CASES, DEFAULTS

CONTRACTS = json.loads(Path(__file__).with_name("slime_contract.json").read_text(encoding="utf-8"))
PROJECTS = ("slime", "miles")
EQUAL = [name for name, case in CASES.items() if not case.refused]
REFUSED = [name for name, case in CASES.items() if case.refused]
needs_slime = pytest.mark.skipif("SLIME" not in os.environ, reason="SLIME names no checkout")
needs_miles = pytest.mark.skipif("MILES" not in os.environ, reason="MILES names no checkout")


def run_module(module: str, *arguments: str) -> None:
    environment = os.environ | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.integrations.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Errors of the mean pruned gradients, by slime's own code on ranks."""
    pytest.importorskip("ray", reason="slime requires ray")
    folder = tmp_path_factory.mktemp("slime")
    found: dict[str, dict[str, float]] = {}
    for world, context in sorted({(case.world, case.context) for case in CASES.values()}):
        results = folder / f"{world}_{context}.json"
        run_module("slime_on_ranks", str(world), str(context), str(results))
        found |= json.loads(results.read_text(encoding="utf-8"))
    return found


@needs_slime
@pytest.mark.parametrize("name", EQUAL)
def test_mean_pruned_gradient_is_that_of_slime(measured, name):
    assert measured[name]["error"] < 1e-6
    # Stubs take part in padding and in context parallelism.
    assert measured[name]["tokens"] < 0.75


@needs_slime
@pytest.mark.parametrize("name", REFUSED)
def test_refused_settings_are_biased(measured, name):
    assert measured[name]["error"] > 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_biased_settings_are_refused(name):
    case = CASES[name]
    with pytest.raises(UserError) as raised:
        plugin.read_pruning_settings(SimpleNamespace(**(DEFAULTS | case.arguments)))
    assert raised.value.setting == case.refused


@needs_miles
def test_mean_pruned_sum_is_that_of_miles(tmp_path):
    results = tmp_path / "results.json"
    run_module("miles_sums", str(results))
    measured = json.loads(results.read_text(encoding="utf-8"))
    assert set(measured) == set(miles_sums.CASES)
    for name, values in measured.items():
        assert values["error"] < 1e-6, name
        assert values["tokens"] < 0.75, name


class Recorded:
    """Object with given attributes only, which records the names that are read."""

    read: ClassVar[set[str]]

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def __copy__(self) -> Recorded:
        return type(self)(**object.__getattribute__(self, "__dict__"))

    def __getattribute__(self, name: str) -> Any:
        read = type(self).read
        found = object.__getattribute__(self, name)
        if name == "__dict__":
            return Names(found, read)
        if not name.startswith("_"):
            read.add(name)
        return found


class Names(dict[str, Any]):
    """Attributes by name, which records names as :class:`Recorded` does."""

    def __init__(self, values: dict[str, Any], read: set[str]) -> None:
        super().__init__(values)
        self.read = read

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def make_rewards(samples: list[Any]) -> tuple[list[float], list[float]]:
    """Return rewards, and rewards minus their mean in each group."""
    rewards = [sample.reward for sample in samples]
    groups = np.array([sample.group_index for sample in samples])
    centred = [
        reward - np.mean(np.array(rewards)[groups == group])
        for reward, group in zip(rewards, groups, strict=True)
    ]
    return rewards, centred


def install_stand_in(monkeypatch: pytest.MonkeyPatch, project: str) -> type:
    """Install modules with the recorded functions; return the type of samples."""
    sample = type("Sample", (Recorded,), {"__module__": f"{project}.utils.types", "read": set()})

    class Manager:
        def _post_process_rewards(self, samples):
            hook = self.custom_reward_post_process_func
            return hook(self.args, samples) if hook else make_rewards(samples)

    def post_process(args, samples, custom_reward_post_process_func, prompt_group_sizes=None):
        hook = custom_reward_post_process_func
        return hook(args, samples) if hook else make_rewards(samples)

    def load_function(path):
        module, _, name = path.rpartition(".")
        return getattr(sys.modules[module], name)

    ray = SimpleNamespace(modified_class=Manager)
    contents = {
        "slime.ray.rollout": {"RolloutManager": SimpleNamespace(__ray_metadata__=ray)},
        "miles.ray.rollout.train_data_conversion": {"_post_process_rewards": post_process},
        f"{project}.utils.misc": {"load_function": load_function},
    }
    for name, functions in contents.items():
        if name.startswith(project):
            module = ModuleType(name)
            vars(module).update(functions)
            monkeypatch.setitem(sys.modules, name, module)
            while name := name.rpartition(".")[0]:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return sample


def make_batch(project: str, sample: type, rewards: list[float], samples: int = 4) -> list[Any]:
    batch = []
    for index, reward in enumerate(rewards):
        values = dict.fromkeys(CONTRACTS[project]["sample"])
        values |= {
            "group_index": index // samples,
            "index": index,
            "tokens": [7, 1, 2, 3, 4],
            "response_length": 3,
            "reward": reward,
            "loss_mask": [1, 0, 1] if index else None,  # slime fills the mask in later
            "remove_sample": False,
            "rollout_log_probs": [-0.5, -1.0, -0.1],
        }
        if "rollout_top_p_token_ids" in values:
            values["rollout_top_p_token_ids"] = [1, 1, 2, 1, 2, 3]
            values["rollout_top_p_token_offsets"] = [0, 1, 3, 6]
        batch.append(sample(**values))
    return batch


def make_arguments(**changed: Any) -> Any:
    names = {name for contract in CONTRACTS.values() for name in contract["arguments"]}
    values = {name: DEFAULTS[name] for name in sorted(names & set(DEFAULTS))}
    arguments = type("Arguments", (Recorded,), {"read": set()})
    return arguments(**(values | {"global_batch_size": 8, "use_kl_loss": True} | changed))


REWARDS = [1.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.1]


@pytest.mark.parametrize("project", PROJECTS)
def test_only_recorded_names_are_read(monkeypatch, project):
    sample = install_stand_in(monkeypatch, project)
    batch = make_batch(project, sample, REWARDS)
    sample.read.clear()
    args = make_arguments()
    raw, rewards = plugin.prune_rewards(args, batch)
    assert raw == REWARDS and len(rewards) == len(REWARDS)
    every = {name for contract in CONTRACTS.values() for name in contract["arguments"]}
    assert type(args).read == every
    assert sample.read - {"reward"} <= {
        name for contract in CONTRACTS.values() for name in contract["sample"]
    }
    own = set(CONTRACTS[project]["sample"])
    assert own <= sample.read | {"multimodal_train_inputs"}


def test_dropped_samples_are_stubs_that_keep_their_rollout(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    sample = install_stand_in(monkeypatch, "slime")
    batch = make_batch("slime", sample, REWARDS)
    for index, each in enumerate(batch):
        each.rollout_id = 10 + index
    _, rewards = plugin.prune_rewards(make_arguments(), batch)
    stubs = batch[4:]
    assert [stub.rollout_id for stub in stubs] == [14, 15, 16, 17]
    assert rewards[4:] == [0.0] * 4
    for stub in stubs:
        assert (stub.tokens, stub.response_length, stub.loss_mask) == ([7, 4], 1, [0])
        assert stub.rollout_log_probs == [-0.5]
        assert stub.rollout_top_p_token_offsets == [0, 1] and stub.rollout_top_p_token_ids == [1]
    assert "50% of the completions and 50% of the tokens" in caplog.text
    assert "variance inflation 1.00" in caplog.text


def test_rounding_is_no_advantage(monkeypatch):
    """The mean of seven 0.1 is not 0.1, so that their advantages are not 0."""
    sample = install_stand_in(monkeypatch, "slime")
    batch = make_batch("slime", sample, [1.0] + [0.0] * 6 + [0.1] * 7, samples=7)
    _, centred = make_rewards(batch)
    assert all(centred[7:])
    _, rewards = plugin.prune_rewards(make_arguments(global_batch_size=14), batch)
    assert rewards[7:] == [0.0] * 7
    large = make_batch("slime", sample, [5.0] * 8)
    path = f"{__name__}.own_rewards"
    args = make_arguments(pruning_reward_post_process_path=path, pruning_budget=1.0)
    _, rewards = plugin.prune_rewards(args, large)
    assert rewards[4:] == [5.0] * 4, "equal rewards with real advantages are trained on"


def test_samples_without_a_response_are_left_as_they_are(monkeypatch):
    """As those of an aborted generation."""
    sample = install_stand_in(monkeypatch, "slime")
    batch = make_batch("slime", sample, REWARDS)
    empty = batch[5]
    empty.response_length, empty.loss_mask, empty.rollout_log_probs = 0, [], []
    plugin.prune_rewards(make_arguments(), batch)
    assert batch[5] is empty


def test_rollouts_that_fill_no_step_are_dropped(monkeypatch):
    sample = install_stand_in(monkeypatch, "slime")
    batch = make_batch("slime", sample, [1.0, 0.0, 0.0, 0.0] * 3)
    _, rewards = plugin.prune_rewards(make_arguments(pruning_budget=1.0), batch)
    assert rewards[8:] == [0.0] * 4 and all(rewards[:8])


def test_sampled_probabilities_of_one_do_not_drop_a_sample_for_certain(monkeypatch):
    sample = install_stand_in(monkeypatch, "slime")
    batch = make_batch("slime", sample, REWARDS)
    batch[1].rollout_log_probs = [0.0, 0.0, 0.0]
    seen = []
    draw = pruning.draw_completions

    def record(rule, candidates, inclusion, rng):
        seen.append(inclusion.ravel())
        return draw(rule, candidates, inclusion, rng)

    monkeypatch.setattr(pruning, "draw_completions", record)
    plugin.prune_rewards(make_arguments(pruning_budget=0.3), batch)
    assert (seen[0] > 0.0).sum() == 4
    assert seen[0][seen[0] > 0.0].min() >= 0.1


def test_training_fraction_moves_the_share(monkeypatch):
    """The less of a step is training, the more completions are kept."""
    sample = install_stand_in(monkeypatch, "slime")
    shares = []
    for fraction in (0.05, 0.9):
        rng = np.random.default_rng(0)
        batch = make_batch("slime", sample, rng.random(64).tolist(), samples=8)
        for each in batch:
            length = int(rng.integers(3, 40))
            each.rollout_log_probs = (-rng.exponential(1.0, length)).tolist()
            each.response_length, each.loss_mask = length, None
            each.tokens = [1] * (length + 2)
            each.rollout_top_p_token_ids = each.rollout_top_p_token_offsets = None
        whole = sum(len(each.tokens) for each in batch)
        args = make_arguments(global_batch_size=64, pruning_training_fraction=fraction)
        plugin.prune_rewards(args, batch)
        shares.append(sum(len(each.tokens) for each in batch) / whole)
    assert shares[0] > shares[1] + 0.1


def own_rewards(args, samples):
    return ["raw"] * len(samples), [3.0, -1.0, -1.0, -1.0, *([5.0] * 4)]


def test_a_users_hook_gives_the_rewards(monkeypatch):
    sample = install_stand_in(monkeypatch, "slime")
    batch = make_batch("slime", sample, REWARDS)
    path = f"{__name__}.own_rewards"
    args = make_arguments(pruning_reward_post_process_path=path, pruning_budget=1.0)
    raw, rewards = plugin.prune_rewards(args, batch)
    assert raw == ["raw"] * 8
    assert rewards == [3.0, -1.0, -1.0, -1.0, 5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("pruning_budgte", 0.5),
        ("pruning_budget", 1.5),
        ("pruning_training_fraction", 0.0),
        ("pruning_max_weight", 0.5),
        ("pruning_rule", "top_k"),
        ("advantage_estimator", "ppo"),
        ("custom_tis_function_path", "mine.correct"),
        ("moe_aux_loss_coeff", [0.0, 0.01]),
        ("use_dynamic_global_batch_size", True),
        ("use_dynamic_batch_size", False),
    ],
)
def test_wrong_settings_are_refused(setting, value):
    with pytest.raises(UserError) as raised:
        plugin.read_pruning_settings(make_arguments(**{setting: value}))
    name = re.sub(r"[^a-z]", "_", raised.value.setting.removeprefix("--"))
    assert name == setting and raised.value.value == value


def test_samples_without_an_index_are_refused(monkeypatch):
    sample = install_stand_in(monkeypatch, "slime")
    batch = make_batch("slime", sample, REWARDS)
    batch[0].index = None
    with pytest.raises(UserError, match=r"sample\.index"):
        plugin.prune_rewards(make_arguments(), batch)


@pytest.mark.parametrize("project", PROJECTS)
def test_recorded_names_are_in_the_source(project):
    variable = project.upper()
    if variable not in os.environ:
        pytest.skip(f"{variable} names no checkout")
    source = Path(os.environ[variable], project)
    contract = CONTRACTS[project]
    types = ast.parse((source / "utils/types.py").read_text(encoding="utf-8"))
    [sample] = [
        node for node in types.body if isinstance(node, ast.ClassDef) and node.name == "Sample"
    ]
    fields = {node.target.id for node in sample.body if isinstance(node, ast.AnnAssign)}
    assert set(contract["sample"]) <= fields
    text = (source / "utils/arguments.py").read_text(encoding="utf-8")
    everywhere = "".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    for name in contract["arguments"]:
        flag = "--" + name.replace("_", "-")
        assert flag in text or f"args.{name}" in everywhere, name
    for place, parameters in contract["functions"].items():
        file, name = place.split(":")
        tree = ast.parse((source / file).read_text(encoding="utf-8"))
        [found] = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        assert [each.arg for each in found.args.args] == parameters
    assert "custom_reward_post_process_func(self.args, samples)" in everywhere or (
        "return f(args, samples)" in everywhere
    )
