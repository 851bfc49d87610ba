"""What the leader of a run says and writes down: console, metrics, answers, summary, picture."""

from __future__ import annotations

from pathlib import Path
