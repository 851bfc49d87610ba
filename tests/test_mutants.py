"""Each mistake that tests must notice can still be made; ``python tests/mutants.py`` makes them."""

from __future__ import annotations

import ast

from tests.mutants import MUTANTS, PACKAGE, ROOT, locate, mutated


def test_every_mutant_can_still_be_made() -> None:
    """Its place and expression exist once, its text is Python, and its tests are there."""
    assert {m.name: n for m in MUTANTS if (n := len(locate(m, ROOT / PACKAGE))) != 1} == {}
    for mutant in MUTANTS:
        file, text = mutated(mutant, ROOT / PACKAGE)
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(file.read_text())), mutant.name
    files = {word.partition("::")[0] for m in MUTANTS for word in m.tests.split() if ".py" in word}
    assert {file for file in files if not (ROOT / "tests" / file).is_file()} == set()


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
