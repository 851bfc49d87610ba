"""A run of the quickstart that is made once, and small, for pages that begin where the quickstart
ends."""

from pathlib import Path

import pytest

from tests.docs.sandbox import write_quickstart


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_quickstart(tmp_path_factory.mktemp("quickstart"), trained=True)
