"""Word problems whose answer is one calculation, as JSONL: what is to be done with two numbers?

    python tools/smollm2/problems.py OUT

writes ``train.jsonl`` and ``held_out.jsonl``. These share no wording, no name, no thing and no calculation: no two
problems have the same numbers, in whatever order. A prompt is a chat with four solved examples, whose numbers no problem
has. Its answer is a calculation such as ``\\boxed{5 + 7}``, and its label the number that the calculation makes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_dppo.process.files import replacing_file

TRAIN, HELD_OUT = 3072, 400
"""Problems of each."""
SEED = 2
KINDS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
"""``data_source`` of a problem, by its operation."""


class Language(NamedTuple):
    """What problems are said with. ``{n}`` is a name, ``{t}`` a thing, and ``{a}`` and ``{b}`` are the numbers."""

    wordings: dict[str, tuple[str, ...]]
    """By operation: ``{a} operation {b}`` is the answer."""
    names: tuple[str, ...]
    things: tuple[str, ...]


LANGUAGE = {
    "train": Language(
        {
            "+": (
                "{n} has {a} {t} and buys {b} more. How many {t} does {n} have now?",
                "{n} found {a} {t} in the morning and {b} {t} in the evening. How many {t} did {n} find?",
                "There are {a} {t} in one box and {b} {t} in another box. How many {t} are there in total?",
                "{n} walked {a} meters, took a rest, and then walked another {b} meters. How far did {n} walk?",
                "A bus has {a} passengers. Then {b} more get in. How many passengers are in the bus?",
                "A plant was {a} centimeters tall and grew {b} centimeters. How tall is it now?",
                "{n} spent {a} euros on food and {b} euros on clothes. How much did {n} spend?",
                "A choir of {a} singers is joined by {b} guests. How many people sing?",
                "{n} collected {a} {t}, and a friend gave {n} {b} more. How many {t} does {n} own?",
                "The first act lasts {a} minutes and the second act {b} minutes. How long is the show?",
                "A tank holds {a} liters of water. {n} pours in {b} liters. How much water does it hold then?",
                "{n} sent {a} letters in May and {b} letters in June. How many letters did {n} send in both months?",
            ),
            "-": (
                "{n} has {a} {t} and gives away {b} of them. How many {t} are left?",
                "There were {a} {t} on the table. {n} took {b} of them. How many {t} remain?",
                "{n} had {a} euros and paid {b} euros for a toy. How many euros does {n} have now?",
                "A baker made {a} rolls and {b} of them burned. How many rolls are good?",
                "Of {a} students, {b} are absent today. How many students are present?",
                "{n} must drive {a} miles and has driven {b} miles so far. How many miles remain?",
                "A coat cost {a} euros and is now {b} euros cheaper. What does it cost now?",
                "{n} baked {a} {t}, and the guests ate {b}. How many {t} did the guests leave?",
                "The tower is {a} meters high, the house {b} meters. How much higher is the tower?",
                "{n} has {a} {t}, which is {b} more than a friend has. How many {t} does the friend have?",
                "A jar with {a} {t} fell, and {b} broke. How many {t} are whole?",
                "{n} needs {a} points to win and has {b} points. How many points does {n} still need?",
            ),
            "*": (
                "{n} has {a} boxes with {b} {t} in each box. How many {t} does {n} have?",
                "{n} buys {b} {t} every day for {a} days. How many {t} does {n} buy?",
                "One cake needs {a} spoons of sugar. How many spoons do {b} cakes need?",
                "A hall has {a} tables, and {b} people sit at each table. How many people are in the hall?",
                "{n} earns {a} euros per hour and works {b} hours. How much does {n} earn?",
                "Every one of {a} cats eats {b} fish. How many fish do they eat together?",
                "A wall has {a} rows of {b} stones. How many stones is the wall made of?",
                "{n} writes {a} lines on every page. How many lines are on {b} pages?",
                "A car has {b} seats. How many people can ride in {a} such cars?",
                "{n} drinks {a} glasses of water a day. How many glasses is that in {b} days?",
                "Each of {a} shelves carries {b} {t}. How many {t} are on the shelves?",
                "A lamp uses {a} watts. How many watts do {b} such lamps use?",
            ),
            "/": (
                "{n} shares {a} {t} equally among {b} friends. How many {t} does each friend get?",
                "{n} puts {a} {t} into bags of {b} {t} each. How many bags are there?",
                "{b} tickets cost {a} euros together. How much is one ticket?",
                "A wire of {a} meters is cut into {b} equal pieces. How long is each piece?",
                "{n} reads {a} pages in {b} days, the same number every day. How many pages is that per day?",
                "A team of {a} players is divided into {b} equal teams. How many players are in each?",
                "{n} plants {a} trees in {b} equal rows. How many trees stand in each row?",
                "A bottle of {a} liters fills {b} glasses alike. How many liters are in a glass?",
                "{a} {t} lie in {b} drawers, equally many in each. How many {t} are in a drawer?",
                "{n} saves {b} euros a week. After how many weeks does {n} have {a} euros?",
                "A boat carries {b} people at a time. How many trips are needed for {a} people?",
                "{n} ran {a} kilometers in {b} equal rounds. How long is one round?",
            ),
        },
        ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Hugo", "Iris", "Jonas"),
        ("apples", "books", "cookies", "marbles", "stickers", "pencils", "coins", "shells", "cards", "buttons"),
    ),
    "held_out": Language(
        {
            "+": (
                "A farmer sold {a} {t} on Monday and {b} {t} on Tuesday. How many {t} were sold altogether?",
                "{n} has {a} points and wins another {b} points. What is the score of {n}?",
                "A train carried {a} people. At a station {b} people got on. How many people are on the train now?",
                "The red team scored {a} points and the blue team scored {b} points. What is the sum of their points?",
                "{n} counted {a} birds before lunch and {b} birds after lunch. How many birds were counted?",
                "A library owned {a} {t} and was given {b} {t}. How many {t} does the library own?",
            ),
            "-": (
                "A shop had {a} {t}. It sold {b}. How many {t} does the shop still have?",
                "{n} wants to read a novel of {a} chapters and has read {b}. How many chapters are left to read?",
                "A rope is {a} meters long. {n} cuts off {b} meters. How long is the rope now?",
                "{n} saved {a} dollars and spent {b} dollars. How much money does {n} have left?",
                "A parking lot has room for {a} cars, and {b} cars stand there. How many cars still fit?",
                "A sack holds {a} pounds of rice. {n} uses {b} pounds. How many pounds stay in the sack?",
            ),
            "*": (
                "A movie costs {a} dollars a person. How much do {b} people pay?",
                "There are {a} rows of chairs with {b} chairs in each row. How many chairs are there?",
                "{n} swims {a} laps every week. How many laps does {n} swim in {b} weeks?",
                "Each of {a} students brings {b} {t}. How many {t} do they bring?",
                "A printer prints {a} sheets a minute. How many sheets does it print in {b} minutes?",
                "{n} packs {b} {t} into every one of {a} baskets. How many {t} are packed?",
            ),
            "/": (
                "{a} {t} are packed into {b} equal crates. How many {t} are in each crate?",
                "{n} paid {a} dollars for {b} shirts of the same price. How much did one shirt cost?",
                "A class of {a} children is split into groups of {b}. How many groups are there?",
                "A machine makes {a} {t} in {b} hours. How many {t} does it make per hour?",
                "{n} cuts a ribbon of {a} inches into strips of {b} inches. How many strips are there?",
                "{b} workers split {a} dollars evenly. How many dollars does each worker receive?",
            ),
        },
        ("Olivia", "Peter", "Quinn", "Rosa", "Sam", "Tina"),
        ("tomatoes", "bottles", "flowers", "eggs", "spoons", "toys"),
    ),
}
EXAMPLES = (
    ("5 balls, then 7 more. How many?", "5 + 7"),
    ("18 sweets for 3 friends. How many each?", "18 / 3"),
    ("25 cups, 9 are taken. How many are left?", "25 - 9"),
    ("4 bags of 6 nuts. How many nuts?", "4 * 6"),
)


class Calculation(NamedTuple):
    """``a`` operation ``b``, whose result is a positive whole number."""

    operation: str
    a: int
    b: int

    @property
    def result(self) -> int:
        a, b = self.a, self.b
        return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[self.operation]


def calculation(operation: str, rng: random.Random) -> Calculation:
    """One that could stand in a word problem of primary school."""
    if operation in "*/":
        a, b = rng.randint(2, 99), rng.randint(2, 19)
        return Calculation(operation, a * b if operation == "/" else a, b)
    a, b = (round(10 ** rng.uniform(0.4, 2.6)) for _ in range(2))
    return Calculation(operation, max(a, b) + (a == b), min(a, b)) if operation == "-" else Calculation(operation, a, b)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text, the smallest first."""
    return tuple(sorted(map(int, re.findall(r"\d+", text))))


