"""Check docstrings, comments and expressions of Python files by CONTRIBUTING's rules of English.

    python tools/language.py megatron_dppo tools     # every hit, then marks per 1,000 words

A mark is a phrase that hides the subject of a sentence: a pronoun instead of a name, a clause
instead of a noun, an archaic word. Few marks are necessary for clear text, not sufficient.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PATTERNS = {
    "clause as a noun": r"[Ww]hat\b(?! (?:happens|if)\b)|[Hh]ow (?:long|far|often|many|much|soon)",
    "pronoun after of": "of (?:which|whom|its own|others)|of (?:them|those)|by itself|themselves",
    "pronoun with a clause": "(?:those|that) (?:of|which|whose|who)|ones? (?:that|which|whose)",
    "vague quantity": "(?:so|as) (?:many|much|far|long|often|few)",
    "condition with where": "where (?:there|it|they|nothing|none|no|one|all|both|some|an?)",
    "archaic verb": "go(?:es)? on|lets? go|br(?:eak|oken|oke|eaks) off|taken? out|in the place of",
    "archaic phrase": "worked out|st(?:ands?|ood) for|h[eo]ld (?:to|against)|as yet",
    "software that speaks": "says?|said|tells?|told|speaks?|spoken|asked|asks",
    "archaic word": "anew|alike|thereof|whereby|whoever|whichever|wherever|besides|beforehand",
    "negation": "[Nn]either|or else|(?:no|any) more",
    "there is": "(?:is|are|was|were) there|there (?:are|was|were)",
    "bare pronoun": "(?:others|the other|one another|none|nothing|nobody)(?! (?:of|[a-z]+s)\\b)",
    "preposition and pronoun": "(?:in|by|from|with|to|on|at|after|before) (?:which|whose|whom)",
}
RULES = {name: re.compile(rf"\b(?:{pattern})\b") for name, pattern in PATTERNS.items()}
RULES["pronoun as a subject"] = re.compile(r"(?:\A|[.!?] )(?:It|They|Those|Others|Nothing|Such)\b")
RULES["argument that is no noun"] = re.compile(
    r"(?m)^ *[*\w]+: (?:of|in|by|to|from|with|for|that|which|how|where|as|is|are|has)\b"
)
PRONOUNS = "it its they them their those these one ones both others which whose so such itself none"
PRONOUN = re.compile(rf"\b(?:{PRONOUNS.replace(' ', '|')}|nothing)\b", re.IGNORECASE)
PRAGMA = re.compile("noqa|type: ignore|fmt:")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Hit(NamedTuple):
    line: int
    rule: str
    text: str


class Counts(NamedTuple):
    words: int
    marks: int
    pronouns: int

    @property
    def marks_per_1000(self) -> float:
        return 1000 * self.marks / max(self.words, 1)

    @property
    def pronouns_per_100(self) -> float:
        return 100 * self.pronouns / max(self.words, 1)


def read_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring and each block of comments."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = item.value if isinstance(item, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield item.lineno, value.value
    block: list[str] = []
    last = first = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not PRAGMA.search(token.string):
            if token.start[0] != last + 1 and block:
                yield first, "\n".join(block)
                block = []
            if not block:
                first = token.start[0]
            last = token.start[0]
            block.append(token.string.lstrip("#").strip())
    if block:
        yield first, "\n".join(block)


def check_texts(source: str) -> tuple[Counts, list[Hit]]:
    """Count words, marks and pronouns of a file. Rules skip code in backticks."""
    words = pronouns = 0
    hits: list[Hit] = []
    for line, text in read_texts(source):
        plain = re.sub(r"``[^`]*``|`[^`]*`", "X", text)
        words += len(text.split())
        pronouns += len(PRONOUN.findall(plain))
        for rule, pattern in RULES.items():
            for match in pattern.finditer(plain):
                row = line + plain.count("\n", 0, match.start())
                hits.append(Hit(row, rule, match.group().strip()))
    return Counts(words, len(hits), pronouns), hits


def check_expressions(source: str) -> list[Hit]:
    """Find comprehensions and assignments of a constructor that hold more than one thought."""
    hits: list[Hit] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, COMPREHENSIONS):
            inner = [*ast.walk(node)][1:]
            if any(isinstance(child, COMPREHENSIONS) for child in inner):
                hits.append(Hit(node.lineno, "nested comprehension", ast.unparse(node)))
            if any(isinstance(child, ast.IfExp) for child in inner):
                hits.append(Hit(node.lineno, "condition in a comprehension", ast.unparse(node)))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for child in ast.walk(node):
                match child:
                    case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                        hits.append(Hit(child.lineno, "several assignments", ast.unparse(child)))
    return hits


def list_files(paths: list[Path]) -> list[Path]:
    """Return the Python files of ``paths``, which are files and folders."""
    folders = [path for path in paths if path.is_dir()]
    files = [path for path in paths if path.is_file()]
    return sorted([*files, *(file for folder in folders for file in folder.rglob("*.py"))])


def add_up(counts: Sequence[Counts]) -> Counts:
    """Return the counts of several files together."""
    columns = zip(*counts, strict=True)
    return Counts(*map(sum, columns))


def main(paths: list[str]) -> int:
    counts: list[Counts] = []
    for file in list_files([Path(path) for path in paths]):
        source = file.read_text(encoding="utf-8")
        file_counts, hits = check_texts(source)
        counts.append(file_counts)
        for hit in sorted([*hits, *check_expressions(source)]):
            print(f"{file}:{hit.line}: {hit.rule}: {hit.text}")
    total = add_up(counts)
    print(f"{total.marks_per_1000:.1f} marks per 1,000 words")
    print(f"{total.pronouns_per_100:.1f} pronouns per 100 words")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
