"""The README's script in a notebook: a kernel of its own starts ranks, and hears of every step."""

import re
from pathlib import Path

import pytest

from tests.docs.sandbox import Sandbox

nbclient = pytest.importorskip("nbclient", reason="wants the extra dev")
nbformat = pytest.importorskip("nbformat")


def test_the_script_of_the_readme_trains_in_a_notebook(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel")
    folder = Sandbox(tmp_path, "README.md", quickstart).folder
    script = (folder / "from_python.py").read_text()
    small = (
        '"steps": 2}, rollout={"prompts_per_step": 4, "max_response_tokens": 8}, '
        'eval={"problems": 2}'
    )
    assert '"steps": 60}' in script
    cells = script.replace('"steps": 60}', small).strip().split("\n\n\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    where = {"metadata": {"path": folder}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=where).execute()
    said = "".join(
        output["text"] for output in notebook.cells[-1].outputs if output.get("name") == "stdout"
    )
    rows = re.findall(r"^(\d+) (None|[\d.]+) (None|[\d.]+)$", said, re.MULTILINE)
    assert [int(step) for step, _, _ in rows] == [0, 1, 2]
    assert said.splitlines()[-1] == rows[-1][2], "the accuracy of the last step"
    assert (folder / "runs/from_python/reward.pkl").exists()
