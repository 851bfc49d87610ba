"""Play a case: two steps of the trainer's own learner on one rank, and the book of the second
step."""

import dataclasses
import gc
import json
import os
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import megatron_dppo.models.policy_head_triton  # noqa: F401
from megatron_dppo.config import Config
from megatron_dppo.rl.plan import plan_step
from megatron_dppo.rl.types import Prompt
from megatron_dppo.rollout import decoding, local
from megatron_dppo.rollout.engine import Sampling
from megatron_dppo.trainer.checkpoint import Checkpoints
from tests.rehearsal.cases import CASES, Case, config_of, write_policies
from tests.rehearsal.dispatch import RehearsalMode
from tests.rehearsal.patches import one_rank
from tests.rehearsal.step import known_reads
from tests.rehearsal.te_kernels import set_attention_pairs
from tests.steps import build, size_of, step_of_groups, weights_of

WIDTHS = {"bf16": 2, "fp32": 4}
"""Bytes of an element."""
SUMS = (
    "tokens",
    "fresh_tokens",
    "train/loss",
    "train/rollout_logprob_abs_diff",
    "train/token_mult_prob_error",
)


def play_all(mode: RehearsalMode, names: list[str], out: Path) -> None:
    """Play each name, "CASE" or "WORK: CASE", and write a line of JSON for each."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder, out.open("w") as file:
        policies = write_policies(Path(folder))
        gc.collect()
        gc.freeze()  # later collections skip the modules: a case collects five times
        for name in names:
            work, _, case = name.rpartition(": ")
            try:
                if work in WORK:
                    found = WORK[work](mode, CASES[case], policies)
                else:
                    found = play(mode, CASES[case], policies, Path(folder) / "run")
            except Exception as error:  # reported by the test
                found = {
                    "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc(),
                }
            gc.collect()
            print(json.dumps({"name": name, **found}), file=file, flush=True)


@contextmanager
def on_rank(mode: RehearsalMode, case: Case) -> Iterator[None]:
    """Play in the place of a case's rank; the host reads what its passes are known to read, and two
    experts."""
    reads = known_reads(mode, case.config.layout, 2 if case.expert_layers else 0)
    with one_rank(size_of(case.config.layout), case.rank), mode, reads:
        yield


def play(mode: RehearsalMode, case: Case, policies: dict[str, Path], run: Path) -> dict[str, Any]:
    """Return the book of the second of two training steps, and memory that is left."""
    environment = (
        {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"} if case.config.model.deterministic else {}
    )
    with mock.patch.dict(os.environ, environment), on_rank(mode, case):
        return _steps(mode, case, config_of(case, policies[case.policy], run))


def _steps(mode: RehearsalMode, case: Case, config: Config) -> dict[str, Any]:
    book = mode.book
    book.pinned.clear()
    book.clear()
    world, learner, policy = build(config)
    found: dict[str, Any] = {"loading": dict(book.waits)}
    metadata, groups = step_of_groups(1)
    metadata = dataclasses.replace(metadata, owners=np.full_like(metadata.owners, world.rank))
    held, layout, built = dict(enumerate(groups)), config.layout, set(book.allocations)
    if (
        not world.is_last_stage or world.tp_rank or world.cp_rank
    ):  # ranks that the loss's sums reach over the network
        policy.actor._sum_over_replicas = lambda mine: dict.fromkeys((*SUMS, "train/kl_loss"), 1.0)
    multiple = world.compute_capacity_multiple(layout, config.pack.max_tokens)
    for step in range(2):
        plan = plan_step(
            metadata, config, replicas=world.dp, align=layout.row_multiple,
            capacity_multiple=multiple, step=0,
            pipeline=layout.pp,
        )  # fmt: skip
        set_attention_pairs(float(plan.minibatches[0].capacity ** 2) / layout.cp)
        gc.collect()
        book.clear()
        before = book.bytes_now
        learner.train(plan, held, step=step + 1, version=0)
        found |= booked(mode)
        if case.extra == "release":
            policy.actor.release_memory()
        gc.collect()
        found["kept"] = book.bytes_now - before
    left = [allocation for key, allocation in book.allocations.items() if key not in built]
    found["left"] = sorted({allocation.place for allocation in left})
    minibatch = plan.minibatches[0]
    found |= {
        "packs": len(minibatch.packs[0]), "updates": len(plan.minibatches),
        "capacity": minibatch.capacity,
        "main_grads": sorted({str(p.main_grad.dtype) for p in policy.actor.parameters() if p.requires_grad}),
    }  # fmt: skip
    weights_of(policy, world)
    if case.extra == "checkpoint":
        checkpoints = Checkpoints(config, world)
        checkpoints.save(policy.actor, 1, {})
        checkpoints.finish()
        found["written"] = sum(file.stat().st_size for file in checkpoints.path(1).glob("*.distcp"))
    found["pinned"] = dict(book.pinned)
    sizes = [parameter.numel() for parameter in policy.actor.parameters()]
    found["room"] = {
        dtype: sum(-(-size * width // 512) * 512 for size in sizes)
        for dtype, width in WIDTHS.items()
    }
    return found


def multiply_host_and_device(
    mode: RehearsalMode, case: Case, policies: dict[str, Path]
) -> dict[str, Any]:
    with mode:
        return {"product": torch.ones(2, device="cuda") * torch.ones(2)}


def play_engine(mode: RehearsalMode, case: Case, policies: dict[str, Path]) -> dict[str, Any]:
    """Return waits of the local engine for six completions; each look of the host finds one that
    has ended."""
    policy = policies[case.policy]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(policy), dtype=torch.bfloat16
    )
    model.requires_grad_(False)

    def read(tensor: torch.Tensor) -> torch.Tensor | None:
        rows = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.shape[1:] == (decoding.FIELDS,):
            rows[0, decoding.ENDED] = 1
        return rows

    plain, mode.read = mode.read, read
    with (
        mode,
        mock.patch.object(local, "empty_model", lambda path, device, dtype: model.to(device)),
        mock.patch.dict(decoding.ROUND, cuda=1),
    ):
        engine = local.LocalEngine(
            policy, device=torch.device("cuda"), dtype=torch.bfloat16, max_batch=4
        )
        engine.update_weights(lambda to: [engine._weights], 0)
        mode.book.clear()
        prompts = [Prompt(i, np.arange(3, 9, dtype=np.int32), "", "") for i in range(3)]
        engine.finish(engine.begin(prompts, Sampling(2, 8, 1.0, (1,), 0)))
        waits = dict(mode.book.waits)
    mode.read = plain
    return {"waits": waits}


def booked(mode: RehearsalMode) -> dict[str, Any]:
    """Return the book of one step as JSON."""
    book = mode.book
    kernels = (kernel for kernel in book.kernels if kernel.flops)
    products = Counter(f"{kernel.dtype} to {kernel.output} in {kernel.place}" for kernel in kernels)
    return {
        "kernels": len(book.kernels),
        "waits": dict(book.waits),
        "products": dict(products),
        "collective_bytes": dict(book.collective_bytes),
    }


WORK: dict[str, Callable[[RehearsalMode, Case, dict[str, Path]], dict[str, Any]]] = {
    "host tensor": multiply_host_and_device,
    "engine": play_engine,
}
"""Work other than training steps."""
