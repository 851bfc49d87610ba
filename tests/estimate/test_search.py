"""``megatron-dppo plan --search`` finds what trying all there is would find, quickly; it fits and
can be pasted."""

import dataclasses
import json
from collections.abc import Iterator
from itertools import product
from math import inf

import pytest

from megatron_dppo.cli import main
from megatron_dppo.config import Config, LayoutConfig, replace
from megatron_dppo.errors import UserError
from megatron_dppo.estimate.assumptions import Assumptions
from megatron_dppo.estimate.kernels import estimate_stage_times
from megatron_dppo.estimate.memory import count_stage_layers, estimate_actor_memory
from megatron_dppo.estimate.plan import Plan, make_plan
from megatron_dppo.estimate.search import (
    MOST_GPUS,
    PACKS,
    RECOMPUTATION,
    SPARE,
    TILE,
    Proposal,
    find_best_layout,
    list_cuts,
    list_layouts,
    list_splits,
    list_stage_sizes,
    search,
    with_settings,
)
from megatron_dppo.estimate.servers import estimate_memory, estimate_server_memory
from megatron_dppo.estimate.time import (
    bound_step_seconds,
    estimate_step_time,
    estimate_trainer_phases,
)
from megatron_dppo.estimate.workload import Setup, assign_gpus
from megatron_dppo.models.shape import PUBLISHED
from megatron_dppo.settings import load_config
from tests.estimate.planned import EXPERTS, LARGE, MIXTURE, ROOT, of, setup

EIGHT, ONE_NODE = (str(ROOT / "configs" / f"qwen3_8b_{name}.yaml") for name in ("math", "node"))
SLOW = (
    "layout.tp=8",
    "layout.pp=1",
    "layout.cp=1",
    "layout.first_stage_layers=null",
    "layout.last_stage_layers=null",
)


def spares(made: Plan) -> bool:
    return made.fits and made.actor.total <= (1 - SPARE) * made.actor.room


def pasted(config: Config, each: Proposal | None) -> Plan:
    assert each is not None
    return make_plan(with_settings(config, each.change), Assumptions())


# Against trying all


def seconds_of(run: Setup) -> float:
    """Seconds of the trainer, or of the step if servers share its GPUs; infinity if it does not
    fit."""
    actor, server = estimate_memory(run)
    if not server.fits or actor.total > (1 - SPARE) * actor.room:
        return inf
    shared = run.placement.shared
    return (
        estimate_step_time(run, concurrency=server.concurrency).seconds
        if shared
        else sum(estimate_trainer_phases(run).values())
    )


