"""Pages and site: links, names of files, settings and metrics exist, and the site builds without a
warning."""

import ast
import re
import runpy
from html import unescape
from pathlib import Path

import pytest
import yaml

from megatron_dppo.observe.timers import PHASES
from megatron_dppo.settings import get_sections, get_settings, load_config
from tests.docs.documents import DOCUMENTS, ROOT, blocks, commands, prose, spans
from tests.docs.sandbox import Sandbox

PAGES = [document for document in DOCUMENTS if document.endswith(".md")]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
FILES = {".png", ".jsonl", ".yaml", ".py"}
OVERRIDE = re.compile(r"([a-z][a-z_]*(?:\.[a-z_]+)+)(=.*)?")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Strict: a dead link, a dead anchor, a page that no menu has, are errors."""
    sandbox = Sandbox(tmp_path_factory.mktemp("checkout"), "")
    sandbox.install("cpu,docs")
    sandbox.type("bash scripts/docs.sh")
    return sandbox.folder / "site"


def _anchors(site: Path, page: str) -> set[str]:
    html = (site / page).with_suffix(".html").read_text()
    return {unescape(name) for name in re.findall(r'\bid="([^"]+)"', html)}


def test_site_builds_and_shows_every_setting(site: Path) -> None:
    assert get_settings().keys() <= _anchors(site, "settings")
    assert [setting.key for setting in get_settings().values() if not setting.meaning] == []
    assert "MISSING" not in (site / "settings.html").read_text()


@pytest.mark.parametrize("name", ["settings", "command"])
def test_reference_page_equals_the_code(name: str) -> None:
    run = runpy.run_path(str(ROOT / f"tools/site/{name}_page.py"))
    current = run["PAGE"].read_text() == run[f"{name}_page"]()
    assert current, (
        f"the code has changed since python tools/site/{name}_page.py wrote {run['PAGE'].name}"
    )


def test_addresses_of_earlier_versions_lead_to_sections(site: Path) -> None:
    """A page that is gone is an address that somebody has kept."""
    plugins = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"]
    (redirects,) = (each["redirects"] for each in plugins if "redirects" in each)
    for old, new in redirects["redirect_maps"].items():
        page, _, anchor = new.partition("#")
        assert not (ROOT / "docs" / old).exists(), f"{old} is a page"
        assert anchor in _anchors(site, page), f"{old} leads to {new}"
        target = f"{Path(page).stem}.html#{anchor}"
        assert target in (site / old).with_suffix(".html").read_text(), old


def test_pages_request_nothing_from_other_hosts(site: Path) -> None:
    asked = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=\"?(?:https?:)?//|<link[^>]+href=\"?(?:https?:)?//"
    )
    assert {page.name for page in site.rglob("*.html") if asked.search(page.read_text())} == set()


@pytest.mark.parametrize("document", [page for page in PAGES if not page.startswith("docs/")])
def test_links_of_a_page_at_the_root_work(document: str, site: Path) -> None:
    for place, anchor in LINK.findall(prose(document)):
        assert (ROOT / place).exists(), f"{document} links to {place}"
        if anchor and place.startswith("docs/"):
            assert anchor in _anchors(site, place.removeprefix("docs/")), (
                f"{document} links to {place}#{anchor}"
            )


@pytest.mark.parametrize("document", PAGES)
def test_settings_named_by_a_page_exist(document: str) -> None:
    """Those of its commands and of its prose, with their values; a page that changes the settings
    has its own."""
    changes_them = any(
        block.language == "diff" and "config/" in block.text for block in blocks(document)
    )
    for text in (*(command.text for command in commands(document)), *spans(document)):
        for word in text.split():
            named = OVERRIDE.fullmatch(word)
            if (
                named is None
                or named[1].split(".")[0] not in get_sections()
                or Path(named[1]).suffix in FILES
            ):
                continue
            assert named[1] in get_settings() or named[1] in get_sections(), (
                f"{document} names {word}"
            )
            if named[2] and not changes_them and not re.search(r"…|\b[A-Z]{3,}\b", word):
                load_config(None, [word])


@pytest.mark.parametrize("document", PAGES)
def test_configurations_shown_by_a_page_can_be_read(document: str, tmp_path: Path) -> None:
    for block in blocks(document):
        if block.language == "yaml" and isinstance(yaml.safe_load(block.text), dict):
            (file := tmp_path / "shown.yaml").write_text(block.text, encoding="utf-8")
            load_config(str(file), [])


def test_citation_names_this_version() -> None:
    from megatron_dppo import __version__

    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


def test_files_named_by_pages_exist() -> None:
    place = re.compile(r"(?:benchmarks|configs|megatron_dppo|scripts|tests|tools)/[\w/.]*")
    named = {
        (document, span)
        for document in DOCUMENTS
        for span in spans(document)
        if place.fullmatch(span)
    }
    assert {(document, span) for document, span in named if not (ROOT / span).exists()} == set()


def test_exactly_the_metrics_of_the_code_are_described() -> None:
    metric = re.compile(r"(?:rollout|reward|prune|pack|train|perf|eval)/[a-z_\d]*[a-z](?:/[a-z]+)?")
    nodes = [
        node
        for file in (ROOT / "megatron_dppo").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    texts = {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    written = {text for text in texts if metric.fullmatch(text)} | {
        f"perf/{phase}_time" for phase in PHASES
    }
    described = {span for span in spans("docs/metrics.md") if metric.fullmatch(span)}
    assert written - described <= {"perf/reward_time"}  # summed into the time of rollouts
    assert described - written <= {"perf/save_time"}  # the checkpoint writer's own timer