def in_examples() -> set[tuple[int, ...]]:
    """The numbers of the solved examples."""
    return {numbers(question) for question, _ in EXAMPLES}


def problems(split: str, count: int, taken: set[tuple[int, ...]]) -> Iterator[dict[str, object]]:
    """Rows of a split, all operations in turn, with numbers that are not ``taken``, and then are."""
    language, rng = LANGUAGE[split], random.Random(f"{SEED} {split}")
    for number in range(count):
        operation = "+-*/"[number % 4]
        while (pair := tuple(sorted((of := calculation(operation, rng))[1:]))) in taken:
            pass
        taken.add(pair)
        wordings = language.wordings[operation]
        names = {"n": rng.choice(language.names), "t": rng.choice(language.things)}
        text = wordings[number // 4 % len(wordings)].format(a=of.a, b=of.b, **names)
        yield {"prompt": chat(text), "label": str(of.result), "data_source": KINDS[operation]}


def chat(question: str) -> list[dict[str, str]]:
    """Messages that show four examples and ask a question."""
    shown = [
        {"role": role, "content": content}
        for asked, answer in EXAMPLES
        for role, content in (("user", asked), ("assistant", f"\\boxed{{{answer}}}"))
    ]
    return [{"role": "system", "content": "Write the calculation."}, *shown, {"role": "user", "content": question}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder to write into")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    taken = in_examples()
    for split, count in (("held_out", HELD_OUT), ("train", TRAIN)):
        rows = [json.dumps(row) + "\n" for row in problems(split, count, taken)]
        with replacing_file(out / f"{split}.jsonl") as draft:
            draft.write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
