"""Results of a run keep the name of the settings that made them; all other settings may change at a
resume."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.bridge.checkpoint_folder import CHECKSUMS, format_iteration_name
from megatron_dppo.config import Config, replace
from megatron_dppo.errors import UserError
from megatron_dppo.settings import HISTORY, IN_FORCE, RENAMED, as_yaml, get_settings, load_config
from megatron_dppo.trainer.preflight import run_preflight
from megatron_dppo.trainer.resume import (
    PROMPTS,
    RULES,
    SEGMENTS,
    WARM_UP,
    check_resume,
    check_warm_up,
    find_changes_since,
    get_rule,
    is_unchanged,
    list_renamed,
    read_history,
    record_settings,
    record_warm_up,
)
from tests.ranks import RankPool
from tests.small_runs import live, rows, small_run, write_run
from tests.trainer.test_preflight import write_marks


def config_of(folder: Path, *overrides: str) -> Config:
    return load_config(
        None, [f"run.dir={folder}", "loss.name=grpo", "model.path=policy", *overrides]
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run with a checkpoint after step 3."""
    record_settings(tmp_path, 0, config_of(tmp_path))
    write_marks(config_of(tmp_path), 3)
    return tmp_path


KEPT = (
    "model.path=other", "data.train=other.jsonl", "reward.function=exact", "loss.name=gspo",
    "pruning.completions.keep=0.3", "rollout.temperature=0.7", "run.seed=2",
    "rollout.conversation=a:b",
    "rollout.tree.baseline=depth",
)  # fmt: skip


@pytest.mark.parametrize("override", KEPT)
def test_settings_of_results_change_only_on_request(override: str, saved: Path) -> None:
    other = config_of(saved, override)
    key, _, value = override.partition("=")
    with pytest.raises(UserError) as caught:
        check_resume(other)
    assert caught.value.setting == "run.dir"
    assert "holds 3 steps" in caught.value.problem
    assert f"{key} = {value} (was " in caught.value.problem
    check_resume(replace(other, run=replace(other.run, resume="force")))


def test_every_setting_has_a_rule() -> None:
    """The longest beginning of its name decides, and every rule decides for a setting."""
    longest = {
        max((start for start in RULES if key.startswith(start)), key=len) for key in get_settings()
    }
    assert longest == {*RULES}
    assert get_rule("reward.workers") == "free"
    assert get_rule("reward.function: reward.py") == "kept"


def test_run_without_checksums_is_not_resumed(saved: Path) -> None:
    check_resume(config_of(saved))
    (saved / "checkpoints" / format_iteration_name(3) / CHECKSUMS).unlink()
    with pytest.raises(UserError, match=r"checksums\.json is missing"):
        check_resume(config_of(saved))


CHANGED = """
run.steps=2 run.checkpoint_every=2 run.keep_checkpoints=3 run.keep_best=false run.stall_warning_s=60 run.max_idle_steps=5
run.length_gate=3 run.loggers=[] run.profile=[2] run.export=true run.checkpoint_in_background=true
model.deterministic=true model.recompute=selective model.head_chunk_mib=8 model.spec=torch
layout.timeout_s=300 optimizer.lr=5e-4 optimizer.schedule=cosine optimizer.min_lr=1e-5 optimizer.warmup_steps=1
optimizer.clip_grad=0.5 optimizer.weight_decay=0.01 optimizer.beta1=0.8 optimizer.beta2=0.99 optimizer.eps=1e-7
optimizer.offload=true eval.every=2 eval.problems=3 eval.samples=2
eval.temperature=0.5 eval.show=1 eval.batch=2 eval.top_p=0.9 eval.top_k=5 eval.max_response_tokens=7 rollout.ahead=1
rollout.samples_per_prompt=3 rollout.max_response_tokens=8 rollout.stop_token_ids=[2,3] rollout.max_batch=32
rollout.timeout_s=900 rollout.max_logprob_diff=1 rollout.max_prob_error=9 rollout.sync.check_every=1
rollout.sync.bucket_mib=1 reward.timeout_s=20 reward.workers=2 reward.memory_mib=2048 reward.max_failures=0.2
pack.max_tokens=128 pack.window=8 pack.min_per_rank=1 pack.share_prefixes=off
"""


