"""What a plan says of sizes, work and money holds together; what it proposes, helps."""

import json
import re

import pytest

from megatron_dppo.bridge.mapping import count_parameters
from megatron_dppo.cli import main
from megatron_dppo.config import LayoutConfig
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import GPUS, Assumptions, read_assumptions
from megatron_dppo.estimate.memory import (
    count_parameter_kinds,
    count_rank_elements,
    count_resident_bytes,
    resolve_shape,
)
from megatron_dppo.estimate.plan import as_json, make_plan
from megatron_dppo.estimate.report import as_text
from megatron_dppo.estimate.workload import Lengths, Setup, Work
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.settings import load_config
from tests.estimate.planned import EXPERTS, LARGE, ROOT, SMALL, of, plan, setup, trainer_parts


def test_one_of_several_teachers_is_in_memory() -> None:
    def held(named: str) -> dict[str, float]:
        return trainer_parts(
            of(f"loss.distillation.teachers={{{named}}}", "layout.tp=1", "layout.pp=1", file=SMALL)
        )

    one, several = held("a: qwen3-8b"), held("a: qwen3-8b, b: qwen3-4b, c: http://t:1, d: null")
    head = 2 * PUBLISHED["qwen3-4b"].vocab_size * PUBLISHED["qwen3-4b"].hidden
    assert several["teacher"] - one["teacher"] == pytest.approx(head, rel=1e-3)
    assert held("c: http://t:1")["teacher"] == 0.0


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_mapping(name: str) -> None:
    counted = count_parameter_kinds(PUBLISHED[name])
    assert counted.total == count_parameters(PUBLISHED[name])
    assert (counted.active < counted.total) == bool(PUBLISHED[name].experts)


def test_active_parameters_equal_the_model_cards() -> None:
    for name, billions in (
        ("qwen3-30b-a3b", 3.3),
        ("qwen3-235b-a22b", 22.2),
        ("qwen3.5-35b-a3b", 3.5),
    ):
        assert count_parameter_kinds(PUBLISHED[name]).active / 1e9 == pytest.approx(
            billions, abs=0.1
        )


