"""Whole runs with real servers, by the command that a user types.

A fresh policy is never right, and a step of equal rewards would train nothing and send nothing: rewards are mixed on
purpose.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_dppo.init import write_model
from megatron_dppo.rollout.servers.launch import SECRET
from megatron_dppo.trainer.checkpoint import TRACKER
from tests.commands import Command
from tests.policies import SCALED
from tests.servers.real import Kind, RealServer, launch_settings
from tests.small_runs import Rows, rows

pytestmark = pytest.mark.servers

AGREES = 1e-4
"""Log-probabilities of actor and server differ by rounding."""
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SETTINGS = (
    "data.arithmetic.problems=64",
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=4",
    "rollout.max_response_tokens=24",
    "rollout.timeout_s=200",
    "rollout.sync.timeout_s=60",
    "rollout.sync.check_every=1",
    "optimizer.lr=1e-3",
    "eval.every=0",
    "eval.problems=4",
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""
PIPELINE = ("layout.tp=1", "layout.pp=2")
WAIT_S = 300.0
Start = Callable[..., BaseProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a run in a folder of its own, by which all that it starts is known; ends what a failed test leaves."""
    started = []

    def start(run: Path, policy: Path, *settings: str, secret: str = "") -> BaseProcess:
        run.mkdir(exist_ok=True)
        (run / "reward.py").write_text(REWARD)
        words = ["megatron-dppo", "train", str(QUICKSTART), f"run.dir={run}", f"model.path={policy}"]
        words += [f"reward.function={run}/reward.py:compute_score", *SETTINGS, *settings]
        started.append(Command(words, run / "log", run, {SECRET: secret}).start())
        return started[-1]

    yield start
    for process in started:
        if process.is_alive():
            kill(process)


def kill(process: BaseProcess) -> None:
    """With all of its ranks."""
    os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def ended(process: BaseProcess) -> int | None:
    """The exit code of a run that comes to an end by itself."""
    process.join(WAIT_S)
    return process.exitcode


def finish(process: BaseProcess, run: Path) -> Rows:
    """Its rows, once it has come to its end."""
    assert ended(process) == 0, (run / "log").read_text()
    return rows(run)


def given(*servers: RealServer) -> list[str]:
    return ["rollout.engine=sglang", f"rollout.servers=[{','.join(server.api.url for server in servers)}]"]


def processes_of(run: Path) -> list[str]:
    """Command lines of the processes that a run has started and that live."""
    lines = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == run and process.status() != psutil.STATUS_ZOMBIE:
                lines.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return lines