def train_as_megatron_0_19(rank: int, size: int, configs: list[Config]) -> None:
    """Train where Megatron-Core tells groups of an optimizer apart by their rates, too."""
    for name in ("optimizer", "distrib_optimizer"):
        module: Any = import_module(f"megatron.core.optimizer.{name}")
        known = module.param_group_identifier_keys
        module.param_group_identifier_keys = (
            *known,
            *(key for key in ("max_lr", "min_lr") if key not in known),
        )
    for config in configs:
        run_preflight(config, "train")
        live(rank, size, config)


def test_run_resumes_with_all_free_settings_changed(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "policy")
    first = ("run.steps=1", "run.checkpoint_every=1", "rollout.samples_per_prompt=4")
    configs = [small_run(folder, tmp_path / "run", *words) for words in (first, CHANGED.split())]
    ranks.run(1, train_as_megatron_0_19, configs)
    row = rows(tmp_path / "run")[-1]
    assert row["step"] == 2
    assert row["train/tokens"] > 0
    assert row["train/grad_norm"] > 0


@pytest.mark.parametrize(
    ("teachers", "moved"),
    [
        ("{a: http://h:2, b: ./dir, c: null}", True),
        ("{a: http://h:1, b: other, c: null}", False),
        ("{a: dir}", False),
    ],
)
def test_teacher_may_move(teachers: str, moved: bool, tmp_path: Path) -> None:
    setting = "loss.distillation.teachers="
    record_settings(
        tmp_path, 0, config_of(tmp_path, f"{setting}{{a: http://h:1, b: dir, c: null}}")
    )
    assert (find_changes_since(tmp_path, 3, config_of(tmp_path, setting + teachers)) == []) == moved


def test_run_without_a_checkpoint_begins_with_any_settings(tmp_path: Path) -> None:
    record_settings(tmp_path, 0, config_of(tmp_path))
    check_resume(config_of(tmp_path, "loss.name=gspo"))


def test_each_step_keeps_the_settings_of_the_time(tmp_path: Path) -> None:
    def names() -> list[tuple[int, str]]:
        return [(entry.step, entry.settings["loss.name"]) for entry in read_history(tmp_path)]

    configs = {name: config_of(tmp_path, f"loss.name={name}") for name in ("grpo", "gspo", "dapo")}
    for step, name in ((0, "grpo"), (10, "grpo"), (20, "gspo"), (30, "dapo")):
        record_settings(tmp_path, step, configs[name])
    assert names() == [(0, "grpo"), (20, "gspo"), (30, "dapo")]
    assert (tmp_path / IN_FORCE).read_text() == as_yaml(configs["dapo"])
    assert [change.now for change in find_changes_since(tmp_path, 30, configs["dapo"])] == ["dapo"]
    assert find_changes_since(tmp_path, 31, configs["dapo"]) == []
    record_settings(
        tmp_path, 20, configs["grpo"]
    )  # steps 21 to 30 are repeated from an earlier checkpoint
    assert names() == [(0, "grpo")]


@pytest.mark.parametrize(
    ("override", "umask", "mode"),
    [
        ("run.seed=2", 0o002, 0o664),
        ("run.seed=2", 0o027, 0o640),
        ("rollout.launch.env=[TOKEN=hf_x]", 0o002, 0o600),
        ("data.verifiers.arguments={key: x}", 0o002, 0o600),
        ("data.chat_template_kwargs={key: x}", 0o002, 0o600),
        ("rollout.servers=[http://me:x@host]", 0o002, 0o600),
    ],
)
def test_settings_with_keys_are_private(
    override: str, umask: int, mode: int, tmp_path: Path
) -> None:
    (tmp_path / f"{IN_FORCE}.partial").touch(0o666)
    before = os.umask(umask)
    try:
        record_settings(tmp_path, 0, config_of(tmp_path, override))
    finally:
        os.umask(before)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in (HISTORY, IN_FORCE)} == {mode}


def test_keys_of_earlier_steps_stay_private(tmp_path: Path) -> None:
    for step, override in ((0, "data.verifiers.arguments={key: x}"), (3, "run.seed=2")):
        record_settings(tmp_path, step, config_of(tmp_path, override))
    assert (tmp_path / HISTORY).stat().st_mode & 0o077 == 0


def test_settings_beside_a_warmed_up_policy_have_no_keys(tmp_path: Path) -> None:
    record_warm_up(tmp_path, config_of(tmp_path, "rollout.launch.env=[TOKEN=hunter2]"))
    assert json.loads((tmp_path / WARM_UP).read_text())["rollout.launch.env"] == ["TOKEN=…"]


