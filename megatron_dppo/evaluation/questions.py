"""An evaluation's answers as they are read by people: a file for each question, with all answers to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_dppo.evaluation.answers import ANSWERS
from megatron_dppo.process.files import replacing_directory

FOLDER = "questions"


def write_questions(folder: Path) -> Path:
    """Write ``questions/BENCHMARK/NUMBER-RIGHTofSAMPLES.txt`` from ``answers.jsonl``, in place of what is there.

    The number is the problem's place in its file, from 0: ``gsm8k/0017-2of8.txt`` has two right answers among eight.
    """
    out = folder / FOLDER
    with replacing_directory(out) as draft, (folder / ANSWERS).open("rb") as lines:
        rows = map(json.loads, lines)
        for (benchmark, number), group in groupby(rows, key=lambda row: (row["benchmark"], row["problem"])):
            answers = sorted(group, key=lambda row: row["sample"])
            right = sum(row["correct"] is True for row in answers)
            (place := draft / benchmark.replace("/", "-")).mkdir(exist_ok=True)
            file = place / f"{number:04}-{right}of{len(answers)}.txt"
            # An answer may hold half of a surrogate pair, which UTF-8 has no bytes for.
            file.write_text("\n".join(_text(answers)) + "\n", encoding="utf-8", errors="replace")
    return out


def _text(answers: Sequence[dict[str, Any]]) -> Iterator[str]:
    first = answers[0]
    yield f"{first['benchmark']}, problem {first['problem']}; reference: {first['label']}"
    yield f"\n{first['prompt']}"
    for row in answers:
        verdict = {True: "right", False: "wrong", None: "not scored"}[row["correct"]]
        facts = [verdict, f"reward {row['reward']:g}" if row["reward"] is not None else "no reward"]
        facts += [f"read as {row['extracted']}"] if row["extracted"] is not None else []
        facts.append(f"{row['tokens']} tokens" + (", cut off" if row["finish"] == "length" else ""))
        yield f"\n--- answer {row['sample'] + 1} of {len(answers)}: {', '.join(facts)}\n{row['answer']}"
