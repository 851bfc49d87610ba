"""Answers in words, and the letters of a choice."""

from __future__ import annotations

import re

BARE = re.compile(r"\(\s*([A-J])\s*\)|([A-J])\s*\)?")
CHOSEN = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(([A-J])\)|([A-J])(?:[.):]|$))(?:[\s:.)](?!\s*[,;]).*|$|[^\s+\-*/^=,;].*)",
    re.IGNORECASE,
)
OTHER = re.compile(r"\([A-J]\)|(?<![a-zA-Z])[A-J](?:[.):]|$)")
"""Another letter that is chosen behind the first one."""
SHORT = {"yes", "no", "odd", "one", "two", "six", "ten", "red", "all", "any", "dne", "mon", "tue", "sun", "max", "min"}
EMPTY = {"no solution", "none", "empty set", "no such", r"\emptyset", "⦃⦄", "⦃ ⦄"}


def choice_of(text: str, *, bare: bool = False) -> frozenset[str] | None:
    """The letters of a multiple choice.

    Args:
        text: as ``spelled`` returns it.
        bare: whether the letters must be all there is; an answer may also say what stands behind its letter.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip(" .")
    whole = re.fullmatch(r"\(([^()]*)\)", text)
    letters = [BARE.fullmatch(part.strip()) for part in (whole[1] if whole else text).split(",")]
    if all(letters):
        return frozenset(letter[1] or letter[2] for letter in letters if letter)
    if bare:
        return None
    found = CHOSEN.fullmatch(text)
    if found and OTHER.search(text, found.end(1) if found[1] else found.end(2)):
        return None
    letter = found and (found[1] or found[2])
    return frozenset(letter) if letter and letter.isupper() else None


def words_of(text: str) -> str | None:
    """What is said in words, without case, punctuation, articles and the s of the plural; None for a formula."""
    if text in EMPTY:
        return "no solution"
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    if not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9 '\-.!?\"]*", plain):
        return None
    if plain == text and not re.search(r"[a-zA-Z]{4}", plain) and plain.lower() not in SHORT:
        return None  # letters that may be a product
    if plain != text and not re.search(r"[a-zA-Z]{2}", plain):
        return None
    words = re.sub(r"[^a-zA-Z0-9 ]", " ", plain.replace("'", "")).split()
    lowered = [word.lower() if len(word) > 1 or word == "A" else word for word in words]  # a letter is a name
    said = " ".join(word.removesuffix("s") for word in lowered if word not in ("the", "a", "an"))
    return "no solution" if said in EMPTY else said
