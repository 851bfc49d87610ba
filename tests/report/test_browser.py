"""The page in a real browser: it draws, switches, fits a phone, and runs nobody's script but its
own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_dppo.report.page import report
from tests.report.made_up import UNPRUNED, write_run

pytestmark = [pytest.mark.browser, pytest.mark.drawn]

HOSTILE = (
    "</pre><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    answers = [{"prompt": "1+1=", "answer": HOSTILE, "label": "2", "correct": False}]
    runs = [
        write_run(folder / "pruned", 60, answers=answers, held={"train/loss": -5.4e-9}),
        write_run(
            folder / "a_run_with_a_name_that_is_long_and_has_no_place_to_break_it",
            60,
            pruning=UNPRUNED,
        ),
    ]
    report(runs, folder / "report.html", price=2.5)
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: scripts/test.sh --browser")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(
    browser: Any, address: str, *, width: int = 1440, scheme: str = "light"
) -> tuple[Any, list[str]]:
    """The page, and what it said that it should not: errors, and requests for anything but
    itself."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda request: (
            said.append(request.url) if request.url not in (address, "data:,") else None
        ),
    )
    page.goto(address)
    return page, said


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_quiet_and_as_wide_as_the_screen(
    browser: Any, address: str, width: int, scheme: str
) -> None:
    page, said = opened(browser, address, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert said == []


def test_hostile_answer_is_shown_and_not_run(browser: Any, address: str) -> None:
    page, _ = opened(browser, address)
    assert "taken" not in page.title()
    assert HOSTILE in page.inner_text(".answer pre")


def test_policy_blocks_foreign_scripts(browser: Any, address: str) -> None:
    """A second wall, should words ever leave their place."""
    page, said = opened(browser, address)
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')"
    )
    page.wait_for_timeout(200)
    assert page.title() != "1"
    assert any("Content Security Policy" in words for words in said)


def test_axis_is_switched_by_keyboard(browser: Any, address: str) -> None:
    page, _ = opened(browser, address)
    shown = (
        "[...document.querySelectorAll('.plots[data-axis]')].filter(e => e.offsetHeight).map(e => "
        "e.dataset.axis)"
    )
    assert page.evaluate(shown) == ["1"]
    page.focus("input[name=axis]")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(shown) == ["2"]