@pytest.mark.parametrize("name", ["qwen3-1.7b", "qwen3-30b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
def test_shards_add_up_to_the_policy(name: str) -> None:
    """Stages and slices add up, but for what every rank has: norms, routers, and a tied output
    layer's copy."""
    shape, together = PUBLISHED[name], count_parameter_kinds(PUBLISHED[name]).total
    tp = min(4, shape.kv_heads)
    held = (
        sum(
            count_rank_elements(shape, stage, LayoutConfig(tp=tp, pp=4)).total for stage in range(4)
        )
        * tp
    )
    copied = shape.vocab_size * shape.hidden if shape.tied else 0
    assert 0 <= held - together - copied < 0.003 * together


def test_published_model_is_known_by_name() -> None:
    for words, hidden in (
        ("Qwen/Qwen3-32B", 5120),
        ("x/Qwen3-30B-A3B-Base", 2048),
        ("/x/Qwen3-4B-Instruct-2507-FP8", 2560),
    ):
        assert resolve_shape(words).hidden == hidden


def test_plain_optimizer_is_whole_on_each_replica() -> None:
    shared, whole = (trainer_parts(of(f"optimizer.distributed={on}")) for on in ("true", "false"))
    assert whole == shared | {"optimizer": 2 * shared["optimizer"]}


def test_reference_takes_as_much_memory_as_the_weights() -> None:
    plain = trainer_parts(of())
    assert trainer_parts(of("loss.kl_coef=0.01")) == plain | {"reference": plain["weights"]}


def test_head_memory_is_one_chunk() -> None:
    """And no more than a pack's logits and their gradient."""
    unset, small, large, all_of_it, more = (
        trainer_parts(of("layout.pp=1", *settings))["head"]
        for settings in (
            (),
            *((f"model.head_chunk_mib={size}",) for size in (1024, 1536, 99999, 999999)),
        )
    )
    assert unset == small == large - 512 * 2**20
    assert large < all_of_it == more


def test_offloaded_state_uses_the_room_of_activations() -> None:
    plain = trainer_parts(of("loss.kl_coef=0.01"))
    moved = trainer_parts(
        of("loss.kl_coef=0.01", "optimizer.offload=true", "model.reference_on_host=true")
    )
    passes = plain["activations"] + plain["head"]
    assert plain["optimizer"] < passes and (moved["optimizer"], moved["reference"]) == (0.0, 0.0)
    large = (
        "cluster.nodes=2",
        "layout.tp=4",
        "layout.pp=4",
        "pack.max_tokens=9216",
        "model.recompute=full",
    )
    plain, moved = trainer_parts(of(*large)), trainer_parts(of(*large, "optimizer.offload=true"))
    assert moved["optimizer"] == plain["optimizer"] - plain["activations"] - plain["head"] > 0.0


def test_colocated_servers_get_the_memory_left_by_the_trainer() -> None:
    servers = (
        "cluster.server_nodes=0",
        "rollout.servers=[]",
        "rollout.launch.count=1",
        "rollout.ahead=0",
    )
    shared = plan(
        *servers, "rollout.colocated=true", "rollout.sync.transport=disk", "model.recompute=full"
    )
    held = sum(shared.actor.parts[name] for name in ("weights", "optimizer", "reserved"))
    assert shared.server.memory.room == pytest.approx(GPUS["h100"].memory_gib * 2**30 - held)
    assert shared.actor.parts["gradients"] > 0 and shared.actor.parts["asleep"] > 0
    assert plan().actor.parts["asleep"] == 0.0


def test_offloaded_state_is_not_resident_while_generating() -> None:
    large = (
        "cluster.nodes=2",
        "layout.tp=4",
        "layout.pp=4",
        "pack.max_tokens=9216",
        "model.recompute=full",
    )
    for where, kept in (("rollout.colocated=false", ["gradients"]), ("rollout.colocated=true", [])):
        made = plan(
            *large,
            "optimizer.offload=true",
            "rollout.ahead=0",
            "rollout.sync.transport=disk",
            where,
        )
        parts = made.actor.parts
        assert parts["optimizer"] > 0.0, "once the passes are over"
        expected = sum(parts[name] for name in ("weights", "reserved", *kept))
        assert count_resident_bytes(made.config, made.actor) == pytest.approx(expected)


TOO_LARGE = [
    ("layout.pp=1", "layout.tp=4"),
    ("cluster.gpu=a100-40",),
    ("layout.tp=1", "layout.pp=8", "layout.sequence_parallel=false"),
    ("rollout.launch.tp=1",),
]


@pytest.mark.parametrize("overrides", TOO_LARGE, ids=" ".join)
def test_settings_shown_for_an_unfitting_run_fit(overrides: tuple[str, ...]) -> None:
    made = plan(*overrides)
    text = "\n".join(as_text(made))
    assert not made.fits and "It does NOT fit." in text
    words = text.partition("\nfastest: ")[2].splitlines()[2].split()
    assert plan(*overrides, *words).fits


@pytest.mark.parametrize("offload", ["true", "false"])
def test_nearest_miss_is_shown_if_no_setting_fits(offload: str) -> None:
    one = ("cluster.nodes=1", "cluster.server_nodes=1", "layout.ep=1", "layout.cp=1", "layout.tp=1")
    offloaded = f"optimizer.offload={offload}"
    made = plan(
        *one, "layout.sequence_parallel=false", "cluster.gpu=a100-40", offloaded, file=EXPERTS
    )
    text = "\n".join(as_text(made))
    assert (
        "the nearest miss, on 16 GPUs, lacks" in text and "more GPUs with --search --gpus N" in text
    )
    assert ("Or set optimizer.offload=true." in text) == (offload == "false")


def test_unfitting_run_has_no_times() -> None:
    servers = (
        "cluster.server_nodes=0",
        "rollout.servers=[]",
        "rollout.launch.count=4",
        "rollout.ahead=0",
    )
    shared = (
        "rollout.colocated=true",
        "rollout.sync.transport=disk",
        "cluster.nodes=1",
        "layout.pp=1",
        "layout.tp=1",
    )
    made = plan(*servers, *shared, "layout.sequence_parallel=false", "rollout.launch.tp=2")
    text, found = "\n".join(as_text(made)), json.loads(json.dumps(as_json(made)))
    assert not made.server.fits and "GiB, and the trainer leaves no memory on its GPU" in text
    assert "GPU-hours" not in text and "generation" not in text
    absent = ("pruned", "unpruned", "cost", "cost_unpruned", "speed_up", "efficiency")
    assert all(found[name] is None for name in absent)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["cluster.nodes=1", "layout.tp=8", "layout.pp=2"], "layout"),
        (["rollout.launch.tp=16"], "rollout.launch.tp"),
        (["cluster.server_nodes=0"], "cluster.server_nodes"),
        (
            ["rollout.servers=[]", "rollout.launch.count=32", "rollout.launch.tp=1"],
            "rollout.launch.count",
        ),
        (["model.path=models/Qwen7-900B"], "model.path"),
    ],
)
def test_impossible_placements_are_refused_by_name(overrides: list[str], setting: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*overrides)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("prompts", "completions"), [(1.0, 1.0), (0.7, 0.5), (1.0, 0.2), (0.4, 1.0)]
)
def test_pruned_plan_is_never_slower(prompts: float, completions: float) -> None:
    for file in (LARGE, SMALL):
        keep = (f"pruning.prompts.keep={prompts}", f"pruning.completions.keep={completions}")
        for ahead in (0, 1):
            made = plan(*keep, f"rollout.ahead={ahead}", file=file)
            assert made.pruned.seconds <= made.unpruned.seconds * (1 + 1e-9)
            # Of the completions that were rolled out, unpruned runs train on no others either.
            mixed = 0.6
            share = prompts * min(completions, mixed) / mixed
            assert made.pruned.work.trained == pytest.approx(made.unpruned.work.trained * share)
            assert made.cost.gpu_hours <= made.cost_unpruned.gpu_hours * (1 + 1e-9)