NEW = (
    "run.stall_warning_s=60", "run.resume=force", "eval.baseline=before", "pruning.target_noise=1",
    "cluster.stop_before_limit_s=60", "pruning.resample=prompts",
)  # fmt: skip


def write_old_names(folder: Path) -> None:
    """Write all old names into a run's files."""
    for old, new in RENAMED.items():
        words = [text.partition("=") for text in (old, new)]
        for file in (folder / HISTORY, folder / IN_FORCE):
            before, after = (
                (f'"{key}": "{word}"' if word else f'"{key}":')
                if file.name == HISTORY
                else f"\n  {key.rpartition('.')[2]}:{f' {word}' * bool(word)}"
                for key, _, word in words
            )
            text = file.read_text()
            assert text.count(after) == 1
            file.write_text(text.replace(after, before))


@pytest.mark.parametrize("lost", ["", HISTORY])
def test_old_names_in_the_files_of_a_run_are_translated(lost: str, saved: Path) -> None:
    config = config_of(saved, *NEW)
    (saved / HISTORY).unlink()
    record_settings(saved, 0, config)
    write_old_names(saved)
    if lost:
        (saved / lost).unlink()
    assert {*list_renamed(read_history(saved))} == {*RENAMED}
    assert find_changes_since(saved, 3, config) == []
    check_resume(replace(config, run=replace(config.run, resume="same")))
    other = config_of(saved, *NEW, "run.resume=same", "pruning.target_noise=2")
    with pytest.raises(UserError, match=r"pruning\.target_noise = 2\.0 \(was 1\.0\)"):
        check_resume(other)


def test_file_of_a_run_is_read_with_old_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, *NEW)
    record_settings(tmp_path, 0, config)
    write_old_names(tmp_path)
    file = tmp_path / IN_FORCE
    assert load_config(str(file), ()) == config
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"note  {file}: run.")
    assert all(f"{old} is now {new}" in said for old, new in RENAMED.items())
    (tmp_path / HISTORY).unlink()
    with pytest.raises(UserError, match=r"run\.resume=anyway is now run\.resume=force"):
        load_config(str(file), ())


def test_torn_history_is_read_to_the_last_whole_line(tmp_path: Path) -> None:
    record_settings(tmp_path, 0, config_of(tmp_path))
    with (tmp_path / HISTORY).open("a") as torn:
        torn.write('{"step": 20, "sett')
    assert [entry.step for entry in read_history(tmp_path)] == [0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (IN_FORCE, "run: &a {x: *a}"),
        (
            IN_FORCE,
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 40)),
        ),
        (HISTORY, '{"step": 0, "settings": ' + '{"a":' * 100_000),
        (HISTORY, '{"step": 0, "settings": {"a": ' + '{"a":' * 100 + "1" + "}" * 102),
        (HISTORY, '{"step": 1e400, "settings": {}}'),
    ],
)
def test_settings_without_end_are_none(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_history(tmp_path) == []


def test_other_prompts_begin_a_new_order(tmp_path: Path) -> None:
    record_settings(tmp_path, 0, config_of(tmp_path))
    for override, same in (
        ("loss.name=gspo", True),
        ("data.arithmetic.seed=3", False),
        ("run.seed=3", False),
    ):
        assert is_unchanged(tmp_path, 3, config_of(tmp_path, override), PROMPTS) == same


def test_groups_of_another_tree_are_other_groups(tmp_path: Path) -> None:
    def tree(roots: int, children: int) -> Config:
        return config_of(
            tmp_path,
            f"rollout.tree.branches=[{{at: 2, children: {children}}}]",
            f"rollout.tree.roots={roots}",
        )

    record_settings(tmp_path, 0, tree(4, 2))
    assert [is_unchanged(tmp_path, 3, config, SEGMENTS) for config in (tree(4, 2), tree(2, 4))] == [
        True,
        False,
    ]


def test_policy_after_sft_is_not_warmed_up_again(tmp_path: Path) -> None:
    config = load_config(None, [f"model.path={tmp_path}"])
    check_warm_up(config)
    for left, source in (
        (json.dumps({"model.path": "runs/initial"}), "runs/initial"),
        ("{", "THE_INITIAL_POLICY"),
    ):
        (tmp_path / WARM_UP).write_text(left)
        with pytest.raises(UserError) as caught:
            check_warm_up(config)
        assert f"model.path={source} " in caught.value.remedy
        check_warm_up(replace(config, run=replace(config.run, resume="force")))
