"""The page on the architecture follows a prompt to its gradient as the code does."""

import os
import re
import subprocess
import sys
import tomllib

from tests.docs.documents import ROOT
from tools.types_on_the_way import find_types

PAGE = ROOT / "docs/architecture.md"
WALK = (
    PAGE.read_text().partition("## One prompt on its way to its gradient")[2].partition("\n## ")[0]
)


def test_the_session_of_one_prompt_is_what_the_code_answers() -> None:
    command = [sys.executable, "-m", "doctest", "-o", "NORMALIZE_WHITESPACE", str(PAGE)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert WALK.count(">>> ") > 30


def test_page_names_exactly_the_types_on_a_prompts_way() -> None:
    on_the_way = {name.rpartition(".")[2] for name in find_types(ROOT)}
    assert set(re.findall(r"`(_?[A-Z][A-Za-z]*[a-z][A-Za-z]*)`", WALK)) == on_the_way


def test_contributing_lists_the_layers() -> None:
    rows = re.findall(r"^\| (\d) \| (.+?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    shown = {int(layer): set(re.findall(r"`(\w+)/?`", packages)) for layer, packages in rows}
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ][0]
    layers = [set(layer.split(" : ")) - {"__main__"} for layer in contract["layers"]]
    assert shown == dict(enumerate(reversed(layers)))
