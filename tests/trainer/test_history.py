"""A run's results keep the name of the settings that made them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, Checksums
from megatron_dppo.config import replace
from megatron_dppo.errors import UserError
from megatron_dppo.settings import as_yaml, load_config, settings
from megatron_dppo.trainer.resume import (
    HISTORY,
    IN_FORCE,
    RULES,
    WARM_UP,
    changed_since,
    check_resume,
    check_warm_up,
    read_history,
    record,
    rule_of,
    same_prompts,
)
from megatron_dppo.trainer.writer import Writer, write_state


def words(folder: Path, *overrides: str) -> list[str]:
    return [f"run.dir={folder}", "loss.name=grpo", "model.path=policy", *overrides]


def with_checkpoint(folder: Path, step: int) -> None:
    place = folder / "checkpoints" / f"iter_{step:07d}"
    place.mkdir(parents=True)
    (place / "common.pt").touch()
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    write_state(place, {}, Writer.of(load_config(None, words(folder))))
    Checksums(place, {}).write()
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(f"{step}\n")


@pytest.mark.parametrize(
    "override",
    ["model.path=other", "data.train=other.jsonl", "data.arithmetic.seed=5", "reward.function=exact", "loss.name=gspo",
     "loss.kl_coef=0.1", "pruning.completions.keep=0.3", "pruning.prompts.schedule.ramp=0.4", "rollout.temperature=0.7",
     "run.seed=2", "rollout.prompts_per_step=16", "rollout.conversation=a:b"],
)  # fmt: skip
def test_what_results_are_of_changes_only_where_that_is_asked_for(override: str, tmp_path: Path) -> None:
    record(tmp_path, 0, load_config(None, words(tmp_path)))
    with_checkpoint(tmp_path, 3)
    other = load_config(None, words(tmp_path, override))
    key, _, value = override.partition("=")
    with pytest.raises(UserError) as caught:
        check_resume(other)
    assert caught.value.setting == "run.dir"
    assert "holds 3 steps" in caught.value.problem and f"{key} = {value} (was " in caught.value.problem
    assert "run.resume=anyway" in caught.value.remedy
    check_resume(replace(other, run=replace(other.run, resume="anyway")))


def test_the_table_says_of_every_setting_whether_a_resume_may_change_it() -> None:
    """And has no line that no setting needs."""
    longest = {key: max((start for start in RULES if key.startswith(start)), key=len) for key in settings()}
    assert set(longest.values()) == set(RULES) and not any(rule_of(key) != RULES[longest[key]] for key in settings())
    assert rule_of("reward.workers") == "free" and rule_of("reward.function: reward.py") == "kept"


def test_a_run_does_not_resume_where_its_checksums_were_removed(tmp_path: Path) -> None:
    record(tmp_path, 0, load_config(None, words(tmp_path)))
    with_checkpoint(tmp_path, 3)
    check_resume(load_config(None, words(tmp_path)))
    (tmp_path / "checkpoints" / "iter_0000003" / CHECKSUMS).unlink()
    with pytest.raises(UserError, match=r"checksums\.json is missing"):
        check_resume(load_config(None, words(tmp_path)))


def test_what_is_given_from_python_may_be_called_otherwise(tmp_path: Path) -> None:
    """Its copy in the run's folder is the same file; a file of the user's own has several functions."""
    names = [f"reward.function={tmp_path}/reward.py:{name}" for name in ("short", "brief")]
    (tmp_path / "reward.py").write_text("")
    record(tmp_path, 0, load_config(None, words(tmp_path, names[0])))
    with_checkpoint(tmp_path, 3)
    with pytest.raises(UserError, match=r"\nreward\.function = "):
        check_resume(load_config(None, words(tmp_path, names[1])))
    (tmp_path / "reward.pkl").write_text("")
    check_resume(load_config(None, words(tmp_path, names[1])))


@pytest.mark.parametrize(
    "override",
    ["run.steps=9", "run.checkpoint_every=1", "optimizer.lr=1e-7", "rollout.max_response_tokens=7", "eval.every=3",
     "layout.dp=4", "reward.timeout_s=3", "reward.workers=2", "model.path=./policy", "rollout.engine=sglang"],
)  # fmt: skip
def test_how_long_how_fast_and_where_a_run_goes_on_may_change(override: str, tmp_path: Path) -> None:
    record(tmp_path, 0, load_config(None, words(tmp_path)))
    with_checkpoint(tmp_path, 3)
    check_resume(load_config(None, words(tmp_path, override)))


@pytest.mark.parametrize(
    ("teachers", "moved"),
    [("{a: http://h:2, b: ./dir, c: null}", True), ("{a: http://h:1, b: other, c: null}", False), ("{a: dir}", False)],
)
def test_a_server_that_teaches_may_move_and_other_teachers_are_other_settings(
    teachers: str, moved: bool, tmp_path: Path
) -> None:
    setting = "loss.distillation.teachers="
    before = load_config(None, words(tmp_path, f"{setting}{{a: http://h:1, b: dir, c: null}}"))
    record(tmp_path, 0, before)
    found = changed_since(tmp_path, 3, load_config(None, words(tmp_path, setting + teachers)))
    assert (found == []) == moved


def test_a_run_that_has_saved_nothing_begins_anew_with_whatever_settings(tmp_path: Path) -> None:
    record(tmp_path, 0, load_config(None, words(tmp_path)))
    check_resume(load_config(None, words(tmp_path, "loss.name=gspo")))


def test_each_step_has_the_settings_that_it_was_taken_by(tmp_path: Path) -> None:
    def names() -> list[tuple[int, str]]:
        return [(entry.step, entry.settings["loss.name"]) for entry in read_history(tmp_path)]

    configs = {name: load_config(None, words(tmp_path, f"loss.name={name}")) for name in ("grpo", "gspo", "dapo")}
    record(tmp_path, 0, configs["grpo"])
    record(tmp_path, 10, configs["grpo"])
    assert names() == [(0, "grpo")]
    record(tmp_path, 20, configs["gspo"])
    record(tmp_path, 30, configs["dapo"])
    assert names() == [(0, "grpo"), (20, "gspo"), (30, "dapo")]
    assert (tmp_path / IN_FORCE).read_text() == as_yaml(configs["dapo"])
    assert [change.now for change in changed_since(tmp_path, 30, configs["dapo"])] == ["dapo"]
    assert changed_since(tmp_path, 31, configs["dapo"]) == []
    record(tmp_path, 20, configs["grpo"])  # back to an earlier checkpoint: steps 21 to 30 are taken again
    assert names() == [(0, "grpo")]


@pytest.mark.parametrize(
    ("override", "modes"),
    [("run.seed=2", {0o002: 0o664, 0o027: 0o640}), ("rollout.launch.env=[TOKEN=hf_x]", {0o002: 0o600, 0o027: 0o600}),
     ("data.verifiers.arguments={key: x}", {0o002: 0o600})],
)  # fmt: skip
def test_settings_that_may_hold_keys_are_their_owner_s_and_others_as_the_umask_has_it(
    override: str, modes: dict[int, int], tmp_path: Path
) -> None:
    for umask, mode in modes.items():
        (tmp_path / f"{IN_FORCE}.partial").touch(0o666)
        before = os.umask(umask)
        try:
            record(tmp_path, 0, load_config(None, words(tmp_path, override)))
        finally:
            os.umask(before)
        assert {(tmp_path / name).stat().st_mode & 0o777 for name in (HISTORY, IN_FORCE)} == {mode}


def test_a_run_of_an_earlier_version_has_the_settings_that_it_left(tmp_path: Path) -> None:
    left = as_yaml(load_config(None, words(tmp_path))).replace("  seed: 1\n", "").replace("loss:", "loss:\n  gone: 4")
    (tmp_path / IN_FORCE).write_text(left)
    with_checkpoint(tmp_path, 3)
    check_resume(load_config(None, words(tmp_path)))  # what it did not know had its default
    with pytest.raises(UserError, match=r"loss\.name = gspo \(was grpo\)"):
        check_resume(load_config(None, words(tmp_path, "loss.name=gspo")))


def test_a_torn_history_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    record(tmp_path, 0, load_config(None, words(tmp_path)))
    with (tmp_path / HISTORY).open("a") as torn:
        torn.write('{"step": 20, "sett')
    assert [entry.step for entry in read_history(tmp_path)] == [0]


def test_other_prompts_begin_a_new_order_and_other_losses_do_not(tmp_path: Path) -> None:
    record(tmp_path, 0, load_config(None, words(tmp_path)))
    for override, same in (("loss.name=gspo", True), ("data.arithmetic.seed=3", False), ("run.seed=3", False)):
        assert same_prompts(tmp_path, 3, load_config(None, words(tmp_path, override))) == same


def test_a_policy_that_sft_has_warmed_up_is_not_warmed_up_again_in_silence(tmp_path: Path) -> None:
    config = load_config(None, [f"model.path={tmp_path}"])
    check_warm_up(config)
    for left, source in ((json.dumps({"model.path": "runs/initial"}), "runs/initial"), ("{", "THE_INITIAL_POLICY")):
        (tmp_path / WARM_UP).write_text(left)
        with pytest.raises(UserError) as caught:
            check_warm_up(config)
        assert caught.value.remedy.startswith(f"Set model.path={source} ")
        check_warm_up(replace(config, run=replace(config.run, resume="anyway")))