def wait_for(file: Path, process: BaseProcess, run: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not file.exists():
        assert process.is_alive() and time.monotonic() < until, (run / "log").read_text()
        time.sleep(0.02)


def agrees(steps: Rows, servers: int) -> None:
    """Every step trained, on tokens of the weights that it trained, and every server then had the new ones."""
    for step in steps:
        assert step["train/grad_norm"] > 0
        assert step["rollout/agreement_max_diff"] <= AGREES
        assert step["train/rollout_logprob_abs_diff"] <= AGREES
        assert (step["rollout/stale_tokens"], step["staleness/mean"]) == (0.0, 0.0)
        assert (step["rollout/servers"], step["rollout/sync_retries"]) == (servers, 0.0)


@pytest.mark.parametrize(("kind", "tp"), [("sglang", (1, 2)), ("vllm", (1,))])
def test_a_run_trains_with_servers_of_its_own_and_leaves_none_behind(
    kind: Kind, tp: tuple[int, ...], start: Start, served_policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(run, served_policy, *launch_settings(kind, tp), "run.steps=3")
    wait_for(run / "metrics.jsonl", process, run)
    theirs = [line for line in processes_of(run) if kind in line.lower() and "megatron_dppo" not in line]
    assert len(theirs) >= sum(tp)
    first, *steps = finish(process, run)
    assert processes_of(run) == []
    assert first["rollout/agreement_max_diff"] <= AGREES
    assert [step["step"] for step in steps] == [1, 2, 3]
    agrees(steps, len(tp))
    trained, fresh = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (run / "hf", served_policy)
    )
    tokens = torch.arange(3, 11)[None]
    assert not torch.allclose(trained(tokens).logits, fresh(tokens).logits, atol=1e-2)


EXPERTS = ("layout.tp=1", "layout.ep=2", "layout.dp=2", "layout.sequence_parallel=false")


@pytest.mark.parametrize(
    ("family", "kind", "tp", "layout"),
    [("qwen3_moe", "sglang", (1, 2), EXPERTS), ("llama", "sglang", (2,), ()), ("llama", "vllm", (1,), ())],
)
def test_other_families_reach_servers(
    family: str, kind: Kind, tp: tuple[int, ...], layout: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    """Experts on ranks of their own, and scaled rotary positions."""
    run, policy = tmp_path / "run", tmp_path / "policy"
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 64, "std": 0.2}
    experts = 4 if layout == EXPERTS else 0
    write_model(policy, family=family, **sizes, experts=experts, tie=not experts)  # SGLang ties no Qwen3-MoE's
    if family == "llama":
        config = json.loads((policy / "config.json").read_text())
        config |= {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **SCALED}}
        (policy / "config.json").write_text(json.dumps(config))
    first, *steps = finish(start(run, policy, *launch_settings(kind, tp), *layout, "run.steps=2"), run)
    assert first["rollout/agreement_max_diff"] <= AGREES
    agrees(steps, len(tp))


@pytest.mark.parametrize(
    "settings",
    [("rollout.sync.transport=disk",), PIPELINE, ("layout.tp=1", "layout.cp=2")],
    ids=["disk", "collective of two stages", "collective of two replicas"],
)
def test_weights_reach_servers_by_each_transport_and_from_each_layout(
    settings: Sequence[str],
    sglang_tp1: RealServer,
    sglang_tp2: RealServer,
    start: Start,
    served_policy: Path,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    to = given(sglang_tp1, sglang_tp2)
    process = start(run, served_policy, *to, *settings, "run.steps=2", secret=sglang_tp1.secret)
    agrees(finish(process, run)[1:], 2)
    assert sorted(path.name for path in run.glob("sync/*")) == [], "what was written for servers is gone"


def test_a_run_two_steps_ahead_that_is_killed_goes_on_with_the_batches_in_flight(
    sglang_tp1: RealServer, sglang_tp2: RealServer, start: Start, served_policy: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = [*given(sglang_tp1, sglang_tp2), "rollout.ahead=2", "run.steps=4", "run.checkpoint_every=2"]
    settings += ["pack.max_tokens=48"]  # one completion at a time: no update comes before the servers have begun
    tracker = run / "checkpoints" / TRACKER
    process = start(run, served_policy, *settings, secret=sglang_tp1.secret)
    wait_for(tracker, process, run)
    kill(process)
    assert tracker.read_text().strip() == "2"
    batches = sorted((run / "checkpoints" / "iter_0000002").glob("rollouts*/step.npz"))
    assert len(batches) == 2 and all("broken_off_by_ranks" in np.load(batch) for batch in batches)

    steps = finish(start(run, served_policy, *settings, secret=sglang_tp1.secret), run)[1:]
    assert "resuming after step 2" in (run / "log").read_text()
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    first, *others = steps
    assert (first["rollout/stale_tokens"], first["staleness/mean"]) == (0.0, 0.0)
    for step in others:  # also the third and the fourth, whose batches were in the checkpoint
        assert (
            0.0 < step["rollout/stale_tokens"] <= 1.0 and 0.0 < step["staleness/mean"] <= step["staleness/max"] <= 2.0
        )
    for step in steps:
        assert step["train/grad_norm"] > 0
        assert step["rollout/agreement_max_diff"] <= AGREES
        assert step["rollout/servers"] == 2
    assert first["train/rollout_logprob_abs_diff"] <= AGREES
