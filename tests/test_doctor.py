"""``doctor`` reports the installed packages, the hardware, and the NCCL that runs."""

from __future__ import annotations

import json

import pytest

from megatron_dppo.cli import main


def test_doctor_reports_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["installed"]["torch"]
    assert findings["machine"]["cores"] >= 1
    assert (findings["machine"]["nccl"] is None) == (findings["machine"]["cuda"] is None)
    assert findings["will_use"]["layers (model.spec auto)"] in ("torch", "te")
    assert findings["will_use"]["rehearsals (megatron-dppo rehearse)"].startswith(("ready", "missing: "))


def test_doctor_names_the_loaded_nccl_and_torch_s(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers must load the same NCCL, which another package or a preloaded library may have replaced."""
    monkeypatch.setattr("megatron_dppo.rollout.servers.nccl.loaded", lambda: "2.30.7")
    monkeypatch.setattr("megatron_dppo.rollout.servers.nccl.packages", lambda: ["nvidia-nccl-cu13 2.30.7"])
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 29, 7))
    assert main(["doctor"]) == 0
    assert "2.30.7 (nvidia-nccl-cu13 2.30.7, torch was built with 2.29.7)" in " ".join(capsys.readouterr().out.split())
