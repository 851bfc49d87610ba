"""Missing parts of a rehearsal fail by name. Nothing here patches this process."""

from pathlib import Path

import pytest
import torch  # noqa: F401

from megatron_dppo.errors import UserError
from tests.rehearsal.device import build_device, missing_parts, python_folder
from tests.rehearsal.transformer_engine import CompiledModule


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DPPO_CACHE", str(tmp_path))


def test_missing_parts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"[iI]nstall g\+\+"):
        build_device()
    with pytest.raises(UserError, match=r"install_te_python\.sh"):
        python_folder()
    compiler, te = map(str, missing_parts())
    assert "g++" in compiler
    assert "install_te_python.sh" in te


def test_installed_transformer_engine_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REHEARSAL_TRANSFORMER_ENGINE", raising=False)
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    about = tmp_path / "transformer_engine-2.14.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.14.1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert python_folder() == tmp_path
    monkeypatch.setenv("REHEARSAL_TRANSFORMER_ENGINE", "2.20.2")
    with pytest.raises(UserError, match=r"REHEARSAL_TRANSFORMER_ENGINE=2\.20\.2 bash"):
        python_folder()


def test_function_without_a_stand_in_fails_by_name() -> None:
    with pytest.raises(
        NotImplementedError, match=r"transformer_engine_torch\.swiglu has no stand-in"
    ):
        CompiledModule("transformer_engine_torch").swiglu()