def every_layout(run: Setup) -> Iterator[Setup]:
    config, longest = run.config, run.config.longest
    for plain in list_layouts(run):
        sizes = {
            -(-size // TILE // plain.cp) * TILE * plain.cp
            for size in (longest, config.pack.max_tokens, *PACKS)
        }
        runs = [
            replace(
                config,
                model=replace(config.model, recompute=kind),
                pack=replace(config.pack, max_tokens=size),
            )
            for kind, size in product(RECOMPUTATION, sizes)
            if size >= longest
        ]
        for cut, other in product(list_cuts(at(run, plain)), runs):
            yield at(run, cut, other)


def at(run: Setup, layout: LayoutConfig, config: Config | None = None) -> Setup:
    placement = dataclasses.replace(run.placement, layout=layout)
    return dataclasses.replace(run, config=config or run.config, placement=placement)


CASES = [(EIGHT, 8), (ONE_NODE, 4), (MIXTURE, 16)]


@pytest.mark.parametrize(
    ("file", "gpus"), CASES, ids=["8B, rollouts ahead", "8B, shared GPUs", "30B-A3B"]
)
def test_best_layout_equals_brute_force(file: str, gpus: int) -> None:
    """No bound of a split is above the split's seconds, and the search finds the fastest and the
    cheapest split."""
    config = load_config(file, [])
    shape = PUBLISHED[config.model.path.rpartition("/")[2].lower()]
    solved: dict[int, Setup | None] = {}
    own: list[tuple[float, float]] = []
    others: list[float] = []
    for split in list_splits(config, shape, gpus):
        other = with_settings(config, split)
        run = Setup(
            other, shape, assign_gpus(replace(other, layout=LayoutConfig()), shape), Assumptions()
        )
        ranks = run.placement.ranks
        if run.placement.shared or ranks not in solved:
            solved[ranks] = find_best_layout(run)
            least = seconds_of(solved[ranks]) if solved[ranks] else inf
            assert least == pytest.approx(min(map(seconds_of, every_layout(run))))
        if found := solved[ranks]:
            whole = at(
                run,
                found.placement.layout,
                replace(other, model=found.config.model, pack=found.config.pack),
            )
            server = estimate_memory(whole)[1]
            seconds = estimate_step_time(whole, concurrency=max(server.concurrency, 1)).seconds
            assert (
                bound_step_seconds(
                    run, concurrency=estimate_server_memory(run, resident=0.0).concurrency
                )
                <= seconds
            )
            if server.fits and other.rollout.ahead == config.rollout.ahead:
                own.append((seconds, seconds * whole.placement.gpus / 3600))
            elif server.fits:
                others.append(seconds)
    found = search(config, Assumptions(), gpus)
    least = [min(each) for each in zip(*own, strict=True)]
    assert [found.fastest.seconds, found.cheapest.gpu_hours] == pytest.approx(least)
    assert (found.on_policy and found.on_policy.seconds) == (
        pytest.approx(min(others)) if others else None
    )


# What it proposes


@pytest.mark.parametrize("file", [EIGHT, MIXTURE], ids=["8B", "30B-A3B"])
def test_proposals_fit_with_room_to_spare(file: str) -> None:
    config = of(file=file)
    for gpus in (8, 16, 64):
        found = search(config, Assumptions(), gpus)
        for each in filter(None, (found.fastest, found.cheapest, found.on_policy)):
            made = pasted(config, each)
            assert spares(made) and made.placement.gpus == each.gpus <= gpus
            assert made.pruned.seconds == pytest.approx(each.seconds)
            assert made.actor.total == pytest.approx(each.actor.total)
            assert made.config.pack.max_tokens % (TILE * made.config.layout.cp) == 0
        if found.fastest and found.cheapest:
            assert found.fastest.seconds <= found.cheapest.seconds
            assert found.cheapest.gpu_hours <= found.fastest.gpu_hours
        assert bool(found.closest) != bool(found.fastest or found.on_policy)


def test_colocated_servers_get_a_memory_flag() -> None:
    config = load_config(ONE_NODE, ["rollout.launch.flags=[]"])
    found = search(config, Assumptions(), 8).fastest
    made = pasted(config, found)
    (flag,) = made.config.rollout.launch.flags
    free = made.actor.room - sum(
        made.actor.parts[name] for name in ("weights", "optimizer", "reserved")
    )
    held = made.server.memory.parts
    assert flag.startswith("--mem-fraction-static=")
    assert float(flag.partition("=")[2]) == pytest.approx(
        (held["weights"] + held["cache"]) / free, abs=0.01
    )


def test_search_starts_from_an_impossible_layout() -> None:
    config = of("cluster.nodes=8", "cluster.server_nodes=8", "layout.ep=128", file=EXPERTS)
    with pytest.raises(UserError, match="layout"):
        setup(config)
    assert pasted(config, search(config, Assumptions(), 128).fastest).fits


def test_search_keeps_running_servers_and_the_local_engine() -> None:
    given = of("rollout.servers=[http://a:1,http://b:1]", "rollout.launch.tp=8")
    own = of(
        "rollout.engine=local",
        "rollout.servers=[]",
        "cluster.server_nodes=0",
        "model.path=qwen3-0.6b",
    )
    for config in (given, own):
        found = search(with_settings(config, {"rollout.ahead": 0}), Assumptions(), 64).fastest
        assert found and not [key for key in found.change if key.startswith("rollout.")]


def test_stage_with_the_head_has_fewer_layers() -> None:
    assert list(list_stage_sizes(36, 1)) == [(None, None)]
    assert list(list_stage_sizes(36, 2)) == [(None, None), (19, 17), (20, 16)]
    assert (16, 14) in list(list_stage_sizes(64, 4)) and (15, 15) in list(list_stage_sizes(64, 4))
    run = setup(
        of(*SLOW, "layout.pp=4", "layout.first_stage_layers=16", "layout.last_stage_layers=14")
    )
    counts = [
        count_stage_layers(PUBLISHED["qwen3-32b"], stage, run.placement.layout)
        for stage in range(4)
    ]
    assert counts == [16, 17, 17, 14]


STAGED = sorted(
    path.name
    for path in (ROOT / "configs").glob("*.yaml")
    if "last_stage_layers" in path.read_text("utf-8")
)


@pytest.mark.parametrize("name", STAGED)
def test_example_stages_are_as_equal_as_layers_allow(name: str) -> None:
    """The slowest stage, with the head's time, is at most 1% slower than with the best numbers of
    layers."""
    run = setup(load_config(str(ROOT / "configs" / name), []))
    layout, layers = run.placement.layout, run.shape.num_layers

    def slowest(**cut: int) -> float:
        return max(
            each.update.total
            for each in estimate_stage_times(at(run, replace(layout, vpp=1, **cut)))
        )

    near = range(layers // layout.pp - 6, layers // layout.pp + 7)
    cuts_near = [
        (first, last)
        for first, last in product(near, near)
        if (layers - first - last) % max(layout.pp - 2, 1) == 0
        and (layout.pp > 2 or first + last == layers)
    ]
    best = min(
        slowest(first_stage_layers=first, last_stage_layers=last) for first, last in cuts_near
    )
    assert slowest() <= 1.01 * best


# The command


def test_search_command_prints_settings_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", EIGHT, "--search"]) == 0
    _, fastest, cheapest, on_policy = capsys.readouterr().out.strip().split("\n\n")
    for kind, text in (("fastest", fastest), ("cheapest", cheapest), ("on-policy", on_policy)):
        head, _, settings = text.splitlines()
        made = make_plan(
            load_config(EIGHT, [word for word in settings.split() if "=" in word]), Assumptions()
        )
        assert made.fits and head.startswith(kind) and f"{made.pruned.seconds:.0f} s a step" in head
    assert main(["plan", EIGHT, "--search", "--gpus", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == 16 and 0.0 < found["fastest"]["seconds"] < made.pruned.seconds


def test_search_command_shows_the_nearest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(LARGE, [])
    assert main(["plan", LARGE, "--search", "--gpus", "8"]) == 1
    miss = search(config, Assumptions(), 8).closest
    assert (
        miss
        and f"the nearest miss, on 8 GPUs, lacks {miss.lack / 2**30:.1f} GiB"
        in capsys.readouterr().out
    )
    made = make_plan(with_settings(config, miss.change), Assumptions())
    assert miss.lack == pytest.approx(
        max(made.actor.total - (1 - SPARE) * made.actor.room, made.server.memory.lack)
    )
    run = setup(with_settings(config, miss.change))
    assert estimate_actor_memory(run).total == min(
        estimate_actor_memory(each).total for each in every_layout(run)
    )


def test_gpus_are_whole_nodes() -> None:
    for wrong in (0, 12, MOST_GPUS + 8, 8 * 10**9):
        with pytest.raises(UserError, match="--gpus"):
            search(of(), Assumptions(), wrong)