def test_shared_prompts_are_trained_on_once_per_pack() -> None:
    settings = [
        "pruning.prompts.rule=none",
        "pruning.completions.rule=none",
        "data.max_prompt_tokens=2048",
    ]

    def work(*more: str) -> tuple[Setup, Work]:
        made = setup(of(*settings, *more), prompt_tokens=2000.0, mixed_share=1.0)
        return made, made.work

    (apart, alone), (_, together) = (
        work(),
        work("pack.share_prefixes=on", "pack.max_tokens=1000000"),
    )
    samples = apart.config.rollout.samples_per_prompt
    assert alone.trained - together.trained == pytest.approx(
        alone.prompts * (samples - 1) * apart.prompt
    )
    assert (
        together.context
        > alone.context
        == pytest.approx(apart.prompt + apart.lengths.token_weighted_mean)
    )
    _, cut = work("pack.share_prefixes=on")
    assert together.trained < cut.trained <= alone.trained


def test_schedules_count_by_their_mean() -> None:
    config = of("pruning.prompts.rule=none", "pruning.completions.schedule.shape=linear",
    "run.steps=1000",
                "pruning.completions.keep=0.5", "pruning.completions.schedule.ramp=0.5")  # fmt: skip
    work = setup(config, mixed_share=1.0).work
    assert work.kept / work.completions == pytest.approx(0.5 * 0.75 + 0.5 * 0.5, abs=1e-3)


