"""The list of mistakes that tests must notice stays one that can be made; ``python tests/mutants.py`` makes them."""

from __future__ import annotations

from tests.mutants import MUTANTS, PACKAGE, ROOT


def test_every_mutant_can_still_be_made() -> None:
    """Its text stands once in the package, and its tests are there."""
    sources = [file.read_text() for file in (ROOT / PACKAGE).rglob("*.py")]
    assert {m.name: n for m in MUTANTS if (n := sum(source.count(m.text) for source in sources)) != 1} == {}
    files = {word.partition("::")[0] for m in MUTANTS for word in m.tests.split() if ".py" in word}
    assert {file for file in files if not (ROOT / "tests" / file).is_file()} == set()


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
