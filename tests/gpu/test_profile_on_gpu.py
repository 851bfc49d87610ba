"""On a GPU a trace holds kernels, and the allocator's history is beside it."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from megatron_dppo.observe.timers import PhaseTimers, Profiler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_a_trace_holds_kernels_and_the_allocators_history_is_beside_it(tmp_path: Path) -> None:
    timers = PhaseTimers()
    profile = Profiler(tmp_path, [3], rank=0, on_cuda=True, timers=timers)
    for step in (2, 3):
        with profile(step), timers("actor_train"):
            held = torch.ones(512, 512, device="cuda") @ torch.ones(512, 512, device="cuda")
            torch.cuda.synchronize()
    trace, history = (
        tmp_path / "profile" / f"step_0000003-rank_0.{kind}" for kind in ("json.gz", "pickle")
    )
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"kernel", "user_annotation"} <= {event.get("cat") for event in events}
    traces = pickle.loads(history.read_bytes())["device_traces"]
    assert any(
        entry["action"] == "alloc" and entry["size"] >= held.nbytes for of in traces for entry in of
    )
