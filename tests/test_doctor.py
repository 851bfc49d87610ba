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
