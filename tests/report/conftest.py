"""Pages without drawings: most tests look at their words, and a drawing takes a tenth of a
second."""

from __future__ import annotations

import pytest

from megatron_dppo.report import render


@pytest.fixture(autouse=True)
def empty_drawings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave drawings empty, unless the test's module or function is marked ``drawn``."""
    if request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(render, "render_svg", lambda chart: "<svg></svg>")
