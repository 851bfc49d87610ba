"""The colours of the console, the report's page and the pictures, by name."""

from __future__ import annotations

from collections.abc import Mapping

PALETTE: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#12171c"),
    "raised": ("#f5f7f8", "#1a2128"),
    "ink": ("#1c2730", "#e4eaef"),
    "soft": ("#5a6873", "#9dabb7"),
    "rule": ("#dfe4e8", "#2c363f"),
    "run0": ("#1d5f9e", "#74b3f0"),
    "run1": ("#b25600", "#f0a35e"),
    "run2": ("#1b7a53", "#62c79b"),
    "run3": ("#9c3f88", "#e093cf"),
    "run4": ("#6f5f14", "#d2bf6a"),
    "run5": ("#4d5a66", "#b3bfca"),
    "good": ("#13756a", "#5cc7b8"),
    "bad": ("#b8432b", "#f08a70"),
    "slate": ("#4a6076", "#8fa9c2"),
    "pale": ("#cdd5dc", "#4a5661"),
    "tan": ("#e7cba8", "#6b5a44"),
    "orange": ("#d9762b", "#e89a55"),
    "blue": ("#4c78a8", "#6b9bd0"),
    "phase-reward": ("#8c7ab8", "#a697d2"),
    "phase-norms": ("#c9a94f", "#d0b465"),
    "phase-plan": ("#7d8a97", "#93a0ad"),
    "phase-deliver": ("#b8b0a4", "#8a8378"),
    "phase-log-probs": ("#72a98f", "#7cb89b"),
    "phase-sync": ("#c8553d", "#dc6f57"),
    "chance1": ("#e5b48c", "#b08059"),
    "chance2": ("#c9c4bb", "#77736c"),
    "chance3": ("#8b9aa8", "#8497a9"),
    "chance4": ("#3d566e", "#b5cbe0"),
}
"""Each on light paper and on dark."""

SAME: Mapping[str, str] = {
    "phase-rollout": "blue",
    "phase-train": "orange",
    "phase-other": "pale",
    "fate0": "slate",
    "fate1": "orange",
    "fate2": "tan",
    "fate3": "blue",
    "noise0": "pale",
    "noise1": "blue",
    "noise2": "orange",
    "chance0": "orange",
    "of-limit": "bad",
}
"""Names for a second use of a colour."""


def colour_of(name: str) -> str:
    """On light paper; ``name`` may have words behind it, as the classes of a page's element."""
    word = name.partition(" ")[0]
    return PALETTE[SAME.get(word, word)][0]
