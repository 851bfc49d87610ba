"""``doctor`` reports the installed packages, the hardware, and the NCCL that runs."""

import json

import pytest

from megatron_dppo import doctor
from megatron_dppo.cli import main


def test_doctor_reports_to_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["installed"]["torch"]
    assert findings["machine"]["cores"] >= 1
    assert (findings["machine"]["nccl"] is None) == (findings["machine"]["cuda"] is None)
    assert findings["will_use"]["layers (model.spec auto)"] in ("torch", "te")


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_exit_code_tells_that_a_package_is_missing(
    option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(doctor.PACKAGES, "transformers", ("no-such-package", "transformers"))
    assert main(["doctor", *option]) == 1
    assert "transformers" in capsys.readouterr().out
