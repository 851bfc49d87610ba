"""Every command that the documentation shows is run, one page after the other, as its readers
would."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, all_commands, blocks, commands, sections, text_of
from tests.docs.sandbox import Sandbox
from tests.docs.ways import NOT_RUN, WAYS, is_run_elsewhere, typed_in, way_of

MAIN = typed_in("main")
RECIPES = [
    f"docs/recipes/{name}.md"
    for name in ("advantage", "engine", "model_family", "objective", "pruning_rule", "reward")
]
"""Pages whose sections are followed one by one, each in an empty folder: a section says how many
files it takes."""
FOLLOWED = [
    section
    for page in (*RECIPES, "CONTRIBUTING.md")
    for section in sections(page)
    if any(block.title or block.language == "diff" for block in blocks(section))
]
TAKES = re.compile(r"\*\*(no|one|two|three) new files?, (no|one|two|three) edited files?\*\*")


@pytest.mark.parametrize("document", [document for document in MAIN if document not in RECIPES])
def test_commands_of_a_page_work_in_their_order(
    document: str, quickstart: Path, tmp_path: Path
) -> None:
    sandbox = Sandbox(tmp_path, document, quickstart)
    for command in MAIN[document]:
        sandbox.type(command)


@pytest.mark.parametrize("section", FOLLOWED)
def test_recipe_takes_as_many_files_as_announced(
    section: str, quickstart: Path, tmp_path: Path
) -> None:
    sandbox = Sandbox(tmp_path, section, quickstart)
    for command in commands(section):
        if (way := way_of(command)) and way.suite == "main":
            sandbox.type(way.typed(command))
    found = [
        file.relative_to(tmp_path)
        for file in tmp_path.rglob("*")
        if file.suffix in (".py", ".txt", ".yaml")
    ]
    written = [
        file for file in found if file.parts[0] != "runs" and file.name != "my_run.yaml"
    ]  # the sandbox's own
    new = [file for file in written if not (ROOT / file).exists()]
    edited = [
        f
        for f in written
        if f not in new and (tmp_path / f).read_bytes() != (ROOT / f).read_bytes()
    ]
    numbers = ("no", "one", "two", "three")
    first_lines = next(part for part in text_of(section).split("\n\n") if not part.startswith("#"))
    assert TAKES.findall(first_lines) == [(numbers[len(new)], numbers[len(edited)])], (new, edited)


def test_every_extension_has_a_recipe() -> None:
    page = text_of("CONTRIBUTING.md")
    assert [recipe for recipe in RECIPES if f"| [a recipe]({recipe}) |" not in page] == []


def test_every_command_is_run_somewhere() -> None:
    assert [f"{c.document}: {c.text}" for c in all_commands() if way_of(c) is None] == []


def test_every_row_of_the_table_is_used() -> None:
    used = {way.commands for command in all_commands() if (way := way_of(command))}
    assert {way.commands for way in WAYS} - used == set()


def test_commands_run_elsewhere_are_run_there() -> None:
    assert [
        way.commands for way in WAYS if way.suite == "elsewhere" and not is_run_elsewhere(way)
    ] == []


def test_commands_run_nowhere_are_marked_on_their_line() -> None:
    lines = [line for document in DOCUMENTS for line in text_of(document).splitlines()]
    marked = {line.removesuffix(NOT_RUN).strip() for line in lines if line.endswith(NOT_RUN)}
    nowhere = {text for texts in typed_in("nowhere").values() for text in texts}
    assert nowhere and marked == nowhere


def test_versions_of_the_image_equal_the_tested_ones() -> None:
    image, page = (ROOT / "docker/Dockerfile").read_text(), text_of("docs/gpu.md")
    listed = (ROOT / "tests/servers/requirements-sglang.txt").read_text()
    pinned = dict(re.findall(r"^ARG (\w+)=(\S+)$", image, re.MULTILINE))
    for package, text in (("torch", page), ("sglang", listed), ("sglang-router", listed)):
        version = pinned[package.replace("-", "_").upper()]
        assert f"{package}=={version}" in text
        assert f"{package}=={version}" in page
    assert f'"transformer-engine[pytorch]=={pinned["TRANSFORMER_ENGINE"]}"' in page
    for command in re.findall(r"^RUN (.*?[^\\])$", image, re.MULTILINE | re.DOTALL):
        subprocess.run(["bash", "-n", "-c", command], check=True)
    copied = (ROOT / "docker/Dockerfile.dockerignore").read_text().split()
    assert all((ROOT / name[1:]).exists() for name in copied if name.startswith("!"))