def test_dynamic_sampling_rolls_out_more() -> None:
    work = setup(of("pruning.prompts.rule=dynamic_sampling", "pruning.completions.rule=none")).work
    assert (work.kept, work.completions) == (2048.0, pytest.approx(2048 / 0.6))


def test_lengths_have_their_mean_and_their_limit() -> None:
    for mean in (40.0, 500.0, 900.0):
        lengths = Lengths(mean, 1000)
        alive = [lengths.compute_tail_fraction(i + 0.5) for i in range(1000)]
        assert sum(alive) == pytest.approx(mean, rel=0.01)
        squares = 2 * sum((i + 0.5) * share for i, share in enumerate(alive))
        assert squares / mean == pytest.approx(lengths.token_weighted_mean, rel=0.01)
        assert lengths.compute_tail_fraction(1000) == 0.0


def test_planned_passes_equal_the_learner_s() -> None:
    def phases(*overrides: str) -> set[str]:
        return {name for name, seconds in plan(*overrides).pruned.phases.items() if seconds}

    usual = phases()
    assert not usual & {"old log-probabilities", "reference log-probabilities", "token exchange"}
    assert phases("loss.updates_per_rollout=2") - usual == {"old log-probabilities"}
    assert phases("loss.kl_coef=0.01") - usual == {"reference log-probabilities"}


def test_one_step_ahead_hides_the_shorter_phase() -> None:
    apart, ahead = plan("rollout.ahead=0").pruned, plan("rollout.ahead=1").pruned
    assert apart.seconds == pytest.approx(sum(apart.phases.values()))
    assert max(apart.phases.values()) < ahead.seconds < apart.seconds


def test_cost_is_seconds_times_gpus_times_price() -> None:
    made = plan("cluster.price_per_gpu_hour=2.5", "run.steps=300")
    assert made.cost.gpu_hours == pytest.approx(made.pruned.seconds * 300 * 64 / 3600)
    assert made.cost.money == pytest.approx(2.5 * made.cost.gpu_hours)
    assert plan().cost.money is None


def test_local_engine_has_a_copy_of_the_weights() -> None:
    local = (
        "rollout.engine=local",
        "rollout.servers=[]",
        "rollout.ahead=0",
        "cluster.server_nodes=0",
    )
    made = plan(
        *local,
        "model.path=models/Qwen3-1.7B",
        "layout.pp=1",
        "rollout.max_batch=64",
        "model.recompute=full",
    )
    assert made.placement.servers == (1,) * made.placement.ranks == (1,) * 32
    assert made.server.concurrency == 64
    assert (
        made.server.memory.parts["weights"]
        == 2 * count_parameter_kinds(PUBLISHED["qwen3-1.7b"]).total
    )


def test_assumptions_are_set_shown_and_checked() -> None:
    assert read_assumptions(["assume.response_share=0.25"]).response_share == 0.25
    made = make_plan(of(), read_assumptions(["assume.busy_share=0.5"]))
    assert made.pruned.phases["training"] == pytest.approx(1.7 * plan().pruned.phases["training"])
    assert "  busy_share = 0.5" in list(as_text(made))
    with pytest.raises(UserError, match=r"assume\.busy_share"):
        read_assumptions(["assume.bussy_share=0.2"])
    for wrong in ("1.5", "0", "-1", "much", "nan"):
        with pytest.raises(UserError, match="at most 1"):
            read_assumptions([f"assume.pack_fill={wrong}"])


@pytest.mark.parametrize(
    ("name", "words", "needed"),
    [
        ("qwen3_4b_math", ["cluster.gpu=a100-80"], True),
        ("qwen3_4b_math", ["cluster.gpu=a100-80", "model.spec=torch"], False),
        ("qwen3_4b_math", ["cluster.gpu=b200"], False),
        ("qwen3_5_4b_math", ["cluster.gpu=b200"], True),  # heads of 256
        ("qwen3_5_4b_math", [], False),
    ],
)
def test_plan_names_flash_attn_where_it_is_needed(
    name: str, words: list[str], needed: bool
) -> None:
    made = make_plan(load_config(str(ROOT / "configs" / f"{name}.yaml"), words), Assumptions())
    assert made.needs_flash_attn == needed == ("flash-attn" in "\n".join(as_text(made)))


def test_steps_of_a_target_noise_are_planned_with_their_wider_windows() -> None:
    plain, noisy = plan(), plan("pruning.target_noise=1")
    low, high = plain.variance
    assert noisy.pruned.work.prompts == pytest.approx(
        plain.pruned.work.prompts * (low + high) / 2, rel=0.02
    )
    assert noisy.unpruned == plain.unpruned
    assert noisy.efficiency == pytest.approx(plain.efficiency, rel=0.1)


def test_text_and_json_agree() -> None:
    made = plan("cluster.price_per_gpu_hour=2", "rollout.sync.transport=disk")
    text, found = "\n".join(as_text(made)), json.loads(json.dumps(as_json(made)))
    hours, low, high = found["cost"]["gpu_hours"], *sorted(found["efficiency"])
    assert re.search(rf"^  pruned +{hours:,.1f} +{2 * hours:,.0f}$", text, re.MULTILINE)
    rows = {
        "all prompts: less noise": f"{found['cost_unpruned']['gpu_hours']:,.1f}",
        "fewer prompts: equal noise": f"{hours * low:,.1f} to {hours * high:,.1f}",
    }
    for label, value in rows.items():
        assert re.search(rf"^  unpruned, {label} +{value} ", text, re.MULTILINE)
    saved = f"{2 * hours * (low - 1):,.0f} to {2 * hours * (high - 1):,.0f}"
    assert f"At equal noise, pruning saves {saved}.".replace("-", "−") in text
    dear = plan("cluster.price_per_gpu_hour=2", variance=9.0)
    assert "At equal noise, pruning costs another" in "\n".join(as_text(dear))
    assert f"{found['speed_up']:.2f}x" in text
    assert "takes {:.2f} to {:.2f} times as long".format(*found["efficiency"]) in text
    assert f"{found['actor']['total'] / 2**30:.1f} of 79.2 GiB" in text
    disk, weights = found["disk"], found["parameters"]["total"]
    # Weights in bf16, and twelve bytes of an optimizer.
    assert disk["checkpoint"] == 14 * weights
    assert disk["export"] == disk["sync"] == 2 * weights
    assert set(found["assumptions"]) == {
        line.split()[0] for line in text.split("estimate/assumptions.py):\n")[1].splitlines()
    }


def test_signal_leaves_time_for_a_step_and_a_checkpoint() -> None:
    made = plan("cluster.stop_before_limit_s=60", checkpoint_gb_s=1.0)
    seconds = made.unpruned.seconds + made.disk.checkpoint / 1e9
    assert seconds <= made.stop_seconds < seconds + 60.0 and made.stop_seconds % 60 == 0
    assert as_json(made)["stop_seconds"] == made.stop_seconds
    text = "\n".join(as_text(made))
    assert f"need --signal=B:USR1@{made.stop_seconds}; " in text
    assert "cluster.stop_before_limit_s = 60 is too short." in text
    enough = plan(f"cluster.stop_before_limit_s={made.stop_seconds}", checkpoint_gb_s=1.0)
    assert "is enough." in "\n".join(as_text(enough))


def test_command_ends_with_1_for_an_unfitting_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LARGE, "--json", "cluster.nodes=2"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"]["gpus"] == 64
    assert main(["plan", LARGE, "cluster.gpu=a100-40", "assume.response_share=0.3"]) == 1
    said = capsys.readouterr().out
    assert "It does NOT fit." in said and "\nfastest: " in said
    assert main(["plan", LARGE, "assume.respones_share=1"]) == 2
